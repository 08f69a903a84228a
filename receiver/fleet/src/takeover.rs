//! Selection of the Kymas that this receiver manages, beside lifecycle-manager that manages the others.
//!
//! Both write with the same field managers, so they must never reconcile one Kyma concurrently. `--kyma-selector`
//! decides. lifecycle-manager may still be reconciling a Kyma that is selected anew, so this receiver leaves it alone until
//! the Kyma has not been written for a quiet period. The label `tidewatch-hand-back` requests the way back: this
//! receiver's last write sets the label to `done`, and Kymas with that value are not selected. Removing a selected
//! label instead cancels the running reconcile and leaves everything in place.

use std::{collections::HashMap, sync::Arc, time::Duration};

use kube::ResourceExt as _;
use parking_lot::Mutex;
use tidewatch_api::{Kyma, facts::KymaFacts, key::KymaKey, selectors::KymaSelector};
use tokio::time::Instant;

use crate::pause::Pause;

/// Selection of Kymas and pending takeovers. Clones share one state; the default selects all Kymas without a quiet
/// period.
#[derive(Clone, Debug, Default)]
pub struct Takeover(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    selector: KymaSelector,
    quiet: Duration,
    /// Bounded by the number of Kymas.
    pending: Mutex<HashMap<KymaKey, PendingTakeover>>,
}

/// A selected Kyma that another controller may still reconcile.
#[derive(Debug)]
struct PendingTakeover {
    /// resourceVersion last read; another one means that the Kyma was written.
    version: String,
    until: Instant,
    /// It had our annotation when it was selected, which so does not show that it was taken over.
    was_managed: bool,
}

impl Takeover {
    /// `selector` is `--kyma-selector`, `quiet` the period without writes before a Kyma of another controller is taken
    /// over.
    pub fn new(selector: &str, quiet: Duration) -> Self {
        Self(Arc::new(Inner { selector: KymaSelector::new(selector), quiet, pending: Mutex::default() }))
    }

    /// Selection of the Kymas.
    pub fn selector(&self) -> &KymaSelector {
        &self.0.selector
    }

    /// Returns true if this receiver writes to the runtime of a Kyma: it is neither paused, nor skipped, nor handed back.
    pub fn reconciles<'a>(&self, kyma: impl Into<KymaFacts<'a>>, pause: &Pause) -> bool {
        let kyma = kyma.into();
        self.selector().reconciles(kyma, pause.of(kyma).is_some())
    }

    /// Records a newly selected Kyma; `found` if it was in the first list of this process. New Kymas, and those found
    /// that this receiver managed before, need no quiet period.
    pub fn selected<'a>(&self, key: &KymaKey, kyma: impl Into<KymaFacts<'a>>, found: bool, now: Instant) {
        let kyma = kyma.into();
        if self.0.quiet.is_zero() || !kyma.has_finalizer() || (found && kyma.is_managed()) {
            return;
        }
        tracing::info!(kyma = %key, quiet_seconds = self.0.quiet.as_secs(), "Takeover of Kyma begins after a quiet period");
        let version = kyma.object_version().unwrap_or_default().to_owned();
        let takeover = PendingTakeover { version, until: now + self.0.quiet, was_managed: kyma.is_managed() };
        self.0.pending.lock().insert(key.clone(), takeover);
    }

    /// Observes a selected Kyma. Every replica records a takeover, and the one that holds the shard completes it: its
    /// first write afterwards adds our annotation.
    pub fn observed<'a>(&self, key: &KymaKey, kyma: impl Into<KymaFacts<'a>>) {
        if !kyma.into().is_managed() {
            return;
        }
        let mut pending = self.0.pending.lock();
        if pending.get(key).is_some_and(|takeover| !takeover.was_managed) {
            pending.remove(key);
            tracing::info!(kyma = %key, "Kyma taken over by another replica");
        }
    }

    /// Records that a Kyma is deleted or no longer selected.
    pub fn deselected(&self, key: &KymaKey) {
        self.0.pending.lock().remove(key);
    }

    /// Returns true while the takeover of a Kyma is pending.
    pub fn is_pending(&self, key: &KymaKey) -> bool {
        self.0.pending.lock().contains_key(key)
    }

    /// Remaining quiet period of a Kyma that was just read; `None` once this receiver manages it. A write since the
    /// last call restarts the period.
    pub fn remaining_quiet_period(&self, key: &KymaKey, kyma: &Kyma, now: Instant) -> Option<Duration> {
        let mut pending = self.0.pending.lock();
        let takeover = pending.get_mut(key)?;
        let version = kyma.resource_version().unwrap_or_default();
        if takeover.version != version {
            (takeover.version, takeover.until) = (version, now + self.0.quiet);
        }
        let rest = takeover.until.saturating_duration_since(now);
        if !rest.is_zero() {
            return Some(rest);
        }
        pending.remove(key);
        tracing::info!(kyma = %key, "Kyma taken over");
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_api::names::{annotation, finalizer, label};

    use super::*;

    const QUIET: Duration = Duration::from_secs(60);

    fn kyma(version: u32, marks: serde_json::Value) -> Kyma {
        let mut metadata = json!({"name": "k", "resourceVersion": version.to_string()});
        metadata.as_object_mut().unwrap().extend(marks.as_object().unwrap().clone());
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": metadata, "spec": {"channel": "regular"}}))
        .unwrap()
    }

    fn not_ours(version: u32) -> Kyma {
        kyma(version, json!({"finalizers": [finalizer::KYMA]}))
    }

    #[test]
    fn kyma_of_lifecycle_manager_is_left_alone_until_a_quiet_period_without_writes() {
        let takeover = Takeover::new("a=b", QUIET);
        let key = KymaKey::new("ns", "k");
        let start = Instant::now();
        takeover.selected(&key, &not_ours(1), false, start);
        assert!(takeover.is_pending(&key));
        assert_eq!(takeover.remaining_quiet_period(&key, &not_ours(1), start + QUIET / 4), Some(QUIET * 3 / 4));
        let later = start + QUIET * 2;
        assert_eq!(
            takeover.remaining_quiet_period(&key, &not_ours(2), later),
            Some(QUIET),
            "another write restarts the quiet period"
        );
        assert_eq!(takeover.remaining_quiet_period(&key, &not_ours(2), later + QUIET), None);
        assert!(!takeover.is_pending(&key));
        assert_eq!(
            takeover.remaining_quiet_period(&key, &not_ours(3), later + QUIET),
            None,
            "the Kyma is managed by this receiver now"
        );

        takeover.selected(&key, &not_ours(4), false, start);
        takeover.deselected(&key);
        assert!(!takeover.is_pending(&key));
    }

    #[test]
    fn takeover_ends_when_another_replica_has_marked_the_kyma() {
        let takeover = Takeover::new("", QUIET);
        let key = KymaKey::new("ns", "k");
        let now = Instant::now();
        let marks = json!({"finalizers": [finalizer::KYMA], "annotations": {annotation::INPUTS: "-.-"}});
        let managed = |version| kyma(version, marks.clone());
        takeover.selected(&key, &not_ours(1), false, now);
        takeover.observed(&key, &not_ours(2));
        assert!(takeover.is_pending(&key), "lifecycle-manager wrote it");
        takeover.observed(&key, &managed(3));
        assert!(!takeover.is_pending(&key));
        assert_eq!(takeover.remaining_quiet_period(&key, &managed(3), now), None);

        // Deselected with its annotation, and selected again.
        takeover.selected(&key, &managed(4), false, now);
        takeover.observed(&key, &managed(5));
        assert_eq!(takeover.remaining_quiet_period(&key, &managed(5), now), Some(QUIET));
        takeover.observed(&key, &managed(6));
        assert!(takeover.is_pending(&key), "the annotation is older than its selection");
        assert_eq!(takeover.remaining_quiet_period(&key, &managed(5), now + QUIET), None);
    }

    #[test]
    fn new_kymas_and_own_kymas_after_a_restart_need_no_quiet_period() {
        let takeover = Takeover::new("", QUIET);
        let key = KymaKey::new("ns", "k");
        let now = Instant::now();
        let held = kyma(1, json!({"finalizers": [finalizer::KYMA], "annotations": {annotation::INPUTS: "a.b"}}));
        for (kyma, found, pending) in [
            (kyma(1, json!({})), false, false),
            (kyma(1, json!({})), true, false),
            (held.clone(), true, false),
            // Deselected and selected again: another controller may have reconciled it in between.
            (held, false, true),
            (not_ours(1), true, true),
        ] {
            takeover.selected(&key, &kyma, found, now);
            assert_eq!(takeover.is_pending(&key), pending, "{:?} {found}", kyma.metadata);
            takeover.deselected(&key);
        }
        let immediate = Takeover::default();
        immediate.selected(&key, &not_ours(1), false, now);
        assert!(!immediate.is_pending(&key));
    }

    #[test]
    fn label_requests_and_confirms_the_hand_back() {
        let labelled = |value: &str| kyma(1, json!({"labels": {label::HAND_BACK: value}}));
        let states = |value: &str| {
            let kyma = labelled(value);
            let facts = KymaFacts::from(&kyma);
            (facts.is_hand_back_requested(), facts.is_handed_back())
        };
        assert_eq!((states("true"), states("True")), ((true, false), (true, false)));
        assert_eq!((states("done"), states("false")), ((false, true), (false, false)));
    }
}
