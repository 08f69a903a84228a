//! The receiver's process: crypto provider, logging, configuration, build, run.

use std::process::ExitCode;

use clap::Parser;
use tidewatch_receiver::{app, config::Config};

fn main() -> ExitCode {
    // An error only says that a provider is installed already; there is one provider in this binary.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let config = Config::parse();
    match app::run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Logs may be what failed, so the last word goes to stderr as it is.
            eprintln!("tidewatch-receiver: {error:#}");
            ExitCode::FAILURE
        }
    }
}
