//! Traces of events that wait for a reconcile of their Kyma. Empty in builds without trace export.

use std::{collections::HashMap, time::SystemTime};

use tidewatch_api::{key::KymaKey, shard::ShardCount};
use tidewatch_kit::trace;

/// Maximum number of traces per reconcile; events beyond it are processed untraced.
const MAX_PER_KYMA: usize = 16;
/// Maximum number of Kymas with traces, divided among the shards.
const MAX_KYMAS: usize = 10_000;

/// Waiting traces of a shard, by Kyma.
#[derive(Debug)]
pub(super) struct PendingTraces {
    kymas: HashMap<KymaKey, TraceLinks>,
    max_kymas: usize,
}

/// Waiting traces of one Kyma.
#[derive(Debug, Default)]
pub(super) struct TraceLinks {
    since: Option<SystemTime>,
    causes: Vec<String>,
}

impl PendingTraces {
    pub(super) fn new(shards: ShardCount) -> Self {
        Self { kymas: HashMap::new(), max_kymas: MAX_KYMAS.div_ceil(shards.get().into()) }
    }

    /// Adds the `traceparent` of a request that enqueued work of this Kyma, if there is room.
    pub(super) fn add(&mut self, key: &KymaKey, traceparent: String) {
        if self.kymas.len() < self.max_kymas || self.kymas.contains_key(key) {
            let links = self.kymas.entry(key.clone()).or_default();
            links.since.get_or_insert_with(SystemTime::now);
            if links.causes.len() < MAX_PER_KYMA {
                links.causes.push(traceparent);
            }
        }
    }

    /// Takes the traces for the reconcile that starts now, or of a removed Kyma.
    pub(super) fn take(&mut self, key: &KymaKey) -> TraceLinks {
        self.kymas.remove(key).unwrap_or_default()
    }
}

impl TraceLinks {
    /// Ends the wait: its span continues one trace and links to the others. Returns its `traceparent`.
    pub(super) fn end_wait(&self) -> Option<String> {
        let span = trace::span("wait for a reconcile", Some(self.since?), self.causes.iter().map(String::as_str));
        span.map(|span| span.traceparent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_taken_once_and_bounded() {
        let mut traces = PendingTraces::new(ShardCount::ONE);
        let key = KymaKey::new("n", "k");
        (0..=MAX_PER_KYMA).for_each(|trace| traces.add(&key, trace.to_string()));
        let all = traces.take(&key);
        let none = traces.take(&key);
        assert_eq!((all.causes.len(), all.since.is_some()), (MAX_PER_KYMA, true));
        assert_eq!((none.causes.len(), none.since, none.end_wait()), (0, None, None));
        (0..=MAX_KYMAS).for_each(|kyma| traces.add(&KymaKey::new("n", kyma.to_string()), String::new()));
        assert_eq!(traces.kymas.len(), MAX_KYMAS);
    }
}
