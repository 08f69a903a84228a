//! Fake API server of one runtime: two kinds in one namespace, server-side apply with one field manager, uids,
//! resourceVersions, preconditions, and a record of the calls made.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use http::{Method, Request, StatusCode, Uri};
use kube::{Client, client::Body};
use serde_json::{Map, Value, json};
use tidewatch_shared::event::Change;
use tower::service_fn;

use crate::testing;

const PREFIX: &str = "/apis/operator.kyma-project.io/v1beta2/namespaces/kyma-system/";
const INVENTORIES: &str = "/api/v1/namespaces/kyma-system/configmaps";
const INVENTORY: &str = "configmaps/tidewatch-catalog";

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    applied: BTreeMap<String, Value>,
    /// Status of refused calls, by resource, object, or verb and object.
    refused: BTreeMap<String, StatusCode>,
    absent: BTreeSet<String>,
    calls: Vec<String>,
    inventory_calls: Vec<&'static str>,
    version: u64,
    faults: Vec<Fault>,
    /// Number of calls since the faults were set.
    at: usize,
    /// The receiver has crashed: no response reaches it.
    dead: bool,
    delayed: Vec<DelayedCall>,
    changes: BTreeMap<String, AgentEvent>,
    /// Foreign changes that leave channels dangling and that the receiver has not observed yet: deleted templates and
    /// written release metas.
    unknown: BTreeSet<String>,
    watched: bool,
}

/// Fault of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    /// Number of calls before the faulty one.
    pub(super) after: usize,
    /// Number of further calls after which the server executes the call; `None` if it never does.
    pub(super) lands: Option<usize>,
    /// Response that the receiver gets.
    pub(super) response: Response,
}

/// Response to a faulty call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Response {
    /// None, ever again: the receiver crashes. Concurrent calls are not executed unless their own fault specifies it.
    Lost,
    /// 503 Service Unavailable.
    Unavailable,
}

/// A call that is executed later.
struct DelayedCall {
    after: usize,
    method: Method,
    uri: Uri,
    body: Vec<u8>,
}

/// Last change of an object, as an agent reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AgentEvent {
    pub(super) uid: String,
    pub(super) resource_version: String,
    pub(super) change: Change,
}

/// Linear congruential generator: equal seeds give equal numbers.
struct SeededRng(u64);

impl SeededRng {
    fn draw(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

/// The server; clones share its state.
#[derive(Clone, Default)]
pub(super) struct FakeRuntime(Arc<Mutex<State>>);

impl FakeRuntime {
    pub(super) fn client(&self) -> Client {
        let fake = self.clone();
        testing::client("default", move |parts, body| {
            let (status, answer) = fake.call(&parts.method, &parts.uri, body)?;
            Some((status, answer.to_string()))
        })
    }

    /// Client that delays each call by a random number of yields, so that the calls of two clients interleave in any
    /// order.
    pub(super) fn slow_client(&self, seed: u64) -> Client {
        let (client, rng) = (self.client(), Arc::new(Mutex::new(SeededRng(seed))));
        let service = service_fn(move |request: Request<Body>| {
            let (client, turns) = (client.clone(), rng.lock().unwrap().draw(12));
            async move {
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
                client.send(request).await
            }
        });
        Client::new(service, "default")
    }

    /// Executes one call with its fault, if any. Returns `None` if there is no response.
    fn call(&self, method: &Method, uri: &Uri, body: &[u8]) -> Option<(StatusCode, Value)> {
        self.land(|delayed| {
            delayed.after = delayed.after.saturating_sub(1);
            delayed.after == 0
        });
        let state = &mut *self.0.lock().unwrap();
        let at = state.at;
        state.at += 1;
        let fault = state.faults.iter().find(|fault| fault.after == at).copied();
        let Some(Fault { lands, response, .. }) = fault else {
            return (!state.dead).then(|| state.watched(method, uri, body));
        };
        state.dead |= response == Response::Lost;
        match lands {
            None => {}
            Some(0) => drop(state.watched(method, uri, body)),
            Some(after) => {
                state.delayed.push(DelayedCall {
                    after,
                    method: method.clone(),
                    uri: uri.clone(),
                    body: body.to_vec(),
                });
            }
        }
        (!state.dead).then(|| failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable"))
    }

    /// Sets the faults of the following calls. Returns whether the receiver had crashed.
    pub(super) fn faults(&self, faults: &[Fault]) -> bool {
        let state = &mut *self.0.lock().unwrap();
        (state.faults, state.at) = (faults.to_vec(), 0);
        std::mem::take(&mut state.dead)
    }

    /// Executes the delayed calls that are due.
    fn land(&self, mut is_due: impl FnMut(&mut DelayedCall) -> bool) {
        let state = &mut *self.0.lock().unwrap();
        let due: Vec<_> = state.delayed.extract_if(.., |delayed| is_due(delayed)).collect();
        for DelayedCall { method, uri, body, .. } in due {
            // A delayed call is not recorded again.
            let calls = state.calls.len();
            state.by_others(|state| drop(state.answer(&method, &uri, &body)));
            state.calls.truncate(calls);
        }
    }

    /// Executes all delayed calls.
    pub(super) fn land_all(&self) {
        self.land(|_| true);
    }

    /// Enables or disables the check that no write of the receiver leaves a channel dangling, unless a foreign change
    /// that it could not know of is the cause.
    pub(super) fn watch(&self, watched: bool) {
        self.0.lock().unwrap().watched = watched;
    }

    /// Unsettled events: the last change of each object, own or foreign.
    pub(super) fn changes(&self) -> BTreeMap<String, AgentEvent> {
        self.0.lock().unwrap().changes.clone()
    }

    /// Records that the receiver has observed these events, as far as they match the current state.
    pub(super) fn observe(&self, events: &BTreeMap<String, AgentEvent>) {
        let State { objects, unknown, .. } = &mut *self.0.lock().unwrap();
        let is_now = |id: &str, event: &AgentEvent| match objects.get(id) {
            Some(object) => object["metadata"]["resourceVersion"] == *event.resource_version,
            None => event.change == Change::Deleted,
        };
        unknown.retain(|id| !events.get(id).is_some_and(|event| is_now(id, event)));
    }

    /// Settles these events: they are not sent again.
    pub(super) fn settle(&self, events: &BTreeMap<String, AgentEvent>) {
        self.0.lock().unwrap().changes.retain(|id, change| events.get(id) != Some(change));
    }

    /// Runs a foreign change that the agent does not report.
    pub(super) fn without_event(&self, action: impl FnOnce(&Self)) {
        let before = self.changes();
        action(self);
        self.0.lock().unwrap().changes = before;
    }

    /// Takes the recorded calls on the inventory.
    pub(super) fn inventory_calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap().inventory_calls)
    }

    /// Lines of the stored inventory.
    pub(super) fn inventory(&self) -> Vec<String> {
        let object = self.object(INVENTORY).unwrap_or_default();
        object["data"]["objects"].as_str().unwrap_or_default().lines().map(str::to_owned).collect()
    }

    pub(super) fn objects(&self) -> BTreeMap<String, Value> {
        let mut objects = self.0.lock().unwrap().objects.clone();
        objects.remove(INVENTORY);
        objects
    }

    /// Takes the recorded calls, in order: `<verb> <resource>/<name>`.
    pub(super) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().calls)
    }

    /// Edits an object as a foreign field manager; `id` is `<resource>/<name>`.
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
        self.0.lock().unwrap().by_others(|state| drop(state.take(id)));
    }

    /// Refuses writes of this object, or of the whole resource if `id` has no slash; or stops refusing them.
    pub(super) fn refuse(&self, id: &str, refused: bool) {
        self.respond_with(id, refused.then_some(StatusCode::FORBIDDEN));
    }

    /// Responds with this status to writes of the target, or only to one verb if it is `<verb> <resource>/<name>`;
    /// `None` restores it.
    pub(super) fn respond_with(&self, target: &str, status: Option<StatusCode>) {
        let refused = &mut self.0.lock().unwrap().refused;
        match status {
            Some(status) => drop(refused.insert(target.to_owned(), status)),
            None => drop(refused.remove(target)),
        }
    }

    /// Accepts all calls again.
    pub(super) fn refuse_nothing(&self) {
        self.0.lock().unwrap().refused.clear();
    }

    /// Stops or restarts serving a resource.
    pub(super) fn unserve(&self, resource: &str, absent: bool) {
        let set = &mut self.0.lock().unwrap().absent;
        if absent {
            set.insert(resource.to_owned())
        } else {
            set.remove(resource)
        };
    }
}

impl State {
    /// Executes a call of the receiver and checks that it leaves no channel dangling.
    fn watched(&mut self, method: &Method, uri: &Uri, body: &[u8]) -> (StatusCode, Value) {
        let before = dangling(&self.objects);
        let answer = self.answer(method, uri, body);
        for (meta, template) in dangling(&self.objects).difference(&before).filter(|_| self.watched) {
            let excused = self.unknown.contains(template) || self.unknown.contains(meta);
            assert!(excused, "{method} {uri}: {meta} points to {template}, which is not there");
        }
        answer
    }

    /// Runs a foreign change and records it as not observed by the receiver.
    fn by_others(&mut self, action: impl FnOnce(&mut Self)) {
        let before = self.objects.clone();
        action(self);
        let is_gone = |id: &String| id.starts_with("moduletemplates/") && !self.objects.contains_key(id);
        self.unknown.extend(before.keys().filter(|id| is_gone(id)).cloned());
        let is_other = |(id, object): &(&String, &Value)| {
            id.starts_with("modulereleasemetas/") && before.get(*id) != Some(*object)
        };
        self.unknown.extend(self.objects.iter().filter(is_other).map(|(id, _)| id.clone()));
    }

    fn answer(&mut self, method: &Method, uri: &Uri, body: &[u8]) -> (StatusCode, Value) {
        if uri.path().starts_with(INVENTORIES) {
            return self.inventory(method, body);
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
        self.calls.push(format!("{verb} {id}"));
        if self.absent.contains(&resource) {
            return failure(StatusCode::NOT_FOUND, "NotFound");
        }
        if matches!(verb, "apply" | "put") {
            assert!(query.contains("fieldManager=catalog-sync"), "{query}");
        }
        if let Some(status) = self.refuses(verb, &id, &resource) {
            return failure(status, status.canonical_reason().unwrap());
        }
        match verb {
            "list" => self.list(&resource, query),
            "get" => self.objects.get(&id).map_or_else(not_found, |object| (StatusCode::OK, object.clone())),
            "apply" => {
                assert!(query.contains("force=true"), "{query}");
                (StatusCode::OK, self.apply(&id, serde_json::from_slice(body).unwrap()))
            }
            "put" => self.put(&id, serde_json::from_slice(body).unwrap()),
            _ => self.delete(&id, &serde_json::from_slice(body).unwrap()),
        }
    }

    fn refuses(&self, verb: &str, id: &str, resource: &str) -> Option<StatusCode> {
        let written = [id, resource].into_iter().find_map(|target| self.refused.get(target));
        let written = written.filter(|_| !matches!(verb, "list" | "get"));
        written.or_else(|| self.refused.get(&format!("{verb} {id}"))).copied()
    }

    fn inventory(&mut self, method: &Method, body: &[u8]) -> (StatusCode, Value) {
        let call = match *method {
            Method::GET => "get",
            Method::POST => "create",
            Method::PUT => "replace",
            Method::DELETE => "delete",
            _ => panic!("unexpected {method}"),
        };
        self.inventory_calls.push(call);
        if let Some(status) = self.refused.get("configmaps").filter(|_| call != "get") {
            return failure(*status, status.canonical_reason().unwrap());
        }
        match (call, self.objects.get(INVENTORY)) {
            ("create", None) => (StatusCode::CREATED, self.store(INVENTORY, serde_json::from_slice(body).unwrap())),
            ("create", Some(_)) => failure(StatusCode::CONFLICT, "AlreadyExists"),
            (_, None) => not_found(),
            ("get", Some(object)) => (StatusCode::OK, object.clone()),
            ("replace", _) => self.put(INVENTORY, serde_json::from_slice(body).unwrap()),
            (_, Some(_)) => (StatusCode::OK, self.take(INVENTORY).unwrap()),
        }
    }

    /// Returns pages of two objects, so that every list is continued.
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
        (StatusCode::OK, self.take(id).unwrap())
    }

    /// Removes an object and its applied state.
    fn take(&mut self, id: &str) -> Option<Value> {
        self.applied.remove(id);
        let taken = self.objects.remove(id)?;
        self.record_event(id, Change::Deleted);
        Some(taken)
    }

    fn record_event(&mut self, id: &str, change: Change) {
        if id == INVENTORY {
            return;
        }
        let metadata = self.objects.get(id).map_or(&Value::Null, |object| &object["metadata"]);
        let text = |member: &str| metadata[member].as_str().unwrap_or_default().to_owned();
        let event = AgentEvent { uid: text("uid"), resource_version: text("resourceVersion"), change };
        self.changes.insert(id.to_owned(), event);
    }

    /// Stores a changed object with a new resourceVersion; a new object gets a new uid.
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
        self.record_event(id, Change::Spec);
        self.unknown.remove(id);
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

/// Pairs of a release meta and a missing template that one of its channels points to.
fn dangling(objects: &BTreeMap<String, Value>) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for (id, object) in objects {
        let Some(module) = id.strip_prefix("modulereleasemetas/") else { continue };
        for entry in object["spec"]["channels"].as_array().into_iter().flatten() {
            let template = format!("moduletemplates/{module}-{}", entry["version"].as_str().unwrap());
            if !objects.contains_key(&template) {
                found.insert((id.clone(), template));
            }
        }
    }
    found
}

/// Server-side apply of one field manager: sets the applied fields, removes the ones applied before and no longer, and
/// keeps the rest. Lists of channels are maps by `channel`; other lists are atomic.
fn merge(before: &Value, now: &Value, live: &mut Value) {
    match (now, &mut *live) {
        (Value::Object(now), Value::Object(live)) => {
            let previous = before.as_object().into_iter().flatten();
            for key in previous.map(|(key, _)| key).filter(|key| !now.contains_key(*key)) {
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
            // Applied entries come first and in their order, foreign ones follow.
            let order = now_items.iter().map(|item| item["channel"].as_str().unwrap().to_owned());
            let Value::Object(mut merged) = merged else { unreachable!("made of an object") };
            let mut items: Vec<_> = order.filter_map(|channel| merged.remove(&channel)).collect();
            items.extend(merged.into_iter().map(|(_, item)| item));
            *live_items = items;
        }
        _ => *live = now.clone(),
    }
}
