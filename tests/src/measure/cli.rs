//! The command line of `cargo measure`: figures of the whole system, one line of JSON each on stdout; progress goes to stderr.

use std::{io::Write as _, process::ExitCode};

use clap::{Parser, Subcommand};

use super::{Figure, Settings, event_path, idle, user_write};
use crate::run_command;

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

/// Runs the command.
#[must_use]
pub fn main() -> ExitCode {
    run_command(measure(Arguments::parse().what))
}

async fn measure(what: What) -> anyhow::Result<()> {
    let mut failed = None;
    let mut tell = |figure: &Figure| {
        if let Err(error) = std::io::stdout().write_all(figure.line().as_bytes()) {
            failed = Some(error);
        }
    };
    match what {
        What::EventPath(settings) => event_path(&settings, &mut tell).await?,
        What::UserWrite(settings) => user_write(&settings, &mut tell).await?,
        What::Idle { settings, minutes } => idle(&settings, minutes, &mut tell).await?,
    }
    failed.map_or(Ok(()), |error| Err(error.into()))
}
