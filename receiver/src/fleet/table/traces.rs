//! Which traces of events wait for a pass over a Kyma. Empty in builds that export none.

use std::{collections::HashMap, time::SystemTime};

use tidewatch_shared::trace;

use crate::base::key::KymaKey;

/// Traces that one pass is caused by, at most; what is beyond is worked on all the same.
const OF_ONE: usize = 16;
/// Kymas with traces.
const KYMAS: usize = 10_000;

/// What waits, by Kyma.
#[derive(Debug, Default)]
pub(super) struct Traces(HashMap<KymaKey, Waiting>);

/// The traces that wait with one Kyma.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    since: Option<SystemTime>,
    causes: Vec<String>,
}

impl Traces {
    /// One more, if there is room: the `traceparent` of a request that makes this Kyma wanted.
    pub(super) fn add(&mut self, key: &KymaKey, traceparent: String) {
        if self.0.len() < KYMAS || self.0.contains_key(key) {
            let waiting = self.0.entry(key.clone()).or_default();
            waiting.since.get_or_insert_with(SystemTime::now);
            if waiting.causes.len() < OF_ONE {
                waiting.causes.push(traceparent);
            }
        }
    }

    /// Those that the pass which begins now is caused by.
    pub(super) fn take(&mut self, key: &KymaKey) -> Waiting {
        self.0.remove(key).unwrap_or_default()
    }

    /// Nobody will work on this Kyma any more.
    pub(super) fn forget(&mut self, key: &KymaKey) {
        self.0.remove(key);
    }
}

impl Waiting {
    /// Ends the wait: its span continues one of the traces and links to the others. Returns the `traceparent` for what comes next.
    pub(super) fn end(&self) -> Option<String> {
        let span = trace::span("wait for a pass", Some(self.since?), self.causes.iter().map(String::as_str));
        span.map(|span| span.traceparent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_taken_once_and_have_bounds() {
        let (mut traces, key) = (Traces::default(), KymaKey::new("n", "k"));
        (0..=OF_ONE).for_each(|trace| traces.add(&key, trace.to_string()));
        let (all, none) = (traces.take(&key), traces.take(&key));
        assert_eq!((all.causes.len(), all.since.is_some()), (OF_ONE, true));
        assert_eq!((none.causes.len(), none.since, none.end()), (0, None, None));
        (0..=KYMAS).for_each(|kyma| traces.add(&KymaKey::new("n", kyma.to_string()), String::new()));
        assert_eq!(traces.0.len(), KYMAS);
    }
}
