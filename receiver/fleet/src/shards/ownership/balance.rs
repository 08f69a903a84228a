//! Shares: which shards this replica claims and hands over.

use std::cmp::Reverse;

use tidewatch_api::leases::Unit;
use tokio::time::Instant;

use super::{
    super::record::Record, Effect, EndReason, LeaseId, Ownership, Phase, Refusal, Step, WriteKind, quota, view::Tenure,
};

/// Claims of shards that a replica has in flight at the same time.
const CLAIMS_AT_ONCE: usize = 8;
/// Shards that a replica hands over at the same time, while it goes on with the others.
const HAND_OVERS_AT_ONCE: usize = 4;

impl Ownership {
    /// Live replicas that stay, in the order of their membership Leases.
    fn staying(&self, now: Instant) -> Vec<&str> {
        let me = &*self.settings.identity;
        let own = self.session.as_ref().filter(|session| now < session.until && !self.is_leaving);
        let own = own.map(|session| (session.number, me));
        let is_staying = |record: &Record| !record.leaving && !self.is_rival(record);
        let others = self.view.members().filter(|(_, observed)| is_staying(&observed.record));
        let others = others.filter_map(|(number, observed)| match observed.tenure(&self.settings, now) {
            Tenure::Live(holder) if holder != me => Some((number, holder)),
            _ => None,
        });
        let mut all: Vec<_> = own.into_iter().chain(others).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, holder)| holder).collect()
    }

    /// Notes a change of the live replicas.
    pub(super) fn update_live(&mut self, now: Instant) {
        let live = self.staying(now);
        if !live.iter().eq(&self.live.0) {
            self.live = (live.into_iter().map(str::to_owned).collect(), now);
        }
    }

    /// Number of shards that this replica wants.
    pub(super) fn wanted(&self) -> usize {
        let (live, _) = &self.live;
        let rank = live.iter().position(|holder| *holder == self.settings.identity);
        rank.map_or(0, |rank| quota::share(self.settings.units(), live.len(), rank))
    }

    fn in_phase(&self, is_active: bool) -> usize {
        self.holds.values().filter(|hold| (hold.phase == Phase::Active) == is_active).count()
    }

    /// Claims shards up to the share, and hands over those above it.
    pub(super) fn balance(&mut self, now: Instant, step: &mut Step) -> Option<Refusal> {
        let mut free = Vec::new();
        let mut own = Vec::new();
        let mut is_complete = true;
        let named = self.view.named();
        for unit in Unit::all(self.settings.shards).filter(|unit| !self.holds.contains_key(unit)) {
            let Some(record) = self.view.record(LeaseId::Unit(unit)) else {
                is_complete = false;
                continue;
            };
            let shards = match record.holder() {
                Some(holder) if holder == self.settings.identity => &mut own,
                Some(holder) if named.contains(holder) => continue,
                _ => &mut free,
            };
            shards.push((unit, record.version.clone()));
        }
        let active = self.in_phase(true);
        let claiming = self.attempts.values().filter(|it| it.is_in_flight && it.kind == WriteKind::Claim).count();
        let mut room = step.wanted.saturating_sub(active + claiming);
        let mut claims = CLAIMS_AT_ONCE.saturating_sub(claiming);
        if room > 0 {
            free.sort_by_cached_key(|(unit, _)| self.preference(*unit));
        }
        // First those that name this replica already: no other replica can claim them.
        let own_count = own.len();
        for (at, (unit, version)) in own.into_iter().chain(free).enumerate() {
            let id = LeaseId::Unit(unit);
            if self.is_blocked(id, now) {
                continue;
            }
            if room > 0 && claims > 0 {
                (room, claims) = (room - 1, claims - 1);
                self.send(step, id, Some(version), WriteKind::Claim, now);
            } else if room == 0 && at < own_count && now >= self.quiet {
                self.send(step, id, Some(version), WriteKind::Release, now);
            }
        }

        let surplus = active.saturating_sub(step.wanted);
        if surplus > 0 && now >= self.live.1 + self.settings.settle() {
            let hand_overs = HAND_OVERS_AT_ONCE.saturating_sub(self.in_phase(false));
            let mut held: Vec<_> =
                self.holds.iter().filter(|(_, hold)| hold.phase == Phase::Active).map(|(unit, _)| *unit).collect();
            // The least preferred first: those for which another replica comes first.
            held.sort_by_cached_key(|unit| Reverse(self.preference(*unit)));
            for unit in held.into_iter().take(surplus.min(hand_overs)) {
                self.request_hand_over(unit, now);
            }
        }
        (!is_complete).then_some(Refusal::LeaseMissing)
    }

    fn preference(&self, unit: Unit) -> (usize, u64) {
        quota::preference(&self.settings.identity, &self.live.0, unit)
    }

    fn request_hand_over(&mut self, unit: Unit, now: Instant) {
        let deadline = now + self.settings.hand_over();
        if let Some(hold) = self.holds.get_mut(&unit) {
            hold.phase = Phase::Stopping { deadline, has_stopped: false };
            self.effects.push(Effect::HandOver(unit));
        }
    }

    /// Continues the hand-overs: closes the fence when the work has stopped or its deadline has passed, and then releases
    /// the Lease, in the latter case only when no request can arrive any more.
    pub(super) fn hand_over(&mut self, now: Instant, step: &mut Step) {
        let all: Vec<_> = self.holds.keys().copied().collect();
        if self.is_leaving {
            for unit in &all {
                if self.holds.get(unit).is_some_and(|hold| hold.phase == Phase::Active) {
                    self.request_hand_over(*unit, now);
                }
            }
        }
        // Requests of an earlier fence of the same shard may still arrive as well.
        let quiet = self.quiet.max(now);
        let reserve = self.settings.reserve();
        for unit in all {
            let Some(hold) = self.holds.get_mut(&unit) else { continue };
            match hold.phase {
                Phase::Stopping { has_stopped: true, .. } => {
                    hold.phase = Phase::Closed { release: quiet };
                    self.effects.push(Effect::Ended(unit, EndReason::HandedOver));
                }
                Phase::Stopping { deadline, .. } if now >= deadline => {
                    hold.phase = Phase::Closed { release: quiet.max(now + reserve) };
                    self.effects.push(Effect::Ended(unit, EndReason::HandOverTimeout));
                }
                _ => {}
            }
            let Phase::Closed { release } = hold.phase else { continue };
            let version = hold.version.clone();
            if now >= release && !self.is_paused(LeaseId::Unit(unit), WriteKind::Release, now) {
                self.send(step, LeaseId::Unit(unit), Some(version), WriteKind::Release, now);
            }
        }
    }
}
