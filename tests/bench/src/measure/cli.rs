//! Command line of `cargo measure`: figures of the whole system, one line of JSON each on stdout; progress on stderr.

use std::{io::Write as _, process::ExitCode};

use anyhow::bail;
use clap::{Parser, Subcommand};
use tidewatch_testing::{limits, progress};

use super::{
    Figure, Settings, all, catalog, enrolment, event_path, fleet, flood, hostile, idle, knee, module_fleet, modules,
    plain_server_process, preview, replicas, restart, rollout, scale, soak, user_write,
};
use crate::run_command;

/// Measures the whole system on a real KCP; measurements with thousands of runtimes use fake API servers for them.
/// Fails when a figure misses its bar.
#[derive(Parser)]
pub(super) struct Arguments {
    #[command(subcommand)]
    measurement: Measurement,
    /// Report figures that miss their bar without failing
    #[arg(long, global = true)]
    no_enforce: bool,
}

#[derive(Subcommand)]
enum Measurement {
    /// Time from a user's write to the enqueued Kyma, over a plain watch; CPU, memory and API requests
    EventPath(Settings),
    /// Latency of a user's write with and without the agent, also while the receiver refuses or hangs
    UserWrite(Settings),
    /// Writes of an idle system
    Idle {
        #[command(flatten)]
        settings: Settings,
        /// Duration in minutes
        #[arg(long, default_value_t = 10)]
        minutes: u32,
    },
    /// Requests and batched events per CPU second of the receiver, at a steady queue, over a server that only verifies
    ReceiverKnee(knee::Settings),
    /// Memory of the receiver by the number of agents, projected to 5,000
    Fleet(fleet::Settings),
    /// Time from the receiver's start until all changes of its downtime are settled, projected to 5,000 agents
    Restart(restart::Settings),
    /// Several active replicas: cost of a relayed event, loss of a replica and a rolling restart under load, memory
    Replicas(replicas::Settings),
    /// Time from the receiver's start until agents without a certificate have one and their paths are proven, projected
    /// to 5,000
    Enrolment(enrolment::Settings),
    /// Time from a channel move in KCP until every runtime has it, projected to 5,000; requests to the runtimes for it,
    /// and while nothing changes; beside a bare apply to each, and beside lifecycle-manager's way
    Catalog(catalog::Settings),
    /// Time from a user's selection of a module to its last object, from its available manager to the ready module, and from
    /// a registered runtime to its ready Kyma; requests per installed module; beside a plain client
    Modules(modules::Settings),
    /// Installation and upgrade of modules in many runtimes; reconciles, restart, memory and calls with all Manifests present
    ModuleFleet(module_fleet::Settings),
    /// CPU while nothing changes, a moved channel and a restart of one receiver with 5,000 runtimes and their Manifests
    Scale(scale::Settings),
    /// Ring rollout of a failing version of a module until its halt, and of a good one until every runtime has it
    Rollout(rollout::Settings),
    /// Time to pack, render and compare a module of 200 objects with the operators' program
    Preview(preview::Settings),
    /// Latency of other runtimes while one runtime floods
    Flood(flood::Settings),
    /// Latency of well-behaved runtimes, writes to KCP and the receiver's memory while hostile runtimes attack it
    Hostile(hostile::Settings),
    /// Memory and open files of the receiver over an hour, while users, agents, Kymas, plans, channels and certificates change
    Soak(soak::Settings),
    /// All measurements one after the other, beside the figures of the last full run
    All(all::Settings),
    /// The plain server of a floor, started by the measurement itself
    #[command(name = plain_server_process::COMMAND, hide = true)]
    PlainServer,
}

/// Runs the command.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let has_fleet = matches!(
        arguments.measurement,
        Measurement::ReceiverKnee(_)
            | Measurement::Fleet(_)
            | Measurement::Restart(_)
            | Measurement::Replicas(_)
            | Measurement::Enrolment(_)
            | Measurement::Catalog(_)
            | Measurement::ModuleFleet(_)
            | Measurement::Rollout(_)
            | Measurement::Scale(_)
            | Measurement::Flood(_)
            | Measurement::Hostile(_)
            | Measurement::Soak(_)
    );
    if has_fleet {
        limits::raise_open_files();
    }
    run_command(measure(arguments))
}

async fn measure(arguments: Arguments) -> anyhow::Result<()> {
    if let Measurement::All(settings) = &arguments.measurement {
        let mut failed = None;
        let print = &mut |line: &str| {
            if let Err(error) = writeln!(std::io::stdout(), "{line}") {
                failed = Some(error);
            }
        };
        all::measure(settings, print).await?;
        return failed.map_or(Ok(()), |error| Err(error.into()));
    }
    let mut failed = None;
    let mut missed = Vec::new();
    let mut emit = |figure: &Figure| {
        missed.extend(figure.missed());
        if let Err(error) = std::io::stdout().write_all(figure.line().as_bytes()) {
            failed = Some(error);
        }
    };
    match arguments.measurement {
        Measurement::EventPath(settings) => event_path(&settings, &mut emit).await?,
        Measurement::UserWrite(settings) => user_write(&settings, &mut emit).await?,
        Measurement::Idle { settings, minutes } => idle(&settings, minutes, &mut emit).await?,
        Measurement::ReceiverKnee(settings) => knee::measure(&settings, &mut emit).await?,
        Measurement::Fleet(settings) => fleet::measure(&settings, &mut emit).await?,
        Measurement::Restart(settings) => restart::measure(&settings, &mut emit).await?,
        Measurement::Replicas(settings) => replicas::measure(&settings, &mut emit).await?,
        Measurement::Enrolment(settings) => enrolment::measure(&settings, &mut emit).await?,
        Measurement::Catalog(settings) => catalog::measure(&settings, &mut emit).await?,
        Measurement::Modules(settings) => modules::measure(&settings, &mut emit).await?,
        Measurement::ModuleFleet(settings) => module_fleet::measure(&settings, &mut emit).await?,
        Measurement::Scale(settings) => scale::measure(&settings, &mut emit).await?,
        Measurement::Rollout(settings) => rollout::measure(&settings, &mut emit).await?,
        Measurement::Preview(settings) => preview::measure(&settings, &mut emit).await?,
        Measurement::Flood(settings) => flood::measure(&settings, &mut emit).await?,
        Measurement::Hostile(settings) => hostile::measure(&settings, &mut emit).await?,
        Measurement::Soak(settings) => soak::measure(&settings, &mut emit).await?,
        Measurement::All(_) => {}
        Measurement::PlainServer => plain_server_process::serve()?,
    }
    if let Some(error) = failed {
        return Err(error.into());
    }
    if !missed.is_empty() {
        let missed = missed.join(", ");
        if !arguments.no_enforce {
            bail!("figures that miss their bars: {missed}");
        }
        progress::print_line(&format!("figures that miss their bars: {missed}"));
    }
    Ok(())
}
