//! Candidates for one Lease, with paused time.

use serde_json::{Value, json};
use tokio::time::{advance, sleep, timeout};

use super::*;
use crate::testing::{FakeApiServer, Fault};

const LEASE: Duration = Duration::from_secs(15);

const ID: &str = "leases/one";

#[derive(Clone, Default)]
struct Server(FakeApiServer);

impl Server {
    /// Changes the Lease like another writer.
    fn edit(&self, edit: impl FnOnce(&mut Value)) {
        self.0.edit(ID, edit);
    }

    fn holder(&self) -> Option<String> {
        Some(self.0.object(ID)?["spec"]["holderIdentity"].as_str()?.to_owned())
    }

    fn elector(&self, instance: u64, place: Option<&str>) -> (LeaderElector, WriteFence) {
        let flags = Flags { lease_duration: LEASE, lease_place: place.map(str::to_owned) };
        let fence = WriteFence::closed();
        let metrics = Metrics::default();
        let instance = Instance::new(instance);
        (LeaderElector::new(self.0.client(), "kcp-system", "one", &flags, instance, fence.clone(), metrics), fence)
    }

    /// Injects one of the faults that end leadership, or none.
    fn set(&self, fault: Fault, refuses: bool) {
        self.0.set_fault(fault);
        self.0.refuse("WRITE leases", refuses.then_some(500));
    }
}

/// Outages: no response to anything, writes without a response, and failing writes.
const OUTAGES: [(Fault, bool); 3] = [(Fault::Unresponsive, false), (Fault::LostResponses, false), (Fault::None, true)];

#[tokio::test(start_paused = true)]
async fn one_of_two_is_active_and_the_other_takes_over_from_a_dead_holder() {
    let server = Server::default();
    let ((mut first, open), (mut second, closed)) = (server.elector(1, None), server.elector(2, None));
    first.acquire().await;
    assert!(open.is_open() && !closed.is_open());
    assert_eq!(server.holder().as_deref(), Some(&*first.election.identity));
    // No other candidate takes over as long as the Lease is renewed.
    {
        let held = first.hold();
        let taken = second.acquire();
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
    assert_eq!(server.holder().as_deref(), Some(&*second.election.identity));
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
    assert_eq!(server.holder().as_deref(), Some(&*second.election.identity));
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
    for (fault, refuses) in OUTAGES {
        let server = Server::default();
        let (mut elector, fence) = server.elector(1, None);
        let taken = Instant::now();
        elector.acquire().await;
        server.set(fault, refuses);
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
    for (fault, refuses) in OUTAGES {
        server.set(fault, refuses);
        assert!(timeout(LEASE / 3, elector.hold()).await.is_err());
        server.set(Fault::None, false);
        server.0.calls();
        assert!(timeout(LEASE, elector.hold()).await.is_err());
        assert!(!server.0.writes().is_empty());
    }
    assert!(fence.is_open());
}

#[tokio::test(start_paused = true)]
async fn acquisition_with_a_lost_response_is_recognised() {
    let server = Server::default();
    let (mut elector, fence) = server.elector(1, None);
    server.set(Fault::LostResponses, false);
    assert!(timeout(LEASE, elector.acquire()).await.is_err());
    assert!(!fence.is_open() && server.holder().as_deref() == Some(&*elector.election.identity));
    server.set(Fault::None, false);
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
    server.0.remove(ID);
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
    server.0.calls();
    assert!(timeout(LEASE * 10, elector.hold()).await.is_err());
    let writes = server.0.writes().len();
    assert!((28..=30).contains(&writes), "{writes}");
    advance(Duration::ZERO).await;
}
