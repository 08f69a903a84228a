//! Process of the operators' program: crypto provider, command line, run.

use std::process::ExitCode;

use clap::Parser as _;
use tidewatch_cli::Cli;

fn main() -> ExitCode {
    // An error means that a provider is installed already; this binary has only one.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    // Invalid arguments exit here, with code 2 and the errors on stderr.
    Cli::parse().run()
}
