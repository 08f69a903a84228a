//! Enrolment port, if this receiver issues certificates.

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::{
    config::Config,
    ingress::{
        enrolment::{CertificateIssuer, EnrolmentService, Metrics},
        gateway::{self, BindError, Gateway, enrol},
    },
    kube::runtime_access::RuntimeAccess,
};

/// Port that does not listen yet.
pub(super) struct Port {
    settings: gateway::Settings,
    tls: Arc<ArcSwap<rustls::ServerConfig>>,
    enrolments: EnrolmentService,
    metrics: gateway::PortMetrics,
}

impl Port {
    /// `tls` requests no client certificate. `access` provides clients of the runtimes, which review the tokens.
    pub(super) fn build(
        config: &Config,
        tls: Arc<ArcSwap<rustls::ServerConfig>>,
        certificate_issuer: CertificateIssuer,
        access: RuntimeAccess,
        (metrics, port_metrics): (Metrics, gateway::PortMetrics),
    ) -> Self {
        let settings = enrol::settings(config.enrolment.enrolment_address, config.trust_domain.clone());
        let enrolments = EnrolmentService::new(&config.enrolment, certificate_issuer, access, metrics);
        Self { settings, tls, enrolments, metrics: port_metrics }
    }

    /// Listens, on the executor that polls the future.
    pub(super) async fn bind(self) -> Result<Gateway<enrol::EnrolmentHandler>, BindError> {
        let Self { settings, tls, enrolments, metrics } = self;
        let port = metrics.clone();
        Gateway::bind(settings, tls, port, |settings| enrol::EnrolmentHandler::new(settings, enrolments, metrics)).await
    }
}
