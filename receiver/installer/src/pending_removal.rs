//! Pending removal of objects: the result of a removal by the installer, and by the reconciles that clean up a runtime.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use tidewatch_api::key::KymaKey;
use tidewatch_kit::{foreign_text, random::Random};

/// Delay until the deletion of objects is checked again, after progress.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Longest delay without progress; an event of the agent and a change in KCP cause a check at once.
const MAX_RECHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum length in characters of the names of the blockers, which come from the runtime.
const MAX_BLOCKER_CHARS: usize = 1_024;

/// A removal that has not finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRemoval {
    /// Delay until the next check; `None` for one that grows while the blockers stay the same.
    requeue_after: Option<Duration>,
    /// Blockers of the removal as one sentence, stable while they are the same.
    pub message: Option<String>,
}

impl PendingRemoval {
    /// Waits for a fixed time; `message` names the blockers unless they are reported elsewhere.
    pub const fn after(requeue_after: Duration, message: Option<String>) -> Self {
        Self { requeue_after: Some(requeue_after), message }
    }

    /// Waits for these blockers, a sentence.
    pub const fn blocked(message: String) -> Self {
        Self { requeue_after: None, message: Some(message) }
    }

    /// Waits for objects of a runtime that are being deleted; `blockers` describes those that are not deleted at once.
    pub fn of_objects(blockers: &[String]) -> Self {
        let message = (!blockers.is_empty()).then(|| {
            let named = foreign_text::line(&blockers.join(", "), MAX_BLOCKER_CHARS);
            format!("waiting for {named} to be deleted in the runtime")
        });
        Self { requeue_after: None, message }
    }
}

/// Backoff of the checks of blocked removals, by Kyma; bounded by the Kymas with a pending removal.
#[derive(Debug, Default)]
pub struct RemovalBackoff(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Blockers at the last check, and the number of checks that found them.
    blocked: HashMap<KymaKey, (String, u32)>,
    random: Random,
}

impl RemovalBackoff {
    /// Delay until the next check of a removal. It doubles up to a minute while the blockers stay the same, with jitter
    /// of one half; other blockers, or a check that could delete something, are progress.
    pub fn delay(&self, key: &KymaKey, pending: &PendingRemoval) -> Duration {
        let mut state = self.0.lock();
        let State { blocked, random } = &mut *state;
        if let Some(fixed) = pending.requeue_after {
            return fixed;
        }
        let Some(message) = &pending.message else {
            blocked.remove(key);
            return RECHECK_INTERVAL;
        };
        let checks = match blocked.get_mut(key).filter(|(before, _)| before == message) {
            Some((_, checks)) => {
                *checks = checks.saturating_add(1);
                *checks
            }
            None => {
                blocked.insert(key.clone(), (message.clone(), 0));
                0
            }
        };
        let bound = RECHECK_INTERVAL.saturating_mul(2u32.saturating_pow(checks)).min(MAX_RECHECK_INTERVAL);
        bound / 2 + random.jitter(bound / 2)
    }

    /// Drops the entry of a Kyma.
    pub fn forget(&self, key: &KymaKey) {
        self.0.lock().blocked.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_of_the_same_blockers_back_off_to_a_minute_and_progress_resets_them() {
        let backoff = RemovalBackoff::default();
        let key = KymaKey::new("ns", "k");
        let blocked = |by: &str| PendingRemoval::of_objects(&[by.to_owned()]);
        for bound in [1, 2, 4, 8, 16, 32, 60, 60, 60] {
            let delay = backoff.delay(&key, &blocked("the CRD x"));
            let bound = Duration::from_secs(bound);
            assert!(bound / 2 <= delay && delay <= bound, "{delay:?} of {bound:?}");
        }
        assert!(backoff.delay(&key, &blocked("the Kyma")) <= RECHECK_INTERVAL, "other blockers");
        backoff.delay(&key, &blocked("the Kyma"));
        assert_eq!(backoff.delay(&key, &PendingRemoval::of_objects(&[])), RECHECK_INTERVAL);
        assert!(backoff.delay(&key, &blocked("the Kyma")) <= RECHECK_INTERVAL);
        backoff.forget(&key);
        assert!(backoff.0.lock().blocked.is_empty());
    }

    #[test]
    fn names_of_blockers_are_one_short_line() {
        let removal = PendingRemoval::of_objects(&["the CRD x\n\u{1b}[2J".to_owned(), "y".repeat(100_000)]);
        let message = removal.message.unwrap();
        assert!(message.starts_with("waiting for the CRD x  [2J, yy"), "{message:.50}");
        assert!(message.ends_with("y to be deleted in the runtime") && message.chars().count() < 1_100);
    }
}
