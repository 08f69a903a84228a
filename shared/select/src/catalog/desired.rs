//! Desired catalog of a runtime, computed once per visibility class.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use aws_lc_rs::digest;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Serialize;
use serde_json::{Map, Value, json};
use thiserror::Error;
use tidewatch_api::{
    ModuleReleaseMeta, ModuleTemplate,
    names::{GROUP, SKR_NAMESPACE, VERSION, annotation, field_manager, label},
};
use tidewatch_cluster::object::{Ownership, Repair, Shape, Target};
use tidewatch_kit::{foreign_text, hex, variant::VariantName as _};

/// kubectl's copy of the object applied in KCP; it has no meaning in a runtime.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Maximum bytes of an object as JSON. API servers and etcd accept about 1.5 MiB, which must also hold the managed
/// fields.
pub const MAX_OBJECT_BYTES: usize = 1 << 20;

/// Error of an object of KCP that cannot be written to a runtime.
#[derive(Debug, Error)]
pub enum UnfitObjectError {
    /// The custom resource does not serialize to JSON.
    #[error("it has no JSON form: {0}")]
    Serialize(serde_json::Error),
    /// More than [`MAX_OBJECT_BYTES`] bytes.
    #[error("it has {0} bytes, more than {MAX_OBJECT_BYTES}")]
    TooLarge(usize),
}

/// Kinds of the catalog. Templates come first: they are applied before the release metas that reference them. The text
/// form is the plural resource name in API paths.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, strum::Display, strum::EnumString, strum::IntoStaticStr,
)]
pub enum Kind {
    /// ModuleTemplate.
    #[strum(serialize = "moduletemplates")]
    Template,
    /// ModuleReleaseMeta.
    #[strum(serialize = "modulereleasemetas")]
    ReleaseMeta,
}

impl Kind {
    /// Both kinds, in the order of their application.
    pub const ALL: [Self; 2] = [Self::Template, Self::ReleaseMeta];

    /// Value of the field `kind`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Template => "ModuleTemplate",
            Self::ReleaseMeta => "ModuleReleaseMeta",
        }
    }

    /// API resource for the client.
    pub fn api_resource(self) -> ApiResource {
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, VERSION, self.name()), self.as_str())
    }
}

/// Object of the catalog in a runtime; its namespace is always [`SKR_NAMESPACE`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId {
    /// Kind of the object.
    pub kind: Kind,
    /// Name of the object, shared because the inventories of thousands of runtimes hold the same names.
    pub name: Arc<str>,
}

impl ObjectId {
    /// Creates an identifier.
    pub fn new(kind: Kind, name: &str) -> Self {
        Self { kind, name: name.into() }
    }

    /// Creates an identifier of an object of a runtime; `None` if no API server accepts its name.
    pub fn checked(kind: Kind, name: &str) -> Option<Self> {
        foreign_text::is_name(name).then(|| Self::new(kind, name))
    }

    /// Parses the form written by [`fmt::Display`].
    pub fn parse(text: &str) -> Option<Self> {
        let (resource, name) = text.split_once('/')?;
        Self::checked(resource.parse().ok()?, name)
    }

    /// Returns whether the object is the release meta of a module, or by its name a template of it: versions begin with
    /// a digit.
    pub fn belongs_to(&self, module: &str) -> bool {
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

/// SHA-256 of an object's desired content as JSON with sorted keys.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContentHash([u8; 32]);

impl ContentHash {
    /// Placeholder for a managed object with unknown content.
    pub const UNKNOWN: Self = Self([0; 32]);

    /// Hashes a value independently of the order of its keys.
    pub fn of(value: &Value) -> Self {
        // `Value` keeps its keys sorted (no crate enables `preserve_order`) and prints each value in one way.
        Self::of_text(&value.to_string())
    }

    fn of_text(text: &str) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest::digest(&digest::SHA256, text.as_bytes()).as_ref());
        Self(hash)
    }

    /// Parses 64 hex digits.
    pub fn parse(text: &str) -> Option<Self> {
        hex::decode(text)?.try_into().ok().map(Self)
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Desired state of an object in a runtime.
#[derive(Clone, Debug, PartialEq)]
pub struct DesiredObject {
    /// Identity of the object.
    pub id: ObjectId,
    /// Complete body of the server-side apply: type, name, namespace, labels, annotations and all other fields that the
    /// object has in KCP, without the metadata and status that belong to KCP's copy only.
    pub body: Value,
    /// Hash of `body`.
    pub hash: ContentHash,
    /// Templates that the channels of a release meta point to.
    pub requires: Vec<Arc<str>>,
}

/// All of an object is ours, except for annotations of other field managers.
const SHAPE: Shape = Shape {
    owns_label: |_| true,
    annotations_of: Some(field_manager::CATALOG_SYNC),
    drops_empty_lists: false,
    ..Shape::new(Ownership::Whole)
};

impl DesiredObject {
    /// Target of the writes, without a budget.
    pub fn target(&self) -> Target<'_> {
        let name = &*self.id.name;
        let manager = field_manager::CATALOG_SYNC;
        Target { name, manager, shape: &SHAPE, desired: &self.body, budget: None }
    }

    /// Returns whether an object matches its desired state.
    pub fn is_up_to_date(&self, object: &DynamicObject) -> bool {
        self.target().compare(object, None) == Repair::None
    }

    fn new(kind: Kind, body: Value, hash: ContentHash, requires: Vec<Arc<str>>) -> Self {
        let id = ObjectId::new(kind, body["metadata"]["name"].as_str().unwrap_or_default());
        Self { id, body, hash, requires }
    }
}

/// Desired catalog of all runtimes of one visibility class.
#[derive(Debug)]
pub struct DesiredCatalog {
    objects: BTreeMap<ObjectId, Arc<DesiredObject>>,
    held: HeldObjects,
    /// Hash of the objects' hashes in order, and of the held objects.
    fingerprint: String,
}

/// Objects with a held removal: a runtime gets the ones that it lacks, and keeps those that it has in whatever form.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldObjects {
    /// All objects.
    pub everything: bool,
    /// All objects of these modules.
    pub modules: BTreeSet<String>,
    /// These objects.
    pub objects: BTreeSet<ObjectId>,
}

impl From<BTreeSet<String>> for HeldObjects {
    fn from(modules: BTreeSet<String>) -> Self {
        Self { modules, ..Self::default() }
    }
}

impl HeldObjects {
    fn contains(&self, id: &ObjectId) -> bool {
        self.everything || self.objects.contains(id) || self.modules.iter().any(|module| id.belongs_to(module))
    }

    fn hash(&self, hash: &mut digest::Context) {
        if self.everything {
            hash.update(b"everything held\n");
        }
        for module in &self.modules {
            hash.update(format!("held {module}\n").as_bytes());
        }
        for object in &self.objects {
            hash.update(format!("held {object}\n").as_bytes());
        }
    }
}

/// Difference between two catalogs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Objects of the later catalog only.
    pub added: Vec<ObjectId>,
    /// Objects of both catalogs with different content.
    pub changed: Vec<ObjectId>,
    /// Objects of the earlier catalog only.
    pub removed: Vec<ObjectId>,
}

impl DesiredCatalog {
    /// Creates a catalog without held objects.
    pub fn new(objects: impl IntoIterator<Item = Arc<DesiredObject>>) -> Self {
        Self::with_held(objects, HeldObjects::default())
    }

    /// Creates a catalog with held objects.
    pub fn with_held(objects: impl IntoIterator<Item = Arc<DesiredObject>>, held: HeldObjects) -> Self {
        let objects: BTreeMap<_, _> = objects.into_iter().map(|object| (object.id.clone(), object)).collect();
        let mut hash = digest::Context::new(&digest::SHA256);
        objects.values().for_each(|object| hash.update(&object.hash.0));
        held.hash(&mut hash);
        Self { fingerprint: hex::encode(hash.finish().as_ref()), objects, held }
    }

    /// Objects, templates first.
    pub fn objects(&self) -> impl Iterator<Item = &Arc<DesiredObject>> {
        self.objects.values()
    }

    /// Fingerprint of the catalog: equal for equal objects (names are part of the content) and equal held ones.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Returns the desired state of an object.
    pub fn get(&self, id: &ObjectId) -> Option<&Arc<DesiredObject>> {
        self.objects.get(id)
    }

    /// Returns whether the removal of an object is held: it is written only to a runtime that lacks it, and not deleted.
    pub fn is_held(&self, id: &ObjectId) -> bool {
        self.held.contains(id)
    }

    /// Computes the difference from this catalog to a later one.
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

/// Converts a template to its desired state in a runtime, with the members that the dashboard Busola reads unchecked.
///
/// # Errors
/// [`UnfitObjectError`].
pub fn template(template: &ModuleTemplate) -> Result<DesiredObject, UnfitObjectError> {
    let mut body = runtime_body(Kind::Template, template)?;
    complete_for_busola(&mut body);
    let hash = ContentHash::of_text(&checked_text(&body)?);
    Ok(DesiredObject::new(Kind::Template, body, hash, Vec::new()))
}

/// Body of a release meta for a runtime, with all its channels.
#[derive(Clone, Debug)]
pub struct ReleaseBody(Value);

impl ReleaseBody {
    /// Converts a release meta.
    ///
    /// # Errors
    /// [`UnfitObjectError`].
    pub fn of(meta: &ModuleReleaseMeta) -> Result<Self, UnfitObjectError> {
        let body = runtime_body(Kind::ReleaseMeta, meta)?;
        checked_text(&body).map(|_| Self(body))
    }

    /// Desired state of the release meta with only these channels (channel → template) and the `versions` entries of
    /// these versions.
    pub fn restricted_to(&self, channels: &BTreeMap<&str, String>, versions: &BTreeSet<&str>) -> DesiredObject {
        let mut body = self.0.clone();
        if let Some(Value::Array(entries)) = body.pointer_mut("/spec/channels") {
            entries.retain(|entry| entry["channel"].as_str().is_some_and(|channel| channels.contains_key(channel)));
        }
        if let Some(Value::Array(entries)) = body.pointer_mut("/spec/versions") {
            entries.retain(|entry| entry["version"].as_str().is_some_and(|version| versions.contains(version)));
        }
        let requires = channels.values().map(|name| name.as_str().into()).collect();
        let hash = ContentHash::of(&body);
        DesiredObject::new(Kind::ReleaseMeta, body, hash, requires)
    }
}

/// Serializes a body and checks its size.
fn checked_text(body: &Value) -> Result<String, UnfitObjectError> {
    let text = body.to_string();
    if text.len() > MAX_OBJECT_BYTES { Err(UnfitObjectError::TooLarge(text.len())) } else { Ok(text) }
}

/// Converts an object to JSON, so that no field is lost, with new metadata: the metadata that KCP's API server and
/// controllers maintain (versions, owners, finalizers, managed fields) has no meaning in another cluster.
fn runtime_body(kind: Kind, object: &impl Serialize) -> Result<Value, UnfitObjectError> {
    let mut body = serde_json::to_value(object).map_err(UnfitObjectError::Serialize)?;
    let strings = |value: &Value| value.as_object().cloned().unwrap_or_default();
    let mut labels: Map<String, Value> = strings(&body["metadata"]["labels"]);
    labels.insert(label::MANAGED_BY.to_owned(), label::MANAGED_BY_SKR.into());
    let mut annotations = strings(&body["metadata"]["annotations"]);
    annotations.remove(LAST_APPLIED);
    let name = body["metadata"]["name"].as_str().unwrap_or_default();
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

/// Completes a template for Busola, whose module pages fail as a whole otherwise:
///
/// * The label with the module's name says which module the template belongs to.
/// * The annotations are never absent. An API server drops an empty map, so one annotation is added: absent, it means
///   `false`.
/// * The channel of a template has no effect. With one, Busola reads the version from the descriptor, which may be empty.
fn complete_for_busola(body: &mut Value) {
    let module = body["spec"]["moduleName"].as_str().filter(|module| !module.is_empty()).map(str::to_owned);
    if let Some(module) = module {
        body["metadata"]["labels"][label::MODULE_NAME] = module.into();
    }
    if !body["metadata"]["annotations"].is_object() {
        body["metadata"]["annotations"] = json!({annotation::CLUSTER_SCOPED: "false"});
    }
    if let Some(spec) = body["spec"].as_object_mut() {
        spec.remove("channel");
    }
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
    fn labels_and_annotations_are_copied_without_kcp_metadata() {
        let full =
            meta(json!({"name": "m", "namespace": "kcp-system", "uid": "u", "resourceVersion": "1", "generation": 4,
            "creationTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"], "managedFields": [{"manager": "x"}],
            "ownerReferences": [{"apiVersion": "v1", "kind": "X", "name": "x", "uid": "x"}],
            "labels": {"l": "1", "operator.kyma-project.io/managed-by": "lifecycle-manager"},
            "annotations": {"a": "1", LAST_APPLIED: "{}"}}));
        let channels = BTreeMap::from([("fast", "m-2.0.0".to_owned())]);
        let desired = ReleaseBody::of(&full).unwrap().restricted_to(&channels, &BTreeSet::new());
        assert_eq!(
            desired.body,
            json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
                "metadata": {"name": "m", "namespace": "kyma-system", "annotations": {"a": "1"},
                    "labels": {"l": "1", "operator.kyma-project.io/managed-by": "kyma"}},
                "spec": {"moduleName": "m", "ocmComponentName": "kyma-project.io/module/m",
                    "channels": [{"channel": "fast", "version": "2.0.0"}]}})
        );
        assert_eq!(desired.requires, [Arc::from("m-2.0.0")]);
        assert_eq!(desired.id.to_string(), "modulereleasemetas/m");
    }

    #[test]
    fn hash_depends_on_content_only() {
        let channels = BTreeMap::from([("fast", "m-2.0.0".to_owned())]);
        let hash = |metadata| ReleaseBody::of(&meta(metadata)).unwrap().restricted_to(&channels, &BTreeSet::new()).hash;
        let plain = hash(json!({"name": "m", "resourceVersion": "1"}));
        assert_eq!(plain, hash(json!({"resourceVersion": "2", "name": "m", "finalizers": ["f"]})));
        assert_ne!(plain, hash(json!({"name": "m", "labels": {"l": "1"}})));
        assert_ne!(plain, hash(json!({"name": "m", "annotations": {"a": "1"}})));
        let none = ReleaseBody::of(&meta(json!({"name": "m"})))
            .unwrap()
            .restricted_to(&BTreeMap::new(), &BTreeSet::new())
            .hash;
        assert_ne!(plain, none);
        assert_eq!(ContentHash::parse(&plain.to_string()), Some(plain));
        assert_eq!(ContentHash::parse("12"), None);
    }

    #[test]
    fn version_entries_are_limited_to_visible_versions() {
        let mut meta = meta(json!({"name": "m"}));
        let versions = json!([{"version": "1.0.0", "deprecationMessage": "old"}, {"version": "0.9.0"}]);
        meta.spec.versions = serde_json::from_value(versions).unwrap();
        let desired =
            ReleaseBody::of(&meta).unwrap().restricted_to(&BTreeMap::new(), &BTreeSet::from(["1.0.0", "2.0.0"]));
        assert_eq!(desired.body["spec"]["versions"], json!([{"version": "1.0.0", "deprecationMessage": "old"}]));
    }

    #[test]
    fn copy_of_a_template_has_what_busola_reads_unchecked() {
        let copy = |metadata: Value, spec: Value| {
            let template = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
                "metadata": metadata, "spec": spec});
            super::template(&serde_json::from_value(template).unwrap()).unwrap().body
        };
        let bare = copy(json!({"name": "m-1.0.0"}), json!({"moduleName": "m", "version": "1.0.0", "descriptor": {}}));
        assert_eq!(
            bare["metadata"],
            json!({"name": "m-1.0.0", "namespace": "kyma-system",
                "annotations": {"operator.kyma-project.io/is-cluster-scoped": "false"},
                "labels": {"operator.kyma-project.io/managed-by": "kyma", "operator.kyma-project.io/module-name": "m"}})
        );
        let last_applied = json!({"name": "m-1.0.0", "annotations": {LAST_APPLIED: "{}"}});
        let applied = copy(last_applied, json!({"moduleName": "m", "descriptor": {}}));
        assert_eq!(applied["metadata"]["annotations"].as_object().map(Map::len), Some(1), "the last one was removed");
        let annotated = json!({"name": "m-1.0.0", "annotations": {"a": "1"},
            "labels": {"operator.kyma-project.io/module-name": "other"}});
        let annotated = copy(annotated, json!({"moduleName": "m", "channel": "fast", "descriptor": {}}));
        assert_eq!(annotated["metadata"]["annotations"], json!({"a": "1"}));
        assert_eq!(annotated["metadata"]["labels"]["operator.kyma-project.io/module-name"], "m");
        assert_eq!(annotated["spec"], json!({"moduleName": "m", "descriptor": {}}));
    }

    #[test]
    fn object_above_the_size_limit_is_rejected() {
        let mut template = ModuleTemplate::default();
        template.spec.descriptor = json!({"text": "x".repeat(MAX_OBJECT_BYTES)});
        assert!(
            matches!(super::template(&template), Err(UnfitObjectError::TooLarge(bytes)) if bytes > MAX_OBJECT_BYTES)
        );
    }

    #[test]
    fn objects_belong_to_modules_by_name() {
        let id = |text| ObjectId::parse(text).unwrap();
        for (text, module, belongs) in [
            ("modulereleasemetas/api", "api", true),
            ("modulereleasemetas/api-gateway", "api", false),
            ("moduletemplates/api-1.0.0", "api", true),
            ("moduletemplates/api-gateway-1.0.0", "api", false),
            ("moduletemplates/api-gateway-1.0.0", "api-gateway", true),
            ("moduletemplates/api", "api", false),
        ] {
            assert_eq!(id(text).belongs_to(module), belongs, "{text} {module}");
            assert_eq!(id(text).to_string(), text);
        }
        assert_eq!(ObjectId::parse("others/x"), None);
        assert_eq!(ObjectId::parse("moduletemplates/"), None);
        assert_eq!(ObjectId::parse(&format!("moduletemplates/{}", "x".repeat(254))), None);
    }

    #[test]
    fn catalogs_differ_by_objects_and_held_modules() {
        let template = |name: &str, text: &str| {
            let mut template = ModuleTemplate::default();
            template.metadata.name = Some(name.to_owned());
            template.spec.descriptor = json!({"text": text});
            Arc::new(super::template(&template).unwrap())
        };
        let before = DesiredCatalog::new([template("a-1", "1"), template("b-1", "1"), template("c-1", "1")]);
        let later = DesiredCatalog::new([template("a-1", "1"), template("b-1", "2"), template("d-1", "1")]);
        let difference = before.difference(&later);
        let names = |ids: &[ObjectId]| ids.iter().map(|id| id.name.to_string()).collect::<Vec<_>>();
        assert_eq!(names(&difference.added), ["d-1"]);
        assert_eq!(names(&difference.changed), ["b-1"]);
        assert_eq!(names(&difference.removed), ["c-1"]);
        assert_ne!(before.fingerprint(), later.fingerprint());
        let held = DesiredCatalog::with_held([template("a-1", "1")], BTreeSet::from(["b".into()]).into());
        assert_ne!(held.fingerprint(), DesiredCatalog::new([template("a-1", "1")]).fingerprint());
        assert!(
            held.is_held(&ObjectId::new(Kind::Template, "b-1")) && !held.is_held(&ObjectId::new(Kind::Template, "a-1"))
        );
    }
}
