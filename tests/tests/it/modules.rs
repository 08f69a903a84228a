//! The life of modules on real control planes: a registry, the sample modules and their operator, whose pods run
//! (`acceptance.md` C1 8 to 24, 28 and 29, C2 46 to 50 and 54 to 56).

mod corpus;
mod departure;
mod deployer;
mod drift;
mod faults;
mod install;
mod kills;
mod maintenance_windows;
mod mandatory;
mod published;
mod registry_faults;
mod removal;
mod rendering;
mod restricted;
mod shapes;
mod sharing;
mod signed;
mod takeover;
mod upgrade;
mod webhook;
mod writing;

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::{
    api::{apps::v1::Deployment, core::v1::ServiceAccount, rbac::v1::ClusterRole, rbac::v1::ClusterRoleBinding},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Condition, KymaStatus, Manifest, ModuleStatus, ModuleTemplate, State,
    names::{SKR_NAMESPACE, annotation, label},
};
use tidewatch_testing::{
    bed,
    kubelet::{self, Kubelet},
    landscape::{Landscape, Options, until},
    modules::folder,
    registry::{self, Access, Registry, Transport},
};

use crate::support::{Isolation, SingleRuntime, TestResult, module, quick_options, run, text};

/// Label that every object of a module has.
const OURS: &str = "operator.kyma-project.io/managed-by=kyma";

/// A landscape with a registry, and a runtime whose pods run.
struct ModuleRuntime {
    // Before the cluster in the order of drops.
    kubelet: Kubelet,
    setup: SingleRuntime,
    registry: Registry,
}

impl ModuleRuntime {
    /// Starts it with versions of modules of `tests/modules`; the channel `regular` of each points to its first one.
    async fn start(name: &str, modules: &[(&str, &[&str])]) -> Result<Self> {
        let this = Self::without_agent(name, modules, quick_options()).await?;
        this.start_agent().await?;
        Ok(this)
    }

    /// The same with options, and before the start of the agent.
    async fn without_agent(name: &str, modules: &[(&str, &[&str])], options: Options) -> Result<Self> {
        tidewatch_testing::install_crypto();
        let access = registry::Options { transport: Transport::Plain, access: Access::Anonymous };
        let registry = Registry::start(bed::shared().await?, name, access).await?;
        let options = Options { registry: Some(registry.host()), ..options };
        let setup = SingleRuntime::isolated_without_agent(Isolation::Kubelet, name, &[], options).await?;
        let kubelet = Kubelet::start(setup.runtime.cluster(), kubelet::Options::default()).await?;
        let this = Self { kubelet, setup, registry };
        for (module, versions) in modules {
            for version in *versions {
                this.publish(module, version).await?;
            }
            this.point(module, versions.first().context("a version")?).await?;
        }
        Ok(this)
    }

    /// Starts the agent, and waits until the receiver has reconciled the runtime's Kyma.
    async fn start_agent(&self) -> Result<()> {
        self.setup.runtime.start_agent().await?;
        until("the Kyma in the runtime", async || self.setup.runtime.skr_kyma().await).await.map(drop)
    }

    /// Packs and pushes a version of a module, and applies its template.
    async fn publish(&self, module: &str, version: &str) -> Result<()> {
        self.publish_folder(&folder(module, version)).await
    }

    /// Packs and pushes the module in a folder with the operator's program, and applies its template.
    async fn publish_folder(&self, folder: &Path) -> Result<()> {
        publish(&self.setup.landscape, &self.registry, folder).await
    }

    /// Applies the template that was packed to a folder.
    async fn apply_template(&self, output: &Path) -> Result<()> {
        apply_template(&self.setup.landscape, output).await
    }

    /// Points the channel `regular` of a module to a version.
    async fn point(&self, module: &str, version: &str) -> Result<()> {
        self.setup.landscape.write_channels(module, &[("regular", version)]).await
    }

    async fn client(&self) -> Result<Client> {
        Ok(self.setup.runtime.cluster().client().await?)
    }

    /// Waits until a module has this state and version in the runtime's Kyma.
    async fn becomes(&self, name: &str, version: &str, state: State) -> Result<KymaStatus> {
        let holds = |status: &KymaStatus| {
            module(status, name).is_some_and(|it| it.state == state && it.version.as_deref() == Some(version))
        };
        self.setup.skr_status(&format!("{name} {version} in the state {state:?}"), holds).await
    }

    /// Waits until a module's message contains these words, in the Kymas of both sides.
    async fn says(&self, name: &str, state: State, words: &str) -> Result<()> {
        let holds = |status: &KymaStatus| {
            let message = |message: &Option<String>| message.as_deref().is_some_and(|it| it.contains(words));
            module(status, name).is_some_and(|it| it.state == state && message(&it.message))
        };
        let condition = format!("{name} in the state {state:?} with the message {words:?}");
        self.setup.kcp_status(&condition, holds).await?;
        self.setup.skr_status(&condition, holds).await.map(drop)
    }

    /// Deselects all modules, and waits until none of their objects is left.
    async fn leave(&self) -> Result<()> {
        self.setup.runtime.select(&[]).await?;
        self.is_clean().await
    }

    /// Waits until the modules are gone from both Kymas, and their objects from the runtime.
    async fn is_clean(&self) -> Result<()> {
        let is_empty = |status: &KymaStatus| status.modules().is_empty() && status.state() == State::Ready;
        self.setup.skr_status("no module", is_empty).await?;
        self.setup.kcp_status("no module", is_empty).await?;
        let left = self.setup.manifests().await?;
        ensure!(left.is_empty(), "Manifests are left: {left:?}");
        let left = self.objects().await?;
        ensure!(left.is_empty(), "objects are left: {left:?}");
        Ok(())
    }

    /// Kinds and names of the objects of modules in the runtime.
    async fn objects(&self) -> Result<Vec<String>> {
        let client = self.client().await?;
        let mut found = named::<CustomResourceDefinition>(Api::all(client.clone())).await?;
        found.extend(named::<ClusterRole>(Api::all(client.clone())).await?);
        found.extend(named::<ClusterRoleBinding>(Api::all(client.clone())).await?);
        found.extend(named::<ServiceAccount>(Api::all(client.clone())).await?);
        found.extend(named::<Deployment>(Api::all(client)).await?);
        // The CRDs that the receiver installs have the label, too.
        found.retain(|name| !name.ends_with("kymas.operator.kyma-project.io") && !name.contains(" module"));
        Ok(found)
    }

    /// Resources of a kind in the group of the sample modules.
    async fn samples(&self, version: &str, kind: &str) -> Result<Api<DynamicObject>> {
        let kind = GroupVersionKind::gvk("operator.kyma-project.io", version, kind);
        Ok(Api::namespaced_with(self.client().await?, SKR_NAMESPACE, &ApiResource::from_gvk(&kind)))
    }

    async fn create_sample(&self, name: &str) -> Result<DynamicObject> {
        let api = self.samples("v1alpha1", "Sample").await?;
        let sample = json!({"apiVersion": "operator.kyma-project.io/v1alpha1", "kind": "Sample",
            "metadata": {"name": name}, "spec": {"replicas": 1}});
        Ok(api.create(&PostParams::default(), &serde_json::from_value(sample)?).await?)
    }

    /// The Manifests of KCP, with all rights.
    async fn manifests(&self) -> Result<Api<Manifest>> {
        let landscape = &self.setup.landscape;
        Ok(Api::namespaced(landscape.kcp().client().await?, landscape.namespace()))
    }

    /// The Manifest of a module.
    async fn manifest(&self, name: &str) -> Result<Manifest> {
        let found = self.setup.manifests().await?;
        let of_module = |it: &Manifest| it.labels().get(label::MODULE_NAME).is_some_and(|module| module == name);
        found.into_iter().find(of_module).with_context(|| format!("the Manifest of {name}"))
    }
}

/// Packs and pushes the module in a folder with the operator's program, and applies its template.
async fn publish(landscape: &Landscape, registry: &Registry, folder: &Path) -> Result<()> {
    let output = tempfile::tempdir()?;
    let host = registry.host();
    let paths = [folder, output.path()].map(|path| path.to_string_lossy().into_owned());
    let packed = run("tidewatch", &["module", "pack", &paths[0], "--output", &paths[1], "--push", &host]).await?;
    ensure!(packed.status.success(), "pack {}: {}", folder.display(), text(&packed.stderr));
    apply_template(landscape, output.path()).await
}

/// Applies the template that was packed to a folder.
async fn apply_template(landscape: &Landscape, output: &Path) -> Result<()> {
    let template = std::fs::read_to_string(output.join("moduletemplate.yaml"))?;
    let mut template: ModuleTemplate = serde_saphyr::from_str(&template)?;
    template.metadata.namespace = None;
    let api = Api::<ModuleTemplate>::namespaced(landscape.operator(), landscape.namespace());
    api.patch(&template.name_any(), &PatchParams::apply("operator").force(), &Patch::Apply(&template)).await?;
    Ok(())
}

/// Kind and name of each object of modules.
async fn named<K>(api: Api<K>) -> Result<Vec<String>>
where
    K: kube::Resource<DynamicType = ()> + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let found = api.list_metadata(&kube::api::ListParams::default().labels(OURS)).await?;
    Ok(found.items.iter().map(|object| format!("{} {}", K::kind(&()), object.name_any())).collect())
}
