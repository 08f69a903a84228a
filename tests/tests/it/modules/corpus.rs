//! Many modules in one runtime with the controllers of Kubernetes: installed, at rest, after a restart of the receiver,
//! upgraded, and removed. A failure names the module, and keeps no other from its proof.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::{
    api::ListParams,
    core::PartialObjectMeta,
    discovery::{Discovery, Scope, verbs},
};
use tidewatch_api::ModuleStatus;
use tidewatch_testing::{
    control_plane::audit::{Mark, Write},
    landscape::{AGENT_IMAGE, catalog::template},
    modules::shapes::{INSTALLED, UPGRADE},
};
use tokio::time::Instant;

use super::*;

/// Account of the receiver in a runtime.
const CONTROL_PLANE: &str = ":tidewatch-control-plane";
/// Interval of reads while a state is awaited.
const POLL: Duration = Duration::from_millis(250);
/// Kinds whose objects come and go by themselves, and those of the receiver.
const IGNORED: [&str; 4] = ["Event", "Lease", "EndpointSlice", "Endpoints"];

/// Identities of objects: group, kind, namespace and name.
type Inventory = BTreeSet<(String, String, String, String)>;

/// A module of a corpus.
pub(super) struct Member {
    pub(super) default_cr: Option<Value>,
    /// The workload that decides on its readiness, as in a ModuleTemplate.
    pub(super) manager: Option<Value>,
    /// Objects that stay after the removal.
    pub(super) left: BTreeSet<String>,
}

pub(super) struct Corpus {
    // Before the cluster in the order of drops.
    _kubelet: Kubelet,
    setup: SingleRuntime,
    members: BTreeMap<String, Member>,
    /// Time in which all selected modules reach a state.
    patience: Duration,
    /// Selected modules that have not failed yet.
    names: BTreeSet<String>,
    failures: Vec<String>,
}

impl Corpus {
    /// Starts a landscape of this name that has the modules, none of which is selected.
    pub(super) async fn start(name: &str, members: BTreeMap<String, Member>, patience: Duration) -> Result<Self> {
        let setup = SingleRuntime::isolated_without_agent(Isolation::Kubelet, name, &[], quick_options()).await?;
        let kubelet = Kubelet::start(setup.runtime.cluster(), kubelet::Options::default()).await?;
        let names = BTreeSet::new();
        let failures = Vec::new();
        let this = Self { _kubelet: kubelet, setup, members, patience, names, failures };
        for name in this.members.keys() {
            this.publish(name, INSTALLED).await?;
            this.point(name, INSTALLED).await?;
        }
        this.setup.runtime.start_agent().await?;
        this.setup.skr_status("a Kyma that is Ready", |status| status.state() == State::Ready).await?;
        Ok(this)
    }

    /// Selects modules and installs them.
    pub(super) async fn install(&mut self, names: impl IntoIterator<Item = String>) -> Result<()> {
        self.names = names.into_iter().collect();
        self.setup.runtime.select(&self.names.iter().map(String::as_str).collect::<Vec<_>>()).await?;
        self.become_ready(INSTALLED).await
    }

    /// Waits until the receiver and the agent write nothing any more.
    pub(super) async fn becomes_idle(&mut self) {
        if let Err(error) = self.setup.becomes_idle().await {
            self.failures.push(format!("{error:#}"));
        }
    }

    /// Failures, one line each.
    pub(super) fn failures(self) -> Vec<String> {
        self.failures
    }

    async fn publish(&self, name: &str, version: &str) -> Result<()> {
        let Member { default_cr, manager, .. } = &self.members[name];
        let mut template = template(name, version);
        let spec = template["spec"].as_object_mut().context("a spec")?;
        spec.remove("data");
        spec.extend(default_cr.clone().map(|default| ("data".to_owned(), default)));
        spec.extend(manager.clone().map(|manager| ("manager".to_owned(), manager)));
        let landscape = &self.setup.landscape;
        let api = Api::<ModuleTemplate>::namespaced(landscape.operator(), landscape.namespace());
        let params = PatchParams::apply("operator").force();
        api.patch(&format!("{name}-{version}"), &params, &Patch::Apply(&template)).await?;
        Ok(())
    }

    async fn point(&self, name: &str, version: &str) -> Result<()> {
        self.setup.landscape.write_channels(name, &[("regular", version)]).await
    }

    pub(super) fn fails(&mut self, name: &str, what: impl std::fmt::Display) {
        self.names.remove(name);
        self.failures.push(format!("{name}: {what}"));
    }

    /// Waits until every selected module is Ready in a version.
    async fn become_ready(&mut self, version: &str) -> Result<()> {
        let is_ready = |it: &ModuleStatus| it.state == State::Ready && it.version.as_deref() == Some(version);
        let since = Instant::now();
        loop {
            let status = self.setup.runtime.skr_kyma().await?.and_then(|kyma| kyma.status).unwrap_or_default();
            let waits = |name: &&String| module(&status, name).is_none_or(|it| !is_ready(it));
            let waiting: Vec<_> = self.names.iter().filter(waits).cloned().collect();
            if waiting.is_empty() {
                return Ok(());
            }
            if since.elapsed() > self.patience {
                for name in waiting {
                    let found = module(&status, &name);
                    let state = found.map(|it| it.state);
                    let message = found.and_then(|it| it.message.clone());
                    self.fails(&name, format_args!("{version} is not Ready but {state:?}: {message:?}"));
                }
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The Manifests' inventories, by module.
    pub(super) async fn inventories(&self) -> Result<BTreeMap<String, Inventory>> {
        let mut all = BTreeMap::new();
        for manifest in self.setup.manifests().await? {
            let Some(name) = manifest.labels().get(label::MODULE_NAME) else { continue };
            let synced = manifest.status.iter().flat_map(|status| status.synced());
            let keys = synced.map(|it| (it.group.clone(), it.kind.clone(), it.namespace.clone(), it.name.clone()));
            all.insert(name.clone(), keys.collect::<Inventory>());
        }
        Ok(all)
    }

    /// Waits until the receiver has reconciled all Manifests so often since `passes`, and returns the number.
    async fn passes(&self, passes: f64, rounds: f64) -> Result<f64> {
        let least = passes + rounds * self.names.len() as f64;
        let value = |page: &str| {
            let samples = page.lines().filter_map(|line| line.strip_prefix("tidewatch_manifest_passes_total{"));
            let sum: f64 = samples.filter_map(|sample| sample.rsplit(' ').next()?.parse::<f64>().ok()).sum();
            (sum >= least).then_some(sum)
        };
        Ok(self
            .setup
            .landscape
            .with_receiver(async |receiver| receiver.metrics_until(self.patience, value).await)
            .await??)
    }

    /// Objects of modules that the receiver has written since a mark.
    async fn written(&self, mark: Mark) -> Result<BTreeMap<String, BTreeSet<String>>> {
        let inventories = self.inventories().await?;
        let mut written = BTreeMap::<String, BTreeSet<String>>::new();
        let is_ours = |write: &Write| write.user.ends_with(CONTROL_PLANE);
        for write in self.setup.runtime.cluster().writes_since(mark)?.into_iter().filter(is_ours) {
            let is_it = |(group, kind, namespace, name): &(String, String, String, String)| {
                (group, namespace, name) == (&write.group, &write.namespace, &write.name)
                    && write.resource.starts_with(&kind.to_lowercase()[..kind.len() - 1])
            };
            for (module, keys) in &inventories {
                for (_, kind, namespace, name) in keys.iter().filter(|key| is_it(key)) {
                    written.entry(module.clone()).or_default().insert(format!("{kind} {namespace}/{name}"));
                }
            }
        }
        Ok(written)
    }

    /// Restarts the receiver, which compares all objects, and lets two verifications pass.
    pub(super) async fn restart_and_rest(&mut self) -> Result<()> {
        let cluster = self.setup.runtime.cluster().clone();
        let restarted = cluster.audit_mark()?;
        let arguments = ["--verification-seconds", "3", "--restart-spread-seconds", "1"];
        self.setup.landscape.restart_receiver(AGENT_IMAGE, &arguments).await?;
        let passes = self.passes(0.0, 1.0).await?;
        let rests = cluster.audit_mark()?;
        let mut first = self.written(restarted).await?;
        self.passes(passes, 2.0).await?;
        let mut later = self.written(rests).await?;
        for name in self.names.clone() {
            let first = first.remove(&name).unwrap_or_default();
            let later = later.remove(&name).unwrap_or_default();
            if !first.is_empty() || !later.is_empty() {
                self.fails(&name, format_args!("written after a restart {first:?}, and at rest {later:?}"));
            }
        }
        Ok(())
    }

    pub(super) async fn upgrade(&mut self) -> Result<()> {
        let before = self.inventories().await?;
        for name in &self.names {
            self.publish(name, UPGRADE).await?;
            self.point(name, UPGRADE).await?;
        }
        self.become_ready(UPGRADE).await?;
        let after = self.inventories().await?;
        let objects = self.objects().await?;
        for module in self.names.clone() {
            let dropped = before[&module].difference(&after[&module]);
            let text = |(_, kind, namespace, name): &(String, String, String, String)| identity(kind, namespace, name);
            let left: Vec<_> = dropped.map(text).filter(|object| objects.contains(object)).collect();
            if !left.is_empty() {
                self.fails(&module, format_args!("the upgrade has left {left:?}"));
            }
        }
        Ok(())
    }

    /// Deselects all, and waits until the runtime is as it was.
    pub(super) async fn leave(&mut self, before: &BTreeSet<String>) -> Result<()> {
        let inventories = self.inventories().await?;
        self.setup.runtime.select(&[]).await?;
        let expected: BTreeSet<_> = inventories.keys().flat_map(|name| &self.members[name].left).cloned().collect();
        let since = Instant::now();
        loop {
            let manifests = self.setup.manifests().await?;
            let objects = if manifests.is_empty() { self.objects().await? } else { BTreeSet::new() };
            let left: BTreeSet<_> = objects.difference(before).cloned().collect();
            if manifests.is_empty() && left == expected {
                return Ok(());
            }
            if since.elapsed() > self.patience {
                for manifest in manifests {
                    let name = manifest.labels().get(label::MODULE_NAME).cloned().unwrap_or_default();
                    let operation = manifest.status.and_then(|status| status.last_operation).map(|last| last.operation);
                    self.fails(&name, format_args!("is not removed: {operation:?}"));
                }
                let differs = left.symmetric_difference(&expected).cloned().collect::<BTreeSet<_>>();
                let is_of = |keys: &Inventory, object: &String| {
                    keys.iter().any(|(_, kind, namespace, name)| identity(kind, namespace, name) == *object)
                };
                for object in differs {
                    let module =
                        inventories.iter().find(|(_, keys)| is_of(keys, &object)).map(|(module, _)| module.clone());
                    self.fails(&module.unwrap_or_default(), format_args!("has left, or not left: {object}"));
                }
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Kinds, namespaces and names of all objects in the runtime but for those of the receiver.
    pub(super) async fn objects(&self) -> Result<BTreeSet<String>> {
        let client = self.setup.runtime.cluster().client().await?;
        let services = Api::<APIService>::all(client.clone()).list(&ListParams::default()).await?;
        let is_available = |service: &APIService| {
            let conditions = service.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions.clone().any(|condition| condition.type_ == "Available" && condition.status == "True")
        };
        let served = services.items.into_iter().filter(is_available);
        let groups: BTreeSet<_> =
            served.filter_map(|service| service.spec?.group.or_else(|| Some(String::new()))).collect();
        // The server of a module's APIService does not run.
        let groups: Vec<_> = groups.iter().map(String::as_str).collect();
        let discovery = Discovery::new(client.clone()).filter(&groups).run().await?;
        let mut found = BTreeSet::new();
        for group in discovery.groups().filter(|group| group.name() != "operator.kyma-project.io") {
            for (resource, capabilities) in group.recommended_resources() {
                if !capabilities.supports_operation(verbs::LIST) || IGNORED.contains(&&*resource.kind) {
                    continue;
                }
                let api: Api<PartialObjectMeta> = Api::all_with(client.clone(), &resource);
                let since = Instant::now();
                let listed = loop {
                    match api.list_metadata(&ListParams::default()).await {
                        Ok(listed) => break listed.items,
                        // Its CRD goes.
                        Err(kube::Error::Api(status)) if status.code == 404 => break Vec::new(),
                        // It has just come.
                        Err(kube::Error::Api(status)) if status.code == 429 && since.elapsed() < self.patience => {
                            tokio::time::sleep(POLL).await;
                        }
                        Err(error) => {
                            return Err(error).with_context(|| format!("list the objects of {}", resource.kind));
                        }
                    }
                };
                for object in listed.iter().filter(|object| !object.name_any().contains("tidewatch")) {
                    let namespace = match capabilities.scope {
                        Scope::Namespaced => object.namespace().unwrap_or_default(),
                        Scope::Cluster => String::new(),
                    };
                    found.insert(identity(&resource.kind, &namespace, &object.name_any()));
                }
            }
        }
        Ok(found)
    }
}

/// An object in texts, and as in [`Member::left`].
pub(super) fn identity(kind: &str, namespace: &str, name: &str) -> String {
    let slash = if namespace.is_empty() { "" } else { "/" };
    format!("{kind} {namespace}{slash}{name}")
}
