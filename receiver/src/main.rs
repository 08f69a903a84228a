//! The receiver's process: crypto provider, command line, run.

use std::process::ExitCode;

use tidewatch_receiver::{app, command::Command};

fn main() -> ExitCode {
    // An error only says that a provider is installed already; there is one provider in this binary.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let config = match Command::parse() {
        Command::Run(config) => config,
        Command::Fleet(fleet) => return fleet.run(),
    };
    match app::run(*config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Logs may be what failed, so the last word goes to stderr as it is.
            eprintln!("tidewatch-receiver: {error:#}");
            ExitCode::FAILURE
        }
    }
}
