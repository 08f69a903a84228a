//! Builds every room from the configuration. Nothing runs yet when it returns.

use std::{collections::BTreeSet, fs, path::Path, sync::Arc, time::Duration};

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

use super::{counters::Counters, legacy};
use crate::{
    active::{self, Fence},
    catalog,
    config::{Config, REQUEST_DEADLINE},
    forward,
    gateway::{self, v2},
    hub::{self, Hub},
    kcp, kyma,
    path::{Paths, Pause},
    pki::{ServerIdentity, TrustBundle},
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
    pub(super) v2: Option<legacy::Port>,
    pub(super) forward: forward::Client,
    pub(super) hub: Hub,
    pub(super) follow: kcp::Follow,
    pub(super) writers: kcp::Writers,
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
}

/// Called when this receiver has become the active one: what rooms take for the start of the process is now.
pub(super) async fn build(config: &Config, before: Before<'_>) -> Result<Built> {
    let Before { instance, fence, lease } = before;
    let mut metrics = Metrics::new();
    let client = client(config.kubeconfig.as_deref(), fence).await?;
    let server = server_identity(config)?;
    let (stores, writers) = kcp::stores();
    let counters = Counters::register(&mut metrics, lease, stores.kymas.clone());
    counters.certificate_ends.set(server.not_after().unwrap_or(0));
    let record = Record::new(counters.record);
    let (plan, _) = watcher::plan::<Arc<tidewatch_shared::api::Watcher>>(&[]);
    let plan = Arc::new(ArcSwap::from_pointee(plan));

    let hub = Hub::new(instance, hub_settings(config), counters.hub, Instant::now());
    if let Some(path) = &config.stamp_file {
        hub.set_stamps(path).with_context(|| format!("open the stamp file {}", path.display()))?;
    }
    let access = runtime_access::Settings {
        allow: config.allow_runtime_addresses.clone(),
        deny: config.deny_runtime_addresses.clone(),
        fence: fence.clone(),
        ..Default::default()
    };
    let access = RuntimeAccess::new(access, counters.access);
    let restricted_modules: BTreeSet<_> = config.restricted_default_modules.iter().cloned().collect();
    let settings = catalog::Settings { restricted_modules: restricted_modules.clone() };
    let catalog = catalog::Catalog::new(settings, counters.catalog);
    let pause = Pause::new(config.pause);
    let rooms = kcp::Rooms {
        stores: stores.clone(),
        hub: hub.clone(),
        access: access.clone(),
        catalog: catalog.clone(),
        plan: plan.clone(),
        pause: pause.clone(),
        allowed: v2::Allowed::default(),
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
    let settings = kyma::Settings {
        registry: config.oci_registry_host.clone(),
        restricted_modules,
        pause: pause.clone(),
        ..kyma::Settings::default()
    };
    let paths = Paths {
        flags: config.path.clone(),
        client: client.clone(),
        stores: stores.clone(),
        hub: hub.clone(),
        catalog: catalog.clone(),
        plan: plan.clone(),
        pause,
        metrics: counters.paths,
    };
    let context = kyma::Context::new(client.clone(), stores, access, catalog, plan, settings, counters.kyma);
    let gateway = gateway_settings(config, &server, &hub)?;
    let gateway_metrics = counters.gateway;
    let v2 = legacy::Port::build(config, legacy, counters.v2, gateway_metrics.clone())?;
    Ok(Built {
        gateway,
        gateway_metrics,
        tls: Arc::new(ArcSwap::new(server.config())),
        v2,
        forward,
        hub,
        follow,
        writers,
        paths,
        record,
        client,
        context: Arc::new(context),
        metrics,
    })
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

/// Certificates, key and roots of the event port, as the files say now.
pub(super) fn server_identity(config: &Config) -> Result<ServerIdentity> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
    let tls = &config.tls;
    let clients = TrustBundle::from_pem(&read(&tls.client_ca)?).context("read the roots of the agents")?;
    let (chain, key) = (read(&tls.tls_cert)?, read(&tls.tls_key)?);
    let server = match &tls.proxy_ca {
        Some(path) => {
            let proxy = TrustBundle::from_pem(&read(path)?).context("read the roots of the proxy")?;
            ServerIdentity::behind(&chain, &key, &proxy, &clients)
        }
        None => ServerIdentity::from_pem(&chain, &key, &clients),
    };
    server.context("build the event port's TLS")
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

fn gateway_settings(config: &Config, server: &ServerIdentity, hub: &Hub) -> Result<gateway::Settings> {
    let mut gateway =
        gateway::Settings::new(config.event_address, config.authority.clone(), config.trust_domain.clone());
    gateway.interval = hub.heartbeat_interval();
    gateway.trust_revision = Some(server.trust_revision().to_owned());
    gateway.proxy = proxy(config)?;
    Ok(gateway)
}

/// The proxy that ends TLS in front of the event port, which speaks for agents that chain to their own roots.
fn proxy(config: &Config) -> Result<Option<gateway::Proxy>> {
    let Some(identity) = &config.tls.proxy_identity else { return Ok(None) };
    let path = &config.tls.client_ca;
    let pem = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let clients =
        TrustBundle::from_pem(&pem).and_then(|clients| clients.store()).context("read the roots of the agents")?;
    Ok(Some(gateway::Proxy::new(identity.clone(), clients).context("build the verifier of forwarded certificates")?))
}

/// Which life of the receiver this is: random, drawn at every start.
pub(super) fn instance() -> Result<Instance> {
    let mut random = [0; 8];
    SystemRandom::new().fill(&mut random).ok().context("draw random bytes")?;
    Ok(Instance::new(u64::from_be_bytes(random)))
}
