//! One runtime affects no other through the relay, and its limits hold across replicas.

use bytes::Bytes;
use http_body_util::Full;
use tidewatch_api::identity::Epoch;
use tokio::task::JoinSet;

use super::testing::*;
use crate::{
    enrolment::{LeafRefusal, tests::testing::unix_now},
    ports::{Limits, tests::testing::RequestSpec},
};

#[tokio::test]
async fn replay_is_found_however_the_two_requests_arrive() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    let mut direct = two.connect(&fleet, &agent).await;
    let mut relayed = one.connect(&fleet, &agent).await;
    let first = events(&agent, 1);
    let second = events(&agent, 2);
    assert_eq!(relayed.send(first.clone()).await.unwrap().status(), 202);
    assert_eq!(direct.send(second.clone()).await.unwrap().status(), 202);
    assert_eq!(direct.send(first).await.unwrap().status(), 401);
    assert_eq!(relayed.send(second).await.unwrap().status(), 401);
    assert_eq!((two.refused("replay"), two.intake.count()), (2, 2));
    one.stop().await;
    two.stop().await;
}

/// Invalid requests through another replica block a runtime at its holder, and at the replica that relays them; others
/// go on.
#[tokio::test]
async fn hostile_runtime_is_blocked_through_the_relay_and_affects_no_other() {
    for (accepting, holding) in [(100, 4), (4, 100)] {
        let fleet = Fleet::new();
        let limits = |strikes| Limits { strikes, ..Limits::default() };
        let one = fleet.start("one", |settings| settings.limits = limits(accepting)).await;
        let two = fleet.start("two", |settings| settings.limits = limits(holding)).await;
        let hostile = fleet.agent("r-1", "two");
        let honest = fleet.agent("r-2", "two");
        // A further connection of a blocked runtime is not served.
        let mut bad = one.connect(&fleet, &hostile).await;
        let mut good = one.connect(&fleet, &honest).await;
        let mut statuses = Vec::new();
        for counter in 1..=50 {
            let forged = events(&hostile, counter).map(|_| Full::<Bytes>::from("[]"));
            let status = bad.send(forged).await.unwrap().status().as_u16();
            statuses.push(status);
            assert_eq!(good.send(events(&honest, counter)).await.unwrap().status(), 202);
            if status == 429 {
                break;
            }
        }
        assert_eq!((statuses[0], statuses.last()), (401, Some(&429)));
        assert!(statuses.len() < 40, "{}", statuses.len());
        let blocked_by = if holding == 4 { &two } else { &one };
        assert_eq!(blocked_by.refused("flood"), 1);
        assert!(two.intake.received.lock().iter().all(|(runtime, _)| runtime == "r-2"));
        one.stop().await;
        two.stop().await;
    }
}

/// A runtime exceeds its rate at the replica that accepts its requests, before they cost the holder anything.
#[tokio::test]
async fn flood_ends_at_the_accepting_replica() {
    let fleet = Fleet::new();
    let limits = Limits { per_second: 1, burst: 10, ..Limits::default() };
    let one = fleet.start("one", |settings| settings.limits = limits).await;
    let two = fleet.start("two", |_| {}).await;
    let flooding = fleet.agent("r-1", "two");
    let quiet = fleet.agent("r-2", "two");
    let mut of_flooding = one.connect(&fleet, &flooding).await;
    let mut of_quiet = one.connect(&fleet, &quiet).await;
    let mut refused = 0;
    for counter in 1..=40 {
        refused += usize::from(of_flooding.send(events(&flooding, counter)).await.unwrap().status() == 429);
    }
    assert!(refused >= 20, "{refused}");
    assert_eq!(of_quiet.send(events(&quiet, 1)).await.unwrap().status(), 202);
    assert!(two.intake.count() < 20);
    one.stop().await;
    two.stop().await;
}

/// Their requests share connections, and each has its own answer.
#[tokio::test]
async fn many_runtimes_share_the_connections_to_a_holder() {
    let (fleet, one, two) = Fleet::two().await;
    let mut requests = JoinSet::new();
    for runtime in 0..100 {
        let agent = fleet.agent(&format!("r-{runtime}"), "two");
        let mut sender = one.connect(&fleet, &agent).await;
        requests.spawn(async move {
            for counter in 1..=5 {
                assert_eq!(sender.send(events(&agent, counter)).await.unwrap().status(), 202);
            }
            sender
        });
    }
    // All connections stay open: the report of a lost one would be a request in flight as well.
    let senders = requests.join_all().await;
    assert_eq!((two.intake.count(), one.metric("relay_requests_total{port=\"event\"}")), (500, 500));
    assert_eq!(one.metric("relay_connections_total{outcome=\"opened\"}"), 2);
    assert_eq!(one.metric("relay_requests_in_flight"), 0);
    drop(senders);
    one.stop().await;
    two.stop().await;
}

/// Clients that leave during a request reset its stream at the holder, in numbers that would end an agent's connection.
#[tokio::test]
async fn clients_that_leave_do_not_end_the_connection_of_others() {
    let (fleet, one, two) = Fleet::two().await;
    let leaving = fleet.agent("r-1", "two");
    let staying = fleet.agent("r-2", "two");
    let mut stays = one.connect(&fleet, &staying).await;
    assert_eq!(stays.send(events(&staying, 1)).await.unwrap().status(), 202);
    for counter in 1..=100 {
        let mut leaves = one.connect(&fleet, &leaving).await;
        let sent = leaves.0.send_request(events(&leaving, counter));
        tokio::select! {
            biased;
            () = tokio::task::yield_now() => {}
            _ = sent => {}
        }
    }
    for counter in 2..10 {
        assert_eq!(stays.send(events(&staying, counter)).await.unwrap().status(), 202);
    }
    assert!(one.metric("relay_connections_total{outcome=\"opened\"}") <= 2);
    one.stop().await;
    two.stop().await;
}

/// The holder alone knows that a certificate is used by two processes; the connection is at another replica.
#[tokio::test]
async fn certificate_that_the_holder_refuses_ends_the_connection_at_the_other_replica() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    let mut sender = one.connect(&fleet, &agent).await;
    assert_eq!(sender.send(events(&agent, 1)).await.unwrap().status(), 202);
    let leaf = tidewatch_contract::certificate::Leaf::read(&agent.identity.chain[0]).unwrap();
    two.revocations.refuse_leaf(&agent.runtime, leaf.fingerprint, leaf.not_after, LeafRefusal::Fork);
    let response = sender.send(events(&agent, 2)).await.unwrap();
    assert_eq!(response.status(), 401);
    assert!(!response.headers().contains_key("tidewatch-close"), "a field between replicas alone");
    sender.ends().await;
    assert_eq!(two.refused("revoked"), 1);
    one.stop().await;
    two.stop().await;
}

/// Two processes with one identity are found although their requests arrive at different replicas.
#[tokio::test]
async fn epochs_of_a_runtime_are_observed_in_one_place() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    let request = |epoch: u64, counter: u64| {
        let body = agent
            .batch()
            .to_string()
            .replace(&crate::ports::tests::testing::EPOCH.to_string(), &Epoch::new(epoch).to_string());
        let spec = RequestSpec {
            created: unix_now(),
            epoch: Epoch::new(epoch),
            ..RequestSpec::events(body.as_bytes(), counter)
        };
        signed(&agent, &spec)
    };
    assert_eq!(one.send(&fleet, &agent, request(1, 1)).await.status(), 202);
    assert_eq!(two.send(&fleet, &agent, request(2, 1)).await.status(), 202);
    assert_eq!(one.send(&fleet, &agent, request(1, 1)).await.status(), 401, "a nonce of the earlier epoch");
    assert_eq!(two.refused("replay"), 1);
    one.stop().await;
    two.stop().await;
}

/// A replica asks once for each request, and nothing else is added for a runtime of its own.
#[tokio::test]
async fn request_of_an_own_runtime_is_not_relayed() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "everywhere");
    let mut sender = one.connect(&fleet, &agent).await;
    for counter in 1..=3 {
        assert_eq!(sender.send(events(&agent, counter)).await.unwrap().status(), 202);
    }
    assert_eq!(one.asked.load(std::sync::atomic::Ordering::Relaxed), 3);
    assert_eq!((one.intake.count(), one.metric("relay_connections_total{outcome=\"opened\"}")), (3, 0));
    one.stop().await;
    two.stop().await;
}
