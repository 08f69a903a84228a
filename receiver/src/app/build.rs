//! Builds all components of the active receiver from the configuration, without starting them.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use arc_swap::ArcSwap;
use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use kube::Client;
use tidewatch_shared::identity::Instance;
use tokio::time::Instant;

use super::{Process, counters::Counters, enrolment, legacy};
use crate::{
    app::changes,
    base::{key::KymaKey, limits::REQUEST_DEADLINE, pause::Pause, stores::Stores, takeover::Takeover},
    config::Config,
    controllers::{
        ca_rotation::CaRotation,
        catalog,
        event_path::{self, EventPathController},
        installer::{
            self, Installer, pull_secret,
            upgrade::{self, UpgradeHandle, UpgradeTask},
        },
        kyma, watcher,
    },
    fleet::table::{self, RuntimeTable},
    ingress::{
        enrolment::{CertificateIssuer, Revocations},
        gateway::{self, OwnAuthority, v2},
    },
    kube::{
        leader::WriteFence,
        recorder::EventRecorder,
        runtime_access::{self, RuntimeAccess},
    },
    pki::{self, CertificateReloader, RotationHandle, ServerName, Setup, TlsState},
    telemetry::Metrics,
};

/// Components of the active receiver, connected and not running.
pub(super) struct Receiver {
    pub(super) gateway: gateway::Settings,
    pub(super) gateway_metrics: gateway::Metrics,
    pub(super) tls: Arc<ArcSwap<rustls::ServerConfig>>,
    pub(super) rotation: CaRotation,
    pub(super) rotations: RotationHandle,
    pub(super) v2: Option<legacy::Port>,
    pub(super) enrolment: Option<enrolment::Port>,
    pub(super) forward: crate::fleet::forward::Client,
    pub(super) fleet: RuntimeTable,
    pub(super) watches: changes::Watches,
    pub(super) writers: changes::Writers,
    pub(super) runtime_access: RuntimeAccess,
    pub(super) event_path: EventPathController,
    pub(super) recorder: EventRecorder,
    pub(super) agents: Option<Agents>,
    pub(super) client: Client,
    pub(super) context: Arc<kyma::Context>,
    pub(super) metrics: Metrics,
}

/// Tasks for installed agents besides the reconciles.
pub(super) struct Agents {
    pub(super) upgrade: UpgradeTask,
    pub(super) pull_secret: Option<pull_secret::PullSecretWatch>,
}

/// Builds the components. Called when the Lease is acquired, which is the start of time for them.
pub(super) async fn build(process: &Process) -> Result<Receiver> {
    let Process { config, fence, lease, tls_state, pki, .. } = process;
    let mut metrics = Metrics::new();
    let client = kube_config(config.kubeconfig.as_deref()).await?;
    let client = crate::kube::client::client(&client, fence).context("build the client of the control plane")?;
    let (stores, writers) = changes::stores();
    let counters = Counters::register_all(&mut metrics, lease, pki, stores.kymas.clone());
    let installs = config.installer.settings(&config.trust_domain);
    let fleet = RuntimeTable::new(process.instance, table_settings(config), counters.fleet.clone(), Instant::now());
    #[cfg(feature = "stamps")]
    if let Some(path) = &config.stamp_file {
        fleet.set_stamps(path).with_context(|| format!("open the stamp file {}", path.display()))?;
    }
    let components = components(config, fence, stores, fleet, installs.is_some(), &counters);
    let forward = crate::fleet::forward::Client::new(config.forward_url_template.clone());
    let legacy = v2::V2Adapter::new(
        components.fleet.clone(),
        components.plan.clone(),
        components.v2_allowed.clone(),
        forward.clone(),
    );
    let v2 = legacy::Port::build(
        config,
        legacy,
        components.revocations.clone(),
        (counters.v2, counters.gateway.port.clone()),
        pki.clone(),
    )?;
    let (rotation, rotations) = CaRotation::new(
        tls_state.clone(),
        client.clone(),
        &config.namespace,
        &config.pki,
        components.fleet.clone(),
        pki.clone(),
    );
    let event_path =
        event_path(config, &client, &components, rotations.clone(), installs.is_some(), counters.event_path);
    let context = context(config, &client, &components, counters.kyma);
    let (agents, context) = match installs {
        Some(settings) => {
            let metrics = counters.installer.upgrade.clone();
            let (upgrade, upgrade_handle) = open_upgrade(config, &settings, &client, &components, metrics).await?;
            let pull_secret = open_pull_secret(config, &client, &components.fleet, &counters.installer).await?;
            let installer = installer(settings, tls_state, &components.fleet, upgrade_handle, counters.installer);
            let (pull_secret, installer) = match pull_secret {
                Some((watch, secret)) => (Some(watch), installer.with_pull_secret(secret)),
                None => (None, installer),
            };
            (Some(Agents { upgrade, pull_secret }), context.with_installer(installer))
        }
        None => (None, context),
    };
    let certificate_issuer = certificate_issuer(tls_state, &components, &counters.enrolment);
    let gateway = gateway_settings(config, tls_state, &components, certificate_issuer.clone());
    let enrolment = certificate_issuer.map(|certificate_issuer| {
        let metrics = (counters.enrolment, counters.enrolment_port);
        enrolment::Port::build(config, tls_state.enrolment(), certificate_issuer, components.access.clone(), metrics)
    });
    Ok(Receiver {
        gateway,
        gateway_metrics: counters.gateway,
        tls: tls_state.events(),
        rotation,
        rotations,
        v2,
        enrolment,
        forward,
        fleet: components.fleet.clone(),
        runtime_access: components.access.clone(),
        recorder: components.recorder.clone(),
        watches: watches(config, &client, components, counters.kcp),
        writers,
        event_path,
        agents,
        client,
        context: Arc::new(context),
        metrics,
    })
}

/// With `installs`, the plan also has the watches that the agents' installation needs.
fn components(
    config: &Config,
    fence: &WriteFence,
    stores: Stores,
    fleet: RuntimeTable,
    installs: bool,
    counters: &Counters,
) -> changes::Components {
    let installed = if installs { installer::watches() } else { Vec::new() };
    let (plan, _) = watcher::plan_with::<Arc<tidewatch_shared::api::Watcher>>(installed.clone(), &[]);
    changes::Components {
        stores,
        fleet,
        access: RuntimeAccess::new(access_settings(config, fence), counters.access.clone()),
        catalog: catalog::Catalog::new(catalog_settings(config), counters.catalog.clone()),
        plan: Arc::new(ArcSwap::from_pointee(plan)),
        installed: installed.into(),
        pause: Pause::new(config.pause),
        takeover: Takeover::new(&config.kyma_selector, config.takeover_quiet),
        v2_allowed: v2::V2AllowList::default(),
        revocations: Revocations::new(counters.enrolment.clone()),
        recorder: EventRecorder::new(counters.recorder.clone()),
    }
}

fn watches(
    config: &Config,
    client: &Client,
    components: changes::Components,
    metrics: crate::kube::Metrics,
) -> changes::Watches {
    changes::Watches { client: client.clone(), namespace: config.namespace.clone(), components, metrics }
}

fn event_path(
    config: &Config,
    client: &Client,
    components: &changes::Components,
    rotations: RotationHandle,
    installs: bool,
    metrics: event_path::Metrics,
) -> EventPathController {
    EventPathController {
        flags: config.path.clone(),
        client: client.clone(),
        stores: components.stores.clone(),
        fleet: components.fleet.clone(),
        catalog: components.catalog.clone(),
        plan: components.plan.clone(),
        pause: components.pause.clone(),
        takeover: components.takeover.clone(),
        rotations,
        installs,
        metrics,
    }
}

fn context(
    config: &Config,
    client: &Client,
    components: &changes::Components,
    metrics: kyma::Metrics,
) -> kyma::Context {
    let changes::Components { stores, access, catalog, plan, .. } = components.clone();
    kyma::Context::new(client.clone(), stores, access, catalog, plan, kyma_settings(config, components), metrics)
}

/// Issuer of the runtimes' certificates, if this receiver issues them.
fn certificate_issuer(
    tls_state: &TlsState,
    components: &changes::Components,
    metrics: &crate::ingress::enrolment::Metrics,
) -> Option<CertificateIssuer> {
    let changes::Components { fleet, revocations, .. } = components;
    let issues = |authority: &pki::Authority| {
        CertificateIssuer::new(authority.clone(), fleet.clone(), revocations.clone(), metrics.clone())
    };
    tls_state.authority().map(issues)
}

/// Modules that only runtimes selected by a release meta may see.
fn restricted(config: &Config) -> BTreeSet<String> {
    config.restricted_default_modules.iter().cloned().collect()
}

fn catalog_settings(config: &Config) -> catalog::Settings {
    catalog::Settings { restricted_modules: restricted(config), flags: config.catalog.clone() }
}

fn access_settings(config: &Config, fence: &WriteFence) -> runtime_access::Settings {
    runtime_access::Settings {
        allow: config.allow_runtime_addresses.clone(),
        deny: config.deny_runtime_addresses.clone(),
        fence: fence.clone(),
        ..Default::default()
    }
}

fn kyma_settings(config: &Config, components: &changes::Components) -> kyma::Settings {
    kyma::Settings {
        registry: config.oci_registry_host.clone(),
        restricted_modules: restricted(config),
        pause: components.pause.clone(),
        takeover: components.takeover.clone(),
        ..kyma::Settings::default()
    }
}

fn installer(
    settings: installer::Settings,
    tls_state: &TlsState,
    fleet: &RuntimeTable,
    upgrade: UpgradeHandle,
    metrics: installer::Metrics,
) -> Installer {
    let fleet = fleet.clone();
    let path = Box::new(move |key: &KymaKey| fleet.path(key, Instant::now()));
    Installer::new(settings, trust_source(tls_state), path, upgrade, metrics)
}

/// Reads the agents' image pull secret, if there is one, and prepares its watch.
async fn open_pull_secret(
    config: &Config,
    client: &Client,
    fleet: &RuntimeTable,
    metrics: &installer::Metrics,
) -> Result<Option<(pull_secret::PullSecretWatch, pull_secret::PullSecret)>> {
    let Some(name) = &config.installer.agent_image_pull_secret else { return Ok(None) };
    let opened =
        pull_secret::PullSecretWatch::open(client.clone(), &config.namespace, name, fleet.clone(), metrics.clone());
    opened.await.map(Some).context("read the image pull secret of agents")
}

/// Reads the state of the agents' upgrade, and prepares its task.
async fn open_upgrade(
    config: &Config,
    settings: &installer::Settings,
    client: &Client,
    components: &changes::Components,
    metrics: upgrade::Metrics,
) -> Result<(UpgradeTask, UpgradeHandle)> {
    let changes::Components { stores, fleet, pause, takeover, recorder, .. } = components.clone();
    let dependencies = upgrade::Dependencies { fleet, stores, pause, takeover, recorder, metrics };
    let flags = config.installer.upgrade.clone();
    let opened = UpgradeTask::open(client.clone(), &config.namespace, &settings.image, flags, dependencies);
    opened.await.context("read the state of the upgrade of agents")
}

/// Configuration of the client of KCP: from the kubeconfig, or with the pod's service account.
pub(super) async fn kube_config(kubeconfig: Option<&Path>) -> Result<kube::Config> {
    crate::kube::client::config(kubeconfig, async {
        kube::Config::incluster().context("find the service account of the pod")
    })
    .await
}

/// Roots that agents trust, as the installer writes them.
fn trust_source(tls_state: &TlsState) -> installer::TrustSource {
    let trust = tls_state.trust();
    Box::new(move || trust.borrow().clone())
}

/// Opens the certificates, roots and issuer of the listeners: from files, from the CA's Secret, or from both.
pub(super) async fn tls_state(
    config: &Config,
    client: Client,
    metrics: pki::Metrics,
) -> Result<(TlsState, CertificateReloader)> {
    let installer = [&config.installer.receiver_url, &config.installer.enrolment_url];
    let hosts = config.authority.iter().map(OwnAuthority::host);
    let hosts = hosts.chain(installer.into_iter().flatten().map(installer::PublicUrl::host));
    // Hosts that are not DNS names or addresses, such as one with an underscore, cannot occur in a certificate or in
    // SNI either.
    let mut names: Vec<ServerName> = hosts.filter_map(|host| host.parse().ok()).collect();
    names.extend(config.pki.server_names.iter().cloned());
    let mut seen = BTreeSet::new();
    names.retain(|name| seen.insert(name.to_string()));
    let setup = Setup {
        flags: &config.pki,
        tls: &config.tls,
        names,
        domain: &config.trust_domain,
        namespace: &config.namespace,
        proxy: config.tls.proxy_identity.as_ref(),
    };
    TlsState::open(setup, client, metrics).await.context("prepare the certificates")
}

fn table_settings(config: &Config) -> table::Settings {
    table::Settings {
        heartbeat: config.heartbeat,
        max_heartbeats_per_second: config.path.max_heartbeats_per_second,
        away_after: config.path.away_after,
        request_deadline: REQUEST_DEADLINE,
        slots: usize::from(config.concurrency),
        ..table::Settings::default()
    }
}

fn gateway_settings(
    config: &Config,
    tls_state: &TlsState,
    components: &changes::Components,
    certificate_issuer: Option<CertificateIssuer>,
) -> gateway::Settings {
    gateway::Settings {
        heartbeat_interval: components.fleet.heartbeat_interval(),
        proxy: tls_state.proxy(),
        revocations: components.revocations.clone(),
        issuer: certificate_issuer,
        ..gateway::Settings::new(config.event_address, config.authority.clone(), config.trust_domain.clone())
    }
}

/// Random instance of this process, drawn at every start.
pub(super) fn instance() -> Result<Instance> {
    let mut random = [0; 8];
    SystemRandom::new().fill(&mut random).ok().context("draw random bytes")?;
    Ok(Instance::new(u64::from_be_bytes(random)))
}
