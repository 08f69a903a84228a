//! Builds every room from the configuration. Nothing runs yet when it returns.

use std::{collections::BTreeSet, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use arc_swap::ArcSwap;
use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use kube::{
    Client,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
};
use tidewatch_shared::identity::Instance;
use tokio::time::Instant;

use super::{counters::Counters, enrolment, legacy};
use crate::{
    active::{self, Fence},
    catalog,
    config::{Config, REQUEST_DEADLINE},
    enrolment::{Office, Revocations},
    forward,
    gateway::{self, OwnAuthority, v2},
    hub::{self, Hub},
    installer::{self, Installer},
    kcp,
    key::KymaKey,
    kyma,
    path::{Paths, Pause},
    pki::{self, Rotation, Rotations, ServerName, Setup, Standing, Upkeep},
    record::Record,
    runtime_access::{self, RuntimeAccess},
    telemetry::Metrics,
    watcher,
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
    pub(super) forward: forward::Client,
    pub(super) hub: Hub,
    pub(super) follow: kcp::Follow,
    pub(super) writers: kcp::Writers,
    pub(super) access: RuntimeAccess,
    pub(super) paths: Paths,
    pub(super) record: Record,
    pub(super) client: Client,
    pub(super) context: Arc<kyma::Context>,
    pub(super) metrics: Metrics,
}

/// What there is before this receiver is the active one.
pub(super) struct Before<'a> {
    pub(super) instance: Instance,
    pub(super) fence: &'a Fence,
    pub(super) lease: &'a active::Metrics,
    pub(super) standing: &'a Standing,
    pub(super) pki: &'a pki::Metrics,
}

/// Called when this receiver has become the active one: what rooms take for the start of the process is now.
pub(super) async fn build(config: &Config, before: Before<'_>) -> Result<Built> {
    let Before { instance, fence, lease, standing, pki } = before;
    let mut metrics = Metrics::new();
    let client = client(config.kubeconfig.as_deref(), fence).await?;
    let (stores, writers) = kcp::stores();
    let counters = Counters::register(&mut metrics, lease, pki, stores.kymas.clone());
    let record = Record::new(counters.record);
    let installs = config.installer.settings(&config.trust_domain);
    let installed = if installs.is_some() { installer::watches() } else { Vec::new() };
    let (plan, _) = watcher::plan_with::<Arc<tidewatch_shared::api::Watcher>>(installed.clone(), &[]);
    let plan = Arc::new(ArcSwap::from_pointee(plan));

    let hub = Hub::new(instance, hub_settings(config), counters.hub, Instant::now());
    if let Some(path) = &config.stamp_file {
        hub.set_stamps(path).with_context(|| format!("open the stamp file {}", path.display()))?;
    }
    let access = RuntimeAccess::new(access_settings(config, fence), counters.access);
    let restricted_modules: BTreeSet<_> = config.restricted_default_modules.iter().cloned().collect();
    let settings = catalog::Settings { restricted_modules: restricted_modules.clone() };
    let catalog = catalog::Catalog::new(settings, counters.catalog);
    let pause = Pause::new(config.pause);
    let revocations = Revocations::new(counters.enrolment.clone());
    let rooms = kcp::Rooms {
        stores: stores.clone(),
        hub: hub.clone(),
        access: access.clone(),
        catalog: catalog.clone(),
        plan: plan.clone(),
        installed: installed.into(),
        pause: pause.clone(),
        allowed: v2::Allowed::default(),
        revocations: revocations.clone(),
        record: record.clone(),
    };
    let forward = forward::Client::new(config.forward_url_template.clone());
    let legacy = v2::Legacy::new(hub.clone(), plan.clone(), rooms.allowed.clone(), forward.clone());
    let follow = kcp::Follow {
        client: client.clone(),
        namespace: config.namespace.clone(),
        kyma_selector: config.kyma_selector.clone(),
        rooms,
        metrics: counters.kcp,
    };
    let settings = kyma_settings(config, restricted_modules, pause.clone());
    let paths = Paths {
        flags: config.path.clone(),
        client: client.clone(),
        stores: stores.clone(),
        hub: hub.clone(),
        catalog: catalog.clone(),
        plan: plan.clone(),
        pause,
        installs: installs.is_some(),
        metrics: counters.paths,
    };
    let context = kyma::Context::new(client.clone(), stores, access.clone(), catalog, plan, settings, counters.kyma);
    let context = match installs {
        Some(settings) => context.with_installer(installer(settings, standing, &hub, counters.installer)),
        None => context,
    };
    let mut gateway = gateway_settings(config, standing, &hub);
    gateway.revocations = revocations.clone();
    let issues = |authority: &pki::Authority| {
        Office::new(authority.clone(), hub.clone(), revocations, counters.enrolment.clone())
    };
    gateway.office = standing.authority().map(issues);
    let enrolment = gateway.office.clone().map(|office| {
        let metrics = (counters.enrolment, counters.enrolment_port);
        enrolment::Port::build(config, standing.enrolment(), office, access.clone(), metrics)
    });
    let (rotation, rotations) =
        Rotation::new(standing.clone(), client.clone(), &config.namespace, &config.pki, hub.clone(), pki.clone());
    let gateway_metrics = counters.gateway;
    let v2 = legacy::Port::build(config, legacy, gateway.revocations.clone(), counters.v2, gateway_metrics.clone())?;
    Ok(Built {
        gateway,
        gateway_metrics,
        tls: standing.events(),
        rotation,
        rotations,
        v2,
        enrolment,
        forward,
        hub,
        follow,
        writers,
        access,
        paths,
        record,
        client,
        context: Arc::new(context),
        metrics,
    })
}

fn access_settings(config: &Config, fence: &Fence) -> runtime_access::Settings {
    runtime_access::Settings {
        allow: config.allow_runtime_addresses.clone(),
        deny: config.deny_runtime_addresses.clone(),
        fence: fence.clone(),
        ..Default::default()
    }
}

fn kyma_settings(config: &Config, restricted_modules: BTreeSet<String>, pause: Pause) -> kyma::Settings {
    kyma::Settings {
        registry: config.oci_registry_host.clone(),
        restricted_modules,
        pause,
        ..kyma::Settings::default()
    }
}

fn installer(settings: installer::Settings, standing: &Standing, hub: &Hub, metrics: installer::Metrics) -> Installer {
    let hub = hub.clone();
    let path = Box::new(move |key: &KymaKey| hub.path(key, Instant::now()));
    Installer::new(settings, trusted(standing), path, metrics)
}

/// A client of KCP that retries nothing by itself: reconciles have their own backoff, and a retried write would hide a conflict.
/// It writes only as long as the fence holds.
pub(super) async fn client(kubeconfig: Option<&Path>, fence: &Fence) -> Result<Client> {
    let mut config = match kubeconfig {
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path).with_context(|| format!("read {}", path.display()))?;
            kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
        None => kube::Config::incluster().context("find the account of the pod")?,
    };
    config.default_retry = false;
    config.connect_timeout = Some(Duration::from_secs(5));
    let builder = ClientBuilder::try_from(config).context("build the client of the control plane")?;
    Ok(builder.with_layer(&fence.layer()).build())
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

fn gateway_settings(config: &Config, standing: &Standing, hub: &Hub) -> gateway::Settings {
    let mut gateway =
        gateway::Settings::new(config.event_address, config.authority.clone(), config.trust_domain.clone());
    gateway.interval = hub.heartbeat_interval();
    gateway.proxy = standing.proxy();
    gateway
}

/// Which life of the receiver this is: random, drawn at every start.
pub(super) fn instance() -> Result<Instance> {
    let mut random = [0; 8];
    SystemRandom::new().fill(&mut random).ok().context("draw random bytes")?;
    Ok(Instance::new(u64::from_be_bytes(random)))
}
