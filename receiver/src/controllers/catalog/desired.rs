//! What the catalog of a runtime shall hold, computed once per class.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use aws_lc_rs::digest;
use kube::core::{ApiResource, GroupVersionKind};
use serde::Serialize;
use serde_json::{Map, Value, json};
use thiserror::Error;
use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    hex,
    names::{GROUP, SKR_NAMESPACE, VERSION, label},
};

/// kubectl's copy of what was applied in KCP; it means nothing in a runtime.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Bytes of an object as JSON, at most: API servers and their stores take no more than one and a half MiB, and what they note
/// about fields comes on top.
pub const MAX_OBJECT: usize = 1 << 20;

/// Why an object of KCP has no form in a runtime.
#[derive(Debug, Error)]
pub enum Unfit {
    /// The custom resource does not turn into JSON.
    #[error("it has no JSON form: {0}")]
    Serialize(serde_json::Error),
    /// More than [`MAX_OBJECT`] bytes.
    #[error("it has {0} bytes, more than {MAX_OBJECT}")]
    TooLarge(usize),
}

/// The two kinds of a catalog. Templates come first: they go in before the release metas that point to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// ModuleTemplate.
    Template,
    /// ModuleReleaseMeta.
    ReleaseMeta,
}

impl Kind {
    /// Both, in the order in which they go in.
    pub const ALL: [Self; 2] = [Self::Template, Self::ReleaseMeta];

    /// The plural name in the API's paths.
    #[must_use]
    pub const fn resource(self) -> &'static str {
        match self {
            Self::Template => "moduletemplates",
            Self::ReleaseMeta => "modulereleasemetas",
        }
    }

    /// The kind in `kind`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Template => "ModuleTemplate",
            Self::ReleaseMeta => "ModuleReleaseMeta",
        }
    }

    /// How kube addresses it.
    #[must_use]
    pub fn api_resource(self) -> ApiResource {
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, VERSION, self.name()), self.resource())
    }

    /// The kind with this plural name.
    #[must_use]
    pub fn of_resource(resource: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.resource() == resource)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.resource())
    }
}

/// An object of the catalog in a runtime; its namespace is always [`SKR_NAMESPACE`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId {
    /// Its kind.
    pub kind: Kind,
    /// Its name. Shared: thousands of runtimes remember the same names.
    pub name: Arc<str>,
}

impl ObjectId {
    /// An id.
    #[must_use]
    pub fn new(kind: Kind, name: &str) -> Self {
        Self { kind, name: name.into() }
    }

    /// Reads what [`fmt::Display`] writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (resource, name) = text.split_once('/')?;
        let named = !name.is_empty() && !name.contains(char::is_whitespace);
        Kind::of_resource(resource).filter(|_| named).map(|kind| Self::new(kind, name))
    }

    /// Whether it is the release meta of a module, or by its name a template of it: versions begin with a digit.
    #[must_use]
    pub fn is_of(&self, module: &str) -> bool {
        match self.kind {
            Kind::ReleaseMeta => *self.name == *module,
            Kind::Template => {
                let version = self.name.strip_prefix(module).and_then(|rest| rest.strip_prefix('-'));
                version.is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()))
            }
        }
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.name)
    }
}

/// SHA-256 of what an object shall be, as JSON with sorted keys.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContentHash([u8; 32]);

impl ContentHash {
    /// Of nothing that can be: an object that is ours, of which nobody knows what it holds.
    pub const UNKNOWN: Self = Self([0; 32]);

    /// Hashes a value: the same content has the same hash, whatever the order of its keys was.
    #[must_use]
    pub fn of(value: &Value) -> Self {
        // `Value` keeps its keys sorted (no `preserve_order` anywhere) and prints each value in one way.
        Self::of_text(&value.to_string())
    }

    fn of_text(text: &str) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest::digest(&digest::SHA256, text.as_bytes()).as_ref());
        Self(hash)
    }

    /// From its 64 hex digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (high, low) = text.split_at_checked(32)?;
        let mut hash = [0; 32];
        hash[..16].copy_from_slice(&hex::decode_u128(high)?.to_be_bytes());
        hash[16..].copy_from_slice(&hex::decode_u128(low)?.to_be_bytes());
        Some(Self(hash))
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

/// An object as it shall be in a runtime.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// Which object.
    pub id: ObjectId,
    /// The whole body of a server-side apply: type, name, namespace, labels, annotations and everything else that the
    /// object holds in KCP, less what belongs to KCP's copy alone.
    pub body: Value,
    /// Of `body`.
    pub hash: ContentHash,
    /// The templates that a release meta's channels point to.
    pub needs: Vec<Arc<str>>,
}

/// What all runtimes of one class shall have.
#[derive(Debug)]
pub struct Wanted {
    objects: BTreeMap<ObjectId, Arc<Desired>>,
    /// Modules whose objects stay in each runtime as they are.
    held: BTreeSet<String>,
    /// Hash of all objects' hashes, in their order, and of what is held.
    content: String,
}

/// How one catalog differs from another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Objects that only the later one has.
    pub added: Vec<ObjectId>,
    /// Objects of both with another content.
    pub changed: Vec<ObjectId>,
    /// Objects that only the earlier one has.
    pub removed: Vec<ObjectId>,
}

impl Wanted {
    /// Makes a catalog of its objects.
    #[must_use]
    pub fn new(objects: impl IntoIterator<Item = Arc<Desired>>) -> Self {
        Self::with_held(objects, BTreeSet::new())
    }

    /// The same, with modules whose objects are neither written nor deleted, in whatever form a runtime has them.
    #[must_use]
    pub fn with_held(objects: impl IntoIterator<Item = Arc<Desired>>, held: BTreeSet<String>) -> Self {
        let objects: BTreeMap<_, _> = objects.into_iter().map(|object| (object.id.clone(), object)).collect();
        let mut hash = digest::Context::new(&digest::SHA256);
        objects.values().for_each(|object| hash.update(&object.hash.0));
        for module in &held {
            hash.update(format!("held {module}\n").as_bytes());
        }
        Self { content: hex::encode(hash.finish().as_ref()), objects, held }
    }

    /// The objects, templates first.
    pub fn objects(&self) -> impl Iterator<Item = &Arc<Desired>> {
        self.objects.values()
    }

    /// The same for the same objects: names are part of their content.
    #[must_use]
    pub fn content(&self) -> &str {
        &self.content
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, id: &ObjectId) -> Option<&Arc<Desired>> {
        self.objects.get(id)
    }

    /// Whether an object belongs to a module whose objects stay as they are.
    #[must_use]
    pub fn holds(&self, id: &ObjectId) -> bool {
        self.held.iter().any(|module| id.is_of(module))
    }

    /// Modules whose objects stay as they are.
    pub fn held(&self) -> impl Iterator<Item = &str> {
        self.held.iter().map(String::as_str)
    }

    /// What `later` has, lacks or has otherwise.
    #[must_use]
    pub fn difference(&self, later: &Self) -> Difference {
        let mut difference = Difference::default();
        for (id, object) in &later.objects {
            match self.objects.get(id) {
                None => difference.added.push(id.clone()),
                Some(before) if before.hash != object.hash => difference.changed.push(id.clone()),
                Some(_) => {}
            }
        }
        difference.removed.extend(self.objects.keys().filter(|id| !later.objects.contains_key(*id)).cloned());
        difference
    }
}

/// A template as it shall be in a runtime.
///
/// # Errors
/// [`Unfit`].
pub fn template(template: &ModuleTemplate) -> Result<Desired, Unfit> {
    sealed(Kind::Template, carried(Kind::Template, template.metadata.name.as_deref(), template)?, Vec::new())
}

/// A release meta as it could be in a runtime: with all its channels.
#[derive(Clone, Debug)]
pub struct Release(Value);

impl Release {
    /// Of a release meta.
    ///
    /// # Errors
    /// [`Unfit`].
    pub fn of(meta: &ModuleReleaseMeta) -> Result<Self, Unfit> {
        let body = carried(Kind::ReleaseMeta, meta.metadata.name.as_deref(), meta)?;
        match body.to_string().len() {
            bytes if bytes > MAX_OBJECT => Err(Unfit::TooLarge(bytes)),
            _ => Ok(Self(body)),
        }
    }

    /// As it shall be in a runtime: with these channels only (channel → template), and with what is said of these versions.
    #[must_use]
    pub fn with(&self, channels: &BTreeMap<&str, String>, versions: &BTreeSet<&str>) -> Desired {
        let mut body = self.0.clone();
        if let Some(Value::Array(entries)) = body.pointer_mut("/spec/channels") {
            entries.retain(|entry| entry["channel"].as_str().is_some_and(|channel| channels.contains_key(channel)));
        }
        if let Some(Value::Array(entries)) = body.pointer_mut("/spec/versions") {
            entries.retain(|entry| entry["version"].as_str().is_some_and(|version| versions.contains(version)));
        }
        let needs = channels.values().map(|name| name.as_str().into()).collect();
        desired(Kind::ReleaseMeta, body, ContentHash::of, needs)
    }
}

fn sealed(kind: Kind, body: Value, needs: Vec<Arc<str>>) -> Result<Desired, Unfit> {
    let text = body.to_string();
    if text.len() > MAX_OBJECT {
        return Err(Unfit::TooLarge(text.len()));
    }
    Ok(desired(kind, body, |_| ContentHash::of_text(&text), needs))
}

fn desired(kind: Kind, body: Value, hash: impl FnOnce(&Value) -> ContentHash, needs: Vec<Arc<str>>) -> Desired {
    let id = ObjectId::new(kind, body["metadata"]["name"].as_str().unwrap_or_default());
    Desired { id, hash: hash(&body), body, needs }
}

/// The object as JSON, so that no field is lost, with metadata made anew: nothing that KCP's API server or KCP's
/// controllers keep on it (versions, owners, finalizers, managed fields) has a meaning elsewhere.
fn carried(kind: Kind, name: Option<&str>, object: &impl Serialize) -> Result<Value, Unfit> {
    let name = name.unwrap_or_default();
    let mut body = serde_json::to_value(object).map_err(Unfit::Serialize)?;
    let strings = |value: &Value| value.as_object().cloned().unwrap_or_default();
    let mut labels: Map<String, Value> = strings(&body["metadata"]["labels"]);
    labels.insert(label::MANAGED_BY.to_owned(), label::MANAGED_BY_SKR.into());
    let mut annotations = strings(&body["metadata"]["annotations"]);
    annotations.remove(LAST_APPLIED);
    let mut metadata = json!({"name": name, "namespace": SKR_NAMESPACE, "labels": labels});
    if !annotations.is_empty() {
        metadata["annotations"] = Value::Object(annotations);
    }
    body["apiVersion"] = format!("{GROUP}/{VERSION}").into();
    body["kind"] = kind.name().into();
    body["metadata"] = metadata;
    if let Some(members) = body.as_object_mut() {
        members.remove("status");
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(metadata: Value) -> ModuleReleaseMeta {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": metadata, "spec": {"moduleName": "m", "ocmComponentName": "kyma-project.io/module/m",
                "channels": [{"channel": "regular", "version": "1.0.0"}, {"channel": "fast", "version": "2.0.0"}]}}))
        .unwrap()
    }

    #[test]
    fn labels_and_annotations_travel_and_what_is_kcps_own_does_not() {
        let full =
            meta(json!({"name": "m", "namespace": "kcp-system", "uid": "u", "resourceVersion": "1", "generation": 4,
            "creationTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"], "managedFields": [{"manager": "x"}],
            "ownerReferences": [{"apiVersion": "v1", "kind": "X", "name": "x", "uid": "x"}],
            "labels": {"l": "1", "operator.kyma-project.io/managed-by": "lifecycle-manager"},
            "annotations": {"a": "1", LAST_APPLIED: "{}"}}));
        let channels = BTreeMap::from([("fast", "m-2.0.0".to_owned())]);
        let desired = Release::of(&full).unwrap().with(&channels, &BTreeSet::new());
        assert_eq!(
            desired.body,
            json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
                "metadata": {"name": "m", "namespace": "kyma-system", "annotations": {"a": "1"},
                    "labels": {"l": "1", "operator.kyma-project.io/managed-by": "kyma"}},
                "spec": {"moduleName": "m", "ocmComponentName": "kyma-project.io/module/m",
                    "channels": [{"channel": "fast", "version": "2.0.0"}]}})
        );
        assert_eq!(desired.needs, [Arc::from("m-2.0.0")]);
        assert_eq!(desired.id.to_string(), "modulereleasemetas/m");
    }

    #[test]
    fn the_hash_follows_the_content_and_nothing_else() {
        let channels = BTreeMap::from([("fast", "m-2.0.0".to_owned())]);
        let hash = |metadata| Release::of(&meta(metadata)).unwrap().with(&channels, &BTreeSet::new()).hash;
        let plain = hash(json!({"name": "m", "resourceVersion": "1"}));
        assert_eq!(plain, hash(json!({"resourceVersion": "2", "name": "m", "finalizers": ["f"]})));
        assert_ne!(plain, hash(json!({"name": "m", "labels": {"l": "1"}})));
        assert_ne!(plain, hash(json!({"name": "m", "annotations": {"a": "1"}})));
        let none = Release::of(&meta(json!({"name": "m"}))).unwrap().with(&BTreeMap::new(), &BTreeSet::new()).hash;
        assert_ne!(plain, none);
        assert_eq!(ContentHash::parse(&plain.to_string()), Some(plain));
        assert_eq!(ContentHash::parse("12"), None);
    }

    #[test]
    fn what_is_said_of_versions_travels_with_those_that_are_seen() {
        let mut meta = meta(json!({"name": "m"}));
        let versions = json!([{"version": "1.0.0", "deprecationMessage": "old"}, {"version": "0.9.0"}]);
        meta.spec.versions = serde_json::from_value(versions).unwrap();
        let desired = Release::of(&meta).unwrap().with(&BTreeMap::new(), &BTreeSet::from(["1.0.0", "2.0.0"]));
        assert_eq!(desired.body["spec"]["versions"], json!([{"version": "1.0.0", "deprecationMessage": "old"}]));
    }

    #[test]
    fn an_object_above_the_limit_is_named_as_such() {
        let mut template = ModuleTemplate::default();
        template.spec.descriptor = json!({"text": "x".repeat(MAX_OBJECT)});
        assert!(matches!(super::template(&template), Err(Unfit::TooLarge(bytes)) if bytes > MAX_OBJECT));
    }

    #[test]
    fn objects_belong_to_modules_by_their_names() {
        let id = |text| ObjectId::parse(text).unwrap();
        for (text, module, is_of) in [
            ("modulereleasemetas/api", "api", true),
            ("modulereleasemetas/api-gateway", "api", false),
            ("moduletemplates/api-1.0.0", "api", true),
            ("moduletemplates/api-gateway-1.0.0", "api", false),
            ("moduletemplates/api-gateway-1.0.0", "api-gateway", true),
            ("moduletemplates/api", "api", false),
        ] {
            assert_eq!(id(text).is_of(module), is_of, "{text} {module}");
            assert_eq!(id(text).to_string(), text);
        }
        assert_eq!(ObjectId::parse("others/x"), None);
        assert_eq!(ObjectId::parse("moduletemplates/"), None);
    }

    #[test]
    fn two_catalogs_differ_by_objects_and_by_what_is_held() {
        let template = |name: &str, text: &str| {
            let mut template = ModuleTemplate::default();
            template.metadata.name = Some(name.to_owned());
            template.spec.descriptor = json!({"text": text});
            Arc::new(super::template(&template).unwrap())
        };
        let before = Wanted::new([template("a-1", "1"), template("b-1", "1"), template("c-1", "1")]);
        let later = Wanted::new([template("a-1", "1"), template("b-1", "2"), template("d-1", "1")]);
        let difference = before.difference(&later);
        let names = |ids: &[ObjectId]| ids.iter().map(|id| id.name.to_string()).collect::<Vec<_>>();
        assert_eq!(names(&difference.added), ["d-1"]);
        assert_eq!(names(&difference.changed), ["b-1"]);
        assert_eq!(names(&difference.removed), ["c-1"]);
        assert_ne!(before.content(), later.content());
        let held = Wanted::with_held([template("a-1", "1")], BTreeSet::from(["b".into()]));
        assert_ne!(held.content(), Wanted::new([template("a-1", "1")]).content());
        assert!(
            held.holds(&ObjectId::new(Kind::Template, "b-1")) && !held.holds(&ObjectId::new(Kind::Template, "a-1"))
        );
    }
}
