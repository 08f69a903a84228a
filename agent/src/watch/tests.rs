mod planned;

use std::{
    collections::VecDeque,
    future::ready,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use futures::{StreamExt, future::BoxFuture, stream};
use http::{Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    task::{JoinHandle, JoinSet},
};

use super::*;
use crate::kubernetes::{Body, Transport};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// What the API server does with one request.
enum Reply {
    Json(Value),
    Status(u16),
    /// Too many requests, with when to come back.
    Later(&'static str),
    /// Lines of a watch, then its end.
    Lines(Vec<Value>),
    /// Lines of a watch, then silence.
    Silence(Vec<Value>),
    /// A page of more bytes than a page may have.
    Large,
    /// Bytes of a watch, then its end.
    Bytes(Vec<u8>),
    /// Bytes of a watch, then the connection breaks.
    Cut(Vec<u8>),
    /// Nobody is there.
    Refused,
    /// Lines of a watch as they are sent.
    Live(mpsc::UnboundedReceiver<Value>),
}

/// One expected request: what must be in its path and query, and the reply.
struct Call(&'static str, Reply);

/// The API server as a list of calls; an unexpected one is told like everything else that happens.
struct Script {
    calls: Mutex<VecDeque<Call>>,
    told: mpsc::UnboundedSender<String>,
}

impl Transport for Script {
    fn send(&self, request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, Error>> {
        Box::pin(ready(reply(&request, &self.calls, &self.told)))
    }
}

fn lane(calls: Vec<Call>, told: mpsc::UnboundedSender<String>) -> Lane {
    Lane::new(Script { calls: Mutex::new(calls.into()), told })
}

fn reply(
    request: &Request<Full<Bytes>>,
    calls: &Mutex<VecDeque<Call>>,
    told: &mpsc::UnboundedSender<String>,
) -> Result<Response<Body>, Error> {
    assert_eq!(request.headers()[header::ACCEPT_ENCODING], "identity");
    let path = request.uri().to_string();
    let Some(Call(expected, reply)) = calls.lock().unwrap().pop_front() else {
        let _ = told.send("end of script".to_owned());
        return Ok(answer(200, Vec::new(), true));
    };
    if !path.contains(expected) {
        let _ = told.send(format!("{path} instead of {expected}"));
    }
    carry_out(reply)
}

fn text(lines: Vec<Value>) -> Vec<Bytes> {
    lines.into_iter().map(|line| Bytes::from(format!("{line}\n"))).collect()
}

fn carry_out(reply: Reply) -> Result<Response<Body>, Error> {
    Ok(match reply {
        Reply::Json(value) => answer(200, vec![value.to_string().into()], false),
        Reply::Status(status) => answer(status, Vec::new(), false),
        Reply::Later(seconds) => {
            let mut later = answer(429, Vec::new(), false);
            later.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static(seconds));
            later
        }
        Reply::Lines(lines) => answer(200, text(lines), false),
        Reply::Silence(lines) => answer(200, text(lines), true),
        Reply::Large => answer(200, vec![vec![b' '; PAGE_BYTES + 1].into()], false),
        Reply::Bytes(bytes) => answer(200, vec![bytes.into()], false),
        Reply::Cut(bytes) => {
            let frames = [Ok(Frame::data(bytes.into())), Err("the connection broke".into())];
            Response::new(StreamBody::new(stream::iter(frames)).boxed_unsync())
        }
        Reply::Refused => return Err("connection refused".into()),
        Reply::Live(lines) => {
            let frame = |line: Value| Ok(Frame::data(Bytes::from(format!("{line}\n"))));
            let next = |mut lines: mpsc::UnboundedReceiver<Value>| async move { Some((lines.recv().await?, lines)) };
            Response::new(StreamBody::new(stream::unfold(lines, next).map(frame)).boxed_unsync())
        }
    })
}

fn answer(status: u16, frames: Vec<Bytes>, silence: bool) -> Response<Body> {
    let frames = stream::iter(frames).map(|bytes| Ok(Frame::data(bytes)));
    let rest = if silence { stream::pending().left_stream() } else { stream::empty().right_stream() };
    let body = StreamBody::new(frames.chain(rest)).boxed_unsync();
    Response::builder().status(status).body(body).unwrap()
}

/// Tells everything that it is told.
struct Recorder(mpsc::UnboundedSender<String>);

impl Recorder {
    fn tell(&self, text: String) {
        let _ = self.0.send(text);
    }
}

impl Sink for Recorder {
    type Item = Named;

    async fn target(&mut self, _lane: &Lane) -> Result<Target, crate::kubernetes::Call> {
        Ok(Target::collection("g", "v1", None, "things"))
    }

    fn begin(&mut self) {
        self.tell("begin".to_owned());
    }

    fn page(&mut self, items: Vec<Named>) -> bool {
        let names: Vec<_> = items.into_iter().map(|item| item.metadata.name).collect();
        self.tell(format!("page {}", names.join(" ")));
        !names.contains(&"enough".to_owned())
    }

    fn complete(&mut self, version: &str) {
        self.tell(format!("complete {version}"));
    }

    fn present(&mut self, item: Named) {
        self.tell(format!("present {}", item.metadata.name));
    }

    fn gone(&mut self, item: Named) {
        self.tell(format!("gone {}", item.metadata.name));
    }

    fn bookmark(&mut self, version: &str) {
        self.tell(format!("bookmark {version}"));
    }

    fn failed(&mut self, why: &crate::kubernetes::Call) {
        self.tell(format!("failed: {why}"));
    }
}

struct Bench {
    told: mpsc::UnboundedReceiver<String>,
    rebuild: watch::Sender<u64>,
    running: JoinHandle<()>,
}

fn shared(rebuild: watch::Receiver<u64>) -> Shared {
    Shared {
        pages: Arc::new(Semaphore::new(1)),
        slow: Arc::new(Semaphore::new(1)),
        rebuild,
        sightings: Sightings::default(),
        namespace: "kyma-system".into(),
        metrics: Metrics::default(),
    }
}

fn start(calls: Vec<Call>) -> Bench {
    let (tell, told) = mpsc::unbounded_channel();
    let (rebuild, rebuilds) = watch::channel(0);
    let shared = shared(rebuilds);
    let running = tokio::spawn(run(lane(calls, tell.clone()), shared, Recorder(tell)));
    Bench { told, rebuild, running }
}

/// Everything that is told until the script is at its end.
async fn told(calls: Vec<Call>) -> Vec<String> {
    let mut bench = start(calls);
    let mut told = Vec::new();
    while let Some(text) = bench.told.recv().await {
        if text == "end of script" {
            break;
        }
        told.push(text);
    }
    bench.running.abort();
    told
}

fn page(version: &str, token: &str, names: &[&str]) -> Reply {
    let items: Vec<_> = names.iter().map(|name| json!({"metadata": {"name": name}})).collect();
    Reply::Json(json!({"metadata": {"resourceVersion": version, "continue": token}, "items": items}))
}

fn line(kind: &str, version: &str, name: &str) -> Value {
    json!({"type": kind, "object": {"metadata": {"resourceVersion": version, "name": name}}})
}

fn gone() -> Value {
    json!({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}})
}

#[tokio::test(start_paused = true)]
async fn pages_are_followed_and_the_watch_goes_on_where_the_list_ended() {
    let lines = vec![
        line("ADDED", "11", "c"),
        line("MODIFIED", "12", "a"),
        line("BOOKMARK", "15", ""),
        line("DELETED", "16", "b"),
    ];
    let told = told(vec![
        Call("/apis/g/v1/things?limit=50", page("10", "t/1", &["a"])),
        Call("limit=50&continue=t%2F1", page("10", "", &["b"])),
        Call("watch=true&allowWatchBookmarks=true", Reply::Lines(lines)),
        Call("resourceVersion=16", Reply::Lines(Vec::new())),
        Call("resourceVersion=16", Reply::Silence(Vec::new())),
    ])
    .await;
    assert_eq!(told, ["begin", "page a", "page b", "complete 10", "present c", "present a", "bookmark 15", "gone b"]);
}

#[tokio::test(start_paused = true)]
async fn a_version_that_is_gone_means_a_new_list() {
    for reply in [Reply::Lines(vec![gone()]), Reply::Status(410)] {
        let told = told(vec![
            Call("limit", page("10", "", &[])),
            Call("resourceVersion=10", reply),
            Call("limit", page("20", "", &["a"])),
            Call("resourceVersion=20", Reply::Lines(Vec::new())),
        ])
        .await;
        assert_eq!(told, ["begin", "page ", "complete 10", "begin", "page a", "complete 20"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_that_expires_between_its_pages_begins_anew() {
    let told = told(vec![
        Call("limit", page("10", "t", &["a"])),
        Call("continue=t", Reply::Status(410)),
        Call("things?limit=50", page("20", "", &["b"])),
    ])
    .await;
    let failed = "failed: the API server answered 410 Gone";
    assert_eq!(told, ["begin", "page a", failed, "begin", "page b", "complete 20"]);
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_is_reported_and_tried_again_from_the_list() {
    let told = told(vec![
        Call("limit", Reply::Status(404)),
        Call("limit", page("10", "", &[])),
        Call("watch", Reply::Status(403)),
        Call("limit", page("20", "", &[])),
    ])
    .await;
    let (missing, forbidden) =
        ("failed: the API server answered 404 Not Found", "failed: the API server answered 403 Forbidden");
    assert_eq!(told, ["begin", missing, "begin", "page ", "complete 10", forbidden, "begin", "page ", "complete 20"]);
}

#[tokio::test(start_paused = true)]
async fn a_failing_server_is_asked_again_from_the_same_version() {
    let error = json!({"type": "ERROR", "object": {"code": 500}});
    let told = told(vec![
        Call("limit", page("10", "", &[])),
        Call("resourceVersion=10", Reply::Lines(vec![line("ADDED", "11", "a"), error])),
        Call("resourceVersion=11", Reply::Status(503)),
        Call("resourceVersion=11", Reply::Lines(vec![json!("garbage")])),
        Call("resourceVersion=11", Reply::Lines(vec![line("ADDED", "12", "b")])),
    ])
    .await;
    assert_eq!(told.iter().filter(|text| text.starts_with("failed")).count(), 3);
    assert!(told.contains(&"present b".to_owned()) && !told.iter().any(|text| text.contains("instead of")), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_is_cut_within_a_line_goes_on_behind_the_last_whole_one() {
    let whole = format!("{}\n", line("ADDED", "11", "a"));
    let half = line("ADDED", "12", "b").to_string();
    let bytes = |half: &str| [whole.as_bytes(), half.as_bytes()].concat();
    for cut in [Reply::Cut(bytes(&half)), Reply::Cut(bytes(&half[..9])), Reply::Bytes(bytes(&half))] {
        let told = told(vec![
            Call("limit", page("10", "", &[])),
            Call("resourceVersion=10", cut),
            Call("resourceVersion=11", Reply::Lines(vec![line("ADDED", "12", "b")])),
            Call("resourceVersion=12", Reply::Silence(Vec::new())),
        ])
        .await;
        let told: Vec<_> = told.into_iter().filter(|text| !text.starts_with("failed")).collect();
        assert_eq!(told, ["begin", "page ", "complete 10", "present a", "present b"]);
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_is_asked_for_again_and_then_listed() {
    let unreadable = [
        b"\xff\xfe\x00\n".to_vec(),
        b"\n".to_vec(),
        line("ADDED", "", "a").to_string().into_bytes(),
        br#"{"type":"ADDED","object":{"metadata":{"resourceVersion":"12","name":7}}}"#.to_vec(),
        br#"{"type":"BOOKMARK","object":{"metadata":{}}}"#.to_vec(),
        br#"{"type":"OTHER","object":{}}"#.to_vec(),
    ];
    for bytes in unreadable {
        let mut calls = vec![Call("limit", page("10", "", &[]))];
        let reply = || Reply::Bytes([bytes.as_slice(), b"\n"].concat());
        calls.extend((0..USELESS).map(|_| Call("resourceVersion=10", reply())));
        calls.push(Call("limit", page("20", "", &["a"])));
        let told = told(calls).await;
        assert_eq!(told.iter().filter(|text| text.starts_with("failed")).count(), USELESS as usize);
        assert!(told.ends_with(&["page a".to_owned(), "complete 20".to_owned()]), "{told:?}");
        assert!(!told.iter().any(|text| text.contains("instead of") || text.starts_with("present")), "{told:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_restarts_is_waited_for_and_nothing_is_listed_anew() {
    let mut calls = vec![Call("limit", Reply::Refused), Call("limit", page("10", "", &["a"]))];
    calls.push(Call("resourceVersion=10", Reply::Cut(format!("{}\n", line("MODIFIED", "11", "a")).into_bytes())));
    calls.extend((0..3 * USELESS).map(|_| Call("resourceVersion=11", Reply::Refused)));
    calls.push(Call("resourceVersion=11", Reply::Lines(vec![line("MODIFIED", "12", "a")])));
    let told: Vec<_> = told(calls).await.into_iter().filter(|text| !text.starts_with("failed")).collect();
    assert_eq!(told, ["begin", "begin", "page a", "complete 10", "present a", "present a"]);
}

#[tokio::test(start_paused = true)]
async fn versions_that_go_back_mean_a_new_list() {
    for kind in ["ADDED", "DELETED", "BOOKMARK"] {
        let told = told(vec![
            Call("limit", page("100", "", &["a"])),
            Call("resourceVersion=100", Reply::Lines(vec![line("MODIFIED", "101", "a"), line(kind, "99", "b")])),
            Call("limit", page("100", "", &["b"])),
        ])
        .await;
        let expected =
            ["begin", "page a", "complete 100", "present a", "begin", "page b", "complete 100"].map(str::to_owned);
        assert_eq!(told, expected, "{kind}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_silent_is_opened_again_and_a_bookmark_is_a_sign_of_life() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let (send, lines) = mpsc::unbounded_channel();
    let calls = vec![
        Call("limit", page("10", "", &[])),
        Call("resourceVersion=10", Reply::Live(lines)),
        Call("resourceVersion=30", Reply::Silence(Vec::new())),
    ];
    let (_rebuild, rebuilds) = watch::channel(0);
    let shared = shared(rebuilds);
    let metrics = shared.metrics.clone();
    let running = tokio::spawn(run(lane(calls, tell.clone()), shared, Recorder(tell)));
    let begun = Instant::now();
    for version in [10, 20, 30] {
        let _ = send.send(line("BOOKMARK", &version.to_string(), ""));
        tokio::time::sleep(SILENCE - Duration::from_secs(1)).await;
        assert_eq!(metrics.silent.get(), 0);
    }
    while told.recv().await.unwrap() != "end of script" {}
    assert_eq!(metrics.silent.get(), 2);
    // Neither sooner nor much later: a watch without a deadline would be waited for as well, by a clock that jumps.
    let (earliest, latest) = (4 * SILENCE - Duration::from_secs(3), 5 * SILENCE);
    assert!((earliest..latest).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_stays_silent_has_failed_and_is_listed_anew() {
    let silent = || Reply::Silence(Vec::new());
    let told = told(vec![
        Call("limit", page("10", "", &[])),
        Call("resourceVersion=10", silent()),
        Call("resourceVersion=10", Reply::Silence(vec![line("BOOKMARK", "11", "")])),
        Call("resourceVersion=11", silent()),
        Call("limit", page("20", "", &["a"])),
        Call("resourceVersion=20", silent()),
        Call("resourceVersion=20", Reply::Cut(Vec::new())),
        Call("resourceVersion=20", silent()),
        Call("limit", page("30", "", &["a", "b"])),
    ])
    .await;
    let (silent, broken) =
        ("failed: the watch says nothing, not even a bookmark", "failed: the API server's answer broke off");
    let expected =
        ["begin", "page ", "complete 10", "bookmark 11", silent, "begin", "page a", "complete 20", broken, silent];
    assert_eq!(told, [&expected[..], &["begin", "page a b", "complete 30"]].concat());
}

#[tokio::test(start_paused = true)]
async fn how_far_a_watch_has_seen_is_told_to_who_compares_renewals_with_it() {
    for (lines, height) in [
        (vec![], 10),
        (vec![line("ADDED", "20", "a"), line("MODIFIED", "55", "a")], 55),
        (vec![line("DELETED", "56", "a")], 56),
        (vec![line("ADDED", "20", "a"), line("BOOKMARK", "60", "")], 60),
    ] {
        let (tell, mut told) = mpsc::unbounded_channel();
        let (_rebuild, rebuilds) = watch::channel(0);
        let shared = shared(rebuilds);
        let sightings = shared.sightings.clone();
        let calls = vec![Call("limit", page("10", "", &[])), Call("resourceVersion=10", Reply::Lines(lines))];
        let running = tokio::spawn(run(lane(calls, tell.clone()), shared, Recorder(tell)));
        while told.recv().await.unwrap() != "end of script" {}
        assert!(!sightings.is_above(height) && sightings.is_above(height - 1), "{height}");
        running.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_without_a_version_is_no_list() {
    let told = told(vec![
        Call("limit", Reply::Json(json!({"metadata": {}, "items": []}))),
        Call("limit", page("10", "", &[])),
    ])
    .await;
    let failed = "failed: the API server's answer is not readable";
    assert_eq!(told, ["begin", failed, "begin", "page ", "complete 10"]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ignores_the_limit_is_read_as_far_as_a_page_may_be_large() {
    let names: Vec<String> = (0..PAGE * 4).map(|n| n.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let whole = told(vec![Call("limit=50", page("10", "", &names))]).await;
    assert_eq!(whole, ["begin".to_owned(), format!("page {}", names.join(" ")), "complete 10".to_owned()]);

    let mut calls: Vec<_> = ["50", "25", "13", "7", "4", "2", "1"].map(|_| Call("limit=", Reply::Large)).into();
    calls.push(Call("limit=1", page("20", "", &["a"])));
    let told = told(calls).await;
    let failed = format!("failed: the API server's answer has more than {PAGE_BYTES} bytes");
    assert_eq!(told, ["begin".to_owned(), failed, "begin".into(), "page a".into(), "complete 20".into()]);
}

#[tokio::test(start_paused = true)]
async fn pages_that_are_too_large_are_halved() {
    let told = told(vec![
        Call("limit=50", Reply::Large),
        Call("limit=25", Reply::Large),
        Call("limit=13", page("10", "t", &["a"])),
        Call("limit=13&continue=t", page("10", "", &["b"])),
    ])
    .await;
    assert_eq!(told, ["begin", "page a", "page b", "complete 10"]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_wants_to_be_asked_again_at_once_is_not() {
    let begun = Instant::now();
    let mut calls: Vec<_> = (0..20).map(|_| Call("limit", Reply::Later("0"))).collect();
    calls.push(Call("limit", page("10", "", &["a"])));
    assert!(told(calls).await.ends_with(&["page a".to_owned(), "complete 10".to_owned()]));
    assert!(begun.elapsed() >= 20 * LEAST, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn those_who_were_told_the_same_wait_do_not_come_back_at_once() {
    let mut waits = std::collections::BTreeSet::new();
    for _ in 0..20 {
        let begun = Instant::now();
        told(vec![Call("limit", Reply::Later("80")), Call("limit", page("10", "", &["a"]))]).await;
        assert!((80..=90).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
        waits.insert(begun.elapsed());
    }
    assert!(waits.len() > 1);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_ends_again_and_again_after_a_word_is_slowed_a_little() {
    let (bookmark, error) = (line("BOOKMARK", "10", ""), json!({"type": "ERROR", "object": {"code": 500}}));
    for lines in [vec![bookmark.clone()], vec![bookmark, error]] {
        let begun = Instant::now();
        let mut calls = vec![Call("limit", page("10", "", &[]))];
        calls.extend((0..20).map(|_| Call("resourceVersion=10", Reply::Lines(lines.clone()))));
        calls.push(Call("resourceVersion=10", Reply::Lines(vec![line("ADDED", "11", "a")])));
        let told = told(calls).await;
        assert!(told.iter().any(|text| text == "present a") && !told.iter().any(|text| text.contains("instead of")));
        // Ever longer, but whoever has news is not kept waiting.
        let (least, most) = (5 * Duration::from_secs(1), 21 * Duration::from_secs(1));
        assert!((least..=most).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_failure_after_short_watches_with_news_waits_like_a_first_one() {
    let (bookmark, error) = (line("BOOKMARK", "10", ""), json!({"type": "ERROR", "object": {"code": 500}}));
    for _ in 0..20 {
        let begun = Instant::now();
        let mut calls = vec![Call("limit", page("10", "", &[]))];
        calls.extend((0..8).map(|_| Call("resourceVersion=10", Reply::Lines(vec![bookmark.clone()]))));
        calls.push(Call("resourceVersion=10", Reply::Lines(vec![error.clone()])));
        calls.push(Call("resourceVersion=10", Reply::Lines(vec![line("ADDED", "11", "a")])));
        told(calls).await;
        // Nine times there was news, and one failure.
        assert!(begun.elapsed() <= 9 * NEWS_CAP + BACKOFF, "{:?}", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_has_a_word_and_then_wants_a_list_again_and_again_is_slowed_like_any_failure() {
    for code in [403, 410] {
        let lines =
            vec![line("BOOKMARK", "10", ""), json!({"type": "ERROR", "object": {"kind": "Status", "code": code}})];
        let begun = Instant::now();
        let calls = (0..20)
            .flat_map(|_| [Call("limit", page("10", "", &[])), Call("watch", Reply::Lines(lines.clone()))])
            .collect();
        told(calls).await;
        assert!(begun.elapsed() > 10 * NEWS_CAP, "{code}: {:?}", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_that_goes_in_a_circle_has_failed() {
    let told = told(vec![
        Call("limit", page("10", "t", &["a"])),
        Call("continue=t", page("10", "t", &["a"])),
        Call("limit", page("20", "", &["b"])),
    ])
    .await;
    let failed = "failed: the API server's answer is not readable";
    assert_eq!(told, ["begin", "page a", "page a", failed, "begin", "page b", "complete 20"]);
}

/// Every page takes this long, and no page is the last one.
struct Endless(Duration, std::sync::atomic::AtomicU32);

impl Transport for Endless {
    fn send(&self, _request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, Error>> {
        let (time, number) = (self.0, self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        Box::pin(async move {
            tokio::time::sleep(time).await;
            carry_out(page("10", &number.to_string(), &["a"]))
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_without_an_end_has_failed() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let (_rebuild, rebuilds) = watch::channel(0);
    let lane = Lane::new(Endless(Duration::from_secs(1), 0.into()));
    let running = tokio::spawn(run(lane, shared(rebuilds), Recorder(tell)));
    let failed = async { while told.recv().await.unwrap() != "failed: the API server did not answer in time" {} };
    timeout(Duration::from_secs(1_000), failed).await.expect("a list has a deadline");
    running.abort();
}

/// Nobody ever answers.
struct Hanging;

impl Transport for Hanging {
    fn send(&self, _request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, Error>> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn lists_that_hang_keep_no_others_waiting() {
    let (_rebuild, rebuilds) = watch::channel(0);
    let shared = Shared { pages: Arc::new(Semaphore::new(2)), ..shared(rebuilds) };
    let (tell, mut failed) = mpsc::unbounded_channel();
    let mut running = JoinSet::new();
    for _ in 0..4 {
        running.spawn(run(Lane::new(Hanging), shared.clone(), Recorder(tell.clone())));
    }
    for _ in 0..4 {
        while !failed.recv().await.unwrap().starts_with("failed") {}
    }
    let begun = Instant::now();
    let (tell, mut told) = mpsc::unbounded_channel();
    let token = |number: u32| if number < 20 { number.to_string() } else { String::new() };
    let calls = (1..=20).map(|number| Call("limit", page("10", &token(number), &["a"]))).collect();
    running.spawn(run(lane(calls, tell.clone()), shared, Recorder(tell)));
    while told.recv().await.unwrap() != "complete 10" {}
    assert!(begun.elapsed() <= Duration::from_secs(45), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn no_more_pages_are_read_than_are_wanted() {
    let told =
        told(vec![Call("limit", page("10", "t", &["enough"])), Call("resourceVersion=10", Reply::Lines(Vec::new()))])
            .await;
    assert_eq!(told, ["begin", "page enough", "complete 10"]);
}

#[tokio::test(start_paused = true)]
async fn a_rebuild_lists_at_once() {
    let mut bench = start(vec![
        Call("limit", page("10", "", &[])),
        Call("resourceVersion=10", Reply::Silence(vec![line("ADDED", "11", "a")])),
        Call("limit", page("20", "", &["b"])),
    ]);
    for expected in ["begin", "page ", "complete 10", "present a"] {
        assert_eq!(bench.told.recv().await.unwrap(), expected);
    }
    let ordered = Instant::now();
    bench.rebuild.send_modify(|count| *count += 1);
    for expected in ["begin", "page b", "complete 20", "end of script"] {
        assert_eq!(bench.told.recv().await.unwrap(), expected);
    }
    assert_eq!(ordered.elapsed(), Duration::ZERO, "not only after a silence");
    bench.running.abort();
}
