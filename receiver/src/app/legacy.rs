//! Port of contract v2, if `--v2` is given.

use crate::{
    config::Config,
    ingress::{
        enrolment::Revocations,
        gateway::{self, BindError, Gateway, v2},
    },
    pki,
};

/// Port that does not listen yet.
pub(super) struct Port {
    settings: gateway::Settings,
    files: v2::TlsFiles,
    adapter: v2::V2Adapter,
    metrics: v2::Metrics,
    shared: gateway::PortMetrics,
}

impl Port {
    /// Builds the port; `None` without `--v2`.
    pub(super) fn build(
        config: &Config,
        adapter: v2::V2Adapter,
        revocations: Revocations,
        (metrics, shared): (v2::Metrics, gateway::PortMetrics),
        pki: pki::Metrics,
    ) -> anyhow::Result<Option<Self>> {
        let flags = &config.v2;
        if !flags.v2 {
            return Ok(None);
        }
        let files = v2::TlsFiles::open(flags, config.tls.tls_cert.as_ref(), config.tls.tls_key.as_ref(), pki)?;
        let settings = v2::settings(flags.v2_address, config.trust_domain.clone());
        let settings = gateway::Settings { revocations, ..settings };
        Ok(Some(Self { settings, files, adapter, metrics, shared }))
    }

    /// Returns a future that listens, on the executor that polls it, and the reloader of the port's TLS files.
    pub(super) fn bind(
        self,
    ) -> (impl Future<Output = Result<Gateway<v2::V2Handler<v2::V2Adapter>>, BindError>>, v2::TlsFiles) {
        let Self { settings, files, adapter, metrics, shared } = self;
        let (tls, callers) = (files.tls(), files.callers());
        let port = shared.clone();
        let handler = move |settings: &_| v2::V2Handler::new(settings, callers, adapter, metrics, shared);
        (Gateway::bind(settings, tls, port, handler), files)
    }
}
