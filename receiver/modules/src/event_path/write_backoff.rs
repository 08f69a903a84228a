//! Limits writes of the conditions of one Kyma: a path that flaps, even by intent of its agent, is written with growing
//! spacing.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tidewatch_api::key::KymaKey;
use tokio::time::Instant;

use super::condition::Change;

/// Minimum spacing of two transitions.
const MIN_SPACING: Duration = Duration::from_secs(2);
/// Maximum spacing of transitions, and the spacing of two messages with the same reason.
const MAX_SPACING: Duration = Duration::from_secs(300);
/// Number of quiet spacings after which the spacing is reset.
const QUIET_SPACINGS: u32 = 10;

/// Last write of each condition, bounded by the number of Kymas.
#[derive(Default)]
pub(super) struct WriteBackoff(HashMap<KymaKey, Vec<LastWrite>>);

struct LastWrite {
    kind: &'static str,
    at: Instant,
    spacing: Duration,
}

impl WriteBackoff {
    /// Returns whether a condition may be written now.
    pub(super) fn allows(&self, key: &KymaKey, change: &Change, now: Instant) -> bool {
        let mut writes = self.0.get(key).into_iter().flatten();
        writes.find(|last| last.kind == change.kind()).is_none_or(|last| {
            let spacing = if change.message_only() { MAX_SPACING } else { last.spacing };
            now.saturating_duration_since(last.at) >= spacing
        })
    }

    /// Retains the writes that are allowed now: one per Kyma, the longest waiting first.
    pub(super) fn select<T>(&self, pending: &mut Vec<(KymaKey, T, Change)>, now: Instant) {
        pending.retain(|(key, _, change)| self.allows(key, change, now));
        pending.sort_by_key(|(key, ..)| self.last_write(key));
        // A write changes the resourceVersion, so the other conditions of the Kyma follow with the next ticks.
        let mut once = HashSet::new();
        pending.retain(|(key, ..)| once.insert(key.clone()));
    }

    /// Records a write; a failed attempt counts as well.
    pub(super) fn record(&mut self, key: KymaKey, change: &Change, now: Instant) {
        let writes = self.0.entry(key).or_default();
        match writes.iter_mut().find(|last| last.kind == change.kind()) {
            Some(last) => {
                let still = now.saturating_duration_since(last.at) >= last.spacing * QUIET_SPACINGS;
                last.spacing = if still { MIN_SPACING } else { (last.spacing * 2).min(MAX_SPACING) };
                last.at = now;
            }
            None => writes.push(LastWrite { kind: change.kind(), at: now, spacing: MIN_SPACING }),
        }
    }

    /// Time of the last write to a Kyma; `None`, which sorts first, if there was none.
    pub(super) fn last_write(&self, key: &KymaKey) -> Option<Instant> {
        self.0.get(key).and_then(|writes| writes.iter().map(|last| last.at).max())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Retains only these Kymas.
    pub(super) fn retain(&mut self, keep: impl Fn(&KymaKey) -> bool) {
        self.0.retain(|key, _| keep(key));
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_api::ConditionStatus;

    use super::*;
    use crate::event_path::condition::{EVENT_PATH, PAUSED};

    const S: Duration = Duration::from_secs(1);

    fn change(message_only: bool) -> Change {
        let status = ConditionStatus::False;
        let reason = "NoHeartbeat";
        Change::Set { kind: EVENT_PATH, status, reason, message: String::new(), message_only }
    }

    #[test]
    fn flapping_condition_backs_off_until_it_is_quiet() {
        let mut backoff = WriteBackoff::default();
        let key = KymaKey::new("ns", "k");
        let mut now = Instant::now();
        let mut writes = 0;
        for _ in 0..3_600 {
            if backoff.allows(&key, &change(false), now) {
                backoff.record(key.clone(), &change(false), now);
                writes += 1;
            }
            now += S;
        }
        assert!((10..=22).contains(&writes), "{writes} in an hour");
        assert!(backoff.allows(&key, &Change::Remove(PAUSED), now), "another condition");
        now += MAX_SPACING * QUIET_SPACINGS;
        backoff.record(key.clone(), &change(false), now);
        assert!(!backoff.allows(&key, &change(false), now + S));
        assert!(backoff.allows(&key, &change(false), now + MIN_SPACING));
        assert!(!backoff.allows(&key, &change(true), now + MIN_SPACING), "a changed message is no transition");
        assert!(backoff.allows(&key, &change(true), now + MAX_SPACING));
    }

    #[test]
    fn one_condition_per_kyma_is_chosen_and_the_longest_waiting_first() {
        let mut backoff = WriteBackoff::default();
        let now = Instant::now();
        let [late, never] = ["late", "never"].map(|name| KymaKey::new("ns", name));
        backoff.record(late.clone(), &change(false), now);
        let pending = || {
            let both = |key: &KymaKey| [(key.clone(), (), change(false)), (key.clone(), (), Change::Remove(PAUSED))];
            [both(&late), both(&never)].concat()
        };
        let mut chosen = pending();
        backoff.select(&mut chosen, now);
        let kinds: Vec<_> = chosen.iter().map(|(key, (), change)| (key.name.as_str(), change.kind())).collect();
        assert_eq!(kinds, [("never", EVENT_PATH), ("late", PAUSED)]);
        backoff.record(never.clone(), &change(false), now);
        let mut chosen = pending();
        backoff.select(&mut chosen, now);
        assert!(chosen.iter().all(|(_, (), change)| change.kind() == PAUSED), "the other condition is next");
        assert_eq!(chosen.len(), 2);
    }
}
