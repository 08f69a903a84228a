pub(crate) mod fixture;

use std::{io, sync::atomic::Ordering};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use fixture::{Fixture, Replies, TOKEN, problem, until};
use http::HeaderValue;
use jiff::Timestamp;
use parking_lot::Mutex;
use serde_json::json;
use tidewatch_api::names::{CHAIN_KEY, IDENTITY_SECRET, PRIVATE_KEY_KEY};
use tidewatch_contract::{
    enrolment::{CERTIFICATES_PATH, MAX_RESPONSE_BYTES},
    problem::Kind,
};

use super::*;
use crate::{
    identity::{SecretWatch, tests::TestCa},
    kubernetes::ApiError,
    watch::Sink as _,
};

#[tokio::test]
async fn first_identity_is_requested_with_the_token_and_stored_before_use() {
    let mut fixture = Fixture::new(Replies::new()).await;
    let mut enroller = fixture.start();
    let credentials = enroller.next().await;
    let (chain, key) = fixture.store.content();
    assert!(!chain.is_empty() && String::from_utf8(key).unwrap().contains("PRIVATE KEY"));
    let kept = tidewatch_kit::tls::certificates(&chain).unwrap();
    assert_eq!(credentials.certificate.fingerprint, tidewatch_contract::certificate::fingerprint(&kept[0]));
    assert_eq!((credentials.runtime.as_str(), &credentials.receiver), ("r-1", &fixture.default_settings().receiver));
    let observed = fixture.next_request().await.unwrap();
    assert_eq!((observed.path.as_str(), observed.token), (CERTIFICATES_PATH, Some(format!("Bearer {TOKEN}"))));
    assert!(enroller.readiness.missing().is_empty());
    let logged = enroller.identity_status.report();
    assert_eq!((logged.from, logged.unsaved, logged.error), (Some(IdentitySource::Enrolment), false, None));
    assert_eq!(enroller.metrics.certificate_not_after.get(), credentials.not_after);
}

#[tokio::test]
async fn next_agent_process_uses_the_stored_identity_without_a_request() {
    let mut fixture = Fixture::new(Replies::new()).await;
    let first = fixture.start().next().await;
    assert_eq!(fixture.requests().len(), 1);
    let mut enroller = fixture.start();
    let second = enroller.next().await;
    assert_eq!(first.certificate, second.certificate);
    assert_eq!(enroller.identity_status.report().from, Some(IdentitySource::Secret));
    assert!(fixture.requests().is_empty());
}

#[tokio::test]
async fn enroller_waits_for_a_secret_that_is_unreadable_at_first() {
    let mut fixture = Fixture::new(Replies::new()).await;
    let (mut secret, stored) = SecretWatch::new("ns".to_owned());
    secret.failed(&ApiError::Deadline);
    let mut enroller = fixture.start_with(stored);
    // Without the wait, an enroller would request another identity here.
    tokio::task::yield_now().await;
    let KeyMaterial { chain, key, .. } = fixture.receiver.ca.runtime("r-1");
    let [chain, key] = [chain, key].map(|bytes| STANDARD.encode(bytes));
    let kept = json!({"metadata": {"name": IDENTITY_SECRET, "resourceVersion": "1"},
                      "data": {CHAIN_KEY: chain, PRIVATE_KEY_KEY: key}});
    secret.present(serde_json::from_value(kept).unwrap());
    enroller.next().await;
    assert_eq!(enroller.identity_status.report().from, Some(IdentitySource::Secret));
    assert!(fixture.requests().is_empty());
}

#[tokio::test]
async fn unusable_identity_in_the_secret_is_replaced() {
    let mut fixture = Fixture::new(Replies::new()).await;
    let ca = &fixture.receiver.ca;
    let other = ca.runtime("r-2");
    let ended = ca.runtime_until("r-1", 2_020);
    let good = ca.runtime("r-1");
    let others_key = ca.runtime("r-1").key;
    let garbage = (b"no chain".to_vec(), b"no key".to_vec());
    for (chain, key) in [garbage, (other.chain, other.key), (ended.chain, ended.key), (good.chain, others_key)] {
        fixture.store.put(&chain, &key);
        let mut enroller = fixture.start();
        enroller.next().await;
        assert_eq!(enroller.identity_status.report().from, Some(IdentitySource::Enrolment));
        assert!(fixture.next_request().await.unwrap().token.is_some());
        assert_ne!(fixture.store.content().0, chain);
    }
}

#[tokio::test]
async fn invalid_answer_is_rejected_and_counted() {
    type Bad = fn(&fixture::Receiver, &fixture::ObservedRequest) -> fixture::Reply;
    let bad: [(&str, Bad); 8] = [
        ("another runtime", |receiver, observed| {
            receiver.chain(&receiver.ca.sign(&observed.request().request, "r-2", 3_600, false))
        }),
        ("another key", |receiver, _| receiver.chain(&String::from_utf8(receiver.ca.runtime("r-1").chain).unwrap())),
        ("a CA", |receiver, observed| {
            receiver.chain(&receiver.ca.sign(&observed.request().request, "r-1", 3_600, true))
        }),
        ("it has ended", |receiver, observed| {
            receiver.chain(&receiver.ca.sign(&observed.request().request, "r-1", -5, false))
        }),
        ("a server", |receiver, _| receiver.chain(&String::from_utf8(receiver.ca.server().0).unwrap())),
        ("no chain", |receiver, _| receiver.chain("garbage")),
        ("no JSON", |_, _| (200, "<html>".to_owned())),
        ("too large", |receiver, _| receiver.chain(&"x".repeat(MAX_RESPONSE_BYTES))),
    ];
    for (condition, reply) in bad {
        let mut fixture = Fixture::new((0..1_000).map(|_| Box::new(reply) as _).collect()).await;
        let mut enroller = fixture.start();
        until(|| enroller.metrics.identity_refused.get() > 0).await;
        assert!(enroller.current.borrow().is_none() && fixture.store.content().0.is_empty(), "{condition}");
        assert!(
            enroller.identity_status.report().error.is_some() && enroller.readiness.missing() == ["identity"],
            "{condition}"
        );
        fixture.receiver.replies.lock().clear();
        assert_eq!(enroller.next().await.runtime.as_str(), "r-1", "{condition}");
        let refused = fixture.requests().len() as u64 - 1;
        assert_eq!(
            (enroller.metrics.identity_refused.get(), enroller.identity_status.report().error),
            (refused, None),
            "{condition}"
        );
    }
}

#[tokio::test]
async fn nothing_is_sent_to_a_server_outside_the_trust_bundle() {
    let mut fixture = Fixture::new(Replies::new()).await;
    let forged = TestCa::new().pem().into_bytes();
    fixture.configure(|settings| settings.bundle = forged);
    let mut enroller = fixture.start();
    for _ in 0..2 {
        assert!(fixture.next_request().await.err().unwrap().contains("alert"), "the agent aborts the handshake");
    }
    assert!(enroller.current.borrow().is_none());
    // The valid bundle is applied at once, regardless of the backoff.
    fixture.configure(|_| ());
    enroller.next().await;
    let observed = fixture.requests();
    assert_eq!(observed.iter().filter(|observed| observed.is_ok()).count(), 1);
}

/// Log output of one thread.
#[derive(Clone, Default)]
struct Logs(Arc<Mutex<Vec<u8>>>);

impl io::Write for Logs {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn token_and_key_are_never_logged() {
    let logs = Logs::default();
    let writer = logs.clone();
    // A second dispatcher keeps the callsite cache from being filled by the threads of other tests, which have no
    // subscriber.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    let subscriber = tracing_subscriber::fmt().json().with_max_level(tracing::Level::TRACE);
    let _guard = tracing::subscriber::set_default(subscriber.with_writer(move || writer.clone()).finish());
    let echo = |_: &fixture::Receiver, observed: &fixture::ObservedRequest| {
        assert!(observed.headers[http::header::AUTHORIZATION].to_str().unwrap().contains(TOKEN));
        (200_u16, "no JSON".to_owned())
    };
    let refuse = |_: &fixture::Receiver, _: &fixture::ObservedRequest| problem(403, Kind::Other);
    let fixture = Fixture::new([Box::new(echo) as _, Box::new(refuse) as _].into()).await;
    fixture.store.refuse.lock().push_back(500);
    let mut enroller = fixture.start();
    enroller.next().await;
    let logged = || String::from_utf8(logs.0.lock().clone()).unwrap();
    until(|| !fixture.store.content().0.is_empty() && logged().contains("Using an identity")).await;
    let text = logged();
    let key = String::from_utf8(fixture.store.content().1).unwrap();
    let secret_line = key.lines().nth(1).unwrap();
    assert!(text.contains("these words"), "{text}");
    for secret in [TOKEN, "a-secret-signature", secret_line] {
        assert!(!text.contains(secret), "{secret} is in\n{text}");
    }
}

#[tokio::test]
async fn failed_renewal_keeps_the_certificate_and_is_reported_until_success() {
    let mut fixture = Fixture::new(Replies::new()).await;
    let mut enroller = fixture.start();
    let first = enroller.next().await;
    fixture.next_request().await.unwrap();
    *fixture.receiver.replies.lock() = (0..10_000).map(|_| Box::new(fixture::unavailable) as _).collect();
    // A demand concerning another certificate has no effect.
    enroller.notify(CertificateNotice::Renew, "another");
    assert!(enroller.identity_status.report().failing_since.is_none());
    enroller.notify(CertificateNotice::Renew, &first.certificate.fingerprint);
    for _ in 0..3 {
        let request = fixture.next_request().await.unwrap();
        assert_eq!((request.token, request.fingerprint.as_ref()), (None, Some(&first.certificate.fingerprint)));
    }
    until(|| enroller.identity_status.report().failing_since.is_some()).await;
    assert!(!enroller.current.has_changed().unwrap());
    assert!(enroller.metrics.renewal_failed_since.get() > 0);
    assert!(enroller.identity_status.report().error.unwrap().contains("these words"));
    fixture.receiver.replies.lock().clear();
    let second = enroller.next().await;
    assert_ne!(first.certificate, second.certificate);
    assert_eq!(
        (enroller.identity_status.report().failing_since, enroller.metrics.renewal_failed_since.get()),
        (None, 0)
    );
    assert_eq!(enroller.identity_status.report().from, Some(IdentitySource::Renewal));
    let requests = fixture.requests();
    assert!(requests.into_iter().all(|request| request.unwrap().token.is_none()), "no request was sent with a token");
}

#[tokio::test]
async fn issued_certificate_is_judged_by_the_issuers_clock() {
    let fixture = Fixture::new(Replies::new()).await;
    let mut enroller = fixture.start();
    let first = enroller.next().await;
    // By the local clock it is valid for an hour.
    *fixture.receiver.date.lock() = Some(HeaderValue::from_static("Tue, 01 Jan 2999 00:00:00 GMT"));
    enroller.notify(CertificateNotice::Renew, &first.certificate.fingerprint);
    until(|| enroller.metrics.identity_refused.get() > 0).await;
    assert!(enroller.identity_status.report().error.unwrap().contains("expired at"));
}

#[tokio::test]
async fn answer_without_a_date_is_judged_by_the_known_clock_offset() {
    let fixture = Fixture::new(Replies::new()).await;
    let mut enroller = fixture.start();
    let first = enroller.next().await;
    // By the local clock it is valid for an hour; by the receiver's it expired an hour ago.
    enroller.metrics.clock_offset.set(7_200);
    fixture.receiver.clock_offset.store(7_200, Ordering::Relaxed);
    enroller.notify(CertificateNotice::Renew, &first.certificate.fingerprint);
    until(|| enroller.metrics.identity_refused.get() > 0).await;
    assert!(enroller.identity_status.report().error.unwrap().contains("expired at"));
}

#[tokio::test]
async fn renewal_refused_for_its_time_is_repeated_at_the_receivers_time() {
    let mut fixture = Fixture::new(Replies::new()).await;
    let mut enroller = fixture.start();
    let first = enroller.next().await;
    let refuse = |receiver: &fixture::Receiver, _: &fixture::ObservedRequest| {
        receiver.clock_offset.store(600, Ordering::Relaxed);
        let date = Timestamp::from_second(clock::unix_seconds() + 600).unwrap();
        let date = date.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
        *receiver.date.lock() = Some(date.try_into().unwrap());
        problem(401, Kind::Clock)
    };
    fixture.receiver.replies.lock().push_back(Box::new(refuse));
    enroller.notify(CertificateNotice::Renew, &first.certificate.fingerprint);
    let second = enroller.next().await;
    assert_ne!(first.certificate, second.certificate);
    assert_eq!(enroller.identity_status.report().from, Some(IdentitySource::Renewal));
    assert!((599..=601).contains(&enroller.metrics.clock_offset.get()));
    assert_eq!(fixture.requests().len(), 3, "an enrolment, and a renewal that is sent twice");
}

#[tokio::test]
async fn refused_certificate_is_renewed_or_else_replaced_by_enrolment() {
    let mut fixture = Fixture::new(Replies::new()).await;
    let mut enroller = fixture.start();
    let first = enroller.next().await;
    fixture.next_request().await.unwrap();
    fixture.receiver.replies.lock().push_back(Box::new(|_, _| problem(401, Kind::Certificate)));
    enroller.notify(CertificateNotice::Refused, &first.certificate.fingerprint);
    let second = enroller.next().await;
    assert_ne!(first.certificate, second.certificate);
    assert!(fixture.next_request().await.unwrap().token.is_none(), "the renewal");
    assert!(fixture.next_request().await.unwrap().token.is_some());
    assert_eq!(enroller.identity_status.report().from, Some(IdentitySource::Enrolment));
}

#[tokio::test]
async fn expired_certificate_leads_back_to_enrolment() {
    let mut fixture = Fixture::new(Replies::new()).await;
    fixture.receiver.seconds.store(2, Ordering::Relaxed);
    let mut enroller = fixture.start();
    let first = enroller.next().await;
    fixture.receiver.seconds.store(3_600, Ordering::Relaxed);
    fixture.next_request().await.unwrap();
    // Renewals fail until then.
    let enrols = |receiver: &fixture::Receiver, observed: &fixture::ObservedRequest| match observed.token {
        Some(_) => receiver.issue(observed),
        None => fixture::unavailable(receiver, observed),
    };
    *fixture.receiver.replies.lock() = (0..10_000).map(|_| Box::new(enrols) as _).collect();
    let second = enroller.next().await;
    assert!(first.not_after < second.not_after);
    assert!(fixture.requests().into_iter().flatten().any(|request| request.token.is_some()));
}

#[tokio::test]
async fn receiver_and_bundle_change_at_run_time_and_another_runtime_ends_the_agent() {
    let mut fixture = Fixture::new(Replies::new()).await;
    let mut enroller = fixture.start();
    let first = enroller.next().await;
    let elsewhere: crate::receiver::Endpoint = "https://elsewhere:1".parse().unwrap();
    fixture.configure(|settings| settings.receiver = elsewhere.clone());
    let second = enroller.next().await;
    assert_eq!((&second.receiver, &second.certificate), (&elsewhere, &first.certificate));
    let more = fixture.receiver.ca.pem() + &TestCa::new().pem();
    fixture.configure(|settings| settings.bundle = more.into_bytes());
    let third = enroller.next().await;
    assert_ne!(third.trust_revision, second.trust_revision);
    assert_eq!((&third.receiver, &third.certificate), (&first.receiver, &first.certificate));
    fixture.configure(|settings| settings.runtime = "r-2".parse().unwrap());
    let current = "r-1".parse().unwrap();
    let new = "r-2".parse().unwrap();
    assert_eq!(
        (&mut enroller.running).await.unwrap(),
        IdentityStop::OtherRuntime { current, new, named_by: "ConfigMap" }
    );
    assert_eq!(fixture.requests().len(), 1);
}

#[tokio::test]
async fn identity_lost_from_the_secret_is_stored_again() {
    let fixture = Fixture::new(Replies::new()).await;
    let mut enroller = fixture.start();
    enroller.next().await;
    let ours = fixture.store.content();
    fixture.store.delete();
    until(|| enroller.identity_status.report().unsaved).await;
    fixture.store.put(b"", b"");
    until(|| fixture.store.content() == ours).await;
    fixture.store.refuse.lock().extend([409, 500]);
    fixture.store.put(b"edited", &ours.1);
    until(|| fixture.store.content() == ours).await;
    assert_eq!(enroller.metrics.identity_writes_failed.get(), 2);
    // Another agent of this runtime may have stored its own identity.
    let others = fixture.receiver.ca.runtime("r-1");
    fixture.store.put(&others.chain, &others.key);
    fixture.store.put(b"", b"");
    until(|| fixture.store.content() == ours).await;
    fixture.store.put(&others.chain, &others.key);
    until(|| !enroller.identity_status.report().unsaved).await;
    assert_eq!(fixture.store.content().0, others.chain);
    assert!(!enroller.current.has_changed().unwrap(), "the identity in use does not change");
}

#[tokio::test]
async fn identity_that_cannot_be_stored_is_used() {
    let fixture = Fixture::new(Replies::new()).await;
    fixture.store.delete();
    let mut enroller = fixture.start();
    enroller.next().await;
    until(|| enroller.identity_status.report().unsaved).await;
    fixture.store.put(b"", b"");
    until(|| !fixture.store.content().0.is_empty()).await;
    until(|| !enroller.identity_status.report().unsaved).await;
}
