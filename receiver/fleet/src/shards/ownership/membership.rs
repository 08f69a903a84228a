//! The own membership, and those of replicas that have stopped renewing.

use tokio::time::Instant;

use super::{LeaseId, Ownership, Refusal, Step, WriteKind, quota, view::Tenure};

impl Ownership {
    /// Takes a membership Lease, renews it, or gives it back.
    pub(super) fn membership(&mut self, now: Instant, step: &mut Step) -> Option<Refusal> {
        let Some(session) = &self.session else {
            let is_joining = self.attempts.values().any(|it| it.is_in_flight && it.kind == WriteKind::Join);
            self.has_left = self.is_leaving && !is_joining;
            if self.is_leaving || is_joining {
                return None;
            }
            return self.excluded(now).or_else(|| self.join(now, step));
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
    /// has lapsed. Replicas that share with none take the first Lease alone, so that one of those that start together is first.
    fn join(&mut self, now: Instant, step: &mut Step) -> Option<Refusal> {
        let me = &*self.settings.identity;
        let rank = |tenure| match tenure {
            Tenure::Live(holder) | Tenure::Lapsed(holder) if holder == me => Some(0),
            Tenure::Predecessor(_) => Some(1),
            Tenure::Free => Some(2),
            Tenure::Lapsed(_) => Some(3),
            Tenure::Live(_) => None,
        };
        let members = || self.view.members().filter(|(number, _)| *number == 0 || !self.settings.is_alone);
        let candidates = members().filter_map(|(number, observed)| {
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
            None if members().next().is_none() => Some(Refusal::LeaseMissing),
            None => Some(Refusal::NoMembership),
        }
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
