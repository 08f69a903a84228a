//! `catalog`: what is wrong with a catalog before it is applied, what it would change, and what a runtime sees of it.

mod check;
mod diff;
mod kcp;
mod show;
mod texts;

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};
use serde::Serialize;

pub use check::Check;
pub use diff::Diff;
pub use kcp::Kcp;
pub use show::Show;
pub use texts::File;

/// What is asked of a catalog.
#[derive(Clone, Debug, Args)]
pub struct Catalog {
    /// One of three.
    #[command(subcommand)]
    pub what: What,
}

/// What can be asked of a catalog.
#[derive(Clone, Debug, Subcommand)]
pub enum What {
    /// Checks ModuleTemplates and ModuleReleaseMetas in files, without a cluster.
    #[command(
        after_help = "Exit codes: 0 nothing is wrong, or warnings only; 1 something is wrong; 2 a file cannot be read."
    )]
    Check(Check),
    /// Shows what the objects in files, applied to KCP, would change for whom.
    #[command(after_help = "Exit codes: 0 no change; 1 changes; 2 trouble.")]
    Diff(Diff),
    /// Shows what one runtime may see of KCP's catalog, and by which rule the rest is hidden.
    #[command(after_help = "Exit codes: 0 shown; 2 trouble.")]
    Show(Show),
}

/// How it ended, as long as there was no trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Nothing,
    Something,
}

impl Catalog {
    /// Runs it. The process ends with 0, with 1 when something was found, and with 2 when there was trouble.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let result = match &self.what {
            What::Check(check) => check.run(),
            What::Diff(diff) => diff.run(),
            What::Show(show) => show.run(),
        };
        match result {
            Ok(Outcome::Nothing) => ExitCode::SUCCESS,
            Ok(Outcome::Something) => ExitCode::from(1),
            Err(error) => {
                eprintln!("tidewatch-receiver catalog: {error:#}");
                ExitCode::from(2)
            }
        }
    }
}

/// Writes what people or programs read to the standard output.
fn print(json: bool, said: &(impl Serialize + ToString)) -> Result<()> {
    let text = if json { serde_json::to_string_pretty(said).context("write JSON")? + "\n" } else { said.to_string() };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("write to stdout")
}
