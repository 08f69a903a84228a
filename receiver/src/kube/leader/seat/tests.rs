//! Candidates against a fake API server that keeps one Lease; time is the test's own.

use std::sync::{Arc, Mutex};

use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::{advance, sleep};

use super::*;
use crate::testing;

const LEASE: Duration = Duration::from_secs(15);

/// What happens to writes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Fault {
    #[default]
    None,
    /// Nothing is answered, to reads as well, and nothing is done.
    Silent,
    /// Writes are done and never answered.
    Lost,
    /// 500, and nothing is done.
    Error,
}

#[derive(Default)]
struct State {
    lease: Option<Value>,
    version: u64,
    fault: Fault,
    writes: usize,
}

#[derive(Clone, Default)]
struct Server(Arc<Mutex<State>>);

impl Server {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.lock().unwrap())
    }

    fn set(&self, fault: Fault) {
        self.with(|state| state.fault = fault);
    }

    /// Changes the Lease as somebody else does.
    fn edit(&self, edit: impl FnOnce(&mut Value)) {
        self.with(|state| {
            state.version += 1;
            let version = state.version.to_string();
            let lease = state.lease.as_mut().unwrap();
            edit(lease);
            lease["metadata"]["resourceVersion"] = json!(version);
        });
    }

    fn holder(&self) -> Option<String> {
        self.with(|state| Some(state.lease.as_ref()?["spec"]["holderIdentity"].as_str()?.to_owned()))
    }

    fn client(&self) -> Client {
        let server = self.clone();
        testing::client("default", move |parts, body| {
            let (status, answer) = server.with(|state| state.answer(&parts.method, body))?;
            Some((status, answer.to_string()))
        })
    }

    fn seat(&self, instance: u64, place: Option<&str>) -> (Seat, Fence) {
        let flags = Flags { lease_name: "one".into(), lease_seconds: 15, lease_place: place.map(str::to_owned) };
        let fence = Fence::shut();
        let instance = Instance::new(instance);
        (Seat::new(self.client(), "kcp-system", &flags, instance, fence.clone(), Metrics::default()), fence)
    }
}

impl State {
    fn answer(&mut self, method: &Method, body: &[u8]) -> Option<(StatusCode, Value)> {
        let refused = |code: u16, reason: &str| {
            let status = json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason});
            Some((StatusCode::from_u16(code).unwrap(), status))
        };
        let write = *method != Method::GET;
        match self.fault {
            Fault::Silent => return None,
            Fault::Error if write => return refused(500, "InternalError"),
            _ => {}
        }
        let known = self.lease.as_ref().map(|lease| lease["metadata"]["resourceVersion"].clone());
        if !write {
            return self.lease.clone().map_or_else(|| refused(404, "NotFound"), |lease| Some((StatusCode::OK, lease)));
        }
        let mut lease: Value = serde_json::from_slice(body).unwrap();
        match (method, known) {
            (&Method::POST, Some(_)) => return refused(409, "AlreadyExists"),
            (&Method::PUT, None) => return refused(404, "NotFound"),
            (&Method::PUT, Some(known)) if known != lease["metadata"]["resourceVersion"] => {
                return refused(409, "Conflict");
            }
            _ => {}
        }
        self.version += 1;
        self.writes += 1;
        lease["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.lease = Some(lease.clone());
        (self.fault != Fault::Lost).then_some((StatusCode::OK, lease))
    }
}

#[tokio::test(start_paused = true)]
async fn one_of_two_is_active_and_the_other_follows_when_it_is_gone() {
    let server = Server::default();
    let ((mut first, open), (mut second, shut)) = (server.seat(1, None), server.seat(2, None));
    first.acquire().await;
    assert!(open.holds() && !shut.holds());
    assert_eq!(server.holder().as_deref(), Some(first.identity()));
    // As long as it is renewed, nobody follows.
    {
        let (held, taken) = (first.hold(), second.acquire());
        tokio::select! {
            lost = held => panic!("{lost}"),
            () = taken => panic!("taken from a holder that lives"),
            () = sleep(LEASE * 10) => {}
        }
    }
    let killed = Instant::now();
    second.acquire().await;
    let waited = killed.elapsed();
    // The last renewal was at most a third ago, and seen at once.
    assert!(waited > LEASE / 2 && waited < LEASE + LEASE / 3, "{waited:?}");
    assert!(shut.holds());
    // Whose time is over does not even ask.
    assert_eq!(first.hold().await, Lost::Expired);
    assert_eq!(server.holder().as_deref(), Some(second.identity()));
    assert!(!open.holds());
}

#[tokio::test(start_paused = true)]
async fn what_is_given_back_is_taken_at_once() {
    let server = Server::default();
    let ((mut first, open), (mut second, _)) = (server.seat(1, None), server.seat(2, None));
    first.acquire().await;
    let _ = timeout(LEASE, second.acquire()).await.unwrap_err();
    first.release().await;
    assert!(!open.holds() && server.holder().is_none());
    let given = Instant::now();
    second.acquire().await;
    assert!(given.elapsed() <= Duration::from_millis(1_200), "{:?}", given.elapsed());
    // Nothing is given back that is another's.
    first.release().await;
    assert_eq!(server.holder().as_deref(), Some(second.identity()));
}

#[tokio::test(start_paused = true)]
async fn a_successor_in_the_same_place_does_not_wait() {
    let server = Server::default();
    server.seat(1, Some("pod")).0.acquire().await;
    let begun = Instant::now();
    server.seat(2, Some("pod")).0.acquire().await;
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn work_ends_before_the_lease_does_when_it_cannot_be_renewed() {
    for fault in [Fault::Silent, Fault::Error, Fault::Lost] {
        let server = Server::default();
        let (mut seat, fence) = server.seat(1, None);
        let taken = Instant::now();
        seat.acquire().await;
        server.set(fault);
        assert_eq!(seat.hold().await, Lost::Expired);
        let held = taken.elapsed();
        assert!(held > LEASE / 2 && held < LEASE, "{held:?}");
        assert!(!fence.holds());
    }
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_and_a_lost_answer_are_outlived() {
    let server = Server::default();
    let (mut seat, fence) = server.seat(1, None);
    seat.acquire().await;
    for fault in [Fault::Silent, Fault::Error, Fault::Lost] {
        server.set(fault);
        assert!(timeout(LEASE / 3, seat.hold()).await.is_err());
        server.set(Fault::None);
        let before = server.with(|state| state.writes);
        assert!(timeout(LEASE, seat.hold()).await.is_err());
        assert!(server.with(|state| state.writes) > before);
    }
    assert!(fence.holds());
}

#[tokio::test(start_paused = true)]
async fn a_take_whose_answer_was_lost_is_recognised() {
    let server = Server::default();
    let (mut seat, fence) = server.seat(1, None);
    server.set(Fault::Lost);
    assert!(timeout(LEASE, seat.acquire()).await.is_err());
    assert!(!fence.holds() && server.holder().as_deref() == Some(seat.identity()));
    server.set(Fault::None);
    seat.acquire().await;
    assert!(fence.holds());
}

#[tokio::test(start_paused = true)]
async fn a_label_from_a_stranger_is_no_loss_and_a_deletion_is() {
    let server = Server::default();
    let (mut seat, _) = server.seat(1, None);
    seat.acquire().await;
    server.edit(|lease| lease["metadata"]["labels"] = json!({"a": "b"}));
    assert!(timeout(LEASE * 2, seat.hold()).await.is_err());
    server.with(|state| state.lease = None);
    assert_eq!(seat.hold().await, Lost::Gone);

    let server = Server::default();
    let (mut seat, fence) = server.seat(1, None);
    seat.acquire().await;
    server.edit(|lease| lease["spec"]["holderIdentity"] = json!("stranger"));
    assert_eq!(seat.hold().await, Lost::Taken("stranger".to_owned()));
    assert!(!fence.holds() && server.holder().as_deref() == Some("stranger"));
}

#[tokio::test(start_paused = true)]
async fn a_quiet_lease_is_written_once_in_a_third_of_its_time() {
    let server = Server::default();
    let (mut seat, _) = server.seat(1, None);
    seat.acquire().await;
    let before = server.with(|state| state.writes);
    assert!(timeout(LEASE * 10, seat.hold()).await.is_err());
    let writes = server.with(|state| state.writes) - before;
    assert!((28..=30).contains(&writes), "{writes}");
    advance(Duration::ZERO).await;
}
