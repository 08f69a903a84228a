//! The sample modules and their operator, applied by a plain client.

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use k8s_openapi::api::{
    apps::v1::{Deployment, StatefulSet},
    core::v1::Pod,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
    core::GroupVersionKind,
    discovery::{self, Scope},
};
use serde_json::json;
use tidewatch_testing::{
    bed::{self, TestBed},
    kubelet::{Kubelet, Options},
    landscape::until,
    modules::Module,
};

use crate::support::TestResult;

const NAMESPACE: &str = "kyma-system";
const MANAGER: &str = "sample-manager";
const FINALIZER: &str = "sample.kyma-project.io/finalizer";

/// A runtime without a receiver, whose pods run.
pub(crate) struct Plain {
    pub(crate) client: Client,
    // Before the cluster in the order of drops.
    kubelet: Kubelet,
    _stop: Stop,
}

/// Stops a cluster when it is dropped.
struct Stop(&'static TestBed, String);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.stop(&self.1);
    }
}

impl Plain {
    pub(crate) async fn start(name: &str) -> Result<Self> {
        tidewatch_testing::install_crypto();
        let bed = bed::shared().await?;
        let cluster = bed.runtime_for_kubelet(name).await?;
        let stop = Stop(bed, name.to_owned());
        cluster.ensure_namespace(NAMESPACE).await?;
        let kubelet = Kubelet::start(&cluster, Options::default()).await?;
        Ok(Self { client: cluster.client().await?, kubelet, _stop: stop })
    }

    /// The API of an object's kind, in its namespace.
    async fn api(&self, object: &DynamicObject) -> Result<Api<DynamicObject>> {
        let types = object.types.as_ref().context("a type")?;
        let kind = GroupVersionKind::try_from(types)?;
        let (resource, capabilities) = discovery::pinned_kind(&self.client, &kind).await?;
        Ok(match capabilities.scope {
            Scope::Cluster => Api::all_with(self.client.clone(), &resource),
            Scope::Namespaced => {
                Api::namespaced_with(self.client.clone(), &object.namespace().unwrap_or_default(), &resource)
            }
        })
    }

    /// Applies an object as soon as its kind is served.
    async fn apply(&self, object: &DynamicObject) -> Result<()> {
        let name = object.name_any();
        let params = PatchParams::apply("test").force();
        until(&format!("{name} to be applied"), async || {
            Ok(Some(self.api(object).await?.patch(&name, &params, &Patch::Apply(object)).await.map(drop)?))
        })
        .await
    }

    /// Applies a module with its default module CR, and returns that.
    async fn install(&self, module: &str, version: &str) -> Result<Option<DynamicObject>> {
        let module = Module::read(module, version)?;
        for object in module.objects.iter().chain(&module.default_cr) {
            self.apply(object).await?;
        }
        Ok(module.default_cr)
    }

    /// Waits until the operator has brought a resource into the state Ready.
    async fn becomes_ready(&self, object: &DynamicObject) -> Result<()> {
        let api = self.api(object).await?;
        let name = object.name_any();
        until(&format!("{name} to be Ready"), async || {
            let seen = api.get(&name).await?;
            let is_held = seen.finalizers().iter().any(|finalizer| finalizer == FINALIZER);
            Ok((is_held && seen.data["status"]["state"] == "Ready").then_some(()))
        })
        .await
    }

    async fn goes(&self, object: &DynamicObject) -> Result<()> {
        let api = self.api(object).await?;
        let name = object.name_any();
        until(&format!("{name} to go"), async || Ok(api.get_opt(&name).await?.is_none().then_some(()))).await
    }

    async fn scale_manager(&self, replicas: i32) -> Result<()> {
        let deployments = Api::<Deployment>::namespaced(self.client.clone(), NAMESPACE);
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        deployments.patch(MANAGER, &PatchParams::default(), &patch).await?;
        until(&format!("{replicas} managers"), async || {
            let status = deployments.get(MANAGER).await?.status.unwrap_or_default();
            let running = self.kubelet.running("sample-operator").len();
            let holds = status.available_replicas.unwrap_or_default() == replicas;
            Ok((holds && usize::try_from(replicas)? == running).then_some(()))
        })
        .await
    }
}

#[tokio::test]
async fn the_operator_acts_on_samples_while_its_pod_runs() -> TestResult {
    let plain = Plain::start("sample").await?;
    let sample = plain.install("sample", "1.0.0").await?.context("a default CR")?;
    plain.becomes_ready(&sample).await?;
    plain.scale_manager(1).await?;
    let api = plain.api(&sample).await?;
    api.delete(&sample.name_any(), &DeleteParams::default()).await?;
    plain.goes(&sample).await?;

    // Without its pod, the finalizer holds the resource.
    plain.apply(&sample).await?;
    plain.becomes_ready(&sample).await?;
    plain.scale_manager(0).await?;
    api.delete(&sample.name_any(), &DeleteParams::default()).await?;
    let held = api.get(&sample.name_any()).await?;
    assert!(held.metadata.deletion_timestamp.is_some());
    assert_eq!(held.finalizers(), [FINALIZER]);
    plain.scale_manager(1).await?;
    plain.goes(&sample).await?;

    // A version that cannot be pulled leaves the running one in place.
    plain.install("sample", "1.2.0-broken-image").await?;
    let pods = Api::<Pod>::namespaced(plain.client.clone(), NAMESPACE);
    until("a pod without image", async || {
        let pods = pods.list(&ListParams::default()).await?.items;
        Ok(pods.iter().any(|pod| waiting_reason(pod) == Some("ImagePullBackOff")).then_some(()))
    })
    .await?;
    plain.becomes_ready(&sample).await?;
    Ok(())
}

#[tokio::test]
async fn every_variant_of_the_sample_module_becomes_ready() -> TestResult {
    let plain = Plain::start("variants").await?;
    let modules =
        [("sample", "2.0.0"), ("own-resource", "1.0.0"), ("cluster-scoped", "1.0.0"), ("statefulset", "1.0.0")];
    let installed = modules.map(async |(module, version)| {
        let default = plain.install(module, version).await?.context("a default CR")?;
        plain.becomes_ready(&default).await
    });
    try_join_all(installed).await?;
    assert!(plain.install("without-default", "1.0.0").await?.is_none());
    let own = Module::read("own-resource", "1.0.0")?.objects.pop().context("a resource")?;
    plain.becomes_ready(&own).await?;
    let sets = Api::<StatefulSet>::namespaced(plain.client.clone(), NAMESPACE);
    until("a ready StatefulSet", async || {
        let status = sets.get("statefulset-manager").await?.status.unwrap_or_default();
        Ok((status.ready_replicas == Some(1)).then_some(()))
    })
    .await?;
    Ok(())
}

fn waiting_reason(pod: &Pod) -> Option<&str> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.first()?.state.as_ref()?.waiting.as_ref()?.reason.as_deref()
}
