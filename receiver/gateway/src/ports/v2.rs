//! Port of contract v2, which runtime-watcher's agents use: off unless `--v2` is given, with certificates of its own, and
//! never a way into v3. Connections are those of the gateway. Requests are unsigned and carry no state, so they can
//! only enqueue a Kyma.
//!
//! A request passes these steps in order, and the first refusal ends it:
//!
//! 1. path (404), announced length (413), method (405)
//! 2. authentication by the certificate of the connection, or by the one that the trusted proxy forwards (401; an empty
//!    name 400)
//! 3. rate and concurrency limits of that runtime (503, like every temporary refusal)
//! 4. the manager must exist (404; while the receiver is starting 503)
//! 5. the body, within its size limit (413), its deadline and the memory budget of all bodies; then JSON (400), unless
//!    another replica holds the runtime, to which the request is relayed
//! 6. the [`V2Intake`]: a runtime that has used v3 is refused unless its Kyma allows v2 (403), and delivery to another
//!    manager may fail (502). By then the request no longer counts as in flight, so that a hung manager delays no other request.

mod caller;
mod flags;
mod handler;
mod intake;
mod metrics;
mod tls_files;

use std::net::SocketAddr;

use tidewatch_api::identity::TrustDomain;
use tidewatch_contract::v2::MAX_BODY_BYTES;

pub use caller::{CallerVerifier, Proxy};
pub use flags::Flags;
pub use handler::V2Handler;
pub use intake::{V2Adapter, V2AllowList, V2Intake};
pub use metrics::Metrics;
pub use tls_files::{TlsFiles, TlsFilesError};

use super::{Limits, Settings};

/// Bytes of a request's head at most: a forwarded certificate of 32 KiB and the other fields.
const MAX_HEAD_BYTES: u32 = 48 << 10;

/// Connections of one runtime at most: runtime-watcher may open one for each event while an older one is in use.
const MAX_RUNTIME_CONNECTIONS: usize = 64;

/// Sustained requests per second of one runtime: runtime-watcher sends one for each event, and no request costs a
/// verification.
const REQUESTS_PER_SECOND: u32 = 200;

/// Returns the settings of this port: the gateway's defaults with the limits of v2. The trust domain is unused.
pub fn settings(address: SocketAddr, domain: TrustDomain) -> Settings {
    let settings = Settings::new(address, Vec::new(), domain);
    let limits = Limits { connections: MAX_RUNTIME_CONNECTIONS, per_second: REQUESTS_PER_SECOND, ..settings.limits };
    Settings { max_body: MAX_BODY_BYTES, max_head: MAX_HEAD_BYTES, limits, ..settings }
}

#[cfg(test)]
mod tests;
