//! The one batch in flight, from its first request to its response, and the encoding of its events.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use jiff::Timestamp;
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::{
    digest::Digest,
    event::{Change, EventId, OBJECT_CHANGED, OBJECT_DELETED, Subject, WATCH_CHANGED, WireData, WireEvent},
};
use tidewatch_kit::trace;

use super::{
    WatchInfo,
    entry::{Entry, Update},
};

/// Encoded event with its sequence.
#[derive(Debug)]
pub(super) struct SequencedEvent {
    pub(super) sequence: u64,
    pub(super) watch: Arc<str>,
    pub(super) key: Arc<str>,
    pub(super) delta: Digest,
    /// True if the event is a `watch.changed`.
    pub(super) is_watch: bool,
    /// Time at which the change was observed, in Unix milliseconds.
    pub(super) since: i64,
    pub(super) text: String,
}

/// Events ordered by sequence; the first `outstanding` of them are in the current request.
#[derive(Debug)]
pub(super) struct InFlight {
    events: Vec<SequencedEvent>,
    pub(super) outstanding: usize,
}

impl InFlight {
    pub(super) fn new(events: Vec<SequencedEvent>) -> Option<Self> {
        (!events.is_empty()).then_some(Self { events, outstanding: 0 })
    }

    /// Selects the events of the next request: at most `limit` events and `bytes` bytes, but at least one event. True
    /// if this is a retry.
    pub(super) fn begin(&mut self, limit: usize, bytes: usize) -> bool {
        let mut size = 1;
        let fits = |event: &&SequencedEvent| {
            size += event.text.len() + 1;
            size <= bytes
        };
        let again = self.outstanding > 0;
        self.outstanding = self.events.iter().take(limit).take_while(fits).count().max(1).min(self.events.len());
        again
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

    /// Removes and returns the events of the answered request.
    pub(super) fn take_answered(&mut self) -> Vec<SequencedEvent> {
        let answered = self.events.drain(..self.outstanding).collect();
        self.outstanding = 0;
        answered
    }

    /// Inserts events before all others.
    pub(super) fn prepend(&mut self, events: Vec<SequencedEvent>) {
        self.events.splice(..0, events);
    }

    /// The rest of the batch; `None` when every event has been answered.
    pub(super) fn non_empty(self) -> Option<Self> {
        (!self.events.is_empty()).then_some(self)
    }
}

/// Encodes one event as CloudEvents JSON.
pub(super) fn encode(
    runtime: &RuntimeId,
    id: EventId,
    info: &WatchInfo,
    key: &str,
    waiting: &Entry,
    delta: Digest,
) -> String {
    let (namespace, name) = key.split_once('/').unwrap_or_default();
    let [group, version, resource, namespace, name] =
        [&*info.group, &*info.version, &*info.resource, namespace, name].map(str::to_owned);
    let subject = Subject { group, version, resource, namespace, name }.to_string();
    let mut data = WireData {
        watch: info.watch.clone().into(),
        manager: info.manager.clone().into(),
        kind: if waiting.update == Update::Watch { String::new() } else { info.kind.clone().into() },
        uid: String::new(),
        resource_version: String::new(),
        generation: None,
        change: None,
        delta,
        unnamed: waiting.update == Update::Unnamed,
    };
    let mut kind = WATCH_CHANGED;
    if let Update::Object { seen, change, .. } = &waiting.update {
        kind = if *change == Change::Deleted { OBJECT_DELETED } else { OBJECT_CHANGED };
        data.uid = seen.uid.to_string();
        data.resource_version = seen.version.to_string();
        data.generation = seen.generation.map(i64::from);
        data.change = Some(*change);
    }
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

/// Starts the trace of a change observed at a time in Unix milliseconds; its first span is the wait until now. `None`
/// without an exporter.
fn trace(since: i64) -> Option<String> {
    let seen = SystemTime::UNIX_EPOCH + Duration::from_millis(u64::try_from(since).unwrap_or(0));
    trace::span("wait to be sent", Some(seen), []).map(|span| span.traceparent())
}

#[cfg(all(test, feature = "otlp"))]
mod tests;
