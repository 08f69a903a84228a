//! Builds every room from the configuration. Nothing runs yet when it returns.

use std::{collections::BTreeSet, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use arc_swap::ArcSwap;
use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use kube::Client;
use tidewatch_shared::identity::Instance;
use tokio::time::Instant;

use super::{counters::Counters, enrolment, legacy};
use crate::{
    app::changes,
    base::{key::KymaKey, limits::REQUEST_DEADLINE, pause::Pause, stores::Stores, takeover::Takeover},
    config::Config,
    controllers::{
        ca_rotation::Rotation,
        catalog,
        event_path::{self, Paths},
        forward,
        installer::{
            self, Installer, pull,
            upgrade::{self, Course, Upgrade},
        },
        kyma, watcher,
    },
    fleet::hub::{self, Hub},
    ingress::{
        enrolment::{Office, Revocations},
        gateway::{self, OwnAuthority, v2},
    },
    kube::{
        leader::{self, Fence},
        record::Record,
        runtime_access::{self, RuntimeAccess},
    },
    pki::{self, Rotations, ServerName, Setup, Standing, Upkeep},
    telemetry::Metrics,
};

/// All rooms, connected.
pub(super) struct Built {
    pub(super) gateway: gateway::Settings,
    pub(super) gateway_metrics: gateway::Metrics,
    pub(super) tls: Arc<ArcSwap<rustls::ServerConfig>>,
    pub(super) rotation: Rotation,
    pub(super) rotations: Rotations,
    pub(super) v2: Option<legacy::Port>,
    pub(super) enrolment: Option<enrolment::Port>,
    pub(super) forward: crate::fleet::forward::Client,
    pub(super) hub: Hub,
    pub(super) follow: changes::Follow,
    pub(super) writers: changes::Writers,
    pub(super) access: RuntimeAccess,
    pub(super) paths: Paths,
    pub(super) record: Record,
    pub(super) agents: Option<Agents>,
    pub(super) client: Client,
    pub(super) context: Arc<kyma::Context>,
    pub(super) metrics: Metrics,
}

/// What looks after installed agents besides the passes.
pub(super) struct Agents {
    pub(super) upgrade: Upgrade,
    pub(super) pull: Option<pull::Follow>,
}

/// What there is before this receiver is the active one.
pub(super) struct Before<'a> {
    pub(super) instance: Instance,
    pub(super) fence: &'a Fence,
    pub(super) lease: &'a leader::Metrics,
    pub(super) standing: &'a Standing,
    pub(super) pki: &'a pki::Metrics,
}

/// Called when this receiver has become the active one: what rooms take for the start of the process is now.
pub(super) async fn build(config: &Config, before: Before<'_>) -> Result<Built> {
    let Before { instance, fence, lease, standing, pki } = before;
    let mut metrics = Metrics::new();
    let client = access(config.kubeconfig.as_deref()).await?;
    let client = crate::kube::client::client(&client, fence).context("build the client of the control plane")?;
    let (stores, writers) = changes::stores();
    let counters = Counters::register(&mut metrics, lease, pki, stores.kymas.clone());
    let installs = config.installer.settings(&config.trust_domain);
    let hub = hub(config, instance, counters.hub.clone())?;
    let rooms = rooms(config, fence, stores, hub, installs.is_some(), &counters);
    let forward = crate::fleet::forward::Client::new(config.forward_url_template.clone());
    let legacy = v2::Legacy::new(rooms.hub.clone(), rooms.plan.clone(), rooms.allowed.clone(), forward.clone());
    let v2 = legacy::Port::build(
        config,
        legacy,
        rooms.revocations.clone(),
        (counters.v2, counters.gateway.clone()),
        pki.clone(),
    )?;
    let (rotation, rotations) =
        Rotation::new(standing.clone(), client.clone(), &config.namespace, &config.pki, rooms.hub.clone(), pki.clone());
    let paths = paths(config, &client, &rooms, rotations.clone(), installs.is_some(), counters.paths);
    let context = context(config, &client, &rooms, counters.kyma);
    let (agents, context) = match installs {
        Some(settings) => {
            let metrics = counters.installer.upgrade.clone();
            let (upgrade, course) = upgraded(config, &settings, &client, &rooms, metrics).await?;
            let pull = pull_secret(config, &client, &rooms.hub, &counters.installer).await?;
            let installer = installer(settings, standing, &rooms.hub, course, counters.installer);
            let (pull, installer) = match pull {
                Some((follow, pulled)) => (Some(follow), installer.with_pull_secret(pulled)),
                None => (None, installer),
            };
            (Some(Agents { upgrade, pull }), context.with_installer(installer))
        }
        None => (None, context),
    };
    let office = office(standing, &rooms, &counters.enrolment);
    let gateway = gateway_settings(config, standing, &rooms, office.clone());
    let enrolment = office.map(|office| {
        let metrics = (counters.enrolment, counters.enrolment_port);
        enrolment::Port::build(config, standing.enrolment(), office, rooms.access.clone(), metrics)
    });
    Ok(Built {
        gateway,
        gateway_metrics: counters.gateway,
        tls: standing.events(),
        rotation,
        rotations,
        v2,
        enrolment,
        forward,
        hub: rooms.hub.clone(),
        access: rooms.access.clone(),
        record: rooms.record.clone(),
        follow: follow(config, &client, rooms, counters.kcp),
        writers,
        paths,
        agents,
        client,
        context: Arc::new(context),
        metrics,
    })
}

fn hub(config: &Config, instance: Instance, metrics: hub::Metrics) -> Result<Hub> {
    let hub = Hub::new(instance, hub_settings(config), metrics, Instant::now());
    if let Some(path) = &config.stamp_file {
        hub.set_stamps(path).with_context(|| format!("open the stamp file {}", path.display()))?;
    }
    Ok(hub)
}

/// With `installs`, the plan has what the agents' installation needs.
fn rooms(
    config: &Config,
    fence: &Fence,
    stores: Stores,
    hub: Hub,
    installs: bool,
    counters: &Counters,
) -> changes::Rooms {
    let installed = if installs { installer::watches() } else { Vec::new() };
    let (plan, _) = watcher::plan_with::<Arc<tidewatch_shared::api::Watcher>>(installed.clone(), &[]);
    changes::Rooms {
        stores,
        hub,
        access: RuntimeAccess::new(access_settings(config, fence), counters.access.clone()),
        catalog: catalog::Catalog::new(catalog_settings(config), counters.catalog.clone()),
        plan: Arc::new(ArcSwap::from_pointee(plan)),
        installed: installed.into(),
        pause: Pause::new(config.pause),
        takeover: Takeover::new(&config.kyma_selector, Duration::from_secs(config.takeover_quiet_seconds.into())),
        allowed: v2::Allowed::default(),
        revocations: Revocations::new(counters.enrolment.clone()),
        record: Record::new(counters.record.clone()),
    }
}

fn follow(config: &Config, client: &Client, rooms: changes::Rooms, metrics: crate::kube::Metrics) -> changes::Follow {
    changes::Follow { client: client.clone(), namespace: config.namespace.clone(), rooms, metrics }
}

fn paths(
    config: &Config,
    client: &Client,
    rooms: &changes::Rooms,
    rotations: Rotations,
    installs: bool,
    metrics: event_path::Metrics,
) -> Paths {
    Paths {
        flags: config.path.clone(),
        client: client.clone(),
        stores: rooms.stores.clone(),
        hub: rooms.hub.clone(),
        catalog: rooms.catalog.clone(),
        plan: rooms.plan.clone(),
        pause: rooms.pause.clone(),
        takeover: rooms.takeover.clone(),
        rotations,
        installs,
        metrics,
    }
}

fn context(config: &Config, client: &Client, rooms: &changes::Rooms, metrics: kyma::Metrics) -> kyma::Context {
    let changes::Rooms { stores, access, catalog, plan, .. } = rooms.clone();
    kyma::Context::new(client.clone(), stores, access, catalog, plan, kyma_settings(config, rooms), metrics)
}

/// Who issues, if this receiver does.
fn office(standing: &Standing, rooms: &changes::Rooms, metrics: &crate::ingress::enrolment::Metrics) -> Option<Office> {
    let changes::Rooms { hub, revocations, .. } = rooms;
    let issues =
        |authority: &pki::Authority| Office::new(authority.clone(), hub.clone(), revocations.clone(), metrics.clone());
    standing.authority().map(issues)
}

/// Modules that only runtimes may see whom a release meta selects.
fn restricted(config: &Config) -> BTreeSet<String> {
    config.restricted_default_modules.iter().cloned().collect()
}

fn catalog_settings(config: &Config) -> catalog::Settings {
    catalog::Settings { restricted_modules: restricted(config), flags: config.catalog.clone() }
}

fn access_settings(config: &Config, fence: &Fence) -> runtime_access::Settings {
    runtime_access::Settings {
        allow: config.allow_runtime_addresses.clone(),
        deny: config.deny_runtime_addresses.clone(),
        fence: fence.clone(),
        ..Default::default()
    }
}

fn kyma_settings(config: &Config, rooms: &changes::Rooms) -> kyma::Settings {
    kyma::Settings {
        registry: config.oci_registry_host.clone(),
        restricted_modules: restricted(config),
        pause: rooms.pause.clone(),
        takeover: rooms.takeover.clone(),
        ..kyma::Settings::default()
    }
}

fn installer(
    settings: installer::Settings,
    standing: &Standing,
    hub: &Hub,
    course: Course,
    metrics: installer::Metrics,
) -> Installer {
    let hub = hub.clone();
    let path = Box::new(move |key: &KymaKey| hub.path(key, Instant::now()));
    Installer::new(settings, trusted(standing), path, course, metrics)
}

/// What agents' images are pulled with, and who follows it.
async fn pull_secret(
    config: &Config,
    client: &Client,
    hub: &Hub,
    metrics: &installer::Metrics,
) -> Result<Option<(pull::Follow, pull::Pulled)>> {
    let Some(name) = &config.installer.agent_image_pull_secret else { return Ok(None) };
    let opened = pull::Follow::open(client.clone(), &config.namespace, name, hub.clone(), metrics.clone());
    opened.await.map(Some).context("read the Secret that agents' images are pulled with")
}

/// Who upgrades agents, and how far that is.
async fn upgraded(
    config: &Config,
    settings: &installer::Settings,
    client: &Client,
    rooms: &changes::Rooms,
    metrics: upgrade::Metrics,
) -> Result<(Upgrade, Course)> {
    let changes::Rooms { stores, hub, pause, takeover, record, .. } = rooms.clone();
    let rooms = upgrade::Rooms { hub, stores, pause, takeover, record, metrics };
    let flags = config.installer.upgrade.clone();
    let opened = Upgrade::open(client.clone(), &config.namespace, &settings.image, flags, rooms);
    opened.await.context("read how far the upgrade of agents is")
}

/// How KCP is reached: as a kubeconfig says, or with the account of the pod.
pub(super) async fn access(kubeconfig: Option<&Path>) -> Result<kube::Config> {
    crate::kube::client::config(kubeconfig, async { kube::Config::incluster().context("find the account of the pod") })
        .await
}

/// What agents are told to trust.
fn trusted(standing: &Standing) -> installer::Trusted {
    let trust = standing.trust();
    Box::new(move || trust.borrow().clone())
}

/// What the ports present, whom they trust and who issues: from files, from the CA's Secret, or from both.
pub(super) async fn standing(config: &Config, client: Client, metrics: pki::Metrics) -> Result<(Standing, Upkeep)> {
    let installer = [&config.installer.receiver_url, &config.installer.enrolment_url];
    let hosts = config.authority.iter().map(OwnAuthority::host);
    let hosts = hosts.chain(installer.into_iter().flatten().map(installer::PublicUrl::host));
    // What is no name, such as a host with an underscore, cannot be asked for by TLS either.
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
    Standing::open(setup, client, metrics).await.context("prepare the certificates")
}

fn hub_settings(config: &Config) -> hub::Settings {
    hub::Settings {
        heartbeat: Duration::from_secs(config.heartbeat_seconds.into()),
        max_heartbeats_per_second: config.path.max_heartbeats_per_second,
        away_after: Duration::from_secs(config.path.away_seconds.into()),
        request_deadline: REQUEST_DEADLINE,
        slots: usize::from(config.concurrency),
        ..hub::Settings::default()
    }
}

fn gateway_settings(
    config: &Config,
    standing: &Standing,
    rooms: &changes::Rooms,
    office: Option<Office>,
) -> gateway::Settings {
    gateway::Settings {
        interval: rooms.hub.heartbeat_interval(),
        proxy: standing.proxy(),
        revocations: rooms.revocations.clone(),
        office,
        ..gateway::Settings::new(config.event_address, config.authority.clone(), config.trust_domain.clone())
    }
}

/// Which life of the receiver this is: random, drawn at every start.
pub(super) fn instance() -> Result<Instance> {
    let mut random = [0; 8];
    SystemRandom::new().fill(&mut random).ok().context("draw random bytes")?;
    Ok(Instance::new(u64::from_be_bytes(random)))
}
