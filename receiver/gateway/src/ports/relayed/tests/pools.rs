//! Connections to a holder, and the places of its requests in flight.

use std::{convert::Infallible, net::SocketAddr};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tidewatch_contract::enrolment::CERTIFICATES_PATH;
use tidewatch_trust::ReplicaTls;
use tokio::{net::TcpListener, sync::watch, task::JoinSet, time::timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

use super::{
    faults::{is_temporary, refused},
    testing::*,
};
use crate::{
    enrolment::tests::testing::unix_now,
    ports::{
        Limits,
        tests::testing::{Agent, RequestSpec, ca},
    },
    relay::Deadlines,
};

/// Requests that a runtime may have in flight to one holder.
const SHARE: u64 = 8;

/// Both connections are in use: each request takes the next one.
async fn send_two(sender: &mut Sender, agent: &Agent, from: u64) {
    for counter in from..from + 2 {
        assert_eq!(sender.send(events(agent, counter)).await.unwrap().status(), 202);
    }
}

#[tokio::test]
async fn connections_are_replaced_when_the_certificate_or_the_roots_change() {
    let (fleet, mut one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    let mut sender = one.connect(&fleet, &agent).await;
    send_two(&mut sender, &agent, 1).await;
    send_two(&mut sender, &agent, 3).await;
    assert_eq!(one.metric("relay_connections_total{outcome=\"opened\"}"), 2, "they are reused");

    // Two thirds of a day have passed.
    one.certificate.refresh(unix_now() + 17 * 3_600).await;
    send_two(&mut sender, &agent, 5).await;
    send_two(&mut sender, &agent, 7).await;
    assert_eq!(one.metric("relay_connections_total{outcome=\"opened\"}"), 4);

    let old = fleet.ca.trust_bundle();
    let new = ca(unix_now()).trust_bundle();
    fleet.set_roots(old.with(&new));
    one.certificate.refresh(unix_now()).await;
    send_two(&mut sender, &agent, 9).await;
    send_two(&mut sender, &agent, 11).await;
    assert_eq!(one.metric("relay_connections_total{outcome=\"opened\"}"), 6);
    let former_ended = async {
        while two.relay_port.connections.get() > 2 {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, former_ended).await.unwrap();

    // The holder still has a certificate of the old root, which is trusted no more.
    fleet.set_roots(new);
    one.certificate.refresh(unix_now()).await;
    is_temporary(&sender.send(events(&agent, 13)).await.unwrap());
    assert_eq!((refused(&one, "gone"), two.intake.count()), (1, 12));
    one.stop().await;
    two.stop().await;
}

/// The holder finds that after the handshake of its client.
#[tokio::test]
async fn connections_to_a_holder_that_rejects_the_certificate_pause() {
    let (fleet, one, mut two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    fleet.set_roots(ca(unix_now()).trust_bundle());
    two.certificate.refresh(unix_now()).await;
    let mut sender = one.connect(&fleet, &agent).await;
    let mut counter = 0;
    let mut pauses = 0;
    let paused = async {
        while pauses < 2 {
            counter += 1;
            is_temporary(&sender.send(events(&agent, counter)).await.unwrap());
            pauses = refused(&one, "gone");
        }
    };
    timeout(PATIENCE, paused).await.unwrap();
    assert_eq!(two.intake.count(), 0);
    one.stop().await;
    two.stop().await;
}

/// A holder that answers when the test lets it.
struct Gated {
    address: SocketAddr,
    received: watch::Receiver<usize>,
    gate: watch::Sender<bool>,
    _task: AbortOnDropHandle<()>,
}

impl Gated {
    async fn start(tls: &ReplicaTls) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = TlsAcceptor::from(listening(tls));
        let (count, received) = watch::channel(0);
        let (gate, opened) = watch::channel(false);
        let answer = move |request: Request<Incoming>| {
            let count = count.clone();
            let mut opened = opened.clone();
            async move {
                request.into_body().collect().await.unwrap();
                count.send_modify(|count| *count += 1);
                opened.wait_for(|is_open| *is_open).await.unwrap();
                Ok::<_, Infallible>(Response::builder().status(202).body(Full::<Bytes>::default()).unwrap())
            }
        };
        let serve = async move {
            let mut connections = JoinSet::new();
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                let Ok(stream) = acceptor.accept(tcp).await else { continue };
                let mut server = http2::Builder::new(TokioExecutor::new());
                server.max_concurrent_streams(1_000);
                connections.spawn(server.serve_connection(TokioIo::new(stream), service_fn(answer.clone())));
            }
        };
        Self { address, received, gate, _task: AbortOnDropHandle::new(tokio::spawn(serve)) }
    }

    /// Waits until so many requests have arrived.
    async fn received(&mut self, count: usize) {
        timeout(PATIENCE, self.received.wait_for(|received| *received >= count)).await.unwrap().unwrap();
    }
}

/// A replica whose runtimes may have many requests in flight, and a holder of the name `two`.
async fn gated() -> (Fleet, Running, Gated) {
    let fleet = Fleet::new();
    let deadlines = Deadlines { event: 2 * PATIENCE, issuance: 2 * PATIENCE, ..Deadlines::default() };
    let limits = Limits { in_flight: 100, ..Limits::default() };
    let one = fleet.start_with("one", deadlines, |settings| settings.limits = limits).await;
    let holder = Gated::start(&fleet.tls("two").await).await;
    fleet.announce("two", holder.address);
    (fleet, one, holder)
}

/// Statuses of requests in flight.
type InFlight = JoinSet<u16>;

fn spawn(in_flight: &mut InFlight, sender: &Sender, request: Request<Full<Bytes>>) {
    let mut sender = Sender(sender.0.clone());
    in_flight.spawn(async move { sender.send(request).await.unwrap().status().as_u16() });
}

#[tokio::test]
async fn runtime_with_its_share_of_requests_in_flight_is_refused_and_others_go_on() {
    let (fleet, one, mut holder) = gated().await;
    let greedy = fleet.agent("r-1", "two");
    let other = fleet.agent("r-2", "two");
    let of_greedy = one.connect(&fleet, &greedy).await;
    let of_other = one.connect(&fleet, &other).await;
    let mut in_flight = InFlight::new();
    (1..=SHARE).for_each(|counter| spawn(&mut in_flight, &of_greedy, events(&greedy, counter)));
    holder.received(8).await;
    is_temporary(&one.send(&fleet, &greedy, events(&greedy, 9)).await);
    assert_eq!((refused(&one, "share"), one.refused("relay-share")), (1, 1));
    spawn(&mut in_flight, &of_other, events(&other, 1));
    holder.received(9).await;
    holder.gate.send_replace(true);
    assert_eq!(in_flight.join_all().await, [202; 9]);
    assert_eq!(one.send(&fleet, &greedy, events(&greedy, 9)).await.status(), 202, "its places are free");
    assert_eq!(*holder.received.borrow(), 10);
    one.stop().await;
}

/// Renewals wait for the runtime and the issuer, and take no place of an event.
#[tokio::test]
async fn requests_beyond_the_places_of_a_port_are_refused_and_those_of_other_ports_go_on() {
    let (fleet, one, mut holder) = gated().await;
    let renewal = |agent: &_, counter| {
        let spec =
            RequestSpec { path: CERTIFICATES_PATH, created: unix_now(), ..RequestSpec::heartbeat(b"{}", counter) };
        signed(agent, &spec)
    };
    let mut in_flight = InFlight::new();
    for runtime in 0..12 {
        let agent = fleet.agent(&format!("r-{runtime}"), "two");
        let sender = one.connect(&fleet, &agent).await;
        (1..=SHARE).for_each(|counter| spawn(&mut in_flight, &sender, renewal(&agent, counter)));
    }
    holder.received(96).await;
    let late = fleet.agent("r-99", "two");
    is_temporary(&one.send(&fleet, &late, renewal(&late, 1)).await);
    assert_eq!(refused(&one, "full"), 1);
    let sender = one.connect(&fleet, &late).await;
    spawn(&mut in_flight, &sender, events(&late, 2));
    holder.received(97).await;
    holder.gate.send_replace(true);
    assert_eq!(in_flight.join_all().await, [202; 97]);
    assert_eq!(one.send(&fleet, &late, renewal(&late, 3)).await.status(), 202);
    one.stop().await;
}
