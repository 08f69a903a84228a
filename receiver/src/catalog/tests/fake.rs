//! A fake API server of one runtime, for the tests: two kinds in one namespace, server-side apply with one applier, uids,
//! versions and preconditions, and a list of the calls made.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use http::{Method, StatusCode};
use kube::Client;
use serde_json::{Map, Value, json};

use crate::testing;

const PREFIX: &str = "/apis/operator.kyma-project.io/v1beta2/namespaces/kyma-system/";
const INVENTORIES: &str = "/api/v1/namespaces/kyma-system/configmaps";
const INVENTORY: &str = "configmaps/tidewatch-catalog";

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    applied: BTreeMap<String, Value>,
    refused: BTreeSet<String>,
    absent: BTreeSet<String>,
    calls: Vec<String>,
    inventory_calls: Vec<&'static str>,
    version: u64,
    crash: Option<Crash>,
    /// Checked after every write of ours.
    invariant: Option<fn(&BTreeMap<String, Value>)>,
}

/// The receiver is killed: a call is the last, and its answer is never seen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crash {
    /// Calls before it.
    pub(super) after: usize,
    /// Whether the server has done what it asks for.
    pub(super) lands: bool,
}

/// The server; clones are the same server.
#[derive(Clone, Default)]
pub(super) struct Fake(Arc<Mutex<State>>);

impl Fake {
    pub(super) fn client(&self) -> Client {
        let fake = self.clone();
        testing::client("default", move |parts, body| {
            let crash = fake.next();
            if crash.is_some_and(|lands| !lands) {
                return None;
            }
            let (status, answer) = fake.answer(&parts.method, &parts.uri, body);
            crash.is_none().then(|| (status, answer.to_string()))
        })
    }

    /// Whether this call is never answered, and then whether it lands.
    fn next(&self) -> Option<bool> {
        let crash = &mut self.0.lock().unwrap().crash;
        let Crash { after, lands } = (*crash)?;
        match after.checked_sub(1) {
            Some(after) => {
                *crash = Some(Crash { after, lands });
                None
            }
            None => {
                // Nothing of that process lands after it.
                *crash = Some(Crash { after: 0, lands: false });
                Some(lands)
            }
        }
    }

    /// The receiver's next calls are its last; `None`: it lives.
    pub(super) fn crash(&self, crash: Option<Crash>) {
        self.0.lock().unwrap().crash = crash;
    }

    /// From now on this must hold after each write of the receiver.
    pub(super) fn always(&self, invariant: fn(&BTreeMap<String, Value>)) {
        self.0.lock().unwrap().invariant = Some(invariant);
    }

    /// The calls about the inventory since the last time.
    pub(super) fn inventory_calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap().inventory_calls)
    }

    /// The inventory's lines.
    pub(super) fn inventory(&self) -> Vec<String> {
        let object = self.object(INVENTORY).unwrap_or_default();
        object["data"]["objects"].as_str().unwrap_or_default().lines().map(str::to_owned).collect()
    }

    pub(super) fn objects(&self) -> BTreeMap<String, Value> {
        let mut objects = self.0.lock().unwrap().objects.clone();
        objects.remove(INVENTORY);
        objects
    }

    /// The calls since the last time, in order: `<verb> <resource>/<name>`.
    pub(super) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().calls)
    }

    /// An object as somebody else writes it, addressed as `<resource>/<name>`.
    pub(super) fn edit(&self, id: &str, change: impl FnOnce(&mut Value)) {
        let state = &mut *self.0.lock().unwrap();
        let (resource, name) = id.split_once('/').unwrap();
        let kind = if resource == "moduletemplates" { "ModuleTemplate" } else { "ModuleReleaseMeta" };
        let mut object = state.objects.get(id).cloned().unwrap_or_else(|| {
            json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind,
                   "metadata": {"name": name, "namespace": "kyma-system", "managedFields": [{"manager": "user"}]}})
        });
        change(&mut object);
        state.store(id, object);
    }

    pub(super) fn object(&self, id: &str) -> Option<Value> {
        self.0.lock().unwrap().objects.get(id).cloned()
    }

    pub(super) fn ids(&self) -> Vec<String> {
        self.objects().into_keys().collect()
    }

    pub(super) fn remove(&self, id: &str) {
        self.0.lock().unwrap().objects.remove(id);
    }

    /// Writes of this object, or of all of this resource if it has no slash, are refused from now on, or not any more.
    pub(super) fn refuse(&self, id: &str, refused: bool) {
        let set = &mut self.0.lock().unwrap().refused;
        if refused {
            set.insert(id.to_owned())
        } else {
            set.remove(id)
        };
    }

    /// A resource that is not served.
    pub(super) fn unserve(&self, resource: &str, absent: bool) {
        let set = &mut self.0.lock().unwrap().absent;
        if absent {
            set.insert(resource.to_owned())
        } else {
            set.remove(resource)
        };
    }

    fn answer(&self, method: &Method, uri: &http::Uri, body: &[u8]) -> (StatusCode, Value) {
        let state = &mut *self.0.lock().unwrap();
        if uri.path().starts_with(INVENTORIES) {
            return state.inventory(method, body);
        }
        let id = uri.path().strip_prefix(PREFIX).unwrap_or_else(|| panic!("unexpected path {uri}")).to_owned();
        let query = uri.query().unwrap_or_default();
        let resource = id.split('/').next().unwrap().to_owned();
        let verb = match (method, id.contains('/')) {
            (&Method::GET, false) => "list",
            (&Method::GET, true) => "get",
            (&Method::PATCH, _) => "apply",
            (&Method::PUT, _) => "put",
            (&Method::DELETE, _) => "delete",
            other => panic!("unexpected {other:?}"),
        };
        state.calls.push(format!("{verb} {id}"));
        if state.absent.contains(&resource) {
            return failure(StatusCode::NOT_FOUND, "NotFound");
        }
        if matches!(verb, "apply" | "put") {
            assert!(query.contains("fieldManager=catalog-sync"), "{query}");
        }
        if !matches!(verb, "list" | "get") && (state.refused.contains(&id) || state.refused.contains(&resource)) {
            return failure(StatusCode::FORBIDDEN, "Forbidden");
        }
        let answer = match verb {
            "list" => state.list(&resource, query),
            "get" => state.objects.get(&id).map_or_else(not_found, |object| (StatusCode::OK, object.clone())),
            "apply" => {
                assert!(query.contains("force=true"), "{query}");
                (StatusCode::OK, state.apply(&id, serde_json::from_slice(body).unwrap()))
            }
            "put" => state.put(&id, serde_json::from_slice(body).unwrap()),
            _ => state.delete(&id, &serde_json::from_slice(body).unwrap()),
        };
        if let Some(invariant) = state.invariant {
            invariant(&state.objects);
        }
        answer
    }
}

impl State {
    fn inventory(&mut self, method: &Method, body: &[u8]) -> (StatusCode, Value) {
        let call = match *method {
            Method::GET => "get",
            Method::POST => "create",
            Method::PUT => "replace",
            Method::DELETE => "delete",
            _ => panic!("unexpected {method}"),
        };
        self.inventory_calls.push(call);
        if call != "get" && self.refused.contains("configmaps") {
            return failure(StatusCode::FORBIDDEN, "Forbidden");
        }
        match (call, self.objects.get(INVENTORY)) {
            ("create", None) => (StatusCode::CREATED, self.store(INVENTORY, serde_json::from_slice(body).unwrap())),
            ("create", Some(_)) => failure(StatusCode::CONFLICT, "AlreadyExists"),
            (_, None) => not_found(),
            ("get", Some(object)) => (StatusCode::OK, object.clone()),
            ("replace", _) => self.put(INVENTORY, serde_json::from_slice(body).unwrap()),
            (_, Some(_)) => (StatusCode::OK, self.objects.remove(INVENTORY).unwrap()),
        }
    }

    /// Pages of two, so that every list is continued.
    fn list(&self, resource: &str, query: &str) -> (StatusCode, Value) {
        let all: Vec<_> = self.objects.iter().filter(|(id, _)| id.starts_with(&format!("{resource}/"))).collect();
        let token = query.split('&').find_map(|pair| pair.strip_prefix("continue="));
        let from: usize = token.map_or(0, |token| token.parse().unwrap());
        let items: Vec<_> = all.iter().skip(from).take(2).map(|(_, object)| (*object).clone()).collect();
        let next = if from + 2 < all.len() { json!((from + 2).to_string()) } else { Value::Null };
        let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {"continue": next}, "items": items});
        (StatusCode::OK, list)
    }

    fn apply(&mut self, id: &str, body: Value) -> Value {
        let before = self.applied.insert(id.to_owned(), body.clone()).unwrap_or(Value::Null);
        let mut object = self.objects.get(id).cloned().unwrap_or_else(|| json!({"metadata": {}}));
        merge(&before, &body, &mut object);
        let managers = object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
        let mut managers: Vec<_> = managers.into_iter().filter(|entry| entry["manager"] != "catalog-sync").collect();
        managers.push(json!({"manager": "catalog-sync", "operation": "Apply"}));
        object["metadata"]["managedFields"] = managers.into();
        self.store(id, object)
    }

    fn put(&mut self, id: &str, object: Value) -> (StatusCode, Value) {
        let Some(current) = self.objects.get(id) else { return not_found() };
        if current["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            return failure(StatusCode::CONFLICT, "Conflict");
        }
        (StatusCode::OK, self.store(id, object))
    }

    fn delete(&mut self, id: &str, options: &Value) -> (StatusCode, Value) {
        let Some(object) = self.objects.get(id) else { return not_found() };
        if object["metadata"]["uid"] != options["preconditions"]["uid"] {
            return failure(StatusCode::CONFLICT, "Conflict");
        }
        self.applied.remove(id);
        (StatusCode::OK, self.objects.remove(id).unwrap())
    }

    /// Stores what differs, with a new version; a new object has a uid of its own.
    fn store(&mut self, id: &str, mut object: Value) -> Value {
        if self.objects.get(id) == Some(&object) {
            return object;
        }
        self.version += 1;
        if !self.objects.contains_key(id) {
            object["metadata"]["uid"] = json!(format!("uid-{}", self.version));
        }
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(id.to_owned(), object.clone());
        object
    }
}

fn failure(code: StatusCode, reason: &str) -> (StatusCode, Value) {
    (
        code,
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code.as_u16(), "message": reason}),
    )
}

fn not_found() -> (StatusCode, Value) {
    failure(StatusCode::NOT_FOUND, "NotFound")
}

/// What one applier's server-side apply does: sets what it says, removes what it said before and no longer says, and leaves
/// the rest. Lists of channels are maps by `channel`; other lists are atomic.
fn merge(before: &Value, now: &Value, live: &mut Value) {
    match (now, &mut *live) {
        (Value::Object(now), Value::Object(live)) => {
            let said = before.as_object().into_iter().flatten();
            for key in said.map(|(key, _)| key).filter(|key| !now.contains_key(*key)) {
                live.remove(key);
            }
            for (key, value) in now {
                merge(&before[key.as_str()], value, live.entry(key).or_insert(Value::Null));
            }
        }
        (Value::Array(now_items), Value::Array(live_items))
            if now_items.iter().all(|item| item["channel"].is_string()) =>
        {
            let by_channel = |items: &[Value]| -> Map<String, Value> {
                items.iter().map(|item| (item["channel"].as_str().unwrap().to_owned(), item.clone())).collect()
            };
            let before = Value::Object(by_channel(before.as_array().map_or(&[], Vec::as_slice)));
            let mut merged = Value::Object(by_channel(live_items));
            merge(&before, &Value::Object(by_channel(now_items)), &mut merged);
            // Applied entries come first and in their order, others' follow.
            let order = now_items.iter().map(|item| item["channel"].as_str().unwrap().to_owned());
            let Value::Object(mut merged) = merged else { unreachable!("made of an object") };
            let mut items: Vec<_> = order.filter_map(|channel| merged.remove(&channel)).collect();
            items.extend(merged.into_iter().map(|(_, item)| item));
            *live_items = items;
        }
        _ => *live = now.clone(),
    }
}
