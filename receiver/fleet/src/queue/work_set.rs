//! Sets of kinds of work: those that a plan names, and the status of the modules.

use std::{
    fmt,
    ops::{BitOr, BitOrAssign},
};

use strum::VariantArray as _;
use tidewatch_api::plan::Work;

/// Set of kinds of work, one byte.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct WorkSet(u8);

impl WorkSet {
    /// The empty set.
    pub const EMPTY: Self = Self(0);
    /// Every kind of work that this receiver knows.
    pub const ALL_KNOWN: Self = Self((1 << Self::COUNT) - 1);
    /// Work of every runtime regardless of its plan: Kyma and catalog.
    pub const RUNTIME: Self = Self(Self::bit(Work::Kyma) | Self::bit(Work::Catalog));
    /// Installation of the agent in the runtime.
    pub const INSTALLER: Self = Self(Self::bit(Work::Installer));
    /// Reconcile of a Manifest.
    pub const MANIFEST: Self = Self(Self::bit(Work::Manifest));
    /// Forwarding to other managers.
    pub(crate) const FORWARD: Self = Self(Self::bit(Work::Forward));
    /// Status of the modules in both Kymas, after a change of a Manifest. Internal to the receiver: no plan can name it,
    /// and no event waits for it.
    pub const STATUS: Self = Self(1 << Self::COUNT);
    /// Number of kinds of work.
    pub(crate) const COUNT: usize = Work::VARIANTS.len();

    /// Returns the set of the given kinds.
    #[must_use]
    pub fn of(work: &[Work]) -> Self {
        work.iter().copied().collect()
    }

    /// Returns true if the set contains the kind.
    #[must_use]
    pub fn contains(self, work: Work) -> bool {
        self.0 & Self::bit(work) != 0
    }

    /// Returns true if the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Difference: the kinds in this set that are not in the other.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Intersection of both sets.
    #[must_use]
    pub const fn both(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Iterates over the kinds that a plan can name, in a fixed order.
    pub fn iter(self) -> impl Iterator<Item = Work> {
        Work::VARIANTS.iter().copied().filter(move |work| self.contains(*work))
    }

    const fn bit(work: Work) -> u8 {
        1 << work as u8
    }
}

impl FromIterator<Work> for WorkSet {
    fn from_iter<I: IntoIterator<Item = Work>>(work: I) -> Self {
        Self(work.into_iter().fold(0, |bits, work| bits | Self::bit(work)))
    }
}

impl BitOr for WorkSet {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for WorkSet {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl fmt::Debug for WorkSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = (!self.both(Self::STATUS).is_empty()).then_some(format_args!("Status"));
        f.debug_set().entries(self.iter()).entries(status).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn bits_map_to_kinds_of_work() {
        assert_eq!(WorkSet::ALL_KNOWN.iter().collect::<Vec<_>>(), Work::VARIANTS);
        for (at, work) in Work::VARIANTS.iter().copied().enumerate() {
            assert_eq!(work as usize, at);
            assert!(WorkSet::of(&[work]).contains(work));
            assert!(!WorkSet::ALL_KNOWN.minus(WorkSet::of(&[work])).contains(work));
        }
        let both = WorkSet::of(&[Work::Kyma]) | BTreeSet::from([Work::Catalog]).into_iter().collect::<WorkSet>();
        assert_eq!(both.both(WorkSet::of(&[Work::Catalog, Work::Forward])), WorkSet::of(&[Work::Catalog]));
        assert!(both.minus(both).is_empty());
    }

    #[test]
    fn status_is_no_work_of_a_plan() {
        assert!(WorkSet::ALL_KNOWN.both(WorkSet::STATUS).is_empty() && !WorkSet::STATUS.is_empty());
        assert_eq!(WorkSet::STATUS.iter().count(), 0, "no event waits for it");
        assert_eq!(format!("{:?}", WorkSet::STATUS | WorkSet::of(&[Work::Kyma])), "{Kyma, Status}");
    }
}
