//! `catalog show`.

use anyhow::Result;
use clap::Args;
use jiff::{Timestamp, tz::TimeZone};
use tidewatch_author::view;

use super::LiveFlags;
use crate::{block_on, exit, output};

/// Arguments of `catalog show`.
#[derive(Clone, Debug, Args)]
pub struct Show {
    /// Name of the Kyma in the control plane
    pub kyma: String,

    /// The live catalog.
    #[command(flatten)]
    pub live: LiveFlags,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Show {
    pub(super) fn run(&self) -> Result<u8> {
        let (kyma, objects, releases) = block_on(self.live.viewer(&self.kyma))?;
        let today = Timestamp::now().to_zoned(TimeZone::UTC).date();
        let view = view::view(kyma, &objects, &self.live.restricted(), releases.as_ref(), today);
        output::report(self.json, &view)?;
        Ok(exit::SUCCESS)
    }
}
