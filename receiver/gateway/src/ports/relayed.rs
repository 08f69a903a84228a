//! Relay port: TLS with the certificate of another replica, over HTTP/2. Its requests are those that the other replica
//! accepted from agents, with the client's certificate or address in fields that no other port reads.
//!
//! Each goes to the handler of the port that it would have come to here: that one verifies the certificate again, then
//! revocation, limits and signature, and counts it, so everything about a runtime is decided in one place, however its
//! requests arrive. The other replica is trusted for what no signature covers: the address of an enrolment, and the
//! possession of the key in contract v2.
//!
//! It also answers the questions of other replicas about the fleet (`relay::Answers`).

mod handler;

use std::{net::SocketAddr, time::Duration};

use tidewatch_api::identity::TrustDomain;

pub use handler::{RelayHandler, RelayedHandlers};

use super::Settings;

/// Bytes of a request's head at most: that of an agent, and a certificate.
const MAX_HEAD_BYTES: u32 = 64 << 10;
/// Connections of replicas at most: two of each, and those that they replace.
const MAX_CONNECTIONS: u32 = 256;

/// Returns the settings of this port. The limits of runtimes and bodies are those of the ports that accepted the requests.
pub fn settings(address: SocketAddr, domain: TrustDomain) -> Settings {
    Settings {
        max_connections: MAX_CONNECTIONS,
        max_handshakes: 64,
        // Covers an enrolment: two requests to the runtime and one to the issuer.
        response_deadline: Duration::from_secs(40),
        // Replicas open a new connection when their certificates or roots change.
        max_age: Duration::from_secs(60 * 60),
        max_head: MAX_HEAD_BYTES,
        ..Settings::new(address, Vec::new(), domain)
    }
}

#[cfg(test)]
mod tests;
