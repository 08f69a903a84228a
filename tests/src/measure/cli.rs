//! The command line of `cargo measure`: figures of the whole system, one line of JSON each on stdout; progress goes to stderr.

use std::{io::Write as _, process::ExitCode};

use anyhow::bail;
use clap::{Parser, Subcommand};

use super::{Figure, Settings, apart, catalog, enrolment, event_path, fleet, flood, idle, knee, restart, user_write};
use crate::{limits, progress, run_command};

/// For thousands of agents: a few for each.
const OPEN_FILES: u64 = 1 << 16;

/// Measures the whole system on a real KCP; where there are thousands of runtimes, these are light fakes. Ends with an error when a figure misses its bar.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
    /// Tell what misses its bar, and end well all the same.
    #[arg(long, global = true)]
    no_enforce: bool,
}

#[derive(Subcommand)]
enum What {
    /// From a user's write to the Kyma being wanted, over a plain watch; CPU, memory and API calls.
    EventPath(Settings),
    /// Latency of a user's write with and without the agent, also while the receiver refuses or hangs.
    UserWrite(Settings),
    /// Writes while nobody does anything.
    Idle {
        #[command(flatten)]
        settings: Settings,
        /// How long.
        #[arg(long, default_value_t = 10)]
        minutes: u32,
    },
    /// Requests and batched events per CPU second of the receiver, at a steady queue, beside a server that only verifies.
    ReceiverKnee(knee::Settings),
    /// Memory of the receiver by the number of agents, projected to 5,000.
    Fleet(fleet::Settings),
    /// From the receiver's start until everything that changed while it was away is settled, projected to 5,000 agents.
    Restart(restart::Settings),
    /// From the receiver's start until agents that have no certificate have one and their paths are proven, projected to 5,000.
    Enrolment(enrolment::Settings),
    /// From a channel that moves in KCP until every runtime has it, projected to 5,000; what runtimes are asked for it, and while nothing
    /// moves; beside a bare apply to each, and beside the incumbent's way.
    Catalog(catalog::Settings),
    /// Latency of the others while one runtime floods.
    Flood(flood::Settings),
    /// The floor of a measurement, which starts it.
    #[command(name = apart::COMMAND, hide = true)]
    PlainServer,
}

/// Runs the command.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let is_crowded = matches!(
        arguments.what,
        What::ReceiverKnee(_)
            | What::Fleet(_)
            | What::Restart(_)
            | What::Enrolment(_)
            | What::Catalog(_)
            | What::Flood(_)
    );
    if is_crowded {
        limits::raise_open_files(OPEN_FILES);
    }
    run_command(measure(arguments))
}

async fn measure(arguments: Arguments) -> anyhow::Result<()> {
    let (mut failed, mut missed) = (None, Vec::new());
    let mut tell = |figure: &Figure| {
        missed.extend(figure.missed());
        if let Err(error) = std::io::stdout().write_all(figure.line().as_bytes()) {
            failed = Some(error);
        }
    };
    match arguments.what {
        What::EventPath(settings) => event_path(&settings, &mut tell).await?,
        What::UserWrite(settings) => user_write(&settings, &mut tell).await?,
        What::Idle { settings, minutes } => idle(&settings, minutes, &mut tell).await?,
        What::ReceiverKnee(settings) => knee::measure(&settings, &mut tell).await?,
        What::Fleet(settings) => fleet::measure(&settings, &mut tell).await?,
        What::Restart(settings) => restart::measure(&settings, &mut tell).await?,
        What::Enrolment(settings) => enrolment::measure(&settings, &mut tell).await?,
        What::Catalog(settings) => catalog::measure(&settings, &mut tell).await?,
        What::Flood(settings) => flood::measure(&settings, &mut tell).await?,
        What::PlainServer => apart::serve()?,
    }
    if let Some(error) = failed {
        return Err(error.into());
    }
    if !missed.is_empty() {
        let missed = missed.join(", ");
        if !arguments.no_enforce {
            bail!("these miss their bars: {missed}");
        }
        progress::say(&format!("these miss their bars: {missed}"));
    }
    Ok(())
}
