use std::{
    convert::Infallible,
    io::{self, IoSlice},
    sync::atomic::{AtomicUsize, Ordering},
};

use futures::future::Either;
use http_body_util::{BodyExt, StreamBody};
use hyper::{rt::ReadBufCursor, server, service::service_fn};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
    sync::{Notify, mpsc},
};

use super::*;

const TERMS: ConnectionSettings = ConnectionSettings {
    stream_window: 64 << 10,
    connection_window: 64 << 10,
    ping: Duration::from_secs(15),
    ping_answer: Duration::from_secs(5),
};

/// Client end of an in-memory pipe.
struct Pipe {
    io: TokioIo<DuplexStream>,
    is_http2: bool,
    writes: Arc<AtomicUsize>,
}

impl rt::Read for Pipe {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl rt::Write for Pipe {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        Pin::new(&mut self.io).poll_write_vectored(cx, bytes)
    }
}

impl connect::Connection for Pipe {
    fn connected(&self) -> connect::Connected {
        let connected = connect::Connected::new();
        if self.is_http2 { connected.negotiated_h2() } else { connected }
    }
}

pub(crate) struct Fixture {
    pub(crate) connection: Connection,
    /// Server end of each opened connection.
    pub(crate) opened: mpsc::UnboundedReceiver<DuplexStream>,
    writes: Arc<AtomicUsize>,
}

fn fixture(is_http2: bool) -> Fixture {
    harness_with(is_http2, TERMS)
}

pub(crate) fn harness_with(is_http2: bool, settings: ConnectionSettings) -> Fixture {
    let (sender, opened) = mpsc::unbounded_channel();
    let writes = Arc::<AtomicUsize>::default();
    let count = writes.clone();
    let open: Connector = Arc::new(move |_| {
        let (near, far) = duplex(64 << 10);
        let pipe = Pipe { io: TokioIo::new(near), is_http2, writes: count.clone() };
        sender.send(far).unwrap();
        Box::pin(async move { Ok(Box::new(pipe) as Box<dyn Stream>) })
    });
    Fixture { connection: Connection::new(open, settings), opened, writes }
}

fn request(path: &str) -> Request<Bytes> {
    Request::post(format!("https://kcp:1{path}")).body(vec![b'x'; 500].into()).unwrap()
}

async fn text(response: Response<Body>) -> Bytes {
    response.into_body().collect().await.unwrap().to_bytes()
}

/// Echoes the bodies of this many requests.
async fn echo(far: DuplexStream, requests: usize) {
    let mut connection = h2::server::handshake(far).await.unwrap();
    for _ in 0..requests {
        let (request, mut respond) = connection.accept().await.unwrap().unwrap();
        assert_eq!(request.headers()[header::CONTENT_LENGTH], "500");
        let mut body = Body::Http2(request.into_body());
        tokio::spawn(async move {
            let body = (&mut body).collect().await.unwrap().to_bytes();
            respond.send_response(Response::new(()), false).unwrap().send_data(body, true).unwrap();
        });
    }
    connection.graceful_shutdown();
    assert!(connection.accept().await.is_none());
}

#[tokio::test]
async fn request_and_body_leave_in_one_write() {
    let mut fixture = fixture(true);
    let connection = fixture.connection;
    let writes = fixture.writes;
    let server = async { echo(fixture.opened.recv().await.unwrap(), 3).await };
    let client = async {
        // The first write has the settings of both sides, the last one the shutdown.
        for expected in [None, Some(1), None] {
            let before = writes.load(Ordering::Relaxed);
            assert_eq!(text(connection.send(request("/")).await.unwrap()).await.len(), 500);
            let written = writes.load(Ordering::Relaxed) - before;
            assert!(expected.is_none_or(|expected| written == expected), "{written}");
        }
        drop(connection);
    };
    tokio::join!(server, client);
}

#[tokio::test]
async fn closed_connection_is_replaced() {
    let mut fixture = fixture(true);
    let connection = fixture.connection;
    let client = async {
        for _ in 0..3 {
            // Requests in flight when the server closed the connection are the caller's to retry.
            while connection.send(request("/")).await.is_err() {}
        }
        drop(connection);
    };
    let server = async {
        let mut opened = 0;
        while let Some(far) = fixture.opened.recv().await {
            opened += 1;
            echo(far, 1).await;
        }
        opened
    };
    assert_eq!(tokio::join!(client, server).1, 3);
}

#[tokio::test(start_paused = true)]
async fn connection_is_closed_after_a_ping_timeout() {
    let mut fixture = fixture(true);
    let answered = Arc::new(Notify::new());
    let told = answered.clone();
    tokio::spawn(async move {
        let mut connection = h2::server::handshake(fixture.opened.recv().await.unwrap()).await.unwrap();
        let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
        respond.send_response(Response::new(()), true).unwrap();
        tokio::select! {
            _ = connection.accept() => {}
            () = told.notified() => {}
        }
        // The connection stays open without a responding peer.
        std::future::pending::<()>().await;
    });
    fixture.connection.send(request("/")).await.unwrap();
    answered.notify_one();
    let lost = timeout(Duration::from_secs(3_600), fixture.connection.send(request("/"))).await;
    assert!(matches!(lost.expect("it is not waited for for ever"), Err(ExchangeError::Broken(_))));
}

#[tokio::test]
async fn connection_is_lost_unless_a_response_announced_its_end() {
    for (field, is_lost) in [("", true), ("connection: close\r\n", false), ("Connection: x, Close\r\n", false)] {
        let mut fixture = fixture(false);
        let server = async {
            let mut far = fixture.opened.recv().await.unwrap();
            let mut received = Vec::new();
            while !received.ends_with(&[b'x'; 500]) {
                far.read_buf(&mut received).await.unwrap();
            }
            let response = format!("HTTP/1.1 200 OK\r\n{field}content-length: 0\r\n\r\n");
            far.write_all(response.as_bytes()).await.unwrap();
            far
        };
        let (far, response) = tokio::join!(server, fixture.connection.send(request("/")));
        assert!(text(response.unwrap()).await.is_empty());
        drop(far);
        // The connection has ended.
        fixture.connection.ended.notified().await;
        fixture.connection.ended.notify_one();
        assert_eq!(futures::FutureExt::now_or_never(fixture.connection.lost()).is_some(), is_lost, "{field}");
    }
}

#[tokio::test]
async fn http1_connection_is_reused_once_its_response_is_read() {
    let mut fixture = fixture(false);
    let connection = fixture.connection;
    let server = tokio::spawn(async move {
        let mut opened = 0;
        while let Some(far) = fixture.opened.recv().await {
            opened += 1;
            let service = service_fn(async |request: Request<Incoming>| {
                assert_eq!(
                    (request.uri().authority(), &request.headers()[header::HOST]),
                    (None, &"kcp:1".parse().unwrap())
                );
                let is_endless = request.uri().path() == "/watch";
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let body = futures::stream::iter([Ok::<_, Infallible>(Frame::data(body))]);
                let rest = if is_endless {
                    Either::Left(futures::stream::pending())
                } else {
                    Either::Right(futures::stream::empty())
                };
                Ok::<_, Infallible>(Response::new(StreamBody::new(futures::StreamExt::chain(body, rest))))
            });
            tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(far), service));
        }
        opened
    });
    for _ in 0..3 {
        assert_eq!(text(connection.send(request("/")).await.unwrap()).await.len(), 500);
    }
    let mut watch = connection.send(request("/watch")).await.unwrap();
    assert_eq!(text(connection.send(request("/")).await.unwrap()).await.len(), 500);
    assert_eq!(watch.body_mut().frame().await.unwrap().unwrap().into_data().unwrap().len(), 500);
    drop((connection, watch));
    assert_eq!(server.await.unwrap(), 2);
}

/// A server announces the end of an aged connection in a response: nothing more is sent on it, so no request is lost.
#[tokio::test]
async fn http1_connection_is_replaced_after_connection_close() {
    let mut fixture = fixture(false);
    let connection = fixture.connection;
    let server = tokio::spawn(async move {
        let mut opened = 0;
        let mut served = 0;
        while let Some(far) = fixture.opened.recv().await {
            opened += 1;
            let answered = AtomicUsize::default();
            let service = service_fn(async |_: Request<Incoming>| {
                let is_last = answered.fetch_add(1, Ordering::Relaxed) == 1;
                let response =
                    Response::builder().header(header::CONNECTION, if is_last { "close" } else { "keep-alive" });
                Ok::<_, Infallible>(response.body(Full::new(Bytes::from_static(b"taken"))).unwrap())
            });
            let _ = server::conn::http1::Builder::new().serve_connection(TokioIo::new(far), service).await;
            served += answered.load(Ordering::Relaxed);
        }
        (opened, served)
    });
    for _ in 0..6 {
        assert_eq!(text(connection.send(request("/")).await.unwrap()).await, "taken");
    }
    drop(connection);
    assert_eq!(server.await.unwrap(), (3, 6));
}
