//! Responses between replicas.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;

use super::{RelayError, http2::ResponseBody};
use crate::ports::HttpResponse;

/// Bytes of a response at most: that to a thousand events that are refused one by one has some 64 KiB.
const MAX_BYTES: usize = 1 << 20;
/// Field by which the holder makes the accepting replica close the client's connection after the response.
const CLOSE: &str = "tidewatch-close";
/// Fields that are passed on.
const FIELDS: [header::HeaderName; 4] = [header::CONTENT_TYPE, header::RETRY_AFTER, header::ALLOW, header::DATE];

/// Marks the response of another replica, as an extension of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RelayedResponse {
    /// The holder would have closed the client's connection.
    pub(crate) is_last: bool,
}

impl RelayedResponse {
    /// True if the holder found fault with the request itself, or the runtime ignores its limits.
    pub(crate) fn is_invalid_request(status: StatusCode) -> bool {
        let is_temporary = matches!(status, StatusCode::NOT_FOUND | StatusCode::CONFLICT | StatusCode::REQUEST_TIMEOUT);
        status.is_client_error() && !is_temporary
    }
}

/// Marks a response after which the client's connection must close.
pub(crate) fn mark_last(response: &mut HttpResponse) {
    response.headers_mut().insert(CLOSE, HeaderValue::from_static("true"));
}

/// Reads the response of a holder. The caller sets the deadline.
pub(super) async fn read(response: Response<ResponseBody>) -> Result<HttpResponse, RelayError> {
    let (mut parts, body) = response.into_parts();
    let body = body.read(MAX_BYTES).await.map_err(|_| RelayError::Broken)?;
    let mut response = Response::new(Full::<Bytes>::new(body));
    *response.status_mut() = parts.status;
    for name in FIELDS {
        if let Some(value) = parts.headers.remove(&name) {
            response.headers_mut().insert(name, value);
        }
    }
    response.extensions_mut().insert(RelayedResponse { is_last: parts.headers.contains_key(CLOSE) });
    Ok(response)
}
