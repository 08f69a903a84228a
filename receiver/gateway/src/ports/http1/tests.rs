use std::{
    convert::Infallible,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::service::Service;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex, split},
    time::Instant,
};

use super::{
    super::{
        lifecycle::{RequestBody, TrackedBody},
        limited_stream::{HeadDeadline, ReadLimit},
        tests::testing::settings,
    },
    *,
};

const DEADLINE: Duration = Duration::from_secs(10);

/// Answers with the length of the body, or without reading it.
#[derive(Clone)]
struct TestService {
    lifecycle: Arc<ConnectionLifecycle>,
    requests: Arc<AtomicUsize>,
    reads_bodies: bool,
}

impl Service<Request<Incoming>> for TestService {
    type Response = Response<TrackedBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>>>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let active = self.lifecycle.begin(Instant::now());
        let body = RequestBody::new(request.into_body(), self.lifecycle.clone());
        self.requests.fetch_add(1, Ordering::Relaxed);
        let reads_bodies = self.reads_bodies;
        Box::pin(async move {
            let length = match reads_bodies {
                true => body.collect().await.map_or(usize::MAX, |body| body.to_bytes().len()),
                false => usize::MAX,
            };
            let body = Full::new(Bytes::from(format!("<{length}>")));
            Ok(Response::new(TrackedBody { body, _request: active }))
        })
    }
}

/// A connection, its client's end, and its service.
struct Fixture {
    connection: Http1Connection<BufReader<DuplexStream>, TestService>,
    client: DuplexStream,
    service: TestService,
}

impl Fixture {
    fn new(reads_bodies: bool) -> Self {
        let lifecycle = Arc::new(ConnectionLifecycle::new(&settings(), false, Instant::now(), 0));
        let (ours, client) = duplex(64 << 10);
        let limit = ReadLimit::Head(HeadDeadline::new(lifecycle.clone(), DEADLINE));
        let (stream, _) = LimitedStream::new(BufReader::new(ours), limit, DEADLINE);
        let service = TestService { lifecycle: lifecycle.clone(), requests: Arc::default(), reads_bodies };
        let limits = HeadLimits { bytes: 16 << 10, fields: 32 };
        Self { connection: Http1Connection::new(stream, service.clone(), lifecycle, limits), client, service }
    }

    /// Sends bytes, and reads responses until one ends in this text.
    async fn exchange(&mut self, sent: &[u8], end: &str) -> String {
        let (mut reader, mut writer) = split(&mut self.client);
        let client = async {
            let mut received = Vec::new();
            let receive = async {
                while !received.ends_with(end.as_bytes()) {
                    assert!(reader.read_buf(&mut received).await.unwrap() > 0, "{}", received.escape_ascii());
                }
            };
            tokio::join!(async { writer.write_all(sent).await.unwrap() }, receive);
            String::from_utf8(received).unwrap()
        };
        tokio::select! {
            result = &mut self.connection => panic!("the connection has ended: {result:?}"),
            received = client => received,
        }
    }

    /// Lets the connection read what has arrived.
    async fn poll(&mut self) -> Option<hyper::Result<()>> {
        // The clock is paused: it advances when nothing else is left to do.
        tokio::time::timeout(Duration::from_millis(1), &mut self.connection).await.ok()
    }

    fn is_idle(&self) -> bool {
        matches!(&self.connection.state, State::Idle(stream, _) if !stream.has_buffer())
    }
}

fn request(body: usize) -> Vec<u8> {
    [format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {body}\r\n\r\n").into_bytes(), vec![b'x'; body]].concat()
}

#[tokio::test(start_paused = true)]
async fn connection_holds_no_buffers_between_two_requests() {
    let mut fixture = Fixture::new(true);
    assert!(fixture.poll().await.is_none() && fixture.is_idle(), "before the first byte");
    for body in [0, 10, 1 << 20, 10, 0] {
        let start = &request(body)[..9];
        let rest = &request(body)[9..];
        fixture.client.write_all(start).await.unwrap();
        assert!(fixture.poll().await.is_none() && !fixture.is_idle(), "within a head");
        fixture.exchange(rest, &format!("<{body}>")).await;
        assert!(fixture.poll().await.is_none() && fixture.is_idle(), "after a body of {body} bytes");
    }
    let chunked = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    fixture.exchange(chunked, "<3>").await;
    assert!(fixture.poll().await.is_none() && fixture.is_idle(), "after a chunked body");
}

#[tokio::test(start_paused = true)]
async fn bytes_sent_ahead_are_kept() {
    let mut fixture = Fixture::new(true);
    let ahead = [request(1), request(2), request(3)].concat();
    for cut in 0..ahead.len() {
        let (start, rest) = ahead.split_at(cut);
        fixture.client.write_all(start).await.unwrap();
        assert!(fixture.poll().await.is_none());
        let received = fixture.exchange(rest, "<3>").await;
        assert_eq!(received.matches("HTTP/1.1 200 OK").count(), 3, "{cut}: {received}");
        assert!(fixture.poll().await.is_none() && fixture.is_idle(), "{cut}");
    }
}

/// The rest of a body must never be taken for a request.
#[tokio::test(start_paused = true)]
async fn connection_with_an_unread_body_serves_no_further_request() {
    let smuggled = request(0);
    let head = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", smuggled.len() + 1).into_bytes();
    for first in [&b""[..], b"x"] {
        let mut fixture = Fixture::new(false);
        fixture.client.write_all(&[&head, first].concat()).await.unwrap();
        let ended = fixture.poll().await;
        assert!(!matches!(fixture.connection.state, State::Idle(..)), "the library decides what the next byte is");
        // Fails if the connection has ended already.
        let _ = fixture.client.write_all(&smuggled).await;
        let ended = if ended.is_some() { ended } else { fixture.poll().await };
        assert!(matches!(ended, Some(Ok(()))), "the library closes it");
        assert_eq!(fixture.service.requests.load(Ordering::Relaxed), 1);
    }
}

/// More bytes are put back than one read of a new connection takes.
#[tokio::test(start_paused = true)]
async fn no_byte_of_many_pipelined_requests_is_lost() {
    let mut fixture = Fixture::new(true);
    let ahead: Vec<_> = (0..1_000).map(|number| request(number % 300)).collect();
    let received = fixture.exchange(&[ahead.concat(), request(1_000)].concat(), "<1000>").await;
    assert_eq!(received.matches("HTTP/1.1 200 OK").count(), 1_001);
    assert!(fixture.poll().await.is_none() && fixture.is_idle());
}

#[tokio::test(start_paused = true)]
async fn connection_ends_as_announced() {
    let mut fixture = Fixture::new(true);
    let closing = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    fixture.client.write_all(closing).await.unwrap();
    assert!(matches!(fixture.poll().await, Some(Ok(()))), "by the client");

    let mut fixture = Fixture::new(true);
    fixture.exchange(&request(1), "<1>").await;
    fixture.service.lifecycle.close_reason.set("refused").unwrap();
    fixture.exchange(&request(1), "<1>").await;
    assert!(!fixture.is_idle(), "the library alone decides when a closing connection has ended");
}

#[tokio::test(start_paused = true)]
async fn graceful_shutdown_ends_an_idle_connection_at_once_and_another_after_its_response() {
    let mut fixture = Fixture::new(true);
    fixture.exchange(&request(1), "<1>").await;
    assert!(fixture.poll().await.is_none() && fixture.is_idle());
    Pin::new(&mut fixture.connection).graceful_shutdown();
    assert!(matches!(fixture.poll().await, Some(Ok(()))));

    let mut fixture = Fixture::new(true);
    let start = &request(5)[..50];
    let rest = &request(5)[50..];
    fixture.client.write_all(start).await.unwrap();
    assert!(fixture.poll().await.is_none());
    Pin::new(&mut fixture.connection).graceful_shutdown();
    fixture.client.write_all(rest).await.unwrap();
    assert!(matches!(fixture.poll().await, Some(Ok(()))));
    let mut received = String::new();
    drop(fixture.connection);
    fixture.client.read_to_string(&mut received).await.unwrap();
    assert!(received.ends_with("<5>") && received.contains("connection: close"), "{received}");
}

#[tokio::test(start_paused = true)]
async fn client_that_leaves_ends_the_connection() {
    let mut fixture = Fixture::new(true);
    fixture.exchange(&request(1), "<1>").await;
    assert!(fixture.poll().await.is_none() && fixture.is_idle());
    fixture.client.shutdown().await.unwrap();
    assert!(matches!(fixture.poll().await, Some(Ok(()))));
}
