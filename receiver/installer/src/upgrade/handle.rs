//! Shared state between reconciles and the upgrade: the assigned images and the observed ones.

use std::{collections::HashMap, sync::Arc};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tidewatch_api::{identity::RuntimeId, key::KymaKey};
use tokio::time::Instant;

use super::{Image, ImageDecision, UpgradeState};

/// Handle on the upgrade; clones share the state.
#[derive(Clone, Debug)]
pub struct UpgradeHandle {
    pub(super) state: Arc<ArcSwap<UpgradeState>>,
    /// Observed images, bounded by the number of Kymas.
    observed: Arc<Mutex<HashMap<KymaKey, ObservedImage>>>,
}

/// Image that a reconcile observed in a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObservedImage {
    /// Image in the Deployment.
    pub(super) image: Image,
    /// First time at which its pod was observed to run.
    pub(super) running_since: Option<Instant>,
    /// The event path was not proven when the image replaced another one, nor at a reconcile since.
    pub(super) unproven_before: bool,
}

impl UpgradeHandle {
    pub(super) fn new(state: UpgradeState) -> Self {
        Self { state: Arc::new(ArcSwap::from_pointee(state)), observed: Arc::default() }
    }

    pub(crate) fn image_for(&self, runtime: &RuntimeId) -> ImageDecision {
        self.state.load().image_for(runtime)
    }

    /// Records the image that a reconcile found or wrote in a runtime, whether its pod runs, and whether the event path was
    /// not proven before; see [`ObservedImage`].
    pub(crate) fn observe(&self, key: &KymaKey, image: &Image, is_running: bool, unproven_before: bool) {
        let mut observed = self.observed.lock();
        let before = observed.get(key).filter(|before| before.image == *image).and_then(|before| before.running_since);
        let running_since = is_running.then(|| before.unwrap_or_else(Instant::now));
        observed.insert(key.clone(), ObservedImage { image: image.clone(), running_since, unproven_before });
    }

    pub(super) fn observed_image(&self, key: &KymaKey) -> Option<ObservedImage> {
        self.observed.lock().get(key).cloned()
    }

    pub(super) fn retain(&self, keep: impl Fn(&KymaKey) -> bool) {
        self.observed.lock().retain(|key, _| keep(key));
    }
}

#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, reason = "test support")]
impl UpgradeHandle {
    /// Assigns the same image to every runtime.
    pub fn fixed(image: &str) -> Self {
        Self::new(UpgradeState::done(image))
    }

    /// Starts without knowledge of earlier images.
    pub fn unknown(image: &str) -> Self {
        Self::new(UpgradeState::unknown(image, 0))
    }

    /// Returns the recorded [`ObservedImage::unproven_before`].
    pub fn unproven_before(&self, key: &KymaKey) -> bool {
        self.observed_image(key).unwrap().unproven_before
    }

    /// Returns whether a pod with the observed image runs.
    pub fn is_running(&self, key: &KymaKey) -> bool {
        self.observed_image(key).unwrap().running_since.is_some()
    }

    /// Assigns this image to every runtime from now on.
    pub fn set_image(&self, image: &str) {
        self.state.store(Arc::new(UpgradeState::done(image)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_since_is_kept_until_the_image_or_availability_changes() {
        let handle = UpgradeHandle::fixed("a");
        let key = KymaKey::new("ns", "k");
        let observe = |image: &str, is_running| {
            handle.observe(&key, &image.into(), is_running, false);
            handle.observed_image(&key).unwrap()
        };
        let first = observe("a", true);
        assert!(first.running_since.is_some());
        assert_eq!(observe("a", true), first);
        assert_eq!(observe("a", false).running_since, None);
        assert_eq!(
            observe("b", false),
            ObservedImage { image: "b".into(), running_since: None, unproven_before: false }
        );
        handle.retain(|_| false);
        assert_eq!(handle.observed_image(&key), None);
    }
}
