//! The admin listener: what shows the fleet, to people and their tools. One thing can be done there: ask for a rotation of the CA.
//!
//! On loopback it speaks plain HTTP and trusts whoever reaches it. Anywhere else it speaks TLS and asks KCP about the bearer token of
//! each request (`auth`). `report` is what it shows, `server` is how.

mod auth;
pub mod report;
mod server;

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
use tokio::{net::TcpListener, time::Instant};

use crate::{
    fleet::hub::Hub,
    pki::{NotOrdered, Order, Ordered, Progress, Rotations},
};
use auth::Reviewer;

/// The path that shows the fleet; also the `nonResourceURL` that must be granted, with the verb `get`, for access by token.
pub const FLEET_PATH: &str = "/fleet";
/// The path that shows how far a rotation of the CA is; granted by the same name.
pub const ROTATION_PATH: &str = "/rotation";
/// The path that asks for a rotation of the CA; granted by the same name, with the verb `post`.
pub const ROTATE_PATH: &str = "/rotate-ca";

/// Where and to whom the fleet is shown.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Flags {
    /// Where the fleet is shown: on loopback in plain HTTP, or anywhere over TLS with `--admin-auth`.
    #[arg(long, env = "TIDEWATCH_ADMIN_ADDRESS", default_value = "127.0.0.1:8085")]
    pub admin_address: SocketAddr,

    /// Shows the fleet over TLS, with the event port's certificate, to bearers of a token whom the control plane allows to get the
    /// nonResourceURL `/fleet`; to get `/rotation` and to post `/rotate-ca` are granted likewise.
    #[arg(long, env = "TIDEWATCH_ADMIN_AUTH")]
    pub admin_auth: bool,
}

/// Why the admin listener does not listen.
#[derive(Debug, Error)]
pub enum Bind {
    /// Anybody could read it.
    #[error("the admin address {0} is not on loopback, which needs --admin-auth")]
    Exposed(SocketAddr),
    /// The address is taken or not ours.
    #[error("could not listen on {address}")]
    Listen {
        /// Which one.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// Who may see the fleet.
#[derive(Clone)]
enum Door {
    /// Whoever reaches it, which is whoever is on this machine or in this pod.
    Loopback,
    /// Whose token KCP knows and allows.
    Tokens(Arc<ArcSwap<ServerConfig>>, Reviewer),
}

/// What is shown; clones are the same. Empty until this receiver is the active one.
#[derive(Clone)]
pub struct Fleet(Arc<Shown>);

struct Shown {
    instance: Instance,
    started: Instant,
    active: OnceLock<(Hub, Rotations)>,
}

impl Fleet {
    /// Shows a receiver that waits.
    #[must_use]
    pub fn new(instance: Instance) -> Self {
        Self(Arc::new(Shown { instance, started: Instant::now(), active: OnceLock::new() }))
    }

    /// Shows the fleet of a receiver that has become active.
    pub fn is_of(&self, hub: Hub, rotations: Rotations) {
        // There is one of each in a process's life.
        let _ = self.0.active.set((hub, rotations));
    }

    /// How far the rotation of the CA is; `None` without a built-in CA, and while this receiver waits.
    fn rotation(&self) -> Option<Arc<Progress>> {
        self.0.active.get()?.1.progress()
    }

    /// Begins a rotation of the CA; `None` while this receiver waits.
    async fn rotate(&self, order: Order) -> Option<Result<Ordered, NotOrdered>> {
        let (_, rotations) = self.0.active.get()?;
        Some(rotations.order(order).await)
    }

    /// As it stands now.
    fn report(&self) -> report::Report {
        let views = self.0.active.get().map(|(hub, _)| hub.view());
        report::Report::new(self.0.instance, self.0.started.elapsed(), views)
    }
}

/// The listener, bound and not yet serving.
pub struct Admin {
    listener: TcpListener,
    address: SocketAddr,
    door: Door,
    fleet: Fleet,
}

impl Admin {
    /// Listens; port 0 for any. `tls` is what is presented, and `kcp` is asked about tokens, with `--admin-auth`.
    ///
    /// # Errors
    /// [`Bind`].
    pub async fn bind(flags: &Flags, tls: Arc<ArcSwap<ServerConfig>>, kcp: Client, fleet: Fleet) -> Result<Self, Bind> {
        let address = flags.admin_address;
        let door = match (flags.admin_auth, address.ip().is_loopback()) {
            (true, _) => Door::Tokens(tls, Reviewer::new(kcp)),
            (false, true) => Door::Loopback,
            (false, false) => return Err(Bind::Exposed(address)),
        };
        let failed = |source| Bind::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address, door, fleet })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// A table's answer must have left within this time, however slow its reader.
const DEADLINE: Duration = Duration::from_secs(30);
