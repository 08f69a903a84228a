//! The server: connections, and the response to each request.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, header, request::Parts};
use http_body::Body;
use http_body_util::{BodyExt as _, Full, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use rustls::ServerConfig;
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    time::{Instant, sleep},
};
use tokio_rustls::TlsAcceptor;

use super::{
    FakeCluster, Shared,
    path::{self, Objects, Target},
    select::Selection,
    store::{ApiError, Patch, Store, Stored},
    watch::{Watch, WatchPosition},
};

/// A response, which may be that of a watch.
pub type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

const BODY_BYTES: usize = 4 << 20;
/// Length of a watch in seconds if the client sets none, as in API servers.
const WATCH_SECONDS: u64 = 1_800;

/// Accepts for ever.
pub(super) async fn run(listener: TcpListener, tls: Arc<ServerConfig>, shared: Arc<Shared>) {
    let acceptor = TlsAcceptor::from(tls);
    let mut connections = tokio::task::JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok((tcp, _)) = listener.accept().await else {
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let acceptor = acceptor.clone();
        let shared = shared.clone();
        let open = shared.open.clone();
        connections.spawn(async move {
            let _open = open;
            // Responses are small; waiting for more data only delays them.
            let _ = tcp.set_nodelay(true);
            let Ok(stream) = acceptor.accept(tcp).await else { return };
            let service = service_fn(move |request| {
                let shared = shared.clone();
                async move { Ok::<_, Infallible>(answer(&shared, request).await) }
            });
            // The client handles the end of its connection.
            let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(shared: &Shared, request: Request<Incoming>) -> Answer {
    shared.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let (parts, body) = request.into_parts();
    let body = Limited::new(body, BODY_BYTES).collect().await.map(http_body_util::Collected::to_bytes);
    let delay = shared.delay();
    if !delay.is_zero() {
        sleep(delay).await;
    }
    let Ok(body) = body else { return failure(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge", "") };
    if parts.headers.get(header::AUTHORIZATION).is_none_or(|value| value != shared.authorization.as_str()) {
        return failure(StatusCode::UNAUTHORIZED, "Unauthorized", "");
    }
    let found = path::cluster(parts.uri.path()).and_then(|(name, rest)| Some((shared.cluster(name)?, rest)));
    if let Some((cluster, rest)) = &found {
        cluster.record(&parts.method, rest, Query::of(&parts).get("watch") == "true");
    }
    if let Some((status, answer)) = found.as_ref().and_then(|(cluster, rest)| cluster.answer_token_request(rest, &body))
    {
        return reply(status, answer.to_string());
    }
    match found.and_then(|(cluster, rest)| Some((cluster, path::parse(rest)?))) {
        Some((cluster, Target::Group(group))) => discover_group(&cluster, group),
        Some((cluster, Target::Resources { group, version })) => discover(&cluster.read(), group, version),
        Some((cluster, Target::Objects(at))) => objects(cluster, &at, &parts, &body),
        None => not_served(),
    }
}

impl FakeCluster {
    /// The response to a request for objects, by a path without the prefix of a runtime. The lines of a watch arrive with
    /// the changes.
    pub async fn respond<B>(&self, request: Request<B>) -> Answer
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let (parts, body) = request.into_parts();
        let body =
            Limited::new(std::pin::pin!(body), BODY_BYTES).collect().await.map(http_body_util::Collected::to_bytes);
        let Ok(body) = body else { return failure(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge", "") };
        match path::parse(parts.uri.path()) {
            Some(Target::Objects(at)) => objects(self.clone(), &at, &parts, &body),
            _ => not_served(),
        }
    }
}

fn objects(cluster: FakeCluster, at: &Objects<'_>, parts: &Parts, body: &[u8]) -> Answer {
    if !builtin(at.group) && !cluster.read().defines(at.group, at.resource) {
        return not_served();
    }
    let query = Query::of(parts);
    if parts.method == Method::GET
        && query.get("watch") != "true"
        && let Some(response) = cluster.hostile_response()
    {
        return reply(StatusCode::OK, response);
    }
    let only_metadata = wants_metadata(&parts.headers);
    let manager = query.get("fieldManager");
    let object = || serde_json::from_slice::<Value>(body).ok().filter(Value::is_object);
    let malformed = || failure(StatusCode::BAD_REQUEST, "BadRequest", at.name);
    let respond = |result: Result<Stored, ApiError>, status| match result {
        Ok(stored) => reply(status, stored.text(only_metadata)),
        Err(ApiError { status, reason, name }) => failure(status, reason, &name),
    };
    match (&parts.method, at.name.is_empty()) {
        (&Method::GET, true) if query.get("watch") == "true" => watch(cluster, at, &query, only_metadata),
        (&Method::GET, true) => list(&cluster.read(), at, &query, only_metadata),
        (&Method::GET, false) => {
            let found = cluster.read().get(&at.key(at.name)).cloned();
            respond(found.ok_or_else(|| ApiError::not_found(at.name)), StatusCode::OK)
        }
        (&Method::POST, true) => match object() {
            Some(object) => respond(cluster.write(|store| store.create(at, object, &manager)), StatusCode::CREATED),
            None => malformed(),
        },
        (&Method::PUT, false) => match object() {
            Some(object) => respond(cluster.write(|store| store.replace(at, object, &manager)), StatusCode::OK),
            None => malformed(),
        },
        (&Method::PATCH, false) => match (object(), patch_kind(&parts.headers)) {
            (Some(object), Some(patch_kind)) => {
                respond(cluster.write(|store| store.patch(at, patch_kind, object, &manager)), StatusCode::OK)
            }
            (_, None) => failure(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", at.name),
            (None, _) => malformed(),
        },
        (&Method::DELETE, false) => match cluster.write(|store| store.delete(at, &object().unwrap_or_default())) {
            Ok(()) => {
                reply(StatusCode::OK, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}).to_string())
            }
            Err(ApiError { status, reason, name }) => failure(status, reason, &name),
        },
        _ => failure(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", at.name),
    }
}

fn list(store: &Store, at: &Objects<'_>, query: &Query, only_metadata: bool) -> Answer {
    let Some(selection) = query.selection() else { return failure(StatusCode::BAD_REQUEST, "BadRequest", "") };
    let prefix = at.prefix();
    let after = query.get("continue");
    let limit = query.get("limit").parse().ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let mut matching = store.list(&prefix, &after).filter(|(_, stored)| selection.selects(&stored.metadata)).peekable();
    let mut items = String::new();
    let mut last = "";
    for _ in 0..limit {
        let Some((key, stored)) = matching.next() else { break };
        if !items.is_empty() {
            items.push(',');
        }
        items.push_str(&stored.text(only_metadata));
        last = key;
    }
    let token = if matching.peek().is_some() { last } else { "" };
    let metadata = json!({"resourceVersion": store.version().to_string(), "continue": token});
    let (kind, version) = if only_metadata { ("PartialObjectMetadataList", "meta.k8s.io/v1") } else { ("List", "v1") };
    let head = format!(r#"{{"kind":"{kind}","apiVersion":"{version}","metadata":{metadata},"items":["#);
    reply(StatusCode::OK, format!("{head}{items}]}}"))
}

fn watch(cluster: FakeCluster, at: &Objects<'_>, query: &Query, only_metadata: bool) -> Answer {
    let Some(selection) = query.selection() else { return failure(StatusCode::BAD_REQUEST, "BadRequest", "") };
    let position = cluster.write(|store| {
        store.watched();
        query.get("resourceVersion").parse().unwrap_or_else(|_| store.version())
    });
    let seconds = query.get("timeoutSeconds").parse().unwrap_or(WATCH_SECONDS);
    let kind = if only_metadata {
        ("meta.k8s.io/v1".to_owned(), "PartialObjectMetadata".to_owned())
    } else {
        ("v1".to_owned(), "Object".to_owned())
    };
    let end = Instant::now() + Duration::from_secs(seconds);
    let registration = WatchPosition::new(&cluster, position);
    let watch = Watch { cluster, prefix: at.prefix(), selection, only_metadata, position, registration, end, kind };
    let body = StreamBody::new(watch.lines()).boxed_unsync();
    Response::builder().header(header::CONTENT_TYPE, "application/json").body(body).unwrap_or_default()
}

fn discover_group(cluster: &FakeCluster, group: &str) -> Answer {
    let definitions = cluster.read().definitions(group);
    let version =
        definitions.first().map_or("v1", |found| found["spec"]["versions"][0]["name"].as_str().unwrap_or("v1"));
    if definitions.is_empty() && !builtin(group) {
        return not_served();
    }
    let preferred = json!({"groupVersion": format!("{group}/{version}"), "version": version});
    let group = json!({"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": [preferred.clone()],
        "preferredVersion": preferred});
    reply(StatusCode::OK, group.to_string())
}

fn discover(store: &Store, group: &str, version: &str) -> Answer {
    let mut resources = Vec::new();
    for (of, name, kind) in BUILTIN.iter().filter(|(of, ..)| *of == group) {
        let namespaced = !CLUSTER_SCOPED.contains(name);
        resources.push(json!({"name": name, "kind": kind, "namespaced": namespaced}));
        if of.contains('.') && *of != "coordination.k8s.io" || *of == "apps" {
            resources.push(json!({"name": format!("{name}/status"), "kind": kind, "namespaced": namespaced}));
        }
    }
    for definition in store.definitions(group) {
        let name = &definition["spec"]["names"]["plural"];
        let kind = &definition["spec"]["names"]["kind"];
        let namespaced = definition["spec"]["scope"] == "Namespaced";
        let versions = definition["spec"]["versions"].as_array().into_iter().flatten();
        for _ in versions.filter(|served| served["name"] == version && served["served"] == true) {
            let name = name.as_str().unwrap_or_default();
            resources.push(json!({"name": name, "kind": kind, "namespaced": namespaced}));
            resources.push(json!({"name": format!("{name}/status"), "kind": kind, "namespaced": namespaced}));
        }
    }
    if resources.is_empty() {
        return not_served();
    }
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    let list =
        json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources});
    reply(StatusCode::OK, list.to_string())
}

/// Built-in kinds, as far as the product uses them.
const BUILTIN: [(&str, &str, &str); 15] = [
    ("", "namespaces", "Namespace"),
    ("", "configmaps", "ConfigMap"),
    ("", "secrets", "Secret"),
    ("", "services", "Service"),
    ("", "serviceaccounts", "ServiceAccount"),
    ("apps", "deployments", "Deployment"),
    ("coordination.k8s.io", "leases", "Lease"),
    ("apiextensions.k8s.io", "customresourcedefinitions", "CustomResourceDefinition"),
    ("rbac.authorization.k8s.io", "roles", "Role"),
    ("rbac.authorization.k8s.io", "rolebindings", "RoleBinding"),
    ("rbac.authorization.k8s.io", "clusterroles", "ClusterRole"),
    ("rbac.authorization.k8s.io", "clusterrolebindings", "ClusterRoleBinding"),
    ("networking.k8s.io", "networkpolicies", "NetworkPolicy"),
    ("scheduling.k8s.io", "priorityclasses", "PriorityClass"),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration"),
];

/// Plurals of those whose objects have no namespace.
const CLUSTER_SCOPED: [&str; 6] = [
    "namespaces",
    "customresourcedefinitions",
    "clusterroles",
    "clusterrolebindings",
    "priorityclasses",
    "validatingwebhookconfigurations",
];

fn builtin(group: &str) -> bool {
    BUILTIN.iter().any(|(of, ..)| *of == group)
}

fn wants_metadata(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    accept.contains("as=PartialObjectMetadata")
}

fn patch_kind(headers: &HeaderMap) -> Option<Patch> {
    match headers.get(header::CONTENT_TYPE)?.to_str().ok()? {
        "application/merge-patch+json" => Some(Patch::Merge),
        "application/apply-patch+yaml" => Some(Patch::Apply),
        _ => None,
    }
}

/// The decoded query parameters.
struct Query(Vec<(String, String)>);

impl Query {
    fn of(parts: &Parts) -> Self {
        let pairs = parts.uri.query().unwrap_or_default().split('&');
        Self(
            pairs.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).map(|(k, v)| (decode(k), decode(v))).collect(),
        )
    }

    fn get(&self, key: &str) -> String {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone()).unwrap_or_default()
    }

    fn selection(&self) -> Option<Selection> {
        Selection::parse(&self.get("labelSelector"), &self.get("fieldSelector"))
    }
}

fn decode(text: &str) -> String {
    percent_encoding::percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned()
}

fn reply(status: StatusCode, text: impl Into<Bytes>) -> Answer {
    let answer = Response::builder().status(status).header(header::CONTENT_TYPE, "application/json");
    answer.body(Full::new(text.into()).boxed_unsync()).unwrap_or_default()
}

fn failure(status: StatusCode, reason: &str, name: &str) -> Answer {
    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason,
        "message": format!("{name}: {reason}"), "details": {"name": name}, "code": status.as_u16()});
    reply(status, body.to_string())
}

/// The response of API servers for a path that is not served: plain text that names no object, so nothing is known of
/// any.
fn not_served() -> Answer {
    let body = Full::new(Bytes::from_static(b"404 page not found\n")).boxed_unsync();
    Response::builder().status(StatusCode::NOT_FOUND).body(body).unwrap_or_default()
}
