//! Serves it over HTTP/1.1: one request per connection, few connections, short deadlines, and an answer that is written piece by
//! piece.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::stream;
use http::{HeaderValue, Method, Request, Response, StatusCode, header, request::Parts, uri::Authority};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
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

use super::{Admin, DEADLINE, Door, FLEET_PATH, Fleet, auth::Verdict, report::Report};

/// Connections: a few people.
const CONNECTIONS: usize = 8;
/// From accept to the end of the handshake, and from there to the end of the request's head.
const HEAD_DEADLINE: Duration = Duration::from_secs(5);
/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;
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
            let handshake = TlsAcceptor::from(tls.clone()).accept(tcp);
            if let Ok(Ok(stream)) = timeout(HEAD_DEADLINE, handshake).await {
                serve(stream, &door, &fleet).await;
            }
        }
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, door: &Door, fleet: &Fleet) {
    let service = service_fn(async |request: Request<hyper::body::Incoming>| {
        Ok::<_, Infallible>(answer(door, fleet, &request.into_parts().0).await)
    });
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .max_buf_size(HEAD_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn answer(door: &Door, fleet: &Fleet, request: &Parts) -> Answer {
    if let Err(refused) = admit(door, request).await {
        return refused;
    }
    if request.uri.path() != FLEET_PATH {
        return text(StatusCode::NOT_FOUND, "not found\n");
    }
    if request.method != Method::GET {
        let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed\n");
        answer.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
        return answer;
    }
    json(fleet.report())
}

/// Nothing is said of what is there before this.
async fn admit(door: &Door, request: &Parts) -> Result<(), Answer> {
    let reviewer = match door {
        // A page in a browser on this machine may send requests here by a name of its own, and must not read the answers.
        Door::Loopback if is_local(request) => return Ok(()),
        Door::Loopback => return Err(text(StatusCode::MISDIRECTED_REQUEST, "not for this host\n")),
        Door::Tokens(_, reviewer) => reviewer,
    };
    match reviewer.judge(&request.headers).await {
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
    use crate::admin::{Bind, Flags};

    fn parts(method: Method, path: &str, host: &str) -> Parts {
        Request::builder().method(method).uri(path).header(header::HOST, host).body(()).unwrap().into_parts().0
    }

    async fn ask(method: Method, path: &str, host: &str) -> (u16, String) {
        let fleet = Fleet::new(Instance::new(255));
        let answer = answer(&Door::Loopback, &fleet, &parts(method, path, host)).await;
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
    }

    #[tokio::test]
    async fn the_answer_is_the_report_in_pieces() {
        let runtime = |number: usize| {
            serde_json::from_value(serde_json::json!({
                "kyma": format!("k-{number}"), "namespace": "n", "runtimeId": null, "ambiguous": false,
                "path": {"state": "Unknown"}, "contract": "unheard", "lastSeenSeconds": null, "heartbeatSeconds": 30,
                "canaryAgeSeconds": null, "agentVersion": null, "planRevision": null, "planIsCurrent": false,
                "certificateNotAfter": null, "waiting": 0, "parked": 0, "gaps": 0, "duplicates": 0, "unsettled": [],
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
            let tls = Arc::new(tidewatch_shared::tls::server_without_clients(&identity).unwrap());
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
