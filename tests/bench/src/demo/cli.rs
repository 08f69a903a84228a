//! Command line of `cargo demo`: the main use case on real control planes.

use std::{io::Write as _, process::ExitCode};

use clap::Parser;
use serde_json::json;
use tidewatch_testing::progress::print_line;

use super::Demo;
use crate::run_command;

/// Starts KCP, two runtimes, receiver and agents, and shows how they react to changes.
#[derive(Parser)]
struct Arguments {
    /// End after the acts instead of staying up
    #[arg(long)]
    once: bool,
    /// Print one line of JSON with the figures on stdout
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn main() -> ExitCode {
    run_command(play(Arguments::parse()))
}

async fn play(arguments: Arguments) -> anyhow::Result<()> {
    tokio::select! {
        ended = show(&arguments) => ended,
        interrupted = tokio::signal::ctrl_c() => Ok(interrupted?),
    }
}

async fn show(arguments: &Arguments) -> anyhow::Result<()> {
    let demo = Demo::start().await?;
    let acts = demo.play().await?;
    if arguments.json {
        let mut line = json!({"figure": "demo", "acts": acts}).to_string();
        line.push('\n');
        std::io::stdout().write_all(line.as_bytes())?;
    }
    if !arguments.once {
        print_line(&demo.invite().await?);
        std::future::pending::<()>().await;
    }
    Ok(())
}
