//! A model of lifecycle-manager beside our receiver: it polls every Kyma that is not ours, and writes to the control plane
//! and to the runtime on each poll, whether something changed or not.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::Namespace, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma,
    crds::runtime_crds,
    names::{SKR_KYMA, SKR_NAMESPACE, field_manager, finalizer, label},
};
use tidewatch_testing::{
    control_plane::{Cluster, ClusterUser},
    landscape::{Landscape, until},
};
use tokio::runtime::Builder;

use crate::installer::apply_lifecycle_managers;

/// The label that selects the Kymas of our receiver.
pub(super) const OURS: (&str, &str) = ("lifecycle", "tidewatch");
/// Interval between two polls.
const POLL: Duration = Duration::from_millis(200);

/// Reconciles until it is dropped.
pub(super) struct LifecycleManager {
    progress: Arc<Mutex<Progress>>,
    ended: Arc<AtomicBool>,
}

/// Results of lifecycle-manager's reconciles.
#[derive(Default)]
struct Progress {
    /// Number of successful reconciles by Kyma.
    reconciles: BTreeMap<String, u64>,
    failures: Vec<String>,
}

/// Returns true if a Kyma belongs to lifecycle-manager: it lacks our label or was handed back.
fn belongs_to_lifecycle_manager(kyma: &Kyma) -> bool {
    let is = |key: &str, value: &str| kyma.labels().get(key).is_some_and(|is| is == value);
    !is(OURS.0, OURS.1) || is(label::HAND_BACK, label::HAND_BACK_DONE)
}

impl LifecycleManager {
    /// Starts to reconcile the Kymas of a landscape; the runtimes have the names of their Kymas.
    pub(super) async fn start(landscape: &Landscape, runtimes: &[&Cluster]) -> Result<Self> {
        let kcp = landscape.kcp().client_as(ClusterUser::Other).await?;
        let kymas = Api::<Kyma>::namespaced(kcp, landscape.namespace());
        let mut clients = BTreeMap::new();
        for cluster in runtimes {
            clients.insert(cluster.name().to_owned(), cluster.client_as(ClusterUser::Other).await?);
        }
        let progress = Arc::<Mutex<Progress>>::default();
        let ended = Arc::<AtomicBool>::default();
        // A separate thread stands in for another process.
        let runtime = Builder::new_current_thread().enable_all().build().context("build its runtime")?;
        let shared = (progress.clone(), ended.clone());
        thread::Builder::new()
            .name("lifecycle-manager".to_owned())
            .spawn(move || runtime.block_on(run(&kymas, &clients, &shared.0, &shared.1)))?;
        Ok(Self { progress, ended })
    }

    /// Waits for two more reconciles of a Kyma: at least one of them began after this call.
    pub(super) async fn reconciles_twice(&self, kyma: &str) -> Result<()> {
        let reconciles = || self.progress.lock().reconciles.get(kyma).copied().unwrap_or_default();
        let before = reconciles();
        let description = format!("lifecycle-manager to act on {kyma}");
        let done = until(&description, async || Ok((reconciles() >= before + 2).then_some(())));
        done.await.with_context(|| format!("failures of lifecycle-manager: {:?}", self.failures()))
    }

    /// Errors of its reconciles.
    pub(super) fn failures(&self) -> Vec<String> {
        self.progress.lock().failures.clone()
    }
}

impl Drop for LifecycleManager {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

async fn run(kymas: &Api<Kyma>, runtimes: &BTreeMap<String, Client>, progress: &Mutex<Progress>, ended: &AtomicBool) {
    while !ended.load(Ordering::Relaxed) {
        for (name, runtime) in runtimes {
            // The label is read once per reconcile: a change meanwhile does not end it.
            let ended = match kymas.get_opt(name).await {
                Ok(Some(kyma)) if belongs_to_lifecycle_manager(&kyma) => reconcile(kymas, &kyma, runtime).await,
                Ok(_) => continue,
                Err(error) => Err(error.into()),
            };
            let mut progress = progress.lock();
            match ended {
                Ok(()) => *progress.reconciles.entry(name.clone()).or_default() += 1,
                Err(error) => progress.failures.push(format!("{name}: {error:#}")),
            }
        }
        tokio::time::sleep(POLL).await;
    }
}

/// One reconcile: first the runtime, then the status of both Kymas.
async fn reconcile(kymas: &Api<Kyma>, kyma: &Kyma, runtime: &Client) -> Result<()> {
    let ours = PatchParams { field_manager: Some(field_manager::LIFECYCLE_OPERATOR.to_owned()), ..Default::default() };
    let marks =
        json!({"metadata": {"finalizers": [finalizer::KYMA], "labels": {label::MANAGED_BY: label::MANAGED_BY_KCP}}});
    kymas.patch(&kyma.name_any(), &ours, &Patch::Merge(marks)).await.context("mark the Kyma")?;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SKR_NAMESPACE,
        "labels": {"istio-injection": "enabled", "namespaces.warden.kyma-project.io/validate": "enabled", label::MANAGED_BY: label::MANAGED_BY_SKR}}});
    let params = PatchParams::apply(field_manager::SYNC_CONTEXT).force();
    let namespaces = Api::<Namespace>::all(runtime.clone());
    namespaces.patch(SKR_NAMESPACE, &params, &Patch::Apply(namespace)).await.context("apply the namespace")?;
    install_missing_crds(runtime).await?;
    apply_lifecycle_managers(runtime).await.context("apply its six objects")?;
    let skr = Api::<Kyma>::namespaced(runtime.clone(), SKR_NAMESPACE);
    if skr.get_opt(SKR_KYMA).await?.is_none() {
        let made = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "spec": kyma.spec, "metadata": {
            "name": SKR_KYMA, "labels": {label::WATCHED_BY: label::WATCHED_BY_KYMA, label::MANAGED_BY: label::MANAGED_BY_SKR}}});
        skr.create(&PostParams::default(), &serde_json::from_value(made)?).await.context("make the Kyma")?;
    }
    let params = PatchParams::apply(field_manager::LIFECYCLE).force();
    let patch = status(kyma, &kyma.name_any());
    kymas.patch_status(&kyma.name_any(), &params, &Patch::Apply(patch)).await.context("write the status")?;
    let patch = status(kyma, SKR_KYMA);
    skr.patch_status(SKR_KYMA, &params, &Patch::Apply(patch)).await.context("write the runtime's status")?;
    Ok(())
}

/// Installs the CRDs that are missing in a runtime.
async fn install_missing_crds(runtime: &Client) -> Result<()> {
    let api = Api::<CustomResourceDefinition>::all(runtime.clone());
    let names: Vec<_> = runtime_crds().iter().map(kube::ResourceExt::name_any).collect();
    let there = api.list_metadata(&ListParams::default()).await?;
    if names.iter().all(|name| there.items.iter().any(|found| found.name_any() == *name)) {
        return Ok(());
    }
    for crd in runtime_crds() {
        let params = PatchParams::apply(field_manager::LIFECYCLE).force();
        api.patch(&crd.name_any(), &params, &Patch::Apply(&crd)).await.context("apply a definition")?;
    }
    until("the definitions to be served", async || {
        let served = Api::<Kyma>::namespaced(runtime.clone(), SKR_NAMESPACE).list(&ListParams::default()).await;
        Ok(served.is_ok().then_some(()))
    })
    .await
}

/// A status with the current time, and with exactly the conditions that lifecycle-manager knows.
fn status(kyma: &Kyma, name: &str) -> Value {
    let conditions: Vec<_> = ["CRDsSync", "Modules", "ModuleCatalog", "SKRWebhook"]
        .into_iter()
        .map(|kind| {
            json!({"type": kind, "status": "True", "reason": "Ready", "message": "as lifecycle-manager says it",
                "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": kyma.metadata.generation})
        })
        .collect();
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "metadata": {"name": name}, "status": {
        "state": "Ready", "conditions": conditions, "modules": [],
        "lastOperation": {"operation": "kyma is ready", "lastUpdateTime": Timestamp::now().to_string()},
    }})
}
