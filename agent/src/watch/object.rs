//! Decoding of object metadata; all other fields, above all managed fields, are skipped while parsing. Each object is
//! reduced to what the index keeps before the next one is decoded.

mod entries;

use std::num::NonZeroI64;

use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny},
};

use crate::index::ObjectState;
use entries::{entries, hash};

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
    #[serde(deserialize_with = "entries::<String, _>")]
    labels: u64,
    #[serde(deserialize_with = "entries::<String, _>")]
    annotations: u64,
    #[serde(deserialize_with = "entries::<String, _>")]
    finalizers: u64,
    deletion_timestamp: Option<String>,
    #[serde(deserialize_with = "entries::<Owner, _>")]
    owner_references: u64,
}

#[derive(Default, Hash, Deserialize)]
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
    fn from(WireObject { metadata }: WireObject) -> Self {
        let metadata_hash = metadata.hash();
        let Metadata { namespace, name, uid, resource_version, generation, .. } = metadata;
        let seen = ObjectState {
            uid: uid.as_str().into(),
            version: resource_version.as_str().into(),
            generation: NonZeroI64::new(generation),
            metadata: metadata_hash,
        };
        Self { key: format!("{namespace}/{name}").into(), seen, resource_version: resource_version.into() }
    }
}

impl Metadata {
    /// Hash of what counts as a change of the metadata.
    fn hash(&self) -> u64 {
        let Self { labels, annotations, finalizers, deletion_timestamp, owner_references, .. } = self;
        hash(([labels, annotations, finalizers, owner_references], deletion_timestamp))
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
    fn every_entry_counts_also_of_many() {
        const ENTRIES: usize = 2_000;
        let with = |member: &str, entries: Value| {
            let mut object = object();
            object["metadata"][member] = entries;
            seen(object).1.metadata
        };
        let map = |last: &str| {
            let entries = (1..=ENTRIES).map(|n| (format!("k{n:05}"), json!(if n == ENTRIES { last } else { "" })));
            Value::Object(entries.collect())
        };
        assert_eq!(with("labels", map("a")), with("labels", map("a")));
        assert_ne!(with("labels", map("a")), with("labels", map("b")));
        let list = |last: &str| json!((1..=ENTRIES).map(|n| if n == ENTRIES { last } else { "f" }).collect::<Vec<_>>());
        assert_ne!(with("finalizers", list("a")), with("finalizers", list("b")));
        let owners = |last: &str| {
            json!((1..=ENTRIES).map(|n| json!({"uid": if n == ENTRIES { last } else { "o" }})).collect::<Vec<_>>())
        };
        assert_ne!(with("ownerReferences", owners("a")), with("ownerReferences", owners("b")));
    }

    #[test]
    fn order_counts_in_lists_only() {
        let hash = |metadata: &str| {
            let object: Object = serde_json::from_str(&format!(r#"{{"metadata":{{{metadata}}}}}"#)).unwrap();
            object.into_state().1.metadata
        };
        assert_eq!(hash(r#""labels":{"a":"1","b":"2"}"#), hash(r#""labels":{"b":"2","a":"1"}"#));
        assert_ne!(hash(r#""labels":{"a":"1","b":"2"}"#), hash(r#""labels":{"a":"2","b":"1"}"#));
        assert_ne!(hash(r#""finalizers":["a","b"]"#), hash(r#""finalizers":["b","a"]"#));
        assert_eq!(hash(r#""labels":{},"finalizers":[]"#), hash(r#""labels":null"#));
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
