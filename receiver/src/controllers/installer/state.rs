//! What is known of the installation in one runtime.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use super::{
    Part,
    kit::{Wanted, Whose},
    upgrade::Image,
};

/// Writes to one runtime in one [`WINDOW`], at most: a whole installation seven times over. Who keeps changing what we keep mending is named,
/// and waited for.
const MAX_WRITES: u16 = 120;
/// See [`MAX_WRITES`].
const WINDOW: Duration = Duration::from_secs(60);

/// What earlier passes proved. About 200 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Installed {
    /// By [`Part::index`], the hash of what it was seen to be; 0 for what nobody has looked at.
    seen: [u64; Part::ALL.len()],
    /// What of the incumbent has no part any more is gone.
    pub(super) cleared: bool,
    /// Forms in which this API server keeps objects that it, or somebody's admission, adds something to.
    pub(super) forms: BTreeMap<Part, u64>,
    /// The image in the Deployment, as it was last seen to be what it shall be.
    pub(super) image: Option<Image>,
    /// The Deployment was written or found not available, and has not been seen available since.
    pub(super) settling: bool,
    /// Looks at an agent that does not run yet.
    pub(super) looks: u8,
    writes: Option<(Instant, u16)>,
}

impl Installed {
    /// Somebody may have changed an object.
    pub(crate) fn doubt(&mut self, plural: &str, name: &str) {
        if let Some(part) = Part::of(plural, name) {
            self.seen[part.index()] = 0;
        }
    }

    /// Anything may have changed.
    pub(crate) fn doubt_all(&mut self) {
        (self.seen, self.cleared) = (Default::default(), false);
    }

    pub(super) fn is(&self, wanted: &Wanted, whose: Whose<'_>) -> bool {
        self.seen[wanted.part.index()] == wanted.hash(whose)
    }

    pub(super) fn saw(&mut self, wanted: &Wanted, whose: Whose<'_>) {
        self.seen[wanted.part.index()] = wanted.hash(whose);
    }

    /// Whether one more write is allowed; it is counted.
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
    fn writes_have_a_bound_that_time_lifts() {
        let (mut installed, now) = (Installed::default(), Instant::now());
        assert_eq!((0..200).filter(|_| installed.may_write(now)).count(), usize::from(MAX_WRITES));
        assert!(!installed.may_write(now + WINDOW / 2));
        assert!(installed.may_write(now + WINDOW));
    }
}
