//! The port of contract v2, if it is wanted.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Result;
use arc_swap::ArcSwap;
use tokio::{runtime::Runtime, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    config::Config,
    enrolment::Revocations,
    gateway::{self, Gateway, v2},
};

/// The port, built and not yet listening.
pub(super) struct Port {
    settings: gateway::Settings,
    tls: Arc<ArcSwap<rustls::ServerConfig>>,
    callers: v2::Callers,
    take: v2::Legacy,
    metrics: v2::Metrics,
    shared: gateway::Metrics,
}

impl Port {
    /// `None` unless `--v2` is given.
    pub(super) fn build(
        config: &Config,
        take: v2::Legacy,
        revocations: Revocations,
        metrics: v2::Metrics,
        shared: gateway::Metrics,
    ) -> Result<Option<Self>> {
        let flags = &config.v2;
        if !flags.v2 {
            return Ok(None);
        }
        let (identity, callers) = flags.tls(config.tls.tls_cert.as_ref(), config.tls.tls_key.as_ref())?;
        let settings = v2::settings(flags.v2_address, config.trust_domain.clone());
        let settings = gateway::Settings { revocations, ..settings };
        let tls = Arc::new(ArcSwap::new(identity.config()));
        Ok(Some(Self { settings, tls, callers, take, metrics, shared }))
    }

    /// Starts it on the gateway's runtime; its end is a task of ours.
    pub(super) async fn listen(
        self,
        runtime: &Runtime,
        shutdown: &CancellationToken,
        tasks: &mut JoinSet<&'static str>,
    ) -> Result<SocketAddr> {
        let Self { settings, tls, callers, take, metrics, shared } = self;
        let binding = Gateway::bind_v2(settings, tls, callers, take, metrics, shared);
        super::start(runtime, binding, "gateway of contract v2", shutdown, tasks).await
    }
}
