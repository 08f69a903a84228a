//! `completions` and `man`, generated from the definition of the commands.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};
use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use crate::{Cli, exit, output};

/// Arguments of `completions`.
#[derive(Clone, Debug, Args)]
pub struct Completions {
    /// Shell to complete in
    pub shell: Shell,
}

impl Completions {
    pub(crate) fn run(&self) -> Result<u8> {
        let mut command = Cli::command();
        let name = command.get_name().to_owned();
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, name, &mut script);
        output::write(&script)?;
        Ok(exit::SUCCESS)
    }
}

/// Arguments of `man`.
#[derive(Clone, Debug, Args)]
pub struct Man {
    /// Directory for the pages, created if it does not exist
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

impl Man {
    pub(crate) fn run(&self) -> Result<u8> {
        let dir = self.dir.display();
        fs::create_dir_all(&self.dir).with_context(|| format!("create {dir}"))?;
        clap_mangen::generate_to(Cli::command(), &self.dir).with_context(|| format!("write the man pages to {dir}"))?;
        Ok(exit::SUCCESS)
    }
}
