//! `rollout`: the ring rollouts of modules in KCP, and the confirmation of a halted one.

use anyhow::{Context as _, Result, bail};
use clap::{Args, Subcommand};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tidewatch_api::names::{PAUSE, RELEASES, ROLLOUTS, annotation};
use tidewatch_author::rollouts::{self, Confirmation, KcpObjects, ViewOptions};
use tidewatch_select::catalog::rollout::RolloutFlags;

use crate::{
    block_on,
    catalog::LiveFlags,
    cluster::{ClusterFlags, within_deadline},
    exit, output,
    windows::WindowFlags,
};

/// Attempts to write a confirmation, each after a change of the ConfigMap by another writer.
const ATTEMPTS: usize = 5;

/// Arguments of `rollout`.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Rollout {
    /// Command other than the list.
    #[command(subcommand)]
    pub action: Option<Action>,

    /// The list.
    #[command(flatten)]
    pub list: List,
}

/// Commands of `rollout`.
#[derive(Clone, Debug, Subcommand)]
pub enum Action {
    /// Confirm that a halted rollout continues
    #[command(after_help = "Exit codes: 0 confirmed; 1 no halted rollout waits for this confirmation, or the control \
        plane cannot be read or written; 2 invalid arguments.")]
    Confirm(Confirm),
}

/// Arguments of the list.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct List {
    /// Show complete rollouts too
    #[arg(long)]
    pub all: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// Control plane with the rollouts.
    #[command(flatten)]
    pub cluster: ClusterFlags,

    /// Label selector that limits the Kymas, as for the receiver
    #[arg(long, env = "TIDEWATCH_KYMA_SELECTOR", default_value = "")]
    pub kyma_selector: String,

    /// Maintenance windows, for which runtimes wait.
    #[command(flatten)]
    pub windows: WindowFlags,

    /// Rules of the rollouts, as for the receiver.
    #[command(flatten)]
    pub rules: RolloutFlags,
}

/// Arguments of `rollout confirm`.
#[derive(Clone, Debug, Args)]
pub struct Confirm {
    /// Identifier that the halted rollout waits for
    pub confirmation: String,

    /// Control plane with the rollouts.
    #[command(flatten)]
    pub cluster: ClusterFlags,
}

impl Rollout {
    pub(crate) fn run(&self) -> Result<u8> {
        match &self.action {
            None => self.list.run(),
            Some(Action::Confirm(confirm)) => confirm.run(),
        }
    }
}

impl List {
    fn run(&self) -> Result<u8> {
        let options = ViewOptions {
            flags: self.rules.clone(),
            kyma_selector: self.kyma_selector.clone(),
            windows: self.windows.read()?,
            all: self.all,
            now: Timestamp::now(),
        };
        let kcp = block_on(self.read(&options))?;
        output::report(self.json, &rollouts::view(&kcp, &options))?;
        Ok(exit::SUCCESS)
    }

    /// Reads the rollouts, and the Kymas and Manifests of the modules with one in progress.
    async fn read(&self, options: &ViewOptions) -> Result<KcpObjects> {
        let client = self.cluster.client().await?;
        let live = LiveFlags { cluster: self.cluster.clone(), restricted_default_modules: Vec::new() };
        let mut kcp = KcpObjects {
            rollouts: live.config_map(&client, ROLLOUTS).await?,
            releases: live.config_map(&client, RELEASES).await?,
            pause: live.config_map(&client, PAUSE).await?,
            catalog: live.objects(&client).await?,
            ..KcpObjects::default()
        };
        let modules = rollouts::modules_in_progress(&kcp, options);
        if !modules.is_empty() {
            kcp.kymas = live.kymas(&client, &self.kyma_selector, |kyma| kyma).await?;
            kcp.manifests = live.manifests(&client, &modules, |manifest| manifest).await?;
        }
        Ok(kcp)
    }
}

impl Confirm {
    fn run(&self) -> Result<u8> {
        let Confirmation { is_known, continues, .. } = block_on(self.confirm())?;
        let already = if is_known { "already confirmed: " } else { "confirmed: " };
        output::write(format!("{already}{continues}\n").as_bytes())?;
        Ok(exit::SUCCESS)
    }

    /// Adds the confirmation to the annotation of the ConfigMap, unless the rollout waits for another one meanwhile.
    async fn confirm(&self) -> Result<Confirmation> {
        let client: Client = self.cluster.client().await?;
        let maps: Api<ConfigMap> = self.cluster.api(&client);
        for _ in 0..ATTEMPTS {
            let map = within_deadline(maps.get_opt(ROLLOUTS)).await;
            let map = map.with_context(|| format!("read the ConfigMap {ROLLOUTS}"))?;
            let confirmation = rollouts::confirm(map.as_ref(), &self.confirmation)?;
            if confirmation.is_known {
                return Ok(confirmation);
            }
            // At this resourceVersion the annotation loses no confirmation that another operator gives meanwhile.
            let version = map.and_then(|map| map.metadata.resource_version);
            let annotations = json!({annotation::CONFIRM: confirmation.annotation});
            let patch = json!({"metadata": {"resourceVersion": version, "annotations": annotations}});
            let params = PatchParams::default();
            let write = async {
                match maps.patch_metadata(ROLLOUTS, &params, &Patch::Merge(&patch)).await {
                    Ok(_) => Ok(true),
                    Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
                    Err(error) => Err(error),
                }
            };
            let is_written = within_deadline(write).await;
            if is_written.with_context(|| format!("annotate the ConfigMap {ROLLOUTS}"))? {
                return Ok(confirmation);
            }
        }
        bail!("the ConfigMap {ROLLOUTS} is changed by another writer all the time")
    }
}
