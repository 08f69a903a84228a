//! The admin listener: a report of the fleet, the progress of a CA rotation, and requests for one.
//!
//! On a loopback address it serves plain HTTP to every client. On other addresses it serves TLS and authorizes each
//! request's bearer token in KCP (`auth`). `report` is the JSON of the fleet, `routes` serves it.

mod auth;
pub mod report;
mod routes;

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use arc_swap::ArcSwap;
use clap::Args;
use kube::Client;
use rustls::ServerConfig;
use thiserror::Error;
use tidewatch_shared::identity::Instance;
use tokio::time::Instant;

use crate::{
    fleet::table::RuntimeTable,
    ingress::http::{HttpServer, Limits, ListenError},
    pki::{RotationError, RotationHandle, RotationProgress, RotationRequest, RotationResponse},
};
use auth::TokenReviewer;

/// Path of the fleet's report; also the `nonResourceURL` to grant, with the verb `get`, for access by token.
pub const FLEET_PATH: &str = "/fleet";
/// Path of the progress of a CA rotation; also the `nonResourceURL` to grant, with the verb `get`.
pub const ROTATION_PATH: &str = "/rotation";
/// Path that requests a CA rotation; also the `nonResourceURL` to grant, with the verb `post`.
pub const ROTATE_PATH: &str = "/rotate-ca";

/// Enough for a few operators; the deadline lets slow clients read the report of a large fleet.
const LIMITS: Limits = Limits { connections: 8, deadline: Duration::from_secs(30) };

/// Flags of the admin listener.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Admin")]
pub struct Flags {
    /// Listen address of the fleet's report and of CA rotations: plain HTTP on loopback; other addresses require
    /// --admin-auth
    #[arg(long, env = "TIDEWATCH_ADMIN_ADDRESS", default_value = "127.0.0.1:8085", value_name = "IP:PORT")]
    pub admin_address: SocketAddr,

    /// Serve the admin listener over TLS, with the event port's certificate, and authorize bearer tokens in the control
    /// plane: to get the nonResourceURLs `/fleet` and `/rotation`, and to post `/rotate-ca`
    #[arg(long, env = "TIDEWATCH_ADMIN_AUTH")]
    pub admin_auth: bool,
}

/// Failure to start the admin listener.
#[derive(Debug, Error)]
pub enum BindError {
    /// Clients outside this machine could connect without authentication.
    #[error("the admin address {0} is not on loopback, which needs --admin-auth")]
    Exposed(SocketAddr),
    /// The address cannot be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
}

/// Authorization of requests.
#[derive(Clone)]
enum AccessPolicy {
    /// Every client on the loopback interface, that is, in this pod or on this machine.
    Loopback,
    /// Bearers of a token that KCP authenticates and authorizes.
    Token(TokenReviewer),
}

/// Access to the fleet and to CA rotations, inactive until this receiver holds the Lease. Clones share one state.
#[derive(Clone)]
pub struct FleetHandle(Arc<Inner>);

struct Inner {
    instance: Instance,
    started: Instant,
    active: OnceLock<(RuntimeTable, RotationHandle)>,
}

impl FleetHandle {
    /// Makes the handle of a receiver that does not hold the Lease yet. Reports show the instance of the process, which is that
    /// of all its shards while one Lease stands for them.
    #[must_use]
    pub fn new(instance: Instance) -> Self {
        Self(Arc::new(Inner { instance, started: Instant::now(), active: OnceLock::new() }))
    }

    /// Connects the runtime table and the CA of the receiver that became active. Only the first call has an effect: a
    /// process becomes active once.
    pub fn activate(&self, fleet: RuntimeTable, rotations: RotationHandle) {
        let _ = self.0.active.set((fleet, rotations));
    }

    /// Progress of the CA rotation; `None` without a built-in CA, and while this receiver is inactive.
    fn rotation(&self) -> Option<Arc<RotationProgress>> {
        self.0.active.get()?.1.progress.borrow().clone()
    }

    /// Requests a CA rotation; `None` while this receiver is inactive.
    async fn rotate(&self, request: RotationRequest) -> Option<Result<RotationResponse, RotationError>> {
        let (_, rotations) = self.0.active.get()?;
        Some(rotations.request(request).await)
    }

    /// Report of the fleet now, without runtimes while this receiver is inactive.
    fn report(&self) -> report::Report {
        let views = self.0.active.get().map(|(fleet, _)| fleet.views());
        report::Report::new(self.0.instance, self.0.started.elapsed(), views)
    }
}

/// Binds the admin listener, with port 0 to any free port. With `--admin-auth` it serves with `tls` and reviews tokens
/// in `kcp`.
///
/// # Errors
/// [`BindError`].
pub async fn bind(
    flags: &Flags,
    tls: Arc<ArcSwap<ServerConfig>>,
    kcp: Client,
    fleet: FleetHandle,
) -> Result<HttpServer, BindError> {
    let address = flags.admin_address;
    let (policy, tls) = match (flags.admin_auth, address.ip().is_loopback()) {
        (true, _) => (AccessPolicy::Token(TokenReviewer::new(kcp)), Some(tls)),
        (false, true) => (AccessPolicy::Loopback, None),
        (false, false) => return Err(BindError::Exposed(address)),
    };
    let server = HttpServer::bind(address, LIMITS, tls, move |request| {
        let (policy, fleet) = (policy.clone(), fleet.clone());
        async move { routes::respond(&policy, &fleet, request).await }
    });
    Ok(server.await?)
}
