//! A fake API server of one runtime, for the tests: two kinds in one namespace, server-side apply with one applier, uids,
//! versions and preconditions, and a list of the calls made.

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
    /// What is refused, and how: a resource, an object, or a verb and an object.
    refused: BTreeMap<String, StatusCode>,
    absent: BTreeSet<String>,
    calls: Vec<String>,
    inventory_calls: Vec<&'static str>,
    version: u64,
    faults: Vec<Fault>,
    /// Calls since there are faults.
    at: usize,
    /// Nobody hears an answer any more.
    dead: bool,
    late: Vec<Late>,
    changes: BTreeMap<String, Told>,
    /// What somebody else did that makes channels point to nothing, of which the receiver knows nothing yet: templates that were
    /// taken away, release metas that were written.
    unknown: BTreeSet<String>,
    watched: bool,
}

/// Something is wrong with a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    /// Calls before it.
    pub(super) after: usize,
    /// When the server does what it asks for: never, or after so many further calls.
    pub(super) lands: Option<usize>,
    /// What the receiver hears.
    pub(super) heard: Heard,
}

/// What the receiver hears of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// Nothing ever again: it is dead. Calls that it makes beside this one do not land unless their own fault says so.
    Nothing,
    /// That the server is not available.
    Unavailable,
}

/// A call that lands later.
struct Late {
    after: usize,
    method: Method,
    uri: Uri,
    body: Vec<u8>,
}

/// How an agent tells of an object: the last change of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) uid: String,
    pub(super) resource_version: String,
    pub(super) change: Change,
}

/// Draws numbers, the same ones for the same seed.
struct Dice(u64);

impl Dice {
    fn draw(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

/// The server; clones are the same server.
#[derive(Clone, Default)]
pub(super) struct Fake(Arc<Mutex<State>>);

impl Fake {
    pub(super) fn client(&self) -> Client {
        let fake = self.clone();
        testing::client("default", move |parts, body| {
            let (status, answer) = fake.call(&parts.method, &parts.uri, body)?;
            Some((status, answer.to_string()))
        })
    }

    /// A client whose calls take their time, each another one: those of two clients come in any order.
    pub(super) fn slow_client(&self, seed: u64) -> Client {
        let (client, dice) = (self.client(), Arc::new(Mutex::new(Dice(seed))));
        let service = service_fn(move |request: Request<Body>| {
            let (client, turns) = (client.clone(), dice.lock().unwrap().draw(12));
            async move {
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
                client.send(request).await
            }
        });
        Client::new(service, "default")
    }

    /// One call, with whatever is wrong with it; `None`: no answer.
    fn call(&self, method: &Method, uri: &Uri, body: &[u8]) -> Option<(StatusCode, Value)> {
        self.land(|late| {
            late.after = late.after.saturating_sub(1);
            late.after == 0
        });
        let state = &mut *self.0.lock().unwrap();
        let at = state.at;
        state.at += 1;
        let fault = state.faults.iter().find(|fault| fault.after == at).copied();
        let Some(Fault { lands, heard, .. }) = fault else {
            return (!state.dead).then(|| state.watched(method, uri, body));
        };
        state.dead |= heard == Heard::Nothing;
        match lands {
            None => {}
            Some(0) => drop(state.watched(method, uri, body)),
            Some(after) => {
                state.late.push(Late { after, method: method.clone(), uri: uri.clone(), body: body.to_vec() });
            }
        }
        (!state.dead).then(|| failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable"))
    }

    /// What is wrong with the receiver's calls from now on. Whether it was dead.
    pub(super) fn faults(&self, faults: &[Fault]) -> bool {
        let state = &mut *self.0.lock().unwrap();
        (state.faults, state.at) = (faults.to_vec(), 0);
        std::mem::take(&mut state.dead)
    }

    /// Calls that are still on their way arrive, if they are due.
    fn land(&self, mut is_due: impl FnMut(&mut Late) -> bool) {
        let state = &mut *self.0.lock().unwrap();
        let due: Vec<_> = state.late.extract_if(.., |late| is_due(late)).collect();
        for Late { method, uri, body, .. } in due {
            // It was no call of now.
            let calls = state.calls.len();
            state.by_others(|state| drop(state.answer(&method, &uri, &body)));
            state.calls.truncate(calls);
        }
    }

    /// Every call that is still on its way arrives.
    pub(super) fn land_all(&self) {
        self.land(|_| true);
    }

    /// From now on no write of the receiver makes a channel point to nothing, unless by what somebody else did and it could not
    /// know; or that is not watched for a while.
    pub(super) fn watch(&self, watched: bool) {
        self.0.lock().unwrap().watched = watched;
    }

    /// What an agent tells: the last change of each object, whoever made it.
    pub(super) fn changes(&self) -> BTreeMap<String, Told> {
        self.0.lock().unwrap().changes.clone()
    }

    /// The receiver knows of these, as far as they tell how things are.
    pub(super) fn hears(&self, told: &BTreeMap<String, Told>) {
        let State { objects, unknown, .. } = &mut *self.0.lock().unwrap();
        let is_now = |id: &str, told: &Told| match objects.get(id) {
            Some(object) => object["metadata"]["resourceVersion"] == *told.resource_version,
            None => told.change == Change::Deleted,
        };
        unknown.retain(|id| !told.get(id).is_some_and(|told| is_now(id, told)));
    }

    /// The work for these has ended: they are not told again.
    pub(super) fn settle(&self, told: &BTreeMap<String, Told>) {
        self.0.lock().unwrap().changes.retain(|id, change| told.get(id) != Some(change));
    }

    /// Somebody does something of which the agent does not tell.
    pub(super) fn unheard(&self, deed: impl FnOnce(&Self)) {
        let before = self.changes();
        deed(self);
        self.0.lock().unwrap().changes = before;
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
        self.0.lock().unwrap().by_others(|state| drop(state.take(id)));
    }

    /// Writes of this object, or of all of this resource if it has no slash, are refused from now on, or not any more.
    pub(super) fn refuse(&self, id: &str, refused: bool) {
        self.answers(id, refused.then_some(StatusCode::FORBIDDEN));
    }

    /// The same with another status, also for `<verb> <resource>/<name>` alone; `None`: as it shall.
    pub(super) fn answers(&self, what: &str, status: Option<StatusCode>) {
        let refused = &mut self.0.lock().unwrap().refused;
        match status {
            Some(status) => drop(refused.insert(what.to_owned(), status)),
            None => drop(refused.remove(what)),
        }
    }

    /// Nothing is refused any more.
    pub(super) fn refuse_nothing(&self) {
        self.0.lock().unwrap().refused.clear();
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
}

impl State {
    /// A call of the receiver, of which no channel may come to point to nothing.
    fn watched(&mut self, method: &Method, uri: &Uri, body: &[u8]) -> (StatusCode, Value) {
        let before = dangling(&self.objects);
        let answer = self.answer(method, uri, body);
        for (meta, template) in dangling(&self.objects).difference(&before).filter(|_| self.watched) {
            let excused = self.unknown.contains(template) || self.unknown.contains(meta);
            assert!(excused, "{method} {uri}: {meta} points to {template}, which is not there");
        }
        answer
    }

    /// What somebody else does, the receiver does not know of.
    fn by_others(&mut self, deed: impl FnOnce(&mut Self)) {
        let before = self.objects.clone();
        deed(self);
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
        let written = [id, resource].into_iter().find_map(|what| self.refused.get(what));
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
        (StatusCode::OK, self.take(id).unwrap())
    }

    /// Takes an object away, with all that is known of it.
    fn take(&mut self, id: &str) -> Option<Value> {
        self.applied.remove(id);
        let taken = self.objects.remove(id)?;
        self.tell(id, Change::Deleted);
        Some(taken)
    }

    fn tell(&mut self, id: &str, change: Change) {
        if id == INVENTORY {
            return;
        }
        let metadata = self.objects.get(id).map_or(&Value::Null, |object| &object["metadata"]);
        let text = |member: &str| metadata[member].as_str().unwrap_or_default().to_owned();
        let told = Told { uid: text("uid"), resource_version: text("resourceVersion"), change };
        self.changes.insert(id.to_owned(), told);
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
        self.tell(id, Change::Spec);
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

/// The templates that channels point to and that are not there, each with the release meta.
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
