//! The runtime's API server: requests with a deadline and a byte limit, over HTTP/2 where it is offered.
//!
//! The client is our own, some three hundred lines: the agent speaks four kinds of requests, and what a general client brings
//! along for the others would be more than half of the memory that the agent may have.

mod access;
mod call;
mod kubeconfig;
mod lane;
mod transport;

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

pub(crate) use access::{Access, Connect};
pub(crate) use call::{Accept, Call};
#[cfg(test)]
pub(crate) use lane::Transport;
pub(crate) use lane::{Body, Lane};
use transport::Https;

/// Long requests on one connection. API servers allow 100 streams each; the rest is for lists.
const WATCHES_PER_LANE: usize = 64;

/// Whether a text is a kubeconfig that the agent would use. Client certificates that it names as files are read.
pub(crate) fn is_kubeconfig(text: &[u8]) -> bool {
    kubeconfig::parse(text, Path::new("")).is_ok()
}

/// The API server; clones share its connections.
#[derive(Clone)]
pub(crate) struct Cluster(Arc<Inner>);

struct Inner {
    access: Access,
    lanes: Mutex<Vec<Lane>>,
}

impl Cluster {
    /// Reads a kubeconfig, or finds the pod's own account in its folder. Nothing is connected yet.
    pub(crate) fn load(kubeconfig: Option<&Path>, account: &Path) -> Result<Self, Connect> {
        let access = match kubeconfig {
            Some(path) => kubeconfig::read(path)?,
            None => Access::in_cluster(account)?,
        };
        let cluster = Self(Arc::new(Inner { access, lanes: Mutex::default() }));
        // The first lane is made now, so that a configuration that cannot work ends the start.
        cluster.lane(0)?;
        Ok(cluster)
    }

    /// The connection for the watch in a slot; slots are small numbers that are used again.
    pub(crate) fn lane(&self, slot: usize) -> Result<Lane, Connect> {
        let number = slot / WATCHES_PER_LANE;
        let mut lanes = self.0.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        while lanes.len() <= number {
            lanes.push(Lane::new(Https::new(self.0.access.clone())?));
        }
        Ok(lanes[number].clone())
    }
}
