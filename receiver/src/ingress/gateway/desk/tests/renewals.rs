//! Renewal over the certificate that is renewed, and what a revoked one may still say.

use http_body_util::Full;
use rcgen::KeyPair;
use tidewatch_shared::{
    certificate::RuntimeCertificate,
    enrolment::{CERTIFICATES_PATH, CertificateRequest, CertificateResponse, MAX_REQUEST_BYTES},
    tls::certificates,
};

use super::*;
use crate::ingress::enrolment::tests::testing::{self as enrolment, asked, request_for, unix_now};

struct Renewals {
    enrolment: enrolment::Room,
    desk: Desk<Recorder>,
    ca: Ca,
    agent: Agent,
    registry: tidewatch_shared::metrics::Registry,
}

impl Renewals {
    fn new() -> Self {
        let (enrolment, now) = (enrolment::Room::new(), unix_now());
        let settings = Settings {
            office: Some(enrolment.office.clone()),
            revocations: enrolment.revocations.clone(),
            ..settings()
        };
        let ca = ca(now);
        let agent = Agent::new(&ca, "r-1", now);
        let mut registry = tidewatch_shared::metrics::Registry::default();
        let metrics = Metrics::register(&mut registry);
        Self { desk: Desk::new(&settings, Recorder::default(), metrics), enrolment, ca, agent, registry }
    }

    fn request(&self, body: &[u8], counter: u64) -> Request<Full<Bytes>> {
        let say = Say { path: CERTIFICATES_PATH, created: unix_now(), ..Say::heartbeat(body, counter) };
        self.agent.sign(&say).map(Full::from)
    }

    async fn say_as(&self, agent: &Agent, request: Request<Full<Bytes>>) -> (u16, Value, bool) {
        let peer = Peer::read(&agent.identity.chain[0], &domain());
        let (answer, is_last) = self.desk.answer(request, &peer).await;
        let (status, body) = read(answer).await;
        (status, body, is_last)
    }

    async fn ask(&self, asked: &CertificateRequest, counter: u64) -> (u16, Value, bool) {
        self.say_as(&self.agent, self.request(&asked.to_json().unwrap(), counter)).await
    }

    fn refusals(&self, reason: &str) -> usize {
        let text = self.registry.encode().unwrap();
        let line = text.lines().find(|line| {
            line.starts_with("gateway_requests_refused_total{route=\"certificates\"")
                && line.contains(&format!("reason=\"{reason}\""))
        });
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    }
}

#[tokio::test]
async fn a_certificate_is_renewed_over_itself() {
    let room = Renewals::new();
    for counter in 1..=2 {
        let (status, answer, is_last) = room.ask(&asked("r-1"), counter).await;
        assert_eq!((status, is_last), (200, false), "{answer}");
        let answer = CertificateResponse::parse(answer.to_string().as_bytes()).unwrap();
        let leaf = certificates(answer.chain.as_bytes()).unwrap().remove(0);
        assert_eq!(RuntimeCertificate::read(&leaf, &domain()).unwrap().runtime, room.agent.runtime);
    }
    assert_eq!(room.enrolment.first.asked(), (0, 0), "the runtime is not asked");
}

#[tokio::test]
async fn every_refusal_of_a_renewal_has_its_status_and_its_count() {
    let room = Renewals::new();
    let weak = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let body = |request: String| CertificateRequest { request, ..asked("r-1") }.to_json().unwrap();
    for (counter, (body, status, reason)) in (1..).zip([
        (asked("r-2").to_json().unwrap(), 403, "source"),
        (body(request_for(&weak, |_| {})), 400, "request-key"),
        (body("nothing".to_owned()), 400, "request-malformed"),
        (b"{}".to_vec(), 400, "malformed"),
        (vec![b' '; MAX_REQUEST_BYTES + 1], 413, "too-large"),
    ]) {
        let (said, problem, _) = room.say_as(&room.agent, room.request(&body, counter)).await;
        assert_eq!((said, room.refusals(reason)), (status, 1), "{reason}: {problem}");
    }
    let unsigned =
        room.request(&asked("r-1").to_json().unwrap(), 20).map(|_| Full::from(asked("r-1").to_json().unwrap()));
    assert_eq!(room.say_as(&room.agent, unsigned).await.0, 401);
    assert_eq!(room.refusals("digest"), 1);
    let stranger = Agent::new(&room.ca, "r-9", unix_now());
    let body = asked("r-9").to_json().unwrap();
    let say = Say { path: CERTIFICATES_PATH, created: unix_now(), ..Say::heartbeat(&body, 1) };
    assert_eq!(room.say_as(&stranger, stranger.sign(&say).map(Full::from)).await.0, 404);
    assert_eq!(room.refusals("unknown-runtime"), 1);
    for counter in 30..40 {
        room.ask(&asked("r-1"), counter).await;
    }
    assert_eq!((room.ask(&asked("r-1"), 41).await.0, room.refusals("certificates-rate") > 0), (429, true));
}

#[tokio::test]
async fn without_an_issuer_there_is_no_such_route() {
    let room = Renewals::new();
    let desk = Desk::new(&settings(), Recorder::default(), metrics());
    let peer = Peer::read(&room.agent.identity.chain[0], &domain());
    let request = room.request(&asked("r-1").to_json().unwrap(), 1);
    assert_eq!(read(desk.answer(request, &peer).await.0).await.0, 404);
}

#[tokio::test]
async fn what_is_revoked_says_nothing_more() {
    let room = Renewals::new();
    let leaf = tidewatch_shared::certificate::fingerprint(&room.agent.identity.chain[0]);
    let revoke = |key: &str| {
        let map = json!({"data": {key: "stolen"}});
        room.enrolment.revocations.set(Some(&serde_json::from_value(map).unwrap()));
    };
    for (counter, key) in (1..).zip([&*leaf, "r-1"]) {
        revoke(key);
        let (status, problem, is_last) = room.ask(&asked("r-1"), counter).await;
        assert_eq!((status, is_last), (401, true));
        assert!(problem["type"].as_str().unwrap().ends_with("/certificate"), "{problem}");
    }
    assert_eq!(room.refusals("revoked"), 2);
    revoke("r-2");
    assert_eq!(room.ask(&asked("r-1"), 9).await.0, 200);
}
