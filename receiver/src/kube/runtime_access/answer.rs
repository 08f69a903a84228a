//! Sends one request to a runtime and lets no answer be endless: not in waiting, not in bytes, not in time.

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
use thiserror::Error;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, Sleep, sleep_until, timeout_at},
};
use tower::{BoxError, Service};

use super::{Metrics, client::Usage, connector::Connector};
use crate::kube::leader::Fence;

/// Limits of one runtime's answers.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Name, TCP and TLS of a new connection, together.
    pub connect: Duration,
    /// From the request, waiting for its turn included, to the head of the answer.
    pub head: Duration,
    /// From the request to the last byte of the answer. The receiver holds no watch on a runtime, so no answer is long on purpose.
    pub answer: Duration,
    /// Bytes in the body of a good answer. An API server's largest single object has about 1.5 MiB.
    pub bytes: u64,
    /// Bytes in the body of an answer that reports an error.
    pub error_bytes: u64,
    /// Requests to one runtime at a time; a request ends with the last byte of its answer.
    pub concurrent: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            head: Duration::from_secs(20),
            answer: Duration::from_secs(30),
            bytes: 16 << 20,
            error_bytes: 64 << 10,
            concurrent: 8,
        }
    }
}

/// An answer that was cut off. It travels in the source chain of a [`kube::Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CutOff {
    /// More than [`Limits::bytes`] or [`Limits::error_bytes`].
    #[error("the runtime's answer is larger than {0} bytes")]
    TooLarge(u64),
    /// Longer than [`Limits::head`].
    #[error("the runtime did not answer within {0:?}")]
    HeadLate(Duration),
    /// Longer than [`Limits::answer`].
    #[error("the runtime's answer was not complete within {0:?}")]
    Late(Duration),
    /// A status that API servers don't use: redirects are not followed, and their bodies are nobody's objects.
    #[error("the runtime answered with the unexpected status {0}")]
    Status(StatusCode),
}

impl CutOff {
    const fn label(self) -> &'static str {
        match self {
            Self::TooLarge(_) => "too_large",
            Self::HeadLate(_) => "head_late",
            Self::Late(_) => "late",
            Self::Status(_) => "status",
        }
    }
}

/// Who we are in a runtime's audit log.
const AGENT: HeaderValue = HeaderValue::from_static(concat!("tidewatch-receiver/", env!("CARGO_PKG_VERSION")));

/// The innermost service of a runtime's client. Always ready: a service that fails in `poll_ready` would end the client for good.
#[derive(Clone)]
pub(super) struct Bounded {
    pub(super) client: legacy::Client<Connector, KubeBody>,
    pub(super) authorization: Option<HeaderValue>,
    pub(super) usage: Arc<Usage>,
    pub(super) limits: Limits,
    pub(super) metrics: Metrics,
    pub(super) fence: Fence,
}

impl Service<Request<KubeBody>> for Bounded {
    type Response = Response<Answer>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Answer>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<KubeBody>) -> Self::Future {
        let headers = request.headers_mut();
        headers.insert(USER_AGENT, AGENT);
        if let Some(value) = &self.authorization {
            headers.insert(AUTHORIZATION, value.clone());
        }
        self.clone().exchange(request).boxed()
    }
}

impl Bounded {
    async fn exchange(self, request: Request<KubeBody>) -> Result<Response<Answer>, BoxError> {
        let Self { client, usage, limits, metrics, fence, .. } = self;
        let start = Instant::now();
        let head = async {
            let permit = usage.permits.clone().acquire_owned().await?;
            usage.now();
            fence.check(request.method())?;
            Ok::<_, BoxError>((client.request(request).await?, permit))
        };
        let answered = match timeout_at(start + limits.head, head).await {
            Ok(answered) => answered,
            Err(_) => Err(cut(&metrics, CutOff::HeadLate(limits.head)).into()),
        };
        let (response, permit) = answered.inspect_err(|_| metrics.answer("none"))?;
        let status = response.status();
        metrics.answer(class(status));
        let limit = match status.as_u16() {
            200..=299 => limits.bytes,
            400..=599 => limits.error_bytes,
            _ => return Err(cut(&metrics, CutOff::Status(status)).into()),
        };
        if response.body().size_hint().lower() > limit {
            return Err(cut(&metrics, CutOff::TooLarge(limit)).into());
        }
        Ok(response.map(|body| Answer {
            body,
            left: limit,
            limit,
            late: Box::pin(sleep_until(start + limits.answer)),
            within: limits.answer,
            metrics,
            _permit: permit,
        }))
    }
}

fn cut(metrics: &Metrics, why: CutOff) -> CutOff {
    metrics.refused(why.label());
    why
}

fn class(status: StatusCode) -> &'static str {
    match status.as_u16() {
        200..=299 => "2xx",
        400..=499 => "4xx",
        500..=599 => "5xx",
        _ => "other",
    }
}

/// The body of an answer, which ends in an error at its limit of bytes or time, and holds the turn of its request.
pub(super) struct Answer {
    body: Incoming,
    left: u64,
    limit: u64,
    late: Pin<Box<Sleep>>,
    within: Duration,
    metrics: Metrics,
    _permit: OwnedSemaphorePermit,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        // Asked first: a body that always has one more byte ready would otherwise never be late.
        if this.late.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(cut(&this.metrics, CutOff::Late(this.within)).into())));
        }
        let Some(frame) = ready!(Pin::new(&mut this.body).poll_frame(cx)?) else { return Poll::Ready(None) };
        let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
        match this.left.checked_sub(bytes) {
            Some(left) => this.left = left,
            None => return Poll::Ready(Some(Err(cut(&this.metrics, CutOff::TooLarge(this.limit)).into()))),
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
