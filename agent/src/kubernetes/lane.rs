//! One connection's worth of requests.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, Method, Request, Response, header};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use tokio::time::timeout;

use super::{Accept, Call};
use crate::connection::BoxError;

/// Until the head of an answer.
const HEAD_DEADLINE: Duration = Duration::from_secs(20);
/// Until the end of an answer that is read whole.
const BODY_DEADLINE: Duration = Duration::from_secs(30);
/// Bytes of an answer to a write.
const WRITE_ANSWER: usize = 256 << 10;

/// The body of an answer, read piece by piece.
pub(crate) type Body = UnsyncBoxBody<Bytes, BoxError>;

/// What carries requests: HTTPS, or a script in tests.
pub(crate) trait Transport: Send + Sync {
    /// Sends a request whose address is a path, and waits for the head of its answer.
    fn send(&self, request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, BoxError>>;
}

/// A client with deadlines and limits; clones share its connection.
#[derive(Clone)]
pub(crate) struct Lane(Arc<dyn Transport>);

impl Lane {
    /// Takes a transport that sets no deadlines of its own.
    pub(crate) fn new(transport: impl Transport + 'static) -> Self {
        Self(Arc::new(transport))
    }

    /// Reads a whole answer of at most `limit` bytes.
    pub(crate) async fn get(&self, path: &str, accept: Accept, limit: usize) -> Result<Vec<u8>, Call> {
        let body = self.open(path, accept).await?;
        read(body, limit).await
    }

    /// Opens an answer that is read piece by piece.
    pub(crate) async fn open(&self, path: &str, accept: Accept) -> Result<Body, Call> {
        let request = Self::request(Method::GET, path, accept).body(Full::default()).map_err(Call::Request)?;
        Ok(self.send(request).await?.into_body())
    }

    /// Changes an object by a merge patch (RFC 7396); the answer is its metadata.
    pub(crate) async fn merge_patch(&self, path: &str, patch: Vec<u8>) -> Result<Vec<u8>, Call> {
        let request = Self::request(Method::PATCH, path, Accept::Metadata)
            .header(header::CONTENT_TYPE, "application/merge-patch+json")
            .body(Full::from(patch))
            .map_err(Call::Request)?;
        let answer = self.send(request).await?;
        read(answer.into_body(), WRITE_ANSWER).await
    }

    fn request(method: Method, path: &str, accept: Accept) -> http::request::Builder {
        Request::builder()
            .method(method)
            .uri(path)
            .header(header::ACCEPT, accept.header())
            // From 1.37 on watches are compressed event by event when compression is not ruled out.
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::USER_AGENT, concat!("tidewatch-agent/", env!("CARGO_PKG_VERSION")))
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Body>, Call> {
        let sent = timeout(HEAD_DEADLINE, self.0.send(request)).await.map_err(|_| Call::Deadline)?;
        let answer = sent.map_err(Call::Send)?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        Err(Call::Status { status, retry_after: retry_after(answer.headers()) })
    }
}

async fn read(mut body: Body, limit: usize) -> Result<Vec<u8>, Call> {
    let collect = async {
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(Call::Body)?.into_data() else { continue };
            if bytes.len() + data.len() > limit {
                return Err(Call::TooLarge { limit });
            }
            bytes.extend_from_slice(&data);
        }
        Ok(bytes)
    };
    timeout(BODY_DEADLINE, collect).await.map_err(|_| Call::Deadline)?
}

/// API servers give seconds.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)
}
