//! Setup of the measurements with one runtime: KCP, receiver and agent, and many objects under watch.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::{
    core::v1::ConfigMap,
    rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use kube::{
    Api,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tidewatch_api::{
    Watcher,
    names::{AGENT_OBJECT, OWN_MANAGER, SKR_NAMESPACE},
};
use tidewatch_testing::{
    bed::TestBed,
    landscape::{Landscape, Options, Runtime, until},
    progress::Step,
};

use super::Network;

/// The module of the writes, which toggle its unused field `controller`.
pub(super) const MODULE: &str = "template-operator";
const LABEL: &str = "tidewatch.test/watched";

/// Extent of the measurement.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Settings {
    /// Objects under watch besides the product's own
    #[arg(long, default_value_t = 10_000)]
    pub objects: u32,
    /// Writes per second
    #[arg(long, default_value_t = 20)]
    pub rate: u32,
    /// Seconds of one run
    #[arg(long, default_value_t = 60)]
    pub seconds: u32,
    /// Runs
    #[arg(long, default_value_t = 3)]
    pub runs: u32,
    #[command(flatten)]
    pub(super) network: Network,
}

impl Settings {
    pub(super) fn writes(&self) -> u32 {
        self.rate.saturating_mul(self.seconds)
    }

    pub(super) fn pause(&self) -> Duration {
        Duration::from_secs(1) / self.rate.max(1)
    }
}

/// The processes and the runtime of a measurement.
pub(super) struct RuntimeSetup {
    pub(super) runtime: Runtime,
    pub(super) landscape: Arc<Landscape>,
    _bed: TestBed,
}

impl RuntimeSetup {
    pub(super) async fn start(settings: &Settings) -> Result<Self> {
        let bed = TestBed::start().await?;
        let (kcp, cluster) = tokio::try_join!(bed.kcp(), bed.runtime("measured"))?;
        let options = Options { stamps: true, distance: settings.network.distance(), ..Options::default() };
        let landscape = Arc::new(Landscape::prepare(kcp, "kcp-system", options).await?);
        landscape.write_module(MODULE, "1.0.0", "1.1.0").await?;
        let step = Step::begin(format!("writing {} objects", settings.objects));
        write_objects(&cluster.client().await?, settings.objects).await.context("write the objects")?;
        write_watcher(&landscape).await.context("write the Watcher")?;
        step.done();
        landscape.start_receiver().await?;
        let runtime = landscape.register(cluster).await?;
        runtime.start_agent().await?;
        until("the Kyma in the runtime", async || runtime.skr_kyma().await).await?;
        runtime.select(&[MODULE]).await?;
        let setup = Self { runtime, landscape, _bed: bed };
        setup.settle(settings.objects).await?;
        Ok(setup)
    }

    /// Waits until the agent holds all objects and the status names the module.
    pub(super) async fn settle(&self, objects: u32) -> Result<()> {
        until("the agent to hold all objects", async || {
            let (_, page) = self.runtime.with_agent(async |agent| agent.get("/metrics").await).await??;
            let held = page.lines().filter(|line| line.starts_with("tidewatch_agent_objects "));
            let held: f64 = held.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
            Ok((held >= f64::from(objects)).then_some(()))
        })
        .await?;
        until("the module to appear in the status", async || {
            let status = self.runtime.skr_kyma().await?.and_then(|kyma| kyma.status).unwrap_or_default();
            Ok(status.modules().iter().find(|module| module.name == MODULE).map(drop))
        })
        .await
    }
}

/// Writes ConfigMaps under a label of their own, several at a time.
async fn write_objects(client: &kube::Client, objects: u32) -> Result<()> {
    let api = Api::<ConfigMap>::namespaced(client.clone(), "default");
    stream::iter(0..objects)
        .map(|number| {
            let api = api.clone();
            async move {
                let object = json!({
                    "metadata": {"name": format!("watched-{number:05}"), "labels": {LABEL: "true"}},
                    "data": {"number": number.to_string()},
                });
                api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
                Ok::<_, anyhow::Error>(())
            }
        })
        .buffer_unordered(16)
        .try_collect::<()>()
        .await?;
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "measured-objects"},
        "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch"]}],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "measured-objects"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "measured-objects"},
        "subjects": [{"kind": "ServiceAccount", "name": AGENT_OBJECT, "namespace": SKR_NAMESPACE}],
    });
    let apply = PatchParams::apply("test-bed").force();
    Api::<ClusterRole>::all(client.clone()).patch("measured-objects", &apply, &Patch::Apply(&role)).await?;
    Api::<ClusterRoleBinding>::all(client.clone()).patch("measured-objects", &apply, &Patch::Apply(&binding)).await?;
    Ok(())
}

/// Writes a Watcher that puts those objects into the plan.
async fn write_watcher(landscape: &Landscape) -> Result<()> {
    let watcher = json!({
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Watcher", "metadata": {"name": "measured"},
        "spec": {
            "manager": OWN_MANAGER, "labelsToWatch": {LABEL: "true"}, "field": "spec",
            "resourceToWatch": {"group": "", "version": "v1", "resource": "configmaps"},
            "serviceInfo": {"name": "tidewatch-receiver", "namespace": landscape.namespace(), "port": 8443},
            "gateway": {"selector": {}},
        },
    });
    let api = Api::<Watcher>::namespaced(landscape.kcp().client().await?, landscape.namespace());
    api.patch("measured", &PatchParams::apply("operator").force(), &Patch::Apply(&watcher)).await?;
    Ok(())
}
