//! Who gets a certificate and who does not, in memory. The whole table of refusals is in the tests of the port.

pub(crate) mod testing;

use std::collections::HashSet;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, SanType,
};
use serde_json::json;
use tidewatch_shared::{
    certificate::RuntimeCertificate,
    tls::{self, certificates},
};
use tokio::task::JoinSet;

use self::testing::{Issuer, LONG, Mood, Room, asked, claims, domain, key, place, request_for, unix_now};
use super::*;

/// The runtime and the key that a chain names, which must hold by its own bundle.
fn read(answer: &CertificateResponse) -> RuntimeCertificate {
    let chain = certificates(answer.chain.as_bytes()).unwrap();
    let bundle = certificates(answer.trust_bundle.as_bytes()).unwrap();
    assert_eq!(tidewatch_shared::certificate::trust_revision(&bundle), answer.trust_revision);
    tls::roots(&bundle).unwrap();
    RuntimeCertificate::read(&chain[0], &domain()).unwrap()
}

#[tokio::test]
async fn an_agent_gets_the_certificate_of_its_own_runtime() {
    let room = Room::new();
    let answer = room.enrolments.enrol(&room.first.token(), &asked("r-1"), None).await.unwrap();
    assert_eq!(read(&answer).runtime.as_str(), "r-1");
    assert_eq!((room.first.asked(), room.second.asked()), ((1, 1), (0, 0)));
    assert_eq!((room.metrics.count_issued(By::Enrolment), room.metrics.count_issued(By::Renewal)), (1, 0));
}

#[tokio::test]
async fn nobody_gets_anothers_certificate() {
    let room = Room::new();
    let refused = room.enrolments.enrol(&room.first.token(), &asked("r-2"), None).await;
    assert_eq!(refused, Err(Refused::Token(InvalidToken::Key)));
    // The same name of a key proves nothing either.
    room.second.replace_issuer(Issuer::p256("a"));
    room.landscape.set("k-2", &room.second, 2);
    let refused = room.enrolments.enrol(&room.first.token(), &asked("r-2"), None).await;
    assert_eq!(refused, Err(Refused::Token(InvalidToken::Signature)));
    assert_eq!((room.first.asked(), room.second.asked().1), ((0, 0), 0), "nobody was asked about the token");
}

#[tokio::test]
async fn names_and_uses_in_a_request_are_not_taken_over() {
    let room = Room::new();
    let pair = KeyPair::generate().unwrap();
    let greedy = |params: &mut CertificateParams| {
        params.distinguished_name.push(DnType::CommonName, "r-2");
        params.subject_alt_names = vec![SanType::URI(domain().uri(&"r-2".parse().unwrap()).try_into().unwrap())];
    };
    let request = CertificateRequest { runtime: "r-1".parse().unwrap(), request: request_for(&pair, greedy) };
    let answer = room.enrolments.enrol(&room.first.token(), &request, None).await.unwrap();
    let certificate = read(&answer);
    assert_eq!((certificate.runtime.as_str(), &*certificate.leaf.public_key), ("r-1", pair.public_key_raw()));
}

/// Whoever asks to sign, or to serve, gets the certificate of a client.
#[tokio::test]
async fn uses_that_a_request_asks_for_are_not_taken_over() {
    let room = Room::new();
    let greedy = |params: &mut CertificateParams| {
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::Any];
    };
    let request = request_for(&KeyPair::generate().unwrap(), greedy);
    let request = CertificateRequest { runtime: "r-1".parse().unwrap(), request };
    let answer = room.enrolments.enrol(&room.first.token(), &request, None).await.unwrap();
    let leaf = certificates(answer.chain.as_bytes()).unwrap().remove(0);
    let (_, leaf) = x509_parser::parse_x509_certificate(&leaf).unwrap();
    let usage = leaf.key_usage().unwrap().unwrap().value;
    assert!(!leaf.is_ca() && usage.digital_signature() && !usage.key_cert_sign() && !usage.crl_sign());
    let extended = leaf.extended_key_usage().unwrap().unwrap().value;
    assert!(extended.client_auth && !extended.server_auth && !extended.any);
}

#[tokio::test]
async fn a_request_for_a_ca_gets_nothing_and_the_runtime_is_not_asked() {
    let room = Room::new();
    let pair = KeyPair::generate().unwrap();
    let request = request_for(&pair, |params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained));
    let asked = CertificateRequest { runtime: "r-1".parse().unwrap(), request: request.clone() };
    let refused = room.enrolments.enrol(&room.first.token(), &asked, None).await;
    assert_eq!(refused, Err(Refused::RequestAuthority));
    assert_eq!(room.first.asked(), (1, 0), "its keys, and not its word");
    let renewal = room.enrolments.office().renew(&asked.runtime, &request).await;
    assert_eq!(renewal, Err(Refused::RequestAuthority));
    assert_eq!((room.metrics.count_issued(By::Enrolment), room.metrics.count_issued(By::Renewal)), (0, 0));
}

#[tokio::test]
async fn weak_and_stolen_keys_get_nothing_and_the_runtime_is_not_asked() {
    let room = Room::new();
    let weak = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let good = asked("r-1").request;
    let other = asked("r-1").request;
    let lines = |pem: &str| pem.lines().map(str::to_owned).collect::<Vec<_>>();
    // The key of one request under the signature of another.
    let (mut mixed, last) = (lines(&good), lines(&other).len() - 2);
    mixed[last] = lines(&other)[last].clone();
    for (request, why) in [
        (request_for(&weak, |_| {}), Refused::RequestKey),
        (mixed.join("\n"), Refused::RequestSignature),
        ("nothing".to_owned(), Refused::Request),
        (good.replace("CERTIFICATE REQUEST", "CERTIFICATE"), Refused::Request),
    ] {
        let asked = CertificateRequest { runtime: "r-1".parse().unwrap(), request };
        let refused = room.enrolments.enrol(&room.first.token(), &asked, None).await;
        assert!(
            refused == Err(why) || (why == Refused::RequestSignature && refused == Err(Refused::Request)),
            "{refused:?}"
        );
    }
    assert_eq!(room.first.asked(), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_forgeries_costs_a_runtime_nothing_and_locks_nobody_out() {
    let room = Room::new();
    let forger = Issuer::p256("a");
    let unknown = Issuer::p256("b");
    let mut tasks = JoinSet::new();
    for turn in 0..1_000 {
        let token = if turn % 2 == 0 { forger.sign(&claims(unix_now())) } else { unknown.sign(&claims(unix_now())) };
        let enrolments = room.enrolments.clone();
        tasks.spawn(async move { enrolments.enrol(&token, &asked("r-1"), None).await });
    }
    let refused: Vec<_> = tasks.join_all().await.into_iter().map(Result::unwrap_err).collect();
    let kinds: HashSet<_> = refused.iter().map(ToString::to_string).collect();
    assert_eq!((refused.len(), kinds.len()), (1_000, 2), "{kinds:?}");
    assert_eq!(room.first.asked(), (1, 0), "one question about keys, and none about a token");
    room.enrolments.enrol(&room.first.token(), &asked("r-1"), None).await.unwrap();
    assert_eq!(room.first.asked(), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_new_key_of_the_runtime_is_found_within_a_minute() {
    let room = Room::new();
    room.enrolments.enrol(&room.first.token(), &asked("r-1"), None).await.unwrap();
    room.first.replace_issuer(Issuer::rsa("new"));
    for _ in 0..3 {
        let refused = room.enrolments.enrol(&room.first.token(), &asked("r-1"), None).await;
        assert_eq!(refused, Err(Refused::Token(InvalidToken::Key)));
    }
    assert_eq!(room.first.asked(), (1, 1));
    tokio::time::advance(Duration::from_secs(60)).await;
    room.enrolments.enrol(&room.first.token(), &asked("r-1"), None).await.unwrap();
    assert_eq!(room.first.asked(), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_does_not_answer_is_asked_less_and_less() {
    let room = Room::new();
    for mood in [Mood::Hung, Mood::Failing(500), Mood::Failing(403)] {
        room.first.set_mood(mood);
        for _ in 0..3 {
            let refused = room.enrolments.enrol(&room.first.token(), &asked("r-1"), None).await;
            assert_eq!(refused, Err(Refused::Unreachable), "{mood:?}");
        }
        tokio::time::advance(LONG).await;
    }
    assert_eq!(room.first.asked(), (3, 0));
    assert!(room.enrolments.enrol(&room.second.token(), &asked("r-2"), None).await.is_ok(), "nobody else is disturbed");
    room.first.set_mood(Mood::Well);
    room.enrolments.enrol(&room.first.token(), &asked("r-1"), None).await.unwrap();
    room.first.set_mood(Mood::Hung);
    let refused = room.enrolments.enrol(&room.first.token(), &asked("r-1"), None).await;
    assert_eq!(refused, Err(Refused::Unreachable), "the question about the token has a deadline, too");
}

#[tokio::test]
async fn the_runtimes_word_on_the_token_is_the_last() {
    let room = Room::new();
    for (review, why) in [
        (json!({"authenticated": false, "error": "pod is gone"}), InvalidToken::Unauthenticated),
        (
            json!({"authenticated": true, "audiences": ["tidewatch"], "user": {"username": "admin"}}),
            InvalidToken::Other,
        ),
    ] {
        room.first.set_review(review);
        let refused = room.enrolments.enrol(&room.first.token(), &asked("r-1"), None).await;
        assert_eq!(refused, Err(Refused::Token(why)));
    }
    assert_eq!(room.metrics.count_issued(By::Enrolment), 0);
}

#[tokio::test(start_paused = true)]
async fn the_same_request_may_come_again_within_the_rate_of_its_runtime() {
    let room = Room::new();
    let (token, request) = (room.first.token(), asked("r-1"));
    let mut keys = HashSet::new();
    for _ in 0..10 {
        let answer = room.enrolments.enrol(&token, &request, None).await.unwrap();
        keys.insert(read(&answer).leaf.public_key);
    }
    assert_eq!(keys.len(), 1, "whoever replays gets nothing but certificates of a key that it has not");
    let refused = room.enrolments.enrol(&token, &request, None).await;
    assert!(matches!(refused, Err(Refused::Rate(_))), "{refused:?}");
    assert_eq!(room.first.asked(), (1, 10));
    assert!(room.enrolments.enrol(&room.second.token(), &asked("r-2"), None).await.is_ok());
    tokio::time::advance(Duration::from_secs(2)).await;
    assert!(room.enrolments.enrol(&token, &request, None).await.is_ok());
}

#[tokio::test]
async fn only_a_runtime_of_exactly_one_kyma_that_is_not_revoked_is_served() {
    let room = Room::new();
    let map = json!({"data": {"r-1": "stolen cluster"}});
    room.revocations.set(Some(&serde_json::from_value(map).unwrap()));
    let token = room.first.token();
    assert_eq!(room.enrolments.enrol(&token, &asked("r-1"), None).await, Err(Refused::Revoked));
    assert_eq!(room.office.renew(&"r-1".parse().unwrap(), &asked("r-1").request).await, Err(Refused::Revoked));
    room.revocations.set(None);
    room.enrolments.enrol(&token, &asked("r-1"), None).await.unwrap();
    place(&room.hub, "k-3", "r-1");
    let refused = room.enrolments.enrol(&token, &asked("r-1"), None).await;
    assert_eq!(refused, Err(Refused::Unplaced(Unplaced::Ambiguous)));
    room.hub.remove(&key("k-3"));
    room.hub.remove(&key("k-1"));
    let refused = room.enrolments.enrol(&token, &asked("r-1"), None).await;
    assert_eq!(refused, Err(Refused::Unplaced(Unplaced::Unknown)));
    place(&room.hub, "k-4", "r-1");
    let refused = room.enrolments.enrol(&token, &asked("r-1"), None).await;
    assert_eq!(refused, Err(Refused::NoAccess), "a Kyma without a usable Secret");
}

#[tokio::test]
async fn a_kubeconfig_of_another_cluster_leaves_the_old_ones_tokens_worthless() {
    let room = Room::new();
    let old = room.first.token();
    room.enrolments.enrol(&old, &asked("r-1"), None).await.unwrap();
    let other = testing::Runtime::new(Issuer::p256("a"));
    room.landscape.set("k-1", &other, 2);
    let refused = room.enrolments.enrol(&old, &asked("r-1"), None).await;
    assert_eq!(refused, Err(Refused::Token(InvalidToken::Signature)), "the other cluster's keys are asked for");
    assert_eq!((room.first.asked(), other.asked()), ((1, 1), (1, 0)));
    room.enrolments.enrol(&other.token(), &asked("r-1"), None).await.unwrap();

    // Swapped while the old cluster is asked: its word counts no longer.
    let (landscape, third) = (room.landscape.clone(), testing::Runtime::new(Issuer::p256("a")));
    other.on_review(move || landscape.set("k-1", &third, 3));
    let refused = room.enrolments.enrol(&other.token(), &asked("r-1"), None).await;
    assert_eq!(refused, Err(Refused::Unreachable));
    assert_eq!(room.metrics.count_issued(By::Enrolment), 2);
}

#[tokio::test]
async fn a_renewal_is_served_for_the_same_key_and_for_a_new_one() {
    let room = Room::new();
    let (runtime, pair) = ("r-1".parse().unwrap(), KeyPair::generate().unwrap());
    for request in [request_for(&pair, |_| {}), request_for(&pair, |_| {}), asked("r-1").request] {
        let answer = room.office.renew(&runtime, &request).await.unwrap();
        assert_eq!(read(&answer).runtime, runtime);
    }
    assert_eq!((room.metrics.count_issued(By::Renewal), room.first.asked()), (3, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn addresses_are_limited_only_where_that_is_wanted() {
    let (limited, free) = (Room::limited(Some(2)), Room::new());
    let [a, b, c] = ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"].map(|text| Some(text.parse().unwrap()));
    assert!((0..2).all(|_| limited.enrolments.admit(a).is_ok()));
    assert!(matches!(limited.enrolments.admit(b), Err(Refused::Address(_))), "the same network");
    assert!(limited.enrolments.admit(c).is_ok() && limited.enrolments.admit(None).is_ok());
    let mapped = Some("::ffff:192.0.2.1".parse().unwrap());
    assert!((0..2).all(|_| limited.enrolments.admit(mapped).is_ok()));
    assert!(limited.enrolments.admit(Some("192.0.2.1".parse().unwrap())).is_err());
    assert!((0..100).all(|_| free.enrolments.admit(a).is_ok()));
}
