//! A trace from a request to the reconcile that it causes, as exported to a collector.

use std::convert::Infallible;

use bytes::Bytes;
use futures::stream;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{
    body::{Frame, Incoming},
    server::conn::http2,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tidewatch_shared::trace::Exporter;
use tokio::{net::TcpListener, sync::mpsc};

use super::*;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// gRPC collector that reconciles on the bodies it receives.
async fn collect(listener: TcpListener, bodies: mpsc::UnboundedSender<Bytes>) {
    while let Ok((tcp, _)) = listener.accept().await {
        let bodies = bodies.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let bodies = bodies.clone();
            async move {
                let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
                let _ = bodies.send(body);
                // An empty message and the status.
                let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
                let frames = [Frame::data(Bytes::from_static(&[0; 5])), Frame::trailers(trailers)];
                let answer = StreamBody::new(stream::iter(frames.map(Ok::<_, Infallible>)));
                Ok::<_, Infallible>(
                    Response::builder().header("content-type", "application/grpc").body(answer).unwrap(),
                )
            }
        });
        tokio::spawn(http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(tcp), service));
    }
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect()
}

fn has(body: &[u8], part: &[u8]) -> bool {
    body.windows(part.len()).any(|window| window == part)
}

#[tokio::test(flavor = "multi_thread")]
async fn trace_continues_from_the_request_through_the_queue_to_the_reconcile() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (sender, mut bodies) = mpsc::unbounded_channel();
    tokio::spawn(collect(listener, sender));
    let exporter = Exporter::start("test", &endpoint).unwrap();

    let fleet = table_with(4, 1);
    let event = event::Event {
        id: event::EventId { epoch: EPOCH, sequence: 1 },
        source: id(0),
        watch: "w".into(),
        payload: Payload::Watch,
        delta: Digest::ZERO,
        time: None,
        traceparent: None,
    };
    let traceparent = Some(format!("00-{TRACE}-{PARENT}-01"));
    let batch = EventBatch { events: vec![Ok(event)], traceparent };
    fleet.events(Verified::unchecked(&id(0), EPOCH, 1, batch), 1).unwrap();
    let job = fleet.next().await;
    let traceparent = job.traceparent.as_deref().unwrap();
    assert!(traceparent.starts_with(&format!("00-{TRACE}-")) && !traceparent.contains(PARENT), "{traceparent}");
    let waited = traceparent.split('-').nth(2).unwrap().to_owned();
    let span = job.span().unwrap();
    assert!(span.traceparent().starts_with(&format!("00-{TRACE}-")));
    drop(span);
    tokio::task::spawn_blocking(|| exporter.shutdown()).await.unwrap();

    let mut exported = Vec::new();
    while let Ok(body) = bodies.try_recv() {
        exported.extend(body);
    }
    for part in [&b"wait for a reconcile"[..], b"reconcile", &bytes(TRACE), &bytes(PARENT), &bytes(&waited)] {
        assert!(has(&exported, part), "{:?}", String::from_utf8_lossy(part));
    }
}
