//! `tidewatch`, the operators' program: queries a running receiver and its agents, rotates the CA, shows and
//! confirms rollouts, checks catalogs, and packs modules.
//!
//! This crate parses arguments, opens connections and renders results. Reports have the form of the crate `contract`;
//! catalog rules and reading of modules are those of the crates `author`, `select` and `engine`.
//!
//! | module | responsibility |
//! |---|---|
//! | [`catalog`] | `catalog check`, `catalog diff`, `catalog show` |
//! | [`fleet`] | `fleet` |
//! | [`shards`] | `shards` |
//! | [`module`] | `module pack`, `module show`, `module render`, `module diff` |
//! | [`rollout`] | `rollout`, `rollout confirm` |
//! | [`rotate_ca`] | `rotate-ca` |
//! | [`status`] | `status` |
//! | [`generate`] | `completions` and `man` |
//! | [`admin`] | the connection to a receiver's admin listener |
//! | [`cluster`] | the client of KCP |
//! | [`windows`] | flags of the maintenance windows |
//! | `port_forward` | connections to ports of pods, through an API server |
//! | `request` | one HTTP request over a connection |
//! | `output` | standard output |
//!
//! # Example
//!
//! ```
//! use clap::Parser as _;
//! use tidewatch_cli::{Cli, Command};
//!
//! let cli = Cli::try_parse_from(["tidewatch", "fleet", "--json"])?;
//! assert!(matches!(cli.command, Command::Fleet(_)));
//! # Ok::<_, clap::Error>(())
//! ```

pub mod admin;
pub mod catalog;
pub mod cluster;
pub mod fleet;
pub mod generate;
pub mod module;
mod output;
mod port_forward;
mod request;
pub mod rollout;
pub mod rotate_ca;
pub mod shards;
pub mod status;
pub mod windows;

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use tokio::runtime;

/// Exit codes, which the help of each command documents. Invalid arguments exit with 2 in any command, as clap does.
pub mod exit {
    /// Success; for `catalog`, nothing was found.
    pub const SUCCESS: u8 = 0;
    /// No response, or a refusal; for `catalog` and `module diff`, errors or changes were found.
    pub const FAILURE: u8 = 1;
    /// `catalog` and `module diff` only: files, KCP or a version could not be read.
    pub const UNREADABLE: u8 = 2;
    /// `fleet --check` only: an event path is broken.
    pub const BROKEN_PATH: u8 = 3;
    /// `shards --check` only: a shard or the fleet role has no holder.
    pub const UNHELD_SHARD: u8 = 3;
    /// `fleet --check` and `shards --check` only: the receiver is not the active one.
    pub const NOT_ACTIVE: u8 = 4;
    /// `module` only: the folder or the artefact is not a valid module.
    pub const INVALID_MODULE: u8 = 3;
}

/// Operates Tidewatch: shows runtimes, agents and rollouts, rotates the CA, checks module catalogs, and packs modules
#[derive(Clone, Debug, Parser)]
#[command(name = "tidewatch", version, arg_required_else_help = true)]
pub struct Cli {
    /// Command to execute.
    #[command(subcommand)]
    pub command: Command,
}

/// Commands of the program.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Show every runtime of the fleet: event path, last heartbeat, canary, waiting, parked, gaps
    #[command(after_help = "Exit codes: 0 shown; 1 no response; 2 invalid arguments.\n\
        With --check also: 3 an event path is broken; 4 the receiver is not active.")]
    Fleet(fleet::Fleet),
    /// Show the shards of the fleet: holder, its last renewal, runtimes, last move; and the holder of the fleet role
    #[command(after_help = "Exit codes: 0 shown; 1 no response; 2 invalid arguments.\n\
        With --check also: 3 a shard or the fleet role has no holder; 4 the receiver is not active.")]
    Shards(shards::Shards),
    /// Rotate the root of the built-in CA, and show progress and stragglers until the rotation has ended
    #[command(
        after_help = "Exit codes: 0 the rotation has ended, or has begun with --no-wait; 1 it was refused, or the \
        receiver does not respond; 2 invalid arguments.\nThe rotation continues if this command is interrupted."
    )]
    RotateCa(rotate_ca::RotateCa),
    /// Show the ring rollouts of modules in progress: ring, counts of the runtimes, what each waits for; or confirm a halted one
    #[command(
        after_help = "Exit codes: 0 shown; 1 the control plane or the file of the maintenance windows cannot be \
        read; 2 invalid arguments."
    )]
    Rollout(rollout::Rollout),
    /// Check a module catalog, compare it with the live one, or show the part visible to a runtime
    #[command(subcommand)]
    Catalog(catalog::Catalog),
    /// Pack a module's version as an OCI artefact, show it, print its objects, or compare two versions
    #[command(subcommand)]
    Module(module::Module),
    /// Show the agent of one runtime: event path, watches, certificate
    #[command(after_help = "Exit codes: 0 shown; 1 no response; 2 invalid arguments.")]
    Status(status::StatusCommand),
    /// Print a completion script for a shell
    #[command(after_help = "Exit codes: 0 printed; 1 standard output cannot be written; 2 invalid arguments.")]
    Completions(generate::Completions),
    /// Write the man pages of all commands to a directory
    #[command(after_help = "Exit codes: 0 written; 1 the directory cannot be written; 2 invalid arguments.")]
    Man(generate::Man),
}

impl Cli {
    /// Executes the command. Errors are written to stderr; the exit code is one of [`exit`].
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let (name, failure, result) = match &self.command {
            Command::Fleet(fleet) => ("fleet", exit::FAILURE, fleet.run()),
            Command::Shards(shards) => ("shards", exit::FAILURE, shards.run()),
            Command::RotateCa(rotate) => ("rotate-ca", exit::FAILURE, rotate.run()),
            Command::Rollout(rollout) => ("rollout", exit::FAILURE, rollout.run()),
            Command::Catalog(catalog) => ("catalog", exit::UNREADABLE, catalog.run()),
            Command::Module(module) => ("module", exit::FAILURE, module.run()),
            Command::Status(status) => ("status", exit::FAILURE, status.run()),
            Command::Completions(completions) => ("completions", exit::FAILURE, completions.run()),
            Command::Man(man) => ("man", exit::FAILURE, man.run()),
        };
        ExitCode::from(result.unwrap_or_else(|error| {
            eprintln!("tidewatch {name}: {error:#}");
            failure
        }))
    }
}

/// Drives a command's network calls on this thread.
fn block_on<T>(call: impl Future<Output = Result<T>>) -> Result<T> {
    let executor = runtime::Builder::new_current_thread().enable_all().build().context("start the async executor")?;
    executor.block_on(call)
}

#[cfg(test)]
mod tests;
