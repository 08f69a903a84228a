//! Candidates against a fake API server that keeps one Lease, with paused time.

use std::sync::{Arc, Mutex};

use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::{advance, sleep};

use super::*;
use crate::testing;

const LEASE: Duration = Duration::from_secs(15);

/// Fault that the server injects.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Fault {
    #[default]
    None,
    /// Executes nothing, and responds to neither reads nor writes.
    Silent,
    /// Executes writes without a response.
    Lost,
    /// Executes nothing, and responds with 500.
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

    /// Changes the Lease like another writer.
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

    fn elector(&self, instance: u64, place: Option<&str>) -> (LeaderElector, WriteFence) {
        let flags = Flags {
            lease_name: "one".into(),
            lease_duration: Duration::from_secs(15),
            lease_place: place.map(str::to_owned),
        };
        let fence = WriteFence::closed();
        let instance = Instance::new(instance);
        (LeaderElector::new(self.client(), "kcp-system", &flags, instance, fence.clone(), Metrics::default()), fence)
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
        let current_version = self.lease.as_ref().map(|lease| lease["metadata"]["resourceVersion"].clone());
        if !write {
            return self.lease.clone().map_or_else(|| refused(404, "NotFound"), |lease| Some((StatusCode::OK, lease)));
        }
        let mut lease: Value = serde_json::from_slice(body).unwrap();
        match (method, current_version) {
            (&Method::POST, Some(_)) => return refused(409, "AlreadyExists"),
            (&Method::PUT, None) => return refused(404, "NotFound"),
            (&Method::PUT, Some(current_version)) if current_version != lease["metadata"]["resourceVersion"] => {
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
async fn one_of_two_is_active_and_the_other_takes_over_from_a_dead_holder() {
    let server = Server::default();
    let ((mut first, open), (mut second, closed)) = (server.elector(1, None), server.elector(2, None));
    first.acquire().await;
    assert!(open.is_open() && !closed.is_open());
    assert_eq!(server.holder().as_deref(), Some(first.identity()));
    // No other candidate takes over as long as the Lease is renewed.
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
    // The last renewal was at most a third of the Lease ago, and was observed at once.
    assert!(waited > LEASE / 2 && waited < LEASE + LEASE / 3, "{waited:?}");
    assert!(closed.is_open());
    // An elector with an expired Lease sends no request.
    assert_eq!(first.hold().await, LeadershipLostError::Expired);
    assert_eq!(server.holder().as_deref(), Some(second.identity()));
    assert!(!open.is_open());
}

#[tokio::test(start_paused = true)]
async fn released_lease_is_acquired_at_once() {
    let server = Server::default();
    let ((mut first, open), (mut second, _)) = (server.elector(1, None), server.elector(2, None));
    first.acquire().await;
    let _ = timeout(LEASE, second.acquire()).await.unwrap_err();
    first.release().await;
    assert!(!open.is_open() && server.holder().is_none());
    let given = Instant::now();
    second.acquire().await;
    assert!(given.elapsed() <= Duration::from_millis(1_200), "{:?}", given.elapsed());
    // A Lease of another holder is not released.
    first.release().await;
    assert_eq!(server.holder().as_deref(), Some(second.identity()));
}

#[tokio::test(start_paused = true)]
async fn successor_in_the_same_place_does_not_wait() {
    let server = Server::default();
    server.elector(1, Some("pod")).0.acquire().await;
    let begun = Instant::now();
    server.elector(2, Some("pod")).0.acquire().await;
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn leadership_is_lost_before_the_lease_expires_without_renewal() {
    for fault in [Fault::Silent, Fault::Error, Fault::Lost] {
        let server = Server::default();
        let (mut elector, fence) = server.elector(1, None);
        let taken = Instant::now();
        elector.acquire().await;
        server.set(fault);
        assert_eq!(elector.hold().await, LeadershipLostError::Expired);
        let held = taken.elapsed();
        assert!(held > LEASE / 2 && held < LEASE, "{held:?}");
        assert!(!fence.is_open());
    }
}

#[tokio::test(start_paused = true)]
async fn short_outage_and_lost_response_are_tolerated() {
    let server = Server::default();
    let (mut elector, fence) = server.elector(1, None);
    elector.acquire().await;
    for fault in [Fault::Silent, Fault::Error, Fault::Lost] {
        server.set(fault);
        assert!(timeout(LEASE / 3, elector.hold()).await.is_err());
        server.set(Fault::None);
        let before = server.with(|state| state.writes);
        assert!(timeout(LEASE, elector.hold()).await.is_err());
        assert!(server.with(|state| state.writes) > before);
    }
    assert!(fence.is_open());
}

#[tokio::test(start_paused = true)]
async fn acquisition_with_a_lost_response_is_recognised() {
    let server = Server::default();
    let (mut elector, fence) = server.elector(1, None);
    server.set(Fault::Lost);
    assert!(timeout(LEASE, elector.acquire()).await.is_err());
    assert!(!fence.is_open() && server.holder().as_deref() == Some(elector.identity()));
    server.set(Fault::None);
    elector.acquire().await;
    assert!(fence.is_open());
}

#[tokio::test(start_paused = true)]
async fn foreign_label_is_tolerated_and_a_deletion_ends_leadership() {
    let server = Server::default();
    let (mut elector, _) = server.elector(1, None);
    elector.acquire().await;
    server.edit(|lease| lease["metadata"]["labels"] = json!({"a": "b"}));
    assert!(timeout(LEASE * 2, elector.hold()).await.is_err());
    server.with(|state| state.lease = None);
    assert_eq!(elector.hold().await, LeadershipLostError::Gone);

    let server = Server::default();
    let (mut elector, fence) = server.elector(1, None);
    elector.acquire().await;
    server.edit(|lease| lease["spec"]["holderIdentity"] = json!("stranger"));
    assert_eq!(elector.hold().await, LeadershipLostError::Taken("stranger".to_owned()));
    assert!(!fence.is_open() && server.holder().as_deref() == Some("stranger"));
}

#[tokio::test(start_paused = true)]
async fn lease_is_renewed_every_third_of_its_duration() {
    let server = Server::default();
    let (mut elector, _) = server.elector(1, None);
    elector.acquire().await;
    let before = server.with(|state| state.writes);
    assert!(timeout(LEASE * 10, elector.hold()).await.is_err());
    let writes = server.with(|state| state.writes) - before;
    assert!((28..=30).contains(&writes), "{writes}");
    advance(Duration::ZERO).await;
}
