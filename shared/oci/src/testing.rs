//! Fake OCI registry (OCI distribution specification): a service in the process, and a server on the loopback interface. Blobs
//! are uploaded in one request each.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, clippy::must_use_candidate, reason = "test support")]

use std::{
    collections::{HashMap, VecDeque},
    convert::Infallible,
    future, io, iter,
    path::Path,
    sync::Arc,
    time::Duration,
};

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::{HeaderMap, Method, Request, Response, StatusCode, header, request::Parts};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prometheus_client::metrics::{counter::Counter, family::Family};
use rustls::ServerConfig;
use serde_json::json;
use tidewatch_kit::{
    hex,
    metrics::{ReasonLabel, ResultLabel},
};
use tokio::{net::TcpListener, task::JoinSet, time::sleep};
use tokio_rustls::TlsAcceptor;
use tower::{BoxError, util::BoxCloneSyncService};

use crate::{
    fetch::Fetcher,
    flags::Source,
    metrics::Metrics,
    registry::{Registry, Worker},
    store::Store,
};

/// Bytes that the store and the results of lookups have at most.
const MAX_BYTES: usize = 1 << 20;

type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Value of a counter with this result.
pub fn of_result(counters: &Family<ResultLabel, Counter>, result: &'static str) -> u64 {
    counters.get_or_create(&ResultLabel { result }).get()
}

/// Value of a counter with this reason.
pub fn of_reason(counters: &Family<ReasonLabel, Counter>, reason: &'static str) -> u64 {
    counters.get_or_create(&ReasonLabel { reason }).get()
}

/// Response to one request.
#[derive(Clone)]
pub enum Reply {
    /// Status, headers and body.
    Of(u16, Vec<(&'static str, String)>, Bytes),
    /// No connection.
    Down,
    /// No head, ever.
    Silent,
    /// These bytes, then nothing and no end.
    Stalled(Bytes),
    /// This many bytes in each interval, without end.
    Endless(usize, Duration),
    /// These bytes, then a broken connection.
    Broken(Bytes),
    /// These bytes, without their number in the head.
    Chunked(Bytes),
}

impl Reply {
    /// Response with this status, and no body.
    pub fn status(status: u16) -> Self {
        Self::Of(status, Vec::new(), Bytes::new())
    }

    /// Response with this status and one header field.
    pub fn with(status: u16, name: &'static str, value: impl Into<String>) -> Self {
        Self::Of(status, vec![(name, value.into())], Bytes::new())
    }

    /// Response with this body.
    pub fn content(content: impl Into<Bytes>) -> Self {
        Self::Of(200, Vec::new(), content.into())
    }
}

/// Request as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Method.
    pub method: String,
    /// Absolute URI; without its scheme over a connection.
    pub uri: String,
    /// Header field `Authorization`.
    pub authorization: Option<String>,
    /// All header fields.
    pub headers: HeaderMap,
    /// Body.
    pub body: String,
}

/// What a registry demands of every request.
#[derive(Clone, Copy, Default)]
pub enum Access {
    /// Nothing.
    #[default]
    Anonymous,
    /// This password of the user `tide`.
    Password(&'static str),
    /// A token for the scope, issued by the registry itself for this password of the user `tide`, or for this refresh token.
    /// `HEAD` is not supported.
    Token(&'static str),
    /// This token.
    Fixed(&'static str),
}

/// Replies to requests that lack the demanded header `Authorization`.
#[derive(Clone)]
pub struct Protection {
    /// The demanded header.
    pub authorization: String,
    /// Reply to the paths below `/v2/`.
    pub refusal: Reply,
    /// Reply to `/v2/`.
    pub ping: Reply,
}

/// Adds the content of a path that was not there yet.
type Maker = Arc<dyn Fn(&FakeRegistry, &str) + Send + Sync>;

#[derive(Default)]
struct State {
    contents: HashMap<String, Reply>,
    maker: Option<Maker>,
    access: Access,
    /// Replies that precede the contents, by part of the URI; the last one stays.
    scripts: HashMap<String, VecDeque<Reply>>,
    /// Replies to the next request whose URI contains a text.
    interruptions: Vec<(String, Reply)>,
    protection: Option<Protection>,
    received: Vec<Received>,
}

/// The registry. Clones share it.
#[derive(Clone, Default)]
pub struct FakeRegistry(Arc<Mutex<State>>);

/// Digest of a content, as in a reference.
pub fn digest_of(content: &[u8]) -> String {
    format!("sha256:{}", hex::encode(digest(&SHA256, content).as_ref()))
}

impl FakeRegistry {
    /// Lookups in this registry, and the task that fetches, with a store in a folder.
    pub fn lookups(&self, folder: &Path, source: Source) -> (Registry, Worker) {
        let metrics = Metrics::default();
        let fetcher = Fetcher::new(self.transport().into(), [].into(), metrics.clone());
        let store = Store::open(folder, MAX_BYTES as u64, metrics.clone());
        Registry::with(fetcher, store, source, MAX_BYTES, metrics)
    }

    /// Adds a blob, and returns its digest.
    pub fn blob(&self, repository: &str, content: &[u8]) -> String {
        let digest = digest_of(content);
        self.put(format!("/v2/{repository}/blobs/{digest}"), Reply::content(content.to_vec()));
        digest
    }

    /// Adds a manifest by tag and by digest, and returns its digest.
    pub fn manifest(&self, repository: &str, tag: &str, media_type: &str, content: &[u8]) -> String {
        let digest = digest_of(content);
        let headers = vec![("content-type", media_type.to_owned()), ("docker-content-digest", digest.clone())];
        for reference in [tag, &digest] {
            let reply = Reply::Of(200, headers.clone(), content.to_vec().into());
            self.put(format!("/v2/{repository}/manifests/{reference}"), reply);
        }
        digest
    }

    /// Adds a component version with this descriptor, and returns the digest of its manifest.
    pub fn component(&self, repository: &str, tag: &str, descriptor: &str) -> String {
        let kind = "application/vnd.ocm.software.component-descriptor.v2+yaml";
        let layer = json!({"mediaType": kind, "digest": self.blob(repository, descriptor.as_bytes()), "size": descriptor.len()});
        let config = json!({"componentDescriptorLayer": layer}).to_string();
        self.configured(repository, tag, &config, &[layer])
    }

    /// Adds an image manifest with this config and these layers, and returns its digest.
    pub fn configured(&self, repository: &str, tag: &str, config: &str, layers: &[serde_json::Value]) -> String {
        let kind = IMAGE_MANIFEST;
        let config = json!({
            "mediaType": "application/vnd.ocm.software.component.config.v1+json",
            "digest": self.blob(repository, config.as_bytes()),
            "size": config.len(),
        });
        let manifest = json!({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers});
        self.manifest(repository, tag, kind, manifest.to_string().as_bytes())
    }

    /// A registry that makes the content of a path when it is read first.
    pub fn making(maker: impl Fn(&Self, &str) + Send + Sync + 'static) -> Self {
        let registry = Self::default();
        registry.0.lock().maker = Some(Arc::new(maker));
        registry
    }

    /// Demands an access from now on.
    pub fn demand(&self, access: Access) {
        self.0.lock().access = access;
    }

    /// Paths with a reply of their own.
    pub fn paths(&self) -> Vec<String> {
        self.0.lock().contents.keys().cloned().collect()
    }

    /// Stores what is uploaded; any other request gets the reply of its path.
    fn store(&self, request: &Parts, body: &Bytes) -> Reply {
        let path = request.uri.path();
        let of = |part: &str| path.strip_prefix("/v2/").and_then(|path| path.split_once(part));
        let invalid = || Reply::Of(400, Vec::new(), "invalid".into());
        match (&request.method, of("/blobs/uploads/"), of("/manifests/")) {
            (&Method::POST, Some((_, "")), _) => Reply::with(202, "location", format!("{path}1?{SESSION}")),
            (&Method::PUT, Some((repository, "1")), _) => {
                let digest = digest_of(body);
                if request.uri.query() != Some(&*format!("{SESSION}&digest={digest}")) {
                    return invalid();
                }
                self.blob(repository, body);
                Reply::status(201)
            }
            (&Method::PUT, _, Some((repository, tag))) => {
                let kind = request.headers.get(header::CONTENT_TYPE).map_or("", |kind| kind.to_str().unwrap());
                let is_complete = references(body).iter().all(|digest| self.has_blob(repository, digest));
                if kind != IMAGE_MANIFEST || !is_complete {
                    return invalid();
                }
                self.manifest(repository, tag, kind, body);
                Reply::status(201)
            }
            _ => self.0.lock().contents.get(path).cloned().unwrap_or(Reply::status(404)),
        }
    }

    fn has_blob(&self, repository: &str, digest: &str) -> bool {
        self.0.lock().contents.contains_key(&format!("/v2/{repository}/blobs/{digest}"))
    }

    /// Sets the reply of a path.
    pub fn put(&self, path: String, reply: Reply) {
        self.0.lock().contents.insert(path, reply);
    }

    /// Gives this reply to the next request whose URI contains a text.
    pub fn interrupt(&self, part: &str, reply: Reply) {
        self.0.lock().interruptions.push((part.to_owned(), reply));
    }

    /// The reply of a path.
    pub fn content(&self, path: &str) -> Reply {
        self.0.lock().contents[path].clone()
    }

    /// Gives a manifest another media type.
    pub fn retype(&self, repository: &str, tag: &str, kind: &str) {
        let Reply::Of(_, _, content) = self.content(&format!("/v2/{repository}/manifests/{tag}")) else { return };
        let content = String::from_utf8(content.to_vec()).unwrap();
        let content = content.replace(IMAGE_MANIFEST, kind);
        self.manifest(repository, tag, kind, content.as_bytes());
    }

    /// Sends all contents without their length.
    pub fn chunk(&self) {
        for reply in self.0.lock().contents.values_mut() {
            if let Reply::Of(200, _, content) = reply {
                *reply = Reply::Chunked(content.clone());
            }
        }
    }

    /// Moves the blobs to paths of their own, and redirects to them below a URL.
    pub fn move_blobs(&self, status: u16, base: &str) {
        let contents = &mut self.0.lock().contents;
        let blobs: Vec<_> = contents.keys().filter(|path| path.contains("/blobs/")).cloned().collect();
        for path in blobs {
            let moved = format!("/moved{path}");
            let location = format!("{base}{moved}?signature=a%2Fb");
            let content = contents.insert(path, Reply::with(status, "location", location)).unwrap();
            contents.insert(moved, content);
        }
    }

    /// Changes the headers of the manifests.
    pub fn manifest_headers(&self, change: impl Fn(&mut Vec<(&'static str, String)>)) {
        for (path, reply) in &mut self.0.lock().contents {
            if let Reply::Of(_, headers, _) = reply
                && path.contains("/manifests/")
            {
                change(headers);
            }
        }
    }

    /// Gives these replies to requests whose URI contains a text, the last one repeatedly.
    pub fn script(&self, part: &str, replies: impl IntoIterator<Item = Reply>) {
        self.0.lock().scripts.insert(part.to_owned(), replies.into_iter().collect());
    }

    /// Ends a script.
    pub fn recover(&self, part: &str) {
        self.0.lock().scripts.remove(part).unwrap();
    }

    /// Demands this header `Authorization` with this challenge, except where a script replies.
    pub fn protect(&self, authorization: &str, challenge: &str) {
        let refusal = Reply::with(401, "www-authenticate", challenge);
        self.refuse(Protection { authorization: authorization.to_owned(), ping: refusal.clone(), refusal });
    }

    /// Refuses requests as described, except where a script replies.
    pub fn refuse(&self, protection: Protection) {
        self.0.lock().protection = Some(protection);
    }

    /// All requests so far.
    pub fn received(&self) -> Vec<Received> {
        self.0.lock().received.clone()
    }

    /// Number of requests whose URI contains a text.
    pub fn count(&self, part: &str) -> usize {
        self.received().iter().filter(|received| received.uri.contains(part)).count()
    }

    /// Transport without connections.
    pub fn transport(&self) -> BoxCloneSyncService<Request<Full<Bytes>>, Response<Body>, BoxError> {
        let registry = self.clone();
        BoxCloneSyncService::new(tower::service_fn(move |request| registry.clone().respond(request)))
    }

    /// Serves connections on the loopback interface, and returns the port.
    pub async fn listen(&self, tls: Option<ServerConfig>) -> (u16, JoinSet<()>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let registry = self.clone();
        let tls = tls.map(|tls| TlsAcceptor::from(Arc::new(tls)));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let registry = registry.clone();
                let tls = tls.clone();
                connections.spawn(async move {
                    let service = hyper::service::service_fn(move |request| registry.clone().respond(request));
                    let server = hyper::server::conn::http1::Builder::new();
                    // Refused handshakes are the client's matter.
                    let _ = match tls {
                        None => server.serve_connection(TokioIo::new(stream), service).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => server.serve_connection(TokioIo::new(stream), service).await,
                            Err(_) => Ok(()),
                        },
                    };
                });
            }
        });
        (port, tasks)
    }

    async fn respond<B>(self, request: Request<B>) -> Result<Response<Body>, BoxError>
    where
        B: http_body::Body<Data: Send, Error: std::fmt::Debug>,
    {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let text = |name| parts.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
        let authorization = text(header::AUTHORIZATION);
        let host = parts.headers.get(header::HOST).filter(|_| parts.uri.host().is_none());
        let uri = format!("{}{}", host.map(|host| host.to_str().unwrap()).unwrap_or_default(), parts.uri);
        let reply = {
            let mut state = self.0.lock();
            state.received.push(Received {
                method: parts.method.to_string(),
                uri: uri.clone(),
                authorization: authorization.clone(),
                headers: parts.headers.clone(),
                body: String::from_utf8_lossy(&body).into_owned(),
            });
            let access = state.access;
            let interruption = state.interruptions.iter().position(|(part, _)| uri.contains(part));
            let interruption = interruption.map(|position| state.interruptions.remove(position).1);
            let script = state.scripts.iter_mut().find(|(part, _)| uri.contains(*part));
            let scripted = script.map(|(_, replies)| {
                if replies.len() > 1 { replies.pop_front().unwrap() } else { replies.front().unwrap().clone() }
            });
            let refused = state.protection.as_ref();
            let refused = refused.filter(|demanded| {
                parts.uri.path().starts_with("/v2/") && Some(&demanded.authorization) != authorization.as_ref()
            });
            let refused = refused.map(|Protection { refusal, ping, .. }| match parts.uri.path() {
                "/v2/" => ping.clone(),
                _ => refusal.clone(),
            });
            let refused = refused.or_else(|| access.refusal(&parts, authorization.as_deref(), &body));
            let reply = interruption.or(scripted).or(refused);
            let maker = state.maker.clone().filter(|_| !state.contents.contains_key(parts.uri.path()));
            drop(state);
            reply.unwrap_or_else(|| {
                maker.inspect(|maker| maker(&self, parts.uri.path()));
                self.store(&parts, &body)
            })
        };
        // Lets other tasks run between any two requests.
        tokio::task::yield_now().await;
        reply.response().await
    }
}

/// Query of an upload.
const SESSION: &str = "state=a%3Db";
const IMAGE_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Digests that a manifest refers to.
fn references(manifest: &[u8]) -> Vec<String> {
    let manifest: serde_json::Value = serde_json::from_slice(manifest).unwrap();
    let layers = manifest["layers"].as_array().unwrap().iter().chain([&manifest["config"]]);
    layers.map(|reference| reference["digest"].as_str().unwrap().to_owned()).collect()
}

impl Access {
    /// The token of a request for one, or the refusal of a request without the demanded authorization.
    fn refusal(self, request: &Parts, authorization: Option<&str>, body: &[u8]) -> Option<Reply> {
        let basic = |password: &str| format!("Basic {}", STANDARD.encode(format!("tide:{password}")));
        let refused = Reply::Of(401, Vec::new(), "who are you?".into());
        if let (Self::Token(secret), "/token") = (self, request.uri.path()) {
            let body = str::from_utf8(body).unwrap();
            let refresh = format!("refresh_token={secret}&");
            let is_known =
                authorization == Some(&basic(secret)) || request.method == Method::POST && body.contains(&refresh);
            let is_push = format!("{}{body}", request.uri.query().unwrap_or_default()).contains("push");
            return Some(match (is_known, is_push) {
                (false, _) => refused,
                (true, false) => Reply::content(r#"{"token": "reads"}"#),
                (true, true) => Reply::content(r#"{"access_token": "writes"}"#),
            });
        }
        let is_read = [Method::GET, Method::HEAD].contains(&request.method);
        let is_permitted = match self {
            Self::Anonymous => true,
            Self::Password(password) => authorization == Some(&basic(password)),
            Self::Token(_) => {
                authorization == Some("Bearer writes") || is_read && authorization == Some("Bearer reads")
            }
            Self::Fixed(token) => authorization == Some(&format!("Bearer {token}")),
        };
        match self {
            Self::Token(_) if is_permitted && request.method == Method::HEAD => Some(Reply::status(405)),
            _ if is_permitted => None,
            Self::Anonymous | Self::Password(_) => Some(Reply::with(401, "www-authenticate", "Basic realm=\"test\"")),
            Self::Token(_) | Self::Fixed(_) => {
                let host = request.headers[header::HOST].to_str().unwrap();
                let challenge = format!("Bearer realm=\"http://{host}/token\",service=\"test\"");
                Some(Reply::with(401, "www-authenticate", challenge))
            }
        }
    }
}

impl Reply {
    async fn response(self) -> Result<Response<Body>, BoxError> {
        let chunk = |bytes| Ok::<_, BoxError>(Frame::data(bytes));
        let streamed = |frames| StreamBody::new(frames).boxed_unsync();
        let (status, headers, body) = match self {
            Self::Of(status, headers, content) => (status, headers, full(content)),
            Self::Down => return Err(io::Error::new(io::ErrorKind::ConnectionRefused, "connection refused").into()),
            Self::Silent => return future::pending().await,
            Self::Stalled(first) => {
                let frames = stream::iter([chunk(first)]).chain(stream::pending());
                (200, Vec::new(), streamed(frames.boxed()))
            }
            Self::Endless(bytes, interval) => {
                let content = Bytes::from(vec![b'x'; bytes]);
                let frames = stream::iter(iter::repeat(content)).then(move |content| async move {
                    sleep(interval).await;
                    chunk(content)
                });
                (200, Vec::new(), streamed(frames.boxed()))
            }
            Self::Chunked(content) => (200, Vec::new(), streamed(stream::iter([chunk(content)]).boxed())),
            Self::Broken(first) => {
                let broken = Err(io::Error::from(io::ErrorKind::ConnectionReset).into());
                (200, Vec::new(), streamed(stream::iter([chunk(first), broken]).boxed()))
            }
        };
        let mut response = Response::builder().status(StatusCode::from_u16(status).unwrap());
        for (name, value) in headers {
            response = response.header(name, value);
        }
        Ok(response.body(body).unwrap())
    }
}

fn full(content: Bytes) -> Body {
    Full::new(content).map_err(|never: Infallible| match never {}).boxed_unsync()
}
