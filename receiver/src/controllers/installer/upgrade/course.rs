//! What passes and the upgrade tell each other: which image a runtime gets, and which one it has.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use arc_swap::ArcSwap;
use tidewatch_shared::identity::RuntimeId;
use tokio::time::Instant;

use super::{Decided, Image, Rollout};
use crate::base::key::KymaKey;

/// Clones are the same.
#[derive(Clone, Debug)]
pub struct Course {
    rollout: Arc<ArcSwap<Rollout>>,
    /// Bounded by the number of Kymas.
    facts: Arc<Mutex<HashMap<KymaKey, Fact>>>,
}

/// What a pass saw in a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fact {
    /// The image in its Deployment.
    pub(super) image: Image,
    /// Since when its pod is known to run.
    pub(super) runs: Option<Instant>,
}

impl Course {
    /// Everybody gets the same.
    #[must_use]
    pub fn steady(image: &str) -> Self {
        Self::new(Rollout::done(image))
    }

    /// Nobody knows yet what runtimes have.
    #[cfg(test)]
    pub(crate) fn unknown(image: &str) -> Self {
        Self::new(Rollout::unknown(image, 0))
    }

    /// From now on everybody gets this.
    #[cfg(test)]
    pub(crate) fn give(&self, image: &str) {
        self.turn(Rollout::done(image));
    }

    pub(super) fn new(rollout: Rollout) -> Self {
        Self { rollout: Arc::new(ArcSwap::from_pointee(rollout)), facts: Arc::default() }
    }

    pub(in crate::controllers::installer) fn image_of(&self, runtime: &RuntimeId) -> Decided {
        self.rollout.load().image_of(runtime)
    }

    pub(super) fn rollout(&self) -> Arc<Rollout> {
        self.rollout.load_full()
    }

    pub(super) fn turn(&self, rollout: Rollout) {
        self.rollout.store(Arc::new(rollout));
    }

    /// A pass found this image in a runtime, or gave it to it; and whether its pod runs.
    pub(in crate::controllers::installer) fn saw(&self, key: &KymaKey, image: &Image, runs: bool) {
        let mut facts = self.lock();
        let before = facts.get(key).filter(|before| before.image == *image).and_then(|before| before.runs);
        let runs = runs.then(|| before.unwrap_or_else(Instant::now));
        facts.insert(key.clone(), Fact { image: image.clone(), runs });
    }

    pub(super) fn fact(&self, key: &KymaKey) -> Option<Fact> {
        self.lock().get(key).cloned()
    }

    pub(super) fn retain(&self, keep: impl Fn(&KymaKey) -> bool) {
        self.lock().retain(|key, _| keep(key));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KymaKey, Fact>> {
        // Every change is a single insertion or removal: a panic elsewhere leaves nothing half done.
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_runs_since_it_was_first_seen_and_another_image_is_another_pod() {
        let (course, key) = (Course::steady("a"), KymaKey::new("ns", "k"));
        let saw = |image: &str, runs| {
            course.saw(&key, &image.into(), runs);
            course.fact(&key).unwrap()
        };
        let first = saw("a", true);
        assert!(first.runs.is_some());
        assert_eq!(saw("a", true), first);
        assert_eq!(saw("a", false).runs, None);
        assert_eq!(saw("b", false), Fact { image: "b".into(), runs: None });
        course.retain(|_| false);
        assert_eq!(course.fact(&key), None);
    }
}
