//! Minimal HTTP client for probes, metrics pages and etcd's JSON gateway: plain GET and POST on loopback.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};

/// Largest response body in bytes.
const BODY_LIMIT: usize = 16 << 20;

/// Failure of a request without a response.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The connection was refused or broke.
    #[error("connect to {0}")]
    Connect(SocketAddr, #[source] std::io::Error),
    /// The response is not HTTP.
    #[error("exchange http with {0}")]
    Exchange(SocketAddr, #[source] hyper::Error),
    /// The request could not be built.
    #[error("build the request")]
    Request(#[source] http::Error),
    /// The body broke off or is longer than 16 MiB.
    #[error("read the response of {0}")]
    Body(SocketAddr, #[source] Box<dyn std::error::Error + Send + Sync>),
    /// The deadline passed.
    #[error("no response of {0} within {1:?}")]
    Deadline(SocketAddr, Duration),
}

/// GETs `path` and returns status and body as text, within `deadline`.
///
/// # Errors
/// See [`HttpError`]; a status other than 200 is no error.
pub async fn get(address: SocketAddr, path: &str, deadline: Duration) -> Result<(StatusCode, String), HttpError> {
    let request = Request::get(path).header(http::header::HOST, address.to_string()).body(Full::default());
    send(address, request, deadline).await
}

/// POSTs JSON to `path` and returns status and body as text, within `deadline`.
///
/// # Errors
/// See [`HttpError`]; a status other than 200 is no error.
pub async fn post(
    address: SocketAddr,
    path: &str,
    json: String,
    deadline: Duration,
) -> Result<(StatusCode, String), HttpError> {
    let request = Request::post(path)
        .header(http::header::HOST, address.to_string())
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(Full::from(json));
    send(address, request, deadline).await
}

async fn send(
    address: SocketAddr,
    request: Result<Request<Full<Bytes>>, http::Error>,
    deadline: Duration,
) -> Result<(StatusCode, String), HttpError> {
    let request = request.map_err(HttpError::Request)?;
    timeout(deadline, exchange(address, request)).await.unwrap_or(Err(HttpError::Deadline(address, deadline)))
}

async fn exchange(address: SocketAddr, request: Request<Full<Bytes>>) -> Result<(StatusCode, String), HttpError> {
    let stream = TcpStream::connect(address).await.map_err(|e| HttpError::Connect(address, e))?;
    let failed = |e| HttpError::Exchange(address, e);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
    let answer = async {
        let response = sender.send_request(request).await.map_err(failed)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), BODY_LIMIT).collect().await;
        let body = body.map_err(|e| HttpError::Body(address, e))?.to_bytes();
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    };
    // The connection must be driven until the response arrives; its own end adds no information.
    tokio::pin!(answer);
    tokio::select! {
        answer = &mut answer => answer,
        _ = connection => answer.await,
    }
}
