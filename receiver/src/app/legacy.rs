//! The port of contract v2, if it is wanted.

use crate::{
    config::Config,
    ingress::{
        enrolment::Revocations,
        gateway::{self, Bind, Gateway, v2},
    },
    pki,
};

/// The port, built and not yet listening.
pub(super) struct Port {
    settings: gateway::Settings,
    files: v2::Files,
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
        (metrics, shared): (v2::Metrics, gateway::Metrics),
        pki: pki::Metrics,
    ) -> anyhow::Result<Option<Self>> {
        let flags = &config.v2;
        if !flags.v2 {
            return Ok(None);
        }
        let files = v2::Files::open(flags, config.tls.tls_cert.as_ref(), config.tls.tls_key.as_ref(), pki)?;
        let settings = v2::settings(flags.v2_address, config.trust_domain.clone());
        let settings = gateway::Settings { revocations, ..settings };
        Ok(Some(Self { settings, files, take, metrics, shared }))
    }

    /// Listens, on the runtime that polls what is returned; and what keeps its certificates up to date.
    pub(super) fn bind(self) -> (impl Future<Output = Result<Gateway<v2::Desk<v2::Legacy>>, Bind>>, v2::Files) {
        let Self { settings, files, take, metrics, shared } = self;
        let (tls, callers) = (files.tls(), files.callers());
        (Gateway::bind_v2(settings, tls, callers, take, metrics, shared), files)
    }
}
