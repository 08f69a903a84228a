//! Builds all components of the receiver from the configuration, without starting them.

mod components;
mod listeners;

use std::{collections::BTreeSet, mem, path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use components::components;
use futures::FutureExt as _;
use kube::Client;
use rustls::pki_types::ServerName;
use tidewatch_api::{identity::Instance, key::KymaKey, plan::Work};
use tidewatch_cluster::{WriteBudgets, leader::WriteFence};
use tidewatch_fleet::{
    Services,
    evidence::Replicas,
    forward,
    peers::Responders,
    queue::{Priority, WorkSet},
    recorder::ServedKymas,
    table::RuntimeTable,
};
use tidewatch_gateway::{
    enrolment::EnrolmentService,
    ports::{
        OwnAuthority, StartGate, V3Handler,
        enrol::EnrolmentHandler,
        v2::{V2Adapter, V2Handler},
    },
    probes,
    relay::{Answers, Deadlines},
};
use tidewatch_installer::{
    Installer,
    pull_secret::{Copies, ModulePullSecret, PullSecret, Purpose},
    upgrade::Upgrade,
    watcher::ForwardHealth,
};
use tidewatch_modules::{
    ca_rotation::CaRotation,
    event_path::{AcquiredKymas, EventPathController},
    kyma::{self, ComponentLayers, PendingInputs},
    mandatory,
    manifest::{self, ModuleLayers},
    module_rollout::{self, ModuleRollouts},
    module_secrets::{self, ModuleSecrets},
    windows::{MaintenanceWindows, PolicyFile},
};
use tidewatch_oci::{
    flags::{Settings, Source},
    registry::Registry,
};
use tidewatch_trust::{CertificateReloader, RotationHandle, Setup, TlsState};
use tokio::{runtime::Handle, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    Binding, Process, Task,
    counters::Counters,
    open_files::ConnectionShare,
    registry::{self, ComponentKeyFiles},
    sharded::Sharding,
};
use crate::{app::changes, config::Config};

/// Ports of the agents, not listening.
pub(super) struct AgentPorts {
    pub(super) events: Binding<V3Handler<RuntimeTable>>,
    /// Port of contract v2, if `--v2` is given.
    pub(super) v2: Option<Binding<V2Handler<V2Adapter>>>,
    /// Enrolment port, if this receiver issues certificates.
    pub(super) enrolment: Option<Binding<EnrolmentHandler>>,
}

/// Components of the receiver, connected and not running.
pub(super) struct Receiver {
    pub(super) ports: AgentPorts,
    pub(super) rotations: RotationHandle,
    pub(super) forward: forward::Client,
    pub(super) watches: changes::Watches,
    /// Cancelled when all caches are synced.
    pub(super) synced: CancellationToken,
    /// Without a relay, requests wait until this is cancelled, for a while.
    pub(super) serves_shard: CancellationToken,
    /// Tasks that run forever.
    pub(super) tasks: Vec<Task>,
    pub(super) context: Arc<kyma::Context>,
    pub(super) manifest_context: Arc<manifest::Context>,
    pub(super) metrics: tidewatch_kit::metrics::Registry,
    pub(super) counters: Counters,
    pub(super) acquired: AcquiredKymas,
    pub(super) replicas: Replicas,
    /// Answers to the questions of other replicas.
    pub(super) answers: Answers,
    pub(super) sharding: Sharding,
}

/// Builds the components. `ports` is the executor of the ports.
pub(super) async fn build(process: &Process, ports: &Handle) -> Result<Receiver> {
    let Process { config, tls_state, pki, .. } = process;
    let mut metrics = probes::registry();
    let access = kube_config(config.kubeconfig.as_deref()).await?;
    let events =
        tidewatch_cluster::client::client(&access, &WriteFence::default(), tidewatch_cluster::Metrics::default())
            .context("build the client of the Events")?;
    let (stores, writers) = changes::stores();
    let served_kymas = ServedKymas::default();
    let counters = Counters::register_all(&mut metrics, pki, stores.clone(), served_kymas.clone());
    // Each write needs the fence of a shard or of the fleet role.
    let client = tidewatch_cluster::client::client(&access, &WriteFence::closed(), counters.kcp.clone())
        .context("build the client of the control plane")?;
    let installs = config.installer.settings(&config.trust_domain);
    let installs = installs.map(|settings| settings.with_modules_pull_secret(config.skr_image_pull_secret.as_ref()));
    let mut replica_tasks = Vec::new();
    let sharding = Sharding::open(process, &counters, ports.clone(), &mut replica_tasks).await?;
    let components = components(process, stores, installs.is_some(), &counters)?;
    let fleet = components.fleet.clone();
    served_kymas.limit_to(move |key| !fleet.is_elsewhere(key));
    let responders = Responders::default();
    let served = components.fleet.clone();
    let served = Arc::new(move || served.served());
    let answers = Answers::new(responders.clone(), served, sharding.holders.is_fleet_holder(), Deadlines::default());
    let peers = sharding.peers(answers.clone());
    let replicas = Replicas { role: process.role.clone(), peers, responders };
    let synced = CancellationToken::new();
    let serves_shard = CancellationToken::new();
    let mut listeners = vec![config.capacity.event_max_connections];
    listeners.extend(config.v2.v2.then_some(config.v2.v2_max_connections));
    listeners.extend(tls_state.authority.as_ref().map(|_| config.enrolment.enrolment_max_connections));
    let mut builder = Builder {
        process,
        replicas: replicas.clone(),
        connections: process.open_files.divide(&listeners, &counters.open_files),
        client: &client,
        components: &components,
        counters: &counters,
        synced: &synced,
        start_gate: StartGate::new(if sharding.is_alone() { serves_shard.clone() } else { synced.clone() }),
        sharding: &sharding,
        tasks: replica_tasks,
    };
    let forward = forward::Client::new(config.forward_url_template.clone());
    let v2 = builder.v2(forward.clone())?;
    let changes::Components { stores, fleet, access, recorder, manifest_queue, manifest_memories, .. } =
        components.clone();
    let (rotation, rotations) = builder.rotation();
    let windows = builder.windows();
    let event_path = builder.event_path(rotations.clone(), windows.clone(), installs.is_some());
    let acquired = event_path.acquired_kymas();
    let installer = match installs {
        Some(settings) => Some(builder.installer(settings).await?),
        None => None,
    };
    let (layers, module_layers) = builder.registry().await?;
    let pull_secret = builder.pull_secret().await?;
    builder.module_rollouts(windows.clone()).await?;
    let inputs = PendingInputs::new(counters.kyma.inputs.clone());
    builder.tasks.push(inputs.clone().run(client.clone()).boxed());
    let context = Arc::new(builder.context(installer, layers, pull_secret.clone(), windows, inputs));
    let secrets = builder.module_secrets();
    let manifest_context = Arc::new(builder.manifest_context(module_layers, secrets, pull_secret));
    let mut tasks = mem::take(&mut builder.tasks);
    tasks.push(access.run().boxed());
    tasks.push(event_path.run(synced.clone()).boxed());
    tasks.push(rotation.run(synced.clone()).boxed());
    let finalizers = mandatory::Finalizers::new(
        client.clone(),
        stores.clone(),
        components.catalog.clone(),
        components.mandatory.clone(),
        replicas.role.clone(),
    );
    tasks.push(finalizers.run(synced.clone()).boxed());
    tasks.push(recorder.run(events).boxed());
    tasks.push(manifest_queue.clone().observe_ages().boxed());
    manifest::connect_reports(&fleet, &manifest_queue, stores.manifests, manifest_memories);
    let enrolments = builder.enrolments();
    let namespace = config.namespace.clone();
    let forward_health = ForwardHealth::new(components.fleet.clone(), replicas.clone());
    let ports = AgentPorts {
        events: builder.gateway(enrolments.clone()),
        v2,
        enrolment: enrolments.map(|enrolments| builder.enrolment(enrolments)),
    };
    Ok(Receiver {
        ports,
        rotations,
        forward,
        watches: changes::Watches {
            client,
            namespace,
            components,
            forward_health,
            writers,
            shards: process.replica.shards,
            metrics: counters.kcp.clone(),
        },
        synced,
        serves_shard,
        tasks,
        context,
        manifest_context,
        metrics,
        counters,
        acquired,
        replicas,
        answers,
        sharding,
    })
}

/// Builds the components that depend on [`changes::Components`].
struct Builder<'a> {
    process: &'a Process,
    replicas: Replicas,
    /// Connections that each listener accepts.
    connections: ConnectionShare,
    client: &'a Client,
    components: &'a changes::Components,
    counters: &'a Counters,
    synced: &'a CancellationToken,
    /// Requests wait there until agents can be served.
    start_gate: StartGate,
    sharding: &'a Sharding,
    tasks: Vec<Task>,
}

impl Builder<'_> {
    fn services(&self) -> Services {
        let changes::Components { fleet, stores, pause, takeover, recorder, .. } = self.components.clone();
        Services { fleet, stores, pause, takeover, recorder, replicas: self.replicas.clone() }
    }

    fn rotation(&self) -> (CaRotation, RotationHandle) {
        let Self { process: Process { config, tls_state, pki, .. }, client, components, replicas, .. } = self;
        let client = Client::clone(client);
        let fleet = components.fleet.clone();
        CaRotation::new(tls_state.clone(), client, &config.namespace, &config.pki, fleet, replicas.clone(), pki.clone())
    }

    fn event_path(
        &self,
        rotations: RotationHandle,
        windows: MaintenanceWindows,
        installs: bool,
    ) -> EventPathController {
        let changes::Components { stores, fleet, catalog, plans, pause, takeover, .. } = self.components.clone();
        EventPathController {
            flags: self.process.config.path.clone(),
            client: self.client.clone(),
            stores,
            fleet,
            catalog,
            plans,
            pause,
            takeover,
            windows,
            rotations,
            installs,
            metrics: self.counters.event_path.clone(),
        }
    }

    /// Connects the registry of the modules. Its credentials, if it takes any, are read once.
    async fn registry(&mut self) -> Result<(Arc<ComponentLayers>, Arc<ModuleLayers>)> {
        let Self { process: Process { config, pki, .. }, client, components, counters, .. } = *self;
        let denied_addresses = config.deny_runtime_addresses.clone();
        let settings = Settings { denied_addresses, ..config.registry.settings()? };
        let (registry, worker) =
            Registry::new(&settings, counters.oci.clone()).context("prepare the access to the registry")?;
        if let Source::Secret { name, .. } = &settings.source {
            let synced = self.synced.clone();
            let opened =
                registry::follow_credentials(client.clone(), &config.namespace, name, registry.clone(), synced).await;
            self.tasks.push(opened.context("read the Secret with the registry's credentials")?);
        }
        if let Some(folder) = settings.component_keys.clone() {
            let opened = ComponentKeyFiles::open(folder, registry.clone(), pki.clone());
            self.tasks.push(opened.context("read the component keys")?.run().boxed());
        }
        let layers = Arc::new(ComponentLayers::new(registry.clone()));
        let changes::Components { fleet, manifest_queue, .. } = components.clone();
        let rate = config.catalog.catalog_sync_rate;
        let modules = Arc::new(ModuleLayers::new(registry.clone(), manifest_queue.clone()));
        self.tasks.push(registry::enqueue_waiting(registry, layers.clone(), fleet, manifest_queue, rate).boxed());
        // Ends with the process, as all tasks do.
        self.tasks.push(worker.run(CancellationToken::new()).boxed());
        Ok((layers, modules))
    }

    /// Reads the image pull secret of the modules, if there is one.
    async fn pull_secret(&mut self) -> Result<Option<ModulePullSecret>> {
        let Self { process: Process { config, .. }, client, components, counters, .. } = *self;
        let Some(name) = &config.skr_image_pull_secret else { return Ok(None) };
        let changes::Components { fleet, stores, manifest_queue, .. } = components.clone();
        let copies = Copies { manifests: stores.manifests, queue: manifest_queue };
        let is_usable = counters.kyma.pull_secret.clone();
        let purpose = Purpose { work: WorkSet::of(&[Work::Kyma]), copies: Some(copies), is_usable };
        let synced = self.synced.clone();
        let opened = PullSecret::open(client.clone(), &config.namespace, name, fleet, purpose, synced).await;
        let (secret, watch) = opened.context("read the image pull secret of the modules")?;
        self.tasks.push(watch.boxed());
        Ok(Some(ModulePullSecret { name: name.clone(), secret }))
    }

    /// Reads the policy of the maintenance windows, if there is one.
    fn windows(&mut self) -> MaintenanceWindows {
        let Self { process: Process { config, .. }, components, counters, .. } = *self;
        let flags = &config.windows;
        let windows = MaintenanceWindows::new(flags.min_maintenance_window_size, counters.windows.clone());
        let path = flags.maintenance_window_policy.clone();
        let recorder = components.recorder.clone();
        let file = PolicyFile::open(path, windows.clone(), recorder, &config.namespace);
        self.tasks.push(file.run(components.fleet.clone(), config.catalog.catalog_sync_rate).boxed());
        windows
    }

    /// Reads the state of the ring rollouts of modules.
    async fn module_rollouts(&mut self, windows: MaintenanceWindows) -> Result<()> {
        let Self { process: Process { config, .. }, client, components, counters, .. } = *self;
        let services = self.services();
        let catalog = components.catalog.clone();
        let metrics = counters.module_rollout.clone();
        let dependencies = module_rollout::Dependencies { services, catalog, windows, metrics };
        let opened = ModuleRollouts::open(client.clone(), &config.namespace, dependencies).await;
        self.tasks.push(opened.context("read the state of the module rollouts")?.run(self.synced.clone()).boxed());
        Ok(())
    }

    fn context(
        &self,
        installer: Option<Installer>,
        layers: Arc<ComponentLayers>,
        pull_secret: Option<ModulePullSecret>,
        windows: MaintenanceWindows,
        inputs: PendingInputs,
    ) -> kyma::Context {
        let changes::Components { stores, access, catalog, plans, pause, takeover, mandatory, manifest_queue, .. } =
            self.components.clone();
        let accessed = access.clone();
        kyma::Context {
            kcp: self.client.clone(),
            stores,
            clients: Box::new(move |key| access.client_and_revision(key)),
            access_remark: Box::new(move |key| accessed.remark(key)),
            catalog,
            layers: Box::new(move |key, found| layers.layer(key, &found.component, &found.version)),
            modules_in_progress: Box::new(move |key| manifest_queue.is_working(key)),
            plans,
            installer,
            mandatory,
            windows,
            pull_secret,
            pause,
            takeover,
            runtime_gone_after: self.process.config.runtime_gone_after,
            metrics: self.counters.kyma.clone(),
            budgets: WriteBudgets::new(self.counters.writes.clone()),
            caches: kyma::Caches::new(inputs),
        }
    }

    /// Watches the Secrets of KCP, if the module that gets their data is restricted to selected Kymas.
    fn module_secrets(&mut self) -> Option<ModuleSecrets> {
        let changes::Components { stores, catalog, manifest_queue, .. } = self.components.clone();
        if !catalog.restricted_modules().contains(module_secrets::MODULE) {
            return None;
        }
        let secrets = ModuleSecrets::new(self.client.clone(), &self.process.config.namespace);
        self.tasks.push(secrets.clone().run(stores.manifests, manifest_queue, self.synced.clone()).boxed());
        Some(secrets)
    }

    fn manifest_context(
        &self,
        layers: Arc<ModuleLayers>,
        secrets: Option<ModuleSecrets>,
        pull_secret: Option<ModulePullSecret>,
    ) -> manifest::Context {
        let changes::Components { stores, access, pause, takeover, kinds, manifest_memories, manifest_queue, .. } =
            self.components.clone();
        manifest::Context {
            kcp: self.client.clone(),
            stores,
            clients: Box::new(move |key| access.client_and_revision(key)),
            layers: Box::new(move |key, layer| {
                let layers = layers.clone();
                async move { layers.objects(key, layer).await }.boxed()
            }),
            wake: Box::new(move |key| manifest_queue.enqueue(key, Priority::Catalog, true)),
            secrets,
            settings: manifest::Settings { pause, takeover, pull_secret },
            kinds,
            budgets: WriteBudgets::new(self.counters.writes.clone()),
            memories: manifest_memories,
            metrics: self.counters.manifest.clone(),
        }
    }

    /// Reads the state of the agents' upgrade and their image pull secret, if there is one.
    async fn installer(&mut self, settings: tidewatch_installer::Settings) -> Result<Installer> {
        let Self { process: Process { config, tls_state, .. }, client, components, counters, .. } = *self;
        let fleet = components.fleet.clone();
        let tidewatch_installer::Metrics { upgrade: metrics, .. } = counters.installer.clone();
        let flags = config.installer.upgrade.clone();
        let services = self.services();
        let opened = Upgrade::open(client.clone(), &config.namespace, &settings.image, flags, services, metrics).await;
        let (upgrade, handle) = opened.context("read the state of the upgrade of agents")?;
        self.tasks.push(upgrade.run(self.synced.clone()).boxed());
        let pull_secret = settings.own_pull_secret().map(str::to_owned);
        let trust = tls_state.trust();
        let path_fleet = fleet.clone();
        let trust = Box::new(move || trust.borrow().clone());
        let path = Box::new(move |key: &KymaKey| path_fleet.path(key, Instant::now()));
        let mut installer = Installer::new(settings, trust, path, handle, counters.installer.clone());
        let Some(name) = &pull_secret else { return Ok(installer) };
        let is_usable = counters.installer.pull_secret.clone();
        let purpose = Purpose { work: WorkSet::INSTALLER, copies: None, is_usable };
        let synced = self.synced.clone();
        let opened = PullSecret::open(client.clone(), &config.namespace, name, fleet, purpose, synced).await;
        let (secret, watch) = opened.context("read the image pull secret of agents")?;
        self.tasks.push(watch.boxed());
        installer.pull_secret = secret;
        Ok(installer)
    }

    /// Enrols runtimes and renews their certificates, if this receiver issues them.
    fn enrolments(&self) -> Option<EnrolmentService> {
        // Clients of the runtimes review the tokens.
        let changes::Components { fleet, revocations, access, .. } = self.components.clone();
        let metrics = self.counters.enrolment.clone();
        let authority = self.process.tls_state.authority.clone()?;
        let config = &self.process.config;
        let flags = &config.enrolment;
        let domain = &config.trust_domain;
        let clients = Box::new(move |kyma: &KymaKey| access.client_and_revision(kyma));
        Some(EnrolmentService::new(flags, domain, authority, fleet, revocations, clients, metrics))
    }
}

/// Configuration of the client of KCP: from the kubeconfig, or with the pod's service account.
pub(super) async fn kube_config(kubeconfig: Option<&Path>) -> Result<kube::Config> {
    tidewatch_cluster::client::config(kubeconfig, async {
        kube::Config::incluster().context("find the service account of the pod")
    })
    .await
}

/// Opens the certificates, roots and issuer of the listeners: from files, from the CA's Secret, or from both.
pub(super) async fn tls_state(
    config: &Config,
    client: Client,
    metrics: tidewatch_trust::Metrics,
) -> Result<(TlsState, CertificateReloader)> {
    let installer = [&config.installer.receiver_url, &config.installer.enrolment_url];
    let hosts = config.authority.iter().map(OwnAuthority::host);
    let hosts = hosts.chain(installer.into_iter().flatten().map(tidewatch_installer::PublicUrl::host));
    // Hosts that are not DNS names or addresses, such as one with an underscore, cannot occur in a certificate or in
    // SNI either.
    let mut names: Vec<_> = hosts.filter_map(|host| ServerName::try_from(host.to_owned()).ok()).collect();
    names.extend(config.pki.server_names.iter().cloned());
    let mut seen = BTreeSet::new();
    names.retain(|name| seen.insert(name.to_str().into_owned()));
    let setup = Setup {
        flags: &config.pki,
        tls: &config.tls,
        names,
        domain: &config.trust_domain,
        namespace: &config.namespace,
    };
    tidewatch_trust::open(setup, client, metrics).await.context("prepare the certificates")
}

/// Random instance of this process, drawn at every start.
pub(super) fn instance() -> Result<Instance> {
    let mut random = [0; 8];
    SystemRandom::new().fill(&mut random).ok().context("draw random bytes")?;
    Ok(Instance::new(u64::from_be_bytes(random)))
}
