//! Deadline of a response's body: without one, a list whose server stalls amid its body would never end.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt as _, future::BoxFuture};
use http::{Request, Response, Uri};
use http_body::{Body, Frame, SizeHint};
use thiserror::Error;
use tokio::time::{Instant, Sleep, sleep};
use tower::{BoxError, Layer, Service, layer::layer_fn};

/// The body of a response was not complete in time.
#[derive(Clone, Copy, Debug, Error)]
#[error("the response was not complete within {} s", .0.as_secs_f32())]
pub struct BodyDeadlineError(Duration);

/// Returns true for a request that begins a watch.
#[must_use]
pub fn is_watch(uri: &Uri) -> bool {
    let parameters = uri.query().unwrap_or_default().split('&');
    parameters.into_iter().any(|parameter| matches!(parameter, "watch=true" | "watch=1"))
}

/// Extension of a request for a response of any length: the deadline holds for each part of its body.
#[derive(Clone, Copy, Debug)]
pub struct DeadlinePerPart;

/// Layer of a client whose responses are complete within this time after their head, those to watches excepted.
pub(super) fn layer<S>(deadline: Duration) -> impl Layer<S, Service = BodyDeadline<S>> + Clone {
    layer_fn(move |service| BodyDeadline { service, deadline })
}

/// See [`layer`].
#[derive(Clone, Debug)]
pub(super) struct BodyDeadline<S> {
    service: S,
    deadline: Duration,
}

impl<S, B, R> Service<Request<B>> for BodyDeadline<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = Response<LimitedBody<R>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let deadline = (!is_watch(request.uri())).then_some(self.deadline);
        let is_per_part = request.extensions().get::<DeadlinePerPart>().is_some();
        let response = self.service.call(request);
        async move {
            let response = response.await?;
            let limit = deadline.map(|deadline| (Box::pin(sleep(deadline)), deadline));
            Ok(response.map(|body| LimitedBody { body, limit, is_per_part }))
        }
        .boxed()
    }
}

/// Body with a deadline, if it has one.
pub(super) struct LimitedBody<B> {
    body: B,
    limit: Option<(Pin<Box<Sleep>>, Duration)>,
    is_per_part: bool,
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for LimitedBody<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some((sleep, deadline)) = &mut self.limit
            && sleep.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Some(Err(BodyDeadlineError(*deadline).into())));
        }
        let frame = Pin::new(&mut self.body).poll_frame(context).map_err(Into::into);
        if let (true, true, Some((sleep, deadline))) = (self.is_per_part, frame.is_ready(), &mut self.limit) {
            sleep.as_mut().reset(Instant::now() + *deadline);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use futures::{StreamExt as _, stream};
    use http_body_util::{BodyExt as _, StreamBody};
    use tower::{ServiceExt as _, service_fn};

    use super::*;

    #[test]
    fn watches_are_recognized_by_their_query() {
        for (uri, expected) in [
            ("/api/v1/namespaces/n/configmaps?&watch=true&timeoutSeconds=290", true),
            ("/api/v1/configmaps?watch=1", true),
            ("/api/v1/configmaps?limit=500&fieldSelector=metadata.name%3Dwatch", false),
            ("/api/v1/namespaces/watch=true/configmaps", false),
        ] {
            assert_eq!(is_watch(&Uri::from_static(uri)), expected, "{uri}");
        }
    }

    /// Reads a body of three parts that are 40 s apart, within a deadline of 60 s.
    async fn read(is_per_part: bool) -> Result<usize, BoxError> {
        let service = service_fn(|_: Request<()>| {
            let body = stream::iter(0..3).then(|_| async {
                sleep(Duration::from_secs(40)).await;
                Ok::<_, BoxError>(Frame::data(Bytes::from_static(b"x")))
            });
            ready(Ok::<_, BoxError>(Response::new(StreamBody::new(body.boxed()))))
        });
        let mut request = Request::new(());
        if is_per_part {
            request.extensions_mut().insert(DeadlinePerPart);
        }
        let response = layer(Duration::from_secs(60)).layer(service).oneshot(request).await?;
        Ok(response.into_body().collect().await?.to_bytes().len())
    }

    #[tokio::test(start_paused = true)]
    async fn deadline_holds_for_the_body_or_for_each_part_of_one_of_any_length() {
        assert_eq!(read(true).await.unwrap(), 3);
        assert!(read(false).await.unwrap_err().is::<BodyDeadlineError>());
    }
}
