//! Traces of events that wait for a reconcile of their Kyma. There are none in builds without trace export.

use std::time::SystemTime;

use tidewatch_kit::trace;

/// Maximum number of traces per reconcile; events beyond it are processed untraced.
const MAX_PER_KYMA: usize = 16;

/// Waiting traces of one Kyma.
#[derive(Debug)]
pub(super) struct TraceLinks {
    since: SystemTime,
    causes: Vec<String>,
}

impl TraceLinks {
    /// Begins a wait without traces.
    pub(super) fn begin() -> Self {
        Self { since: SystemTime::now(), causes: Vec::new() }
    }

    /// Adds the `traceparent` of a request that enqueued work of the Kyma, if there is room.
    pub(super) fn add(&mut self, traceparent: String) {
        if self.causes.len() < MAX_PER_KYMA {
            self.causes.push(traceparent);
        }
    }

    /// Ends the wait: its span continues one trace and links to the others. Returns its `traceparent`.
    pub(super) fn end_wait(&self) -> Option<String> {
        let span = trace::span("wait for a reconcile", Some(self.since), self.causes.iter().map(String::as_str));
        span.map(|span| span.traceparent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_bounded() {
        let mut traces = TraceLinks::begin();
        (0..=MAX_PER_KYMA).for_each(|trace| traces.add(trace.to_string()));
        assert_eq!(traces.causes.len(), MAX_PER_KYMA);
    }
}
