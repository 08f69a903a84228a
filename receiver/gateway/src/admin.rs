//! The admin listener: reports of the fleet and of its shards, the progress of a CA rotation, and requests for one.
//!
//! Any replica serves it: what it does not know itself it asks of the others (`fleet`), and never shows a part as the whole.
//!
//! On a loopback address it serves plain HTTP to every client. On other addresses it serves TLS and authorizes each
//! request's bearer token in KCP (`auth`). `report` makes the report of the fleet, `shards` that of the shards, `routes`
//! serves them.

mod auth;
mod fleet;
mod report;
mod routes;
mod shards;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use clap::Args;
use kube::Client;
use rustls::ServerConfig;
use thiserror::Error;

use crate::http::{HttpServer, Limits, ListenError};
use auth::TokenReviewer;

pub use fleet::{ActiveFleet, FleetHandle};

/// Enough for a few operators; the deadline lets slow clients read the report of a large fleet.
const LIMITS: Limits = Limits { connections: 8, deadline: Duration::from_secs(30) };

/// Flags of the admin listener.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Admin")]
pub struct Flags {
    /// Listen address of the reports of the fleet and of CA rotations: plain HTTP on loopback; other addresses require
    /// --admin-auth
    #[arg(long, env = "TIDEWATCH_ADMIN_ADDRESS", default_value = "127.0.0.1:8085", value_name = "IP:PORT")]
    pub admin_address: SocketAddr,

    /// Serve the admin listener over TLS, with the event port's certificate, and authorize bearer tokens in the control
    /// plane: to get the nonResourceURLs `/fleet`, `/shards` and `/rotation`, and to post `/rotate-ca`
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
        let policy = policy.clone();
        let fleet = fleet.clone();
        async move { routes::respond(&policy, &fleet, request).await }
    });
    Ok(server.await?)
}
