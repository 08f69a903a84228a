//! Refusals of the relay: the agent keeps its events, and gets a `Retry-After`.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Response, StatusCode, header};
use serde_json::Value;
use tidewatch_trust::ReplicaTls;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::Notify,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

use super::testing::*;
use crate::relay::Deadlines;

pub(super) fn is_temporary(response: &Response<Bytes>) {
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let wait: u64 = response.headers()[header::RETRY_AFTER].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&wait), "{wait}");
    let problem: Value = serde_json::from_slice(response.body()).unwrap();
    assert_eq!(problem["status"], 503);
}

pub(super) fn refused(replica: &Running, reason: &str) -> u64 {
    replica.metric(&format!("relay_requests_refused_total{{reason=\"{reason}\"}}"))
}

#[tokio::test]
async fn request_without_a_known_holder_is_refused_and_succeeds_when_there_is_one() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    fleet.displace("r-1");
    let mut sender = one.connect(&fleet, &agent).await;
    is_temporary(&sender.send(events(&agent, 1)).await.unwrap());
    assert_eq!((refused(&one, "unknown"), one.refused("relay-unknown")), (1, 1));
    // Another replica may know the holder.
    sender.ends().await;
    let mut sender = one.connect(&fleet, &agent).await;
    for (replica, holder) in [("two", &two), ("one", &one)] {
        fleet.place("r-1", replica);
        assert_eq!(sender.send(events(&agent, 2)).await.unwrap().status(), 202, "over the same connection");
        assert_eq!(holder.intake.count(), 1);
    }
    one.stop().await;
    two.stop().await;
}

/// Each of the two takes the other one for the holder.
#[tokio::test]
async fn relayed_request_is_never_relayed_again() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "other");
    let mut sender = one.connect(&fleet, &agent).await;
    is_temporary(&sender.send(events(&agent, 1)).await.unwrap());
    // The view of one of the two replicas is old, and a third one may have the right one.
    sender.ends().await;
    assert_eq!((one.metric("relay_requests_total{port=\"event\"}"), refused(&two, "not-here")), (1, 1));
    assert_eq!(one.relay_port.connections.get(), 0, "nothing came back");
    assert_eq!((one.intake.count(), two.intake.count()), (0, 0));
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn holder_must_prove_its_name() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "three");
    fleet.announce("three", two.relay_address);
    is_temporary(&one.send(&fleet, &agent, events(&agent, 1)).await);
    assert_eq!((refused(&one, "gone"), two.intake.count()), (1, 0));
    // Nor does its event port pass for it.
    fleet.announce("three", two.event_address);
    is_temporary(&one.send(&fleet, &agent, events(&agent, 2)).await);
    assert_eq!(refused(&one, "gone"), 2);
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn stopped_holder_affects_its_own_runtimes_until_another_one_takes_them() {
    let (fleet, one, two) = Fleet::two().await;
    let three = fleet.start("three", |_| {}).await;
    let lost = fleet.agent("r-1", "two");
    let other = fleet.agent("r-2", "three");
    let mut of_lost = one.connect(&fleet, &lost).await;
    let mut of_other = one.connect(&fleet, &other).await;
    for (sender, agent) in [(&mut of_lost, &lost), (&mut of_other, &other)] {
        assert_eq!(sender.send(events(agent, 1)).await.unwrap().status(), 202);
    }
    two.stop().await;
    for counter in 2..10 {
        is_temporary(&of_lost.send(events(&lost, counter)).await.unwrap());
        assert_eq!(of_other.send(events(&other, counter)).await.unwrap().status(), 202);
    }
    assert_eq!(refused(&one, "gone") + refused(&one, "broken"), 8);
    fleet.place("r-1", "three");
    assert_eq!(of_lost.send(events(&lost, 10)).await.unwrap().status(), 202, "the same connection");
    // The same name at a new address.
    let two = fleet.start("two", |_| {}).await;
    fleet.place("r-1", "two");
    assert_eq!(of_lost.send(events(&lost, 11)).await.unwrap().status(), 202);
    assert_eq!((two.intake.count(), three.intake.count()), (1, 10));
    one.stop().await;
    two.stop().await;
    three.stop().await;
}

/// A holder that reads a request of events on each connection, and then closes it, or never responds.
async fn fake_holder(tls: &ReplicaTls, closes: bool) -> (SocketAddr, Arc<Notify>, AbortOnDropHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = TlsAcceptor::from(listening(tls));
    let received = Arc::<Notify>::default();
    let notify = received.clone();
    let serve = async move {
        let mut open = Vec::new();
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            let Ok(mut stream) = acceptor.accept(tcp).await else { continue };
            // Empty SETTINGS of the server, and the acknowledgement of the client's.
            stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 4, 1, 0, 0, 0, 0]).await.unwrap();
            let mut bytes = Vec::new();
            let mut piece = vec![0; 16 << 10];
            // The first member of the event.
            while !bytes.windows(8).any(|part: &[u8]| part == b"specvers") {
                let read = stream.read(&mut piece).await.unwrap();
                bytes.extend_from_slice(&piece[..read]);
            }
            notify.notify_one();
            if !closes {
                open.push(stream);
            }
        }
    };
    (address, received, AbortOnDropHandle::new(tokio::spawn(serve)))
}

/// Its bytes may have been processed, so it is not sent again.
#[tokio::test]
async fn holder_that_dies_with_a_request_in_flight_gets_it_once() {
    let fleet = Fleet::new();
    let one = fleet.start("one", |_| {}).await;
    let tls = fleet.tls("two").await;
    let (address, received, _holder) = fake_holder(&tls, true).await;
    fleet.announce("two", address);
    let agent = fleet.agent("r-1", "two");
    is_temporary(&one.send(&fleet, &agent, events(&agent, 1)).await);
    assert_eq!(refused(&one, "broken"), 1);
    timeout(PATIENCE, received.notified()).await.unwrap();
    assert_eq!(one.metric("relay_connections_total{outcome=\"opened\"}"), 1);
    one.stop().await;
}

#[tokio::test]
async fn slow_holder_delays_no_request_beyond_the_deadline_and_none_of_other_runtimes() {
    let fleet = Fleet::new();
    let deadlines = Deadlines { event: Duration::from_millis(200), ..Deadlines::default() };
    let one = fleet.start_with("one", deadlines, |_| {}).await;
    let tls = fleet.tls("two").await;
    let (address, _, _holder) = fake_holder(&tls, false).await;
    fleet.announce("two", address);
    let slow = fleet.agent("r-1", "two");
    let here = fleet.agent("r-2", "one");
    let mut of_slow = one.connect(&fleet, &slow).await;
    let mut of_here = one.connect(&fleet, &here).await;
    for counter in 1..4 {
        let (late, direct) = tokio::join!(of_slow.send(events(&slow, counter)), of_here.send(events(&here, counter)));
        is_temporary(&late.unwrap());
        assert_eq!(direct.unwrap().status(), 202);
    }
    assert_eq!((refused(&one, "late"), one.metric("relay_requests_in_flight")), (3, 0));
    one.stop().await;
}

#[tokio::test]
async fn lost_connection_of_a_runtime_is_reported_to_its_holder() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    let here = fleet.agent("r-2", "one");
    for agent in [&agent, &here] {
        let mut sender = one.connect(&fleet, agent).await;
        assert_eq!(sender.send(events(agent, 1)).await.unwrap().status(), 202);
    }
    let reported = async {
        while (one.intake.lost_connections(), two.intake.lost_connections()) != (1, 1) {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, reported).await.unwrap();
    one.stop().await;
    two.stop().await;
}
