//! Client for the runtime's API server: requests with deadlines and size limits, over HTTP/2 where the server offers
//! it.
//!
//! Not a general-purpose client: the agent uses four kinds of requests, and the rest of such a client would take more
//! than half of the agent's memory budget.

mod access;
mod client;
mod error;
mod kubeconfig;

use std::{path::Path, sync::Arc};

use parking_lot::Mutex;

pub(crate) use access::{Access, ClientSetupError};
use client::Https;
pub(crate) use client::{ApiClient, Body};
#[cfg(test)]
pub(crate) use client::{CONNECTION_SETTINGS, Transport};
pub(crate) use error::{Accept, ApiError};

/// Watches per connection. API servers allow 100 streams each; the remainder is for lists.
pub(crate) const WATCHES_PER_CLIENT: usize = 64;

/// Reports whether `text` is a kubeconfig that the agent accepts. Reads client certificates that it references as
/// files.
#[cfg(feature = "testing")]
pub(crate) fn is_kubeconfig(text: &[u8]) -> bool {
    kubeconfig::parse(text, Path::new("")).is_ok()
}

/// Clients of one API server; clones share the connections.
#[derive(Clone)]
pub(crate) struct ClientPool(Arc<Inner>);

struct Inner {
    /// Transport that the clients copy. It is set up at the start, so that an invalid configuration fails the start, and no
    /// watch later.
    transport: Https,
    clients: Mutex<Vec<ApiClient>>,
}

impl ClientPool {
    /// Loads the kubeconfig, or else the pod's service account from its directory. Opens no connection.
    pub(crate) fn load(kubeconfig: Option<&Path>, account: &Path) -> Result<Self, ClientSetupError> {
        let access = match kubeconfig {
            Some(path) => kubeconfig::read(path)?,
            None => Access::in_cluster(account)?,
        };
        Ok(Self(Arc::new(Inner { transport: Https::new(access)?, clients: Mutex::default() })))
    }

    /// The client for the watch in `slot`; slots are small numbers that are reused. It is an [`ApiClient`] over [`Https`] over a
    /// [`Connection`](crate::connection::Connection).
    pub(crate) fn client(&self, slot: usize) -> ApiClient {
        let number = slot / WATCHES_PER_CLIENT;
        let mut clients = self.0.clients.lock();
        while clients.len() <= number {
            clients.push(ApiClient::new(self.0.transport.another()));
        }
        clients[number].clone()
    }
}
