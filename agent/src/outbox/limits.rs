//! Limits of one request: those of the contract, lowered to those that the receiver announces.

use serde::Deserialize;
use tidewatch_contract::event::MAX_BODY_BYTES;

use super::EVENTS_PER_REQUEST;

/// Limits that the receiver announces in a 413, as extension members of its problem (RFC 9457, section 3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AnnouncedLimits {
    /// Maximum size of a body, in bytes.
    pub max_bytes: Option<usize>,
    /// Maximum number of events per batch.
    pub max_events: Option<usize>,
}

/// Limits of one request. One event is always sent, even if it exceeds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestLimits {
    pub(super) bytes: usize,
    pub(super) events: usize,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self { bytes: MAX_BODY_BYTES, events: EVENTS_PER_REQUEST }
    }
}

impl RequestLimits {
    /// Adopts announced limits that are lower than the current ones; without an announcement, halves `sent`, the size
    /// in bytes of the refused body, which is given if it held more than one event.
    pub(super) fn lower(&mut self, announced: AnnouncedLimits, sent: Option<usize>) {
        let AnnouncedLimits { max_bytes, max_events } = announced;
        let silent = max_bytes.is_none() && max_events.is_none();
        let bytes = max_bytes.or(sent.filter(|_| silent).map(|sent| sent / 2));
        self.bytes = self.bytes.min(bytes.unwrap_or(usize::MAX)).max(1);
        self.events = self.events.min(max_events.unwrap_or(usize::MAX)).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_only_fall_and_halve_without_an_announcement() {
        let mut limits = RequestLimits::default();
        limits.lower(AnnouncedLimits { max_bytes: Some(5_000), max_events: None }, Some(9_000));
        assert_eq!(limits, RequestLimits { bytes: 5_000, ..RequestLimits::default() });
        limits.lower(AnnouncedLimits { max_bytes: Some(usize::MAX), max_events: Some(0) }, Some(9_000));
        assert_eq!(limits, RequestLimits { bytes: 5_000, events: 1 });
        limits.lower(AnnouncedLimits::default(), Some(3_000));
        assert_eq!(limits.bytes, 1_500);
        limits.lower(AnnouncedLimits::default(), None);
        assert_eq!(limits.bytes, 1_500);
    }
}
