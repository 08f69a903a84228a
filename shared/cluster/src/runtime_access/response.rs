//! Sends one request to a runtime and limits its response: in waiting time, in bytes, in memory once decoded, and in
//! total time.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use http::{
    HeaderValue, Request, Response, StatusCode,
    header::{AUTHORIZATION, USER_AGENT},
};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper_util::client::legacy;
use kube::client::Body as KubeBody;
use strum::IntoStaticStr;
use thiserror::Error;
use tidewatch_kit::{metrics::ReasonLabel, variant::VariantName as _};
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, Sleep, sleep_until, timeout_at},
};
use tower::{BoxError, Service};

use super::{
    Metrics,
    budget::{self, Account, Growth, Reservation},
    chain,
    connector::{ConnectError, Connector},
    limits::{BodyLimits, ERROR_MEMORY, limits_of},
    structure::Structure,
    usage::Usage,
};
use crate::leader::WriteFence;

/// [`Limits::concurrent`] by default.
pub const CONCURRENT_REQUESTS: usize = 64;
/// Maximum number of concurrent callers that share the requests to one runtime. A slow one does not hold up the others, and a
/// runtime that responds slowly occupies few workers.
pub const CONCURRENT_CALLERS: usize = 2;

/// Limits of one runtime's responses.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Timeout of name resolution, TCP and TLS of a new connection, together.
    pub connect: Duration,
    /// Timeout from the request, including the wait for a permit, to the head of the response.
    pub head: Duration,
    /// Timeout from the request to the last byte of the response. The receiver holds no watch on a runtime, so no
    /// response is long-lived.
    pub response: Duration,
    /// Bytes in the body of a successful response at most. Most requests have a lower limit of their own.
    pub bytes: u64,
    /// Bytes in the body of an error response.
    pub error_bytes: u64,
    /// Concurrent requests to one runtime; a request ends with the last byte of its response.
    pub concurrent: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            head: Duration::from_secs(20),
            response: Duration::from_secs(30),
            bytes: 16 << 20,
            error_bytes: 64 << 10,
            concurrent: CONCURRENT_REQUESTS,
        }
    }
}

/// A response that violated a limit, in the source chain of a [`kube::Error`]. The name is a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum LimitError {
    /// More than [`Limits::bytes`] or [`Limits::error_bytes`].
    #[error("the runtime's answer is larger than {0} bytes")]
    TooLarge(u64),
    /// More memory once decoded than the limit of such a response in bytes, as estimated before it is decoded.
    #[error("the runtime's answer has too many values: they take more than {0} bytes of memory")]
    #[strum(serialize = "too_complex")]
    TooComplex(u64),
    /// The memory budget was exhausted until [`Limits::response`].
    #[error("the answers of runtimes took all memory that they may take, for {0:?}")]
    #[strum(serialize = "memory")]
    NoMemory(Duration),
    /// Longer than [`Limits::head`].
    #[error("the runtime did not answer within {0:?}")]
    #[strum(serialize = "head_late")]
    HeadTimeout(Duration),
    /// Longer than [`Limits::response`].
    #[error("the runtime's answer was not complete within {0:?}")]
    #[strum(serialize = "late")]
    Timeout(Duration),
    /// A status that API servers do not use: redirects are not followed, and their bodies are not Kubernetes objects.
    #[error("the runtime answered with the unexpected status {0}")]
    #[strum(serialize = "status")]
    UnexpectedStatus(StatusCode),
}

/// Identifies the receiver in a runtime's audit log.
const USER_AGENT_VALUE: HeaderValue =
    HeaderValue::from_static(concat!("tidewatch-receiver/", env!("CARGO_PKG_VERSION")));

/// The innermost service of a runtime's client. Always ready: an error in `poll_ready` would make the client fail
/// permanently.
#[derive(Clone)]
pub(super) struct BoundedService {
    pub(super) client: legacy::Client<Connector, KubeBody>,
    pub(super) authorization: Option<HeaderValue>,
    pub(super) usage: Arc<Usage>,
    pub(super) limits: Limits,
    pub(super) account: Account,
    pub(super) metrics: Metrics,
    pub(super) fence: WriteFence,
}

impl Service<Request<KubeBody>> for BoundedService {
    type Response = Response<BoundedBody>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<BoundedBody>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<KubeBody>) -> Self::Future {
        let headers = request.headers_mut();
        headers.insert(USER_AGENT, USER_AGENT_VALUE);
        if let Some(value) = &self.authorization {
            headers.insert(AUTHORIZATION, value.clone());
        }
        self.clone().exchange(request).boxed()
    }
}

impl BoundedService {
    async fn exchange(self, request: Request<KubeBody>) -> Result<Response<BoundedBody>, BoxError> {
        let Self { client, usage, limits, account, metrics, fence, .. } = self;
        let start = Instant::now();
        let of_request = limits_of(&request);
        let head = async {
            let permit = usage.permits.clone().acquire_owned().await?;
            usage.touch();
            fence.check(request.method())?;
            if usage.has_given_up_since(start) {
                return Err(ConnectError::Timeout(limits.connect).into());
            }
            let response = client.request(request).await.inspect_err(|error| {
                if let Some(ConnectError::Timeout(_)) = chain::find(error) {
                    usage.gave_up();
                }
            })?;
            Ok::<_, BoxError>((response, permit))
        };
        let response_and_permit = match timeout_at(start + limits.head, head).await {
            Ok(response_and_permit) => response_and_permit,
            Err(_) => Err(record_refusal(&metrics, LimitError::HeadTimeout(limits.head)).into()),
        };
        let (response, permit) = response_and_permit.inspect_err(|_| metrics.responded("none"))?;
        usage.opened();
        let status = response.status();
        metrics.responded(class(status));
        let limit = match status.as_u16() {
            200..=299 => BodyLimits { bytes: of_request.bytes.min(limits.bytes), ..of_request },
            400..=599 => BodyLimits { bytes: limits.error_bytes, memory: ERROR_MEMORY },
            _ => return Err(record_refusal(&metrics, LimitError::UnexpectedStatus(status)).into()),
        };
        if response.body().size_hint().lower() > limit.bytes {
            return Err(record_refusal(&metrics, LimitError::TooLarge(limit.bytes)).into());
        }
        let reservation = Reservation::new(&account);
        budget::keep(&reservation);
        let memory = Growth::new(reservation.clone());
        let mut response = response.map(|body| BoundedBody {
            body,
            structure: Structure::default(),
            memory,
            waiting: None,
            remaining: limit.bytes,
            limit,
            deadline: Box::pin(sleep_until(start + limits.response)),
            timeout: limits.response,
            metrics,
            _permit: permit,
        });
        // Lets a caller that decodes the body by itself keep the memory reserved meanwhile.
        response.extensions_mut().insert(reservation);
        Ok(response)
    }
}

fn record_refusal(metrics: &Metrics, reason: LimitError) -> LimitError {
    metrics.refused.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
    reason
}

fn class(status: StatusCode) -> &'static str {
    match status.as_u16() {
        200..=299 => "2xx",
        400..=499 => "4xx",
        500..=599 => "5xx",
        _ => "other",
    }
}

/// The body of a response, which ends with an error at its limit of bytes, memory or time, waits for the memory that it
/// needs once decoded, and holds the permit of its request.
pub(super) struct BoundedBody {
    body: Incoming,
    structure: Structure,
    memory: Growth,
    /// Received frame without memory.
    waiting: Option<Frame<Bytes>>,
    remaining: u64,
    limit: BodyLimits,
    deadline: Pin<Box<Sleep>>,
    timeout: Duration,
    metrics: Metrics,
    _permit: OwnedSemaphorePermit,
}

impl BoundedBody {
    /// Receives the next frame, within the limits of this response.
    fn poll_received(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(cx)?) else { return Poll::Ready(None) };
        if let Some(bytes) = frame.data_ref() {
            let Some(remaining) = self.remaining.checked_sub(bytes.len() as u64) else {
                return Poll::Ready(Some(Err(self.refuse(LimitError::TooLarge(self.limit.bytes)))));
            };
            self.remaining = remaining;
            self.structure.scan(bytes);
            if self.structure.memory() > self.limit.memory {
                return Poll::Ready(Some(Err(self.refuse(LimitError::TooComplex(self.limit.memory)))));
            }
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn refuse(&self, reason: LimitError) -> BoxError {
        record_refusal(&self.metrics, reason).into()
    }
}

impl Body for BoundedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        // Checked first: otherwise a body that always has another byte ready would never time out.
        if this.deadline.as_mut().poll(cx).is_ready() {
            let is_waiting = this.waiting.is_some();
            let reason = if is_waiting { LimitError::NoMemory } else { LimitError::Timeout };
            return Poll::Ready(Some(Err(this.refuse(reason(this.timeout)))));
        }
        let frame = match this.waiting.take() {
            Some(frame) => frame,
            None => match ready!(this.poll_received(cx)) {
                Some(Ok(frame)) => frame,
                end => return Poll::Ready(end),
            },
        };
        if this.memory.poll_to(this.structure.memory(), cx).is_pending() {
            this.waiting = Some(frame);
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.waiting.is_some() { SizeHint::default() } else { self.body.size_hint() }
    }
}
