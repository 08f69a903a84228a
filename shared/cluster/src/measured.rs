//! Measures the requests to the control plane, which are the load of this process on KCP: their number, the open watches and
//! the cost of writes. Sets a deadline to the bodies of the responses.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use prometheus_client::metrics::gauge::Gauge;
use tidewatch_kit::metrics::KindLabel;
use tokio::time::{Instant, Sleep, sleep};
use tower::{BoxError, Service, ServiceExt as _, service_fn};

use super::{
    Metrics,
    body_deadline::{BodyDeadlineError, DeadlinePerPart, is_watch},
    metrics::RequestLabels,
    write_meter,
};

/// Service of a client whose requests are counted, and whose writes [`metered`](write_meter::metered) counts. Responses are
/// complete within `deadline` after their head, those to watches excepted.
pub(super) fn measured<S, B, R>(
    service: S,
    metrics: Metrics,
    deadline: Duration,
) -> impl Service<Request<B>, Response = Response<MeasuredBody<R>>, Error = S::Error, Future: Send> + Clone
where
    S: Service<Request<B>, Response = Response<R>, Future: Send> + Clone + Send,
    B: Body + Send,
{
    service_fn(move |request: Request<B>| {
        let labels = RequestLabels::of(request.method(), request.uri());
        metrics.requests.get_or_create(&labels).inc();
        let counts_as_open = labels.operation == "watch";
        let watches = counts_as_open.then(|| metrics.watches.get_or_create_owned(&KindLabel { kind: labels.kind }));
        let deadline = (!is_watch(request.uri())).then_some(deadline);
        let is_per_part = request.extensions().get::<DeadlinePerPart>().is_some();
        let cost = write_meter::cost(&request);
        let response = service.clone().oneshot(request);
        // kube calls the service in a task of its own, and polls the response in that of the reconcile.
        async move {
            write_meter::charge(cost);
            let response = response.await?;
            let open = watches.filter(|_| response.status().is_success()).map(OpenWatch::new);
            let limit = deadline.map(|deadline| (Box::pin(sleep(deadline)), deadline));
            Ok::<_, S::Error>(response.map(|body| MeasuredBody { body, limit, is_per_part, _open: open }))
        }
    })
}

/// A watch that counts as open until dropped.
struct OpenWatch(Gauge);

impl OpenWatch {
    fn new(watches: Gauge) -> Self {
        watches.inc();
        Self(watches)
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Body of a response. It has a deadline, or is that of a watch, which counts as open until the body is dropped.
pub(super) struct MeasuredBody<B> {
    body: B,
    limit: Option<(Pin<Box<Sleep>>, Duration)>,
    is_per_part: bool,
    _open: Option<OpenWatch>,
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for MeasuredBody<B> {
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
    use std::{convert::Infallible, future::ready};

    use futures::{StreamExt as _, stream};
    use http::{Method, StatusCode};
    use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
    use tidewatch_kit::metrics::Registry;
    use tower::buffer::Buffer;

    use super::*;
    use crate::metered;

    const DEADLINE: Duration = Duration::from_secs(60);

    /// Reads a body of three parts that are 40 s apart, within a deadline of 60 s.
    async fn read(is_per_part: bool) -> Result<usize, BoxError> {
        let service = service_fn(|_: Request<Empty<Bytes>>| {
            let body = stream::iter(0..3).then(|_| async {
                sleep(Duration::from_secs(40)).await;
                Ok::<_, BoxError>(Frame::data(Bytes::from_static(b"x")))
            });
            ready(Ok::<_, BoxError>(Response::new(StreamBody::new(body.boxed()))))
        });
        let mut request = Request::new(Empty::new());
        if is_per_part {
            request.extensions_mut().insert(DeadlinePerPart);
        }
        let response = measured(service, Metrics::default(), DEADLINE).oneshot(request).await?;
        Ok(response.into_body().collect().await?.to_bytes().len())
    }

    #[tokio::test(start_paused = true)]
    async fn deadline_holds_for_the_body_or_for_each_part_of_one_of_any_length() {
        assert_eq!(read(true).await.unwrap(), 3);
        assert!(read(false).await.unwrap_err().is::<BodyDeadlineError>());
    }

    #[tokio::test]
    async fn watch_is_open_until_its_body_is_dropped_and_a_refused_one_is_not() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let server = service_fn(async |request: Request<Empty<Bytes>>| {
            let mut response = Response::new(Empty::<Bytes>::new());
            *response.status_mut() = *request.extensions().get().unwrap();
            Ok::<_, Infallible>(response)
        });
        let client = measured(server, metrics, DEADLINE);
        let send = async |uri: &'static str, status: StatusCode| {
            let request = Request::get(uri).extension(status).body(Empty::new()).unwrap();
            client.clone().oneshot(request).await.unwrap()
        };
        let watch = "/api/v1/namespaces/n/secrets?watch=true";
        let list = "/api/v1/namespaces/n/secrets";
        let open = || registry.encode().unwrap().contains(r#"kcp_watches_open{kind="secrets"} 1"#);
        let first = send(watch, StatusCode::OK).await;
        assert!(open());
        let _refused = send(watch, StatusCode::GONE).await;
        let _list = send(list, StatusCode::OK).await;
        assert!(open(), "neither counts");
        drop(first);
        let page = registry.encode().unwrap();
        for line in [
            r#"kcp_watches_open{kind="secrets"} 0"#,
            r#"kcp_requests_total{kind="secrets",operation="watch"} 2"#,
            r#"kcp_requests_total{kind="secrets",operation="list"} 1"#,
        ] {
            assert!(page.contains(line), "{page}");
        }
    }

    #[tokio::test]
    async fn writes_of_a_reconcile_are_counted_with_their_size_behind_a_buffer() {
        let server =
            service_fn(async |_: Request<Full<Bytes>>| Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())));
        let client = Buffer::new(measured(server, Metrics::default(), DEADLINE), 8);
        let send = async |method: Method, bytes: usize| {
            let request = Request::builder().method(method).body(Full::from(vec![0; bytes])).unwrap();
            client.clone().oneshot(request).await.unwrap();
        };
        let ((), nothing) = metered(async { send(Method::GET, 0).await }).await;
        let ((), one) = metered(send(Method::DELETE, 0)).await;
        let (result, several) = metered(async {
            send(Method::POST, 4_095).await;
            send(Method::PATCH, 9_000).await;
            send(Method::GET, 0).await;
            "result"
        })
        .await;
        assert_eq!((nothing, one, several, result), (0, 1, 4, "result"));
        // Outside a reconcile.
        send(Method::PUT, 1).await;
    }
}
