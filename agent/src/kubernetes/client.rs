//! Requests to the API server over one connection.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, Method, Request, Response, header};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use tokio::time::timeout;

use super::{Accept, ApiError};
use crate::connection::BoxError;

/// Deadline for the head of a response.
const HEAD_DEADLINE: Duration = Duration::from_secs(20);
/// Deadline for the body of a buffered response.
const BODY_DEADLINE: Duration = Duration::from_secs(30);
/// Limit of the response to a write, in bytes.
const WRITE_ANSWER: usize = 256 << 10;

/// Body of a streamed response.
pub(crate) type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Transport of requests: HTTPS, or a script in tests.
pub(crate) trait Transport: Send + Sync {
    /// Sends a request whose URI is a path, and returns the response once its head has arrived.
    fn send(&self, request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, BoxError>>;
}

/// Client with deadlines and limits; clones share its connection.
#[derive(Clone)]
pub(crate) struct ApiClient(Arc<dyn Transport>);

impl ApiClient {
    /// A client over a transport without deadlines of its own.
    pub(crate) fn new(transport: impl Transport + 'static) -> Self {
        Self(Arc::new(transport))
    }

    /// Reads a complete response of at most `limit` bytes.
    pub(crate) async fn get(&self, path: &str, accept: Accept, limit: usize) -> Result<Vec<u8>, ApiError> {
        let body = self.open(path, accept).await?;
        read(body, limit).await
    }

    /// Opens a streamed response.
    pub(crate) async fn open(&self, path: &str, accept: Accept) -> Result<Body, ApiError> {
        let request = Self::request(Method::GET, path, accept).body(Full::default()).map_err(ApiError::Request)?;
        Ok(self.send(request).await?.into_body())
    }

    /// Applies a merge patch (RFC 7396); the response is the object's metadata.
    pub(crate) async fn merge_patch(&self, path: &str, patch: Vec<u8>) -> Result<Vec<u8>, ApiError> {
        let request = Self::request(Method::PATCH, path, Accept::Metadata)
            .header(header::CONTENT_TYPE, "application/merge-patch+json")
            .body(Full::from(patch))
            .map_err(ApiError::Request)?;
        let response = self.send(request).await?;
        read(response.into_body(), WRITE_ANSWER).await
    }

    fn request(method: Method, path: &str, accept: Accept) -> http::request::Builder {
        Request::builder()
            .method(method)
            .uri(path)
            .header(header::ACCEPT, accept.header())
            // Since 1.37, watch events are compressed one by one unless the client rules out compression.
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::USER_AGENT, concat!("tidewatch-agent/", env!("CARGO_PKG_VERSION")))
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Body>, ApiError> {
        let sent = timeout(HEAD_DEADLINE, self.0.send(request)).await.map_err(|_| ApiError::Deadline)?;
        let response = sent.map_err(ApiError::Send)?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        Err(ApiError::Status { status, retry_after: retry_after(response.headers()) })
    }
}

async fn read(mut body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let collect = async {
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(ApiError::Body)?.into_data() else { continue };
            if bytes.len() + data.len() > limit {
                return Err(ApiError::TooLarge { limit });
            }
            bytes.extend_from_slice(&data);
        }
        Ok(bytes)
    };
    timeout(BODY_DEADLINE, collect).await.map_err(|_| ApiError::Deadline)?
}

/// `Retry-After` in seconds, the only form that API servers send.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)
}
