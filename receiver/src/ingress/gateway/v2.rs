//! The port of contract v2, the incumbent's: off unless `--v2` is given, with certificates of its own, and never a way
//! into v3. Connections are those of the gateway; what is said on them is unsigned, names no state, and so can only wake a Kyma.
//!
//! A request goes this way, and the first refusal ends it:
//!
//! 1. path (404), announced length (413), method (405)
//! 2. who calls: the certificate of the connection, or the one that the trusted proxy forwards (401; an empty name 400)
//! 3. rate and requests in flight of that runtime (503, as everything that is only too much for now)
//! 4. the manager must be known (404; while the receiver is starting 503)
//! 5. the body, within its limit (413), its deadline and the budget of all bodies; then JSON (400)
//! 6. the [`Take`]: a runtime that has spoken v3 is refused unless it is allowed again (403), and another manager may not take it (502). By
//!    then the request counts no longer among those in flight, so that a manager that hangs delays no other.

mod caller;
mod desk;
mod files;
mod flags;
mod metrics;
mod refusal;
mod take;

use std::{net::SocketAddr, sync::Arc};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tidewatch_shared::{identity::TrustDomain, v2::MAX_BODY_BYTES};

pub use caller::{Callers, Proxy};
pub use desk::Desk;
pub use files::{BuildTls, Files};
pub use flags::Flags;
pub use metrics::Metrics;
pub use take::{Allowed, Legacy, NotTaken, Take};

use super::{Bind, Gateway, Limits, Settings};

/// Bytes of a request's head: a forwarded certificate of 32 KiB, and what else stands there.
const MAX_HEAD_BYTES: u32 = 48 << 10;

/// Connections of one runtime.
const MAX_CONNECTIONS: usize = 64;

/// The settings of this port: the gateway's own, with the limits of v2. The trust domain is of no use here.
#[must_use]
pub fn settings(address: SocketAddr, domain: TrustDomain) -> Settings {
    let settings = Settings::new(address, Vec::new(), domain);
    // The incumbent may open a connection for each event, and an older one may be in use.
    let limits = Limits { connections: MAX_CONNECTIONS, ..settings.limits };
    Settings { max_body: MAX_BODY_BYTES, max_head: MAX_HEAD_BYTES, limits, ..settings }
}

impl<T: Take> Gateway<Desk<T>> {
    /// Listens for what v2 says. `shared` are the metrics of the whole gateway, where this port is the route `v2`.
    ///
    /// # Errors
    /// [`Bind`].
    pub async fn bind_v2(
        settings: Settings,
        tls: Arc<ArcSwap<ServerConfig>>,
        callers: Callers,
        take: T,
        metrics: Metrics,
        shared: super::Metrics,
    ) -> Result<Self, Bind> {
        let desk = |settings: &Settings| Desk::new(settings, callers, take, metrics, shared.clone());
        Self::listen(settings, tls, desk, shared.clone()).await
    }
}

#[cfg(test)]
mod tests;
