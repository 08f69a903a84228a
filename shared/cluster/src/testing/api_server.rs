//! Fake API server for unit tests: objects of any kind, with resourceVersions, uids, generations, finalizers,
//! preconditions, server-side apply by field manager, watches, discovery, a distance, injected faults, and a record of the
//! requests.

mod apply;
mod discovery;
mod ownership;
mod watch;

use std::{collections::BTreeMap, convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, StatusCode, request::Parts};
use http_body_util::Full;
use kube::{Client, client::Body};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::Instant;
use tower::Service;

pub use self::apply::merge;

/// Status and body of a response.
pub type Response = (StatusCode, String);

/// Fault of all requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// All requests are executed and answered.
    #[default]
    None,
    /// No request is executed, and none gets a response.
    Unresponsive,
    /// Writes are executed, and no response arrives.
    LostResponses,
}

/// Field manager of a server-side apply.
struct Manager {
    name: String,
    is_forced: bool,
}

/// Cause of an invalid object: reason, field and message.
pub type Cause = (&'static str, &'static str, &'static str);

/// Fills defaults into an object of a kind, and returns why it is invalid. It gets the object before the write, too.
pub type Admit = fn(before: &Value, object: &mut Value) -> Vec<Cause>;

/// Id of an object, and a change of it.
type ConcurrentWrite = (String, fn(&mut Value));

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    /// Last apply of each field manager, by object and manager.
    applied: BTreeMap<(String, String), Value>,
    /// Requests with the times of their arrival.
    calls: Vec<(Instant, String)>,
    round_trip: Duration,
    fault: Fault,
    refused: BTreeMap<String, StatusCode>,
    /// Messages of refusals, by call.
    messages: BTreeMap<String, String>,
    unserved: BTreeMap<String, bool>,
    admits: BTreeMap<String, Admit>,
    /// Writes until the server responds no more.
    writes_left: Option<usize>,
    /// Concurrent writes, each just before a request.
    meanwhile: BTreeMap<String, ConcurrentWrite>,
    version: u64,
    /// Changes for watches.
    log: watch::ChangeLog,
    served_by_definition: bool,
    establishes_late: bool,
    page_size: Option<usize>,
}

/// The server. Clones share its state. Objects are named `<plural>/<name>`: one namespace is enough for the tests.
#[derive(Clone, Default)]
pub struct FakeApiServer(Arc<Mutex<State>>);

impl FakeApiServer {
    /// API server of a runtime: custom resources are served only while their definition exists.
    pub fn runtime() -> Self {
        let server = Self::default();
        server.0.lock().served_by_definition = true;
        server
    }

    /// Splits every list into pages of this size.
    pub fn with_pages_of(self, objects: usize) -> Self {
        self.0.lock().page_size = Some(objects);
        self
    }

    /// Client of the server.
    pub fn client(&self) -> Client {
        Client::new(self.service(), "kcp-system")
    }

    /// Service of a client's requests, for one with layers before it.
    pub fn service(
        &self,
    ) -> impl Service<Request<Body>, Response = http::Response<Full<Bytes>>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + 'static {
        watch::service(self.clone())
    }

    /// Executes a request that is not a watch, unless a fault prevents it. Returns `None` if the client gets no response.
    pub fn respond(&self, parts: &Parts, body: &[u8]) -> Option<Response> {
        let state = &mut *self.0.lock();
        if state.fault == Fault::Unresponsive {
            return None;
        }
        match state.writes_left.as_mut().filter(|_| parts.method != Method::GET) {
            Some(0) => return None,
            Some(left) => *left -= 1,
            None => {}
        }
        let response = state.respond(parts, &serde_json::from_slice(body).unwrap_or(Value::Null));
        (state.fault == Fault::None || parts.method == Method::GET).then_some(response)
    }

    /// Executes so many writes, and responds to no further one; `None` ends that.
    pub fn cut_after(&self, writes: impl Into<Option<usize>>) {
        self.0.lock().writes_left = writes.into();
    }

    /// Returns true if a write got no response because of [`Self::cut_after`], or would get none.
    pub fn is_cut(&self) -> bool {
        self.0.lock().writes_left == Some(0)
    }

    /// Fills defaults into the objects of a kind, and refuses those that are invalid.
    pub fn admit(&self, plural: &str, admit: Admit) {
        self.0.lock().admits.insert(plural.to_owned(), admit);
    }

    /// Sets the fault of all further requests.
    pub fn set_fault(&self, fault: Fault) {
        self.0.lock().fault = fault;
    }

    /// Takes the recorded requests, in order: `<METHOD> <plural>/<name>`, without the name for lists and creates, and
    /// `GET <path>` for discovery.
    pub fn calls(&self) -> Vec<String> {
        self.timed_calls().into_iter().map(|(_, call)| call).collect()
    }

    /// As [`Self::calls`], with the times at which the requests arrived: half a round trip after they were sent.
    pub fn timed_calls(&self) -> Vec<(Instant, String)> {
        std::mem::take(&mut self.0.lock().calls)
    }

    /// Sets the distance to the clients: the time that request and response need together. With a paused clock, the elapsed
    /// time divided by it is the number of requests in a row.
    pub fn set_round_trip(&self, round_trip: Duration) {
        self.0.lock().round_trip = round_trip;
    }

    /// Establishes new CRDs by their first read, not by the write that creates them.
    pub fn establish_late(&self) {
        self.0.lock().establishes_late = true;
    }

    /// Takes the recorded requests, and returns those that are not reads.
    pub fn writes(&self) -> Vec<String> {
        self.calls().into_iter().filter(|call| !call.starts_with("GET")).collect()
    }

    /// Changes or creates an object like another writer.
    pub fn edit(&self, id: &str, change: impl FnOnce(&mut Value)) {
        let state = &mut *self.0.lock();
        let mut object = state.objects.get(id).cloned().unwrap_or(Value::Null);
        change(&mut object);
        state.store(id, object);
    }

    /// An object, by its id.
    pub fn object(&self, id: &str) -> Option<Value> {
        self.0.lock().objects.get(id).cloned()
    }

    /// All objects, by id.
    pub fn objects(&self) -> BTreeMap<String, Value> {
        self.0.lock().objects.clone()
    }

    /// Removes an object, whatever finalizers it has.
    pub fn remove(&self, id: &str) -> Option<Value> {
        self.0.lock().take(id)
    }

    /// All objects of a kind.
    pub fn all(&self, plural: &str) -> Vec<Value> {
        self.0.lock().of_kind(plural).cloned().collect()
    }

    /// Fails these requests with a status: those of one call, in the notation of [`FakeApiServer::calls`], or with the
    /// verb `WRITE` all writes of an object or of a kind. The response names no object. `None` accepts them again.
    pub fn refuse(&self, call: &str, status: impl Into<Option<u16>>) {
        let refused = &mut self.0.lock().refused;
        match status.into() {
            Some(status) => drop(refused.insert(call.to_owned(), StatusCode::from_u16(status).unwrap())),
            None => drop(refused.remove(call)),
        }
    }

    /// As [`Self::refuse`] for one call, with a message.
    pub fn refuse_saying(&self, call: &str, status: u16, message: &str) {
        self.refuse(call, status);
        self.0.lock().messages.insert(call.to_owned(), message.to_owned());
    }

    /// Accepts all requests again.
    pub fn refuse_nothing(&self) {
        self.0.lock().refused.clear();
    }

    /// Stops or restarts serving a kind.
    pub fn unserve(&self, plural: &str, unserved: bool) {
        self.0.lock().unserved.insert(plural.to_owned(), unserved);
    }

    /// Lets another writer change an object just before the next such request.
    pub fn meanwhile(&self, call: &str, id: &str, change: fn(&mut Value)) {
        self.0.lock().meanwhile.insert(call.to_owned(), (id.to_owned(), change));
    }
}

impl State {
    fn respond(&mut self, parts: &Parts, body: &Value) -> Response {
        if let Some(response) = self.discover(parts.uri.path()) {
            return response;
        }
        let (id, is_status) = object_id(parts.uri.path());
        let call = format!("{} {id}{}", parts.method, if is_status { "/status" } else { "" });
        self.record(call.clone());
        if let Some((id, change)) = self.meanwhile.remove(&call) {
            let mut object = self.objects.get(&id).cloned().unwrap_or(Value::Null);
            change(&mut object);
            self.store(&id, object);
        }
        let (plural, name) = id.split_once('/').map_or((&*id, None), |(plural, name)| (plural, Some(name)));
        if !self.serves(plural, parts.uri.path()) {
            return (StatusCode::NOT_FOUND, "404 page not found\n".to_owned());
        }
        if let Some(status) = self.refusal(&call, &id, plural, &parts.method) {
            let refused = failure(status, "");
            let Some(message) = self.messages.get(&call) else { return refused };
            let mut body: Value = serde_json::from_str(&refused.1).unwrap();
            body["message"] = message.as_str().into();
            return (status, body.to_string());
        }
        let query = parts.uri.query().unwrap_or_default();
        match (&parts.method, name) {
            (&Method::GET, None) => self.list(plural, namespace_of(parts.uri.path()), query),
            (&Method::GET, Some(name)) => {
                self.establish(&id);
                self.objects.get(&id).map_or_else(|| failure(StatusCode::NOT_FOUND, name), ok)
            }
            (&Method::POST, None) if parameter(query, "dryRun").is_some() => (StatusCode::CREATED, body.to_string()),
            (&Method::POST, None) => self.create(plural, body.clone()),
            (&Method::PATCH, Some(name)) => {
                let content = parts.headers.get("content-type").and_then(|value| value.to_str().ok());
                if content == Some("application/json-patch+json") {
                    return self.json_patch(&id, name, body);
                }
                let is_apply = content.is_some_and(|content| content.contains("apply"));
                let manager = is_apply.then(|| parameter(query, "fieldManager").expect("an apply has a field manager"));
                let is_forced = parameter(query, "force").is_some_and(|force| force == "true");
                self.patch(&id, name, is_status, manager.map(|name| Manager { name, is_forced }), body)
            }
            (&Method::PUT, Some(name)) => self.put(&id, name, is_status, body),
            (&Method::DELETE, Some(name)) => self.delete(&id, name, body),
            other => panic!("unexpected {other:?}"),
        }
    }

    fn discover(&mut self, path: &str) -> Option<Response> {
        let is_served = |it: &&Value| {
            let plural = it["spec"]["names"]["plural"].as_str().unwrap_or_default();
            self.unserved.get(plural) != Some(&true)
        };
        let response = discovery::respond(path, self.of_kind("customresourcedefinitions").filter(is_served))?;
        let call = format!("GET {path}");
        let refused = self.refused.get(&call).copied();
        self.record(call);
        Some(refused.map_or(response, |status| failure(status, "")))
    }

    fn record(&mut self, call: String) {
        self.calls.push((Instant::now(), call));
    }

    /// Establishes a CRD that was stored without that.
    fn establish(&mut self, id: &str) {
        let is_late = self.establishes_late && is_definition(id);
        let Some(mut object) = self.objects.get(id).filter(|_| is_late).cloned() else { return };
        object["status"]["conditions"] = established();
        self.store(id, object);
    }

    fn serves(&self, plural: &str, path: &str) -> bool {
        if self.unserved.get(plural) == Some(&true) {
            return false;
        }
        let mut segments = path.trim_start_matches("/apis/").split('/');
        let group = segments.next().unwrap_or_default();
        let version = segments.next().unwrap_or_default();
        if !self.served_by_definition || !group.contains('.') || group.ends_with(".k8s.io") {
            return true;
        }
        let definition = self.objects.get(&format!("customresourcedefinitions/{plural}.{group}"));
        definition.is_some_and(|definition| discovery::serves(definition, version))
    }

    fn refusal(&self, call: &str, id: &str, plural: &str, method: &Method) -> Option<StatusCode> {
        let writes = [id, plural].map(|target| format!("WRITE {target}"));
        let of_writes = writes.iter().filter(|_| *method != Method::GET).find_map(|call| self.refused.get(call));
        self.refused.get(call).or(of_writes).copied()
    }

    fn of_kind(&self, plural: &str) -> impl Iterator<Item = &Value> {
        self.objects.iter().filter(move |(id, _)| id.split('/').next() == Some(plural)).map(|(_, object)| object)
    }

    /// Objects of all namespaces, or of one; an object without a namespace is in each.
    fn list(&self, plural: &str, namespace: Option<&str>, query: &str) -> Response {
        let selector = parameter(query, "labelSelector").unwrap_or_default();
        let field = parameter(query, "fieldSelector").unwrap_or_default();
        let selects = |object: &&Value| {
            let labels = &object["metadata"]["labels"];
            let by_labels = match selector.strip_suffix(')').and_then(|selector| selector.split_once(" in (")) {
                Some((key, values)) => values.split(',').any(|value| labels[key] == value),
                None => selector.split(',').all(|one| match one.split_once('=') {
                    Some((key, value)) => match key.strip_suffix('!') {
                        Some(key) => labels[key] != value,
                        None => labels[key] == value,
                    },
                    None => one.strip_prefix('!').is_none_or(|key| labels[key].is_null()),
                }),
            };
            let of = object["metadata"]["namespace"].as_str();
            let is_there = namespace.is_none() || of.is_none() || namespace == of;
            is_there
                && by_labels
                && field.strip_prefix("metadata.name=").is_none_or(|name| object["metadata"]["name"] == name)
                && field.strip_prefix("type=").is_none_or(|kind| object["type"] == kind)
        };
        let all: Vec<_> = self.of_kind(plural).filter(selects).collect();
        let from = parameter(query, "continue").map_or(0, |token| token.parse().unwrap());
        let items: Vec<_> = all.iter().skip(from).take(self.page_size.unwrap_or(usize::MAX)).collect();
        let end = from + items.len();
        let next = if end < all.len() { json!(end.to_string()) } else { Value::Null };
        ok(&json!({"apiVersion": "v1", "kind": "List", "items": items,
            "metadata": {"continue": next, "resourceVersion": self.version.to_string()}}))
    }

    fn create(&mut self, plural: &str, body: Value) -> Response {
        let name = body["metadata"]["name"].as_str().unwrap().to_owned();
        let id = format!("{plural}/{name}");
        if self.objects.contains_key(&id) {
            return failure_for(StatusCode::CONFLICT, "AlreadyExists", &name);
        }
        (StatusCode::CREATED, self.store(&id, body).to_string())
    }

    /// Applies as a field manager, or merges without one. Neither changes the status unless it is addressed.
    fn patch(&mut self, id: &str, name: &str, is_status: bool, manager: Option<Manager>, body: &Value) -> Response {
        let live = self.objects.get(id).cloned();
        if live.is_none() && (manager.is_none() || is_status) {
            return failure(StatusCode::NOT_FOUND, name);
        }
        let mut live = live.unwrap_or(json!({"metadata": {}}));
        let version = &body["metadata"]["resourceVersion"];
        if !version.is_null() && *version != live["metadata"]["resourceVersion"] {
            return failure(StatusCode::CONFLICT, name);
        }
        let uid = &body["metadata"]["uid"];
        if !uid.is_null() && *uid != live["metadata"]["uid"] {
            return failure(StatusCode::CONFLICT, name);
        }
        let mut wanted = body.clone();
        if is_status {
            wanted = json!({"status": body["status"]});
        } else {
            wanted.as_object_mut().unwrap().remove("status");
        }
        let before = live.clone();
        let applied = self.applied.clone();
        match manager {
            Some(manager) => {
                let conflicts = self.apply(id, is_status, &manager, &wanted, &mut live);
                if !conflicts.is_empty() {
                    return conflict_for(name, &conflicts);
                }
            }
            None => apply::merge(&wanted, &mut live),
        }
        if !is_status && !keeps_stored_versions(&mut live) {
            return failure(StatusCode::UNPROCESSABLE_ENTITY, name);
        }
        let template = |object: &Value| object["spec"]["template"].clone();
        if id.starts_with("jobs/") && !template(&before).is_null() && template(&before) != template(&live) {
            self.applied = applied;
            return immutable("spec.template", name);
        }
        if let Some(refused) = self.invalid(id, name, &before, &mut live) {
            self.applied = applied;
            return refused;
        }
        ok(&self.store(id, live))
    }

    /// Applies to the live object. Returns the fields that other managers own with other values, each with its manager: then
    /// nothing is applied.
    fn apply(
        &mut self,
        id: &str,
        is_status: bool,
        manager: &Manager,
        wanted: &Value,
        live: &mut Value,
    ) -> Vec<(String, String)> {
        let scope = if is_status { "/status" } else { "" };
        let own = (id.to_owned(), format!("{}{scope}", manager.name));
        let of_others = self
            .applied
            .iter_mut()
            .filter(|((of, name), _)| of == id && *name != own.1 && name.ends_with("/status") == is_status);
        let mut of_others: Vec<_> = of_others.collect();
        if manager.is_forced {
            for ((_, name), applied) in &mut of_others {
                let before = applied.clone();
                ownership::take_from(applied, &ownership::owned(wanted));
                if !is_status && **applied != before {
                    apply::record_manager(live, name, applied);
                }
            }
            if !is_status {
                ownership::take_from_updates(live, wanted);
            }
        }
        let mut others: Vec<_> =
            of_others.iter().map(|((_, name), applied)| (name.clone(), ownership::owned(applied))).collect();
        if !is_status {
            others.extend(ownership::of_updates(live));
        }
        let conflicts = ownership::conflicts(&ownership::owned(wanted), live, &others);
        if !manager.is_forced && !conflicts.is_empty() {
            return conflicts;
        }
        let others: Vec<_> = others.iter().map(|(_, owned)| owned).collect();
        let before = self.applied.insert(own, wanted.clone());
        apply::apply(&before.unwrap_or(Value::Null), wanted, live, &others);
        if !is_status {
            apply::prune(live, &manager.name, wanted);
            apply::record_manager(live, &manager.name, wanted);
        }
        Vec::new()
    }

    /// Fills defaults into an object that is to be stored. Returns the refusal of an invalid one.
    fn invalid(&self, id: &str, name: &str, before: &Value, object: &mut Value) -> Option<Response> {
        let admit = self.admits.get(id.split('/').next().unwrap_or_default())?;
        let causes = admit(before, object);
        let causes: Vec<_> = causes
            .into_iter()
            .map(|(reason, field, message)| json!({"reason": reason, "field": field, "message": message}))
            .collect();
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422,
            "message": format!("{name} is invalid: {}", json!(causes)), "details": {"name": name, "causes": causes}});
        (!causes.is_empty()).then(|| (StatusCode::UNPROCESSABLE_ENTITY, status.to_string()))
    }

    /// Applies the operations of a JSON patch (RFC 6902), all or none.
    fn json_patch(&mut self, id: &str, name: &str, body: &Value) -> Response {
        let Some(mut live) = self.objects.get(id).cloned() else { return failure(StatusCode::NOT_FOUND, name) };
        let patch: json_patch::Patch = serde_json::from_value(body.clone()).unwrap();
        match json_patch::patch(&mut live, &patch) {
            Ok(()) => ok(&self.store(id, live)),
            Err(_) => failure(StatusCode::UNPROCESSABLE_ENTITY, name),
        }
    }

    fn put(&mut self, id: &str, name: &str, is_status: bool, body: &Value) -> Response {
        let Some(live) = self.objects.get(id) else { return failure(StatusCode::NOT_FOUND, name) };
        if live["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] {
            return failure(StatusCode::CONFLICT, name);
        }
        let (mut object, other) = if is_status { (live.clone(), body) } else { (body.clone(), live) };
        match other.get("status") {
            Some(status) => object["status"] = status.clone(),
            None => drop(object.as_object_mut().unwrap().remove("status")),
        }
        // Without managed fields those of the stored object stay.
        if let (Value::Null, Some(managed)) =
            (&object["metadata"]["managedFields"], live["metadata"].get("managedFields"))
        {
            object["metadata"]["managedFields"] = managed.clone();
        }
        ok(&self.store(id, object))
    }

    fn delete(&mut self, id: &str, name: &str, options: &Value) -> Response {
        let Some(mut object) = self.objects.get(id).cloned() else { return failure(StatusCode::NOT_FOUND, name) };
        for member in ["uid", "resourceVersion"] {
            let expected = &options["preconditions"][member];
            if !expected.is_null() && *expected != object["metadata"][member] {
                return failure(StatusCode::CONFLICT, name);
            }
        }
        if object["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty()) {
            object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            return ok(&self.store(id, object));
        }
        self.take(id);
        ok(&json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}))
    }

    /// Removes an object and its field ownership.
    fn take(&mut self, id: &str) -> Option<Value> {
        self.applied.retain(|(object, _), _| object != id);
        let object = self.objects.remove(id)?;
        self.version += 1;
        self.log.add(self.version, "DELETED", id, &object);
        Some(object)
    }

    /// Stores a differing object with a new resourceVersion. A new object gets a uid, a new CRD is established at once or by
    /// its next write, and an object being deleted is removed with its last finalizer.
    fn store(&mut self, id: &str, mut object: Value) -> Value {
        if self.objects.get(id) == Some(&object) {
            return object;
        }
        self.version += 1;
        let before = self.objects.get(id);
        if before.is_none() {
            object["metadata"]["name"] = id.split_once('/').map(|(_, name)| name).into();
            object["metadata"]["uid"] = format!("uid-{}", self.version).into();
            object["metadata"]["generation"] = 0.into();
        }
        if before.and_then(|before| before.get("spec")) != object.get("spec") {
            let generation = object["metadata"]["generation"].as_i64().unwrap_or_default();
            object["metadata"]["generation"] = (generation + 1).into();
        }
        if is_definition(id) && (before.is_some() || !self.establishes_late) {
            object["status"]["conditions"] = established();
        }
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let has_finalizers = object["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty());
        if object["metadata"]["deletionTimestamp"].is_null() || has_finalizers {
            let is_known = self.objects.contains_key(id);
            self.log.add(self.version, if is_known { "MODIFIED" } else { "ADDED" }, id, &object);
            self.objects.insert(id.to_owned(), object.clone());
        } else {
            self.take(id);
        }
        object
    }
}

fn is_definition(id: &str) -> bool {
    id.starts_with("customresourcedefinitions/")
}

/// Conditions of a CRD whose kind is served.
fn established() -> Value {
    json!([{"type": "Established", "status": "True"}])
}

/// Adds the storage version to the stored ones of a CRD that has some. Returns false if the CRD lacks one of these.
fn keeps_stored_versions(definition: &mut Value) -> bool {
    let versions = definition["spec"]["versions"].as_array().cloned().unwrap_or_default();
    let stored = definition.pointer_mut("/status/storedVersions").and_then(Value::as_array_mut);
    let Some(stored) = stored else { return true };
    let storage = versions.iter().find(|version| version["storage"] == true).map(|version| version["name"].clone());
    stored.extend(storage.filter(|storage| !stored.contains(storage)));
    stored.iter().all(|stored| versions.iter().any(|version| version["name"] == *stored))
}

/// Id of the object or the collection that a path addresses, and whether the path addresses the status.
fn object_id(path: &str) -> (String, bool) {
    let segments: Vec<_> = path.trim_start_matches('/').split('/').collect();
    let after_version = if segments[0] == "api" { 2 } else { 3 };
    let rest = &segments[after_version..];
    let rest = if rest.len() > 2 && rest[0] == "namespaces" { &rest[2..] } else { rest };
    match rest {
        [plural, name, "status"] => (format!("{plural}/{name}"), true),
        _ => (rest.join("/"), false),
    }
}

/// Namespace in a path.
fn namespace_of(path: &str) -> Option<&str> {
    let (_, rest) = path.split_once("/namespaces/")?;
    Some(rest.split_once('/')?.0)
}

/// Decoded value of a query parameter.
fn parameter(query: &str, name: &str) -> Option<String> {
    let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
    let decoded =
        [("+", " "), ("%2F", "/"), ("%3D", "="), ("%21", "!"), ("%2C", ","), ("%3A", ":"), ("%28", "("), ("%29", ")")];
    Some(decoded.iter().fold(value.to_owned(), |text, (code, plain)| text.replace(code, plain)))
}

fn ok(object: &Value) -> Response {
    (StatusCode::OK, object.to_string())
}

fn failure(code: StatusCode, name: &str) -> Response {
    let reason = match code {
        StatusCode::BAD_REQUEST => "BadRequest",
        StatusCode::UNAUTHORIZED => "Unauthorized",
        StatusCode::FORBIDDEN => "Forbidden",
        StatusCode::NOT_FOUND => "NotFound",
        StatusCode::CONFLICT => "Conflict",
        StatusCode::UNPROCESSABLE_ENTITY => "Invalid",
        StatusCode::TOO_MANY_REQUESTS => "TooManyRequests",
        StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailable",
        _ => "InternalError",
    };
    failure_for(code, reason, name)
}

/// Refusal to change a field.
fn immutable(field: &str, name: &str) -> Response {
    let text = "Invalid value: {}: field is immutable";
    let causes = [json!({"reason": "FieldValueInvalid", "field": field, "message": text})];
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422,
        "message": format!("Job.batch {name:?} is invalid: {field}: {text}"), "details": {"name": name, "causes": causes}});
    (StatusCode::UNPROCESSABLE_ENTITY, status.to_string())
}

fn failure_for(code: StatusCode, reason: &str, name: &str) -> Response {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason,
        "code": code.as_u16(), "message": reason, "details": {"name": name}});
    (code, status.to_string())
}

/// A refused apply.
fn conflict_for(name: &str, conflicts: &[(String, String)]) -> Response {
    let cause = |(field, manager): &(String, String)| {
        json!({"reason": "FieldManagerConflict", "field": field,
        "message": format!("conflict with {manager:?}")})
    };
    let causes: Vec<_> = conflicts.iter().map(cause).collect();
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Conflict", "code": 409,
        "message": "Apply failed", "details": {"name": name, "causes": causes}});
    (StatusCode::CONFLICT, status.to_string())
}

#[cfg(test)]
mod tests;
