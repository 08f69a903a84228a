//! A link beside an enroller, with the test receiver of the enroller's fixture.

use std::sync::atomic::Ordering;

use serde_json::json;
use tidewatch_api::plan::Plan;
use tidewatch_contract::{
    enrolment::CERTIFICATES_PATH,
    exchange::{EVENTS_PATH, HEARTBEAT_PATH},
};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::identity::fixture::{Fixture, Replies, RunningEnroller, unavailable, until};

fn link(enroller: &mut RunningEnroller, readiness: &Readiness) -> JoinHandle<()> {
    let parts = LinkParts {
        dial: Dialer::tcp(),
        core: enroller.core.clone(),
        credentials: enroller.current.clone(),
        enroller: enroller.handle.take(),
        canary_state: CanaryState::default(),
        interval: watch::Sender::new(Duration::from_secs(30)),
        pending: readiness.pending("receiver"),
        metrics: enroller.metrics.clone(),
    };
    tokio::spawn(Link::new(parts).run(CancellationToken::new()))
}

#[tokio::test]
async fn renewals_under_load_lose_and_refuse_nothing() {
    let mut fixture = Fixture::new(Replies::new()).await;
    fixture.receiver.seconds.store(3, Ordering::Relaxed);
    let mut enroller = fixture.start();
    let core = enroller.core.clone();
    let plan = r#"{"revision": "1", "watches": [{"name": "w", "group": "g", "version": "v1", "resource": "things",
                   "field": "spec", "manager": "m", "work": ["kyma"]}]}"#;
    let id = core.follow(&Plan::parse(plan).unwrap()).started[0].id;
    core.list_begun(id);
    core.list_complete(id, Instant::now());
    let readiness = Readiness::default();
    let link = link(&mut enroller, &readiness);

    let mut events = 0;
    let mut fingerprints = Vec::new();
    let mut tokens = 0;
    let mut sent = 0;
    while fingerprints.len() < 4 {
        let seen = ObjectState { uid: "u".into(), version: Version::Number(1), generation: None, metadata: sent };
        core.present(id, &format!("ns/{sent}"), seen, Instant::now());
        sent += 1;
        let requests = fixture.next_request().await.unwrap();
        match requests.path.as_str() {
            EVENTS_PATH => events += parse_batch(&requests.body).unwrap().len() as u64,
            HEARTBEAT_PATH => fingerprints.push(requests.fingerprint.unwrap()),
            _ => tokens += u32::from(requests.token.is_some()),
        }
    }
    while events < sent + 1 {
        let requests = fixture.next_request().await.unwrap();
        if requests.path == EVENTS_PATH {
            events += parse_batch(&requests.body).unwrap().len() as u64;
        }
    }
    fingerprints.dedup();
    assert_eq!(
        (fingerprints.len(), tokens, events),
        (4, 1, sent + 1),
        "each event once, each certificate in a heartbeat, and a single enrolment"
    );
    let page = enroller.metrics.registry().encode().unwrap();
    for line in page.lines().filter(|line| line.starts_with("tidewatch_agent_requests_total")) {
        assert!(line.contains(r#"outcome="taken""#), "{line}");
    }
    assert!(readiness.missing().is_empty());
    link.abort();
}

#[tokio::test]
async fn heartbeats_report_a_failing_renewal_until_it_succeeds() {
    let mut fixture = Fixture::new((0..10_000).map(|_| Box::new(unavailable) as _).collect()).await;
    // Valid for years, and past three quarters of its validity: due at once.
    let year = 1970 + i32::try_from(clock::unix_seconds() / 31_556_952).unwrap();
    let overdue = fixture.receiver.ca.runtime_until("r-1", year + 5);
    fixture.store.put(&overdue.chain, &overdue.key);
    let mut enroller = fixture.start();
    let first = enroller.next().await;
    until(|| enroller.identity_status.report().failing_since.is_some()).await;
    let link = link(&mut enroller, &Readiness::default());

    let certificate = fixture.heartbeat().await;
    let since = enroller.identity_status.report().failing_since.unwrap();
    assert_eq!(
        (&certificate["fingerprint"], &certificate["renewalFailedSince"]),
        (&json!(first.certificate.fingerprint), &json!(since))
    );
    fixture.receiver.replies.lock().clear();
    let second = enroller.next().await;
    let certificate = fixture.heartbeat().await;
    assert_eq!(certificate["fingerprint"], json!(second.certificate.fingerprint));
    assert_eq!(certificate.get("renewalFailedSince"), None, "{certificate}");
    link.abort();
}

#[tokio::test]
async fn certificate_refused_in_the_handshake_is_replaced_by_enrolment() {
    let mut fixture = Fixture::new(Replies::new()).await;
    // The receiver no longer trusts its CA, so the server aborts the handshake.
    let stranger = TestCa::new().runtime("r-1");
    fixture.store.put(&stranger.chain, &stranger.key);
    let mut enroller = fixture.start();
    assert_eq!(enroller.next().await.runtime.as_str(), "r-1");
    let readiness = Readiness::default();
    let link = link(&mut enroller, &readiness);
    enroller.next().await;
    until(|| readiness.missing().is_empty()).await;
    let requests: Vec<_> = fixture.requests().into_iter().flatten().collect();
    assert_eq!(
        requests.iter().map(|requests| requests.path.as_str()).collect::<Vec<_>>(),
        [CERTIFICATES_PATH, HEARTBEAT_PATH]
    );
    assert!(requests[0].token.is_some());
    link.abort();
}
