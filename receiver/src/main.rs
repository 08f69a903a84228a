//! The receiver's process: crypto provider, command line, run.

use std::process::ExitCode;

use tidewatch_receiver::{app, command::Command};

/// With the system's, what thousands of handshakes and passes took and gave back stays with the process.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    // An error only says that a provider is installed already; there is one provider in this binary.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let config = match Command::parse() {
        Command::Run(config) => config,
        Command::Catalog(catalog) => return catalog.run(),
        Command::Fleet(fleet) => return fleet.run(),
        Command::RotateCa(rotate) => return rotate.run(),
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
