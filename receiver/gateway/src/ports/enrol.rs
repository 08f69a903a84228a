//! Enrolment port: TLS without client certificates, because a new agent has none.
//! [`EnrolmentService`](crate::enrolment::EnrolmentService) decides on enrolments; connections are those of
//! the gateway with separate limits, so that a flood here affects no event.

mod handler;

use std::{net::SocketAddr, time::Duration};

use tidewatch_api::identity::TrustDomain;
use tidewatch_contract::enrolment::MAX_REQUEST_BYTES;

pub use handler::EnrolmentHandler;

use super::Settings;
use crate::enrolment::MAX_CONNECTIONS;

/// Bytes of a request's head at most: a token and the other fields.
const MAX_HEAD_BYTES: u32 = 16 << 10;

/// Returns the settings of this port. Connections are short: an agent enrols once and then uses the event port. If all
/// agents of a large fleet connect at once, excess connections wait in the kernel's backlog, or are retried with jitter
/// once that is full too.
pub fn settings(address: SocketAddr, domain: TrustDomain) -> Settings {
    Settings {
        max_connections: MAX_CONNECTIONS,
        max_handshakes: 256,
        head_deadline: Duration::from_secs(5),
        body_deadline: Duration::from_secs(5),
        // Covers two requests to the runtime and one to the issuer.
        response_deadline: Duration::from_secs(40),
        idle: Duration::from_secs(5),
        max_age: Duration::from_secs(60),
        max_head: MAX_HEAD_BYTES,
        max_body: MAX_REQUEST_BYTES,
        body_budget: 16 << 20,
        ..Settings::new(address, Vec::new(), domain)
    }
}

#[cfg(test)]
mod tests;
