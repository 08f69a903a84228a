//! `catalog diff`.

use std::fmt;

use anyhow::Result;
use clap::Args;
use jiff::Timestamp;
use serde::Serialize;
use tidewatch_api::Manifest;
use tidewatch_author::{
    check::{self, Objects},
    effects::{self, Fleet, KymaEffects},
    preview::{self, Live, Preview, PreviewOptions},
};
use tidewatch_select::catalog::{removal_guard::DEFAULT_LIMIT_PERCENT, rollout::RolloutFlags};

use super::{LiveFlags, files};
use crate::{block_on, exit, output, windows::WindowFlags};

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
    #[arg(long, env = "TIDEWATCH_REMOVAL_LIMIT_PERCENT", default_value_t = DEFAULT_LIMIT_PERCENT, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub removal_limit_percent: u8,

    /// Maximum number of Kymas that each effect names
    #[arg(long, value_name = "KYMAS", default_value_t = 10)]
    pub limit: usize,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// Maintenance windows, for which upgrades wait.
    #[command(flatten)]
    pub windows: WindowFlags,

    /// Rules of the ring rollouts, as for the receiver.
    #[command(flatten)]
    pub rollout: RolloutFlags,
}

/// Result of `catalog diff`.
#[derive(Clone, Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    catalog: Preview,
    kymas: KymaEffects,
}

impl Diff {
    pub(super) fn run(&self) -> Result<u8> {
        let objects = check::read(&files::read(&self.files)?)?;
        let options = PreviewOptions {
            restricted: self.live.restricted(),
            removal_limit_percent: self.removal_limit_percent,
            whole: self.whole,
            rollout: self.rollout.clone(),
            windows: self.windows.read()?,
            now: Timestamp::now().as_second(),
        };
        let (live, fleet) = block_on(self.read(&objects, &options))?;
        let catalog = preview::preview(&live, &objects, &options);
        let kymas = effects::effects(&live, &objects, &options, fleet, self.limit);
        let report = Report { catalog, kymas };
        output::report(self.json, &report)?;
        let is_change = report.catalog.is_change() || report.kymas.is_change();
        Ok(if is_change { exit::FAILURE } else { exit::SUCCESS })
    }

    /// Reads the catalog and the Kymas, and the Manifests of the modules that the objects change.
    async fn read(&self, objects: &Objects, options: &PreviewOptions) -> Result<(Live, Fleet)> {
        let client = self.live.cluster.client().await?;
        let (live, kymas) = self.live.read(&client, &self.kyma_selector).await?;
        let modules = preview::changed_modules(&live.objects, objects, options);
        let without_status = |mut manifest: Manifest| {
            (manifest.status, manifest.metadata.managed_fields) = (None, None);
            manifest
        };
        let manifests = self.live.manifests(&client, &modules, without_status).await?;
        Ok((live, Fleet { kymas, manifests, kyma_selector: self.kyma_selector.clone() }))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", self.catalog, self.kymas)
    }
}
