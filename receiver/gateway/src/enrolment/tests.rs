//! Enrolment and renewal in memory. The complete table of refusals is in the tests of the port.

pub(crate) mod testing;

use std::collections::HashSet;

use futures::FutureExt as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, SanType,
};
use serde_json::json;
use tidewatch_contract::certificate::RuntimeCertificate;
use tidewatch_kit::tls::{self, certificates};
use tokio::task::JoinSet;

use self::testing::{
    Behavior, Fixture, Issuer, LONG, certificate, claims, domain, honest_request, key, place, request_for, unix_now,
};
use super::*;

/// Parses the leaf of a response, and checks its bundle.
fn read(answer: &CertificateResponse) -> RuntimeCertificate {
    let chain = certificates(answer.chain.as_bytes()).unwrap();
    let bundle = certificates(answer.trust_bundle.as_bytes()).unwrap();
    assert_eq!(tidewatch_contract::certificate::trust_revision(&bundle), answer.trust_revision);
    tls::roots(&bundle).unwrap();
    RuntimeCertificate::read(&chain[0], &domain()).unwrap()
}

#[tokio::test]
async fn agent_gets_the_certificate_of_its_own_runtime() {
    let fixture = Fixture::new();
    let answer = fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-1"), None).await.unwrap();
    assert_eq!(read(&answer).runtime.as_str(), "r-1");
    assert_eq!((fixture.first.call_counts(), fixture.second.call_counts()), ((1, 1), (0, 0)));
    assert_eq!((fixture.count_issued(IssuanceKind::Enrolment), fixture.count_issued(IssuanceKind::Renewal)), (1, 0));
}

#[tokio::test]
async fn token_of_another_runtime_is_refused() {
    let fixture = Fixture::new();
    let refused = fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-2"), None).await;
    assert_eq!(refused, Err(EnrolmentError::Token(TokenError::Key)));
    // A key of the same id is not sufficient either.
    fixture.second.replace_issuer(Issuer::p256("a"));
    fixture.runtime_clients.set("k-2", &fixture.second, 2);
    let refused = fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-2"), None).await;
    assert_eq!(refused, Err(EnrolmentError::Token(TokenError::Signature)));
    assert_eq!((fixture.first.call_counts(), fixture.second.call_counts().1), ((0, 0), 0), "no token review");
}

#[tokio::test]
async fn names_in_a_request_are_ignored() {
    let fixture = Fixture::new();
    let pair = KeyPair::generate().unwrap();
    let greedy = |params: &mut CertificateParams| {
        params.distinguished_name.push(DnType::CommonName, "r-2");
        params.subject_alt_names = vec![SanType::URI(domain().uri(&"r-2".parse().unwrap()).try_into().unwrap())];
    };
    let request = CertificateRequest { runtime: "r-1".parse().unwrap(), request: request_for(&pair, greedy) };
    let answer = fixture.enrolments.enrol(&fixture.first.token(), &request, None).await.unwrap();
    let certificate = read(&answer);
    assert_eq!((certificate.runtime.as_str(), &*certificate.leaf.public_key), ("r-1", pair.public_key_raw()));
}

/// A request for signing or server usages gets a client certificate.
#[tokio::test]
async fn requested_usages_are_ignored() {
    let fixture = Fixture::new();
    let greedy = |params: &mut CertificateParams| {
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::Any];
    };
    let request = request_for(&KeyPair::generate().unwrap(), greedy);
    let request = CertificateRequest { runtime: "r-1".parse().unwrap(), request };
    let answer = fixture.enrolments.enrol(&fixture.first.token(), &request, None).await.unwrap();
    let leaf = certificates(answer.chain.as_bytes()).unwrap().remove(0);
    let (_, leaf) = x509_parser::parse_x509_certificate(&leaf).unwrap();
    let usage = leaf.key_usage().unwrap().unwrap().value;
    assert!(!leaf.is_ca() && usage.digital_signature() && !usage.key_cert_sign() && !usage.crl_sign());
    let extended = leaf.extended_key_usage().unwrap().unwrap().value;
    assert!(extended.client_auth && !extended.server_auth && !extended.any);
}

#[tokio::test]
async fn request_for_a_ca_is_refused_without_a_token_review() {
    let fixture = Fixture::new();
    let pair = KeyPair::generate().unwrap();
    let request = request_for(&pair, |params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained));
    let certificate_request = CertificateRequest { runtime: "r-1".parse().unwrap(), request: request.clone() };
    let refused = fixture.enrolments.enrol(&fixture.first.token(), &certificate_request, None).await;
    assert_eq!(refused, Err(EnrolmentError::Request(ParseRequestError::Authority)));
    assert_eq!(fixture.first.call_counts(), (1, 0), "its keys, and not its word");
    assert_eq!((fixture.count_issued(IssuanceKind::Enrolment), fixture.count_issued(IssuanceKind::Renewal)), (0, 0));
}

#[tokio::test]
async fn weak_and_stolen_keys_are_refused_without_a_token_review() {
    let fixture = Fixture::new();
    let weak = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let good = honest_request("r-1").request;
    let other = honest_request("r-1").request;
    let lines = |pem: &str| pem.lines().map(str::to_owned).collect::<Vec<_>>();
    // The key of one request with the signature of another.
    let mut mixed = lines(&good);
    let last = lines(&other).len() - 2;
    mixed[last] = lines(&other)[last].clone();
    for (request, expected) in [
        (request_for(&weak, |_| {}), EnrolmentError::Request(ParseRequestError::Key)),
        (mixed.join("\n"), EnrolmentError::Request(ParseRequestError::Signature)),
        ("nothing".to_owned(), EnrolmentError::Request(ParseRequestError::Parse)),
        (good.replace("CERTIFICATE REQUEST", "CERTIFICATE"), EnrolmentError::Request(ParseRequestError::Parse)),
    ] {
        let certificate_request = CertificateRequest { runtime: "r-1".parse().unwrap(), request };
        let refused = fixture.enrolments.enrol(&fixture.first.token(), &certificate_request, None).await;
        assert!(
            refused == Err(expected)
                || (expected == EnrolmentError::Request(ParseRequestError::Signature)
                    && refused == Err(EnrolmentError::Request(ParseRequestError::Parse))),
            "{refused:?}"
        );
    }
    assert_eq!(fixture.first.call_counts(), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn flood_of_forged_tokens_costs_a_runtime_one_fetch_and_locks_no_agent_out() {
    let fixture = Fixture::new();
    let forger = Issuer::p256("a");
    let unknown = Issuer::p256("b");
    let mut tasks = JoinSet::new();
    for turn in 0..1_000 {
        let token = if turn % 2 == 0 { forger.sign(&claims(unix_now())) } else { unknown.sign(&claims(unix_now())) };
        let enrolments = fixture.enrolments.clone();
        tasks.spawn(async move { enrolments.enrol(&token, &honest_request("r-1"), None).await });
    }
    let refused: Vec<_> = tasks.join_all().await.into_iter().map(Result::unwrap_err).collect();
    let kinds: HashSet<_> = refused.iter().map(ToString::to_string).collect();
    assert_eq!((refused.len(), kinds.len()), (1_000, 2), "{kinds:?}");
    assert_eq!(fixture.first.call_counts(), (1, 0), "one question about keys, and none about a token");
    fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-1"), None).await.unwrap();
    assert_eq!(fixture.first.call_counts(), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn rotated_key_of_the_runtime_is_found_within_a_minute() {
    let fixture = Fixture::new();
    fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-1"), None).await.unwrap();
    fixture.first.replace_issuer(Issuer::rsa("new"));
    for _ in 0..3 {
        let refused = fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-1"), None).await;
        assert_eq!(refused, Err(EnrolmentError::Token(TokenError::RecentKey)));
    }
    assert_eq!(fixture.first.call_counts(), (1, 1));
    tokio::time::advance(Duration::from_secs(60)).await;
    fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-1"), None).await.unwrap();
    assert_eq!(fixture.first.call_counts(), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn calls_to_an_unresponsive_runtime_back_off() {
    let fixture = Fixture::new();
    for behavior in [Behavior::Hung, Behavior::Failing(500), Behavior::Failing(403)] {
        fixture.first.set_behavior(behavior);
        for _ in 0..3 {
            let refused = fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-1"), None).await;
            assert_eq!(refused, Err(EnrolmentError::Unreachable), "{behavior:?}");
        }
        tokio::time::advance(LONG).await;
    }
    assert_eq!(fixture.first.call_counts(), (3, 0));
    assert!(
        fixture.enrolments.enrol(&fixture.second.token(), &honest_request("r-2"), None).await.is_ok(),
        "other runtimes are not affected"
    );
    fixture.first.set_behavior(Behavior::Well);
    fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-1"), None).await.unwrap();
    fixture.first.set_behavior(Behavior::Hung);
    let refused = fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-1"), None).await;
    assert_eq!(refused, Err(EnrolmentError::Unreachable), "the question about the token has a deadline, too");
}

#[tokio::test]
async fn token_review_is_decisive() {
    let fixture = Fixture::new();
    for (review, expected) in [
        (json!({"authenticated": false, "error": "pod is gone"}), TokenError::Unauthenticated),
        (
            json!({"authenticated": true, "audiences": ["spiffe://kyma.local/tidewatch"], "user": {"username": "admin"}}),
            TokenError::Other,
        ),
    ] {
        fixture.first.set_review(review);
        let refused = fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-1"), None).await;
        assert_eq!(refused, Err(EnrolmentError::Token(expected)));
    }
    assert_eq!(fixture.count_issued(IssuanceKind::Enrolment), 0);
}

#[tokio::test(start_paused = true)]
async fn repeated_request_is_served_within_the_runtimes_rate() {
    let fixture = Fixture::new();
    let token = fixture.first.token();
    let request = honest_request("r-1");
    let mut keys = HashSet::new();
    for _ in 0..10 {
        let answer = fixture.enrolments.enrol(&token, &request, None).await.unwrap();
        keys.insert(read(&answer).leaf.public_key);
    }
    assert_eq!(keys.len(), 1, "a replay only yields certificates of the same key");
    let refused = fixture.enrolments.enrol(&token, &request, None).await;
    assert!(matches!(refused, Err(EnrolmentError::Rate(_))), "{refused:?}");
    assert_eq!(fixture.first.call_counts(), (1, 10));
    assert!(fixture.enrolments.enrol(&fixture.second.token(), &honest_request("r-2"), None).await.is_ok());
    tokio::time::advance(Duration::from_secs(2)).await;
    assert!(fixture.enrolments.enrol(&token, &request, None).await.is_ok());
}

#[tokio::test]
async fn only_unrevoked_runtimes_of_exactly_one_kyma_are_served() {
    let fixture = Fixture::new();
    let map = json!({"data": {"r-1": "stolen cluster"}});
    fixture.revocations.set(Some(&serde_json::from_value(map).unwrap()));
    let token = fixture.first.token();
    assert_eq!(fixture.enrolments.enrol(&token, &honest_request("r-1"), None).await, Err(EnrolmentError::Revoked));
    assert_eq!(
        renew(&fixture, honest_request("r-1"), fixture.first.token()).await.err(),
        Some(EnrolmentError::Revoked)
    );
    fixture.revocations.set(None);
    fixture.enrolments.enrol(&token, &honest_request("r-1"), None).await.unwrap();
    place(&fixture.fleet, "k-3", "r-1");
    let refused = fixture.enrolments.enrol(&token, &honest_request("r-1"), None).await;
    assert_eq!(refused, Err(EnrolmentError::Placement(PlacementError::Ambiguous)));
    fixture.fleet.remove(&key("k-3"));
    fixture.fleet.remove(&key("k-1"));
    let refused = fixture.enrolments.enrol(&token, &honest_request("r-1"), None).await;
    assert_eq!(refused, Err(EnrolmentError::Placement(PlacementError::Unknown)));
    place(&fixture.fleet, "k-4", "r-1");
    let refused = fixture.enrolments.enrol(&token, &honest_request("r-1"), None).await;
    assert_eq!(refused, Err(EnrolmentError::NoAccess), "a Kyma without a usable Secret");
    fixture.runtime_clients.reduce("k-4");
    let refused = fixture.enrolments.enrol(&token, &honest_request("r-1"), None).await;
    assert_eq!(refused, Err(EnrolmentError::Unreachable), "one whose Secret has no body yet");
}

/// Otherwise two replicas could decide on one runtime.
#[tokio::test]
async fn runtimes_of_a_shard_that_is_drained_or_released_get_no_certificate() {
    let elsewhere = Some(EnrolmentError::Placement(PlacementError::Elsewhere));
    let fixture = Fixture::new();
    let [mine, other] = ["r-1", "r-2"].map(|runtime| fixture.fleet.shard_of(Some(&runtime.parse().unwrap()), ""));
    assert_ne!(mine, other);

    let fleet = fixture.fleet.clone();
    fixture.first.on_review(move || assert!(fleet.drain(mine).now_or_never().is_none(), "an enrolment is in progress"));
    let token = fixture.first.token();
    fixture.enrolments.enrol(&token, &honest_request("r-1"), None).await.unwrap();
    assert!(fixture.fleet.drain(mine).now_or_never().is_some());
    let before = fixture.first.call_counts();
    assert_eq!(fixture.enrolments.enrol(&token, &honest_request("r-1"), None).await.err(), elsewhere, "drained");
    assert_eq!(renew(&fixture, honest_request("r-1"), token.clone()).await.err(), elsewhere, "drained");
    fixture.fleet.release(mine);
    assert_eq!(fixture.enrolments.enrol(&token, &honest_request("r-1"), None).await.err(), elsewhere, "released");
    assert_eq!(renew(&fixture, honest_request("r-1"), token).await.err(), elsewhere, "released");
    assert_eq!(fixture.first.call_counts(), before, "the next holder asks the runtime");

    let fleet = fixture.fleet.clone();
    let token = fixture.second.token();
    fixture.second.on_review(move || drop(fleet.release(other)));
    let lost = fixture.enrolments.enrol(&token, &honest_request("r-2"), None).await;
    assert_eq!(lost.err(), elsewhere, "released during the review");
    // The first one, and the certificates with which the two renewals were requested.
    assert_eq!((fixture.count_issued(IssuanceKind::Enrolment), fixture.count_issued(IssuanceKind::Renewal)), (3, 0));
}

#[tokio::test]
async fn new_cluster_invalidates_tokens_of_the_old_one() {
    let fixture = Fixture::new();
    let old = fixture.first.token();
    fixture.enrolments.enrol(&old, &honest_request("r-1"), None).await.unwrap();
    let other = testing::FakeRuntime::new(Issuer::p256("a"));
    fixture.runtime_clients.set("k-1", &other, 2);
    let refused = fixture.enrolments.enrol(&old, &honest_request("r-1"), None).await;
    assert_eq!(refused, Err(EnrolmentError::Token(TokenError::Signature)), "the other cluster's keys are fetched");
    assert_eq!((fixture.first.call_counts(), other.call_counts()), ((1, 1), (1, 0)));
    fixture.enrolments.enrol(&other.token(), &honest_request("r-1"), None).await.unwrap();

    // Replaced during the review by the old cluster, which no longer counts.
    let runtime_clients = fixture.runtime_clients.clone();
    let third = testing::FakeRuntime::new(Issuer::p256("a"));
    other.on_review(move || runtime_clients.set("k-1", &third, 3));
    let refused = fixture.enrolments.enrol(&other.token(), &honest_request("r-1"), None).await;
    assert_eq!(refused, Err(EnrolmentError::Unreachable));
    assert_eq!(fixture.count_issued(IssuanceKind::Enrolment), 2);
}

async fn renew(
    fixture: &Fixture,
    certificate: CertificateRequest,
    token: String,
) -> Result<CertificateResponse, EnrolmentError> {
    let enrolled = fixture.enrolments.enrol(&fixture.second.token(), &honest_request("r-2"), None).await.unwrap();
    let leaf = Leaf { fingerprint: "f".to_owned(), ..read(&enrolled).leaf };
    fixture.enrolments.renew(&RenewalRequest { certificate, token: Some(token) }, &leaf).await
}

#[tokio::test]
async fn renewal_is_served_for_the_same_and_for_a_new_key() {
    let fixture = Fixture::new();
    let pair = KeyPair::generate().unwrap();
    for request in [request_for(&pair, |_| {}), request_for(&pair, |_| {}), honest_request("r-1").request] {
        let request = CertificateRequest { runtime: "r-1".parse().unwrap(), request };
        let answer = renew(&fixture, request, fixture.first.token()).await.unwrap();
        assert_eq!(read(&answer).runtime.as_str(), "r-1");
    }
    assert_eq!((fixture.count_issued(IssuanceKind::Renewal), fixture.first.call_counts()), (3, (1, 3)));
}

#[tokio::test(start_paused = true)]
async fn renewal_ends_the_certificate_only_if_its_token_is_certainly_foreign() {
    let RuntimeCertificate { runtime, leaf } = certificate("r-1", "f");
    for (is_refused, arrange) in [
        (false, (|fixture, _| fixture.first.set_behavior(Behavior::Failing(500))) as fn(&Fixture, &mut String)),
        (false, |fixture, _| fixture.first.set_behavior(Behavior::Hung)),
        (false, |_, token| token.truncate(10)),
        (true, |fixture, _| fixture.first.set_review(json!({"authenticated": false}))),
        (true, |fixture, token| *token = fixture.second.token()),
    ] {
        let fixture = Fixture::new();
        let mut token = fixture.first.token();
        arrange(&fixture, &mut token);
        assert!(renew(&fixture, honest_request("r-1"), token).await.is_err());
        assert_eq!(fixture.revocations.covers_leaf(&runtime, &leaf), is_refused);
    }
}

#[tokio::test(start_paused = true)]
async fn renewal_with_a_key_that_replaced_the_last_read_one_keeps_the_certificate() {
    let RuntimeCertificate { runtime, leaf } = certificate("r-1", "f");
    let fixture = Fixture::new();
    fixture.enrolments.enrol(&fixture.first.token(), &honest_request("r-1"), None).await.unwrap();
    fixture.first.replace_issuer(Issuer::rsa("new"));
    let refused = renew(&fixture, honest_request("r-1"), fixture.first.token()).await;
    assert_eq!(refused.unwrap_err(), EnrolmentError::Token(TokenError::RecentKey));
    assert!(!fixture.revocations.covers_leaf(&runtime, &leaf));
    tokio::time::advance(Duration::from_secs(60)).await;
    renew(&fixture, honest_request("r-1"), fixture.first.token()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn addresses_are_limited_only_if_configured() {
    let limited = Fixture::limited(Some(2));
    let free = Fixture::new();
    let [a, b, c] = ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"].map(|text| Some(text.parse().unwrap()));
    assert!((0..2).all(|_| limited.enrolments.admit(a).is_ok()));
    assert!(matches!(limited.enrolments.admit(b), Err(EnrolmentError::Address(_))), "the same network");
    assert!(limited.enrolments.admit(c).is_ok() && limited.enrolments.admit(None).is_ok());
    let mapped = Some("::ffff:192.0.2.1".parse().unwrap());
    assert!((0..2).all(|_| limited.enrolments.admit(mapped).is_ok()));
    assert!(limited.enrolments.admit(Some("192.0.2.1".parse().unwrap())).is_err());
    assert!((0..100).all(|_| free.enrolments.admit(a).is_ok()));
}
