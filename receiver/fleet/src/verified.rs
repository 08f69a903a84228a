//! Signed input of a runtime, as the gateway hands it to the fleet, and the times of its signatures, comparable across
//! steps of the receiver's wall clock.

use rustls_pki_types::CertificateDer;
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::{certificate::KeyId, event::Received, signature::VerifiedSignature};
use tokio::time::Instant;

/// Deviation of the two clocks that counts as a step, in seconds. Both are read in whole seconds, and not at once.
const MIN_STEP: u64 = 2;

/// Input that a runtime signed. The constructor consumes a [`VerifiedSignature`], which only signature verification
/// creates, so the type proves that the input was verified. The gateway constructs it after the certificate, the
/// signature, the nonce and the sender were checked, and passes it on unchanged to the runtime table.
#[derive(Debug, PartialEq, Eq)]
pub struct Verified<T> {
    pub(super) runtime: RuntimeId,
    pub(super) signature: VerifiedSignature,
    pub(super) payload: T,
    pub(super) leaf: Option<CertificateDer<'static>>,
    pub(super) authority: Option<KeyId>,
}

impl<T> Verified<T> {
    /// Combines the runtime of the verified certificate, its signature, and the payload that was signed.
    pub const fn new(runtime: RuntimeId, signature: VerifiedSignature, payload: T) -> Self {
        Self { runtime, signature, payload, leaf: None, authority: None }
    }

    /// Adds the certificate of the signature. Other managers receive it with forwarded events; without it nothing is
    /// forwarded.
    #[must_use]
    pub fn with_leaf(self, leaf: CertificateDer<'static>) -> Self {
        Self { leaf: Some(leaf), ..self }
    }

    /// Adds the id of the key that issued that certificate.
    #[must_use]
    pub fn with_authority(self, authority: Option<KeyId>) -> Self {
        Self { authority, ..self }
    }

    /// Runtime that signed.
    pub const fn runtime(&self) -> &RuntimeId {
        &self.runtime
    }

    /// The signed payload.
    pub const fn payload(&self) -> &T {
        &self.payload
    }
}

/// Events of one request, all of the epoch of the signature's nonce.
#[derive(Debug, PartialEq, Eq)]
pub struct EventBatch {
    /// At least one; each an event, or the id of a refused event and the reason.
    pub events: Vec<Received>,
    /// `traceparent` of the request; `None` in builds without trace export.
    pub traceparent: Option<String>,
}

/// Converts the creation time of signatures, which agents measure by the receiver's wall clock, into seconds of this
/// process's monotonic clock. Otherwise a wall clock that is set back would make the signatures from before newer than
/// all later ones, and an agent that restarts would count as the older one for as long as the clock was set back.
///
/// A signature from before a step that arrives after it is wrong by the step, but at most by the time for which the
/// gateway accepts signatures.
#[derive(Debug, Default)]
pub(crate) struct SignatureClock(Option<Offset>);

#[derive(Debug)]
struct Offset {
    start: Instant,
    /// Wall clock, in Unix seconds, at `start`, corrected by its steps since.
    unix: i64,
}

impl SignatureClock {
    /// Returns the time at which a signature of this time was created, for a receiver with the time `now`, which is
    /// `now_unix` by its wall clock.
    pub(crate) fn convert(&mut self, created: i64, now_unix: i64, now: Instant) -> i64 {
        let offset = self.0.get_or_insert(Offset { start: now, unix: now_unix });
        let measured = now_unix.saturating_sub_unsigned(now.saturating_duration_since(offset.start).as_secs());
        if measured.abs_diff(offset.unix) >= MIN_STEP {
            offset.unix = measured;
        }
        created.saturating_sub(offset.unix)
    }
}

#[cfg(any(test, feature = "testing"))]
impl<T> Verified<T> {
    /// Stands for input that was not verified.
    pub fn unchecked(runtime: &RuntimeId, epoch: tidewatch_api::identity::Epoch, created: i64, payload: T) -> Self {
        let nonce = tidewatch_contract::signature::Nonce { epoch, counter: 0 };
        Self::new(runtime.clone(), VerifiedSignature::unchecked(created, nonce), payload)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn order_of_signatures_follows_the_monotonic_clock_through_steps() {
        let mut clock = SignatureClock::default();
        let start = Instant::now();
        let mut last = i64::MIN;
        for (elapsed, step) in [(0i64, 0), (10, 0), (20, -3_600), (30, -3_600), (40, 86_400), (50, 0)] {
            let now_unix = 1_700_000_000 + elapsed + step;
            let at = start + Duration::from_secs(elapsed.unsigned_abs());
            let created = clock.convert(now_unix - 1, now_unix, at);
            assert!(created > last, "after {elapsed} s");
            last = created;
        }
    }

    #[test]
    fn signature_that_arrives_late_keeps_its_time() {
        let mut clock = SignatureClock::default();
        let start = Instant::now();
        let later = start + Duration::from_millis(9_900);
        let newer = clock.convert(1_009, 1_009, start + Duration::from_secs(9));
        let older = clock.convert(1_008, 1_010, later);
        assert_eq!(newer - older, 1, "reading clocks in whole seconds is no step");
    }
}
