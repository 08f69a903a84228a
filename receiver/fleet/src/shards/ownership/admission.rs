//! Admission of the own membership beside those of rivals: replicas that divide the runtimes into another number of shards, or
//! that share them with none. The Leases of the shards alone do not keep rivals apart, because a runtime belongs to other shards
//! by another number.
//!
//! A replica claims no shard before its view shows its own membership and no rival. Of two rivals, the view of the one that
//! joined later shows the earlier one, which is the only one of both that may be admitted. An admitted replica ignores rivals: they
//! wait until its membership has ended, and its fences before it.

use tokio::time::Instant;

use super::{super::record::Record, LeaseId, Ownership, Refusal, view::Tenure};

impl Ownership {
    /// Admits the own membership when no rival is left. Gives it up, and lets it lapse, if a live rival was first.
    pub(super) fn admit(&mut self, now: Instant) -> Option<Refusal> {
        let number = self.session.as_ref().filter(|session| !session.is_admitted)?.number;
        let shown = self.view.record(LeaseId::Member(number)).and_then(Record::holder);
        if shown != Some(&*self.settings.identity) {
            return Some(Refusal::Unconfirmed);
        }
        if let Some(refusal) = self.excluded(now) {
            self.end_session(now);
            return Some(refusal);
        }
        // Those that have lapsed are named until one of the live replicas has taken their memberships away.
        if self.view.members().any(|(_, observed)| self.is_rival(&observed.record)) {
            return Some(self.rivalry());
        }
        if let Some(session) = &mut self.session {
            session.is_admitted = true;
        }
        None
    }

    /// Refusal while a rival is live.
    pub(super) fn excluded(&self, now: Instant) -> Option<Refusal> {
        let mut rivals = self.view.members().filter(|(_, observed)| self.is_rival(&observed.record));
        let is_live = rivals.any(|(_, observed)| matches!(observed.tenure(&self.settings, now), Tenure::Live(_)));
        is_live.then(|| self.rivalry())
    }

    /// True for the membership of another replica that cannot hold shards beside this one.
    pub(super) fn is_rival(&self, record: &Record) -> bool {
        let shared = self.settings.shared();
        let is_other = record.holder().is_some_and(|holder| holder != self.settings.identity);
        is_other && (shared.is_none() || record.shared != shared)
    }

    fn rivalry(&self) -> Refusal {
        if self.settings.is_alone { Refusal::Standby } else { Refusal::OtherCount }
    }
}
