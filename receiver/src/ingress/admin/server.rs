//! Serves it over HTTP/1.1: one request per connection, few connections, short deadlines, and an answer that is written piece by
//! piece.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::stream;
use http::{HeaderValue, Method, Request, Response, StatusCode, header, request::Parts, uri::Authority};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Collected, Full, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::Semaphore,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use super::{
    Admin, DEADLINE, Door, FLEET_PATH, Fleet, ROTATE_PATH, ROTATION_PATH,
    auth::{Right, Verdict},
    report::Report,
};
use crate::pki::{NotOrdered, Order, Ordered};

/// Connections: a few people.
const CONNECTIONS: usize = 8;
/// From accept to the end of the handshake, and from there to the end of the request's head.
const HEAD_DEADLINE: Duration = Duration::from_secs(5);
/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;
/// Bytes of an order: it has one number.
const ORDER_BYTES: usize = 1 << 10;
/// When the system cannot hand over a connection, the next try comes after this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Runtimes in one piece of the answer.
const PIECE: usize = 64;

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

impl Admin {
    /// Serves until the future is dropped, and every connection with it.
    pub async fn run(self) {
        let Self { listener, door, fleet, .. } = self;
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        let mut connections = JoinSet::new();
        loop {
            // Nobody closes the semaphore.
            let Ok(permit) = room.clone().acquire_owned().await else { return };
            let Ok((tcp, _)) = listener.accept().await else {
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let (door, fleet) = (door.clone(), fleet.clone());
            connections.spawn(async move {
                let _permit = permit;
                // Whatever ends it is the other side's to notice.
                let _ = timeout(DEADLINE, connection(tcp, door, fleet)).await;
            });
            while connections.try_join_next().is_some() {}
        }
    }
}

async fn connection(tcp: TcpStream, door: Door, fleet: Fleet) {
    match &door {
        Door::Loopback => serve(tcp, &door, &fleet).await,
        Door::Tokens(tls, _) => {
            let handshake = TlsAcceptor::from(tls.load_full()).accept(tcp);
            if let Ok(Ok(stream)) = timeout(HEAD_DEADLINE, handshake).await {
                serve(stream, &door, &fleet).await;
            }
        }
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, door: &Door, fleet: &Fleet) {
    let service = service_fn(async |request: Request<hyper::body::Incoming>| {
        Ok::<_, Infallible>(answer(door, fleet, request).await)
    });
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .max_buf_size(HEAD_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Fleet,
    Rotation,
    Rotate,
}

impl Route {
    fn of(path: &str) -> Option<Self> {
        match path {
            FLEET_PATH => Some(Self::Fleet),
            ROTATION_PATH => Some(Self::Rotation),
            ROTATE_PATH => Some(Self::Rotate),
            _ => None,
        }
    }

    const fn method(self) -> Method {
        match self {
            Self::Fleet | Self::Rotation => Method::GET,
            Self::Rotate => Method::POST,
        }
    }

    const fn right(self) -> Right {
        match self {
            Self::Fleet => Right { path: FLEET_PATH, verb: "get" },
            Self::Rotation => Right { path: ROTATION_PATH, verb: "get" },
            Self::Rotate => Right { path: ROTATE_PATH, verb: "post" },
        }
    }
}

async fn answer<B>(door: &Door, fleet: &Fleet, request: Request<B>) -> Answer
where
    B: Body<Data = Bytes, Error: std::error::Error + Send + Sync + 'static>,
{
    let (parts, body) = request.into_parts();
    let route = Route::of(parts.uri.path());
    // Whoever may see the fleet may know what is not there.
    if let Err(refused) = admit(door, &parts, route.unwrap_or(Route::Fleet).right()).await {
        return refused;
    }
    let Some(route) = route else { return text(StatusCode::NOT_FOUND, "not found\n") };
    if parts.method != route.method() {
        let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed\n");
        let allowed = if route.method() == Method::POST { "POST" } else { "GET" };
        answer.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
        return answer;
    }
    match route {
        Route::Fleet => json(fleet.report()),
        Route::Rotation => match fleet.rotation() {
            Some(progress) => object(StatusCode::OK, &*progress),
            None => text(StatusCode::NOT_FOUND, "there is no built-in CA, or this receiver is not active\n"),
        },
        Route::Rotate => match order(&parts, body).await {
            Ok(order) => rotated(fleet.rotate(order).await),
            Err(refused) => refused,
        },
    }
}

/// Reads what is asked for. A page in a browser on this machine can send no JSON here without asking first, and is not answered then.
async fn order<B>(request: &Parts, body: B) -> Result<Order, Answer>
where
    B: Body<Data = Bytes, Error: std::error::Error + Send + Sync + 'static>,
{
    let is_json = request.headers.get(header::CONTENT_TYPE).is_some_and(|value| value == "application/json");
    if !is_json || request.headers.contains_key(header::ORIGIN) {
        return Err(text(StatusCode::UNSUPPORTED_MEDIA_TYPE, "the content type must be application/json\n"));
    }
    let body = Limited::new(body, ORDER_BYTES).collect();
    let body = timeout(HEAD_DEADLINE, body).await.ok().and_then(Result::ok).map(Collected::to_bytes);
    body.and_then(|body| serde_json::from_slice(&body).ok())
        .ok_or_else(|| text(StatusCode::BAD_REQUEST, "the order is not readable\n"))
}

fn rotated(result: Option<Result<Ordered, NotOrdered>>) -> Answer {
    match result {
        None => text(StatusCode::SERVICE_UNAVAILABLE, "this receiver is not active\n"),
        Some(Ok(ordered)) => object(StatusCode::ACCEPTED, &ordered),
        Some(Err(NotOrdered::NoCa)) => text(StatusCode::NOT_FOUND, "there is no built-in CA\n"),
        Some(Err(NotOrdered::Secret)) => text(StatusCode::CONFLICT, "the Secret of the CA is gone or cannot be used\n"),
        Some(Err(NotOrdered::Write | NotOrdered::Late)) => {
            text(StatusCode::SERVICE_UNAVAILABLE, "the Secret of the CA could not be written; ask again\n")
        }
    }
}

/// Nothing is said of what is there before this.
async fn admit(door: &Door, request: &Parts, right: Right) -> Result<(), Answer> {
    let reviewer = match door {
        // A page in a browser on this machine may send requests here by a name of its own, and must not read the answers.
        Door::Loopback if is_local(request) => return Ok(()),
        Door::Loopback => return Err(text(StatusCode::MISDIRECTED_REQUEST, "not for this host\n")),
        Door::Tokens(_, reviewer) => reviewer,
    };
    match reviewer.judge(&request.headers, right).await {
        Verdict::Allowed => Ok(()),
        Verdict::Unknown => {
            let mut answer = text(StatusCode::UNAUTHORIZED, "unauthorized\n");
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            Err(answer)
        }
        Verdict::Forbidden => Err(text(StatusCode::FORBIDDEN, "forbidden\n")),
        Verdict::Unasked => Err(text(StatusCode::SERVICE_UNAVAILABLE, "the control plane could not be asked\n")),
    }
}

/// Whether the request names this machine by an address of the loopback, or `localhost`.
fn is_local(request: &Parts) -> bool {
    let mut hosts = request.headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    let Some(authority) = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok()) else { return false };
    let host = authority.host();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

fn text(status: StatusCode, body: &'static str) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from_static(body.as_bytes())).boxed_unsync());
    *answer.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, plain);
    answer
}

fn object(status: StatusCode, value: &impl Serialize) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(written(value) + "\n")).boxed_unsync());
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

fn written(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings, numbers and maps of strings have a JSON form")
}

/// Thousands of runtimes are never in memory as one text.
fn json(report: Report) -> Answer {
    let Report { receiver, summary, runtimes } = report;
    let head = format!("{{\"receiver\":{},\"summary\":{},\"runtimes\":[", written(&receiver), written(&summary));
    let mut pieces = runtimes.into_iter();
    let mut first = true;
    let body = std::iter::once(head)
        .chain(std::iter::from_fn(move || {
            let mut piece = String::new();
            for runtime in pieces.by_ref().take(PIECE) {
                if !std::mem::take(&mut first) {
                    piece.push(',');
                }
                piece.push_str(&written(&runtime));
            }
            (!piece.is_empty()).then_some(piece)
        }))
        .chain(std::iter::once("]}\n".to_owned()));
    let frames = body.map(|piece| Ok(Frame::data(Bytes::from(piece))));
    let mut answer = Response::new(StreamBody::new(stream::iter(frames)).boxed_unsync());
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

#[cfg(test)]
mod tests {
    use tidewatch_shared::identity::Instance;

    use super::*;
    use crate::ingress::admin::{Bind, Flags};

    fn request(method: Method, path: &str, host: &str) -> Request<Full<Bytes>> {
        Request::builder().method(method).uri(path).header(header::HOST, host).body(Full::default()).unwrap()
    }

    async fn ask(method: Method, path: &str, host: &str) -> (u16, String) {
        let fleet = Fleet::new(Instance::new(255));
        let answer = answer(&Door::Loopback, &fleet, request(method, path, host)).await;
        let status = answer.status().as_u16();
        (status, String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap())
    }

    #[tokio::test]
    async fn whoever_is_here_sees_the_fleet_under_a_local_name_alone() {
        for host in ["127.0.0.1:8085", "localhost:1", "LOCALHOST", "[::1]:8085", "127.8.9.1"] {
            let (status, body) = ask(Method::GET, "/fleet", host).await;
            assert_eq!(status, 200, "{host}");
            let report: Report = serde_json::from_str(&body).unwrap();
            assert_eq!((report.receiver.active, report.runtimes.len()), (false, 0));
        }
        for host in ["evil.example", "127.0.0.1.evil.example:8085", "10.0.0.1", "localhost.evil", ""] {
            assert_eq!(ask(Method::GET, "/fleet", host).await.0, 421, "{host}");
        }
        assert_eq!(ask(Method::POST, "/fleet", "localhost").await.0, 405);
        assert_eq!(ask(Method::GET, "/metrics", "localhost").await.0, 404);
        assert_eq!(ask(Method::GET, "/rotate-ca", "localhost").await.0, 405);
        assert_eq!(ask(Method::GET, "/rotation", "localhost").await.0, 404);
    }

    #[tokio::test]
    async fn no_page_in_a_browser_can_order_a_rotation() {
        let post = async |headers: &[(&'static str, &'static str)], body: &'static str| {
            let mut request = request(Method::POST, "/rotate-ca", "localhost").map(|_| Full::from(body));
            request.headers_mut().extend(
                headers
                    .iter()
                    .map(|(name, value)| (header::HeaderName::from_static(name), HeaderValue::from_static(value))),
            );
            answer(&Door::Loopback, &Fleet::new(Instance::new(1)), request).await.status().as_u16()
        };
        let json = ("content-type", "application/json");
        assert_eq!(post(&[json], r#"{"forceAfterSeconds": 5}"#).await, 503, "a good order to one that waits");
        assert_eq!(post(&[], "{}").await, 415);
        assert_eq!(post(&[("content-type", "text/plain")], "{}").await, 415);
        assert_eq!(post(&[json, ("origin", "http://evil.example")], "{}").await, 415);
        for bad in ["", "[", r#"{"force": 1}"#, r#"{"forceAfterSeconds": -1}"#] {
            assert_eq!(post(&[json], bad).await, 400, "{bad}");
        }
    }

    #[tokio::test]
    async fn the_answer_is_the_report_in_pieces() {
        let runtime = |number: usize| {
            serde_json::from_value(serde_json::json!({
                "kyma": format!("k-{number}"), "namespace": "n", "runtimeId": null, "ambiguous": false,
                "path": {"state": "Unknown", "reason": "Unknown"}, "contract": "unheard", "lastSeenSeconds": null,
                "heartbeatSeconds": 30, "canaryAgeSeconds": null, "agentVersion": null, "planRevision": null,
                "planIsCurrent": false, "certificateNotAfter": null, "waiting": 0, "parked": 0, "gaps": 0, "duplicates": 0, "unsettled": [],
                "wanted": [], "paused": [], "inWork": false, "failures": 0, "epochs": [],
            }))
            .unwrap()
        };
        for count in [0, 1, PIECE, PIECE * 2 + 1] {
            let mut report = Report::new(Instance::new(1), Duration::ZERO, None);
            report.runtimes = (0..count).map(runtime).collect();
            let body = json(report.clone()).into_body().collect().await.unwrap().to_bytes();
            assert_eq!(serde_json::from_slice::<Report>(&body).unwrap(), report);
        }
    }

    #[tokio::test]
    async fn nothing_is_exposed_without_authentication() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let never = tower::service_fn(async |_: Request<kube::client::Body>| {
            std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>().await
        });
        let bind = async |address: &str, admin_auth| {
            let ca = crate::pki::Ca::generate("test", 1_700_000_000, crate::pki::CA_VALIDITY).unwrap();
            let pair =
                ca.make_server(&["localhost".parse().unwrap()], 1_700_000_000, crate::pki::SERVER_VALIDITY).unwrap();
            let identity =
                tidewatch_shared::tls::Identity::from_pem(pair.chain.as_bytes(), pair.key.as_bytes()).unwrap();
            let tls = tidewatch_shared::tls::server_without_client_auth(&identity).unwrap();
            let tls = Arc::new(arc_swap::ArcSwap::from_pointee(tls));
            let flags = Flags { admin_address: address.parse().unwrap(), admin_auth };
            let kcp = kube::Client::new(never, "default");
            Admin::bind(&flags, tls, kcp, Fleet::new(Instance::new(1)))
                .await
                .map(|admin| matches!(admin.door, Door::Loopback))
        };
        assert!(matches!(bind("0.0.0.0:0", false).await, Err(Bind::Exposed(_))));
        assert!(matches!(bind("127.0.0.1:0", false).await, Ok(true)));
        assert!(matches!(bind("127.0.0.1:0", true).await, Ok(false)));
        assert!(matches!(bind("0.0.0.0:0", true).await, Ok(false)));
    }
}
