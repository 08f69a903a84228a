//! The objects of one runtime as texts, with their versions, and the newest changes for its watches.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use http::StatusCode;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tidewatch_cluster::testing::merge;

use super::path::Objects;

/// Changes kept for watches; a watch further behind receives 410.
pub(super) const HISTORY: usize = 4_096;
const DEFINITIONS: &str = "apiextensions.k8s.io/customresourcedefinitions//";

/// Interned texts: texts that many objects share, each stored once.
#[derive(Debug, Default)]
pub(super) struct TextPool(Mutex<Texts>);

#[derive(Debug, Default)]
struct Texts {
    texts: HashSet<Arc<str>>,
    /// Number of texts at which unused ones are dropped.
    full: usize,
}

impl TextPool {
    fn share(&self, text: String) -> Arc<str> {
        let mut texts = self.0.lock();
        if let Some(known) = texts.texts.get(text.as_str()) {
            return known.clone();
        }
        if texts.texts.len() >= texts.full {
            texts.texts.retain(|text| Arc::strong_count(text) > 1);
            texts.full = texts.texts.len() * 2 + 1_024;
        }
        let text: Arc<str> = text.into();
        texts.texts.insert(text.clone());
        text
    }
}

/// An object as JSON in two parts: its metadata, and everything else without the opening brace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) metadata: Arc<str>,
    rest: Arc<str>,
}

impl Stored {
    fn value(&self) -> Value {
        serde_json::from_str(&self.text(false)).unwrap_or_default()
    }

    /// Returns true if the object's JSON contains this text outside its metadata.
    pub(super) fn contains(&self, text: &str) -> bool {
        self.rest.contains(text)
    }

    /// The object's JSON, or that of its metadata alone as `PartialObjectMetadata`.
    pub(super) fn text(&self, only_metadata: bool) -> String {
        let Self { metadata, rest } = self;
        if only_metadata {
            let head = r#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":"#;
            return format!("{head}{metadata}}}");
        }
        if &**rest == "}" {
            return format!(r#"{{"metadata":{metadata}}}"#);
        }
        format!(r#"{{"metadata":{metadata},{rest}"#)
    }
}

/// A change of an object, for watches.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) key: Arc<str>,
    /// Absent when it was created.
    pub(super) before: Option<Stored>,
    /// Absent when it was deleted.
    pub(super) after: Option<Stored>,
}

/// Refusal of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) reason: &'static str,
    pub(super) name: String,
}

impl ApiError {
    pub(super) fn not_found(name: &str) -> Self {
        Self { status: StatusCode::NOT_FOUND, reason: "NotFound", name: name.to_owned() }
    }

    fn conflict(reason: &'static str, name: &str) -> Self {
        Self { status: StatusCode::CONFLICT, reason, name: name.to_owned() }
    }
}

/// Kind of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patch {
    /// `application/merge-patch+json`.
    Merge,
    /// `application/apply-patch+yaml`; creates a missing object.
    Apply,
}

/// Deployments whose pods are refused, in some of the runtimes.
pub(super) struct RefusedPods {
    /// Text in their specs.
    text: String,
    every: usize,
    /// Number of the runtimes that had such a Deployment so far.
    runtimes: Arc<AtomicUsize>,
    /// Whether this is one of the runtimes, once it has had such a Deployment.
    is_chosen: OnceLock<bool>,
}

impl RefusedPods {
    pub(super) fn new(text: &str, every: usize, runtimes: Arc<AtomicUsize>) -> Self {
        Self { text: text.to_owned(), every: every.max(1), runtimes, is_chosen: OnceLock::new() }
    }

    fn applies_to(&self, spec: &Value) -> bool {
        let choose = || self.runtimes.fetch_add(1, Ordering::Relaxed).is_multiple_of(self.every);
        spec.to_string().contains(&self.text) && *self.is_chosen.get_or_init(choose)
    }
}

/// See the module.
pub(super) struct Store {
    texts: Arc<TextPool>,
    objects: BTreeMap<Arc<str>, Stored>,
    version: u64,
    history: VecDeque<Change>,
    /// All changes above this version are in the history.
    since: u64,
    /// Set by the first watch; before that no history is kept.
    watched: bool,
    /// Position of each open watch.
    open: BTreeMap<u64, u64>,
    opened: u64,
    refused: Option<RefusedPods>,
}

impl Store {
    pub(super) fn new(texts: Arc<TextPool>) -> Self {
        let objects = BTreeMap::new();
        let history = VecDeque::new();
        let open = BTreeMap::new();
        let opened = 0;
        let refused = None;
        Self { texts, objects, version: 0, history, since: 0, watched: false, open, opened, refused }
    }

    pub(super) fn refuse_pods(&mut self, refused: RefusedPods) {
        self.refused = Some(refused);
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Begins to keep changes, from the current version on.
    pub(super) fn watched(&mut self) {
        if !self.watched {
            (self.watched, self.since) = (true, self.version);
        }
    }

    /// Registers a watch and returns its number.
    pub(super) fn open(&mut self, position: u64) -> u64 {
        self.opened += 1;
        self.open.insert(self.opened, position);
        self.opened
    }

    /// Records that a watch has delivered everything up to a version.
    pub(super) fn reach(&mut self, number: u64, position: u64) {
        self.open.insert(number, position);
    }

    /// Unregisters a watch.
    pub(super) fn close(&mut self, number: u64) {
        self.open.remove(&number);
    }

    /// Position of the slowest open watch; `None` when none is open.
    pub(super) fn slowest_position(&self) -> Option<u64> {
        self.open.values().min().copied()
    }

    /// The changes above a version, or `None` if some have been dropped.
    pub(super) fn changes(&self, above: u64) -> Option<impl Iterator<Item = &Change>> {
        let from = self.history.partition_point(|change| change.version <= above);
        (above >= self.since && above <= self.version).then(|| self.history.range(from..))
    }

    pub(super) fn get(&self, key: &str) -> Option<&Stored> {
        self.objects.get(key)
    }

    pub(super) fn value(&self, key: &str) -> Option<Value> {
        self.get(key).map(Stored::value)
    }

    /// The objects with this key prefix after the key `after`.
    pub(super) fn list<'a>(&'a self, prefix: &'a str, after: &'a str) -> impl Iterator<Item = (&'a str, &'a Stored)> {
        let from = if after.is_empty() { prefix } else { after };
        let objects = self.objects.range::<str, _>((std::ops::Bound::Included(from), std::ops::Bound::Unbounded));
        objects
            .map(|(key, stored)| (&**key, stored))
            .skip_while(move |(key, _)| *key == after)
            .take_while(move |(key, _)| key.starts_with(prefix))
    }

    /// The definitions of a group's kinds.
    pub(super) fn definitions(&self, group: &str) -> Vec<Value> {
        let all = self.list(DEFINITIONS, "").map(|(_, stored)| stored.value());
        all.filter(|definition| definition["spec"]["group"] == group).collect()
    }

    /// Returns true if a definition of this kind exists.
    pub(super) fn defines(&self, group: &str, resource: &str) -> bool {
        self.objects.contains_key(format!("{DEFINITIONS}{resource}.{group}").as_str())
    }

    pub(super) fn create(&mut self, at: &Objects<'_>, mut body: Value, manager: &str) -> Result<Stored, ApiError> {
        let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let key = at.key(&name);
        if self.objects.contains_key(key.as_str()) {
            return Err(ApiError::conflict("AlreadyExists", &name));
        }
        note_manager(&mut body, manager, "Update");
        Ok(self.put(&key, body))
    }

    pub(super) fn replace(&mut self, at: &Objects<'_>, body: Value, manager: &str) -> Result<Stored, ApiError> {
        let key = at.key(at.name);
        let Some(live) = self.value(&key) else { return Err(ApiError::not_found(at.name)) };
        let version = &body["metadata"]["resourceVersion"];
        if !version.is_null() && *version != live["metadata"]["resourceVersion"] {
            return Err(ApiError::conflict("Conflict", at.name));
        }
        let (mut object, other) = if at.subresource.is_empty() { (body, live) } else { (live, body) };
        if at.subresource.is_empty() {
            object["metadata"]["managedFields"] = other["metadata"]["managedFields"].clone();
        }
        object["status"] = other["status"].clone();
        note_manager(&mut object, manager, "Update");
        Ok(self.put(&key, object))
    }

    pub(super) fn patch(
        &mut self,
        at: &Objects<'_>,
        kind: Patch,
        mut body: Value,
        manager: &str,
    ) -> Result<Stored, ApiError> {
        let key = at.key(at.name);
        let live = self.value(&key);
        if live.is_none() && (kind == Patch::Merge || !at.subresource.is_empty()) {
            return Err(ApiError::not_found(at.name));
        }
        let mut live = live.unwrap_or_else(|| json!({"metadata": {}}));
        let version = &body["metadata"]["resourceVersion"];
        if !version.is_null() && *version != live["metadata"]["resourceVersion"] {
            return Err(ApiError::conflict("Conflict", at.name));
        }
        if at.subresource.is_empty() {
            if let Some(body) = body.as_object_mut() {
                body.remove("status");
            }
            merge(&body, &mut live);
        } else {
            merge(&body["status"], &mut live["status"]);
        }
        live["metadata"]["name"] = at.name.into();
        note_manager(&mut live, manager, if kind == Patch::Apply { "Apply" } else { "Update" });
        Ok(self.put(&key, live))
    }

    pub(super) fn delete(&mut self, at: &Objects<'_>, options: &Value) -> Result<(), ApiError> {
        let key = at.key(at.name);
        let Some(mut object) = self.value(&key) else { return Err(ApiError::not_found(at.name)) };
        let uid = &options["preconditions"]["uid"];
        if !uid.is_null() && *uid != object["metadata"]["uid"] {
            return Err(ApiError::conflict("Conflict", at.name));
        }
        object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        self.put(&key, object);
        Ok(())
    }

    /// Stores an object with a new version if it differs. An object that is being deleted is removed once it has no
    /// finalizer.
    pub(super) fn put(&mut self, key: &str, mut object: Value) -> Stored {
        let before = self.objects.get(key).cloned();
        let known = before.as_ref().map(Stored::value);
        self.complete(key, &mut object, known.as_ref());
        if let (Some(before), true) = (&before, known.as_ref() == Some(&object)) {
            return before.clone();
        }
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let finalizers = object["metadata"]["finalizers"].as_array().map_or(0, Vec::len);
        let gone = !object["metadata"]["deletionTimestamp"].is_null() && finalizers == 0;
        let stored = self.split(object);
        let key: Arc<str> = self.objects.get_key_value(key).map_or_else(|| key.into(), |(key, _)| key.clone());
        if gone {
            self.objects.remove(&key);
        } else {
            self.objects.insert(key.clone(), stored.clone());
        }
        let version = self.version;
        let after = (!gone).then(|| stored.clone());
        self.remember(Change { version, key, before: before.or_else(|| gone.then(|| stored.clone())), after });
        stored
    }

    fn remember(&mut self, change: Change) {
        if !self.watched {
            return;
        }
        if self.history.len() == HISTORY
            && let Some(oldest) = self.history.pop_front()
        {
            self.since = oldest.version;
        }
        self.history.push_back(change);
    }

    /// Sets the fields that an API server sets.
    fn complete(&self, key: &str, object: &mut Value, known: Option<&Value>) {
        static UIDS: AtomicU64 = AtomicU64::new(1);
        let mut parts = key.splitn(4, '/');
        let [group, resource, namespace, _] = std::array::from_fn(|_| parts.next().unwrap_or_default());
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = namespace.into();
        }
        let fixed = known.map(|known| &known["metadata"]);
        let metadata = &mut object["metadata"];
        match fixed {
            Some(fixed) => {
                for member in ["uid", "creationTimestamp", "generation", "resourceVersion"] {
                    metadata[member] = fixed[member].clone();
                }
            }
            None => {
                metadata["uid"] =
                    format!("00000000-0000-4000-8000-{:012x}", UIDS.fetch_add(1, Ordering::Relaxed)).into();
                metadata["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
            }
        }
        // Leases, RBAC and kinds of the core group have no generation.
        let uncounted = ["", "coordination.k8s.io", "rbac.authorization.k8s.io"];
        let counted = !uncounted.contains(&group);
        if counted && known.is_none_or(|known| known["spec"] != object["spec"]) {
            let generation = object["metadata"]["generation"].as_u64().unwrap_or_default() + 1;
            object["metadata"]["generation"] = generation.into();
        }
        if (group, resource) == ("apiextensions.k8s.io", "customresourcedefinitions") {
            let versions: Vec<_> = object["spec"]["versions"].as_array().into_iter().flatten().collect();
            let stored: Vec<_> = versions.iter().map(|version| version["name"].clone()).collect();
            object["status"] =
                json!({"conditions": [{"type": "Established", "status": "True"}], "storedVersions": stored});
        }
        if (group, resource) == ("apps", "deployments") {
            let is_refused = self.refused.as_ref().is_some_and(|refused| refused.applies_to(&object["spec"]));
            object["status"] = if is_refused { without_pods(object) } else { available(object) };
        }
        drop_nulls(object);
    }

    fn split(&self, mut object: Value) -> Stored {
        let metadata = object.as_object_mut().and_then(|object| object.remove("metadata")).unwrap_or_default();
        let rest = object.to_string();
        let rest = rest.strip_prefix('{').unwrap_or("}").to_owned();
        Stored { metadata: metadata.to_string().into(), rest: self.texts.share(rest) }
    }
}

/// Status of a Deployment with running pods.
fn available(deployment: &Value) -> Value {
    let replicas = deployment["spec"]["replicas"].as_u64().unwrap_or(1);
    json!({
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": replicas, "updatedReplicas": replicas, "readyReplicas": replicas, "availableReplicas": replicas,
        "conditions": [{"type": "Available", "status": "True"},
                       {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}],
    })
}

/// Status of a Deployment whose pods the API server refuses.
fn without_pods(deployment: &Value) -> Value {
    json!({
        "observedGeneration": deployment["metadata"]["generation"],
        "conditions": [{"type": "Available", "status": "False"},
                       {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate",
                        "message": "pods \"x\" is forbidden: violates PodSecurity"}],
    })
}

/// Records the field manager in `managedFields`, without its fields.
fn note_manager(object: &mut Value, manager: &str, operation: &str) {
    if manager.is_empty() {
        return;
    }
    let entry = json!({"manager": manager, "operation": operation});
    let fields = &mut object["metadata"]["managedFields"];
    match fields.as_array_mut() {
        Some(entries) if entries.contains(&entry) => {}
        Some(entries) => entries.push(entry),
        None => *fields = json!([entry]),
    }
}

/// Removes null members of the object and of its metadata.
fn drop_nulls(object: &mut Value) {
    if let Some(members) = object["metadata"].as_object_mut() {
        members.retain(|_, value| !value.is_null());
    }
    if let Some(members) = object.as_object_mut() {
        members.retain(|_, value| !value.is_null());
    }
}
