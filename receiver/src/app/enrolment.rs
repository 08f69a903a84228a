//! The enrolment port, if this receiver issues certificates.

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::{
    config::Config,
    ingress::{
        enrolment::{Enrolments, Metrics, Office},
        gateway::{self, Bind, Gateway, enrol},
    },
    kube::runtime_access::RuntimeAccess,
};

/// The port, built and not yet listening.
pub(super) struct Port {
    settings: gateway::Settings,
    tls: Arc<ArcSwap<rustls::ServerConfig>>,
    enrolments: Enrolments,
    metrics: gateway::Metrics,
}

impl Port {
    /// `tls` asks for no client certificate; `office` issues, and `access` reaches the runtimes that vouch for tokens.
    pub(super) fn build(
        config: &Config,
        tls: Arc<ArcSwap<rustls::ServerConfig>>,
        office: Office,
        access: RuntimeAccess,
        (room, port): (Metrics, gateway::Metrics),
    ) -> Self {
        let settings = enrol::settings(config.enrolment.enrolment_address, config.trust_domain.clone());
        let enrolments = Enrolments::new(&config.enrolment, office, access, room);
        Self { settings, tls, enrolments, metrics: port }
    }

    /// Listens, on the runtime that polls this.
    pub(super) async fn bind(self) -> Result<Gateway<enrol::Desk>, Bind> {
        let Self { settings, tls, enrolments, metrics } = self;
        Gateway::bind_enrolment(settings, tls, enrolments, metrics).await
    }
}
