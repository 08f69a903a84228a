//! Refused objects of a Manifest. A refusal for the content of an object stays the same until the content changes, so the
//! same object is sent again only after a while.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use super::failure::{Failure, Retry};

/// First delay until a refused object is sent again unchanged, and the longest one; it doubles.
const FIRST_DELAY: Duration = Duration::from_secs(60);
const MAX_DELAY: Duration = Duration::from_secs(600);

/// Refused objects by the hash of their keys; bounded by the objects of the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Refusals(BTreeMap<u64, Refused>);

#[derive(Clone, Debug)]
struct Refused {
    /// Hash of the desired and the live object.
    content: u64,
    failure: Failure,
    times: u32,
    until: Instant,
}

impl Refusals {
    /// Returns the failure of an object that the API server would refuse again, because its content is the same as a while
    /// ago.
    pub(super) fn repeated(&self, key: u64, content: u64, now: Instant) -> Option<Failure> {
        let is_same = |refused: &&Refused| refused.content == content && now < refused.until;
        let refused = self.0.get(&key).filter(is_same)?;
        (refused.failure.retry == Retry::WithOtherContent).then(|| refused.failure.clone())
    }

    /// Records the failure of an object with this content. `jitter` draws a duration up to the given one.
    pub(super) fn refuse(
        &mut self,
        key: u64,
        content: u64,
        failure: &Failure,
        now: Instant,
        jitter: impl FnOnce(Duration) -> Duration,
    ) {
        if failure.retry == Retry::Soon {
            self.accept(key);
            return;
        }
        let before = self.0.get(&key).filter(|before| before.content == content);
        // An attempt in between, for another reason, does not move the next one.
        if before.is_some_and(|before| now < before.until) {
            return;
        }
        let times = before.map_or(0, |before| before.times.saturating_add(1));
        let bound = FIRST_DELAY.saturating_mul(2u32.saturating_pow(times)).min(MAX_DELAY);
        let until = now + bound / 2 + jitter(bound / 2);
        self.0.insert(key, Refused { content, failure: failure.clone(), times, until });
    }

    /// Forgets an object that is not refused any more.
    pub(super) fn accept(&mut self, key: u64) {
        self.0.remove(&key);
    }

    /// Time until the next refused object is to be sent again.
    pub(super) fn next(&self, now: Instant) -> Option<Duration> {
        let waits = self.0.values().map(|refused| refused.until.saturating_duration_since(now));
        waits.filter(|wait| !wait.is_zero()).min()
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn refusal(code: u16, reason: &str, message: &str) -> Status {
        Status::failure(message, reason).with_code(code)
    }

    fn failed(refusal: &Status) -> Failure {
        Failure::new("apply a".to_owned(), &kube::Error::Api(refusal.clone().boxed()))
    }

    #[tokio::test(start_paused = true)]
    async fn unchanged_object_is_sent_again_ever_more_seldom_and_a_changed_one_at_once() {
        let mut refusals = Refusals::default();
        let failure = failed(&refusal(422, "Invalid", "no"));
        let mut delays = Vec::new();
        for _ in 0..6 {
            let now = Instant::now();
            assert_eq!(refusals.repeated(1, 7, now), None);
            refusals.refuse(1, 7, &failure, now, |half| half);
            assert_eq!(refusals.repeated(1, 7, now), Some(failure.clone()));
            assert_eq!((refusals.repeated(1, 8, now), refusals.repeated(2, 7, now)), (None, None));
            // The record of a repetition changes nothing.
            refusals.refuse(1, 7, &failure, now, |_| Duration::ZERO);
            let delay = refusals.next(now).unwrap();
            delays.push(delay.as_secs());
            tokio::time::advance(delay).await;
        }
        assert_eq!(delays, [60, 120, 240, 480, 600, 600]);
        refusals.refuse(1, 8, &failure, Instant::now(), |half| half);
        assert_eq!(refusals.next(Instant::now()), Some(FIRST_DELAY), "other content");
        refusals.accept(1);
        assert_eq!(refusals.next(Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn denial_of_a_webhook_is_repeated_by_each_reconcile_and_slowly_by_itself() {
        let mut refusals = Refusals::default();
        let now = Instant::now();
        let denial = failed(&refusal(403, "Forbidden", "admission webhook \"w.test\" denied the request: no"));
        refusals.refuse(1, 7, &denial, now, |half| half);
        assert_eq!((refusals.repeated(1, 7, now), refusals.next(now)), (None, Some(FIRST_DELAY)));
        tokio::time::advance(FIRST_DELAY).await;
        let now = Instant::now();
        assert_eq!(refusals.next(now), None, "an object that may be sent is not waited for");
        // It fails otherwise now.
        refusals.refuse(1, 7, &failed(&refusal(503, "ServiceUnavailable", "later")), now, |half| half);
        assert_eq!(refusals.next(now), None);
    }
}
