//! One watch of the plan, as far as the core knows it.

use std::sync::Arc;

use tidewatch_shared::{
    digest::Digest,
    heartbeat::WatchState,
    plan::{PlannedWatch, Work},
};
use tokio::time::Instant;

use super::WatchId;
use crate::index::Index;

pub(super) struct Watched {
    pub(super) id: WatchId,
    pub(super) planned: Arc<PlannedWatch>,
    /// Its events go to another manager, which knows objects only.
    pub(super) forward: bool,
    pub(super) index: Index,
    /// Objects changed while nobody could name them, and no list has told since which are there.
    pub(super) lost: bool,
    /// When its last list was complete.
    pub(super) listed: Option<Instant>,
    /// When it last said anything.
    pub(super) alive: Option<Instant>,
    pub(super) error: Option<String>,
    /// It has been listed or refused at least once.
    pub(super) tried: bool,
}

impl Watched {
    pub(super) fn new(id: WatchId, planned: Arc<PlannedWatch>, index: Index) -> Self {
        let forward = planned.work.contains(&Work::Forward);
        Self { id, planned, forward, index, lost: false, listed: None, alive: None, error: None, tried: false }
    }

    /// As a heartbeat says it.
    pub(super) fn state(&self, name: &str, digest: Option<Digest>, now: Instant) -> WatchState {
        let ago = |at: Option<Instant>| at.map(|at| now.duration_since(at).as_secs());
        WatchState {
            name: name.to_owned(),
            objects: self.index.len() as u64,
            digest,
            listed_seconds_ago: ago(self.listed),
            alive_seconds_ago: ago(self.alive),
            coarse: self.index.is_coarse(),
            error: self.error.clone(),
        }
    }
}
