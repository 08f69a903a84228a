//! How often the conditions of one Kyma are written: a path that flaps, by itself or by its agent's will, is told ever more seldom.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tokio::time::Instant;

use super::verdict::Said;
use crate::base::key::KymaKey;

/// From one transition to the next, at least.
const FIRST: Duration = Duration::from_secs(2);
/// However often it flaps, and between two sentences of one reason.
const LONGEST: Duration = Duration::from_secs(300);
/// Whoever was still for so many spacings is trusted again.
const STILL: u32 = 10;

/// The last write of each condition; bounded by the number of Kymas, and what is old enough to mean nothing could be forgotten.
#[derive(Default)]
pub(super) struct Damper(HashMap<KymaKey, Vec<Last>>);

struct Last {
    kind: &'static str,
    at: Instant,
    spacing: Duration,
}

impl Damper {
    /// Whether a condition may be written now.
    pub(super) fn allows(&self, key: &KymaKey, said: &Said, now: Instant) -> bool {
        self.find(key, said.kind()).is_none_or(|last| {
            let spacing = if said.only_words() { LONGEST } else { last.spacing };
            now.saturating_duration_since(last.at) >= spacing
        })
    }

    /// Leaves what may be written now, in its order: one condition of each Kyma, and whoever has waited longest first.
    pub(super) fn choose<T>(&self, wrong: &mut Vec<(KymaKey, T, Said)>, now: Instant) {
        wrong.retain(|(key, _, said)| self.allows(key, said, now));
        wrong.sort_by_key(|(key, ..)| self.last(key));
        // One write moves the Kyma on; the others of it have their turn with the next tick.
        let mut once = HashSet::new();
        wrong.retain(|(key, ..)| once.insert(key.clone()));
    }

    /// A condition was written, or the attempt failed: both cost the same.
    pub(super) fn wrote(&mut self, key: KymaKey, said: &Said, now: Instant) {
        let lasts = self.0.entry(key).or_default();
        match lasts.iter_mut().find(|last| last.kind == said.kind()) {
            Some(last) => {
                let still = now.saturating_duration_since(last.at) >= last.spacing * STILL;
                last.spacing = if still { FIRST } else { (last.spacing * 2).min(LONGEST) };
                last.at = now;
            }
            None => lasts.push(Last { kind: said.kind(), at: now, spacing: FIRST }),
        }
    }

    /// When a Kyma was last written to; those that never were come first.
    pub(super) fn last(&self, key: &KymaKey) -> Option<Instant> {
        self.0.get(key).and_then(|lasts| lasts.iter().map(|last| last.at).max())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Forgets all others.
    pub(super) fn retain(&mut self, keep: impl Fn(&KymaKey) -> bool) {
        self.0.retain(|key, _| keep(key));
    }

    fn find(&self, key: &KymaKey, kind: &str) -> Option<&Last> {
        self.0.get(key)?.iter().find(|last| last.kind == kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::event_path::verdict::{EVENT_PATH, PAUSED};
    use tidewatch_shared::api::ConditionStatus;

    const S: Duration = Duration::from_secs(1);

    fn said(only_words: bool) -> Said {
        let (status, reason) = (ConditionStatus::False, "NoHeartbeat");
        Said::Is { kind: EVENT_PATH, status, reason, message: String::new(), only_words }
    }

    #[test]
    fn who_flaps_is_told_ever_more_seldom_until_he_was_still() {
        let (mut damper, key, mut now) = (Damper::default(), KymaKey::new("ns", "k"), Instant::now());
        let mut writes = 0;
        for _ in 0..3_600 {
            if damper.allows(&key, &said(false), now) {
                damper.wrote(key.clone(), &said(false), now);
                writes += 1;
            }
            now += S;
        }
        assert!((10..=22).contains(&writes), "{writes} in an hour");
        assert!(damper.allows(&key, &Said::Gone(PAUSED), now), "another condition");
        now += LONGEST * STILL;
        damper.wrote(key.clone(), &said(false), now);
        assert!(!damper.allows(&key, &said(false), now + S));
        assert!(damper.allows(&key, &said(false), now + FIRST));
        assert!(!damper.allows(&key, &said(true), now + FIRST), "words alone are no transition");
        assert!(damper.allows(&key, &said(true), now + LONGEST));
    }

    #[test]
    fn one_condition_of_a_kyma_at_a_time_and_whoever_waits_longest_first() {
        let (mut damper, now) = (Damper::default(), Instant::now());
        let [late, never] = ["late", "never"].map(|name| KymaKey::new("ns", name));
        damper.wrote(late.clone(), &said(false), now);
        let wrong = || {
            let both = |key: &KymaKey| [(key.clone(), (), said(false)), (key.clone(), (), Said::Gone(PAUSED))];
            [both(&late), both(&never)].concat()
        };
        let mut chosen = wrong();
        damper.choose(&mut chosen, now);
        let kinds: Vec<_> = chosen.iter().map(|(key, (), said)| (key.name.as_str(), said.kind())).collect();
        assert_eq!(kinds, [("never", EVENT_PATH), ("late", PAUSED)]);
        damper.wrote(never.clone(), &said(false), now);
        let mut chosen = wrong();
        damper.choose(&mut chosen, now);
        assert!(chosen.iter().all(|(_, (), said)| said.kind() == PAUSED), "the other one has its turn");
        assert_eq!(chosen.len(), 2);
    }
}
