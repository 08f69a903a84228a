//! Renewal of certificates, refusal of revoked ones, and of those that two agent processes use.

use http_body_util::Full;
use rcgen::KeyPair;
use tidewatch_api::identity::Epoch;
use tidewatch_contract::{
    certificate::RuntimeCertificate,
    enrolment::{CERTIFICATES_PATH, CertificateRequest, CertificateResponse, MAX_REQUEST_BYTES, RenewalRequest},
};
use tidewatch_kit::tls::certificates;

use super::*;
use crate::enrolment::tests::testing::{self as enrolment, domain, honest_request, request_for, unix_now};

struct Renewals {
    enrolment: enrolment::Fixture,
    handler: V3Handler<RecordingIntake>,
    ca: Ca,
    agent: Agent,
    registry: tidewatch_kit::metrics::Registry,
}

impl Renewals {
    fn new() -> Self {
        let enrolment = enrolment::Fixture::new();
        let now = unix_now();
        let settings = Settings {
            enrolments: Some(enrolment.enrolments.clone()),
            revocations: enrolment.revocations.clone(),
            ..settings()
        };
        let ca = ca(now);
        let agent = Agent::new(&ca, "r-1", now);
        let mut registry = tidewatch_kit::metrics::Registry::default();
        let metrics = Metrics::register(registry.sub_registry_with_prefix("gateway"));
        Self { handler: V3Handler::new(&settings, RecordingIntake::default(), metrics), enrolment, ca, agent, registry }
    }

    fn request(&self, body: &[u8], counter: u64) -> Request<Full<Bytes>> {
        let spec =
            RequestSpec { path: CERTIFICATES_PATH, created: unix_now(), ..RequestSpec::heartbeat(body, counter) };
        self.agent.sign(&spec).map(Full::from)
    }

    async fn send_as(&self, agent: &Agent, request: Request<Full<Bytes>>) -> (u16, Value, bool) {
        let peer = peer(&self.handler, agent);
        let (response, is_last) = self.handler.handle(request, &peer).await;
        let (status, body) = read(response).await;
        (status, body, is_last)
    }

    /// Renews with a token of the runtime's own agent.
    async fn renew(&self, certificate: CertificateRequest, counter: u64) -> (u16, Value, bool) {
        self.renew_with(certificate, Some(self.enrolment.first.token()), counter).await
    }

    async fn renew_with(
        &self,
        certificate: CertificateRequest,
        token: Option<String>,
        counter: u64,
    ) -> (u16, Value, bool) {
        let request = RenewalRequest { certificate, token };
        self.send_as(&self.agent, self.request(&request.to_json().unwrap(), counter)).await
    }

    /// Status of the response to a heartbeat of an agent process, which has an epoch of its own.
    async fn beat(&self, agent: &Agent, epoch: u64, counter: u64) -> u16 {
        let epoch = Epoch::new(epoch);
        let mut body = heartbeat();
        body["epoch"] = json!(epoch);
        let body = body.to_string();
        let spec = RequestSpec { created: unix_now(), epoch, ..RequestSpec::heartbeat(body.as_bytes(), counter) };
        self.send_as(agent, agent.sign(&spec).map(Full::from)).await.0
    }

    fn refusals(&self, reason: &str) -> usize {
        let text = self.registry.encode().unwrap();
        let line = text.lines().find(|line| {
            line.starts_with(&format!("gateway_requests_refused_total{{reason=\"{reason}\",route=\"certificates\"}}"))
        });
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    }
}

#[tokio::test]
async fn certificate_is_renewed_by_a_request_signed_with_it() {
    let fixture = Renewals::new();
    for counter in 1..=2 {
        let (status, response, is_last) = fixture.renew(honest_request("r-1"), counter).await;
        assert_eq!((status, is_last), (200, false), "{response}");
        let response = CertificateResponse::parse(response.to_string().as_bytes()).unwrap();
        let leaf = certificates(response.chain.as_bytes()).unwrap().remove(0);
        assert_eq!(RuntimeCertificate::read(&leaf, &domain()).unwrap().runtime, fixture.agent.runtime);
    }
    assert_eq!(fixture.enrolment.first.call_counts(), (1, 2), "the runtime reviews each token");
}

#[tokio::test]
async fn renewal_without_a_token_leads_to_an_enrolment() {
    let fixture = Renewals::new();
    let (status, problem, is_last) = fixture.renew_with(honest_request("r-1"), None, 1).await;
    assert_eq!((status, is_last, fixture.refusals("token-absent")), (401, false, 1));
    assert!(problem["type"].as_str().unwrap().ends_with("/certificate"), "{problem}");
    assert_eq!(fixture.beat(&fixture.agent, 1, 2).await, 200, "an older agent goes on meanwhile");
}

/// The Kyma's access Secret points to another cluster now, or the key was copied: the sender has no token of the
/// runtime's agent.
#[tokio::test]
async fn renewal_with_a_token_of_another_cluster_ends_the_certificate() {
    let fixture = Renewals::new();
    let expired = fixture.enrolment.first.issuer().sign(&enrolment::claims(unix_now() - 100_000));
    assert_eq!(fixture.renew_with(honest_request("r-1"), Some(expired), 1).await.0, 401);
    assert_eq!(fixture.beat(&fixture.agent, 1, 2).await, 200, "an expired token proves nothing");

    let foreign = fixture.enrolment.second.token();
    assert_eq!(fixture.renew_with(honest_request("r-1"), Some(foreign), 3).await.0, 401);
    assert_eq!(fixture.beat(&fixture.agent, 1, 4).await, 401);
    assert_eq!(fixture.renew(honest_request("r-1"), 5).await.0, 401, "not even with a token of the runtime");
    let rightful = Agent::new(&fixture.ca, "r-1", unix_now());
    assert_eq!(fixture.beat(&rightful, 2, 1).await, 200);
}

#[tokio::test(start_paused = true)]
async fn two_processes_with_one_certificate_are_refused() {
    let fixture = Renewals::new();
    let refused = async |agent: &Agent, beats: std::ops::Range<u64>| {
        for counter in beats {
            for epoch in [1, 2] {
                tokio::time::advance(Duration::from_secs(15)).await;
                if fixture.beat(agent, epoch, counter).await == 401 {
                    return Some((epoch, counter));
                }
            }
        }
        None
    };
    let (first, _) = refused(&fixture.agent, 1..20).await.unwrap();
    assert_eq!(first, 1, "the epoch that came back");
    for (epoch, counter) in [(1, 100), (2, 100)] {
        assert_eq!(fixture.beat(&fixture.agent, epoch, counter).await, 401);
    }
    let rightful = Agent::new(&fixture.ca, "r-1", unix_now());
    for counter in 200..220 {
        tokio::time::advance(Duration::from_secs(30)).await;
        assert_eq!(fixture.beat(&rightful, 2, counter).await, 200, "it has enrolled again");
    }
}

#[tokio::test]
async fn each_refusal_of_a_renewal_has_its_status_and_counter() {
    let fixture = Renewals::new();
    let weak = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let body = |request: String| {
        let certificate = CertificateRequest { request, ..honest_request("r-1") };
        RenewalRequest { certificate, token: Some(fixture.enrolment.first.token()) }.to_json().unwrap()
    };
    for (counter, (body, status, reason)) in (1..).zip([
        (honest_request("r-2").to_json().unwrap(), 403, "source"),
        (body(request_for(&weak, |_| {})), 400, "request-key"),
        (body("nothing".to_owned()), 400, "request-malformed"),
        (b"{}".to_vec(), 400, "malformed"),
        (vec![b' '; MAX_REQUEST_BYTES + 1], 413, "too-large"),
    ]) {
        let (actual, problem, _) = fixture.send_as(&fixture.agent, fixture.request(&body, counter)).await;
        assert_eq!((actual, fixture.refusals(reason)), (status, 1), "{reason}: {problem}");
    }
    let unsigned = fixture
        .request(&honest_request("r-1").to_json().unwrap(), 20)
        .map(|_| Full::from(honest_request("r-1").to_json().unwrap()));
    assert_eq!(fixture.send_as(&fixture.agent, unsigned).await.0, 401);
    assert_eq!(fixture.refusals("digest"), 1);
    let stranger = Agent::new(&fixture.ca, "r-9", unix_now());
    let token = Some(fixture.enrolment.first.token());
    let body = RenewalRequest { certificate: honest_request("r-9"), token }.to_json().unwrap();
    let spec = RequestSpec { path: CERTIFICATES_PATH, created: unix_now(), ..RequestSpec::heartbeat(&body, 1) };
    assert_eq!(fixture.send_as(&stranger, stranger.sign(&spec).map(Full::from)).await.0, 404);
    assert_eq!(fixture.refusals("unknown-runtime"), 1);
    for counter in 30..40 {
        fixture.renew(honest_request("r-1"), counter).await;
    }
    assert_eq!(
        (fixture.renew(honest_request("r-1"), 41).await.0, fixture.refusals("certificates-rate") > 0),
        (429, true)
    );
}

#[tokio::test]
async fn renewal_route_is_absent_without_an_issuer() {
    let fixture = Renewals::new();
    let handler = V3Handler::new(&settings(), RecordingIntake::default(), metrics());
    let peer = peer(&handler, &fixture.agent);
    let request = fixture.request(&honest_request("r-1").to_json().unwrap(), 1);
    assert_eq!(read(handler.handle(request, &peer).await.0).await.0, 404);
}

#[tokio::test]
async fn requests_of_a_revoked_certificate_or_runtime_are_refused() {
    let fixture = Renewals::new();
    let leaf = tidewatch_contract::certificate::fingerprint(&fixture.agent.identity.chain[0]);
    let revoke = |key: &str| {
        let map = json!({"data": {key: "stolen"}});
        fixture.enrolment.revocations.set(Some(&serde_json::from_value(map).unwrap()));
    };
    for (counter, key) in (1..).zip([&*leaf, "r-1"]) {
        revoke(key);
        let (status, problem, is_last) = fixture.renew(honest_request("r-1"), counter).await;
        assert_eq!((status, is_last), (401, true));
        assert!(problem["type"].as_str().unwrap().ends_with("/certificate"), "{problem}");
    }
    assert_eq!(fixture.refusals("revoked"), 2);
    revoke("r-2");
    assert_eq!(fixture.renew(honest_request("r-1"), 9).await.0, 200);
}
