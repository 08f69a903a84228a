//! What one request may carry: the contract's limits, or what the receiver has announced.

use serde::Deserialize;
use tidewatch_shared::event::MAX_BODY_BYTES;

use super::EVENTS_PER_REQUEST;

/// What a 413 says that the receiver would take: extension members of its problem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Announced {
    /// Bytes of a body.
    #[serde(default)]
    pub max_bytes: Option<usize>,
    /// Events of a batch.
    #[serde(default)]
    pub max_events: Option<usize>,
}

/// See the module. One event is always sent, whatever the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Most {
    pub(super) bytes: usize,
    pub(super) events: usize,
}

impl Default for Most {
    fn default() -> Self {
        Self { bytes: MAX_BODY_BYTES, events: EVENTS_PER_REQUEST }
    }
}

impl Most {
    /// Takes over limits that are lower; `sent` are the bytes of the refused body if it had more than one event.
    pub(super) fn learn(&mut self, announced: Announced, sent: Option<usize>) {
        let Announced { max_bytes, max_events } = announced;
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
    fn limits_only_fall_and_silence_is_learned_from() {
        let mut most = Most::default();
        most.learn(Announced { max_bytes: Some(5_000), max_events: None }, Some(9_000));
        assert_eq!(most, Most { bytes: 5_000, ..Most::default() });
        most.learn(Announced { max_bytes: Some(usize::MAX), max_events: Some(0) }, Some(9_000));
        assert_eq!(most, Most { bytes: 5_000, events: 1 });
        most.learn(Announced::default(), Some(3_000));
        assert_eq!(most.bytes, 1_500);
        most.learn(Announced::default(), None);
        assert_eq!(most.bytes, 1_500);
    }
}
