//! Events on the wire: CloudEvents 1.0 in JSON batch format.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use thiserror::Error;

use crate::{
    digest::Digest,
    identity::{Epoch, RuntimeId},
};

/// Content type of a batch (CloudEvents JSON format 1.0.2, section 4).
pub const BATCH_CONTENT_TYPE: &str = "application/cloudevents-batch+json";
/// Events of one request, at most; the sender splits above it.
pub const MAX_EVENTS: usize = 1_000;
/// Bytes of one request's body, at most; the sender splits above it.
pub const MAX_BODY_BYTES: usize = 1 << 20;

/// An object changed.
pub const OBJECT_CHANGED: &str = "io.kyma-project.tidewatch.object.changed.v1";
/// An object left the set that its watch selects.
pub const OBJECT_DELETED: &str = "io.kyma-project.tidewatch.object.deleted.v1";
/// Something in a watch moved while nobody looked.
pub const WATCH_CHANGED: &str = "io.kyma-project.tidewatch.watch.changed.v1";

/// Why bytes are no batch or no event.
#[derive(Debug, Error)]
pub enum ParseBatch {
    /// Not a JSON array, or an element without a readable id, which nobody could refuse by name.
    #[error("the body is not a batch of identified events")]
    Malformed(#[source] Option<serde_json::Error>),
    /// More than [`MAX_EVENTS`] events.
    #[error("the batch has more events than a request may carry")]
    TooMany,
}

/// `<epoch>-<sequence>`, the CloudEvents `id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId {
    /// The life of the agent's sequences.
    pub epoch: Epoch,
    /// 1, 2, 3 … within the epoch.
    pub sequence: u64,
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.epoch, self.sequence)
    }
}

impl FromStr for EventId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (epoch, sequence) = text.split_once('-').ok_or(())?;
        let canonical = sequence.bytes().all(|byte| byte.is_ascii_digit()) && !sequence.starts_with('0');
        let sequence = canonical.then(|| sequence.parse().ok()).flatten().ok_or(())?;
        Ok(Self { epoch: epoch.parse().map_err(|_| ())?, sequence })
    }
}

/// What happened to an object, as far as metadata tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// It came into the set that the watch selects.
    Created,
    /// Its generation moved.
    Spec,
    /// Labels, annotations, finalizers, deletion timestamp or owners moved.
    Metadata,
    /// Only its resource version moved: status, or something else that metadata does not show.
    Status,
    /// It left the set that the watch selects; never a proof of deletion.
    Deleted,
}

impl Change {
    /// The change as the wire and logs spell it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Spec => "spec",
            Self::Metadata => "metadata",
            Self::Status => "status",
            Self::Deleted => "deleted",
        }
    }
}

/// `<group>/<version>/<resource>/<namespace>/<name>`; empty parts stay empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subject {
    /// API group, empty for the core group.
    pub group: String,
    /// API version.
    pub version: String,
    /// Plural resource name.
    pub resource: String,
    /// Namespace, empty for cluster-scoped objects and for a whole watch.
    pub namespace: String,
    /// Name, empty for a whole watch.
    pub name: String,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}/{}/{}", self.group, self.version, self.resource, self.namespace, self.name)
    }
}

impl FromStr for Subject {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split('/').map(str::to_owned);
        let mut next = || parts.next().ok_or(());
        let (group, version, resource, namespace, name) = (next()?, next()?, next()?, next()?, next()?);
        let subject = Self { group, version, resource, namespace, name };
        parts.next().is_none().then_some(subject).ok_or(())
    }
}

/// One event as CloudEvents JSON spells it. Unknown members are ignored, so that minor versions may differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireEvent {
    /// Always `1.0`.
    pub specversion: String,
    /// One of [`OBJECT_CHANGED`], [`OBJECT_DELETED`], [`WATCH_CHANGED`].
    #[serde(rename = "type")]
    pub kind: String,
    /// `/runtimes/<runtime id>`.
    pub source: String,
    /// See [`Subject`].
    pub subject: String,
    /// See [`EventId`].
    pub id: String,
    /// The sequence of [`EventId`] in decimal.
    pub sequence: String,
    /// RFC 3339; informational, no decision rests on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<String>,
    /// W3C trace context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    /// See [`WireData`].
    pub data: WireData,
}

/// The `data` member of an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WireData {
    /// Name of the watch in the plan.
    pub watch: String,
    /// Manager that the plan names for that watch.
    pub manager: String,
    /// Kind of the object, empty for a whole watch.
    #[serde(default)]
    pub kind: String,
    /// Uid of the object, empty for a whole watch.
    #[serde(default)]
    pub uid: String,
    /// Resource version of the object, empty for a whole watch.
    #[serde(default)]
    pub resource_version: String,
    /// Generation of the object, absent where the kind has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// Absent for a whole watch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
    /// The watch's digest after this event minus before it, against what was last sent.
    pub delta: Digest,
    /// Only of a whole watch that goes to another manager: objects changed or left of which no event tells, because there were too many
    /// to hold. `kind` is theirs then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unnamed: bool,
}

/// What an event is about, with no state that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// An object changed or left.
    Object(Object),
    /// Something in the watch moved.
    Watch,
    /// The same, and it moved objects of which no event tells.
    Unnamed {
        /// Without namespace and name.
        subject: Subject,
        /// The kind of the objects.
        kind: String,
    },
}

impl What {
    /// Whether it is about a watch and not about an object.
    #[must_use]
    pub const fn is_watch(&self) -> bool {
        matches!(self, Self::Watch | Self::Unnamed { .. })
    }
}

/// An object as an event tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Which object.
    pub subject: Subject,
    /// Its kind.
    pub kind: String,
    /// Its uid.
    pub uid: String,
    /// Its resource version when the agent saw it.
    pub resource_version: String,
    /// Its generation, if the kind has one.
    pub generation: Option<i64>,
    /// What happened.
    pub change: Change,
}

/// A well-formed event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Identity and order.
    pub id: EventId,
    /// The runtime that `source` names; whether it may say so is the gateway's to check.
    pub source: RuntimeId,
    /// Name of the watch.
    pub watch: String,
    /// What it is about.
    pub what: What,
    /// Movement of the watch's digest.
    pub delta: Digest,
    /// When the agent saw it, RFC 3339; informational.
    pub time: Option<String>,
    /// W3C trace context, if any.
    pub traceparent: Option<String>,
}

/// Why one event of a batch is refused (closed set).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The plan that the receiver knows has no such watch.
    UnknownWatch,
    /// An event type that this receiver does not know.
    UnknownType,
    /// Its attributes do not agree with each other or with the contract.
    Malformed,
    /// Larger than one event may be.
    TooLarge,
}

impl Reason {
    /// The reason as metrics and logs name it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UnknownWatch => "unknown-watch",
            Self::UnknownType => "unknown-type",
            Self::Malformed => "malformed",
            Self::TooLarge => "too-large",
        }
    }
}

/// One element of a batch: an event, or the name and reason of what is refused.
pub type Received = Result<Event, (EventId, Reason)>;

/// Bytes of one event, at most. Names are bounded by Kubernetes; this leaves room for them all.
const MAX_EVENT_BYTES: usize = 8 << 10;

/// Reads a batch. Each event is judged by itself; only a body without readable ids is refused whole.
///
/// # Errors
/// [`ParseBatch`] when the body is no batch.
pub fn parse_batch(body: &[u8]) -> Result<Vec<Received>, ParseBatch> {
    let elements: Vec<&RawValue> = serde_json::from_slice(body).map_err(|error| ParseBatch::Malformed(Some(error)))?;
    if elements.len() > MAX_EVENTS {
        return Err(ParseBatch::TooMany);
    }
    elements.into_iter().map(|element| parse_event(element.get())).collect()
}

fn parse_event(text: &str) -> Result<Received, ParseBatch> {
    #[derive(Deserialize)]
    struct Identified {
        id: String,
        #[serde(rename = "type", default)]
        kind: String,
    }
    let identified: Identified = serde_json::from_str(text).map_err(|error| ParseBatch::Malformed(Some(error)))?;
    let id: EventId = identified.id.parse().map_err(|()| ParseBatch::Malformed(None))?;
    if ![OBJECT_CHANGED, OBJECT_DELETED, WATCH_CHANGED].contains(&identified.kind.as_str()) {
        return Ok(Err((id, Reason::UnknownType)));
    }
    if text.len() > MAX_EVENT_BYTES {
        return Ok(Err((id, Reason::TooLarge)));
    }
    let event = serde_json::from_str::<WireEvent>(text).ok().and_then(|wire| Event::from_wire(wire, id));
    Ok(event.ok_or((id, Reason::Malformed)))
}

impl Event {
    fn from_wire(wire: WireEvent, id: EventId) -> Option<Self> {
        let source = wire.source.strip_prefix("/runtimes/")?.parse().ok()?;
        let subject: Subject = wire.subject.parse().ok()?;
        if wire.specversion != "1.0" || wire.sequence != id.sequence.to_string() || wire.data.watch.is_empty() {
            return None;
        }
        let WireData { watch, kind, uid, resource_version, generation, change, delta, unnamed, .. } = wire.data;
        let what = match (wire.kind.as_str(), change) {
            (WATCH_CHANGED, None) if unnamed && subject.name.is_empty() => What::Unnamed { subject, kind },
            (WATCH_CHANGED, None) => What::Watch,
            (OBJECT_DELETED, Some(change @ Change::Deleted))
            | (OBJECT_CHANGED, Some(change @ (Change::Created | Change::Spec | Change::Metadata | Change::Status)))
                if !subject.name.is_empty() =>
            {
                What::Object(Object { subject, kind, uid, resource_version, generation, change })
            }
            _ => return None,
        };
        Some(Self { id, source, watch, what, delta, time: wire.time, traceparent: wire.traceparent })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn event() -> Value {
        json!({
            "specversion": "1.0", "type": OBJECT_CHANGED, "source": "/runtimes/r-1",
            "subject": "operator.kyma-project.io/v1beta2/kymas/kyma-system/default",
            "id": "00000000000000ab-7", "sequence": "7", "time": "2026-01-01T00:00:00Z", "future": {"x": 1},
            "data": {"watch": "kyma", "manager": "lifecycle-manager", "kind": "Kyma", "uid": "u", "resourceVersion": "42",
                     "generation": 3, "change": "spec", "delta": "0000000000000000000000000000000a"}
        })
    }

    fn parse(events: &Value) -> Vec<Received> {
        parse_batch(events.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn a_whole_event_is_read_and_unknown_members_are_ignored() {
        let received = parse(&json!([event()])).remove(0).unwrap();
        assert_eq!(received.id.sequence, 7);
        assert_eq!(received.delta, Digest::new(10));
        let What::Object(object) = received.what else { panic!("an object") };
        assert_eq!((object.change, object.generation), (Change::Spec, Some(3)));
        assert_eq!(object.subject.to_string(), "operator.kyma-project.io/v1beta2/kymas/kyma-system/default");
    }

    #[test]
    fn objects_that_nobody_can_name_are_told_from_a_watch_that_moved() {
        let mut whole = event();
        whole["type"] = json!(WATCH_CHANGED);
        whole["subject"] = json!("g/v/things//");
        whole["data"] =
            json!({"watch": "w", "manager": "m", "kind": "Thing", "delta": "0".repeat(32), "unnamed": true});
        let What::Unnamed { subject, kind } = parse(&json!([whole])).remove(0).unwrap().what else { panic!("unnamed") };
        assert_eq!((subject.to_string().as_str(), kind.as_str()), ("g/v/things//", "Thing"));
        whole["data"]["unnamed"] = json!(false);
        assert_eq!(parse(&json!([whole])).remove(0).unwrap().what, What::Watch);
    }

    #[test]
    fn one_bad_event_is_refused_by_name_and_the_rest_stays() {
        let mut wrong = vec![("type", json!("io.other"), Reason::UnknownType)];
        for (member, value) in [
            ("sequence", json!("8")),
            ("specversion", json!("0.3")),
            ("source", json!("/elsewhere/r-1")),
            ("subject", json!("kymas/default")),
            ("subject", json!("g/v/r/ns/")),
            ("data", json!({})),
            ("type", json!(WATCH_CHANGED)),
            ("type", json!(OBJECT_DELETED)),
        ] {
            wrong.push((member, value, Reason::Malformed));
        }
        wrong.push(("time", json!("9".repeat(MAX_EVENT_BYTES)), Reason::TooLarge));
        for (member, value, reason) in wrong {
            let mut bad = event();
            bad[member] = value;
            let received = parse(&json!([bad, event()]));
            assert_eq!(received[0].as_ref().unwrap_err().1, reason, "{member}");
            assert!(received[1].is_ok());
        }
    }

    #[test]
    fn a_body_without_ids_is_refused_whole() {
        for bad in ["", "{}", "[1]", "[{}]", r#"[{"id":"x"}]"#, r#"[{"id":"00000000000000ab-07"}]"#, "[", "null"] {
            assert!(matches!(parse_batch(bad.as_bytes()), Err(ParseBatch::Malformed(_))), "{bad}");
        }
        let many = Value::Array(vec![event(); MAX_EVENTS + 1]);
        assert!(matches!(parse_batch(many.to_string().as_bytes()), Err(ParseBatch::TooMany)));
    }
}
