//! Routes of the admin listener.

use std::convert::Infallible;

use bytes::Bytes;
use futures::stream;
use http::{HeaderValue, Request, StatusCode, header, request::Parts, uri::Authority};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Collected, Limited, StreamBody};
use serde::Serialize;
use tidewatch_contract::admin::{
    FLEET_PATH, ROTATE_PATH, ROTATION_PATH, SHARDS_PATH,
    fleet::Report,
    rotation::{RotationRequest, RotationResponse},
};
use tidewatch_fleet::peers::AskError;
use tidewatch_trust::RotationError;
use tokio::time::timeout;

use super::{
    AccessPolicy, FleetHandle,
    auth::{Authorization, Permission},
};
use crate::http::{HEAD_DEADLINE, HttpResponse, TEXT, method_not_allowed, response, single_value, with_body};

/// Maximum size of a rotation request, in bytes; it has one number.
const MAX_REQUEST: usize = 1 << 10;
/// Runtimes per chunk of the streamed report.
const RUNTIMES_PER_CHUNK: usize = 64;
const JSON: &str = "application/json";

/// Resource, with the method that it accepts and the verb that clients need for it.
#[derive(Clone, Copy)]
struct Route {
    method: &'static str,
    permission: Permission,
}

impl Route {
    const FLEET: Self = Self::new("GET", "get", FLEET_PATH);
    const SHARDS: Self = Self::new("GET", "get", SHARDS_PATH);
    const ROTATION: Self = Self::new("GET", "get", ROTATION_PATH);
    const ROTATE: Self = Self::new("POST", "post", ROTATE_PATH);

    const fn new(method: &'static str, verb: &'static str, path: &'static str) -> Self {
        Self { method, permission: Permission { path, verb } }
    }
}

/// Authorizes and serves a request.
pub(super) async fn respond<B: Body<Data = Bytes, Error: std::error::Error + Send + Sync + 'static>>(
    policy: &AccessPolicy,
    fleet: &FleetHandle,
    request: Request<B>,
) -> HttpResponse {
    let (parts, body) = request.into_parts();
    let routes = [Route::FLEET, Route::SHARDS, Route::ROTATION, Route::ROTATE];
    let route = routes.into_iter().find(|route| route.permission.path == parts.uri.path());
    // Unknown paths need the permission to read the fleet, so that clients without it cannot probe for paths.
    if let Err(refused) = authorize(policy, &parts, route.unwrap_or(Route::FLEET).permission).await {
        return refused;
    }
    let Some(route) = route else { return text(StatusCode::NOT_FOUND, "not found\n") };
    if parts.method.as_str() != route.method {
        return method_not_allowed(route.method);
    }
    match route.permission.path {
        FLEET_PATH => match fleet.report().await {
            Ok(report) => chunked(report),
            Err(error) => unanswered(error),
        },
        SHARDS_PATH => json(StatusCode::OK, &fleet.shards()),
        ROTATION_PATH => match fleet.rotation().await {
            Ok(Some(progress)) => json(StatusCode::OK, &progress),
            Ok(None) => text(StatusCode::NOT_FOUND, "there is no built-in CA, or this receiver is not active\n"),
            Err(error) => unanswered(error),
        },
        _ => match rotation_request(&parts, body).await {
            Ok(request) => match fleet.rotate(request).await {
                Ok(result) => rotation_response(result),
                Err(error) => unanswered(error),
            },
            Err(refused) => refused,
        },
    }
}

/// Reads a rotation request. Refuses requests of web pages in a browser on this machine: they carry an `Origin`, and no
/// JSON content type without a CORS preflight, which gets no permission here.
async fn rotation_request<B: Body<Data = Bytes, Error: std::error::Error + Send + Sync + 'static>>(
    request: &Parts,
    body: B,
) -> Result<RotationRequest, HttpResponse> {
    let is_json = request.headers.get(header::CONTENT_TYPE).is_some_and(|value| value == JSON);
    if !is_json || request.headers.contains_key(header::ORIGIN) {
        return Err(text(StatusCode::UNSUPPORTED_MEDIA_TYPE, "the content type must be application/json\n"));
    }
    let body = Limited::new(body, MAX_REQUEST).collect();
    let body = timeout(HEAD_DEADLINE, body).await.ok().and_then(Result::ok).map(Collected::to_bytes);
    body.and_then(|body| serde_json::from_slice(&body).ok())
        .ok_or_else(|| text(StatusCode::BAD_REQUEST, "the request is not valid\n"))
}

fn rotation_response(result: Option<Result<RotationResponse, RotationError>>) -> HttpResponse {
    match result {
        None => text(StatusCode::SERVICE_UNAVAILABLE, "this receiver is not active\n"),
        Some(Ok(response)) => json(StatusCode::ACCEPTED, &response),
        Some(Err(RotationError::NoCa)) => text(StatusCode::NOT_FOUND, "there is no built-in CA\n"),
        Some(Err(RotationError::Secret)) => {
            text(StatusCode::CONFLICT, "the Secret of the CA is gone or cannot be used\n")
        }
        Some(Err(RotationError::Write | RotationError::Timeout)) => {
            text(StatusCode::SERVICE_UNAVAILABLE, "the Secret of the CA could not be written; retry later\n")
        }
    }
}

/// Response to a request that this replica could not serve without others. All reasons are temporary.
fn unanswered(error: AskError) -> HttpResponse {
    let reason = match error {
        AskError::Incomplete => {
            "at least one shard has no replica that answers for it now, so there is no whole report; retry later\n"
        }
        AskError::NoFleetHolder => "no replica that runs the tasks of the whole fleet answers now; retry later\n",
        AskError::Unavailable => "a replica cannot answer this now; retry later\n",
    };
    text(StatusCode::SERVICE_UNAVAILABLE, reason)
}

/// Authorizes a request before anything else is disclosed.
async fn authorize(policy: &AccessPolicy, request: &Parts, permission: Permission) -> Result<(), HttpResponse> {
    let reviewer = match policy {
        // A web page in a browser on this machine can send requests here under a name of its own (DNS rebinding), and
        // must not read the responses.
        AccessPolicy::Loopback if names_loopback(request) => return Ok(()),
        AccessPolicy::Loopback => return Err(text(StatusCode::MISDIRECTED_REQUEST, "not for this host\n")),
        AccessPolicy::Token(reviewer) => reviewer,
    };
    match reviewer.authorize(&request.headers, permission).await {
        Authorization::Allowed => Ok(()),
        Authorization::Unauthenticated => {
            let mut response = text(StatusCode::UNAUTHORIZED, "unauthorized\n");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            Err(response)
        }
        Authorization::Forbidden => Err(text(StatusCode::FORBIDDEN, "forbidden\n")),
        Authorization::Unavailable => {
            Err(text(StatusCode::SERVICE_UNAVAILABLE, "the control plane could not review the token\n"))
        }
    }
}

/// Returns true if the only `Host` of the request is a loopback address or `localhost`.
fn names_loopback(request: &Parts) -> bool {
    let host = single_value(&request.headers, &header::HOST);
    let Some(authority) = host.and_then(|host| host.parse::<Authority>().ok()) else { return false };
    let host = authority.host();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

fn text(status: StatusCode, body: &'static str) -> HttpResponse {
    with_body(status, TEXT, body)
}

fn json(status: StatusCode, value: &impl Serialize) -> HttpResponse {
    with_body(status, JSON, serialize(value) + "\n")
}

fn serialize(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings, numbers and maps of strings have a JSON form")
}

/// Streams the report in chunks, since thousands of runtimes as one text would take much memory.
fn chunked(report: Report) -> HttpResponse {
    let Report { receiver, summary, runtimes } = report;
    let head = format!("{{\"receiver\":{},\"summary\":{},\"runtimes\":[", serialize(&receiver), serialize(&summary));
    let mut runtimes = runtimes.into_iter();
    let mut first = true;
    let body = std::iter::once(head)
        .chain(std::iter::from_fn(move || {
            let mut chunk = String::new();
            for runtime in runtimes.by_ref().take(RUNTIMES_PER_CHUNK) {
                if !std::mem::take(&mut first) {
                    chunk.push(',');
                }
                chunk.push_str(&serialize(&runtime));
            }
            (!chunk.is_empty()).then_some(chunk)
        }))
        .chain(std::iter::once("]}\n".to_owned()));
    let frames = body.map(|chunk| Ok::<_, Infallible>(Frame::data(Bytes::from(chunk))));
    response(StatusCode::OK, JSON, StreamBody::new(stream::iter(frames)).boxed_unsync())
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use http::{Method, Response};
    use http_body_util::Full;
    use tidewatch_api::identity::Instance;
    use tidewatch_contract::admin::shards::ShardsReport;

    use super::*;
    use crate::admin::{
        self, BindError, Flags,
        report::{receiver, report},
    };

    fn request(method: Method, path: &str, host: &str) -> Request<Full<Bytes>> {
        Request::builder().method(method).uri(path).header(header::HOST, host).body(Full::default()).unwrap()
    }

    async fn send(method: Method, path: &str, host: &str) -> (u16, String) {
        let fleet = FleetHandle::new(Instance::new(255));
        let response = respond(&AccessPolicy::Loopback, &fleet, request(method, path, host)).await;
        let status = response.status().as_u16();
        (status, String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap())
    }

    #[tokio::test]
    async fn loopback_listener_serves_requests_for_a_loopback_host_only() {
        for host in ["127.0.0.1:8085", "localhost:1", "LOCALHOST", "[::1]:8085", "127.8.9.1"] {
            let (status, body) = send(Method::GET, "/fleet", host).await;
            assert_eq!(status, 200, "{host}");
            let report: Report = serde_json::from_str(&body).unwrap();
            assert_eq!((report.receiver.active, report.runtimes.len()), (false, 0));
        }
        for host in ["evil.example", "127.0.0.1.evil.example:8085", "10.0.0.1", "localhost.evil", ""] {
            assert_eq!(send(Method::GET, "/fleet", host).await.0, 421, "{host}");
        }
        assert_eq!(send(Method::POST, "/fleet", "localhost").await.0, 405);
        assert_eq!(send(Method::GET, "/metrics", "localhost").await.0, 404);
        assert_eq!(send(Method::GET, "/rotate-ca", "localhost").await.0, 405);
        assert_eq!(send(Method::GET, "/rotation", "localhost").await.0, 404);
        let (status, body) = send(Method::GET, "/shards", "localhost").await;
        let report: ShardsReport = serde_json::from_str(&body).unwrap();
        assert_eq!((status, report.receiver.active, report.ownership), (200, false, None));
    }

    #[tokio::test]
    async fn rotation_requests_of_web_pages_are_refused() {
        let post = async |headers: &[(&'static str, &'static str)], body: &'static str| {
            let mut request = request(Method::POST, "/rotate-ca", "localhost").map(|_| Full::from(body));
            request.headers_mut().extend(
                headers
                    .iter()
                    .map(|(name, value)| (header::HeaderName::from_static(name), HeaderValue::from_static(value))),
            );
            respond(&AccessPolicy::Loopback, &FleetHandle::new(Instance::new(1)), request).await.status().as_u16()
        };
        let json = ("content-type", "application/json");
        assert_eq!(post(&[json], r#"{"forceAfterSeconds": 5}"#).await, 503, "a valid request to an inactive receiver");
        assert_eq!(post(&[], "{}").await, 415);
        assert_eq!(post(&[("content-type", "text/plain")], "{}").await, 415);
        assert_eq!(post(&[json, ("origin", "http://evil.example")], "{}").await, 415);
        for bad in ["", "[", r#"{"force": 1}"#, r#"{"forceAfterSeconds": -1}"#] {
            assert_eq!(post(&[json], bad).await, 400, "{bad}");
        }
    }

    #[tokio::test]
    async fn chunked_report_is_valid_json() {
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
        for count in [0, 1, RUNTIMES_PER_CHUNK, RUNTIMES_PER_CHUNK * 2 + 1] {
            let mut report = report(receiver(Instance::new(1), Duration::ZERO, true), Vec::new());
            report.runtimes = (0..count).map(runtime).collect();
            let body = chunked(report.clone()).into_body().collect().await.unwrap().to_bytes();
            assert_eq!(serde_json::from_slice::<Report>(&body).unwrap(), report);
        }
    }

    #[tokio::test]
    async fn listening_beyond_loopback_requires_authentication() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let never = tower::service_fn(async |_: Request<kube::client::Body>| {
            std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>().await
        });
        let bind = async |address: &str, admin_auth| {
            let ca = tidewatch_trust::Ca::generate("test", 1_700_000_000, tidewatch_trust::CA_VALIDITY).unwrap();
            let pair = ca
                .make_server(&["localhost".try_into().unwrap()], 1_700_000_000, tidewatch_trust::SERVER_VALIDITY)
                .unwrap();
            let identity = tidewatch_kit::tls::Identity::from_pem(pair.chain.as_bytes(), pair.key.as_bytes()).unwrap();
            let tls = tidewatch_kit::tls::server_without_client_auth(&identity).unwrap();
            let tls = Arc::new(arc_swap::ArcSwap::from_pointee(tls));
            let flags = Flags { admin_address: address.parse().unwrap(), admin_auth };
            let kcp = kube::Client::new(never, "default");
            admin::bind(&flags, tls, kcp, FleetHandle::new(Instance::new(1))).await.map(|admin| admin.tls.is_none())
        };
        assert!(matches!(bind("0.0.0.0:0", false).await, Err(BindError::Exposed(_))));
        assert!(matches!(bind("127.0.0.1:0", false).await, Ok(true)));
        assert!(matches!(bind("127.0.0.1:0", true).await, Ok(false)));
        assert!(matches!(bind("0.0.0.0:0", true).await, Ok(false)));
    }
}
