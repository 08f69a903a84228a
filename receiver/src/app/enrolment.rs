//! The enrolment port, if this receiver issues certificates.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Result;
use arc_swap::ArcSwap;
use tokio::{runtime::Runtime, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    config::Config,
    enrolment::{Enrolments, Metrics, Office},
    gateway::{self, Gateway, enrol},
    runtime_access::RuntimeAccess,
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

    /// Starts it on a runtime of its own; its end is a task of ours.
    pub(super) async fn listen(
        self,
        runtime: &Runtime,
        shutdown: &CancellationToken,
        tasks: &mut JoinSet<&'static str>,
    ) -> Result<SocketAddr> {
        let Self { settings, tls, enrolments, metrics } = self;
        let binding = Gateway::bind_enrolment(settings, tls, enrolments, metrics);
        super::start(runtime, binding, "enrolment port", shutdown, tasks).await
    }
}
