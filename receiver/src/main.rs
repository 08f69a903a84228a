//! Process of the receiver: crypto provider, configuration, run.

use std::process::ExitCode;

use clap::Parser as _;
use tidewatch_kit::error_levels;
use tidewatch_receiver::{app, config::Config};

/// Returns memory of finished bursts (thousands of handshakes and reconciles) to the system, which the default
/// allocator keeps.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    // An error means that a provider is installed already; this binary has only one.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    // An invalid configuration exits here, with code 2 and the errors on stderr.
    match app::run(Config::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Written to stderr directly, because logging itself may be the cause.
            eprintln!("tidewatch-receiver: {}", error_levels::line(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}
