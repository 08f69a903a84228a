//! One HTTP/1.1 request over a connection of its own, with a limit for the response. The caller sets the deadline.

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tidewatch_kit::table;
use tokio::io::{AsyncRead, AsyncWrite};

/// Bytes of a refusal that the error shows.
const MAX_MESSAGE_BYTES: usize = 200;

/// A response without the requested content.
#[derive(Debug, Error)]
#[error("the response is {status}: {message}")]
pub(crate) struct RefusedError {
    /// Status of the response, not 2xx.
    pub(crate) status: StatusCode,
    message: String,
}

/// Sends a request to `authority` and returns the body of the response, at most `limit` bytes.
///
/// # Errors
/// [`RefusedError`] for a status other than 2xx; errors of the connection.
pub(crate) async fn send(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    authority: &str,
    mut request: Request<Full<Bytes>>,
    limit: usize,
) -> Result<Bytes> {
    request.headers_mut().insert(header::HOST, HeaderValue::from_str(authority).context("set the Host header")?);
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let response = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), limit).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!(error)).context("read the response")?.to_bytes();
        if !status.is_success() {
            let message = String::from_utf8_lossy(&body[..body.len().min(MAX_MESSAGE_BYTES)]);
            bail!(RefusedError { status, message: table::sanitize(message.trim()) });
        }
        Ok(body)
    };
    tokio::pin!(response);
    // The connection must be polled until the response is complete; its own result adds nothing to that of the response.
    tokio::select! {
        response = &mut response => response,
        _ = connection => response.await,
    }
}
