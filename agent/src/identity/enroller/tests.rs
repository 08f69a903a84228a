mod bench;

use std::{io, sync::Mutex, sync::atomic::Ordering};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::json;
use tidewatch_shared::{
    enrolment::{CERTIFICATES_PATH, MAX_ANSWER_BYTES},
    exchange::{EVENTS_PATH, HEARTBEAT_PATH},
    names::{CHAIN_KEY, IDENTITY_SECRET, PRIVATE_KEY_KEY},
    plan::Plan,
    problem::Kind,
};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    canary::Sightings,
    core::Core,
    identity::{SecretWatch, tests::TestCa},
    index::{Seen, Version},
    kubernetes::Call,
    link::{Link, Parts},
    telemetry::Readiness,
    watch::Sink as _,
};
use bench::{Bench, Life, Replies, TOKEN, problem, until};

#[tokio::test]
async fn the_first_identity_is_asked_for_with_the_token_and_kept_before_it_is_used() {
    let mut bench = Bench::new(Replies::new()).await;
    let mut life = bench.start();
    let credentials = life.next().await;
    let (chain, key) = bench.store.content();
    assert!(!chain.is_empty() && String::from_utf8(key).unwrap().contains("PRIVATE KEY"));
    let kept = tidewatch_shared::tls::certificates(&chain).unwrap();
    assert_eq!(credentials.certificate.fingerprint, tidewatch_shared::certificate::fingerprint(&kept[0]));
    assert_eq!((credentials.runtime.as_str(), &credentials.receiver), ("r-1", &bench.says().receiver));
    let asked = bench.asked().await.unwrap();
    assert_eq!((asked.path.as_str(), asked.token), (CERTIFICATES_PATH, Some(format!("Bearer {TOKEN}"))));
    assert!(life.readiness.pending().is_empty());
    let told = life.standing.told();
    assert_eq!((told.from, told.unkept, told.error), (Some(Provenance::Enrolment), false, None));
    assert_eq!(life.metrics.certificate_not_after.get(), credentials.not_after);
}

#[tokio::test]
async fn whoever_starts_next_finds_the_identity_and_asks_nobody() {
    let mut bench = Bench::new(Replies::new()).await;
    let first = bench.start().next().await;
    assert_eq!(bench.all_asked().len(), 1);
    let mut life = bench.start();
    let second = life.next().await;
    assert_eq!(first.certificate, second.certificate);
    assert_eq!(life.standing.told().from, Some(Provenance::Secret));
    assert!(bench.all_asked().is_empty());
}

#[tokio::test]
async fn a_secret_that_could_not_be_read_at_first_is_waited_for() {
    let mut bench = Bench::new(Replies::new()).await;
    let (mut secret, stored) = SecretWatch::new("ns".to_owned());
    secret.failed(&Call::Deadline);
    let mut life = bench.start_with(stored);
    // Here whoever does not wait asks for another identity.
    tokio::task::yield_now().await;
    let Material { chain, key, .. } = bench.receiver.ca.runtime("r-1");
    let [chain, key] = [chain, key].map(|bytes| STANDARD.encode(bytes));
    let kept = json!({"metadata": {"name": IDENTITY_SECRET, "resourceVersion": "1"},
                      "data": {CHAIN_KEY: chain, PRIVATE_KEY_KEY: key}});
    secret.present(serde_json::from_value(kept).unwrap());
    life.next().await;
    assert_eq!(life.standing.told().from, Some(Provenance::Secret));
    assert!(bench.all_asked().is_empty());
}

#[tokio::test]
async fn what_the_secret_has_of_no_use_is_replaced() {
    let mut bench = Bench::new(Replies::new()).await;
    let ca = &bench.receiver.ca;
    let (other, ended, good) = (ca.runtime("r-2"), ca.runtime_until("r-1", 2_020), ca.runtime("r-1"));
    let others_key = ca.runtime("r-1").key;
    let garbage = (b"no chain".to_vec(), b"no key".to_vec());
    for (chain, key) in [garbage, (other.chain, other.key), (ended.chain, ended.key), (good.chain, others_key)] {
        bench.store.put(&chain, &key);
        let mut life = bench.start();
        life.next().await;
        assert_eq!(life.standing.told().from, Some(Provenance::Enrolment));
        assert!(bench.asked().await.unwrap().token.is_some());
        assert_ne!(bench.store.content().0, chain);
    }
}

#[tokio::test]
async fn an_answer_that_is_not_ours_is_refused_and_counted() {
    type Bad = fn(&bench::Receiver, &bench::Asked) -> bench::Reply;
    let bad: [(&str, Bad); 8] = [
        ("another runtime", |receiver, asked| {
            receiver.chain(&receiver.ca.sign(&asked.request().request, "r-2", 3_600, false))
        }),
        ("another key", |receiver, _| receiver.chain(&String::from_utf8(receiver.ca.runtime("r-1").chain).unwrap())),
        ("a CA", |receiver, asked| receiver.chain(&receiver.ca.sign(&asked.request().request, "r-1", 3_600, true))),
        ("it has ended", |receiver, asked| {
            receiver.chain(&receiver.ca.sign(&asked.request().request, "r-1", -5, false))
        }),
        ("a server", |receiver, _| receiver.chain(&String::from_utf8(receiver.ca.server().0).unwrap())),
        ("no chain", |receiver, _| receiver.chain("garbage")),
        ("no JSON", |_, _| (200, "<html>".to_owned())),
        ("too large", |receiver, _| receiver.chain(&"x".repeat(MAX_ANSWER_BYTES))),
    ];
    for (what, reply) in bad {
        let mut bench = Bench::new((0..1_000).map(|_| Box::new(reply) as _).collect()).await;
        let mut life = bench.start();
        until(|| life.metrics.identity_refused.get() > 0).await;
        assert!(life.current.borrow().is_none() && bench.store.content().0.is_empty(), "{what}");
        assert!(life.standing.told().error.is_some() && life.readiness.pending() == ["identity"], "{what}");
        bench.receiver.replies.lock().unwrap().clear();
        assert_eq!(life.next().await.runtime.as_str(), "r-1", "{what}");
        let refused = bench.all_asked().len() as u64 - 1;
        assert_eq!((life.metrics.identity_refused.get(), life.standing.told().error), (refused, None), "{what}");
    }
}

#[tokio::test]
async fn nothing_is_sent_to_whoever_the_bundle_does_not_name() {
    let mut bench = Bench::new(Replies::new()).await;
    let forged = TestCa::new().pem().into_bytes();
    bench.say(|settings| settings.bundle = forged);
    let mut life = bench.start();
    for _ in 0..2 {
        assert!(bench.asked().await.err().unwrap().contains("alert"), "the handshake was ended by us");
    }
    assert!(life.current.borrow().is_none());
    // The right one is taken at once, whatever the wait after the failures.
    bench.say(|_| ());
    life.next().await;
    let asked = bench.all_asked();
    assert_eq!(asked.iter().filter(|asked| asked.is_ok()).count(), 1);
}

/// What is logged by one thread.
#[derive(Clone, Default)]
struct Logs(Arc<Mutex<Vec<u8>>>);

impl io::Write for Logs {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn neither_token_nor_key_is_ever_told() {
    let logs = Logs::default();
    let writer = logs.clone();
    // With a second one alive, what other tests' threads log first is not taken for what nobody wants to hear.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    let subscriber = tracing_subscriber::fmt().json().with_max_level(tracing::Level::TRACE);
    let _guard = tracing::subscriber::set_default(subscriber.with_writer(move || writer.clone()).finish());
    let echo = |_: &bench::Receiver, asked: &bench::Asked| {
        assert!(asked.headers[http::header::AUTHORIZATION].to_str().unwrap().contains(TOKEN));
        (200_u16, "no JSON".to_owned())
    };
    let refuse = |_: &bench::Receiver, _: &bench::Asked| problem(403, Kind::Other);
    let bench = Bench::new([Box::new(echo) as _, Box::new(refuse) as _].into()).await;
    bench.store.refuse.lock().unwrap().push_back(500);
    let mut life = bench.start();
    life.next().await;
    let told = || String::from_utf8(logs.0.lock().unwrap().clone()).unwrap();
    until(|| !bench.store.content().0.is_empty() && told().contains("Using an identity")).await;
    let text = told();
    let key = String::from_utf8(bench.store.content().1).unwrap();
    let secret_line = key.lines().nth(1).unwrap();
    assert!(text.contains("these words"), "{text}");
    for secret in [TOKEN, "a-secret-signature", secret_line] {
        assert!(!text.contains(secret), "{secret} is in\n{text}");
    }
}

#[tokio::test]
async fn a_failed_renewal_keeps_the_certificate_and_says_so_until_one_succeeds() {
    let mut bench = Bench::new(Replies::new()).await;
    let mut life = bench.start();
    let first = life.next().await;
    let mut renewals = life.renewals.take().unwrap();
    // Of another certificate: nothing is done.
    renewals.wanted("another");
    renewals.wanted(&first.certificate.fingerprint);
    for n in 0..3 {
        let order = renewals.ordered().await;
        assert_eq!(renewals.failed_since().is_some(), n > 0);
        order.answer(Ok(answer(problem(503, Kind::Other))));
    }
    let order = renewals.ordered().await;
    assert!(!life.current.has_changed().unwrap());
    assert!(life.metrics.renewal_failed_since.get() > 0);
    assert!(life.standing.told().error.unwrap().contains("these words"));
    let request = bench.asked().await.unwrap();
    let renewed = bench.receiver.issue(&bench::Asked { body: order.body.clone(), ..request });
    order.answer(Ok(answer(renewed)));
    let second = life.next().await;
    assert_ne!(first.certificate, second.certificate);
    assert_eq!((renewals.failed_since(), life.metrics.renewal_failed_since.get()), (None, 0));
    assert_eq!(life.standing.told().from, Some(Provenance::Renewal));
    assert!(bench.all_asked().is_empty(), "nobody was asked with a token");
}

fn answer((status, body): bench::Reply) -> crate::link::Answer {
    let status = http::StatusCode::from_u16(status).unwrap();
    crate::link::Answer { status, headers: http::HeaderMap::new(), body: body.into() }
}

#[tokio::test]
async fn what_is_issued_is_judged_by_the_clock_of_whoever_issues() {
    let mut bench = Bench::new(Replies::new()).await;
    let mut life = bench.start();
    let first = life.next().await;
    let asked = bench.asked().await.unwrap();
    let mut renewals = life.renewals.take().unwrap();
    renewals.wanted(&first.certificate.fingerprint);
    let order = renewals.ordered().await;
    let mut renewed = answer(bench.receiver.issue(&bench::Asked { body: order.body.clone(), ..asked }));
    // By ours it is good for an hour.
    let date = http::HeaderValue::from_static("Tue, 01 Jan 2999 00:00:00 GMT");
    renewed.headers.insert(http::header::DATE, date);
    order.answer(Ok(renewed));
    renewals.ordered().await;
    assert_eq!(life.metrics.identity_refused.get(), 1);
    assert!(life.standing.told().error.unwrap().contains("ended at"));
}

#[tokio::test]
async fn an_answer_without_a_date_is_judged_by_what_is_known_of_the_receivers_clock() {
    let mut bench = Bench::new(Replies::new()).await;
    let mut life = bench.start();
    let first = life.next().await;
    let asked = bench.asked().await.unwrap();
    let mut renewals = life.renewals.take().unwrap();
    // By ours it is good for an hour, by the receiver's it ended an hour ago.
    life.metrics.clock_offset.set(7_200);
    renewals.wanted(&first.certificate.fingerprint);
    let order = renewals.ordered().await;
    let renewed = bench.receiver.issue(&bench::Asked { body: order.body.clone(), ..asked });
    order.answer(Ok(answer(renewed)));
    renewals.ordered().await;
    assert!(life.standing.told().error.unwrap().contains("ended at"));
}

#[tokio::test]
async fn a_refused_certificate_is_renewed_and_when_that_fails_asked_for_anew() {
    let mut bench = Bench::new(Replies::new()).await;
    let mut life = bench.start();
    let first = life.next().await;
    bench.asked().await.unwrap();
    let mut renewals = life.renewals.take().unwrap();
    renewals.refused(&first.certificate.fingerprint);
    renewals.ordered().await.answer(Ok(answer(problem(401, Kind::Certificate))));
    let second = life.next().await;
    assert_ne!(first.certificate, second.certificate);
    assert!(bench.asked().await.unwrap().token.is_some());
    assert_eq!(life.standing.told().from, Some(Provenance::Enrolment));
}

#[tokio::test]
async fn an_ended_certificate_leads_back_to_enrolment_by_itself() {
    let mut bench = Bench::new(Replies::new()).await;
    bench.receiver.seconds.store(2, Ordering::Relaxed);
    let mut life = bench.start();
    let first = life.next().await;
    bench.receiver.seconds.store(3_600, Ordering::Relaxed);
    bench.asked().await.unwrap();
    let mut renewals = life.renewals.take().unwrap();
    let second = tokio::select! {
        second = life.next() => second,
        // Renewals get nowhere until then.
        () = async { loop { renewals.ordered().await.answer(Err(crate::link::Fault::Deadline)); } } => unreachable!(),
    };
    assert!(first.not_after < second.not_after);
    assert!(bench.asked().await.unwrap().token.is_some());
}

#[tokio::test]
async fn another_receiver_or_bundle_is_taken_live_and_another_runtime_ends_the_agent() {
    let mut bench = Bench::new(Replies::new()).await;
    let mut life = bench.start();
    let first = life.next().await;
    let elsewhere: crate::link::Endpoint = "https://elsewhere:1".parse().unwrap();
    bench.say(|settings| settings.receiver = elsewhere.clone());
    let second = life.next().await;
    assert_eq!((&second.receiver, &second.certificate), (&elsewhere, &first.certificate));
    let more = bench.receiver.ca.pem() + &TestCa::new().pem();
    bench.say(|settings| settings.bundle = more.into_bytes());
    let third = life.next().await;
    assert_ne!(third.trust_revision, second.trust_revision);
    assert_eq!((&third.receiver, &third.certificate), (&first.receiver, &first.certificate));
    bench.say(|settings| settings.runtime = "r-2".parse().unwrap());
    let (known, new) = ("r-1".parse().unwrap(), "r-2".parse().unwrap());
    assert_eq!((&mut life.running).await.unwrap(), Stop::OtherRuntime { known, new });
    assert_eq!(bench.all_asked().len(), 1);
}

#[tokio::test]
async fn a_secret_that_lost_the_identity_gets_it_again() {
    let bench = Bench::new(Replies::new()).await;
    let mut life = bench.start();
    life.next().await;
    let ours = bench.store.content();
    bench.store.delete();
    until(|| life.standing.told().unkept).await;
    bench.store.put(b"", b"");
    until(|| bench.store.content() == ours).await;
    bench.store.refuse.lock().unwrap().extend([409, 500]);
    bench.store.put(b"edited", &ours.1);
    until(|| bench.store.content() == ours).await;
    assert_eq!(life.metrics.identity_writes_failed.get(), 2);
    // Another agent of this runtime may have put its own there.
    let others = bench.receiver.ca.runtime("r-1");
    bench.store.put(&others.chain, &others.key);
    bench.store.put(b"", b"");
    until(|| bench.store.content() == ours).await;
    bench.store.put(&others.chain, &others.key);
    until(|| !life.standing.told().unkept).await;
    assert_eq!(bench.store.content().0, others.chain);
    assert!(!life.current.has_changed().unwrap(), "what is in use stays in use");
}

#[tokio::test]
async fn an_identity_that_cannot_be_kept_is_used_all_the_same() {
    let bench = Bench::new(Replies::new()).await;
    bench.store.delete();
    let mut life = bench.start();
    life.next().await;
    until(|| life.standing.told().unkept).await;
    bench.store.put(b"", b"");
    until(|| !bench.store.content().0.is_empty()).await;
    until(|| !life.standing.told().unkept).await;
}

fn link(life: &mut Life, core: &Core, readiness: &Readiness) -> tokio::task::JoinHandle<()> {
    let parts = Parts {
        dial: Dial::tcp(),
        core: core.clone(),
        credentials: life.current.clone(),
        sightings: Sightings::default(),
        interval: watch::Sender::new(Duration::from_secs(30)),
        pending: readiness.guard("receiver"),
        metrics: life.metrics.clone(),
    };
    tokio::spawn(Link::new(parts).renewing(life.renewals.take().unwrap()).run(CancellationToken::new()))
}

#[tokio::test]
async fn certificates_are_renewed_while_events_flow_and_nothing_is_refused_or_lost() {
    let mut bench = Bench::new(Replies::new()).await;
    bench.receiver.seconds.store(3, Ordering::Relaxed);
    let mut life = bench.start();
    let core = Core::new("r-1".parse().unwrap(), 1_000_000, life.metrics.clone());
    let plan = r#"{"revision": "1", "watches": [{"name": "w", "group": "g", "version": "v1", "resource": "things",
                   "field": "spec", "manager": "m", "work": ["kyma"]}]}"#;
    let id = core.follow(&Plan::parse(plan).unwrap()).started[0].id;
    core.list_begun(id);
    core.list_complete(id, Instant::now());
    let readiness = Readiness::default();
    let link = link(&mut life, &core, &readiness);

    let (mut events, mut fingerprints, mut tokens, mut sent) = (0, Vec::new(), 0, 0);
    while fingerprints.len() < 4 {
        let seen = Seen { uid: "u".into(), version: Version::Number(1), generation: None, metadata: sent };
        core.present(id, &format!("ns/{sent}"), seen, Instant::now());
        sent += 1;
        let asked = bench.asked().await.unwrap();
        match asked.path.as_str() {
            EVENTS_PATH => events += tidewatch_shared::event::parse_batch(&asked.body).unwrap().len() as u64,
            HEARTBEAT_PATH => fingerprints.push(asked.fingerprint.unwrap()),
            _ => tokens += u32::from(asked.token.is_some()),
        }
    }
    while events < sent + 1 {
        let asked = bench.asked().await.unwrap();
        if asked.path == EVENTS_PATH {
            events += tidewatch_shared::event::parse_batch(&asked.body).unwrap().len() as u64;
        }
    }
    fingerprints.dedup();
    assert_eq!(
        (fingerprints.len(), tokens, events),
        (4, 1, sent + 1),
        "each once, each told at once, and nobody enrolled again"
    );
    let page = life.metrics.registry().encode().unwrap();
    for line in page.lines().filter(|line| line.starts_with("tidewatch_agent_requests_total")) {
        assert!(line.contains(r#"outcome="taken""#), "{line}");
    }
    assert!(readiness.pending().is_empty());
    link.abort();
}

#[tokio::test]
async fn heartbeats_say_since_when_a_renewal_fails_until_it_succeeds() {
    let mut bench = Bench::new((0..10_000).map(|_| Box::new(refuse) as _).collect()).await;
    // Good for years, and older than three quarters of its life: due at once.
    let year = 1970 + i32::try_from(clock::unix_seconds() / 31_556_952).unwrap();
    let overdue = bench.receiver.ca.runtime_until("r-1", year + 5);
    bench.store.put(&overdue.chain, &overdue.key);
    let mut life = bench.start();
    let first = life.next().await;
    let mut renewals = life.renewals.take().unwrap();
    renewals.ordered().await.answer(Ok(answer(problem(503, Kind::Other))));
    until(|| renewals.failed_since().is_some()).await;
    life.renewals = Some(renewals);
    let core = Core::new("r-1".parse().unwrap(), 10, life.metrics.clone());
    let link = link(&mut life, &core, &Readiness::default());

    let said = bench.heartbeat().await;
    let since = life.standing.told().failing_since.unwrap();
    assert_eq!(
        (&said["fingerprint"], &said["renewalFailedSince"]),
        (&json!(first.certificate.fingerprint), &json!(since))
    );
    bench.receiver.replies.lock().unwrap().clear();
    let second = life.next().await;
    let said = bench.heartbeat().await;
    assert_eq!(said["fingerprint"], json!(second.certificate.fingerprint));
    assert_eq!(said.get("renewalFailedSince"), None, "{said}");
    link.abort();
}

fn refuse(_: &bench::Receiver, _: &bench::Asked) -> bench::Reply {
    problem(503, Kind::Other)
}

#[tokio::test]
async fn a_certificate_that_the_handshake_refuses_is_asked_for_anew() {
    let mut bench = Bench::new(Replies::new()).await;
    // Of a CA that the receiver knows no more: the server ends the handshake.
    let stranger = TestCa::new().runtime("r-1");
    bench.store.put(&stranger.chain, &stranger.key);
    let mut life = bench.start();
    assert_eq!(life.next().await.runtime.as_str(), "r-1");
    let core = Core::new("r-1".parse().unwrap(), 10, life.metrics.clone());
    let readiness = Readiness::default();
    let link = link(&mut life, &core, &readiness);
    life.next().await;
    until(|| readiness.pending().is_empty()).await;
    let asked: Vec<_> = bench.all_asked().into_iter().flatten().collect();
    assert_eq!(asked.iter().map(|asked| asked.path.as_str()).collect::<Vec<_>>(), [CERTIFICATES_PATH, HEARTBEAT_PATH]);
    assert!(asked[0].token.is_some());
    link.abort();
}
