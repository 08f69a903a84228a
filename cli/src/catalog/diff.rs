//! `catalog diff`.

use anyhow::Result;
use clap::Args;
use jiff::Timestamp;
use tidewatch_receiver::controllers::catalog::{
    Flags, check,
    preview::{self, PreviewOptions},
};

use super::{LiveFlags, files};
use crate::{block_on, exit, output};

/// Arguments of `catalog diff`.
#[derive(Clone, Debug, Args)]
pub struct Diff {
    /// Files with YAML or JSON documents; - for standard input
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<String>,

    /// The files are the whole catalog: objects only in the control plane are removed
    #[arg(long)]
    pub whole: bool,

    /// The live catalog.
    #[command(flatten)]
    pub live: LiveFlags,

    /// Label selector that limits the Kymas, as for the receiver
    #[arg(long, env = "TIDEWATCH_KYMA_SELECTOR", default_value = "")]
    pub kyma_selector: String,

    /// Per cent of the runtimes above which a removal waits for a confirmation, as for the receiver
    #[arg(long, env = "TIDEWATCH_REMOVAL_LIMIT_PERCENT", default_value_t = Flags::default().removal_limit_percent, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub removal_limit_percent: u8,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Diff {
    pub(super) fn run(&self) -> Result<u8> {
        let objects = check::read(&files::read(&self.files)?)?;
        let live = block_on(self.live.read(&self.kyma_selector))?;
        let options = PreviewOptions {
            restricted: self.live.restricted(),
            removal_limit_percent: self.removal_limit_percent,
            whole: self.whole,
            now: Timestamp::now().as_second(),
        };
        let preview = preview::preview(&live, &objects, &options);
        output::report(self.json, &preview)?;
        Ok(if preview.is_change() { exit::FAILURE } else { exit::SUCCESS })
    }
}
