//! HTTP servers on loopback that answer from a function: an admin listener, or an API server with port-forwards.

use std::{convert::Infallible, net::SocketAddr, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use http::{HeaderMap, Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::{Value, json};
use tidewatch_kit::tls;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, handshake::derive_accept_key, protocol::Role},
};

/// Answer to one request.
#[derive(Clone)]
pub(crate) enum Answer {
    /// A status and a JSON body.
    Json(u16, Value),
    /// A port-forward to a pod whose listener responds with this JSON body.
    Pod(Value),
    /// A port-forward that the kubelet refuses with this reason.
    Refusal(&'static str),
}

type Answers = Arc<dyn Fn(&Parts) -> Answer + Send + Sync>;

/// A server and the requests that it received.
pub(crate) struct Server {
    address: SocketAddr,
    /// PEM of its certificate; `None` for plain HTTP.
    certificate: Option<String>,
    /// Method, path and query of each request, then the heads that were received through port-forwards.
    pub(crate) received: Arc<Mutex<Vec<String>>>,
    /// JSON bodies of the patches.
    bodies: Arc<Mutex<Vec<Value>>>,
}

impl Server {
    /// Serves plain HTTP.
    pub(crate) async fn http(answers: impl Fn(&Parts) -> Answer + Send + Sync + 'static) -> Self {
        Self::start(None, Arc::new(answers)).await
    }

    /// Serves HTTPS with a certificate of its own.
    pub(crate) async fn https(answers: impl Fn(&Parts) -> Answer + Send + Sync + 'static) -> Self {
        let pair = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(pair.signing_key.serialize_der()));
        let config = rustls::ServerConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![pair.cert.der().clone()], key)
            .unwrap();
        let tls = (TlsAcceptor::from(Arc::new(config)), pair.cert.pem());
        Self::start(Some(tls), Arc::new(answers)).await
    }

    async fn start(tls: Option<(TlsAcceptor, String)>, answers: Answers) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::new(Mutex::default());
        let (acceptor, certificate) = tls.unzip();
        let log = received.clone();
        let bodies = Arc::new(Mutex::default());
        let patches = bodies.clone();
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                let answers = answers.clone();
                let log = log.clone();
                let patches = patches.clone();
                tokio::spawn(async move {
                    match acceptor {
                        None => serve(tcp, answers, log, patches).await,
                        Some(acceptor) => serve(acceptor.accept(tcp).await.unwrap(), answers, log, patches).await,
                    }
                });
            }
        });
        Self { address, certificate, received, bodies }
    }

    /// Its URL.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.certificate.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// A kubeconfig that names it.
    pub(crate) fn kubeconfig(&self) -> String {
        let mut cluster = json!({"server": self.url()});
        if let Some(certificate) = &self.certificate {
            cluster["certificate-authority-data"] = STANDARD.encode(certificate).into();
        }
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "a", "cluster": cluster}],
            "users": [{"name": "b", "user": {"token": "sesame"}}],
            "contexts": [{"name": "c", "context": {"cluster": "a", "user": "b"}}],
        })
        .to_string()
    }

    /// JSON bodies of the patches so far.
    pub(crate) fn bodies(&self) -> Vec<Value> {
        self.bodies.lock().clone()
    }

    /// Requests so far.
    pub(crate) fn received(&self) -> Vec<String> {
        self.received.lock().clone()
    }
}

/// Appends the body of a patch.
async fn record(request: Request<Incoming>, patches: &Mutex<Vec<Value>>) -> Request<Full<Bytes>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    patches.lock().push(serde_json::from_slice(&body).unwrap());
    Request::from_parts(parts, Full::new(body))
}

async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    answers: Answers,
    log: Arc<Mutex<Vec<String>>>,
    patches: Arc<Mutex<Vec<Value>>>,
) {
    let service = service_fn(move |request: Request<Incoming>| {
        let answers = answers.clone();
        let log = log.clone();
        let patches = patches.clone();
        async move {
            Ok::<_, Infallible>(if request.method() == Method::PATCH {
                respond(record(request, &patches).await, &answers, &log)
            } else {
                respond(request, &answers, &log)
            })
        }
    });
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).with_upgrades().await;
}

fn respond<B>(mut request: Request<B>, answers: &Answers, log: &Arc<Mutex<Vec<String>>>) -> Response<Full<Bytes>> {
    let upgrade = hyper::upgrade::on(&mut request);
    let (parts, _) = request.into_parts();
    log.lock().push(format!("{} {}", parts.method, parts.uri));
    let answer = answers(&parts);
    if let Answer::Json(status, body) = answer {
        let mut response = Response::new(Full::from(body.to_string()));
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        return response;
    }
    let port: u16 = parts.uri.query().unwrap().rsplit_once("ports=").unwrap().1.parse().unwrap();
    let log = log.clone();
    tokio::spawn(async move {
        let stream = TokioIo::new(upgrade.await.unwrap());
        forward(WebSocketStream::from_raw_socket(stream, Role::Server, None).await, port, answer, log).await;
    });
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *response.headers_mut() = upgraded(&parts.headers);
    response
}

fn upgraded(request: &HeaderMap) -> HeaderMap {
    let accept = derive_accept_key(request[header::SEC_WEBSOCKET_KEY].as_bytes());
    HeaderMap::from_iter([
        (header::CONNECTION, "Upgrade".parse().unwrap()),
        (header::UPGRADE, "websocket".parse().unwrap()),
        (header::SEC_WEBSOCKET_ACCEPT, accept.parse().unwrap()),
        (header::SEC_WEBSOCKET_PROTOCOL, "v4.channel.k8s.io".parse().unwrap()),
    ])
}

/// The kubelet's side: channel 0 has data and channel 1 errors; each begins with the port.
async fn forward(
    mut socket: WebSocketStream<impl AsyncRead + AsyncWrite + Unpin>,
    port: u16,
    answer: Answer,
    log: Arc<Mutex<Vec<String>>>,
) {
    let frame = |channel: u8, content: &[u8]| Message::Binary([&[channel], content].concat().into());
    for channel in [0, 1] {
        socket.send(frame(channel, &port.to_le_bytes())).await.unwrap();
    }
    match answer {
        Answer::Refusal(reason) => socket.send(frame(1, reason.as_bytes())).await.unwrap(),
        Answer::Json(_, body) | Answer::Pod(body) => {
            let mut head = Vec::new();
            while !head.windows(4).any(|window| window == b"\r\n\r\n") {
                let Some(Ok(Message::Binary(data))) = socket.next().await else { return };
                head.extend_from_slice(&data[1..]);
            }
            log.lock().push(String::from_utf8(head).unwrap());
            let body = body.to_string();
            let response = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            socket.send(frame(0, response.as_bytes())).await.unwrap();
        }
    }
    let _ = socket.close(None).await;
    // A socket that is dropped with unread data is reset, and the peer loses frames that it has not read (RFC 1122,
    // section 4.2.2.13).
    while let Some(Ok(_)) = socket.next().await {}
}
