//! No agent poses as a replica, and no replica as an agent.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{HeaderValue, Request};
use http_body_util::Full;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
};
use rustls_pki_types::CertificateDer;
use tidewatch_contract::forwarded::CLIENT_CERT;
use tidewatch_trust::{Ca, SigningRequest, TrustBundle};
use tokio::time::timeout;

use super::{faults::is_temporary, testing::*};
use crate::{
    enrolment::tests::testing::{honest_request, unix_now},
    ports::{
        metrics::ReasonLabel,
        peer::ConnectedReplica,
        tests::testing::{Agent, ca, domain},
    },
    relay::LOST_PATH,
};

fn forwarded(mut request: Request<Full<Bytes>>, agent: &Agent, port: &'static str) -> Request<Full<Bytes>> {
    let value = format!(":{}:", STANDARD.encode(&agent.identity.chain[0]));
    request.headers_mut().append(CLIENT_CERT, value.parse().unwrap());
    request.headers_mut().insert("tidewatch-relay", HeaderValue::from_static(port));
    request
}

fn lost() -> Request<Full<Bytes>> {
    Request::post(format!("https://two{LOST_PATH}"))
        .header("tidewatch-relay", "lost")
        .body(Full::from(r#"[["r-1",0]]"#))
        .unwrap()
}

/// An agent's certificate chains to the roots of the replicas, and names none.
#[tokio::test]
async fn agent_is_refused_on_the_relay_port() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("two", "two");
    let victim = fleet.agent("r-1", "two");
    for request in
        [forwarded(events(&agent, 1), &agent, "event"), forwarded(events(&victim, 1), &victim, "event"), lost()]
    {
        let config = two.tls.client_as(&agent.identity, "two");
        if let Ok(mut sender) = Sender::open(two.relay_address, config).await {
            assert!(sender.send(request).await.is_err(), "the connection ends at once");
        }
    }
    let reason = ReasonLabel { reason: "not-admitted" };
    let ended = async {
        while two.relay_port.connections_ended.get_or_create(&reason).get() < 3 {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, ended).await.unwrap();
    let stranger = Agent::new(&ca(unix_now()), "r-1", unix_now());
    let opened = Sender::open(two.relay_address, two.tls.client_as(&stranger.identity, "two")).await;
    if let Ok(mut sender) = opened {
        assert!(sender.send(lost()).await.is_err());
    }
    assert_eq!(two.handshakes_failed("unknown-issuer"), 1);
    assert_eq!((two.intake.count(), two.intake.lost_connections()), (0, 0));
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn fields_of_a_replica_have_no_effect_on_the_event_port() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    let victim = fleet.agent("r-2", "two");
    for replica in [&two, &one] {
        let mut sender = replica.connect(&fleet, &agent).await;
        let forged = forwarded(events(&victim, 1), &victim, "event");
        assert_eq!(sender.send(forged).await.unwrap().status(), 401, "the signer is not the client of the connection");
    }
    assert_eq!(two.refused("signature-keyid"), 2, "through the other replica as well");
    assert_eq!(two.intake.count(), 0);
    let honest = forwarded(events(&agent, 2), &victim, "v2");
    assert_eq!(one.send(&fleet, &agent, honest).await.status(), 202, "its own certificate takes their place");
    assert_eq!(two.intake.received.lock()[0].0, "r-1");
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn connection_of_a_replica_ends_with_the_trust_in_its_root() {
    let (fleet, one, mut two) = Fleet::two().await;
    fleet.place("r-1", "two");
    let config = one.tls.client().config(&"two".parse().unwrap()).unwrap();
    let mut sender = Sender::open(two.relay_address, config).await.unwrap();
    assert_eq!(sender.send(lost()).await.unwrap().status(), 204);
    let old = fleet.ca.trust_bundle();
    let new = ca(unix_now()).trust_bundle();
    fleet.set_roots(old.with(&new));
    two.certificate.refresh(unix_now()).await;
    assert_eq!(sender.send(lost()).await.unwrap().status(), 204, "another root is trusted as well");
    fleet.set_roots(new);
    two.certificate.refresh(unix_now()).await;
    is_temporary(&sender.send(lost()).await.unwrap());
    sender.ends().await;
    assert_eq!(two.intake.lost_connections(), 2);
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn connected_replica_is_valid_until_its_certificate_ends() {
    let tls = Fleet::new().tls("one").await;
    let now = unix_now();
    let identity = tls.client().identity().clone();
    let read = |now| ConnectedReplica::read(&identity.chain, &domain(), tls.replicas(), now);
    let replica = read(now).unwrap();
    assert!(replica.is_valid(&tls.replicas(), now) && !replica.is_valid(&tls.replicas(), now + 8 * 24 * 3_600));
    assert!(!replica.is_valid(&tls.replicas(), now), "its connection ends");
    assert!(read(now + 8 * 24 * 3_600).is_none());
}

/// An intermediate authority of another root, and that root.
fn intermediate() -> (Ca, CertificateDer<'static>, TrustBundle) {
    let authority = |name: &str| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        (params, KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap())
    };
    let ((root, root_key), (params, key)) = (authority("root"), authority("intermediate"));
    let roots = TrustBundle::from_pem(root.self_signed(&root_key).unwrap().pem().as_bytes()).unwrap();
    let certificate = params.signed_by(&key, &Issuer::new(root, root_key)).unwrap();
    let ca = Ca::from_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).unwrap();
    (ca, certificate.der().clone(), roots)
}

/// As with cert-manager and an issuer below the root that the receivers trust.
#[tokio::test]
async fn certificate_of_an_intermediate_authority_is_accepted_through_another_replica() {
    let (ca, certificate, roots) = intermediate();
    let fleet = Fleet::trusting(&roots);
    let one = fleet.start("one", |_| {}).await;
    let two = fleet.start("two", |_| {}).await;
    let mut agent = Agent::new(&ca, "r-1", unix_now());
    agent.identity.chain.push(certificate);
    fleet.place("r-1", "two");
    for (counter, replica) in [(1, &two), (2, &one)] {
        assert_eq!(replica.send(&fleet, &agent, events(&agent, counter)).await.status(), 202);
        let mut sender = Sender::open(replica.v2_address, client(&fleet, &agent.identity)).await.unwrap();
        assert_eq!(sender.send(v2_event()).await.unwrap().status(), 200);
    }
    assert_eq!((two.intake.count(), two.v2_intake.0.lock().len()), (2, 2));
    one.stop().await;
    two.stop().await;
}

/// As while replicas with and without `--v2` run beside each other.
#[tokio::test]
async fn request_of_a_port_that_the_holder_does_not_serve_is_refused_for_a_while() {
    let mut fleet = Fleet::new();
    fleet.without_v2 = Some("two");
    let one = fleet.start("one", |_| {}).await;
    let two = fleet.start("two", |_| {}).await;
    let agent = fleet.agent("r-1", "two");
    let mut sender = Sender::open(one.v2_address, client(&fleet, &agent.identity)).await.unwrap();
    is_temporary(&sender.send(v2_event()).await.unwrap());
    one.stop().await;
    two.stop().await;
}

fn v2_event() -> Request<Full<Bytes>> {
    const EVENT: &str = r#"{"watched":{"Namespace":"kyma-system","Name":"default"},"watchedGvk":{"kind":"Kyma"}}"#;
    Request::post("https://kcp.test/v2/lifecycle-manager/event").body(Full::from(EVENT)).unwrap()
}

/// The certificate of a replica names no runtime, on any port.
#[tokio::test]
async fn replica_is_refused_as_an_agent() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    let config = || {
        let mut config = one.tls.client().config(&"two".parse().unwrap()).unwrap();
        config.dangerous().set_certificate_verifier(any_server(&fleet));
        config
    };
    let mut sender = Sender::open(two.event_address, config()).await.unwrap();
    let response = sender.send(forwarded(events(&agent, 1), &agent, "event")).await.unwrap();
    assert_eq!(response.status(), 403);
    sender.ends().await;
    let mut sender = Sender::open(two.v2_address, config()).await.unwrap();
    let event = Request::post("https://kcp.test/v2/lifecycle-manager/event").body(Full::from("{}")).unwrap();
    assert_eq!(sender.send(forwarded(event, &agent, "v2")).await.unwrap().status(), 400);
    assert_eq!((two.refused("identity"), two.intake.count()), (1, 0));
    assert!(two.v2_intake.0.lock().is_empty());
    one.stop().await;
    two.stop().await;
}

/// Verifies servers as an agent does.
fn any_server(fleet: &Fleet) -> std::sync::Arc<dyn rustls::client::danger::ServerCertVerifier> {
    let roots = fleet.ca.trust_bundle().store().unwrap();
    let builder =
        rustls::client::WebPkiServerVerifier::builder_with_provider(roots.into(), tidewatch_kit::tls::provider());
    builder.build().unwrap()
}

/// Enrolment issues for the key of a request alone, whatever names it has.
#[tokio::test]
async fn request_for_the_names_of_a_replica_yields_none() {
    use rcgen::SanType;
    let fleet = Fleet::new();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI("spiffe://kyma.local/replica/two".try_into().unwrap())];
    let request = params.serialize_request(&key).unwrap();
    let enrol =
        tidewatch_contract::enrolment::CertificateRequest { request: request.pem().unwrap(), ..honest_request("r-1") };
    let issued = fleet.enrolment.enrolments.enrol(&fleet.enrolment.first.token(), &enrol, None).await.unwrap();
    let leaf = tidewatch_kit::tls::certificates(issued.chain.as_bytes()).unwrap().remove(0);
    assert_eq!(tidewatch_trust::replica_of(&leaf, &domain()), None);
    assert!(SigningRequest::from_der(request.der()).is_ok());
}

/// A replica passes on whichever certificate the client has; the holder verifies it again.
#[tokio::test]
async fn certificates_that_a_replica_forwards_are_verified_again() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    let stranger = Agent::new(&ca(unix_now()), "r-1", unix_now());
    let config = one.tls.client().config(&"two".parse().unwrap()).unwrap();
    let mut sender = Sender::open(two.relay_address, config).await.unwrap();
    for (case, request, status) in [
        ("none", events(&agent, 1), 404),
        ("two", forwarded(forwarded(events(&agent, 1), &agent, "event"), &agent, "event"), 401),
        ("of another CA", forwarded(events(&stranger, 1), &stranger, "event"), 401),
        ("of another runtime", forwarded(events(&agent, 1), &fleet.agent("r-2", "two"), "event"), 401),
        ("an unknown port", forwarded(events(&agent, 1), &agent, "other"), 503),
        ("good", forwarded(events(&agent, 1), &agent, "event"), 202),
        ("a lost connection", lost(), 204),
    ] {
        assert_eq!(sender.send(request).await.unwrap().status(), status, "{case}");
    }
    assert_eq!((two.intake.count(), two.intake.lost_connections()), (1, 1));
    one.stop().await;
    two.stop().await;
}
