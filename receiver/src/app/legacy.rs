//! The port of contract v2, if it is wanted.

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::{
    config::Config,
    enrolment::Revocations,
    gateway::{self, Bind, Gateway, v2},
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
    ) -> anyhow::Result<Option<Self>> {
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

    /// Listens, on the runtime that polls this.
    pub(super) async fn bind(self) -> Result<Gateway<v2::Desk<v2::Legacy>>, Bind> {
        let Self { settings, tls, callers, take, metrics, shared } = self;
        Gateway::bind_v2(settings, tls, callers, take, metrics, shared).await
    }
}
