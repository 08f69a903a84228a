//! The command line of `cargo measure`: figures of the whole system, one line of JSON each on stdout; progress goes to stderr.

use std::{io::Write as _, process::ExitCode};

use clap::{Parser, Subcommand};

use super::{Figure, Settings, event_path, idle, user_write};
use crate::progress::say;

/// Measures the whole system on real control planes.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// From a user's write to the Kyma being wanted, over a plain watch; CPU, memory and API calls.
    EventPath(Settings),
    /// Latency of a user's write with and without the agent.
    UserWrite(Settings),
    /// Writes while nobody does anything.
    Idle {
        #[command(flatten)]
        settings: Settings,
        /// How long.
        #[arg(long, default_value_t = 10)]
        minutes: u32,
    },
}

/// Runs the command. Not async, so that the code of its futures is made once, in this library.
#[must_use]
pub fn main() -> ExitCode {
    crate::install_crypto();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            say(&format!("build the runtime: {error}"));
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(run())
}

async fn run() -> ExitCode {
    let mut failed = None;
    let mut tell = |figure: &Figure| {
        if let Err(error) = std::io::stdout().write_all(figure.line().as_bytes()) {
            failed = Some(error);
        }
    };
    let measured = match Arguments::parse().what {
        What::EventPath(settings) => event_path(&settings, &mut tell).await,
        What::UserWrite(settings) => user_write(&settings, &mut tell).await,
        What::Idle { settings, minutes } => idle(&settings, minutes, &mut tell).await,
    };
    match measured.and_then(|()| failed.map_or(Ok(()), |error| Err(error.into()))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}
