//! Whoever abuses a connection loses it within a limit, counted by a reason, while everybody else is served.

use super::{
    raw::{
        CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, PRIORITY, RST_STREAM, Raw, SETTINGS, WINDOW_UPDATE,
        fields, frame, signed, unsigned,
    },
    *,
};

const SHORT: Duration = Duration::from_millis(100);
/// Bytes of a frame, unless its reader allows more (RFC 9113, section 4.2).
pub(super) const LONGEST_FRAME: usize = 16 << 10;

impl Bed {
    pub(super) fn refused(&self, reason: &'static str) -> u64 {
        self.metrics.refused.get_or_create(&metrics::RefusedAs { route: "events", reason }).get()
    }

    /// Somebody else's request is answered on a connection that was open all the time.
    async fn serves(&self, sender: &mut http2::SendRequest<Full<Bytes>>, agent: &Agent, counter: u64) {
        let answer = sender.send_request(self.request(agent, counter, true)).await.unwrap();
        assert_eq!(answer.status(), StatusCode::ACCEPTED);
    }
}

#[tokio::test]
async fn floods_of_frames_end_the_connection() {
    let bed = Bed::start(|_| {}).await;
    let other = bed.agent("other");
    let mut open = bed.http2(&other).await;
    let head = unsigned(&bed);
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
        let mut raw = Raw::open(&bed, &bed.agent(&format!("r-{number}")), &[]).await;
        raw.send(&frames).await;
        raw.ended().await;
        // Ours, the HTTP library's, or the rate of requests: whichever comes first.
        bed.until_ended(&["flood", "error", "refused"], number).await;
        bed.serves(&mut open, &other, number).await;
        assert_eq!(bed.metrics.connections.get(), 1, "{case}");
    }
    assert!(bed.ended("flood") >= 5, "frames that are no requests have a rate");
    bed.stop().await;
}

#[tokio::test]
async fn who_floods_is_shut_out_and_held_at_the_door() {
    for is_http2 in [true, false] {
        let bed = Bed::start(|settings| (settings.limits.per_second, settings.limits.burst) = (1, 10)).await;
        let (agent, other) = (bed.agent("r-1"), bed.agent("r-2"));
        let mut open = bed.open(&other, is_http2).await;
        bed.flood(&agent, is_http2).await;
        bed.until_ended(&["refused"], 1).await;
        assert!(bed.refused("rate") >= 100 && bed.refused("flood") > 0);
        let said = if is_http2 {
            let mut again = Raw::open(&bed, &agent, &[]).await;
            again.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &unsigned(&bed))).await;
            bed.says(&mut open, &other, 1).await;
            again.ended().await.len()
        } else {
            let mut again = bed.http1(&agent).await;
            again.write_all(head(&bed.request(&agent, 2, false), "content-length: 0").as_bytes()).await.unwrap();
            bed.says(&mut open, &other, 1).await;
            rest(again).await.len()
        };
        assert_eq!((said, bed.ended("flood")), (0, 1), "nobody has looked at what it said");
        bed.stop().await;
    }
}

#[tokio::test]
async fn a_runtime_has_few_connections_and_the_oldest_goes() {
    for is_http2 in [true, false] {
        let bed = Bed::start(|settings| settings.limits.connections = 2).await;
        let (agent, other) = (bed.agent("r-1"), bed.agent("r-2"));
        let mut open = bed.open(&other, is_http2).await;
        bed.says(&mut open, &other, 1).await;
        let mut first = bed.open(&agent, is_http2).await;
        bed.says(&mut first, &agent, 1).await;
        let mut second = bed.open(&agent, is_http2).await;
        bed.says(&mut second, &agent, 2).await;
        let mut third = bed.open(&agent, is_http2).await;
        bed.says(&mut third, &agent, 3).await;
        first.ends().await;
        bed.until_ended(&["crowded"], 1).await;
        bed.says(&mut second, &agent, 4).await;
        bed.says(&mut open, &other, 2).await;
        bed.stop().await;
    }
}

#[tokio::test]
async fn answers_that_nobody_takes_end_the_connection() {
    let bed = Bed::start(|settings| {
        (settings.body_deadline, settings.answer_deadline, settings.drain_deadline) = (SHORT, SHORT, SHORT);
    })
    .await;
    let agent = bed.agent("r-1");
    // SETTINGS_INITIAL_WINDOW_SIZE = 0, and no update ever.
    let mut raw = Raw::open(&bed, &agent, &[0, 4, 0, 0, 0, 0]).await;
    let request = bed.request(&agent, 1, true);
    let head = signed(&bed, &request);
    let body = request.into_body().collect().await.unwrap().to_bytes();
    raw.send(&[frame(HEADERS, END_HEADERS, 1, &head), frame(DATA, END_STREAM, 1, &body)].concat()).await;
    raw.ended().await;
    bed.until_ended(&["stalled"], 1).await;
    assert_eq!(bed.intake.count(), 1, "it was a good request");
    bed.stop().await;
}

#[tokio::test]
async fn who_pipelines_and_never_reads_is_cut_off() {
    let bed = Bed::start(|settings| {
        (settings.limits.per_second, settings.limits.burst) = (1_000_000, 1_000_000);
        settings.answer_deadline = SHORT;
    })
    .await;
    let mut stream = bed.http1(&bed.agent("r-1")).await;
    let request =
        format!("POST /v3/events HTTP/1.1\r\nhost: {}\r\ncontent-length: 0\r\n\r\n", bed.authority).repeat(100);
    timeout(PATIENCE, async { while stream.write_all(request.as_bytes()).await.is_ok() {} }).await.unwrap();
    bed.until_ended(&["slow-reader"], 1).await;
    bed.stop().await;
}

#[tokio::test]
async fn who_is_slow_over_http2_is_cut_off() {
    let bed = Bed::start(|settings| settings.head_deadline = SHORT).await;
    let mut half_a_head = Raw::open(&bed, &bed.agent("r-1"), &[]).await;
    half_a_head.send(&frame(HEADERS, 0, 1, &unsigned(&bed))).await;
    half_a_head.ended().await;
    bed.until_ended(&["silent"], 1).await;
    bed.stop().await;

    let bed = Bed::start(|settings| settings.body_deadline = SHORT).await;
    let agent = bed.agent("r-1");
    let mut half_a_body = Raw::open(&bed, &agent, &[]).await;
    half_a_body.send(&frame(HEADERS, END_HEADERS, 1, &signed(&bed, &bed.request(&agent, 1, true)))).await;
    timeout(PATIENCE, async {
        while bed.refused("slow") == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    bed.stop().await;

    let bed = Bed::start(|settings| settings.ping_interval = SHORT).await;
    // Never reads nor answers a PING, as if its machine were gone.
    let gone = Raw::open(&bed, &bed.agent("r-2"), &[]).await;
    gone.ended().await;
    bed.until_ended(&["timeout"], 1).await;
    bed.stop().await;
}

#[tokio::test]
async fn handshakes_that_stall_make_room() {
    let bed = Bed::start(|settings| {
        settings.max_handshakes = 1;
        settings.handshake_deadline = SHORT * 5;
    })
    .await;
    let _stalled = TcpStream::connect(bed.address).await.unwrap();
    timeout(PATIENCE, async {
        while bed.metrics.handshakes.get() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    let agent = bed.agent("r-1");
    let mut sender = timeout(PATIENCE, bed.http2(&agent)).await.unwrap();
    bed.serves(&mut sender, &agent, 1).await;
    assert_eq!(bed.metrics.handshakes_failed.get_or_create(&metrics::Why { reason: "timeout" }).get(), 1);
    assert!(bed.metrics.accepts_paused.get_or_create(&metrics::Why { reason: "handshakes" }).get() >= 1);
    bed.stop().await;
}

#[tokio::test]
async fn what_http1_can_be_read_in_two_ways_is_one_refusal_and_the_end() {
    let bed = Bed::start(|_| {}).await;
    let agent = bed.agent("r-1");
    let authority = bed.authority.clone();
    let smuggled = "GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n";
    let post =
        |fields: &str, body: &str| format!("POST /v3/events HTTP/1.1\r\nhost: {authority}\r\n{fields}\r\n{body}");
    for (case, said, answer) in [
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
        let mut stream = bed.http1(&agent).await;
        stream.write_all(said.as_bytes()).await.unwrap();
        let said = rest(stream).await;
        assert!(said.starts_with(&format!("HTTP/1.1 {answer} ")), "{case}: {said}");
        assert_eq!(said.matches("HTTP/1.1 ").count(), 1, "{case}: the rest is never a request: {said}");
    }
    assert_eq!((bed.refused("length"), bed.intake.count()), (3, 0));
    bed.until_ended(&["malformed"], 7).await;

    // Two hosts and lines that end in a bare LF are requests like any other, and refused like any other.
    for (said, reason) in [
        (post(&format!("host: {authority}\r\ncontent-length: 0\r\n"), ""), "host"),
        (post("content-length: 0\r\n", "").replace('\r', ""), "content-type"),
    ] {
        let mut stream = bed.http1(&agent).await;
        stream.write_all(said.as_bytes()).await.unwrap();
        stream.write_all(b"GARBAGE\r\n\r\n").await.unwrap();
        let said = rest(stream).await;
        assert_eq!((said.matches("HTTP/1.1 4").count(), bed.refused(reason)), (2, 1), "{said}");
    }
    let mut sender = bed.http2(&agent).await;
    bed.serves(&mut sender, &agent, 1).await;
    bed.stop().await;
}
