//! Events of contract v3: CloudEvents 1.0 in the JSON batch format.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use strum::IntoStaticStr;
use thiserror::Error;
use tidewatch_api::identity::{Epoch, RuntimeId};

use crate::digest::Digest;

/// Content type of a batch (CloudEvents JSON format 1.0.2, section 4).
pub const BATCH_CONTENT_TYPE: &str = "application/cloudevents-batch+json";
/// Events per request, at most; the agent splits larger batches.
pub const MAX_EVENTS: usize = 1_000;
/// Bytes of a request's body, at most; the agent splits larger batches.
pub const MAX_BODY_BYTES: usize = 1 << 20;

/// Type of an event: an object changed.
pub const OBJECT_CHANGED: &str = "io.kyma-project.tidewatch.object.changed.v1";
/// Type of an event: an object left the set that its watch selects.
pub const OBJECT_DELETED: &str = "io.kyma-project.tidewatch.object.deleted.v1";
/// Type of an event: a watch changed in a way that events of single objects do not cover, for example between two watch
/// connections.
pub const WATCH_CHANGED: &str = "io.kyma-project.tidewatch.watch.changed.v1";

/// The error of parsing a body as a batch.
#[derive(Debug, Error)]
pub enum ParseBatchError {
    /// Not a JSON array, or an element without a readable id, which could not be rejected by its id.
    #[error("the body is not a batch of events with ids")]
    Malformed(#[source] Option<serde_json::Error>),
    /// More than [`MAX_EVENTS`] events.
    #[error("the batch has more events than a request may carry")]
    TooMany,
}

/// The id of an event: `<epoch>-<sequence>`, the CloudEvents attribute `id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId {
    /// The epoch of the agent's sequences.
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

/// The change of an object, as far as its metadata shows it. The changes of an existing object are in the order of their
/// significance, highest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Change {
    /// The object entered the set that the watch selects.
    Created,
    /// The generation changed.
    Spec,
    /// Labels, annotations, finalizers, deletion timestamp or owner references changed.
    Metadata,
    /// Only the resourceVersion changed: the status, or another part that metadata does not show.
    Status,
    /// The object left the set that the watch selects, which does not prove its deletion.
    Deleted,
}

/// The subject of an event: `<group>/<version>/<resource>/<namespace>/<name>`. Empty parts are kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subject {
    /// API group; empty for the core group.
    pub group: String,
    /// API version.
    pub version: String,
    /// Plural resource name.
    pub resource: String,
    /// Namespace; empty for cluster-scoped objects and for a whole watch.
    pub namespace: String,
    /// Name; empty for a whole watch.
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
        let group = next()?;
        let version = next()?;
        let resource = next()?;
        let namespace = next()?;
        let name = next()?;
        let subject = Self { group, version, resource, namespace, name };
        parts.next().is_none().then_some(subject).ok_or(())
    }
}

impl Subject {
    /// Returns whether no part is longer than that of an object can be; the receiver keeps events in queues that are limited
    /// by their number.
    fn is_within_limits(&self) -> bool {
        let Self { group, version, resource, namespace, name } = self;
        [version, resource, namespace].into_iter().all(|part| part.len() <= MAX_LABEL_BYTES)
            && group.len() <= MAX_GROUP_BYTES
            && name.len() <= MAX_NAME_BYTES
    }
}

/// The JSON form of an event. Unknown members are ignored, so that minor versions are compatible.
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
    /// RFC 3339; informational, not used for decisions.
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
    /// Manager of the watch in the plan.
    pub manager: String,
    /// Kind of the object; empty for a whole watch.
    #[serde(default)]
    pub kind: String,
    /// Uid of the object; empty for a whole watch.
    #[serde(default)]
    pub uid: String,
    /// resourceVersion of the object; empty for a whole watch.
    #[serde(default)]
    pub resource_version: String,
    /// Generation of the object; absent for kinds without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// Change of the object; absent for a whole watch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
    /// The digest of the watch after this event minus the digest before it, relative to the last event sent.
    pub delta: Digest,
    /// Set only for a whole watch that is forwarded to another manager: objects changed or left that no event names,
    /// because there were too many to queue. `kind` is their kind in this case.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unnamed: bool,
}

/// The content of an event: [`WireData`] without invalid combinations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// An object changed, or left the set that the watch selects.
    Object(Object),
    /// The watch changed as a whole.
    Watch,
    /// The watch changed as a whole, including objects that no event names.
    Unnamed {
        /// The resource, without namespace and name.
        subject: Subject,
        /// The kind of the objects.
        kind: String,
    },
}

impl Payload {
    /// True if the event concerns a whole watch, not an object.
    pub const fn is_watch(&self) -> bool {
        matches!(self, Self::Watch | Self::Unnamed { .. })
    }
}

/// The object of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The resource, namespace and name.
    pub subject: Subject,
    /// The kind.
    pub kind: String,
    /// The uid.
    pub uid: String,
    /// The resourceVersion that the agent observed.
    pub resource_version: String,
    /// The generation, if the kind has one.
    pub generation: Option<i64>,
    /// The change.
    pub change: Change,
}

/// A well-formed event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The id, which also defines the order.
    pub id: EventId,
    /// The runtime in `source`. The gateway checks that the sender may use it.
    pub source: RuntimeId,
    /// The name of the watch.
    pub watch: String,
    /// The content.
    pub payload: Payload,
    /// The difference of the watch's digest.
    pub delta: Digest,
    /// The time when the agent observed the change, in RFC 3339; informational.
    pub time: Option<String>,
    /// The W3C trace context, if any.
    pub traceparent: Option<String>,
}

/// The reason for rejecting one event of a batch (closed set). A reason that a newer receiver adds is read as
/// [`Self::Malformed`], for which an agent replaces the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Reason {
    /// The receiver's plan has no such watch.
    UnknownWatch,
    /// The receiver does not support the type of the event.
    UnknownType,
    /// Larger than the limit of one event.
    TooLarge,
    /// The attributes contradict each other or the contract.
    #[serde(other)]
    Malformed,
}

/// One element of a batch: an event, or the id and the reason of a rejected one.
pub type Received = Result<Event, (EventId, Reason)>;

/// Limit of one event in bytes. Kubernetes limits the length of names; events with names of maximum length stay below
/// it.
const MAX_EVENT_BYTES: usize = 8 << 10;
/// Limit in bytes of a kind, a version, a resource and a namespace, which are DNS labels.
const MAX_LABEL_BYTES: usize = 63;
/// Limit in bytes of a group, which is a DNS subdomain.
const MAX_GROUP_BYTES: usize = 253;
/// Limit in bytes of a name. Kubernetes limits most names to 253, and those of a few kinds, such as roles, not at all.
const MAX_NAME_BYTES: usize = 1_024;
/// Limit in bytes of a uid and of a resource version.
const MAX_ID_BYTES: usize = 128;

/// Parses a batch. Events are validated independently; a body with an unreadable id is rejected as a whole.
///
/// # Errors
/// [`ParseBatchError`] if the body is not a batch.
pub fn parse_batch(body: &[u8]) -> Result<Vec<Received>, ParseBatchError> {
    let elements: Vec<&RawValue> =
        serde_json::from_slice(body).map_err(|error| ParseBatchError::Malformed(Some(error)))?;
    if elements.len() > MAX_EVENTS {
        return Err(ParseBatchError::TooMany);
    }
    elements.into_iter().map(|element| parse_event(element.get())).collect()
}

fn parse_event(text: &str) -> Result<Received, ParseBatchError> {
    #[derive(Deserialize)]
    struct Identified {
        id: String,
        #[serde(rename = "type", default)]
        kind: String,
    }
    let identified: Identified = serde_json::from_str(text).map_err(|error| ParseBatchError::Malformed(Some(error)))?;
    let id: EventId = identified.id.parse().map_err(|()| ParseBatchError::Malformed(None))?;
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
        let is_short = subject.is_within_limits()
            && kind.len() <= MAX_LABEL_BYTES
            && [&uid, &resource_version].into_iter().all(|id| id.len() <= MAX_ID_BYTES);
        if !is_short {
            return None;
        }
        let payload = match (wire.kind.as_str(), change) {
            (WATCH_CHANGED, None) if unnamed && subject.name.is_empty() => Payload::Unnamed { subject, kind },
            (WATCH_CHANGED, None) => Payload::Watch,
            (OBJECT_DELETED, Some(change @ Change::Deleted))
            | (OBJECT_CHANGED, Some(change @ (Change::Created | Change::Spec | Change::Metadata | Change::Status)))
                if !subject.name.is_empty() =>
            {
                Payload::Object(Object { subject, kind, uid, resource_version, generation, change })
            }
            _ => return None,
        };
        Some(Self { id, source, watch, payload, delta, time: wire.time, traceparent: wire.traceparent })
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
    fn an_event_is_parsed_and_unknown_members_are_ignored() {
        let received = parse(&json!([event()])).remove(0).unwrap();
        assert_eq!(received.id.sequence, 7);
        assert_eq!(received.delta, Digest::new(10));
        let Payload::Object(object) = received.payload else { panic!("an object") };
        assert_eq!((object.change, object.generation), (Change::Spec, Some(3)));
        assert_eq!(object.subject.to_string(), "operator.kyma-project.io/v1beta2/kymas/kyma-system/default");
    }

    #[test]
    fn unnamed_objects_are_distinguished_from_a_changed_watch() {
        let mut whole = event();
        whole["type"] = json!(WATCH_CHANGED);
        whole["subject"] = json!("g/v/things//");
        whole["data"] =
            json!({"watch": "w", "manager": "m", "kind": "Thing", "delta": "0".repeat(32), "unnamed": true});
        let Payload::Unnamed { subject, kind } = parse(&json!([whole])).remove(0).unwrap().payload else {
            panic!("unnamed")
        };
        assert_eq!((subject.to_string().as_str(), kind.as_str()), ("g/v/things//", "Thing"));
        whole["data"]["unnamed"] = json!(false);
        assert_eq!(parse(&json!([whole])).remove(0).unwrap().payload, Payload::Watch);
    }

    #[test]
    fn a_malformed_event_is_rejected_by_id_and_the_others_are_kept() {
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
    fn event_with_a_longer_name_than_objects_have_is_malformed() {
        let of = |parts: [usize; 5], kind: usize, id: usize| {
            let mut event = event();
            event["subject"] = parts.map(|length| "x".repeat(length)).join("/").into();
            event["data"]["kind"] = "x".repeat(kind).into();
            event["data"]["uid"] = "x".repeat(id).into();
            event["data"]["resourceVersion"] = "x".repeat(id).into();
            parse(&json!([event])).remove(0).map_err(|(_, reason)| reason).map(drop)
        };
        let longest = [253, 63, 63, 63, 1_024];
        assert_eq!(of(longest, 63, 128), Ok(()));
        for part in 0..5 {
            let mut parts = longest;
            parts[part] += 1;
            assert_eq!(of(parts, 63, 128), Err(Reason::Malformed), "part {part}");
        }
        assert_eq!((of(longest, 64, 128), of(longest, 63, 129)), (Err(Reason::Malformed), Err(Reason::Malformed)));
    }

    #[test]
    fn reason_of_a_newer_receiver_is_read_as_malformed() {
        let reasons = ["unknown-watch", "unknown-type", "malformed", "too-large", "added-later"];
        let read: Vec<Reason> = serde_json::from_value(json!(reasons)).unwrap();
        let expected =
            [Reason::UnknownWatch, Reason::UnknownType, Reason::Malformed, Reason::TooLarge, Reason::Malformed];
        assert_eq!(read, expected);
        assert_eq!(json!(expected[..4]), json!(reasons[..4]));
    }

    #[test]
    fn a_body_without_ids_is_rejected_as_a_whole() {
        for bad in ["", "{}", "[1]", "[{}]", r#"[{"id":"x"}]"#, r#"[{"id":"00000000000000ab-07"}]"#, "[", "null"] {
            assert!(matches!(parse_batch(bad.as_bytes()), Err(ParseBatchError::Malformed(_))), "{bad}");
        }
        let many = Value::Array(vec![event(); MAX_EVENTS + 1]);
        assert!(matches!(parse_batch(many.to_string().as_bytes()), Err(ParseBatchError::TooMany)));
    }
}
