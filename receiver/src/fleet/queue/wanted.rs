//! What is wanted of a Kyma, and what its runtime said about objects.

use tidewatch_shared::event::Object;

use super::Works;

/// Objects that [`Drift`] names one by one, at most; beyond it everything is meant.
pub const MAX_DRIFT: usize = 64;

/// How urgent work is. Lower ones have a guaranteed share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Priority {
    /// Somebody changed something and waits.
    User,
    /// The catalog or a template changed.
    Catalog,
    /// Nothing is known to have changed.
    Verification,
}

/// What the runtime's agent said has moved: what a pass must read again although it knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Drift {
    /// Nothing.
    #[default]
    None,
    /// These objects, at most [`MAX_DRIFT`], each once, as last heard of.
    Objects(Vec<Object>),
    /// Anything may have moved.
    All,
}

impl Drift {
    /// One object.
    #[must_use]
    pub fn of(object: Object) -> Self {
        Self::Objects(vec![object])
    }

    /// Adds what another drift says; of one object the other's word stays.
    pub fn merge(&mut self, other: Self) {
        match (&mut *self, other) {
            (Self::All, _) | (_, Self::None) => {}
            (Self::None, other) => *self = other,
            (_, Self::All) => *self = Self::All,
            (Self::Objects(mine), Self::Objects(theirs)) => {
                for object in theirs {
                    match mine.iter_mut().find(|known| known.subject == object.subject) {
                        Some(known) => *known = object,
                        None => mine.push(object),
                    }
                }
                if mine.len() > MAX_DRIFT {
                    *self = Self::All;
                }
            }
        }
    }
}

/// What is wanted of one Kyma.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which works; all begin from one snapshot.
    pub works: Works,
    /// The most urgent reason.
    pub priority: Priority,
    /// What must be read again.
    pub drift: Drift,
}

impl Wanted {
    /// Works without any word about objects.
    #[must_use]
    pub const fn new(works: Works, priority: Priority) -> Self {
        Self { works, priority, drift: Drift::None }
    }

    /// Wants both: all works, the more urgent priority, both drifts.
    pub fn merge(&mut self, other: Self) {
        self.works |= other.works;
        self.priority = self.priority.min(other.priority);
        self.drift.merge(other.drift);
    }
}

/// The sum of what is there and what is new.
pub(crate) fn merge_into(slot: &mut Option<Wanted>, other: Wanted) {
    match slot {
        Some(wanted) => wanted.merge(other),
        None => *slot = Some(other),
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_shared::event::Change;

    use super::*;

    fn object(name: &str, version: &str) -> Object {
        Object {
            subject: format!("g/v1/things/ns/{name}").parse().unwrap(),
            kind: "Thing".into(),
            uid: String::new(),
            resource_version: version.into(),
            generation: None,
            change: Change::Spec,
        }
    }

    #[test]
    fn drift_keeps_the_last_word_of_each_object_and_has_a_bound() {
        let mut drift = Drift::None;
        drift.merge(Drift::of(object("a", "1")));
        drift.merge(Drift::of(object("b", "1")));
        drift.merge(Drift::of(object("a", "2")));
        drift.merge(Drift::None);
        assert_eq!(drift, Drift::Objects(vec![object("a", "2"), object("b", "1")]));
        for n in 0..MAX_DRIFT {
            drift.merge(Drift::of(object(&n.to_string(), "1")));
        }
        assert_eq!(drift, Drift::All);
        drift.merge(Drift::of(object("a", "3")));
        assert_eq!(drift, Drift::All);
    }

    #[test]
    fn the_more_urgent_priority_stays() {
        let mut wanted = Wanted::new(Works::EMPTY, Priority::Verification);
        for (priority, expected) in [
            (Priority::Catalog, Priority::Catalog),
            (Priority::User, Priority::User),
            (Priority::Catalog, Priority::User),
        ] {
            wanted.merge(Wanted::new(Works::ALL_KNOWN, priority));
            assert_eq!(wanted.priority, expected);
        }
        assert_eq!(wanted.works, Works::ALL_KNOWN);
    }
}
