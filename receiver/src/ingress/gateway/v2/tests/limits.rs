//! What is too much for now, and whom it concerns. The incumbent's agent tries again what failed (5xx) and drops what was refused (4xx).

use futures::{StreamExt as _, poll, stream::FuturesUnordered};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;

use super::*;
use crate::ingress::gateway::{Limits, refusal::Refusal as Shared};

fn event(manager: &str) -> Request<Full<bytes::Bytes>> {
    Request::post(format!("/v2/{manager}/event")).body(Full::new("{}".into())).unwrap()
}

/// A request whose body never comes.
fn unfinished() -> Request<impl hyper::body::Body<Data = bytes::Bytes, Error = std::io::Error>> {
    let body = StreamBody::new(futures::stream::pending::<Result<Frame<bytes::Bytes>, std::io::Error>>());
    Request::post("/v2/lifecycle-manager/event").body(body).unwrap()
}

/// The seconds after which it is to be tried again.
async fn is_for_later(answer: Answer, about: &str) -> u64 {
    assert_eq!(answer.status(), 503, "{about}");
    let wait = answer.headers()[header::RETRY_AFTER].to_str().unwrap().parse().unwrap();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((&problem["status"], &problem["title"]), (&503.into(), &"Service Unavailable".into()), "{about}");
    wait
}

#[tokio::test]
async fn each_runtime_has_a_rate() {
    let room = Room::new();
    tokio::time::pause();
    for _ in 0..Limits::default().burst {
        assert_eq!(room.ask("runtime", event("lifecycle-manager")).await.status(), 200);
    }
    for _ in 0..5 {
        is_for_later(room.ask("runtime", event("lifecycle-manager")).await, "rate").await;
    }
    assert_eq!(room.ask("nameless", event("lifecycle-manager")).await.status(), 400, "what is wrong stays so");
}

#[tokio::test]
async fn each_runtime_has_few_requests_in_flight_and_each_has_a_time() {
    let room = Room::new();
    tokio::time::pause();
    let peer = room.direct.peer(&[room.leaves["runtime"].clone()], None);
    let mut open = FuturesUnordered::new();
    for _ in 0..Limits::default().in_flight {
        open.push(room.direct.answer(unfinished(), &peer));
    }
    assert!(poll!(open.next()).is_pending());
    is_for_later(room.ask("runtime", event("lifecycle-manager")).await, "concurrency").await;
    while let Some((answer, _)) = open.next().await {
        is_for_later(answer, "slow").await;
    }
    assert_eq!(room.ask("runtime", event("lifecycle-manager")).await.status(), 200);
}

#[tokio::test]
async fn a_manager_that_hangs_delays_nobody() {
    let room = Room::new();
    let mut hung = FuturesUnordered::new();
    // More than one runtime may have in flight.
    for _ in 0..Limits::default().in_flight * 2 {
        hung.push(room.ask("runtime", event(HUNG)));
    }
    for manager in ["lifecycle-manager", "other"] {
        let ended = poll!(hung.next()).map(|answer| answer.unwrap().status());
        assert!(ended.is_pending(), "each waits for the manager's word: {ended:?}");
        assert_eq!(room.ask("runtime", event(manager)).await.status(), 200, "{manager}");
    }
    assert_eq!(room.taken.0.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn what_may_be_taken_later_is_never_told_as_somebodys_fault() {
    let wait = Duration::from_secs(7);
    for (refusal, told) in [
        (Shared::Rate(wait), 7),
        (Shared::Flood(wait), 7),
        (Shared::Concurrency, 2),
        (Shared::Late, 2),
        (Shared::Busy, 2),
        (Shared::Slow, 2),
        (Shared::Unplaced(crate::fleet::hub::Unplaced::NotSynced), 2),
    ] {
        let ours = refusal::Refusal::from(refusal);
        assert_eq!(ours.label(), refusal.label());
        assert_eq!(is_for_later(ours.answer(0), ours.label()).await, told);
    }
    for refusal in [Shared::Revoked, Shared::Route, Shared::Method, Shared::TooLarge(1), Shared::Malformed] {
        let [ours, theirs] = [refusal::Refusal::from(refusal).answer(0), refusal.answer(0)];
        assert!(ours.status().is_client_error() && ours.status() == theirs.status(), "{}", refusal.label());
    }
}
