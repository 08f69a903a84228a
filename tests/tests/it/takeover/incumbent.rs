//! The incumbent as it acts beside us on every Kyma that is not ours: poll after poll it writes to the control plane and to the
//! runtime, whether something changed or not.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
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
use serde_json::{Value, json};
use tidewatch_shared::{
    api::{Kyma, crds::runtime_crds},
    names::{SKR_KYMA, SKR_NAMESPACE, field_manager, finalizer, label},
};
use tidewatch_tests::{
    control_plane::{Cluster, Person},
    landscape::{Landscape, until},
};
use tokio::runtime::Builder;

use crate::installer::apply_incumbents;

/// What selects the Kymas that are ours.
pub(super) const OURS: (&str, &str) = ("lifecycle", "tidewatch");
/// From one round to the next.
const POLL: Duration = Duration::from_millis(200);

/// Acts until it is dropped.
pub(super) struct Incumbent {
    told: Arc<Mutex<Told>>,
    ended: Arc<AtomicBool>,
}

/// What became of its passes.
#[derive(Default)]
struct Told {
    /// Those that ended well, by Kyma.
    passes: BTreeMap<String, u64>,
    failures: Vec<String>,
}

/// Whether a Kyma is the incumbent's: one that is not ours, or was handed back.
fn is_its(kyma: &Kyma) -> bool {
    let is = |key: &str, value: &str| kyma.labels().get(key).is_some_and(|is| is == value);
    !is(OURS.0, OURS.1) || is(label::HAND_BACK, label::HAND_BACK_DONE)
}

impl Incumbent {
    /// Begins to act on the Kymas of a landscape, whose runtimes these are, by the name of their Kymas.
    pub(super) async fn start(landscape: &Landscape, runtimes: &[&Cluster]) -> Result<Self> {
        let kcp = landscape.kcp().client_as(Person::Other).await?;
        let kymas = Api::<Kyma>::namespaced(kcp, landscape.namespace());
        let mut clients = BTreeMap::new();
        for cluster in runtimes {
            clients.insert(cluster.name().to_owned(), cluster.client_as(Person::Other).await?);
        }
        let (told, ended) = (Arc::<Mutex<Told>>::default(), Arc::<AtomicBool>::default());
        // On a thread of its own, as another process would be.
        let runtime = Builder::new_current_thread().enable_all().build().context("build its runtime")?;
        let shared = (told.clone(), ended.clone());
        thread::Builder::new()
            .name("incumbent".to_owned())
            .spawn(move || runtime.block_on(run(&kymas, &clients, &shared.0, &shared.1)))?;
        Ok(Self { told, ended })
    }

    /// Waits until it has done two more passes over a Kyma: one of them began after this was asked.
    pub(super) async fn acts_on(&self, kyma: &str) -> Result<()> {
        let passes = || self.told.lock().unwrap().passes.get(kyma).copied().unwrap_or_default();
        let before = passes();
        let what = format!("the incumbent to act on {kyma}");
        let acted = until(&what, async || Ok((passes() >= before + 2).then_some(())));
        acted.await.with_context(|| format!("its failures: {:?}", self.failures()))
    }

    /// What went wrong in its passes.
    pub(super) fn failures(&self) -> Vec<String> {
        self.told.lock().unwrap().failures.clone()
    }
}

impl Drop for Incumbent {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

async fn run(kymas: &Api<Kyma>, runtimes: &BTreeMap<String, Client>, told: &Mutex<Told>, ended: &AtomicBool) {
    while !ended.load(Ordering::Relaxed) {
        for (name, runtime) in runtimes {
            // Read once for each pass: a label that moves meanwhile does not end it.
            let ended = match kymas.get_opt(name).await {
                Ok(Some(kyma)) if is_its(&kyma) => pass(kymas, &kyma, runtime).await,
                Ok(_) => continue,
                Err(error) => Err(error.into()),
            };
            let mut told = told.lock().unwrap();
            match ended {
                Ok(()) => *told.passes.entry(name.clone()).or_default() += 1,
                Err(error) => told.failures.push(format!("{name}: {error:#}")),
            }
        }
        tokio::time::sleep(POLL).await;
    }
}

/// One pass: the runtime first, then what both Kymas say.
async fn pass(kymas: &Api<Kyma>, kyma: &Kyma, runtime: &Client) -> Result<()> {
    let ours = PatchParams { field_manager: Some(field_manager::LIFECYCLE_OPERATOR.to_owned()), ..Default::default() };
    let marks =
        json!({"metadata": {"finalizers": [finalizer::KYMA], "labels": {label::MANAGED_BY: label::MANAGED_BY_KCP}}});
    kymas.patch(&kyma.name_any(), &ours, &Patch::Merge(marks)).await.context("mark the Kyma")?;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SKR_NAMESPACE,
        "labels": {"istio-injection": "enabled", "namespaces.warden.kyma-project.io/validate": "enabled", label::MANAGED_BY: label::MANAGED_BY_SKR}}});
    let params = PatchParams::apply(field_manager::SYNC_CONTEXT).force();
    let namespaces = Api::<Namespace>::all(runtime.clone());
    namespaces.patch(SKR_NAMESPACE, &params, &Patch::Apply(namespace)).await.context("apply the namespace")?;
    definitions(runtime).await?;
    apply_incumbents(runtime).await.context("apply its six objects")?;
    let skr = Api::<Kyma>::namespaced(runtime.clone(), SKR_NAMESPACE);
    if skr.get_opt(SKR_KYMA).await?.is_none() {
        let made = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "spec": kyma.spec, "metadata": {
            "name": SKR_KYMA, "labels": {label::WATCHED_BY: label::WATCHED_BY_KYMA, label::MANAGED_BY: label::MANAGED_BY_SKR}}});
        skr.create(&PostParams::default(), &serde_json::from_value(made)?).await.context("make the Kyma")?;
    }
    let params = PatchParams::apply(field_manager::LIFECYCLE).force();
    let said = status(kyma, &kyma.name_any());
    kymas.patch_status(&kyma.name_any(), &params, &Patch::Apply(said)).await.context("write the status")?;
    let said = status(kyma, SKR_KYMA);
    skr.patch_status(SKR_KYMA, &params, &Patch::Apply(said)).await.context("write the runtime's status")?;
    Ok(())
}

/// The definitions, where they are missing.
async fn definitions(runtime: &Client) -> Result<()> {
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

/// A status whose time is always now, and whose conditions are those that it knows and no others.
fn status(kyma: &Kyma, name: &str) -> Value {
    let conditions: Vec<_> = ["CRDsSync", "Modules", "ModuleCatalog", "SKRWebhook"]
        .into_iter()
        .map(|kind| {
            json!({"type": kind, "status": "True", "reason": "Ready", "message": "as the incumbent says it",
                "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": kyma.metadata.generation})
        })
        .collect();
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "metadata": {"name": name}, "status": {
        "state": "Ready", "conditions": conditions, "modules": [],
        "lastOperation": {"operation": "kyma is ready", "lastUpdateTime": Timestamp::now().to_string()},
    }})
}
