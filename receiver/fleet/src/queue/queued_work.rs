//! Queued work of a Kyma and the drift that its runtime reported.

use std::mem;

use tidewatch_contract::event::Object;

use super::WorkSet;

/// Maximum number of objects that [`Drift`] lists; beyond it becomes [`Drift::All`].
pub const MAX_DRIFTED_OBJECTS: usize = 128;

/// Urgency of work, most urgent first. The lower priorities have a guaranteed share. The name is the value of the label
/// `priority`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum Priority {
    /// A user's change.
    User,
    /// A change of the catalog or of a template.
    Catalog,
    /// A periodic comparison without a known change.
    Verification,
}

/// Objects that the runtime's agent reported as changed; a reconcile reads them again instead of trusting its caches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Drift {
    /// No object.
    #[default]
    None,
    /// These objects, at most [`MAX_DRIFTED_OBJECTS`], each once, as last reported. In a report of a module's objects, one
    /// without a name stands for all of its resource.
    Objects(Vec<Object>),
    /// The same, and the work has no other cause: none is due if all of them are as our own writes left them.
    Reported(Vec<Object>),
    /// Any object may have changed.
    All,
}

impl Drift {
    /// Drift of one object.
    #[must_use]
    pub fn of(object: Object) -> Self {
        Self::Objects(vec![object])
    }

    /// Adds another drift, which replaces the reports of objects in both.
    pub fn merge(&mut self, other: Self) {
        *self = match (mem::take(self), other) {
            (Self::All, _) | (_, Self::All) => Self::All,
            (Self::None, Self::None) => Self::None,
            (mine, theirs) => {
                let is_only_cause = matches!((&mine, &theirs), (Self::Reported(_), Self::Reported(_)));
                let objects = merged(mine.into_objects(), theirs.into_objects());
                match objects.len() {
                    0..=MAX_DRIFTED_OBJECTS if is_only_cause => Self::Reported(objects),
                    0..=MAX_DRIFTED_OBJECTS => Self::Objects(objects),
                    _ => Self::All,
                }
            }
        }
    }

    /// Removes an object that a later report shows unchanged.
    pub fn confirm(&mut self, is_confirmed: impl Fn(&Object) -> bool) {
        if let Self::Objects(objects) | Self::Reported(objects) = self {
            objects.retain(|object| !is_confirmed(object));
            if objects.is_empty() {
                *self = Self::None;
            }
        }
    }

    /// Marks objects as the only cause of the work.
    #[must_use]
    pub fn as_only_cause(self) -> Self {
        match self {
            Self::Objects(objects) => Self::Reported(objects),
            other => other,
        }
    }

    /// The same for work that has another cause too.
    #[must_use]
    pub fn with_other_cause(self) -> Self {
        match self {
            Self::Reported(objects) => Self::Objects(objects),
            other => other,
        }
    }

    /// Objects to read again, if they are known.
    #[must_use]
    pub fn objects(&self) -> Option<&[Object]> {
        match self {
            Self::Objects(objects) | Self::Reported(objects) => Some(objects),
            Self::None | Self::All => None,
        }
    }

    fn into_objects(self) -> Vec<Object> {
        match self {
            Self::Objects(objects) | Self::Reported(objects) => objects,
            Self::None | Self::All => Vec::new(),
        }
    }
}

/// Objects of both in the order of their last reports, each as last reported.
fn merged(mut mine: Vec<Object>, theirs: Vec<Object>) -> Vec<Object> {
    for object in theirs {
        mine.retain(|known| known.subject != object.subject);
        mine.push(object);
    }
    mine
}

/// Pending work of one Kyma.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedWork {
    /// Kinds of work; all start from one snapshot.
    pub work: WorkSet,
    /// Highest priority of the merged requests.
    pub priority: Priority,
    /// Objects to read again.
    pub drift: Drift,
}

impl QueuedWork {
    /// Work without drift.
    #[must_use]
    pub const fn new(work: WorkSet, priority: Priority) -> Self {
        Self { work, priority, drift: Drift::None }
    }

    /// Merges other work: union of the kinds, the more urgent priority, both drifts.
    pub fn merge(&mut self, other: Self) {
        self.work |= other.work;
        self.priority = self.priority.min(other.priority);
        self.drift.merge(other.drift);
    }
}

/// Merges work into an optional slot.
pub(crate) fn merge_into(slot: &mut Option<QueuedWork>, other: QueuedWork) {
    match slot {
        Some(queued) => queued.merge(other),
        None => *slot = Some(other),
    }
}

/// Merges work that is older than that of the slot: its reports are replaced by those of the slot.
pub(crate) fn merge_older_into(slot: &mut Option<QueuedWork>, older: QueuedWork) {
    let newer = slot.replace(older);
    newer.into_iter().for_each(|newer| merge_into(slot, newer));
}

#[cfg(test)]
mod tests {
    use tidewatch_contract::event::Change;

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
    fn drift_keeps_the_last_report_of_each_object_and_is_bounded() {
        let mut drift = Drift::None;
        drift.merge(Drift::of(object("a", "1")));
        drift.merge(Drift::of(object("b", "1")));
        drift.merge(Drift::of(object("a", "2")));
        drift.merge(Drift::None);
        assert_eq!(drift, Drift::Objects(vec![object("b", "1"), object("a", "2")]));
        let reported = |name: &str| Drift::of(object(name, "1")).as_only_cause();
        let mut reports = reported("a");
        reports.merge(reported("b"));
        assert_eq!(reports, Drift::Reported(vec![object("a", "1"), object("b", "1")]));
        for other in [Drift::None, Drift::of(object("a", "1"))] {
            let mut either = reports.clone();
            either.merge(other.clone());
            let mut reversed = other;
            reversed.merge(reports.clone());
            let (Drift::Objects(either), Drift::Objects(reversed)) = (either, reversed) else {
                panic!("another cause")
            };
            assert_eq!((either.len(), reversed.len()), (2, 2));
        }
        for n in 0..MAX_DRIFTED_OBJECTS {
            drift.merge(Drift::of(object(&n.to_string(), "1")));
        }
        assert_eq!(drift, Drift::All);
        drift.merge(Drift::of(object("a", "3")));
        assert_eq!(drift, Drift::All);
    }

    #[test]
    fn merge_keeps_the_more_urgent_priority() {
        let mut queued = QueuedWork::new(WorkSet::EMPTY, Priority::Verification);
        for (priority, expected) in [
            (Priority::Catalog, Priority::Catalog),
            (Priority::User, Priority::User),
            (Priority::Catalog, Priority::User),
        ] {
            queued.merge(QueuedWork::new(WorkSet::ALL_KNOWN, priority));
            assert_eq!(queued.priority, expected);
        }
        assert_eq!(queued.work, WorkSet::ALL_KNOWN);
    }
}
