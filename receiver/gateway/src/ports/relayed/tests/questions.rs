//! Questions between replicas about the fleet.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt as _, future};
use http::{Method, Request};
use http_body_util::Full;
use tidewatch_fleet::peers::{AskError, Peers as _, Responder, Topic};
use tokio::{runtime::Builder, sync::Notify, task::spawn_blocking, time::timeout};
use tokio_rustls::TlsAcceptor;

use super::testing::*;
use crate::relay::Deadlines;

/// Responds with a name and the question.
fn named(name: &'static str) -> Responder {
    Arc::new(move |question| future::ready(Ok(Bytes::from([name.as_bytes(), b" ", &question[..]].concat()))).boxed())
}

/// Responds never, and counts the questions.
fn silent(asked: &Arc<AtomicUsize>, begun: &Arc<Notify>) -> Responder {
    let asked = asked.clone();
    let begun = begun.clone();
    Arc::new(move |_| {
        asked.fetch_add(1, Ordering::Relaxed);
        begun.notify_one();
        future::pending().boxed()
    })
}

/// Three replicas that hold the shards 0 and 1, 2, and 3, and respond with their names.
async fn three() -> (Fleet, [Running; 3]) {
    three_with(Deadlines::default()).await
}

async fn three_with(deadlines: Deadlines) -> (Fleet, [Running; 3]) {
    let fleet = Fleet::new();
    let mut replicas = Vec::new();
    for (name, shards) in [("one", &[0, 1][..]), ("two", &[2]), ("three", &[3])] {
        fleet.serve(name, shards);
        let replica = fleet.start_with(name, deadlines, |_| {}).await;
        replica.responders.set(Topic::Report, named(name));
        replicas.push(replica);
    }
    (fleet, replicas.try_into().ok().unwrap())
}

async fn ask(replica: &Running) -> Result<Vec<String>, AskError> {
    let asked = replica.peers.ask_all(Topic::Report, Bytes::from_static(b"?"));
    let mut answers: Vec<_> = timeout(PATIENCE, asked).await.unwrap()?.into_iter().map(text).collect();
    answers.sort();
    Ok(answers)
}

fn text(answer: Bytes) -> String {
    String::from_utf8(answer.to_vec()).unwrap()
}

fn asked(replica: &Running, outcome: &str) -> u64 {
    replica.metric(&format!("relay_questions_total{{outcome=\"{outcome}\",topic=\"report\"}}"))
}

fn failed(replica: &Running, reason: &str) -> u64 {
    replica.metric(&format!("relay_questions_failed_total{{reason=\"{reason}\",topic=\"report\"}}"))
}

async fn stop(replicas: [Running; 3]) {
    for replica in replicas {
        replica.stop().await;
    }
}

#[tokio::test]
async fn any_replica_gets_the_answers_of_all() {
    let (fleet, replicas) = three().await;
    for replica in &replicas {
        assert_eq!(ask(replica).await.unwrap(), ["one ?", "three ?", "two ?"]);
        assert_eq!((asked(replica, "answered"), replica.metric("relay_requests_in_flight")), (1, 0));
    }
    // A shard that moves between two answers is in both, or in the first of them.
    fleet.serve("three", &[2, 3]);
    let answers = ask(&replicas[0]).await.unwrap();
    assert!(["one ?", "three ?"].iter().all(|answer| answers.iter().any(|given| given == answer)), "{answers:?}");
    // The whole fleet is here: no other replica is waited for.
    fleet.serve("one", &[0, 1, 2, 3]);
    replicas[1].responders.set(Topic::Report, silent(&Arc::default(), &Arc::default()));
    assert_eq!(ask(&replicas[0]).await.unwrap()[0], "one ?");
    stop(replicas).await;
}

/// A task of the fleet may make the first requests, and its executor has other work.
#[tokio::test]
async fn connections_do_not_depend_on_the_executor_that_makes_their_first_request() {
    let (fleet, one, two) = Fleet::two().await;
    fleet.appoint(Some("two"));
    fleet.serve("two", &[0]);
    two.responders.set(Topic::Report, named("two"));
    let peers = one.peers.clone();
    let other_executor = move || {
        let executor = Builder::new_current_thread().enable_all().build().unwrap();
        for _ in 0..2 {
            let asked = peers.ask_fleet_holder(Topic::Report, Bytes::from_static(b"?"));
            assert_eq!(text(executor.block_on(asked).unwrap()), "two ?");
        }
    };
    spawn_blocking(other_executor).await.unwrap();
    let agent = fleet.agent("r-1", "two");
    let mut sender = one.connect(&fleet, &agent).await;
    for counter in 1..=2 {
        assert_eq!(sender.send(events(&agent, counter)).await.unwrap().status(), 202);
    }
    assert_eq!(one.metric("relay_connections_total{outcome=\"opened\"}"), 2, "they are still open");
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn answers_without_a_shard_are_no_answer() {
    let (fleet, replicas) = three().await;
    fleet.serve("two", &[]);
    assert_eq!(ask(&replicas[0]).await, Err(AskError::Incomplete), "nobody holds 2");
    assert_eq!((asked(&replicas[0], "incomplete"), failed(&replicas[0], "unavailable")), (1, 0));
    fleet.serve("two", &[2]);
    assert!(ask(&replicas[0]).await.is_ok());
    fleet.serve("one", &[0]);
    assert_eq!(ask(&replicas[0]).await, Err(AskError::Incomplete), "nor 1, which was here");
    stop(replicas).await;
}

#[tokio::test]
async fn replica_that_fails_once_is_asked_again() {
    let (_fleet, replicas) = three().await;
    let questions = Arc::<AtomicUsize>::default();
    let count = questions.clone();
    let responder: Responder = Arc::new(move |_| {
        let is_first = count.fetch_add(1, Ordering::Relaxed) == 0;
        future::ready(if is_first { Err(AskError::Unavailable) } else { Ok(Bytes::from_static(b"two")) }).boxed()
    });
    replicas[1].responders.set(Topic::Report, responder);
    assert_eq!(ask(&replicas[0]).await.unwrap(), ["one ?", "three ?", "two"]);
    assert_eq!((failed(&replicas[0], "unavailable"), questions.load(Ordering::Relaxed)), (1, 2));
    stop(replicas).await;
}

/// A replica whose connections end as soon as a question has arrived.
#[tokio::test]
async fn replica_that_dies_in_flight_leaves_the_answers_incomplete() {
    let fleet = Fleet::new();
    fleet.serve("one", &[0, 1, 2]);
    let one = fleet.start("one", |_| {}).await;
    one.responders.set(Topic::Report, named("one"));
    let tls = fleet.tls("two").await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    fleet.announce("two", listener.local_addr().unwrap());
    let acceptor = TlsAcceptor::from(listening(&tls));
    let died = Arc::<AtomicUsize>::default();
    let deaths = died.clone();
    let dies = Notify::new();
    let dying = tokio::spawn(async move {
        loop {
            let Ok(stream) = acceptor.accept(listener.accept().await.unwrap().0).await else { continue };
            let service = hyper::service::service_fn(|request: Request<hyper::body::Incoming>| {
                assert_eq!(request.uri().path(), "/replica/v1/report");
                deaths.fetch_add(1, Ordering::Relaxed);
                dies.notify_one();
                future::pending::<Result<http::Response<Full<Bytes>>, std::io::Error>>()
            });
            let builder = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
            let connection = builder.serve_connection(hyper_util::rt::TokioIo::new(stream), service);
            tokio::select! {
                _ = connection => {}
                () = dies.notified() => {}
            }
        }
    });
    assert_eq!(ask(&one).await, Err(AskError::Incomplete));
    assert_eq!((died.load(Ordering::Relaxed), failed(&one, "broken")), (2, 2), "asked once more");
    dying.abort();
    let _ = dying.await;
    assert_eq!(ask(&one).await, Err(AskError::Incomplete));
    assert!(failed(&one, "gone") > 0);
    one.stop().await;
}

#[tokio::test]
async fn slow_replica_leaves_the_answers_incomplete_at_the_deadline() {
    let deadlines = Deadlines { question: Duration::from_millis(300), ..Deadlines::default() };
    let (_fleet, replicas) = three_with(deadlines).await;
    let questions = Arc::<AtomicUsize>::default();
    for slow in [1, 0] {
        replicas[slow].responders.set(Topic::Report, silent(&questions, &Arc::default()));
        assert_eq!(ask(&replicas[0]).await, Err(AskError::Incomplete));
    }
    assert!(questions.load(Ordering::Relaxed) >= 2, "each was asked");
    assert_eq!((asked(&replicas[0], "incomplete"), asked(&replicas[0], "answered")), (2, 0));
    stop(replicas).await;
}

/// The agents of a replica's runtimes are served while its answers are awaited, and the other way round.
#[tokio::test]
async fn questions_and_relayed_requests_hold_up_neither_each_other_nor_other_topics() {
    let (fleet, replicas) = three_with(Deadlines { question: PATIENCE, ..Deadlines::default() }).await;
    let questions = Arc::<AtomicUsize>::default();
    let begun = Arc::<Notify>::default();
    replicas[1].responders.set(Topic::Report, silent(&questions, &begun));
    for replica in &replicas {
        replica.responders.set(Topic::CaRotation, named("rotation"));
    }
    let waiting = (0..6).map(|_| replicas[0].peers.ask_all(Topic::Report, Bytes::from_static(b"?")));
    let mut all = future::join_all(waiting);
    let others = async {
        while questions.load(Ordering::Relaxed) < 2 {
            begun.notified().await;
        }
        let agent = fleet.agent("r-1", "two");
        let mut sender = replicas[0].connect(&fleet, &agent).await;
        for counter in 1..=20 {
            assert_eq!(sender.send(events(&agent, counter)).await.unwrap().status(), 202);
        }
        let rotation = replicas[0].peers.ask_all(Topic::CaRotation, Bytes::new()).await;
        assert_eq!(rotation.unwrap().len(), 3);
    };
    tokio::select! {
        _ = &mut all => panic!("two never answers"),
        done = timeout(PATIENCE, others) => done.unwrap(),
    }
    assert_eq!(questions.load(Ordering::Relaxed), 2, "the others wait for a place");
    drop(all);
    replicas[1].responders.set(Topic::Report, named("two"));
    assert!(ask(&replicas[0]).await.is_ok(), "the places are free again");
    stop(replicas).await;
}

#[tokio::test]
async fn questions_and_answers_are_limited_in_size() {
    let (_fleet, replicas) = three().await;
    let of = |bytes: usize| -> Responder { Arc::new(move |_| future::ready(Ok(vec![b'x'; bytes].into())).boxed()) };
    replicas[1].responders.set(Topic::Report, of(16 << 20));
    let answers = replicas[0].peers.ask_all(Topic::Report, vec![b'?'; 64 << 10].into()).await.unwrap();
    assert!(answers.iter().any(|answer| answer.len() == 16 << 20));
    drop(answers);
    let too_long = replicas[0].peers.ask_all(Topic::Report, vec![b'?'; (64 << 10) + 1].into()).await;
    assert_eq!(too_long, Err(AskError::Unavailable));
    replicas[1].responders.set(Topic::Report, of((16 << 20) + 1));
    assert_eq!(ask(&replicas[0]).await, Err(AskError::Incomplete));
    stop(replicas).await;
}

/// A replica that ignores the limit, such as one of another version.
#[tokio::test]
async fn too_large_answer_of_another_replica_is_refused() {
    let fleet = Fleet::new();
    fleet.serve("one", &[0, 1, 2]);
    let one = fleet.start("one", |_| {}).await;
    one.responders.set(Topic::Report, named("one"));
    let tls = fleet.tls("two").await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    fleet.announce("two", listener.local_addr().unwrap());
    let acceptor = TlsAcceptor::from(listening(&tls));
    let endless = tokio::spawn(async move {
        loop {
            let Ok(stream) = acceptor.accept(listener.accept().await.unwrap().0).await else { continue };
            let service = hyper::service::service_fn(|_| {
                let piece = || Ok::<_, std::io::Error>(http_body::Frame::data(Bytes::from_static(&[b'x'; 16 << 10])));
                let body = http_body_util::StreamBody::new(futures::stream::repeat_with(piece));
                let response = http::Response::builder().header("tidewatch-shards", "3=0000000000000001").body(body);
                future::ready(response)
            });
            let builder = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
            let _ = builder.serve_connection(hyper_util::rt::TokioIo::new(stream), service).await;
        }
    });
    assert_eq!(ask(&one).await, Err(AskError::Incomplete));
    assert_eq!((failed(&one, "too-large"), failed(&one, "broken")), (1, 0), "and is not asked again");
    endless.abort();
    one.stop().await;
}

#[tokio::test]
async fn fleet_holder_is_asked_wherever_it_is() {
    let (fleet, replicas) = three().await;
    let ask = async |topic| replicas[0].peers.ask_fleet_holder(topic, Bytes::from_static(b"?")).await.map(text);
    assert_eq!(ask(Topic::RotationProgress).await, Err(AskError::NoFleetHolder));
    for (at, name) in ["one", "two", "three"].into_iter().enumerate() {
        fleet.appoint(Some(name));
        assert_eq!(ask(Topic::RotationProgress).await, Err(AskError::Unavailable), "{name} has no responder");
        replicas[at].responders.set(Topic::RotationProgress, named(name));
        assert_eq!(ask(Topic::RotationProgress).await.unwrap(), format!("{name} ?"));
    }
    fleet.announce("two", "127.0.0.1:1".parse().unwrap());
    fleet.appoint(Some("two"));
    assert_eq!(ask(Topic::RotationProgress).await, Err(AskError::NoFleetHolder));
    stop(replicas).await;
}

/// Such as one that a replica which had the role before sent late.
#[tokio::test]
async fn admission_to_a_rollout_is_taken_from_the_fleet_holder_alone() {
    let (fleet, replicas) = three().await;
    let questions = Arc::<AtomicUsize>::default();
    let responder: Responder = {
        let count = questions.clone();
        Arc::new(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            future::ready(Ok(Bytes::new())).boxed()
        })
    };
    replicas.iter().for_each(|replica| replica.responders.set(Topic::ModuleRollout, responder.clone()));
    for holder in ["one", "two"] {
        fleet.appoint(Some(holder));
        for (replica, name) in replicas.iter().zip(["one", "two", "three"]) {
            questions.store(0, Ordering::Relaxed);
            let asked = replica.peers.ask_all(Topic::ModuleRollout, Bytes::new()).await.map(|answers| answers.len());
            let expected = if name == holder { (Ok(3), 3) } else { (Err(AskError::Incomplete), 1) };
            assert_eq!((asked, questions.load(Ordering::Relaxed)), expected, "{name} asks, {holder} has the role");
        }
    }
    stop(replicas).await;
}

/// It may have begun one already.
#[tokio::test]
async fn request_for_a_rotation_is_sent_once() {
    let (fleet, replicas) = three().await;
    fleet.appoint(Some("two"));
    let questions = Arc::<AtomicUsize>::default();
    let count = questions.clone();
    let responder: Responder = Arc::new(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        future::ready(Err(AskError::Unavailable)).boxed()
    });
    for (topic, expected) in [(Topic::RotateCa, 1), (Topic::RotationProgress, 2)] {
        questions.store(0, Ordering::Relaxed);
        replicas[1].responders.set(topic, responder.clone());
        assert_eq!(replicas[0].peers.ask_fleet_holder(topic, Bytes::new()).await, Err(AskError::Unavailable));
        assert_eq!(questions.load(Ordering::Relaxed), expected, "{topic:?}");
    }
    stop(replicas).await;
}

fn question(method: Method, path: &str) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri(format!("https://two{path}"));
    request.header("tidewatch-relay", "question").body(Full::from("?")).unwrap()
}

/// An agent's certificate chains to the roots of the replicas, and names none.
#[tokio::test]
async fn agent_gets_no_answer_on_any_port() {
    let (fleet, replicas) = three().await;
    let two = &replicas[1];
    let questions = Arc::<AtomicUsize>::default();
    two.responders.set(Topic::Report, silent(&questions, &Arc::default()));
    let agent = fleet.agent("r-1", "two");
    // Its connection ends at once.
    if let Ok(mut sender) = Sender::open(two.relay_address, two.tls.client_as(&agent.identity, "two")).await {
        let asked = timeout(PATIENCE, sender.send(question(Method::POST, "/replica/v1/report"))).await.unwrap();
        assert!(asked.is_err());
    }
    // The field of a replica has no effect on a port for agents, with the path of a question or of events.
    let mut sender = two.connect(&fleet, &agent).await;
    let mut forged = question(Method::POST, "/replica/v1/report");
    *forged.uri_mut() = "https://kcp.test:8443/replica/v1/report".parse().unwrap();
    assert_eq!(timeout(PATIENCE, sender.send(forged)).await.unwrap().unwrap().status(), 404);
    let mut honest = events(&agent, 1);
    honest.headers_mut().insert("tidewatch-relay", "question".parse().unwrap());
    assert_eq!(sender.send(honest).await.unwrap().status(), 202, "an event like any other");
    let mut honest = events(&agent, 2);
    honest.headers_mut().insert("tidewatch-relay", "question".parse().unwrap());
    assert_eq!(replicas[0].send(&fleet, &agent, honest).await.status(), 202, "relayed as an event");
    assert_eq!((questions.load(Ordering::Relaxed), two.intake.count()), (0, 2));
    stop(replicas).await;
}

#[tokio::test]
async fn replica_is_answered_questions_alone_and_they_are_never_passed_on() {
    let (_fleet, replicas) = three().await;
    let [one, two, three] = &replicas;
    let questions = Arc::<AtomicUsize>::default();
    three.responders.set(Topic::Report, silent(&questions, &Arc::default()));
    let config = one.tls.client().config(&"two".parse().unwrap()).unwrap();
    let mut sender = Sender::open(two.relay_address, config).await.unwrap();
    for (method, path, status) in [
        (Method::POST, "/replica/v1/report", 200),
        (Method::GET, "/replica/v1/report", 405),
        (Method::POST, "/replica/v1/reports", 404),
        (Method::POST, "/replica/v1/", 404),
        (Method::POST, "/replica/v2/report", 404),
        (Method::POST, "/v3/events", 404),
        (Method::POST, "/replica/v1/agent-upgrade", 503),
    ] {
        let response = timeout(PATIENCE, sender.send(question(method, path))).await.unwrap().unwrap();
        assert_eq!(response.status(), status, "{path}");
        if status == 200 {
            assert_eq!(response.headers()["tidewatch-shards"], "2=0000000000000001");
            assert_eq!(&response.body()[..], b"two ?");
        }
    }
    let mut long = question(Method::POST, "/replica/v1/report");
    *long.body_mut() = vec![b'?'; (64 << 10) + 1].into();
    assert_eq!(sender.send(long).await.unwrap().status(), 413);
    let mut unmarked = question(Method::POST, "/replica/v1/report");
    unmarked.headers_mut().remove("tidewatch-relay");
    assert_eq!(sender.send(unmarked).await.unwrap().status(), 404);
    assert_eq!((questions.load(Ordering::Relaxed), two.metric("relay_connections_total{outcome=\"opened\"}")), (0, 0));
    stop(replicas).await;
}
