//! Listeners of the agents: event port, contract v2 and enrolment port.

use std::sync::Arc;

use anyhow::Result;
use futures::FutureExt as _;
use tidewatch_fleet::{forward, table::RuntimeTable};
use tidewatch_gateway::{
    enrolment::EnrolmentService,
    ports::{
        self, Gateway, V3Handler,
        enrol::{self, EnrolmentHandler},
        v2::{self, V2Adapter, V2Handler},
    },
};

use super::{Binding, Builder};
use crate::app::{Process, changes};

impl Builder<'_> {
    pub(super) fn gateway(&self, enrolments: Option<EnrolmentService>) -> Binding<V3Handler<RuntimeTable>> {
        let Self { process: Process { config, tls_state, .. }, components, counters, .. } = self;
        let settings = ports::Settings {
            heartbeat_interval: components.fleet.heartbeat_interval(),
            proxy: tls_state.proxy.clone(),
            revocations: components.revocations.clone(),
            trust: Some(tls_state.trust()),
            departures: Some(Arc::new(components.fleet.clone())),
            enrolments,
            max_connections: self.connections.of(config.capacity.event_max_connections),
            handshake_steps: config.capacity.handshake_steps(),
            relay: self.sharding.relay(),
            start_gate: self.start_gate.clone(),
            ..ports::Settings::new(config.event_address, config.authority.clone(), config.trust_domain.clone())
        };
        let fleet = components.fleet.clone();
        let metrics = counters.gateway.clone();
        let handler = move |settings: &_| Arc::new(V3Handler::new(settings, fleet, metrics));
        Gateway::bind(settings, tls_state.events.clone(), handler).boxed()
    }

    pub(super) fn v2(&mut self, forward: forward::Client) -> Result<Option<Binding<V2Handler<V2Adapter>>>> {
        let Self { process: Process { config, pki, .. }, components, counters, .. } = self;
        let flags = &config.v2;
        if !flags.v2 {
            return Ok(None);
        }
        let changes::Components { fleet, plans, v2_allowed, revocations, .. } = components.clone();
        let files = v2::TlsFiles::open(flags, config.tls.tls_cert.as_ref(), config.tls.tls_key.as_ref(), pki.clone())?;
        let settings = v2::settings(flags.v2_address, config.trust_domain.clone());
        let max_connections = self.connections.of(flags.v2_max_connections);
        let handshake_steps = config.capacity.handshake_steps();
        let relay = self.sharding.relay();
        let start_gate = self.start_gate.clone();
        let settings = ports::Settings {
            departures: Some(Arc::new(fleet.clone())),
            revocations,
            max_connections,
            handshake_steps,
            relay,
            start_gate,
            ..settings
        };
        let adapter = V2Adapter::new(fleet, plans, v2_allowed, forward);
        let callers = files.callers.clone();
        let metrics = counters.v2.clone();
        let shared = counters.gateway.port.clone();
        let handler = move |settings: &_| Arc::new(V2Handler::new(settings, callers, adapter, metrics, shared));
        let binding = Gateway::bind(settings, files.tls.clone(), handler).boxed();
        self.tasks.push(files.run().boxed());
        Ok(Some(binding))
    }

    pub(super) fn enrolment(&self, enrolments: EnrolmentService) -> Binding<EnrolmentHandler> {
        let Self { process: Process { config, tls_state, .. }, counters, .. } = self;
        let settings = enrol::settings(config.enrolment.enrolment_address, config.trust_domain.clone());
        let max_connections = self.connections.of(config.enrolment.enrolment_max_connections);
        let relay = self.sharding.relay();
        let start_gate = self.start_gate.clone();
        let settings = ports::Settings { max_connections, relay, start_gate, ..settings };
        let metrics = counters.enrolment_port.clone();
        let handler = move |settings: &_| Arc::new(EnrolmentHandler::new(settings, enrolments, metrics));
        // The TLS configuration of this port requests no client certificate.
        Gateway::bind(settings, tls_state.enrolment.clone(), handler).boxed()
    }
}
