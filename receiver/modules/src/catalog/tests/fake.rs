//! Fake API server of one runtime whose calls can fail, get lost or land late, with the events of its agent and a check
//! that no write leaves a channel dangling.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use http::{Method, Request, StatusCode, request::Parts};
use kube::{Client, client::Body};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tidewatch_cluster::testing::{self, FakeApiServer};
use tidewatch_contract::event::Change;
use tower::service_fn;

const INVENTORY: &str = "configmaps/tidewatch-catalog";

#[derive(Default)]
struct State {
    calls: Vec<String>,
    inventory_calls: Vec<&'static str>,
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
    parts: Parts,
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

/// Objects by id: `<resource>/<name>`.
type Objects = BTreeMap<String, Value>;

/// The server; clones share its state.
#[derive(Clone)]
pub(super) struct FakeRuntime {
    server: FakeApiServer,
    state: Arc<Mutex<State>>,
}

impl Default for FakeRuntime {
    fn default() -> Self {
        // Short pages: every list is continued.
        Self { server: FakeApiServer::default().with_pages_of(2), state: Arc::default() }
    }
}

impl FakeRuntime {
    pub(super) fn client(&self) -> Client {
        let fake = self.clone();
        testing::client("default", move |parts, body| fake.call(parts, body))
    }

    /// Client that delays each call by a random number of yields, so that the calls of two clients interleave in any
    /// order.
    pub(super) fn slow_client(&self, seed: u64) -> Client {
        let client = self.client();
        let rng = Arc::new(Mutex::new(SeededRng(seed)));
        let service = service_fn(move |request: Request<Body>| {
            let client = client.clone();
            let turns = rng.lock().draw(12);
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
    fn call(&self, parts: &Parts, body: &[u8]) -> Option<testing::Response> {
        self.land(|delayed| {
            delayed.after = delayed.after.saturating_sub(1);
            delayed.after == 0
        });
        let (fault, dead) = {
            let state = &mut *self.state.lock();
            let at = state.at;
            state.at += 1;
            let fault = state.faults.iter().find(|fault| fault.after == at).copied();
            state.dead |= fault.is_some_and(|fault| fault.response == Response::Lost);
            (fault, state.dead)
        };
        let Some(Fault { lands, .. }) = fault else {
            return if dead { None } else { self.execute(parts, body) };
        };
        match lands {
            None => {}
            Some(0) => drop(self.execute(parts, body)),
            Some(after) => {
                self.state.lock().delayed.push(DelayedCall { after, parts: parts.clone(), body: body.to_vec() });
            }
        }
        let status = json!({"kind": "Status", "code": 503, "reason": "ServiceUnavailable"});
        (!dead).then(|| (StatusCode::SERVICE_UNAVAILABLE, status.to_string()))
    }

    /// Executes a call of the receiver, and checks its form and that it leaves no channel dangling.
    fn execute(&self, parts: &Parts, body: &[u8]) -> Option<testing::Response> {
        let query = parts.uri.query().unwrap_or_default();
        let is_inventory = parts.uri.path().contains("/configmaps");
        if matches!(parts.method, Method::PATCH | Method::PUT) && !is_inventory {
            assert!(query.contains("fieldManager=catalog-sync"), "{query}");
            assert!(parts.method != Method::PATCH || query.contains("force=true"), "{query}");
        }
        if parts.method == Method::DELETE && !is_inventory {
            let options: Value = serde_json::from_slice(body).unwrap();
            assert!(options["preconditions"]["uid"].is_string(), "a deletion names the uid");
        }
        let before = self.server.objects();
        let response = self.server.respond(parts, body);
        let now = self.server.objects();
        let state = &mut *self.state.lock();
        let is_dangling_before = dangling(&before);
        for (meta, template) in dangling(&now).difference(&is_dangling_before).filter(|_| state.watched) {
            let excused = state.unknown.contains(template) || state.unknown.contains(meta);
            let method = &parts.method;
            let uri = &parts.uri;
            assert!(excused, "{method} {uri}: {meta} points to {template}, which is not there");
        }
        state.record_events(&before, &now);
        response
    }

    /// Runs a change, and records its events.
    fn change(&self, action: impl FnOnce(&FakeApiServer)) -> (Objects, Objects) {
        let before = self.server.objects();
        action(&self.server);
        let now = self.server.objects();
        self.state.lock().record_events(&before, &now);
        (before, now)
    }

    /// Runs a foreign change, and records it as not observed by the receiver.
    fn by_others(&self, action: impl FnOnce(&FakeApiServer)) {
        let (before, now) = self.change(action);
        let removed = before.keys().filter(|id| id.starts_with("moduletemplates/") && !now.contains_key(*id));
        let metas =
            now.iter().filter(|(id, object)| id.starts_with("modulereleasemetas/") && before.get(*id) != Some(*object));
        self.state.lock().unknown.extend(removed.chain(metas.map(|(id, _)| id)).cloned());
    }

    /// Moves the server's record of calls, in the notation of [`FakeRuntime::calls`].
    fn collect_calls(&self) {
        let state = &mut *self.state.lock();
        for call in self.server.calls() {
            let (method, id) = call.split_once(' ').unwrap();
            if id.starts_with("configmaps") {
                let verbs = [("GET", "get"), ("POST", "create"), ("PUT", "replace"), ("DELETE", "delete")];
                state.inventory_calls.extend(verbs.iter().find(|verb| verb.0 == method).map(|verb| verb.1));
            } else {
                let verb = VERBS.iter().find(|verb| verb.1 == method && (verb.0 != "list" || !id.contains('/')));
                state.calls.push(format!("{} {id}", verb.unwrap_or_else(|| panic!("unexpected {call}")).0));
            }
        }
    }

    /// Sets the faults of the following calls. Returns whether the receiver had crashed.
    pub(super) fn faults(&self, faults: &[Fault]) -> bool {
        let state = &mut *self.state.lock();
        (state.faults, state.at) = (faults.to_vec(), 0);
        std::mem::take(&mut state.dead)
    }

    /// Executes the delayed calls that are due.
    fn land(&self, is_due: impl FnMut(&mut DelayedCall) -> bool) {
        let due: Vec<_> = self.state.lock().delayed.extract_if(.., is_due).collect();
        for DelayedCall { parts, body, .. } in due {
            // A delayed call is not recorded again.
            self.collect_calls();
            self.by_others(|server| drop(server.respond(&parts, &body)));
            self.server.calls();
        }
    }

    /// Returns whether calls of earlier syncs will be executed later.
    pub(super) fn has_delayed(&self) -> bool {
        !self.state.lock().delayed.is_empty()
    }

    /// Executes all delayed calls.
    pub(super) fn land_all(&self) {
        self.land(|_| true);
    }

    /// Enables or disables the check that no write of the receiver leaves a channel dangling, unless a foreign change
    /// that it could not know of is the cause.
    pub(super) fn watch(&self, watched: bool) {
        self.state.lock().watched = watched;
    }

    /// Unsettled events: the last change of each object, own or foreign.
    pub(super) fn changes(&self) -> BTreeMap<String, AgentEvent> {
        self.state.lock().changes.clone()
    }

    /// Records that the receiver has observed these events, as far as they match the current state.
    pub(super) fn observe(&self, events: &BTreeMap<String, AgentEvent>) {
        let objects = self.server.objects();
        let is_now = |id: &str, event: &AgentEvent| match objects.get(id) {
            Some(object) => object["metadata"]["resourceVersion"] == *event.resource_version,
            None => event.change == Change::Deleted,
        };
        self.state.lock().unknown.retain(|id| !events.get(id).is_some_and(|event| is_now(id, event)));
    }

    /// Settles these events: they are not sent again.
    pub(super) fn settle(&self, events: &BTreeMap<String, AgentEvent>) {
        self.state.lock().changes.retain(|id, change| events.get(id) != Some(change));
    }

    /// Runs a foreign change that the agent does not report.
    pub(super) fn without_event(&self, action: impl FnOnce(&Self)) {
        let before = self.changes();
        action(self);
        self.state.lock().changes = before;
    }

    /// Takes the recorded calls on the inventory.
    pub(super) fn inventory_calls(&self) -> Vec<&'static str> {
        self.collect_calls();
        std::mem::take(&mut self.state.lock().inventory_calls)
    }

    /// Lines of the stored inventory.
    pub(super) fn inventory(&self) -> Vec<String> {
        let object = self.object(INVENTORY).unwrap_or_default();
        object["data"]["objects"].as_str().unwrap_or_default().lines().map(str::to_owned).collect()
    }

    pub(super) fn objects(&self) -> Objects {
        let mut objects = self.server.objects();
        objects.remove(INVENTORY);
        objects
    }

    /// Takes the recorded calls, in order: `<verb> <resource>/<name>`.
    pub(super) fn calls(&self) -> Vec<String> {
        self.collect_calls();
        std::mem::take(&mut self.state.lock().calls)
    }

    /// Edits an object as a foreign field manager; `id` is `<resource>/<name>`.
    pub(super) fn edit(&self, id: &str, change: impl FnOnce(&mut Value)) {
        let (resource, name) = id.split_once('/').unwrap();
        let kind = if resource == "moduletemplates" { "ModuleTemplate" } else { "ModuleReleaseMeta" };
        self.change(|server| {
            server.edit(id, |object| {
                if object.is_null() {
                    *object = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind,
                        "metadata": {"name": name, "namespace": "kyma-system", "managedFields": [{"manager": "user"}]}});
                }
                change(object);
            });
        });
    }

    pub(super) fn object(&self, id: &str) -> Option<Value> {
        self.server.object(id)
    }

    pub(super) fn ids(&self) -> Vec<String> {
        self.objects().into_keys().collect()
    }

    pub(super) fn remove(&self, id: &str) {
        self.by_others(|server| drop(server.remove(id)));
    }

    /// Refuses writes of this object, or of the whole resource if `id` has no slash; or stops refusing them.
    pub(super) fn refuse(&self, id: &str, refused: bool) {
        self.respond_with(id, refused.then_some(StatusCode::FORBIDDEN));
    }

    /// Responds with this status to writes of the target, or only to one verb if it is `<verb> <resource>/<name>`;
    /// `None` restores it.
    pub(super) fn respond_with(&self, target: &str, status: Option<StatusCode>) {
        let call = target.split_once(' ').map_or_else(
            || format!("WRITE {target}"),
            |(verb, id)| format!("{} {id}", VERBS.iter().find(|known| known.0 == verb).unwrap().1),
        );
        self.server.refuse(&call, status.map(|status| status.as_u16()));
    }

    /// Accepts all calls again.
    pub(super) fn refuse_nothing(&self) {
        self.server.refuse_nothing();
    }

    /// Stops or restarts serving a resource.
    pub(super) fn unserve(&self, resource: &str, absent: bool) {
        self.server.unserve(resource, absent);
    }
}

/// Verbs of calls in the tests, and their methods.
const VERBS: [(&str, &str); 5] =
    [("list", "GET"), ("get", "GET"), ("apply", "PATCH"), ("put", "PUT"), ("delete", "DELETE")];

impl State {
    fn record_events(&mut self, before: &Objects, now: &Objects) {
        let removed = before.keys().filter(|id| !now.contains_key(*id)).map(|id| (id, &Value::Null, Change::Deleted));
        let written = now.iter().filter(|(id, object)| before.get(*id) != Some(*object));
        let written = written.map(|(id, object)| (id, &object["metadata"], Change::Spec));
        for (id, metadata, change) in removed.chain(written).filter(|(id, ..)| *id != INVENTORY) {
            let text = |member: &str| metadata[member].as_str().unwrap_or_default().to_owned();
            let event = AgentEvent { uid: text("uid"), resource_version: text("resourceVersion"), change };
            self.changes.insert(id.clone(), event);
            if change != Change::Deleted {
                self.unknown.remove(id);
            }
        }
    }
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
