//! Work of a key: sets of its kinds, queued work with the drift that the runtime reported, and the result of a reconcile with
//! its effect on the next one.

use std::{
    fmt, mem,
    ops::{BitOr, BitOrAssign},
    time::Duration,
};

use strum::VariantArray as _;
use tidewatch_api::plan::Work;
use tidewatch_cluster::error_class::ErrorClass;
use tidewatch_contract::event::Object;
use tidewatch_kit::variant::VariantName as _;

/// Maximum number of objects that [`Drift`] lists; beyond it becomes [`Drift::All`].
pub const MAX_DRIFTED_OBJECTS: usize = 128;

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
    pub fn of(work: &[Work]) -> Self {
        work.iter().copied().collect()
    }

    /// Returns true if the set contains the kind.
    pub fn contains(self, work: Work) -> bool {
        self.0 & Self::bit(work) != 0
    }

    /// Returns true if the set is empty.
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

/// Work of one Kyma or Manifest that waits, or that a worker has taken.
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

/// Proof of a reconcile about the API server of its runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It answered, be it by a refusal.
    Answered,
    /// It was not reached.
    Unreached,
    /// There are no credentials that it accepts.
    NoAccess,
}

/// Result of one reconcile of a Kyma or a Manifest. Queued work in none of the sets waits, for the end of a pause or for a
/// component descriptor: its events stay accepted and unsettled, and it is parked until the next enqueue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReconcileOutcome {
    /// Work with a recorded result: success, or a user error that a status shows.
    pub ended: WorkSet,
    /// Work that failed transiently: requeued with backoff, settles nothing. Wins over `ended`.
    pub failed: WorkSet,
    /// Work that failed transiently without affecting other work: requeued with its own backoff, settles nothing.
    pub deferred: WorkSet,
    /// ErrorClass of the failure; `None` counts as [`ErrorClass::Ours`] if work failed.
    pub class: Option<ErrorClass>,
    /// The API server of the runtime was not reached. The class alone does not prove that: a missing kind has the same one.
    pub unreached: bool,
    /// Delay of the next reconcile of the work that ended, even if other work failed.
    pub requeue_after: Option<Duration>,
    /// Lower bound of the backoff of failed work.
    pub min_backoff: Option<Duration>,
    /// Work beyond its own that the reconcile found necessary: enqueued at once, at the same priority.
    pub follow_up: WorkSet,
    /// Delay of any further reconcile, of a user's change too: the runtime has used up its share of the writes to the
    /// control plane.
    pub rest: Option<Duration>,
    /// Delay until the Kyma's rollout slot, or until a date of one of its modules, whichever is first: it is reconciled
    /// then even if other work failed.
    pub rollout_after: Option<Duration>,
}

impl ReconcileOutcome {
    /// All of this work ended.
    pub fn ended(work: WorkSet) -> Self {
        Self { ended: work, ..Self::default() }
    }

    /// All of this work failed transiently.
    pub fn failed(work: WorkSet, class: ErrorClass) -> Self {
        Self { failed: work, class: Some(class), ..Self::default() }
    }

    /// Proof of the reconcile about the API server of its runtime; `None` if there is none.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        match self.class {
            _ if self.unreached => Some(Verdict::Unreached),
            // Of all work, only this one reads the runtime in any case.
            _ if self.ended.minus(self.failed).contains(Work::Kyma) => Some(Verdict::Answered),
            Some(ErrorClass::Auth) => Some(Verdict::NoAccess),
            // The installation goes on after a late answer, or that of a proxy, so its class alone proves neither.
            Some(ErrorClass::Transport) if self.failed == WorkSet::INSTALLER => None,
            // A missing kind, or an object that is being deleted. A reconcile beyond its time limit had answers as well, because
            // each of its requests has a shorter one.
            Some(ErrorClass::Transport | ErrorClass::Refused | ErrorClass::User) => Some(Verdict::Answered),
            // The request may have been one to the control plane.
            Some(ErrorClass::Conflict | ErrorClass::Ours) | None => None,
        }
    }

    /// Result as the value of a metric's label.
    pub(crate) fn result(&self) -> &'static str {
        match (self.class, self.failed.is_empty(), self.ended.is_empty()) {
            (Some(class), ..) => class.as_str(),
            (None, false, _) => "ours",
            (None, true, false) => "ended",
            (None, true, true) => "paused",
        }
    }
}

#[cfg(test)]
mod tests;
