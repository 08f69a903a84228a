//! Which Kymas are this receiver's, beside an incumbent that works on the others.
//!
//! Both write with the same field managers, so at no moment may both work on one Kyma. `--kyma-selector` says whose it is. Whoever is
//! new here may still be in the midst of a pass of the incumbent's: it is left alone until nobody has written to its Kyma for a while.
//! The way back is asked for by a label; its other value is our last write, and whoever bears that is not selected any more. A label
//! that is taken off instead ends the pass that is under way, and leaves everything as it stands.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kube::ResourceExt;
use tidewatch_shared::{
    api::Kyma,
    names::{annotation, finalizer, label},
};
use tokio::time::Instant;

use crate::base::key::KymaKey;

/// Who is selected, and who of them is waited for. Clones share one state; the default selects all and waits for none.
#[derive(Clone, Debug, Default)]
pub struct Takeover(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    selector: String,
    quiet: Duration,
    /// Bounded by the number of Kymas.
    newcomers: Mutex<HashMap<KymaKey, Newcomer>>,
}

/// A Kyma that somebody else may still be working on.
#[derive(Debug)]
struct Newcomer {
    /// The resource version that it was last seen at: another one means that somebody wrote.
    version: String,
    until: Instant,
}

impl Takeover {
    /// `selector` is `--kyma-selector`, `quiet` how long nobody must have written to a Kyma that comes from somebody else.
    #[must_use]
    pub fn new(selector: &str, quiet: Duration) -> Self {
        Self(Arc::new(Inner { selector: selector.trim().to_owned(), quiet, newcomers: Mutex::default() }))
    }

    /// The label selector of the Kymas that are this receiver's.
    #[must_use]
    pub fn query(&self) -> String {
        let back = format!("{}!={}", label::HAND_BACK, label::HAND_BACK_DONE);
        if self.0.selector.is_empty() { back } else { format!("{},{back}", self.0.selector) }
    }

    /// Whether only some Kymas are selected, so that a read has to ask for it.
    pub(crate) fn is_limited(&self) -> bool {
        !self.0.selector.is_empty()
    }

    /// Whether `skip-reconciliation` is what selects: it keeps the incumbent off, and so does not stop this receiver.
    pub(crate) fn selects_skipped(&self) -> bool {
        self.0.selector.contains(label::SKIP_RECONCILIATION)
    }

    /// A Kyma is selected that was not before; `found` if it stood in the first list of this process.
    pub(crate) fn entered(&self, key: &KymaKey, kyma: &Kyma, found: bool, now: Instant) {
        let was_worked_on = kyma.finalizers().iter().any(|name| name == finalizer::KYMA);
        if self.0.quiet.is_zero() || !was_worked_on || (found && is_held(kyma)) {
            return;
        }
        tracing::info!(kyma = %key, quiet_seconds = self.0.quiet.as_secs(), "Kyma is taken over, once nobody writes to it");
        let version = kyma.resource_version().unwrap_or_default();
        self.lock().insert(key.clone(), Newcomer { version, until: now + self.0.quiet });
    }

    /// A Kyma is selected no longer.
    pub(crate) fn left(&self, key: &KymaKey) {
        self.lock().remove(key);
    }

    /// Whether a Kyma is still waited for.
    pub(crate) fn awaits(&self, key: &KymaKey) -> bool {
        self.lock().contains_key(key)
    }

    /// How long a Kyma, as it was just read, is to be left alone; `None` once it is ours. Whoever wrote to it since is waited for anew.
    pub(crate) fn wait(&self, key: &KymaKey, kyma: &Kyma, now: Instant) -> Option<Duration> {
        let mut newcomers = self.lock();
        let newcomer = newcomers.get_mut(key)?;
        let version = kyma.resource_version().unwrap_or_default();
        if newcomer.version != version {
            *newcomer = Newcomer { version, until: now + self.0.quiet };
        }
        let rest = newcomer.until.saturating_duration_since(now);
        if !rest.is_zero() {
            return Some(rest);
        }
        newcomers.remove(key);
        tracing::info!(kyma = %key, "Kyma is taken over");
        None
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KymaKey, Newcomer>> {
        // Each change is whole in itself.
        self.0.newcomers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a Kyma has been worked on by Tidewatch, and was not handed back since.
pub(crate) fn is_held(kyma: &Kyma) -> bool {
    kyma.annotations().contains_key(annotation::INPUTS)
}

/// Whether the way back is asked for.
pub(crate) fn is_asked_back(kyma: &Kyma) -> bool {
    kyma.labels().get(label::HAND_BACK).is_some_and(|value| value.eq_ignore_ascii_case(label::HAND_BACK_REQUESTED))
}

/// Whether a Kyma was handed back.
pub(crate) fn is_handed_back(kyma: &Kyma) -> bool {
    kyma.labels().get(label::HAND_BACK).is_some_and(|value| value == label::HAND_BACK_DONE)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const QUIET: Duration = Duration::from_secs(60);

    fn kyma(version: u32, marks: serde_json::Value) -> Kyma {
        let mut metadata = json!({"name": "k", "resourceVersion": version.to_string()});
        metadata.as_object_mut().unwrap().extend(marks.as_object().unwrap().clone());
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": metadata, "spec": {"channel": "regular"}}))
        .unwrap()
    }

    fn incumbents(version: u32) -> Kyma {
        kyma(version, json!({"finalizers": [finalizer::KYMA]}))
    }

    #[test]
    fn who_was_handed_back_is_selected_by_nobody() {
        let back = "operator.kyma-project.io/tidewatch-hand-back!=done";
        assert_eq!(Takeover::default().query(), back);
        assert_eq!(Takeover::new("a=b,c", QUIET).query(), format!("a=b,c,{back}"));
        assert!(Takeover::new("operator.kyma-project.io/skip-reconciliation=true", QUIET).selects_skipped());
        assert!(!Takeover::new("a=b", QUIET).selects_skipped());
    }

    #[test]
    fn who_comes_from_an_incumbent_is_left_alone_until_nobody_writes() {
        let (takeover, key, start) = (Takeover::new("a=b", QUIET), KymaKey::new("ns", "k"), Instant::now());
        takeover.entered(&key, &incumbents(1), false, start);
        assert!(takeover.awaits(&key));
        assert_eq!(takeover.wait(&key, &incumbents(1), start + QUIET / 4), Some(QUIET * 3 / 4));
        let later = start + QUIET * 2;
        assert_eq!(takeover.wait(&key, &incumbents(2), later), Some(QUIET), "somebody wrote");
        assert_eq!(takeover.wait(&key, &incumbents(2), later + QUIET), None);
        assert!(!takeover.awaits(&key));
        assert_eq!(takeover.wait(&key, &incumbents(3), later + QUIET), None, "from then on we write");

        takeover.entered(&key, &incumbents(4), false, start);
        takeover.left(&key);
        assert!(!takeover.awaits(&key));
    }

    #[test]
    fn nobody_waits_for_a_new_kyma_nor_for_ones_own_after_a_restart() {
        let (takeover, key, now) = (Takeover::new("", QUIET), KymaKey::new("ns", "k"), Instant::now());
        let held = kyma(1, json!({"finalizers": [finalizer::KYMA], "annotations": {annotation::INPUTS: "a.b"}}));
        for (kyma, found, awaited) in [
            (kyma(1, json!({})), false, false),
            (kyma(1, json!({})), true, false),
            (held.clone(), true, false),
            // Taken away and given back: somebody had it meanwhile.
            (held, false, true),
            (incumbents(1), true, true),
        ] {
            takeover.entered(&key, &kyma, found, now);
            assert_eq!(takeover.awaits(&key), awaited, "{:?} {found}", kyma.metadata);
            takeover.left(&key);
        }
        let hurried = Takeover::default();
        hurried.entered(&key, &incumbents(1), false, now);
        assert!(!hurried.awaits(&key));
    }

    #[test]
    fn the_label_asks_and_answers() {
        let labelled = |value: &str| kyma(1, json!({"labels": {label::HAND_BACK: value}}));
        let says = |value: &str| (is_asked_back(&labelled(value)), is_handed_back(&labelled(value)));
        assert_eq!((says("true"), says("True")), ((true, false), (true, false)));
        assert_eq!((says("done"), says("false")), ((false, true), (false, false)));
    }
}
