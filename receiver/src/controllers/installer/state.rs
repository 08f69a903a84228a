//! State of the installation in one runtime, as known from earlier reconciles.

use std::{collections::BTreeMap, time::Duration};

use strum::VariantArray as _;
use tokio::time::Instant;

use super::{
    Component,
    desired::{DesiredObject, Params},
    upgrade::Image,
};

/// Maximum number of writes to one runtime per [`WINDOW`], seven times a whole installation. Above it the competing
/// writer is reported, and the repair waits.
const MAX_WRITES: u16 = 120;
/// Window of [`MAX_WRITES`].
const WINDOW: Duration = Duration::from_secs(60);

/// Verified state of one installation, about 200 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstallationState {
    /// Hash of the verified object by [`Component`]; 0 if it is not verified.
    verified: [u64; Component::VARIANTS.len()],
    /// The incumbent's objects that have no component are deleted.
    pub(super) obsolete_removed: bool,
    /// Hashes of the forms in which this API server stores objects to which it, or an admission webhook, adds fields.
    pub(super) accepted_forms: BTreeMap<Component, u64>,
    /// Image of the Deployment when it was last verified.
    pub(super) image: Option<Image>,
    /// The Deployment was written or found unavailable, and has not been available since.
    pub(super) awaiting_pod: bool,
    /// Checks of an agent that is not running yet.
    pub(super) rechecks: u8,
    writes: Option<(Instant, u16)>,
}

impl InstallationState {
    /// Marks one object as possibly changed.
    pub(crate) fn invalidate(&mut self, plural: &str, name: &str) {
        if let Some(component) = Component::of(plural, name) {
            self.verified[component as usize] = 0;
        }
    }

    /// Marks all objects as possibly changed.
    pub(crate) fn invalidate_all(&mut self) {
        (self.verified, self.obsolete_removed) = (Default::default(), false);
    }

    pub(super) fn is_verified(&self, desired: &DesiredObject, params: Params<'_>) -> bool {
        self.verified[desired.component as usize] == desired.hash(params)
    }

    pub(super) fn mark_verified(&mut self, desired: &DesiredObject, params: Params<'_>) {
        self.verified[desired.component as usize] = desired.hash(params);
    }

    /// Counts a write, and returns whether it is allowed.
    pub(super) fn may_write(&mut self, now: Instant) -> bool {
        let (since, count) = self.writes.filter(|(since, _)| now < *since + WINDOW).unwrap_or((now, 0));
        self.writes = Some((since, count.saturating_add(1)));
        count < MAX_WRITES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_limited_per_window() {
        let (mut installed, now) = (InstallationState::default(), Instant::now());
        assert_eq!((0..200).filter(|_| installed.may_write(now)).count(), usize::from(MAX_WRITES));
        assert!(!installed.may_write(now + WINDOW / 2));
        assert!(installed.may_write(now + WINDOW));
    }
}
