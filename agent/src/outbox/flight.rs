//! The one batch between its first request and its answer, and how its events are written.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use jiff::Timestamp;
use tidewatch_shared::{
    digest::Digest,
    event::{Change, EventId, OBJECT_CHANGED, OBJECT_DELETED, Subject, WATCH_CHANGED, WireData, WireEvent},
    identity::RuntimeId,
    trace,
};

use super::{
    Facts,
    mailbox::{Waiting, What},
};

/// An event with a sequence.
#[derive(Debug)]
pub(super) struct Flying {
    pub(super) sequence: u64,
    pub(super) watch: Arc<str>,
    pub(super) key: Arc<str>,
    pub(super) delta: Digest,
    /// Its text is a `watch.changed`.
    pub(super) whole: bool,
    /// When it was seen, in Unix milliseconds.
    pub(super) since: i64,
    pub(super) text: String,
}

/// Events in the order of their sequences; the first `outstanding` of them are in the request that is under way.
#[derive(Debug)]
pub(super) struct Flight {
    events: Vec<Flying>,
    outstanding: usize,
}

impl Flight {
    pub(super) fn new(events: Vec<Flying>) -> Option<Self> {
        (!events.is_empty()).then_some(Self { events, outstanding: 0 })
    }

    /// Decides what the next request carries: so many events and bytes at most, but one at least. True if the first of
    /// them has been sent before.
    pub(super) fn begin(&mut self, limit: usize, bytes: usize) -> bool {
        let mut size = 1;
        let fits = |event: &&Flying| {
            size += event.text.len() + 1;
            size <= bytes
        };
        let again = self.outstanding > 0;
        self.outstanding = self.events.iter().take(limit).take_while(fits).count().max(1).min(self.events.len());
        again
    }

    pub(super) const fn outstanding(&self) -> usize {
        self.outstanding
    }

    pub(super) fn body(&self) -> Bytes {
        let under_way = &self.events[..self.outstanding];
        let mut body = Vec::with_capacity(under_way.iter().map(|event| event.text.len() + 1).sum::<usize>() + 1);
        for event in under_way {
            body.push(if body.is_empty() { b'[' } else { b',' });
            body.extend_from_slice(event.text.as_bytes());
        }
        body.push(b']');
        body.into()
    }

    /// Takes out what the answered request carried.
    pub(super) fn land(&mut self) -> Vec<Flying> {
        let landed = self.events.drain(..self.outstanding).collect();
        self.outstanding = 0;
        landed
    }

    /// Puts events before the rest.
    pub(super) fn board_first(&mut self, events: Vec<Flying>) {
        self.events.splice(..0, events);
    }

    /// `None` when nothing is left to send.
    pub(super) fn unfinished(self) -> Option<Self> {
        (!self.events.is_empty()).then_some(self)
    }
}

/// Writes one event as CloudEvents JSON.
pub(super) fn encode(
    runtime: &RuntimeId,
    id: EventId,
    watch: &str,
    facts: &Facts,
    key: &str,
    waiting: &Waiting,
    delta: Digest,
) -> String {
    let (namespace, name) = key.split_once('/').unwrap_or_default();
    let [group, version, resource, namespace, name] =
        [&*facts.group, &*facts.version, &*facts.resource, namespace, name].map(str::to_owned);
    let subject = Subject { group, version, resource, namespace, name }.to_string();
    let (watch, manager) = (watch.to_owned(), facts.manager.clone().into());
    let (kind, data) = match &waiting.what {
        What::Whole | What::Unnamed => {
            let unnamed = waiting.what == What::Unnamed;
            let kind = if unnamed { facts.kind.clone().into() } else { String::new() };
            let (uid, resource_version) = (String::new(), String::new());
            let data = WireData {
                watch,
                manager,
                kind,
                uid,
                resource_version,
                generation: None,
                change: None,
                delta,
                unnamed,
            };
            (WATCH_CHANGED, data)
        }
        What::Object { seen, change, .. } => {
            let (kind, uid, resource_version) =
                (facts.kind.clone().into(), seen.uid.to_string(), seen.version.to_string());
            let generation = seen.generation.map(i64::from);
            let (change, unnamed) = (Some(*change), false);
            let data = WireData { watch, manager, kind, uid, resource_version, generation, change, delta, unnamed };
            (if change == Some(Change::Deleted) { OBJECT_DELETED } else { OBJECT_CHANGED }, data)
        }
    };
    let event = WireEvent {
        specversion: "1.0".to_owned(),
        kind: kind.to_owned(),
        source: format!("/runtimes/{runtime}"),
        subject,
        id: id.to_string(),
        sequence: id.sequence.to_string(),
        time: Timestamp::from_millisecond(waiting.since).ok().map(|time| time.to_string()),
        traceparent: trace(waiting.since),
        data,
    };
    serde_json::to_string(&event).expect("strings and numbers have a JSON form")
}

/// The trace that begins with a change, seen at a time in Unix milliseconds: its first span is the wait until now.
fn trace(since: i64) -> Option<String> {
    let seen = SystemTime::UNIX_EPOCH + Duration::from_millis(u64::try_from(since).unwrap_or(0));
    trace::span("wait to be sent", Some(seen), []).map(|span| span.traceparent())
}

#[cfg(all(test, feature = "otlp"))]
mod tests {
    use tidewatch_shared::trace::Exporter;

    use super::*;

    #[tokio::test]
    async fn each_event_begins_a_trace_of_its_own() {
        assert_eq!(trace(0), None, "nothing is exported");
        let _exporter = Exporter::start("test", "http://127.0.0.1:1").unwrap();
        let (one, other) = (trace(0).unwrap(), trace(i64::MIN).unwrap());
        for traceparent in [&one, &other] {
            assert!(traceparent.starts_with("00-") && traceparent.ends_with("-01"), "{traceparent}");
            assert_eq!(traceparent.len(), 55);
        }
        assert_ne!(one[3..35], other[3..35]);
    }
}
