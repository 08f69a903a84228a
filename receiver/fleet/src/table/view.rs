//! Summaries of runtimes for the admin API, the state of their event paths, and tests.

use tidewatch_api::{identity::RuntimeId, key::KymaKey};
use tidewatch_contract::admin::{EventPath, fleet::RuntimeView};
use tidewatch_kit::variant::VariantName as _;
use tokio::time::Instant;

use super::{RuntimeTable, metrics::FleetTotals, rfc3339, state::State};
use crate::{PathState, PathThresholds, Unproven, queue::WorkSet};

/// The state in the form of the report.
fn event_path(path: &PathState) -> EventPath {
    EventPath { state: path.status(), reason: path.as_str().to_owned(), message: message(path) }
}

/// Details that the reason does not contain.
fn message(path: &PathState) -> Option<String> {
    let PathState::Unproven(flaw) = path else { return None };
    match flaw {
        Unproven::OldPlan { error } => {
            error.as_ref().map(|error| format!("the agent cannot apply the newest plan or settings: {error}"))
        }
        Unproven::FailingWatch { watch, error: Some(error) } => Some(format!("{watch}: {error}")),
        Unproven::FailingWatch { watch, error: None } => Some(format!("{watch} is not listed")),
        Unproven::Diverged { watch } => Some(watch.clone()),
        Unproven::StaleCanary { came_back: false } => Some("the canary never came back".to_owned()),
        _ => None,
    }
}

impl RuntimeTable {
    /// Path state of a Kyma's runtime; `None` for an unknown Kyma.
    pub fn path(&self, key: &KymaKey, now: Instant) -> Option<PathState> {
        self.with_kyma(key, |state, _| Some(state.kymas.get(key)?.runtime.path(state.thresholds(state.started), now)))?
    }

    /// Kymas with a path that changed since the last call; all of them at the first call. Also updates metrics that
    /// change with time alone. Supports one caller, about once per second.
    #[must_use]
    pub fn changed_paths(&self) -> Vec<(KymaKey, PathState)> {
        let mut totals = FleetTotals::default();
        let mut changed = Vec::new();
        self.in_chunks(|state, keys, now| {
            let thresholds = state.thresholds(state.started);
            for key in keys {
                let Some(entry) = state.kymas.get_mut(key) else { continue };
                let path = entry.runtime.path(thresholds, now);
                totals.add(key, &path, entry.runtime.last_heartbeat.as_ref());
                if entry.reported_path.as_ref() != Some(&path) {
                    entry.reported_path = Some(path.clone());
                    changed.push((key.clone(), path));
                }
            }
        });
        self.0.metrics.observe_ages(&self.0.shared.queue(), Instant::now());
        self.0.metrics.set_totals(&totals);
        changed.sort_by(|(one, _), (other, _)| one.cmp(other));
        changed
    }

    /// Number of runtimes with a Kyma in all shards of the fleet. Of those that other replicas hold, each Kyma with a runtime id
    /// counts.
    pub fn runtimes_of_fleet(&self) -> usize {
        self.runtimes() + self.directory().runtimes_elsewhere()
    }

    /// Summary of each Kyma, in the order of their keys.
    pub fn views(&self) -> Vec<RuntimeView> {
        let mut views = Vec::new();
        self.in_chunks(|state, keys, now| {
            let thresholds = state.thresholds(state.started);
            views.extend(keys.iter().filter_map(|key| view(state, key, thresholds, now)));
        });
        let key = |view: &RuntimeView| (view.namespace.clone(), view.kyma.clone());
        views.sort_by_cached_key(key);
        views.dedup_by_key(|view| key(view));
        views
    }
}

/// Summary of a Kyma.
fn view(state: &State, key: &KymaKey, thresholds: PathThresholds, now: Instant) -> Option<RuntimeView> {
    let entry = state.kymas.get(key)?;
    let runtime = &entry.runtime;
    let queue = state.shared.queue();
    let (queued, paused) = (queue.queued(key), queue.parked(key));
    let (in_progress, failures) = (queue.in_progress(key), queue.failures(key));
    drop(queue);
    let heartbeat = runtime.last_heartbeat.as_ref();
    let plan_revision = heartbeat.and_then(|heartbeat| heartbeat.plan_revision.as_deref());
    let renewal_failed_since = heartbeat.and_then(|heartbeat| heartbeat.renewal_failed_since);
    let epochs = runtime.epochs();
    let unsettled: WorkSet = epochs.iter().flat_map(|epoch| epoch.unsettled.iter().copied()).collect();
    Some(RuntimeView {
        kyma: key.name.clone(),
        namespace: key.namespace.clone(),
        runtime_id: entry.id.as_ref().map(RuntimeId::to_string),
        ambiguous: state.is_ambiguous(entry),
        path: event_path(&runtime.path(thresholds, now)),
        contract: runtime.contract.as_str().to_owned(),
        last_seen_seconds: heartbeat.map(|heartbeat| now.saturating_duration_since(heartbeat.at).as_secs()),
        heartbeat_seconds: runtime.interval(thresholds).as_secs(),
        canary_age_seconds: heartbeat.and_then(|heartbeat| heartbeat.canary_age(now)).map(|age| age.as_secs()),
        agent_version: heartbeat.map(|heartbeat| heartbeat.agent_version.clone()),
        plan_revision: plan_revision.map(str::to_owned),
        plan_is_current: plan_revision == Some(runtime.plan_revision()),
        certificate_not_after: heartbeat.map(|heartbeat| heartbeat.certificate_not_after.clone()),
        renewal_failed_since: renewal_failed_since.map(|since| rfc3339(since.into())),
        waiting: heartbeat.map_or(0, |heartbeat| heartbeat.waiting),
        parked: heartbeat.map_or(0, |heartbeat| heartbeat.parked),
        not_served: heartbeat.map_or(0, |heartbeat| heartbeat.not_served),
        coarse: heartbeat.map_or(0, |heartbeat| heartbeat.coarse),
        gaps: epochs.iter().map(|epoch| epoch.gaps).sum(),
        duplicates: epochs.iter().map(|epoch| epoch.duplicates).sum(),
        unsettled: unsettled.iter().collect(),
        queued: queued.iter().collect(),
        paused: paused.iter().collect(),
        in_progress,
        failures,
        epochs,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn path_has_the_state_and_reason_of_the_condition() {
        let watch = || "pods".to_owned();
        for (path, state) in [
            (PathState::Unknown, "Unknown"),
            (PathState::Proven, "True"),
            (PathState::Unproven(Unproven::NoHeartbeat), "False"),
            (PathState::Unproven(Unproven::Away), "Unknown"),
            (PathState::Unproven(Unproven::LegacyAgent), "Unknown"),
            (PathState::Unproven(Unproven::OldPlan { error: None }), "False"),
            (PathState::Unproven(Unproven::FailingWatch { watch: watch(), error: None }), "False"),
            (PathState::Unproven(Unproven::Diverged { watch: watch() }), "False"),
            (PathState::Unproven(Unproven::StaleCanary { came_back: true }), "False"),
        ] {
            let path_json = json!(event_path(&path));
            assert_eq!((&path_json["state"], &path_json["reason"]), (&json!(state), &json!(path.as_str())));
        }
    }
}
