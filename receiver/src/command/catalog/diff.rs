//! `catalog diff`.

use anyhow::Result;
use clap::Args;
use jiff::Timestamp;

use super::{File, Kcp, Outcome, kcp, print, texts};
use crate::controllers::catalog::{
    Flags, check,
    preview::{self, Judge},
};

/// What is compared with KCP.
#[derive(Clone, Debug, Args)]
pub struct Diff {
    /// Files with YAML or JSON documents; - is the standard input.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<File>,

    /// The files are the whole catalog: what only KCP has is removed.
    #[arg(long)]
    pub whole: bool,

    /// KCP, and which Kymas of it.
    #[command(flatten)]
    pub kcp: Kcp,

    /// Only the Kymas that this label selector selects, as the receiver is told.
    #[arg(long, env = "TIDEWATCH_KYMA_SELECTOR", default_value = "")]
    pub kyma_selector: String,

    /// A removal from more than so many per cent of the runtimes would wait for a confirmation, as the receiver is told.
    #[arg(long, env = "TIDEWATCH_REMOVAL_LIMIT_PERCENT", default_value_t = Flags::default().removal_limit_percent, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub removal_limit_percent: u8,

    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

impl Diff {
    pub(super) fn run(&self) -> Result<Outcome> {
        let objects = check::read(&texts::read(&self.files)?)?;
        let live = kcp::block_on(self.kcp.live(&self.kyma_selector))?;
        let judge = Judge {
            restricted: self.kcp.restricted(),
            removal_limit_percent: self.removal_limit_percent,
            whole: self.whole,
            now: Timestamp::now().as_second(),
        };
        let preview = preview::preview(&live, &objects, &judge);
        print(self.json, &preview)?;
        Ok(if preview.is_change() { Outcome::Something } else { Outcome::Nothing })
    }
}
