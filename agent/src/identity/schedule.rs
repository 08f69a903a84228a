//! Schedules the enroller's next step: enrol with a token, renew with the current identity, write the Secret, or wait.
//! Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::validity::Validity;
use crate::{backoff::Backoff, receiver::RetryTimer};

/// Two refusals of certificates within this time count as repeated; certificates are then requested with increasing
/// delays.
const REFUSAL_WINDOW: Duration = Duration::from_secs(600);
/// First ceiling of the backoff (full jitter) after repeated refusals.
const REFUSED: Duration = Duration::from_secs(1);
/// Highest ceiling of that backoff.
const REFUSED_CAP: Duration = Duration::from_secs(60);

/// Next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Request a certificate with a token.
    Enrol,
    /// Request a certificate with the current identity.
    Renew,
    /// Write the Secret.
    Store,
    /// Wait until this time.
    Wait(Instant),
}

/// Acceptance of the certificate by the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CertificateHealth {
    /// Not refused.
    #[default]
    Valid,
    /// Refused; a renewal with it may still succeed.
    Refused,
    /// Refused, and the renewal failed.
    Lost,
}

/// State from which the next step is derived; see the module. By default there is no certificate.
#[derive(Default)]
pub(super) struct Schedule {
    validity: Option<Validity>,
    health: CertificateHealth,
    /// Delay after failed certificate requests.
    requests: RetryTimer,
    /// The Secret exists and does not contain the identity in use.
    store_due: bool,
    /// Delay after failed writes of the Secret.
    stores: RetryTimer,
    refusals: Backoff,
    refused: Option<Instant>,
    /// End of the delay after repeated refusals.
    pause: Option<Instant>,
}

impl Schedule {
    /// Next step at a time.
    pub(super) fn next(&self, now: Instant) -> Step {
        let (step, due) = match self.validity {
            Some(validity) if self.health != CertificateHealth::Lost && validity.end > now => {
                (Step::Renew, if self.health == CertificateHealth::Valid { validity.due } else { now })
            }
            _ => (Step::Enrol, now),
        };
        let due = self.requests.not_before(self.pause.map_or(due, |pause| pause.max(due)));
        if due <= now {
            return step;
        }
        let store = self.store_due.then(|| self.stores.not_before(now));
        if store.is_some_and(|store| store <= now) {
            return Step::Store;
        }
        // The wait ends at the expiry at the latest: from then on, certificates are requested with a token.
        let end = self.validity.map(|validity| validity.end).filter(|end| *end > now);
        Step::Wait([store, end].into_iter().flatten().fold(due, Instant::min))
    }

    /// Records a new certificate.
    pub(super) fn certificate_obtained(&mut self, validity: Validity) {
        (self.validity, self.health) = (Some(validity), CertificateHealth::Valid);
        self.requests.reset();
    }

    /// Records a failed certificate request; `step` is the result of [`Schedule::next`]. A `Retry-After` of the
    /// receiver replaces the backoff.
    pub(super) fn failed(&mut self, step: Step, now: Instant, connecting: bool, retry_after: Option<Duration>) {
        let lost = step == Step::Renew && self.health == CertificateHealth::Refused;
        if lost {
            self.health = CertificateHealth::Lost;
        }
        match retry_after {
            Some(retry_after) => self.requests.retry_after(now, retry_after),
            None if lost => self.requests.reset(),
            None => self.requests.fail(now, connecting),
        }
    }

    /// Records new settings. A different receiver is contacted without delay, since the `Retry-After` of the previous
    /// one does not apply to it; otherwise only the backoff ends and a `Retry-After` still holds.
    pub(super) const fn target_changed(&mut self, elsewhere: bool) {
        if elsewhere {
            self.requests.reset();
        } else {
            self.requests.credentials_changed();
        }
    }

    /// Advances the renewal to a time, because the receiver demands it; the caller adds jitter, so that not all agents
    /// renew at once.
    pub(super) fn renewal_requested(&mut self, at: Instant) {
        if let Some(validity) = &mut self.validity {
            validity.due = validity.due.min(at);
        }
    }

    /// Records that the receiver refused the certificate.
    pub(super) fn certificate_refused(&mut self, now: Instant) {
        if self.validity.is_none() || self.health != CertificateHealth::Valid {
            return;
        }
        self.health = CertificateHealth::Refused;
        let is_repeated = self.refused.replace(now).is_some_and(|last| now.duration_since(last) < REFUSAL_WINDOW);
        if !is_repeated {
            self.refusals.reset();
        }
        self.pause = is_repeated.then(|| now + self.refusals.fail(REFUSED, REFUSED_CAP));
    }

    /// Sets whether the Secret exists and lacks the identity in use.
    pub(super) const fn set_store_due(&mut self, store_due: bool) {
        self.store_due = store_due;
        if !store_due {
            self.stores.reset();
        }
    }

    /// Records a failed write of the Secret.
    pub(super) fn store_failed(&mut self, now: Instant) {
        self.stores.fail(now, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn with_certificate(now: Instant) -> Schedule {
        let mut schedule = Schedule::default();
        schedule.certificate_obtained(Validity { due: now + 16 * MINUTE, end: now + 24 * MINUTE });
        schedule
    }

    #[test]
    fn renewal_follows_enrolment_and_expiry_leads_back_to_enrolment() {
        let now = Instant::now();
        assert_eq!(Schedule::default().next(now), Step::Enrol);
        let schedule = with_certificate(now);
        assert_eq!(schedule.next(now), Step::Wait(now + 16 * MINUTE));
        assert_eq!(schedule.next(now + 16 * MINUTE), Step::Renew);
        assert_eq!(schedule.next(now + 24 * MINUTE), Step::Enrol);
    }

    #[test]
    fn failed_renewal_is_retried_until_the_expiry() {
        let now = Instant::now();
        let mut schedule = with_certificate(now);
        let due = now + 16 * MINUTE;
        schedule.failed(Step::Renew, due, false, Some(5 * MINUTE));
        let Step::Wait(until) = schedule.next(due) else { panic!("a Retry-After holds") };
        assert!(until >= due + 5 * MINUTE && until < due + 6 * MINUTE);
        for _ in 0..20 {
            schedule.failed(Step::Renew, due, false, None);
        }
        assert_eq!(schedule.next(due + MINUTE), Step::Renew);
        schedule.failed(Step::Renew, now + 23 * MINUTE, false, Some(5 * MINUTE));
        assert_eq!(schedule.next(now + 23 * MINUTE), Step::Wait(now + 24 * MINUTE));
        assert!(matches!(schedule.next(now + 24 * MINUTE), Step::Wait(_)), "a Retry-After holds");
        assert_eq!(schedule.next(now + 29 * MINUTE), Step::Enrol);
    }

    #[test]
    fn retry_after_is_void_for_another_receiver_only() {
        let now = Instant::now();
        let mut schedule = Schedule::default();
        schedule.failed(Step::Enrol, now, false, Some(5 * MINUTE));
        schedule.target_changed(false);
        assert!(matches!(schedule.next(now + MINUTE), Step::Wait(_)), "a Retry-After holds");
        schedule.target_changed(true);
        assert_eq!(schedule.next(now), Step::Enrol);
        // A failure without a `Retry-After` may have been caused by the old roots.
        while schedule.next(now) == Step::Enrol {
            schedule.failed(Step::Enrol, now, true, None);
        }
        schedule.target_changed(false);
        assert_eq!(schedule.next(now), Step::Enrol);
    }

    #[test]
    fn refused_certificate_is_renewed_then_replaced_with_increasing_delay() {
        let now = Instant::now();
        let mut schedule = with_certificate(now);
        schedule.certificate_refused(now);
        assert_eq!(schedule.next(now), Step::Renew);
        schedule.failed(Step::Renew, now, false, None);
        assert_eq!(schedule.next(now), Step::Enrol);
        schedule.failed(Step::Enrol, now, true, None);
        assert_eq!(schedule.next(now + MINUTE), Step::Enrol, "a lost certificate is not renewed");

        let mut waits = Vec::new();
        for _ in 0..12 {
            schedule.certificate_obtained(Validity { due: now + 16 * MINUTE, end: now + 24 * MINUTE });
            schedule.certificate_refused(now);
            match schedule.next(now) {
                Step::Wait(until) => waits.push(until - now),
                step => assert_eq!(step, Step::Renew),
            }
        }
        assert!(waits.iter().any(|wait| *wait > Duration::from_secs(5)), "{waits:?}");
        assert!(waits.iter().all(|wait| *wait <= REFUSED_CAP), "{waits:?}");
        let later = now + REFUSAL_WINDOW + MINUTE;
        schedule.certificate_obtained(Validity { due: later + MINUTE, end: later + 2 * MINUTE });
        schedule.certificate_refused(later);
        assert_eq!(schedule.next(later), Step::Renew);
    }

    #[test]
    fn demanded_renewal_is_only_ever_advanced() {
        let now = Instant::now();
        let mut schedule = with_certificate(now);
        schedule.renewal_requested(now + MINUTE);
        schedule.renewal_requested(now + 5 * MINUTE);
        assert_eq!(schedule.next(now), Step::Wait(now + MINUTE));
        schedule.certificate_obtained(Validity { due: now + 16 * MINUTE, end: now + 24 * MINUTE });
        assert_eq!(schedule.next(now), Step::Wait(now + 16 * MINUTE));
    }

    #[test]
    fn secret_is_written_while_no_request_is_due() {
        let now = Instant::now();
        let mut schedule = with_certificate(now);
        schedule.set_store_due(true);
        assert_eq!(schedule.next(now), Step::Store);
        schedule.certificate_refused(now);
        assert_eq!(schedule.next(now), Step::Renew);
        schedule.certificate_obtained(Validity { due: now + 16 * MINUTE, end: now + 24 * MINUTE });
        for _ in 0..9 {
            schedule.store_failed(now);
        }
        assert_eq!(schedule.next(now + MINUTE), Step::Store);
        schedule.set_store_due(false);
        assert_eq!(schedule.next(now), Step::Wait(now + 16 * MINUTE));
    }
}
