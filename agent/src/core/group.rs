//! Watches on all resources of a group: each resource has a watch of its own, with its own index, list and dirty set. To
//! the receiver they are one watch, that of the plan: events carry its name, its digest is the sum of theirs, and what
//! it settles is settled in each.
//!
//! The watch of the plan itself stays among them without objects. It stands for the lookup of the resources: it is listed
//! when the first lookup has succeeded, and coarse while the group has more resources than are watched.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

use tidewatch_api::plan::{MAX_WATCHES, PlannedWatch};
use tidewatch_contract::{digest::Digest, heartbeat::WatchState};
use tokio::time::Instant;

use super::{Core, PlanChanges, StartedWatch, State, WatchId, entry::WatchEntry};
use crate::clock;

/// Number of resources of one group that are watched, at most. Each takes a connection to the API server.
const MAX_RESOURCES: usize = 100;
/// Between the name of the watch of the plan and the resource. It sorts before every character of a name, so the parts of
/// a group directly follow its watch of the plan.
const SEPARATOR: char = ' ';

impl Core {
    /// A lookup found these resources of a group. Returns the loops to stop and to start. A part whose resource is no
    /// longer served ends once its events are settled.
    pub fn expand(&self, id: WatchId, served: &BTreeSet<String>, now: Instant) -> PlanChanges {
        self.with_wake(|state| state.expand(id, served, now))
    }
}

/// True if both are watches on the same group of an API.
pub(super) fn is_same(one: &PlannedWatch, other: &PlannedWatch) -> bool {
    one.is_of_group() && other.is_of_group() && one.group == other.group
}

fn prefix(name: &str) -> String {
    format!("{name}{SEPARATOR}")
}

fn part_name(name: &str, resource: &str) -> Arc<str> {
    format!("{name}{SEPARATOR}{resource}").into()
}

impl State {
    fn expand(&mut self, id: WatchId, served: &BTreeSet<String>, now: Instant) -> PlanChanges {
        let Some(name) = self.name_of(id) else { return PlanChanges::default() };
        let Some(watched) = self.watched(id) else { return PlanChanges::default() };
        let source = watched.source.clone();
        let is_first = watched.listed.is_none();
        let stopped = self.end_parts(&name, served);
        let open = self.parts(&name).count();
        let mut room = MAX_RESOURCES.saturating_sub(open).min(MAX_WATCHES.saturating_sub(self.watches.len()));
        let mut started = Vec::new();
        let mut is_over = false;
        for resource in served {
            let part = part_name(&name, resource);
            if self.watches.contains_key(&part) {
                continue;
            }
            // A resource that carries secrets is no part.
            let Ok(planned) = source.of_resource(resource) else { continue };
            if room == 0 {
                is_over = true;
                break;
            }
            room -= 1;
            started.push(self.open(part.clone(), &Arc::new(planned), &source, None));
            if let Some(opened) = self.watches.get_mut(&part) {
                opened.is_late = !is_first;
            }
        }
        self.looked_up(id, &name, is_over, now);
        if let Some(watched) = self.watched(id) {
            watched.not_served = served.is_empty();
        }
        PlanChanges { stopped, started }
    }

    /// Notes a successful lookup of a group. The first one counts as a list, as does the first one after which all
    /// resources are watched again. While some are not, each lookup marks the watch as changed, since they may be.
    fn looked_up(&mut self, id: WatchId, name: &Arc<str>, is_over: bool, now: Instant) {
        let Some(watched) = self.watched(id) else { return };
        let is_list_due = watched.listed.is_none() || (watched.index.is_coarse() && !is_over);
        watched.alive = Some(now);
        watched.error = None;
        if is_list_due {
            watched.index.begin_list();
            self.list_complete(id, now);
        }
        if is_over && let Some(watched) = self.watched(id) {
            watched.index.go_coarse();
            watched.lost = true;
            self.outbox.go_coarse(name, clock::unix_millis());
        }
    }

    /// Ends the parts whose resources are not served, neither by this lookup nor by those of the part itself, and which
    /// have no unsettled events.
    fn end_parts(&mut self, name: &str, served: &BTreeSet<String>) -> Vec<Arc<str>> {
        let has_ended = |(part, watched): &(&Arc<str>, &WatchEntry)| {
            watched.not_served && !served.contains(&watched.planned.resource) && self.outbox.dirty(part) == 0
        };
        let ended: Vec<Arc<str>> = self.parts(name).filter(has_ended).map(|(part, _)| part.clone()).collect();
        for part in &ended {
            self.watches.remove(part);
            self.outbox.close(part);
        }
        ended
    }

    /// Parts of the watch of a group, by their names.
    fn parts(&self, name: &str) -> impl Iterator<Item = (&Arc<str>, &WatchEntry)> {
        let behind = self.watches.range::<str, _>((Excluded(name), Unbounded));
        behind.take_while(move |(_, watched)| watched.is_part_of_group() && watched.source.name == name)
    }

    /// Opens the parts again that the previous watch on the same group had, because they may have lost deletions.
    pub(super) fn reopen_parts(
        &mut self,
        name: &str,
        planned: &Arc<PlannedWatch>,
        before: &BTreeMap<Arc<str>, WatchEntry>,
    ) -> Vec<StartedWatch> {
        let is_part = |watched: &&WatchEntry| {
            watched.is_part_of_group() && watched.source.name == name && is_same(&watched.source, planned)
        };
        let mut started = Vec::new();
        for watched in before.values().filter(is_part) {
            let resource = &watched.planned.resource;
            let Ok(part) = planned.of_resource(resource) else { continue };
            started.push(self.open(part_name(name, resource), &Arc::new(part), planned, Some(watched)));
        }
        started
    }

    /// States of the watches of the plan for a heartbeat; `digest` returns that of everything sent of a watch.
    pub(super) fn watch_states(&self, now: Instant, digest: impl Fn(&str) -> Option<Digest>) -> Vec<WatchState> {
        let mut states: Vec<WatchState> = Vec::new();
        for (name, watched) in &self.watches {
            let state = watched.state(digest(name), now);
            match states.last_mut().filter(|_| watched.is_part_of_group()) {
                Some(group) => add(group, state, watched),
                None => states.push(state),
            }
        }
        for state in &mut states {
            state.digest = state.digest.map(|digest| digest + self.outbox.closed_digest(&prefix(&state.name)));
        }
        states
    }

    /// Number of watches of the plan for which, or for a part of which, a condition holds.
    pub(super) fn count_planned(&self, holds: impl Fn(&WatchEntry) -> bool) -> usize {
        let mut counted: Vec<&str> =
            self.watches.values().filter(|watched| holds(watched)).map(|watched| &*watched.source.name).collect();
        counted.dedup();
        counted.len()
    }

    /// Number of objects per watch of the plan.
    pub(super) fn objects(&self) -> Vec<(Arc<str>, usize)> {
        let mut objects: Vec<(Arc<str>, usize)> = Vec::new();
        for (name, watched) in &self.watches {
            match objects.last_mut().filter(|_| watched.is_part_of_group()) {
                Some((_, sum)) => *sum += watched.index.len(),
                None => objects.push((name.clone(), watched.index.len())),
            }
        }
        objects
    }
}

/// Adds the state of a part to that of its group.
fn add(group: &mut WatchState, part: WatchState, watched: &WatchEntry) {
    group.objects += part.objects;
    group.digest = group.digest.zip(part.digest).map(|(sum, digest)| sum + digest);
    let is_awaited = part.listed_seconds_ago.is_some() || !watched.is_late;
    if is_awaited {
        let both = group.listed_seconds_ago.zip(part.listed_seconds_ago);
        group.listed_seconds_ago = both.map(|(one, other)| one.max(other));
    }
    group.alive_seconds_ago = group.alive_seconds_ago.max(part.alive_seconds_ago);
    group.coarse |= part.coarse;
    group.not_served &= part.not_served;
    let error = part.error.map(|error| format!("{}: {error}", watched.planned.resource));
    group.error = group.error.take().or(error);
}

#[cfg(test)]
mod tests;
