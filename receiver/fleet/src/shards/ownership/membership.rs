//! The own membership, the Lease of the unsharded receiver, and the memberships of replicas that have stopped renewing.

use tokio::time::Instant;

use super::{LeaseId, Ownership, Refusal, Step, WriteKind, quota, view::Tenure};

impl Ownership {
    /// Takes a membership Lease, renews it, or gives it back.
    pub(super) fn membership(&mut self, now: Instant, step: &mut Step) -> Option<Refusal> {
        let Some(session) = &self.session else {
            let is_joining = self.attempts.values().any(|it| it.is_in_flight && it.kind == WriteKind::Join);
            self.has_left = self.is_leaving && !is_joining;
            // The members divide all shards, so one that may hold none would leave its share without a holder.
            let is_waiting = self.is_leaving || is_joining || self.excluded(now).is_some();
            return if is_waiting { None } else { self.join(now, step) };
        };
        let id = LeaseId::Member(session.number);
        let version = session.version.clone();
        let is_announced = session.is_leaving || !self.is_leaving;
        let is_due = now >= session.due || !is_announced && version.is_some();
        // An unknown version is found out by a renewal.
        if self.may_leave(now) && version.is_some() {
            if !self.is_paused(id, WriteKind::Leave, now) {
                self.send(step, id, version, WriteKind::Leave, now);
            }
        } else if is_due {
            self.send(step, id, version, WriteKind::Renew { is_leaving: self.is_leaving }, now);
        }
        None
    }

    /// True when this replica stops and no request of it can arrive any more.
    fn may_leave(&self, now: Instant) -> bool {
        let is_shard = |kind| matches!(kind, WriteKind::Claim | WriteKind::Release);
        let writes = self.attempts.values().any(|attempt| attempt.is_in_flight && is_shard(attempt.kind));
        self.is_leaving && self.holds.is_empty() && !writes && now >= self.quiet
    }

    /// Takes the membership Lease of this process or of its predecessor in the same place, else a free one, else one that
    /// has lapsed.
    fn join(&mut self, now: Instant, step: &mut Step) -> Option<Refusal> {
        let me = &*self.settings.identity;
        let rank = |tenure| match tenure {
            Tenure::Live(holder) | Tenure::Lapsed(holder) if holder == me => Some(0),
            Tenure::Predecessor(_) => Some(1),
            Tenure::Free => Some(2),
            Tenure::Lapsed(_) => Some(3),
            Tenure::Live(_) => None,
        };
        let candidates = self.view.members().filter_map(|(number, observed)| {
            let rank = rank(observed.tenure(&self.settings, now))?;
            Some((rank, quota::score(me, number), LeaseId::Member(number), observed.record.version.clone()))
        });
        match candidates.min() {
            Some((.., id, version)) => {
                if !self.is_blocked(id, now) {
                    self.send(step, id, Some(version), WriteKind::Join, now);
                }
                None
            }
            None if self.view.members().next().is_none() => Some(Refusal::LeaseMissing),
            None => Some(Refusal::NoMembership),
        }
    }

    /// Takes the Lease of the unsharded receiver, or renews it if it was not renewed for a third of its duration, or for
    /// half of it as far as this replica can prove.
    pub(super) fn keep_locked(&mut self, now: Instant, step: &mut Step) -> Option<Refusal> {
        let id = LeaseId::Unsharded;
        let Some(record) = self.view.record(id) else { return Some(Refusal::LeaseMissing) };
        if let Some(refusal) = self.excluded(now) {
            return Some(refusal);
        }
        let is_member = self.session.as_ref().is_some_and(|session| now < session.until);
        if !is_member || self.is_leaving && self.holds.is_empty() {
            return None;
        }
        let timings = self.settings.timings;
        let changed = self.view.changed(id).unwrap_or(now) + timings.renew + self.lock_jitter;
        let proven = self.lock.renewed().map_or(now, |renewed| renewed + timings.lease / 2);
        let is_held = record.holder() == Some(&*self.sharded);
        // With a shorter duration the fences of this replica would end between two renewals.
        let is_short = record.lease.duration.is_none_or(|recorded| recorded < timings.lease);
        if (!is_held || is_short || now >= changed.min(proven)) && !self.is_blocked(id, now) {
            let version = record.version.clone();
            self.lock_jitter = self.random.jitter(timings.retry);
            self.send(step, id, Some(version), WriteKind::Lock, now);
        }
        None
    }

    /// Reason for which no replica with this number of shards may hold one.
    fn excluded(&self, now: Instant) -> Option<Refusal> {
        let id = LeaseId::Unsharded;
        match self.view.tenure(id, &self.settings, now) {
            Some(Tenure::Live(holder)) if holder != self.sharded => return Some(Refusal::UnshardedActive),
            _ => {}
        }
        let stored = self.view.record(id)?.shards.as_ref()?;
        (*stored != self.settings.shards.to_string()).then_some(Refusal::OtherCount)
    }

    /// Ends the memberships of replicas that did not renew them, and any other one of this replica, from a write whose
    /// response was lost.
    pub(super) fn evict(&mut self, now: Instant, step: &mut Step) {
        let Some(session) = self.session.as_ref().filter(|session| now < session.until && !self.is_leaving) else {
            return;
        };
        let is_over = |tenure| match tenure {
            Tenure::Lapsed(_) | Tenure::Predecessor(_) => true,
            Tenure::Live(holder) => holder == self.settings.identity,
            Tenure::Free => false,
        };
        let others = self.view.members().filter(|(number, _)| *number != session.number);
        let over = others.filter(|(_, observed)| is_over(observed.tenure(&self.settings, now)));
        let over = over.map(|(number, observed)| (LeaseId::Member(number), observed.record.version.clone()));
        let over: Vec<_> = over.filter(|(id, _)| !self.is_blocked(*id, now)).collect();
        for (id, version) in over {
            self.send(step, id, Some(version), WriteKind::Evict, now);
        }
    }
}
