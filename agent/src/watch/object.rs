//! Decoding of object metadata; all other fields, above all managed fields, are skipped while parsing. Each object is
//! reduced to what the index keeps before the next one is decoded.

mod kept;

use std::num::NonZeroI64;

use aws_lc_rs::digest::{Context, SHA256};
use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny},
};

use crate::index::ObjectState;
#[cfg(test)]
use kept::KEPT;
use kept::{Hashed, List, Map, field};

/// Maximum length of a namespace in bytes; a DNS label is shorter.
const NAMESPACE: usize = 253;
/// Maximum length of a name in bytes. Nearly all names are DNS subdomains of at most 253 characters, but some kinds,
/// such as roles, set no limit.
const NAME: usize = 1_024;
/// Maximum length of a uid in bytes; nearly all are UUIDs.
const UID: usize = 128;
/// Maximum length of a resourceVersion in bytes; nearly all are decimal numbers.
pub(super) const VERSION: usize = 128;

/// An object of a metadata-only watch.
#[derive(Debug, Deserialize)]
#[serde(from = "WireObject")]
pub(crate) struct Object {
    /// `<namespace>/<name>`.
    key: Box<str>,
    seen: ObjectState,
    resource_version: Box<str>,
}

#[derive(Deserialize)]
struct WireObject {
    metadata: Metadata,
}

/// An object with a readable resourceVersion.
pub(crate) trait Versioned {
    /// `metadata.resourceVersion`.
    fn version(&self) -> &str;
}

impl Versioned for Object {
    fn version(&self) -> &str {
        &self.resource_version
    }
}

impl<D> Versioned for Named<D> {
    fn version(&self) -> &str {
        &self.metadata.version
    }
}

/// An object reduced to name, resourceVersion and `data`.
#[derive(Debug, Deserialize)]
pub(crate) struct Named<D = IgnoredAny> {
    /// `metadata`.
    pub(crate) metadata: NamedMetadata,
    /// `data` of a ConfigMap or a Secret.
    pub(crate) data: Option<D>,
}

/// Metadata of [`Named`].
#[derive(Debug, Deserialize)]
pub(crate) struct NamedMetadata {
    /// `metadata.name`.
    #[serde(default)]
    pub(crate) name: String,
    /// `metadata.resourceVersion`.
    #[serde(rename = "resourceVersion", default)]
    pub(crate) version: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    #[serde(deserialize_with = "at_most::<NAMESPACE, _>")]
    namespace: String,
    #[serde(deserialize_with = "at_most::<NAME, _>")]
    name: String,
    #[serde(deserialize_with = "at_most::<UID, _>")]
    uid: String,
    #[serde(deserialize_with = "at_most::<VERSION, _>")]
    resource_version: String,
    generation: i64,
    labels: Map,
    annotations: Map,
    finalizers: List<String>,
    deletion_timestamp: Option<String>,
    owner_references: List<Owner>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Owner {
    api_version: String,
    kind: String,
    name: String,
    uid: String,
    controller: Option<bool>,
    block_owner_deletion: Option<bool>,
}

/// Bounds the length of a text in bytes. The number of objects is bounded as well, so their total memory is.
fn at_most<'de, const BYTES: usize, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.len() > BYTES {
        return Err(Error::custom(format_args!("text exceeds {BYTES} bytes")));
    }
    Ok(text)
}

impl Object {
    /// Key `<namespace>/<name>` and the state that the index keeps.
    pub(crate) fn into_state(self) -> (Box<str>, ObjectState) {
        (self.key, self.seen)
    }
}

impl From<WireObject> for Object {
    fn from(WireObject { mut metadata }: WireObject) -> Self {
        let [namespace, name, uid, resource_version] =
            [&mut metadata.namespace, &mut metadata.name, &mut metadata.uid, &mut metadata.resource_version]
                .map(std::mem::take);
        let seen = ObjectState {
            uid: uid.as_str().into(),
            version: resource_version.as_str().into(),
            generation: NonZeroI64::new(metadata.generation),
            metadata: metadata.hash(),
        };
        Self { key: format!("{namespace}/{name}").into(), seen, resource_version: resource_version.into() }
    }
}

impl Metadata {
    /// First 64 bits of a SHA-256. That is enough, because the author of a collision hides only changes of their own
    /// objects.
    fn hash(self) -> u64 {
        let Self { labels, annotations, finalizers, deletion_timestamp, owner_references, .. } = self;
        let mut context = Context::new(&SHA256);
        labels.add_to(&mut context);
        annotations.add_to(&mut context);
        kept::number(&mut context, finalizers.len());
        finalizers.add_to(&mut context);
        field(&mut context, deletion_timestamp.as_deref().unwrap_or_default());
        owner_references.add_to(&mut context);
        let digest = context.finish();
        digest.as_ref()[..8].iter().fold(0, |hash, byte| (hash << 8) | u64::from(*byte))
    }
}

impl Hashed for Owner {
    fn add_to(&self, context: &mut Context) {
        let Self { api_version, kind, name, uid, controller, block_owner_deletion } = self;
        [api_version, kind, name, uid].into_iter().for_each(|text| field(context, text));
        context.update(&[controller, block_owner_deletion].map(|flag| flag.map_or(2, u8::from)));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::index::Version;

    fn seen(object: Value) -> (Box<str>, ObjectState) {
        serde_json::from_value::<Object>(object).unwrap().into_state()
    }

    fn object() -> Value {
        json!({"metadata": {
            "namespace": "ns", "name": "a", "uid": "u", "resourceVersion": "7", "generation": 2,
            "labels": {"b": "1", "a": "2"}, "annotations": {"x": "y"}, "finalizers": ["f"],
            "ownerReferences": [{"apiVersion": "v1", "kind": "K", "name": "n", "uid": "o"}],
            "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {}}}], "creationTimestamp": "2026-01-01T00:00:00Z"
        }})
    }

    #[test]
    fn key_and_versions_are_read_and_cluster_scoped_objects_have_an_empty_namespace() {
        let (key, read) = seen(object());
        assert_eq!((&*key, read.generation, read.version), ("ns/a", NonZeroI64::new(2), Version::Number(7)));
        assert_eq!(&*seen(json!({"metadata": {"name": "node"}})).0, "/node");
    }

    #[test]
    fn decoded_object_is_small_whatever_its_metadata() {
        assert!(size_of::<Object>() <= 96, "{}", size_of::<Object>());
    }

    #[test]
    fn every_entry_counts_also_beyond_those_that_are_kept() {
        let with = |member: &str, entries: Value| {
            let mut object = object();
            object["metadata"][member] = entries;
            seen(object).1.metadata
        };
        let map = |last: &str| {
            let entries = (0..KEPT + 9).map(|n| (format!("k{n:05}"), json!(if n == KEPT + 8 { last } else { "" })));
            Value::Object(entries.collect())
        };
        assert_eq!(with("labels", map("a")), with("labels", map("a")));
        assert_ne!(with("labels", map("a")), with("labels", map("b")));
        let list =
            |last: &str| json!((0..KEPT + 9).map(|n| if n == KEPT + 8 { last } else { "f" }).collect::<Vec<_>>());
        assert_ne!(with("finalizers", list("a")), with("finalizers", list("b")));
        let owners = |last: &str| {
            json!((0..KEPT + 9).map(|n| json!({"uid": if n == KEPT + 8 { last } else { "o" }})).collect::<Vec<_>>())
        };
        assert_ne!(with("ownerReferences", owners("a")), with("ownerReferences", owners("b")));
    }

    #[test]
    fn hash_changes_with_relevant_metadata_only() {
        let hash = |object| seen(object).1.metadata;
        for (member, value) in [
            ("labels", json!({"b": "1"})),
            ("labels", json!({"b": "1", "a": "3"})),
            ("annotations", json!(null)),
            ("finalizers", json!([])),
            ("deletionTimestamp", json!("2026-01-01T00:00:00Z")),
            (
                "ownerReferences",
                json!([{"apiVersion": "v1", "kind": "K", "name": "n", "uid": "o", "controller": true}]),
            ),
        ] {
            let mut other = object();
            other["metadata"][member] = value;
            assert_ne!(hash(other), hash(object()), "{member}");
        }
        for (member, value) in [
            ("labels", json!({"a": "2", "b": "1"})),
            ("managedFields", json!([])),
            ("resourceVersion", json!("8")),
            ("generation", json!(9)),
        ] {
            let mut other = object();
            other["metadata"][member] = value;
            assert_eq!(hash(other), hash(object()), "{member}");
        }
    }
}
