//! `catalog show`.

use anyhow::Result;
use clap::Args;

use super::{Kcp, Outcome, kcp, print};
use crate::controllers::catalog::view;

/// Whose catalog is shown.
#[derive(Clone, Debug, Args)]
pub struct Show {
    /// The Kyma in KCP.
    pub kyma: String,

    /// KCP.
    #[command(flatten)]
    pub kcp: Kcp,

    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

impl Show {
    pub(super) fn run(&self) -> Result<Outcome> {
        let (viewer, objects, releases) = kcp::block_on(self.kcp.viewer(&self.kyma))?;
        let view = view::view(&viewer, &objects, &self.kcp.restricted(), releases.as_ref());
        print(self.json, &view)?;
        Ok(Outcome::Nothing)
    }
}
