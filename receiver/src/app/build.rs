//! Builds every room from the configuration. Nothing runs yet when it returns.

use std::{collections::BTreeSet, fs, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use arc_swap::ArcSwap;
use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use kube::{
    Client,
    config::{KubeConfigOptions, Kubeconfig},
};
use tidewatch_shared::identity::Instance;
use tokio::time::Instant;

use crate::{
    catalog,
    config::{Config, REQUEST_DEADLINE},
    gateway,
    hub::{self, Hub},
    kcp, kyma,
    pki::{ServerIdentity, TrustBundle},
    runtime_access::{self, RuntimeAccess},
    telemetry::{Metrics, Readiness},
    watcher,
};

/// All rooms, connected.
pub(super) struct Built {
    pub(super) gateway: gateway::Settings,
    pub(super) gateway_metrics: gateway::Metrics,
    pub(super) tls: Arc<ArcSwap<rustls::ServerConfig>>,
    pub(super) hub: Hub,
    pub(super) follow: kcp::Follow,
    pub(super) writers: kcp::Writers,
    pub(super) context: Arc<kyma::Context>,
    pub(super) metrics: Metrics,
    pub(super) readiness: Readiness,
}

pub(super) async fn build(config: &Config) -> Result<Built> {
    let mut metrics = Metrics::new();
    let readiness = Readiness::default();
    let client = client(config.kubeconfig.as_deref()).await?;
    let registry = metrics.rooms();
    let server = server_identity(config)?;
    let (stores, writers) = kcp::stores();
    let (plan, _) = watcher::plan::<Arc<tidewatch_shared::api::Watcher>>(&[]);
    let plan = Arc::new(ArcSwap::from_pointee(plan));

    let hub = Hub::new(instance()?, hub_settings(config), hub::Metrics::register(registry), Instant::now());
    if let Some(path) = &config.stamp_file {
        hub.set_stamps(path).with_context(|| format!("open the stamp file {}", path.display()))?;
    }
    let access = runtime_access::Settings {
        allow: config.allow_runtime_addresses.clone(),
        deny: config.deny_runtime_addresses.clone(),
        ..Default::default()
    };
    let access = RuntimeAccess::new(access, runtime_access::Metrics::register(registry));
    let restricted_modules: BTreeSet<_> = config.restricted_default_modules.iter().cloned().collect();
    let settings = catalog::Settings { restricted_modules: restricted_modules.clone() };
    let catalog = catalog::Catalog::new(settings, catalog::Metrics::register(registry));
    let rooms = kcp::Rooms {
        stores: stores.clone(),
        hub: hub.clone(),
        access: access.clone(),
        catalog: catalog.clone(),
        plan: plan.clone(),
    };
    let follow = kcp::Follow {
        client: client.clone(),
        namespace: config.namespace.clone(),
        kyma_selector: config.kyma_selector.clone(),
        rooms,
        metrics: kcp::Metrics::register(registry),
    };
    let settings = kyma::Settings {
        registry: config.oci_registry_host.clone(),
        restricted_modules,
        paused: config.pause,
        ..kyma::Settings::default()
    };
    let context =
        kyma::Context::new(client, stores, access, catalog, plan, settings, kyma::Metrics::register(registry));
    let gateway = gateway_settings(config, &server);
    let gateway_metrics = gateway::Metrics::register(registry);
    Ok(Built {
        gateway,
        gateway_metrics,
        tls: Arc::new(ArcSwap::new(server.config())),
        hub,
        follow,
        writers,
        context: Arc::new(context),
        metrics,
        readiness,
    })
}

/// A client of KCP that retries nothing by itself: reconciles have their own backoff, and a retried write would hide a conflict.
async fn client(kubeconfig: Option<&Path>) -> Result<Client> {
    let mut config = match kubeconfig {
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path).with_context(|| format!("read {}", path.display()))?;
            kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
        None => kube::Config::incluster().context("find the account of the pod")?,
    };
    config.default_retry = false;
    config.connect_timeout = Some(Duration::from_secs(5));
    Client::try_from(config).context("build the client of the control plane")
}

fn server_identity(config: &Config) -> Result<ServerIdentity> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
    let tls = &config.tls;
    let clients = TrustBundle::from_pem(&read(&tls.client_ca)?).context("read the roots of the agents")?;
    ServerIdentity::from_pem(&read(&tls.tls_cert)?, &read(&tls.tls_key)?, &clients)
        .context("build the event port's TLS")
}

fn hub_settings(config: &Config) -> hub::Settings {
    hub::Settings {
        heartbeat: Duration::from_secs(config.heartbeat_seconds.into()),
        request_deadline: REQUEST_DEADLINE,
        slots: usize::from(config.concurrency),
        ..hub::Settings::default()
    }
}

fn gateway_settings(config: &Config, server: &ServerIdentity) -> gateway::Settings {
    let mut gateway =
        gateway::Settings::new(config.event_address, config.authority.clone(), config.trust_domain.clone());
    // A connection outlives a few heartbeats, or each would need a handshake.
    let heartbeats = 3 * Duration::from_secs(config.heartbeat_seconds.into());
    gateway.idle = gateway.idle.max(heartbeats);
    gateway.max_age = gateway.max_age.max(2 * heartbeats);
    gateway.trust_revision = Some(server.trust_revision().to_owned());
    gateway
}

/// Which life of the receiver this is: random, drawn at every start.
fn instance() -> Result<Instance> {
    let mut random = [0; 8];
    SystemRandom::new().fill(&mut random).ok().context("draw random bytes")?;
    Ok(Instance::new(u64::from_be_bytes(random)))
}
