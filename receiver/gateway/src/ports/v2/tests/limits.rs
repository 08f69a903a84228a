//! Temporary refusals and their scope. runtime-watcher's agent retries 5xx and drops events on 4xx.

use futures::{StreamExt as _, poll, stream::FuturesUnordered};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;

use super::*;
use crate::ports::Limits;

fn event(manager: &str) -> Request<Full<bytes::Bytes>> {
    Request::post(format!("/v2/{manager}/event")).body(Full::new("{}".into())).unwrap()
}

/// A request without the end of its body.
fn unfinished() -> Request<impl hyper::body::Body<Data = bytes::Bytes, Error = std::io::Error>> {
    let body = StreamBody::new(futures::stream::pending::<Result<Frame<bytes::Bytes>, std::io::Error>>());
    Request::post("/v2/lifecycle-manager/event").body(body).unwrap()
}

/// Asserts a 503 and returns its `Retry-After` in seconds.
async fn assert_unavailable(response: HttpResponse, about: &str) -> u64 {
    assert_eq!(response.status(), 503, "{about}");
    let wait = response.headers()[header::RETRY_AFTER].to_str().unwrap().parse().unwrap();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((&problem["status"], &problem["title"]), (&503.into(), &"Service Unavailable".into()), "{about}");
    wait
}

#[tokio::test]
async fn rate_limit_applies_to_each_runtime() {
    let fixture = Fixture::new();
    tokio::time::pause();
    for _ in 0..Limits::default().burst {
        assert_eq!(fixture.send("runtime", event("lifecycle-manager")).await.status(), 200);
    }
    for _ in 0..5 {
        assert_unavailable(fixture.send("runtime", event("lifecycle-manager")).await, "rate").await;
    }
    assert_eq!(
        fixture.send("nameless", event("lifecycle-manager")).await.status(),
        400,
        "a permanent refusal stays one"
    );
}

#[tokio::test]
async fn requests_in_flight_are_limited_by_runtime_and_time_out() {
    let fixture = Fixture::new();
    tokio::time::pause();
    let peer = fixture.direct.identify(&[fixture.leaves["runtime"].clone()], None);
    let mut open = FuturesUnordered::new();
    for _ in 0..Limits::default().in_flight {
        open.push(fixture.direct.handle(unfinished(), &peer));
    }
    assert!(poll!(open.next()).is_pending());
    assert_unavailable(fixture.send("runtime", event("lifecycle-manager")).await, "concurrency").await;
    while let Some((response, _)) = open.next().await {
        assert_unavailable(response, "slow").await;
    }
    assert_eq!(fixture.send("runtime", event("lifecycle-manager")).await.status(), 200);
}

#[tokio::test]
async fn hung_manager_delays_no_other_request() {
    let fixture = Fixture::new();
    let mut hung = FuturesUnordered::new();
    // More than the requests in flight of one runtime.
    for _ in 0..Limits::default().in_flight * 2 {
        hung.push(fixture.send("runtime", event(HUNG_MANAGER)));
    }
    for manager in ["lifecycle-manager", "other"] {
        let ended = poll!(hung.next()).map(|response| response.unwrap().status());
        assert!(ended.is_pending(), "each waits for the manager's response: {ended:?}");
        assert_eq!(fixture.send("runtime", event(manager)).await.status(), 200, "{manager}");
    }
    assert_eq!(fixture.intake.0.lock().len(), 2);
}

#[tokio::test]
async fn temporary_refusal_is_a_503_and_permanent_ones_stay_4xx() {
    let wait = Duration::from_secs(7);
    for (refusal, seconds) in [
        (Refusal::Rate(wait), 7),
        (Refusal::Flood(wait), 7),
        (Refusal::Concurrency, 2),
        (Refusal::Overloaded, 2),
        (Refusal::Busy, 2),
        (Refusal::BodyTimeout, 2),
        (Refusal::Placement(tidewatch_fleet::table::PlacementError::NotSynced), 2),
        (Refusal::Placement(tidewatch_fleet::table::PlacementError::Elsewhere), 2),
    ] {
        assert_eq!(assert_unavailable(refusal.response_as_unavailable(0), refusal.label()).await, seconds);
    }
    for refusal in [Refusal::Revoked, Refusal::Route, Refusal::Method, Refusal::TooLarge(1), Refusal::Malformed] {
        let [ours, theirs] = [refusal.response_as_unavailable(0), refusal.response(0)];
        assert!(ours.status().is_client_error() && ours.status() == theirs.status(), "{}", refusal.label());
    }
}
