//! Abusive connections are closed within a limit and counted by reason, while other clients are served.

use super::{
    raw::{
        CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, PRIORITY, RST_STREAM, Raw, SETTINGS, WINDOW_UPDATE,
        fields, frame, signed, unsigned,
    },
    *,
};
use tokio::net::TcpSocket;

const SHORT: Duration = Duration::from_millis(100);
/// Maximum frame size in bytes, unless the reader allows more (RFC 9113, section 4.2).
pub(super) const LONGEST_FRAME: usize = 16 << 10;

impl TestGateway {
    pub(super) fn refused(&self, reason: &'static str) -> u64 {
        self.metrics.refused.get_or_create(&metrics::RefusalLabels { route: "events", reason }).get()
    }

    /// Asserts that a request of another client is served on a connection that has been open all the time.
    async fn serves(&self, sender: &mut http2::SendRequest<Full<Bytes>>, agent: &Agent, counter: u64) {
        let response = sender.send_request(self.request(agent, counter, true)).await.unwrap();
        assert_eq!(response.status(), StatusCode::ACCEPTED);
    }
}

#[tokio::test]
async fn flood_of_frames_ends_the_connection() {
    let gateway = TestGateway::start(|_| {}).await;
    let other = gateway.agent("other");
    let mut open = gateway.http2(&other).await;
    let head = unsigned(&gateway);
    let opened = || frame(HEADERS, END_HEADERS, 1, &head);
    let large = fields(&[("x-large", &"x".repeat(1_000))]).repeat(20);
    assert!(large.len() > LONGEST_FRAME);
    let reset = |number: u32| {
        let stream = 2 * number + 1;
        [frame(HEADERS, END_HEADERS, stream, &head), frame(RST_STREAM, 0, stream, &[0, 0, 0, 8])].concat()
    };
    let each = |frames: &dyn Fn(u32) -> Vec<u8>, count: u32| (0..count).flat_map(frames).collect::<Vec<_>>();
    let cases: [(&str, Vec<u8>); 10] = [
        ("settings", frame(SETTINGS, 0, 0, &[]).repeat(5_000)),
        ("pings", frame(PING, 0, 0, &[0; 8]).repeat(5_000)),
        ("priorities", frame(PRIORITY, 0, 1, &[0, 0, 0, 3, 1]).repeat(5_000)),
        ("window updates", frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]).repeat(5_000)),
        ("unknown frames", frame(0xbe, 0, 0, &[]).repeat(5_000)),
        ("empty data", [opened(), frame(DATA, 0, 1, &[]).repeat(5_000)].concat()),
        ("tiny data", [opened(), frame(DATA, 0, 1, b"x").repeat(50_000)].concat()),
        ("continuations", [frame(HEADERS, 0, 1, &head), frame(CONTINUATION, 0, 1, &[]).repeat(5_000)].concat()),
        ("rapid resets", each(&reset, 5_000)),
        ("huge frames", each(&|number| frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, &large), 5_000)),
    ];
    for (number, (case, frames)) in (1..).zip(cases) {
        let mut raw = Raw::open(&gateway, &gateway.agent(&format!("r-{number}")), &[]).await;
        raw.send(&frames).await;
        raw.ended().await;
        // The limit of frames, of the HTTP library, or of requests: the earliest one closes the connection.
        gateway.until_ended(&["flood", "error", "refused"], number).await;
        gateway.serves(&mut open, &other, number).await;
        assert_eq!(gateway.metrics.connections.get(), 1, "{case}");
    }
    assert!(gateway.ended("flood") >= 5, "frames without a request have a rate");
    gateway.stop().await;
}

#[tokio::test]
async fn flooding_runtime_is_blocked_and_tarpitted() {
    for is_http2 in [true, false] {
        let gateway =
            TestGateway::start(|settings| (settings.limits.per_second, settings.limits.burst) = (1, 10)).await;
        let agent = gateway.agent("r-1");
        let other = gateway.agent("r-2");
        let mut open = gateway.open(&other, is_http2).await;
        gateway.flood(&agent, is_http2).await;
        gateway.until_ended(&["refused"], 1).await;
        assert!(gateway.refused("rate") >= 80 && gateway.refused("flood") > 0);
        let received = if is_http2 {
            let mut again = Raw::open(&gateway, &agent, &[]).await;
            again.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &unsigned(&gateway))).await;
            gateway.send_accepted(&mut open, &other, 1).await;
            again.ended().await.len()
        } else {
            let mut again = gateway.http1(&agent).await;
            again.write_all(head(&gateway.request(&agent, 2, false), "content-length: 0").as_bytes()).await.unwrap();
            gateway.send_accepted(&mut open, &other, 1).await;
            rest(again).await.len()
        };
        assert_eq!((received, gateway.ended("flood")), (0, 1), "its request was never read");
        gateway.stop().await;
    }
}

#[tokio::test]
async fn oldest_connection_beyond_the_limit_is_closed() {
    for is_http2 in [true, false] {
        let gateway = TestGateway::start(|settings| settings.limits.connections = 2).await;
        let agent = gateway.agent("r-1");
        let other = gateway.agent("r-2");
        let mut open = gateway.open(&other, is_http2).await;
        gateway.send_accepted(&mut open, &other, 1).await;
        let mut first = gateway.open(&agent, is_http2).await;
        gateway.send_accepted(&mut first, &agent, 1).await;
        let mut second = gateway.open(&agent, is_http2).await;
        gateway.send_accepted(&mut second, &agent, 2).await;
        let mut third = gateway.open(&agent, is_http2).await;
        gateway.send_accepted(&mut third, &agent, 3).await;
        first.ends().await;
        gateway.until_ended(&["crowded"], 1).await;
        gateway.send_accepted(&mut second, &agent, 4).await;
        gateway.send_accepted(&mut open, &other, 2).await;
        gateway.stop().await;
    }
}

#[tokio::test]
async fn unread_response_ends_the_connection() {
    let gateway = TestGateway::start(|settings| {
        (settings.body_deadline, settings.response_deadline, settings.drain_deadline) = (SHORT, SHORT, SHORT);
    })
    .await;
    let agent = gateway.agent("r-1");
    // SETTINGS_INITIAL_WINDOW_SIZE = 0, without any update.
    let mut raw = Raw::open(&gateway, &agent, &[0, 4, 0, 0, 0, 0]).await;
    let request = gateway.request(&agent, 1, true);
    let head = signed(&gateway, &request);
    let body = request.into_body().collect().await.unwrap().to_bytes();
    raw.send(&[frame(HEADERS, END_HEADERS, 1, &head), frame(DATA, END_STREAM, 1, &body)].concat()).await;
    raw.ended().await;
    gateway.until_ended(&["stalled"], 1).await;
    assert_eq!(gateway.intake.count(), 1, "the request itself was valid");
    gateway.stop().await;
}

#[tokio::test]
async fn pipelining_client_that_never_reads_is_disconnected() {
    let gateway = TestGateway::start(|settings| {
        (settings.limits.per_second, settings.limits.burst) = (1_000_000, 1_000_000);
        settings.limits.strikes = u32::MAX;
        settings.response_deadline = SHORT;
    })
    .await;
    let mut stream = gateway.http1(&gateway.agent("r-1")).await;
    let request =
        format!("POST /v3/events HTTP/1.1\r\nhost: {}\r\ncontent-length: 0\r\n\r\n", gateway.authority).repeat(100);
    timeout(PATIENCE, async { while stream.write_all(request.as_bytes()).await.is_ok() {} }).await.unwrap();
    gateway.until_ended(&["slow-reader"], 1).await;
    gateway.stop().await;
}

#[tokio::test]
async fn slow_client_is_disconnected_over_http2() {
    let gateway = TestGateway::start(|settings| settings.head_deadline = SHORT).await;
    let mut partial_head = Raw::open(&gateway, &gateway.agent("r-1"), &[]).await;
    partial_head.send(&frame(HEADERS, 0, 1, &unsigned(&gateway))).await;
    partial_head.ended().await;
    gateway.until_ended(&["silent"], 1).await;
    gateway.stop().await;

    let gateway = TestGateway::start(|settings| settings.body_deadline = SHORT).await;
    let agent = gateway.agent("r-1");
    let mut partial_body = Raw::open(&gateway, &agent, &[]).await;
    partial_body.send(&frame(HEADERS, END_HEADERS, 1, &signed(&gateway, &gateway.request(&agent, 1, true)))).await;
    timeout(PATIENCE, async {
        while gateway.refused("slow") == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    gateway.stop().await;

    let gateway = TestGateway::start(|settings| settings.ping_interval = SHORT).await;
    // Never reads nor acknowledges a PING, like a client on a lost machine.
    let gone = Raw::open(&gateway, &gateway.agent("r-2"), &[]).await;
    gone.ended().await;
    gateway.until_ended(&["timeout"], 1).await;
    gateway.stop().await;
}

#[tokio::test]
async fn stalled_handshake_frees_its_slot() {
    let gateway = TestGateway::start(|settings| {
        settings.max_handshakes = 1;
        settings.handshake_deadline = SHORT * 5;
    })
    .await;
    let _stalled = TcpStream::connect(gateway.address).await.unwrap();
    timeout(PATIENCE, async {
        while gateway.metrics.handshakes.get() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    let agent = gateway.agent("r-1");
    let mut sender = timeout(PATIENCE, gateway.http2(&agent)).await.unwrap();
    gateway.serves(&mut sender, &agent, 1).await;
    assert_eq!(gateway.metrics.handshakes_failed.get_or_create(&metrics::ReasonLabel { reason: "timeout" }).get(), 1);
    gateway.stop().await;
}

#[tokio::test]
async fn silent_connections_of_one_address_delay_no_other() {
    const PLACES: usize = 32;
    // Silent connections keep their places until the test has ended.
    let gateway = TestGateway::start(|settings| {
        (settings.max_handshakes, settings.handshake_deadline) = (PLACES, 20 * PATIENCE);
    })
    .await;
    let from = async |source: [u8; 4]| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((source, 0).into()).unwrap();
        socket.connect(gateway.address).await.unwrap()
    };
    let mut silent = Vec::new();
    for _ in 0..4 * PLACES {
        silent.push(from([127, 0, 0, 2]).await);
    }
    let taken = i64::try_from(PLACES / 2).unwrap();
    timeout(PATIENCE, async {
        while (gateway.metrics.handshakes.get(), gateway.metrics.handshakes_waiting.get()) != (taken, 7 * taken) {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the silent connections take half of the places, and the others wait");
    for n in 1..=100 {
        let agent = gateway.agent(&format!("r-{n}"));
        let connector = TlsConnector::from(Arc::new(gateway.client(&agent.identity)));
        let name = ServerName::try_from("kcp.test").unwrap();
        let stream = timeout(PATIENCE, connector.connect(name, from([127, 0, 1, n]).await)).await.unwrap().unwrap();
        let (mut sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        gateway.serves(&mut sender, &agent, 1).await;
    }
    drop(silent);
    gateway.stop().await;
}

#[tokio::test]
async fn ambiguous_http1_request_is_refused_once_and_ends_the_connection() {
    let gateway = TestGateway::start(|_| {}).await;
    let agent = gateway.agent("r-1");
    let authority = gateway.authority.clone();
    let smuggled = "GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n";
    let post =
        |fields: &str, body: &str| format!("POST /v3/events HTTP/1.1\r\nhost: {authority}\r\n{fields}\r\n{body}");
    for (case, received, response) in [
        (
            "both lengths",
            post("content-length: 5\r\ntransfer-encoding: chunked\r\n", &format!("0\r\n\r\n{smuggled}")),
            "411",
        ),
        (
            "both, turned",
            post("transfer-encoding: chunked\r\ncontent-length: 5\r\n", &format!("0\r\n\r\n{smuggled}")),
            "411",
        ),
        ("chunked", post("transfer-encoding: chunked\r\n", "5;x=y\r\nhello\r\n0\r\n\r\n"), "411"),
        ("two lengths", post("content-length: 0\r\ncontent-length: 36\r\n", smuggled), "400"),
        ("a signed length", post("content-length: +0\r\n", ""), "400"),
        ("a folded field", post("x: a\r\n content-length: 5\r\n", ""), "400"),
        ("a space before the colon", post("content-length : 0\r\n", ""), "400"),
        ("a bare return", post("x: a\rb\r\n", ""), "400"),
        ("another encoding", post("transfer-encoding: identity, gzip\r\n", ""), "400"),
        ("no version", "POST /v3/events\r\n\r\n".to_owned(), "400"),
    ] {
        let mut stream = gateway.http1(&agent).await;
        stream.write_all(received.as_bytes()).await.unwrap();
        let received = rest(stream).await;
        assert!(received.starts_with(&format!("HTTP/1.1 {response} ")), "{case}: {received}");
        assert_eq!(
            received.matches("HTTP/1.1 ").count(),
            1,
            "{case}: the rest is never taken for a request: {received}"
        );
    }
    assert_eq!((gateway.refused("length"), gateway.intake.count()), (3, 0));
    gateway.until_ended(&["malformed"], 7).await;

    // Two hosts, and lines that end in a bare LF, parse as requests and are refused as such.
    for (received, reason) in [
        (post(&format!("host: {authority}\r\ncontent-length: 0\r\n"), ""), "host"),
        (post("content-length: 0\r\n", "").replace('\r', ""), "content-type"),
    ] {
        let mut stream = gateway.http1(&agent).await;
        stream.write_all(received.as_bytes()).await.unwrap();
        stream.write_all(b"GARBAGE\r\n\r\n").await.unwrap();
        let received = rest(stream).await;
        assert_eq!((received.matches("HTTP/1.1 4").count(), gateway.refused(reason)), (2, 1), "{received}");
    }
    let mut sender = gateway.http2(&agent).await;
    gateway.serves(&mut sender, &agent, 1).await;
    gateway.stop().await;
}
