mod planned;

use std::{collections::VecDeque, future::ready, sync::Arc};

use bytes::Bytes;
use futures::{StreamExt, future::BoxFuture, stream};
use http::{Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    task::{JoinHandle, JoinSet},
};

use super::*;
use crate::kubernetes::{Body, Transport};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Reply of the API server to one request.
enum Reply {
    Json(Value),
    Status(u16),
    /// 429 with this `Retry-After`.
    Later(&'static str),
    /// Lines of a watch, then its end.
    Lines(Vec<Value>),
    /// Lines of a watch, then silence.
    Silence(Vec<Value>),
    /// A page that exceeds the size limit.
    Large,
    /// Bytes of a watch, then its end.
    Bytes(Vec<u8>),
    /// Bytes of a watch, then a broken connection.
    Cut(Vec<u8>),
    /// Connection refused.
    Refused,
    /// Lines of a watch as they are sent.
    Live(mpsc::UnboundedReceiver<Value>),
}

/// One expected request: a part of its path and query, and the reply.
struct Call(&'static str, Reply);

/// API server that replays a list of calls; an unexpected call is recorded like every other event.
struct Script {
    calls: Mutex<VecDeque<Call>>,
    records: mpsc::UnboundedSender<String>,
}

impl Transport for Script {
    fn send(&self, request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, Error>> {
        Box::pin(ready(reply(&request, &self.calls, &self.records)))
    }
}

fn client(calls: Vec<Call>, records: mpsc::UnboundedSender<String>) -> ApiClient {
    ApiClient::new(Script { calls: Mutex::new(calls.into()), records })
}

fn reply(
    request: &Request<Full<Bytes>>,
    calls: &Mutex<VecDeque<Call>>,
    records: &mpsc::UnboundedSender<String>,
) -> Result<Response<Body>, Error> {
    assert_eq!(request.headers()[header::ACCEPT_ENCODING], "identity");
    let path = request.uri().to_string();
    let Some(Call(expected, reply)) = calls.lock().pop_front() else {
        let _ = records.send("end of script".to_owned());
        return Ok(response(200, Vec::new(), true));
    };
    if !path.contains(expected) {
        let _ = records.send(format!("{path} instead of {expected}"));
    }
    carry_out(reply)
}

fn text(lines: Vec<Value>) -> Vec<Bytes> {
    lines.into_iter().map(|line| Bytes::from(format!("{line}\n"))).collect()
}

fn carry_out(reply: Reply) -> Result<Response<Body>, Error> {
    Ok(match reply {
        Reply::Json(value) => response(200, vec![value.to_string().into()], false),
        Reply::Status(status) => response(status, Vec::new(), false),
        Reply::Later(seconds) => {
            let mut later = response(429, Vec::new(), false);
            later.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static(seconds));
            later
        }
        Reply::Lines(lines) => response(200, text(lines), false),
        Reply::Silence(lines) => response(200, text(lines), true),
        Reply::Large => response(200, vec![vec![b' '; PAGE_BYTES + 1].into()], false),
        Reply::Bytes(bytes) => response(200, vec![bytes.into()], false),
        Reply::Cut(bytes) => {
            let frames = [Ok(Frame::data(bytes.into())), Err("connection reset".into())];
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

fn response(status: u16, frames: Vec<Bytes>, silence: bool) -> Response<Body> {
    let frames = stream::iter(frames).map(|bytes| Ok(Frame::data(bytes)));
    let rest = if silence { stream::pending().left_stream() } else { stream::empty().right_stream() };
    let body = StreamBody::new(frames.chain(rest)).boxed_unsync();
    Response::builder().status(status).body(body).unwrap()
}

/// Records every call of the loop.
struct Recorder(mpsc::UnboundedSender<String>);

impl Recorder {
    fn record(&self, text: String) {
        let _ = self.0.send(text);
    }
}

impl Sink for Recorder {
    type Item = Named;

    async fn target(&mut self, _client: &ApiClient) -> Result<Target, crate::kubernetes::ApiError> {
        Ok(Target::collection("g", "v1", None, "things"))
    }

    fn begin(&mut self) {
        self.record("begin".to_owned());
    }

    fn page(&mut self, items: Vec<Named>) -> bool {
        let names: Vec<_> = items.into_iter().map(|item| item.metadata.name).collect();
        self.record(format!("page {}", names.join(" ")));
        !names.contains(&"enough".to_owned())
    }

    fn complete(&mut self, version: &str) {
        self.record(format!("complete {version}"));
    }

    fn present(&mut self, item: Named) {
        self.record(format!("present {}", item.metadata.name));
    }

    fn gone(&mut self, item: Named) {
        self.record(format!("gone {}", item.metadata.name));
    }

    fn bookmark(&mut self, version: &str) {
        self.record(format!("bookmark {version}"));
    }

    fn failed(&mut self, why: &crate::kubernetes::ApiError) {
        self.record(format!("failed: {why}"));
    }
}

struct Fixture {
    records: mpsc::UnboundedReceiver<String>,
    rebuild: watch::Sender<u64>,
    running: JoinHandle<()>,
}

fn shared(rebuild: watch::Receiver<u64>) -> WatchContext {
    WatchContext {
        large_lines: Arc::new(Semaphore::new(2)),
        pages: Arc::new(Semaphore::new(1)),
        slow: Arc::new(Semaphore::new(1)),
        rebuild,
        watermarks: Watermarks::default(),
        discovery: Discovery::default(),
        namespace: "kyma-system".into(),
        metrics: Metrics::default(),
    }
}

fn start(calls: Vec<Call>) -> Fixture {
    let (record, records) = mpsc::unbounded_channel();
    let (rebuild, rebuilds) = watch::channel(0);
    let shared = shared(rebuilds);
    let running = tokio::spawn(run(client(calls, record.clone()), shared, Recorder(record)));
    Fixture { records, rebuild, running }
}

/// Records of a run up to the end of the script.
async fn records(calls: Vec<Call>) -> Vec<String> {
    let mut fixture = start(calls);
    let mut records = Vec::new();
    while let Some(text) = fixture.records.recv().await {
        if text == "end of script" {
            break;
        }
        records.push(text);
    }
    fixture.running.abort();
    records
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
async fn watch_starts_at_the_version_of_a_paged_list() {
    let lines = vec![
        line("ADDED", "11", "c"),
        line("MODIFIED", "12", "a"),
        line("BOOKMARK", "15", ""),
        line("DELETED", "16", "b"),
    ];
    let records = records(vec![
        Call("/apis/g/v1/things?limit=50", page("10", "t/1", &["a"])),
        Call("limit=50&continue=t%2F1", page("10", "", &["b"])),
        Call("watch=true&allowWatchBookmarks=true", Reply::Lines(lines)),
        Call("resourceVersion=16", Reply::Lines(Vec::new())),
        Call("resourceVersion=16", Reply::Silence(Vec::new())),
    ])
    .await;
    assert_eq!(
        records,
        ["begin", "page a", "page b", "complete 10", "present c", "present a", "bookmark 15", "gone b"]
    );
}

#[tokio::test(start_paused = true)]
async fn expired_version_causes_a_relist() {
    for reply in [Reply::Lines(vec![gone()]), Reply::Status(410)] {
        let records = records(vec![
            Call("limit", page("10", "", &[])),
            Call("resourceVersion=10", reply),
            Call("limit", page("20", "", &["a"])),
            Call("resourceVersion=20", Reply::Lines(Vec::new())),
        ])
        .await;
        assert_eq!(records, ["begin", "page ", "complete 10", "begin", "page a", "complete 20"]);
    }
}

#[tokio::test(start_paused = true)]
async fn list_that_expires_between_pages_restarts() {
    let records = records(vec![
        Call("limit", page("10", "t", &["a"])),
        Call("continue=t", Reply::Status(410)),
        Call("things?limit=50", page("20", "", &["b"])),
    ])
    .await;
    let failed = "failed: the API server responded with 410 Gone";
    assert_eq!(records, ["begin", "page a", failed, "begin", "page b", "complete 20"]);
}

#[tokio::test(start_paused = true)]
async fn refusals_are_reported_and_followed_by_a_relist() {
    let records = records(vec![
        Call("limit", Reply::Status(404)),
        Call("limit", page("10", "", &[])),
        Call("watch", Reply::Status(400)),
        Call("limit", page("20", "", &[])),
    ])
    .await;
    let missing = "failed: the API server responded with 404 Not Found";
    let bad = "failed: the API server responded with 400 Bad Request";
    assert_eq!(records, ["begin", missing, "begin", "page ", "complete 10", bad, "begin", "page ", "complete 20"]);
}

#[tokio::test(start_paused = true)]
async fn watch_that_is_denied_or_overloaded_for_long_resumes_at_the_same_version() {
    for reply in [|| Reply::Status(401), || Reply::Status(403), || Reply::Status(500), || Reply::Later("7")] {
        let mut calls = vec![Call("limit", page("10", "", &[]))];
        calls.extend((0..UNUSABLE_LIMIT * 4).map(|_| Call("resourceVersion=10", reply())));
        calls.push(Call("resourceVersion=10", Reply::Lines(vec![line("ADDED", "11", "a")])));
        let records = records(calls).await;
        assert_eq!(records.iter().filter(|text| text.starts_with("failed")).count(), 4 * UNUSABLE_LIMIT as usize);
        let records: Vec<_> = records.into_iter().filter(|text| !text.starts_with("failed")).collect();
        assert_eq!(records, ["begin", "page ", "complete 10", "present a"]);
    }
}

#[tokio::test(start_paused = true)]
async fn ordered_rebuild_respects_a_retry_after() {
    let mut fixture = start(vec![
        Call("limit", page("10", "", &[])),
        Call("resourceVersion=10", Reply::Later("60")),
        Call("limit", page("20", "", &[])),
    ]);
    while !fixture.records.recv().await.unwrap().starts_with("failed") {}
    let refused = Instant::now();
    fixture.rebuild.send_modify(|count| *count += 1);
    assert_eq!(fixture.records.recv().await.unwrap(), "begin");
    assert!(refused.elapsed() >= Duration::from_secs(60), "{:?}", refused.elapsed());
    fixture.running.abort();
}

#[tokio::test(start_paused = true)]
async fn page_size_recovers_from_a_few_large_objects() {
    let mut calls = vec![Call("limit=50", Reply::Large), Call("limit=25", Reply::Large)];
    let tokens: Vec<&'static str> = vec!["1", "2", "3", "4", "5", "6", "7", "8"];
    calls.extend(tokens[..4].iter().map(|token| Call("limit=13", page("10", token, &["a"]))));
    calls.extend(tokens[4..].iter().map(|token| Call("limit=26", page("10", token, &["a"]))));
    calls.push(Call("limit=50", page("10", "", &["a"])));
    calls.push(Call("resourceVersion=10", Reply::Lines(vec![gone()])));
    calls.push(Call("limit=50", page("20", "", &[])));
    let records = records(calls).await;
    assert!(!records.iter().any(|text| text.contains("instead of")), "{records:?}");
    assert_eq!(records.last().map(String::as_str), Some("complete 20"));
}

#[tokio::test(start_paused = true)]
async fn watch_is_retried_from_the_same_version_after_server_errors() {
    let error = json!({"type": "ERROR", "object": {"code": 500}});
    let records = records(vec![
        Call("limit", page("10", "", &[])),
        Call("resourceVersion=10", Reply::Lines(vec![line("ADDED", "11", "a"), error])),
        Call("resourceVersion=11", Reply::Status(503)),
        Call("resourceVersion=11", Reply::Lines(vec![json!("garbage")])),
        Call("resourceVersion=11", Reply::Lines(vec![line("ADDED", "12", "b")])),
    ])
    .await;
    assert_eq!(records.iter().filter(|text| text.starts_with("failed")).count(), 3);
    assert!(
        records.contains(&"present b".to_owned()) && !records.iter().any(|text| text.contains("instead of")),
        "{records:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn watch_resumes_behind_the_last_complete_line_after_a_broken_connection() {
    let whole = format!("{}\n", line("ADDED", "11", "a"));
    let half = line("ADDED", "12", "b").to_string();
    let bytes = |half: &str| [whole.as_bytes(), half.as_bytes()].concat();
    for cut in [Reply::Cut(bytes(&half)), Reply::Cut(bytes(&half[..9])), Reply::Bytes(bytes(&half))] {
        let records = records(vec![
            Call("limit", page("10", "", &[])),
            Call("resourceVersion=10", cut),
            Call("resourceVersion=11", Reply::Lines(vec![line("ADDED", "12", "b")])),
            Call("resourceVersion=12", Reply::Silence(Vec::new())),
        ])
        .await;
        let records: Vec<_> = records.into_iter().filter(|text| !text.starts_with("failed")).collect();
        assert_eq!(records, ["begin", "page ", "complete 10", "present a", "present b"]);
    }
}

#[tokio::test(start_paused = true)]
async fn unreadable_lines_are_requested_again_and_then_cause_a_relist() {
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
        calls.extend((0..UNUSABLE_LIMIT).map(|_| Call("resourceVersion=10", reply())));
        calls.push(Call("limit", page("20", "", &["a"])));
        let records = records(calls).await;
        assert_eq!(records.iter().filter(|text| text.starts_with("failed")).count(), UNUSABLE_LIMIT as usize);
        assert!(records.ends_with(&["page a".to_owned(), "complete 20".to_owned()]), "{records:?}");
        assert!(!records.iter().any(|text| text.contains("instead of") || text.starts_with("present")), "{records:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn restart_of_the_api_server_causes_no_relist() {
    let mut calls = vec![Call("limit", Reply::Refused), Call("limit", page("10", "", &["a"]))];
    calls.push(Call("resourceVersion=10", Reply::Cut(format!("{}\n", line("MODIFIED", "11", "a")).into_bytes())));
    calls.extend((0..3 * UNUSABLE_LIMIT).map(|_| Call("resourceVersion=11", Reply::Refused)));
    calls.push(Call("resourceVersion=11", Reply::Lines(vec![line("MODIFIED", "12", "a")])));
    let records: Vec<_> = records(calls).await.into_iter().filter(|text| !text.starts_with("failed")).collect();
    assert_eq!(records, ["begin", "begin", "page a", "complete 10", "present a", "present a"]);
}

#[tokio::test(start_paused = true)]
async fn decreasing_version_causes_a_relist() {
    for kind in ["ADDED", "DELETED", "BOOKMARK"] {
        let records = records(vec![
            Call("limit", page("100", "", &["a"])),
            Call("resourceVersion=100", Reply::Lines(vec![line("MODIFIED", "101", "a"), line(kind, "99", "b")])),
            Call("limit", page("100", "", &["b"])),
        ])
        .await;
        let expected =
            ["begin", "page a", "complete 100", "present a", "begin", "page b", "complete 100"].map(str::to_owned);
        assert_eq!(records, expected, "{kind}");
    }
}

#[tokio::test(start_paused = true)]
async fn silent_watch_is_reopened_and_bookmarks_count_as_liveness() {
    let (record, mut records) = mpsc::unbounded_channel();
    let (send, lines) = mpsc::unbounded_channel();
    let calls = vec![
        Call("limit", page("10", "", &[])),
        Call("resourceVersion=10", Reply::Live(lines)),
        Call("resourceVersion=30", Reply::Silence(Vec::new())),
    ];
    let (_rebuild, rebuilds) = watch::channel(0);
    let shared = shared(rebuilds);
    let metrics = shared.metrics.clone();
    let running = tokio::spawn(run(client(calls, record.clone()), shared, Recorder(record)));
    let begun = Instant::now();
    for version in [10, 20, 30] {
        let _ = send.send(line("BOOKMARK", &version.to_string(), ""));
        tokio::time::sleep(SILENCE - Duration::from_secs(1)).await;
        assert_eq!(metrics.silent.get(), 0);
    }
    while records.recv().await.unwrap() != "end of script" {}
    assert_eq!(metrics.silent.get(), 2);
    // Upper bound as well: with a clock that jumps, a watch without a deadline would end too.
    let earliest = 4 * SILENCE - Duration::from_secs(3);
    let latest = 5 * SILENCE;
    assert!((earliest..latest).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn watch_that_stays_silent_fails_and_causes_a_relist() {
    let silent = || Reply::Silence(Vec::new());
    let records = records(vec![
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
    let silent = "failed: the watch delivered neither events nor bookmarks";
    let broken = "failed: failed to read the API server's response";
    let expected =
        ["begin", "page ", "complete 10", "bookmark 11", silent, "begin", "page a", "complete 20", broken, silent];
    assert_eq!(records, [&expected[..], &["begin", "page a b", "complete 30"]].concat());
}

#[tokio::test(start_paused = true)]
async fn newest_version_of_a_watch_is_recorded_for_comparison_with_renewals() {
    for (lines, height) in [
        (vec![], 10),
        (vec![line("ADDED", "20", "a"), line("MODIFIED", "55", "a")], 55),
        (vec![line("DELETED", "56", "a")], 56),
        (vec![line("ADDED", "20", "a"), line("BOOKMARK", "60", "")], 60),
    ] {
        let (record, mut records) = mpsc::unbounded_channel();
        let (_rebuild, rebuilds) = watch::channel(0);
        let shared = shared(rebuilds);
        let watermarks = shared.watermarks.clone();
        let calls = vec![Call("limit", page("10", "", &[])), Call("resourceVersion=10", Reply::Lines(lines))];
        let running = tokio::spawn(run(client(calls, record.clone()), shared, Recorder(record)));
        while records.recv().await.unwrap() != "end of script" {}
        watermarks.mark();
        assert!(!watermarks.any_above(height) && watermarks.any_above(height - 1), "{height}");
        running.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn list_without_a_version_is_refused() {
    let records = records(vec![
        Call("limit", Reply::Json(json!({"metadata": {}, "items": []}))),
        Call("limit", page("10", "", &[])),
    ])
    .await;
    let failed = "failed: failed to parse the API server's response";
    assert_eq!(records, ["begin", failed, "begin", "page ", "complete 10"]);
}

#[tokio::test(start_paused = true)]
async fn page_is_bounded_in_bytes_when_the_server_ignores_the_limit() {
    let names: Vec<String> = (0..PAGE * 4).map(|n| n.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let whole = records(vec![Call("limit=50", page("10", "", &names))]).await;
    assert_eq!(whole, ["begin".to_owned(), format!("page {}", names.join(" ")), "complete 10".to_owned()]);

    let mut calls: Vec<_> = ["50", "25", "13", "7", "4", "2", "1"].map(|_| Call("limit=", Reply::Large)).into();
    calls.push(Call("limit=1", page("20", "", &["a"])));
    let records = records(calls).await;
    let failed = format!("failed: the API server's response exceeds {PAGE_BYTES} bytes");
    assert_eq!(records, ["begin".to_owned(), failed, "begin".into(), "page a".into(), "complete 20".into()]);
}

#[tokio::test(start_paused = true)]
async fn pages_that_are_too_large_are_halved() {
    let records = records(vec![
        Call("limit=50", Reply::Large),
        Call("limit=25", Reply::Large),
        Call("limit=13", page("10", "t", &["a"])),
        Call("limit=13&continue=t", page("10", "", &["b"])),
    ])
    .await;
    assert_eq!(records, ["begin", "page a", "page b", "complete 10"]);
}

#[tokio::test(start_paused = true)]
async fn retry_after_of_zero_is_ignored() {
    let begun = Instant::now();
    let mut calls: Vec<_> = (0..20).map(|_| Call("limit", Reply::Later("0"))).collect();
    calls.push(Call("limit", page("10", "", &["a"])));
    assert!(records(calls).await.ends_with(&["page a".to_owned(), "complete 10".to_owned()]));
    assert!(begun.elapsed() >= 20 * MIN_WAIT, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn equal_retry_after_values_are_jittered() {
    let mut waits = std::collections::BTreeSet::new();
    for _ in 0..20 {
        let begun = Instant::now();
        records(vec![Call("limit", Reply::Later("80")), Call("limit", page("10", "", &["a"]))]).await;
        assert!((80..=90).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
        waits.insert(begun.elapsed());
    }
    assert!(waits.len() > 1);
}

#[tokio::test(start_paused = true)]
async fn short_watches_with_lines_are_delayed_by_at_most_a_second() {
    let bookmark = line("BOOKMARK", "10", "");
    let error = json!({"type": "ERROR", "object": {"code": 500}});
    for lines in [vec![bookmark.clone()], vec![bookmark, error]] {
        let begun = Instant::now();
        let mut calls = vec![Call("limit", page("10", "", &[]))];
        calls.extend((0..20).map(|_| Call("resourceVersion=10", Reply::Lines(lines.clone()))));
        calls.push(Call("resourceVersion=10", Reply::Lines(vec![line("ADDED", "11", "a")])));
        let records = records(calls).await;
        assert!(
            records.iter().any(|text| text == "present a") && !records.iter().any(|text| text.contains("instead of"))
        );
        // The delay grows, but a watch that delivers lines is delayed by at most a second.
        let least = 5 * Duration::from_secs(1);
        let most = 21 * Duration::from_secs(1);
        assert!((least..=most).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn failure_after_short_watches_with_lines_starts_with_the_first_backoff() {
    let bookmark = line("BOOKMARK", "10", "");
    let error = json!({"type": "ERROR", "object": {"code": 500}});
    for _ in 0..20 {
        let begun = Instant::now();
        let mut calls = vec![Call("limit", page("10", "", &[]))];
        calls.extend((0..8).map(|_| Call("resourceVersion=10", Reply::Lines(vec![bookmark.clone()]))));
        calls.push(Call("resourceVersion=10", Reply::Lines(vec![error.clone()])));
        calls.push(Call("resourceVersion=10", Reply::Lines(vec![line("ADDED", "11", "a")])));
        records(calls).await;
        // Nine delays after watches with lines, and one after a failure.
        assert!(begun.elapsed() <= 9 * REOPEN_CAP + BACKOFF, "{:?}", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn repeated_relists_after_short_watches_back_off_like_failures() {
    for code in [403, 410] {
        let lines =
            vec![line("BOOKMARK", "10", ""), json!({"type": "ERROR", "object": {"kind": "Status", "code": code}})];
        let begun = Instant::now();
        let calls = (0..20)
            .flat_map(|_| [Call("limit", page("10", "", &[])), Call("watch", Reply::Lines(lines.clone()))])
            .collect();
        records(calls).await;
        assert!(begun.elapsed() > 10 * REOPEN_CAP, "{code}: {:?}", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn list_that_repeats_its_continue_token_fails() {
    let records = records(vec![
        Call("limit", page("10", "t", &["a"])),
        Call("continue=t", page("10", "t", &["a"])),
        Call("limit", page("20", "", &["b"])),
    ])
    .await;
    let failed = "failed: failed to parse the API server's response";
    assert_eq!(records, ["begin", "page a", "page a", failed, "begin", "page b", "complete 20"]);
}

/// API server with a list that never ends; every page takes this long.
struct Endless(Duration, std::sync::atomic::AtomicU32);

impl Transport for Endless {
    fn send(&self, _request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, Error>> {
        let time = self.0;
        let number = self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Box::pin(async move {
            tokio::time::sleep(time).await;
            carry_out(page("10", &number.to_string(), &["a"]))
        })
    }
}

#[tokio::test(start_paused = true)]
async fn endless_list_exceeds_its_deadline() {
    let (record, mut records) = mpsc::unbounded_channel();
    let (_rebuild, rebuilds) = watch::channel(0);
    let client = ApiClient::new(Endless(Duration::from_secs(1), 0.into()));
    let running = tokio::spawn(run(client, shared(rebuilds), Recorder(record)));
    let failed = async { while records.recv().await.unwrap() != "failed: the API server did not respond in time" {} };
    timeout(Duration::from_secs(1_000), failed).await.expect("the list exceeds its deadline");
    running.abort();
}

/// API server that never answers.
struct Hanging;

impl Transport for Hanging {
    fn send(&self, _request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, Error>> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn hanging_lists_do_not_delay_others() {
    let (_rebuild, rebuilds) = watch::channel(0);
    let shared = WatchContext { pages: Arc::new(Semaphore::new(2)), ..shared(rebuilds) };
    let (record, mut failed) = mpsc::unbounded_channel();
    let mut running = JoinSet::new();
    for _ in 0..4 {
        running.spawn(run(ApiClient::new(Hanging), shared.clone(), Recorder(record.clone())));
    }
    for _ in 0..4 {
        while !failed.recv().await.unwrap().starts_with("failed") {}
    }
    let begun = Instant::now();
    let (record, mut records) = mpsc::unbounded_channel();
    let token = |number: u32| if number < 20 { number.to_string() } else { String::new() };
    let calls = (1..=20).map(|number| Call("limit", page("10", &token(number), &["a"]))).collect();
    running.spawn(run(client(calls, record.clone()), shared, Recorder(record)));
    while records.recv().await.unwrap() != "complete 10" {}
    assert!(begun.elapsed() <= Duration::from_secs(45), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn list_ends_early_when_the_sink_needs_no_more_pages() {
    let records = records(vec![
        Call("limit", page("10", "t", &["enough"])),
        Call("resourceVersion=10", Reply::Lines(Vec::new())),
    ])
    .await;
    assert_eq!(records, ["begin", "page enough", "complete 10"]);
}

#[tokio::test(start_paused = true)]
async fn ordered_rebuild_relists_immediately() {
    let mut fixture = start(vec![
        Call("limit", page("10", "", &[])),
        Call("resourceVersion=10", Reply::Silence(vec![line("ADDED", "11", "a")])),
        Call("limit", page("20", "", &["b"])),
    ]);
    for expected in ["begin", "page ", "complete 10", "present a"] {
        assert_eq!(fixture.records.recv().await.unwrap(), expected);
    }
    let ordered = Instant::now();
    fixture.rebuild.send_modify(|count| *count += 1);
    for expected in ["begin", "page b", "complete 20", "end of script"] {
        assert_eq!(fixture.records.recv().await.unwrap(), expected);
    }
    assert_eq!(ordered.elapsed(), Duration::ZERO, "the relist does not wait for the silence limit");
    fixture.running.abort();
}
