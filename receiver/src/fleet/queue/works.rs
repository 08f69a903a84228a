//! Sets of works.

use std::{
    collections::BTreeSet,
    fmt,
    ops::{BitOr, BitOrAssign},
};

use tidewatch_shared::plan::Work;

/// Every work, in the order of its bit.
const KNOWN: [Work; Works::COUNT] = [Work::Kyma, Work::Catalog, Work::Manifest, Work::Installer, Work::Forward];

/// A set of works: one byte, so that marking work wanted costs nothing.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Works(u8);

impl Works {
    /// No work.
    pub const EMPTY: Self = Self(0);
    /// Every work that this receiver knows.
    pub const ALL_KNOWN: Self = Self((1 << Self::COUNT) - 1);
    /// What every runtime has whatever its plan says: its Kyma and its catalog.
    pub const RUNTIME: Self = Self(Self::bit(Work::Kyma) | Self::bit(Work::Catalog));
    /// What is installed in every runtime.
    pub(crate) const INSTALLER: Self = Self(Self::bit(Work::Installer));
    /// What goes to other managers.
    pub(crate) const FORWARD: Self = Self(Self::bit(Work::Forward));
    /// How many works there are.
    pub(crate) const COUNT: usize = 5;

    /// The set of the named works.
    #[must_use]
    pub fn of(works: &[Work]) -> Self {
        works.iter().copied().collect()
    }

    /// Whether the work is in the set.
    #[must_use]
    pub fn contains(self, work: Work) -> bool {
        self.0 & Self::bit(work) != 0
    }

    /// Whether nothing is in the set.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// What is in this set and not in the other.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// What is in both sets.
    #[must_use]
    pub const fn both(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The works of the set, in a fixed order.
    pub fn iter(self) -> impl Iterator<Item = Work> {
        KNOWN.into_iter().filter(move |work| self.contains(*work))
    }

    /// Where a work stands in an array of [`Self::COUNT`].
    pub(crate) const fn index(work: Work) -> usize {
        match work {
            Work::Kyma => 0,
            Work::Catalog => 1,
            Work::Manifest => 2,
            Work::Installer => 3,
            Work::Forward => 4,
        }
    }

    const fn bit(work: Work) -> u8 {
        1 << Self::index(work)
    }
}

impl FromIterator<Work> for Works {
    fn from_iter<I: IntoIterator<Item = Work>>(works: I) -> Self {
        Self(works.into_iter().fold(0, |bits, work| bits | Self::bit(work)))
    }
}

impl From<&BTreeSet<Work>> for Works {
    fn from(works: &BTreeSet<Work>) -> Self {
        works.iter().copied().collect()
    }
}

impl BitOr for Works {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Works {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl fmt::Debug for Works {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_stand_for_works() {
        assert_eq!(Works::ALL_KNOWN.iter().collect::<Vec<_>>(), KNOWN);
        for (at, work) in KNOWN.into_iter().enumerate() {
            assert_eq!(Works::index(work), at);
            assert!(Works::of(&[work]).contains(work));
            assert!(!Works::ALL_KNOWN.minus(Works::of(&[work])).contains(work));
        }
        let both = Works::of(&[Work::Kyma]) | Works::from(&BTreeSet::from([Work::Catalog]));
        assert_eq!(both.both(Works::of(&[Work::Catalog, Work::Forward])), Works::of(&[Work::Catalog]));
        assert!(both.minus(both).is_empty());
    }
}
