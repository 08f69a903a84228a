//! A fake API server: any kind, resourceVersions, uids, finalizers, preconditions, CRDs that decide on the served
//! kinds, and a list of requests.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use http::{Method, StatusCode};
use kube::Client;
use serde_json::{Value, json};

use crate::testing;

const PLURALS: [&str; 20] = [
    "kymas",
    "manifests",
    "secrets",
    "moduletemplates",
    "modulereleasemetas",
    "customresourcedefinitions",
    "namespaces",
    "configmaps",
    "leases",
    "serviceaccounts",
    "clusterroles",
    "clusterrolebindings",
    "roles",
    "rolebindings",
    "priorityclasses",
    "networkpolicies",
    "services",
    "deployments",
    "pods",
    "validatingwebhookconfigurations",
];

type Answer = (StatusCode, String);

/// Id of an object and a change of it.
type ConcurrentWrite = (String, fn(&mut Value));

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    calls: Vec<String>,
    hangs: bool,
    refused: BTreeMap<String, StatusCode>,
    /// Concurrent writes, each just before a request.
    meanwhile: BTreeMap<String, ConcurrentWrite>,
    version: u64,
    served_by_definition: bool,
}

/// The server; clones are the same server.
#[derive(Clone, Default)]
pub(super) struct Fake(Arc<Mutex<State>>);

/// `<plural>/<name>` of a path, which is how tests name objects.
fn short(path: &str) -> String {
    let parts: Vec<_> = path.split('/').collect();
    let at = parts.iter().rposition(|part| PLURALS.contains(part)).unwrap_or_else(|| panic!("unexpected path {path}"));
    parts[at..].join("/")
}

impl Fake {
    /// A runtime: custom resources are served only while their definition is there.
    pub(super) fn runtime() -> Self {
        let fake = Self::default();
        fake.0.lock().unwrap().served_by_definition = true;
        fake
    }

    pub(super) fn client(&self) -> Client {
        let fake = self.clone();
        testing::client("default", move |parts, body| {
            let answer = fake.answer(parts, &serde_json::from_slice(body).unwrap_or(Value::Null));
            (!fake.0.lock().unwrap().hangs).then_some(answer)
        })
    }

    /// From now on requests take effect without a response.
    pub(super) fn hang(&self, hangs: bool) {
        self.0.lock().unwrap().hangs = hangs;
    }

    /// The calls since the last time, in order: `<METHOD> <plural>/<name>`.
    pub(super) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().calls)
    }

    /// The calls since the last time that were not reads.
    pub(super) fn writes(&self) -> Vec<String> {
        self.calls().into_iter().filter(|call| !call.starts_with("GET")).collect()
    }

    /// Changes an object as another writer does.
    pub(super) fn edit(&self, id: &str, change: impl FnOnce(&mut Value)) {
        let state = &mut *self.0.lock().unwrap();
        let mut object = state.objects.get(id).cloned().unwrap_or(Value::Null);
        change(&mut object);
        state.store(id, object);
    }

    pub(super) fn object(&self, id: &str) -> Option<Value> {
        self.0.lock().unwrap().objects.get(id).cloned()
    }

    pub(super) fn remove(&self, id: &str) {
        self.0.lock().unwrap().objects.remove(id);
    }

    /// All objects of a kind.
    pub(super) fn all(&self, plural: &str) -> Vec<Value> {
        let state = self.0.lock().unwrap();
        let of_kind = |id: &String| id.split('/').next() == Some(plural);
        state.objects.iter().filter(|(id, _)| of_kind(id)).map(|(_, object)| object.clone()).collect()
    }

    /// From now on this request, in the notation of [`Fake::calls`], fails with this status.
    pub(super) fn refuse(&self, call: &str, status: u16) {
        self.0.lock().unwrap().refused.insert(call.to_owned(), StatusCode::from_u16(status).unwrap());
    }

    /// Just before the next such request another writer changes an object.
    pub(super) fn meanwhile(&self, call: &str, id: &str, change: fn(&mut Value)) {
        self.0.lock().unwrap().meanwhile.insert(call.to_owned(), (id.to_owned(), change));
    }

    fn answer(&self, parts: &http::request::Parts, body: &Value) -> Answer {
        let state = &mut *self.0.lock().unwrap();
        let whole = short(parts.uri.path());
        let call = format!("{} {whole}", parts.method);
        state.calls.push(call.clone());
        if let Some((id, change)) = state.meanwhile.remove(&call) {
            let mut object = state.objects.get(&id).cloned().unwrap_or(Value::Null);
            change(&mut object);
            state.store(&id, object);
        }
        if let Some(status) = state.refused.get(&call) {
            return failure(*status, "Refused", "");
        }
        let (id, is_status) = whole.strip_suffix("/status").map_or((whole.as_str(), false), |id| (id, true));
        let plural = id.split('/').next().unwrap();
        let custom = parts.uri.path().contains("/operator.kyma-project.io/");
        if custom
            && state.served_by_definition
            && !state.objects.contains_key(&format!("customresourcedefinitions/{plural}.operator.kyma-project.io"))
        {
            return (StatusCode::NOT_FOUND, "404 page not found\n".into());
        }
        let content = parts.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
        match (&parts.method, id.split_once('/')) {
            (&Method::GET, None) => state.list(plural, parts.uri.query().unwrap_or_default()),
            (&Method::GET, Some((_, name))) => match state.objects.get(id) {
                Some(object) => ok(object),
                None => failure(StatusCode::NOT_FOUND, "NotFound", name),
            },
            (&Method::POST, None) => state.create(plural, body.clone()),
            (&Method::PATCH, Some((_, name))) => state.patch(id, name, is_status, content.contains("apply"), body),
            (&Method::PUT, Some((_, name))) => state.put(id, name, is_status, body),
            (&Method::DELETE, Some((_, name))) => state.delete(id, name, body),
            other => panic!("unexpected {other:?}"),
        }
    }
}

impl State {
    fn list(&self, plural: &str, query: &str) -> Answer {
        let selector = query.split('&').find_map(|pair| pair.strip_prefix("labelSelector=")).unwrap_or_default();
        let selector = selector.replace("%2F", "/").replace("%3D", "=").replace("%21", "!").replace("%2C", ",");
        let selects = |object: &&Value| {
            selector.split(',').filter_map(|one| one.split_once('=')).all(|(key, value)| match key.strip_suffix('!') {
                Some(key) => object["metadata"]["labels"][key] != value,
                None => object["metadata"]["labels"][key] == value,
            })
        };
        let of_kind = self.objects.iter().filter(|(id, _)| id.split('/').next() == Some(plural));
        let items: Vec<_> = of_kind.map(|(_, object)| object).filter(selects).collect();
        (StatusCode::OK, json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}).to_string())
    }

    fn create(&mut self, plural: &str, body: Value) -> Answer {
        let name = body["metadata"]["name"].as_str().unwrap().to_owned();
        let id = format!("{plural}/{name}");
        if self.objects.contains_key(&id) {
            return failure(StatusCode::CONFLICT, "AlreadyExists", &name);
        }
        ok(&self.store(&id, body))
    }

    fn patch(&mut self, id: &str, name: &str, is_status: bool, is_apply: bool, body: &Value) -> Answer {
        let live = self.objects.get(id).cloned();
        if live.is_none() && (!is_apply || is_status) {
            return failure(StatusCode::NOT_FOUND, "NotFound", name);
        }
        let mut live = live.unwrap_or(json!({"metadata": {}}));
        let version = &body["metadata"]["resourceVersion"];
        if !version.is_null() && *version != live["metadata"]["resourceVersion"] {
            return failure(StatusCode::CONFLICT, "Conflict", name);
        }
        if is_status {
            merge(&body["status"], &mut live["status"]);
        } else {
            let mut body = body.clone();
            body.as_object_mut().unwrap().remove("status");
            merge(&body, &mut live);
        }
        ok(&self.store(id, live))
    }

    fn put(&mut self, id: &str, name: &str, is_status: bool, body: &Value) -> Answer {
        let Some(live) = self.objects.get(id) else { return failure(StatusCode::NOT_FOUND, "NotFound", name) };
        if live["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] {
            return failure(StatusCode::CONFLICT, "Conflict", name);
        }
        let (mut object, other) = if is_status { (live.clone(), body) } else { (body.clone(), live) };
        object["status"] = other["status"].clone();
        ok(&self.store(id, object))
    }

    fn delete(&mut self, id: &str, name: &str, options: &Value) -> Answer {
        let Some(mut object) = self.objects.get(id).cloned() else {
            return failure(StatusCode::NOT_FOUND, "NotFound", name);
        };
        let uid = &options["preconditions"]["uid"];
        if !uid.is_null() && *uid != object["metadata"]["uid"] {
            return failure(StatusCode::CONFLICT, "Conflict", name);
        }
        if object["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty()) {
            object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            return ok(&self.store(id, object));
        }
        self.objects.remove(id);
        (StatusCode::OK, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}).to_string())
    }

    /// Stores a differing object with a new resourceVersion. A new object gets a uid, a new CRD is established at once,
    /// and an object being deleted is removed with its last finalizer.
    fn store(&mut self, id: &str, mut object: Value) -> Value {
        if self.objects.get(id) == Some(&object) {
            return object;
        }
        self.version += 1;
        let before = self.objects.get(id);
        if before.is_none() {
            object["metadata"]["uid"] = json!(format!("uid-{}", self.version));
            object["metadata"]["generation"] = 0.into();
        }
        if before.map(|before| &before["spec"]) != Some(&object["spec"]) {
            object["metadata"]["generation"] =
                (object["metadata"]["generation"].as_i64().unwrap_or_default() + 1).into();
        }
        if id.starts_with("customresourcedefinitions/") {
            object["status"]["conditions"] = json!([{"type": "Established", "status": "True"}]);
        }
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let finalizers = object["metadata"]["finalizers"].as_array().map_or(0, Vec::len);
        if !object["metadata"]["deletionTimestamp"].is_null() && finalizers == 0 {
            self.objects.remove(id);
        } else {
            self.objects.insert(id.to_owned(), object.clone());
        }
        object
    }
}

fn ok(object: &Value) -> Answer {
    (StatusCode::OK, object.to_string())
}

fn failure(code: StatusCode, reason: &str, name: &str) -> Answer {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code.as_u16(),
        "message": reason, "details": {"name": name}});
    (code, status.to_string())
}

/// Applies a merge patch. Conditions are a map by type; other lists are atomic.
fn merge(patch: &Value, live: &mut Value) {
    match (patch, &mut *live) {
        (Value::Object(patch), Value::Object(live)) => {
            for (key, value) in patch {
                if value.is_null() {
                    live.remove(key);
                } else {
                    merge(value, live.entry(key).or_insert(Value::Null));
                }
            }
        }
        (Value::Object(patch), _) => {
            *live = json!({});
            merge(&Value::Object(patch.clone()), live);
        }
        (Value::Array(patch), Value::Array(live))
            if patch.iter().any(|item| item["lastTransitionTime"].is_string()) =>
        {
            let ours: BTreeSet<_> = patch.iter().map(|item| item["type"].to_string()).collect();
            live.retain(|item| item["type"] == "EventPath" && !ours.contains(&item["type"].to_string()));
            live.extend(patch.iter().cloned());
        }
        _ => *live = patch.clone(),
    }
}
