//! State of one watch of the plan.

use std::sync::Arc;

use tidewatch_api::plan::{PlannedWatch, Work};
use tidewatch_contract::{digest::Digest, heartbeat::WatchState};
use tokio::time::Instant;

use super::WatchId;
use crate::index::Index;

pub(super) struct WatchEntry {
    pub(super) id: WatchId,
    pub(super) planned: Arc<PlannedWatch>,
    /// The watch of the plan; it differs from `planned` if that is on one resource of a group.
    pub(super) source: Arc<PlannedWatch>,
    /// On a resource that its group got after it was served first: until it is listed, the watch of the plan counts as
    /// listed without it.
    pub(super) is_late: bool,
    /// The plan has got it since the agent started.
    pub(super) is_added: bool,
    /// The events go to another manager; its protocol has objects only.
    pub(super) forward: bool,
    pub(super) index: Index,
    /// Objects changed while the index was coarse, and no complete list has followed.
    pub(super) lost: bool,
    /// Time of the last complete list.
    pub(super) listed: Option<Instant>,
    /// Time of the last event or bookmark.
    pub(super) alive: Option<Instant>,
    pub(super) error: Option<String>,
    /// Discovery has resolved the kind.
    pub(super) described: bool,
    /// The API server does not serve the kind.
    pub(super) not_served: bool,
    /// A list has completed or failed.
    pub(super) attempted: bool,
}

impl WatchEntry {
    pub(super) fn new(id: WatchId, planned: Arc<PlannedWatch>, source: Arc<PlannedWatch>, index: Index) -> Self {
        let forward = planned.work.contains(&Work::Forward);
        Self {
            id,
            planned,
            source,
            is_late: false,
            is_added: false,
            forward,
            index,
            lost: false,
            listed: None,
            alive: None,
            error: None,
            described: false,
            not_served: false,
            attempted: false,
        }
    }

    /// True if the watch is on one resource of a group.
    pub(super) fn is_part_of_group(&self) -> bool {
        self.source.is_of_group() && !self.planned.is_of_group()
    }

    /// True if the first list has completed, or need not be waited for.
    pub(super) const fn counts_as_listed(&self) -> bool {
        self.listed.is_some() || self.is_late
    }

    /// The state of this watch for a heartbeat.
    pub(super) fn state(&self, digest: Option<Digest>, now: Instant) -> WatchState {
        let ago = |at: Option<Instant>| at.map(|at| now.duration_since(at).as_secs());
        WatchState {
            name: self.source.name.clone(),
            objects: self.index.len() as u64,
            digest,
            listed_seconds_ago: ago(self.listed),
            alive_seconds_ago: ago(self.alive),
            coarse: self.index.is_coarse(),
            not_served: self.not_served,
            error: self.error.clone(),
        }
    }
}
