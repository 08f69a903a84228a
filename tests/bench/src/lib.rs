//! Implementation of `cargo demo` and `cargo measure`, on the test bed of `tidewatch-testing`.

use std::process::ExitCode;

use anyhow::Context as _;
use tidewatch_testing::{install_crypto, progress};

pub mod demo;
pub mod measure;

/// Runs a command to its end; prints its error on stderr and returns the exit code. Not async, so that the code of its
/// futures is generated once, in this library.
pub fn run_command(command: impl Future<Output = anyhow::Result<()>>) -> ExitCode {
    install_crypto();
    let ended =
        tokio::runtime::Runtime::new().context("build the runtime").and_then(|runtime| runtime.block_on(command));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::print_line(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}
