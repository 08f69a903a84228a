use std::{fs, path::Path};

use clap::Parser;
use rustls::ServerConfig;
use tidewatch_cluster::testing::Folder;
use tidewatch_contract::{admin::rotation::PhaseName, certificate::Leaf};
use tidewatch_kit::{metrics::Registry, tls};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;
use crate::{
    CA_VALIDITY, Ca, Flags, Metrics, SERVER_VALIDITY, Setup, TlsFlags, TrustBundle,
    ca_state::{Phase, Root},
    testing::FakeKcp,
};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    flags: Flags,
    #[command(flatten)]
    tls: TlsFlags,
}

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

async fn open(kcp: &FakeKcp, arguments: &[String]) -> anyhow::Result<(TlsState, CertificateReloader)> {
    let Line { flags, tls } = Line::parse_from(std::iter::once("x".to_owned()).chain(arguments.iter().cloned()));
    let domain = "kyma.local".parse().unwrap();
    let names = vec!["localhost".try_into().unwrap()];
    let setup = Setup { flags: &flags, tls: &tls, names, domain: &domain, namespace: "kcp-system" };
    crate::open(setup, kcp.client(), Metrics::default()).await
}

/// Leaf that a client with these roots accepts; `None` if it rejects the server.
async fn accepted_leaf(config: &Arc<ServerConfig>, roots: &TrustBundle) -> Option<Leaf> {
    let (client, server) = tokio::io::duplex(1 << 16);
    let accept = TlsAcceptor::from(config.clone()).accept(server);
    let connector = TlsConnector::from(Arc::new(tls::client(None, roots.store().unwrap()).unwrap()));
    let connect = connector.connect("localhost".try_into().unwrap(), client);
    let (_, connected) = tokio::join!(accept, connect);
    let connected = connected.ok()?;
    Leaf::read(&connected.get_ref().1.peer_certificates()?[0]).ok()
}

fn metric(reloader: &CertificateReloader, line: &str) -> bool {
    let mut registry = Registry::default();
    reloader.tls_state.metrics.register_in(registry.sub_registry_with_prefix("tidewatch"));
    registry.encode().unwrap().lines().any(|exported| exported == line)
}

#[tokio::test]
async fn secret_changes_are_applied_and_unusable_content_changes_nothing() {
    let kcp = FakeKcp::default();
    let (tls_state, mut reloader) = open(&kcp, &[]).await.unwrap();
    let first = tls_state.trust().borrow().clone();
    assert!(accepted_leaf(&tls_state.tokens.load(), &first.agents).await.is_some());
    reloader.apply_secret(kcp.secret().as_ref(), now());
    assert!(
        matches!(&*tls_state.secret_status().borrow(), CaSecretStatus::Good(_))
            && metric(&reloader, "tidewatch_pki_ca_secret_good 1")
    );

    let good = kcp.secret().unwrap();
    kcp.set("state.json", b"{}");
    for _ in 0..3 {
        reloader.apply_secret(kcp.secret().as_ref(), now());
    }
    assert!(matches!(&*tls_state.secret_status().borrow(), CaSecretStatus::Refused));
    assert!(
        metric(&reloader, "tidewatch_pki_ca_secret_refused_total{reason=\"state\"} 1"),
        "each content is logged once"
    );
    assert!(metric(&reloader, "tidewatch_pki_ca_secret_good 0"));
    assert_eq!(*tls_state.trust().borrow(), first);

    reloader.apply_secret(None, now());
    assert!(matches!(&*tls_state.secret_status().borrow(), CaSecretStatus::Lost));
    assert_eq!(*tls_state.trust().borrow(), first);

    kcp.edit(|secret| secret.data = good.data);
    reloader.apply_secret(kcp.secret().as_ref(), now());
    assert!(matches!(&*tls_state.secret_status().borrow(), CaSecretStatus::Good(_)), "restored");
    assert_eq!(*tls_state.trust().borrow(), first);

    // Another CA, as after a restore of another backup: its leaf is served, and only it is trusted.
    let other = CaState::steady(Root::generate(CA_VALIDITY, now()).unwrap(), now());
    kcp.edit(|secret| secret.data = Some(other.write()));
    reloader.apply_secret(kcp.secret().as_ref(), now());
    let second = tls_state.trust().borrow().clone();
    assert_eq!(second.issuer.as_ref(), Some(&other.target().id));
    let leaf = accepted_leaf(&tls_state.tokens.load(), &second.agents).await.unwrap();
    assert_eq!(leaf.authority.as_ref(), Some(&other.target().id));
    assert!(accepted_leaf(&tls_state.tokens.load(), &first.agents).await.is_none());
}

#[tokio::test]
async fn each_phase_takes_effect_atomically() {
    let kcp = FakeKcp::default();
    let (tls_state, mut reloader) = open(&kcp, &[]).await.unwrap();
    let root = kcp.ca_state().target().clone();
    let next = Root::generate(CA_VALIDITY, now()).unwrap();
    let leaves_end = now() + 86_400;
    for (phase, issuing, serving) in [
        (Phase::Spread { next: next.clone() }, &root, &root),
        (Phase::Reissue { next: next.clone(), leaves_end }, &next, &root),
        (Phase::Retire { old: root.ca.trust_bundle(), leaves_end }, &next, &next),
        (Phase::Steady, &next, &next),
    ] {
        let state = CaState { root: serving.clone(), phase, since: now(), force_after: None };
        kcp.edit(|secret| secret.data = Some(state.write()));
        reloader.apply_secret(kcp.secret().as_ref(), now());
        assert_eq!(**tls_state.trust().borrow(), state.trust(), "{state:?}");
        let leaf = accepted_leaf(&tls_state.tokens.load(), &state.trust().agents).await.unwrap();
        assert_eq!(leaf.authority.as_ref(), Some(&serving.id), "{state:?}");
        let request = rcgen::CertificateParams::default();
        let request = request.serialize_request(&rcgen::KeyPair::generate().unwrap()).unwrap();
        let request = crate::SigningRequest::from_der(request.der()).unwrap();
        let issued = tls_state.authority.as_ref().unwrap().issue(&"r-1".parse().unwrap(), &request).await.unwrap();
        let leaf = tls::certificates(issued.chain.as_bytes()).unwrap().remove(0);
        assert_eq!(Leaf::read(&leaf).unwrap().authority.as_ref(), Some(&issuing.id), "{state:?}");
    }
}

#[tokio::test]
async fn server_leaf_is_renewed_after_two_thirds_of_its_life() {
    let kcp = FakeKcp::default();
    let (tls_state, mut reloader) = open(&kcp, &["--server-certificate-validity-seconds=90".to_owned()]).await.unwrap();
    let trust = tls_state.trust().borrow().clone();
    let first = accepted_leaf(&tls_state.tokens.load(), &trust.agents).await.unwrap();
    let begun = now();
    reloader.check_age(begun + 55);
    let same = accepted_leaf(&tls_state.tokens.load(), &trust.agents).await.unwrap();
    assert_eq!(same.fingerprint, first.fingerprint);
    reloader.check_age(begun + 61);
    let renewed = accepted_leaf(&tls_state.tokens.load(), &trust.agents).await.unwrap();
    assert!(renewed.fingerprint != first.fingerprint && renewed.not_after >= begun + 61 + 90);
}

#[tokio::test]
async fn first_root_to_expire_is_shown_and_a_secret_that_is_not_used_is_no_fault() {
    let folder = Folder::new("pki-end");
    let kcp = FakeKcp::default();
    let begun = now();
    let ends = |reloader: &CertificateReloader, end: i64| {
        metric(reloader, &format!("tidewatch_pki_root_end_timestamp_seconds {end}"))
    };
    let ca = Ca::generate("files", begun, CA_VALIDITY).unwrap();
    let pair = ca.make_server(&["localhost".try_into().unwrap()], begun, SERVER_VALIDITY).unwrap();
    let roots = folder.put("r", ca.certificate_pem());
    let chain = folder.put("c", &pair.chain);
    let key = folder.put("k", &pair.key);
    let arguments = [flag("tls-cert", &chain), flag("tls-key", &key), flag("client-ca", &roots)];
    let (_, reloader) = open(&kcp, &arguments).await.unwrap();
    assert!(ends(&reloader, ca.not_after()) && metric(&reloader, "tidewatch_pki_ca_secret_good 1"));

    let (_, mut reloader) = open(&kcp, &[]).await.unwrap();
    let root = kcp.ca_state().target().clone();
    let next = Root::generate(CA_VALIDITY * 2, begun).unwrap();
    let ages = [
        (Phase::Steady, root.clone(), &root),
        (Phase::Spread { next: next.clone() }, root.clone(), &root),
        (Phase::Retire { old: root.ca.trust_bundle(), leaves_end: begun + 60 }, next.clone(), &next),
    ];
    for (phase, serving, first) in ages {
        let state = CaState { root: serving, phase, since: begun, force_after: None };
        kcp.edit(|secret| secret.data = Some(state.write()));
        reloader.apply_secret(kcp.secret().as_ref(), begun);
        assert!(ends(&reloader, first.ca.not_after()), "{state:?}");
    }
}

#[tokio::test]
async fn certificate_close_to_expiry_sets_the_gauge() {
    const DAY: i64 = 86_400;
    let folder = Folder::new("pki-close");
    let kcp = FakeKcp::default();
    let begun = now();
    let ca = Ca::generate("files", begun, CA_VALIDITY).unwrap();
    let roots = folder.put("r", ca.certificate_pem());
    for (days, close) in [(90, 14), (30, 5)] {
        let life = Duration::from_secs(days * 86_400);
        let pair = ca.make_server(&["localhost".try_into().unwrap()], begun, life).unwrap();
        let chain = folder.put("c", &pair.chain);
        let key = folder.put("k", &pair.key);
        let arguments = [flag("tls-cert", &chain), flag("tls-key", &key), flag("client-ca", &roots)];
        let (_, mut reloader) = open(&kcp, &arguments).await.unwrap();
        let mut is_close = |at| {
            reloader.check_age(at);
            let mut registry = Registry::default();
            reloader.tls_state.metrics.lifecycle_manager.register_in(&mut registry);
            let page = registry.encode().unwrap();
            page.lines().any(|line| line == "lifecycle_mgr_gateway_secret_server_cert_close_to_expiry 1")
        };
        let end = begun + DAY * days.cast_signed();
        let ages = [begun, end - (close + 1) * DAY, end - (close - 1) * DAY, end + DAY];
        assert_eq!(ages.map(&mut is_close), [false, false, true, true], "{days} days");
    }
}

#[tokio::test]
async fn expired_ca_is_replaced_at_the_start() {
    let kcp = FakeKcp::default();
    let dead = Root::generate(Duration::from_secs(60), now() - 3_600).unwrap();
    kcp.edit(|secret| secret.data = Some(CaState::steady(dead.clone(), now() - 3_600).write()));
    let (tls_state, _) = open(&kcp, &[]).await.unwrap();
    assert_ne!(kcp.ca_state().target().id, dead.id);
    assert_eq!(tls_state.trust().borrow().issuer.as_ref(), Some(&kcp.ca_state().target().id));
    assert_eq!(kcp.ca_state().name(), PhaseName::Steady);
}

#[tokio::test]
async fn expired_old_root_of_a_rotation_is_retired_at_the_start() {
    let leaves_end = now() + 86_400;
    let next = Root::generate(CA_VALIDITY, now()).unwrap();
    for phase in [Phase::Spread { next: next.clone() }, Phase::Reissue { next: next.clone(), leaves_end }] {
        let kcp = FakeKcp::default();
        let dead = Root::generate(Duration::from_secs(60), now() - 3_600).unwrap();
        let state = CaState { root: dead, phase, since: now() - 3_600, force_after: None };
        kcp.edit(|secret| secret.data = Some(state.write()));
        let (tls_state, _) = open(&kcp, &[]).await.unwrap();
        assert_eq!((kcp.ca_state().target().id.clone(), kcp.ca_state().name()), (next.id.clone(), PhaseName::Retire));
        let trust = tls_state.trust().borrow().clone();
        let leaf = accepted_leaf(&tls_state.tokens.load(), &trust.agents).await.unwrap();
        assert_eq!(leaf.authority.as_ref(), Some(&next.id));
    }
}

#[tokio::test]
async fn secret_that_could_not_be_used_yet_is_tried_again() {
    let kcp = FakeKcp::default();
    let (tls_state, mut reloader) = open(&kcp, &[]).await.unwrap();
    // A replica whose clock is an hour ahead generated the root.
    let ahead = CaState::steady(Root::generate(CA_VALIDITY, now() + 3_600).unwrap(), now());
    kcp.edit(|secret| secret.data = Some(ahead.write()));
    reloader.apply_secret(kcp.secret().as_ref(), now());
    assert!(matches!(&*tls_state.secret_status().borrow(), CaSecretStatus::Refused));
    reloader.check_age(now() + 60);
    assert!(matches!(&*tls_state.secret_status().borrow(), CaSecretStatus::Refused));
    reloader.check_age(now() + 3_600);
    assert!(matches!(&*tls_state.secret_status().borrow(), CaSecretStatus::Good(_)));
    assert_eq!(tls_state.trust().borrow().issuer.as_ref(), Some(&ahead.target().id));
}

fn flag(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}

#[tokio::test]
async fn valid_files_are_reloaded_and_invalid_ones_keep_the_last_good_content() {
    let folder = Folder::new("pki-files");
    let kcp = FakeKcp::default();
    let ca = Ca::generate("files", now() - 50 * 86_400, CA_VALIDITY).unwrap();
    let make = |at, name: &str| ca.make_server(&[name.try_into().unwrap()], at, SERVER_VALIDITY).unwrap();
    let first = make(now(), "localhost");
    let put = |pair: &PemIdentity| (folder.put("c", &pair.chain), folder.put("k", &pair.key));
    let (chain, key) = put(&first);
    let roots = folder.put("r", ca.certificate_pem());
    let files = [flag("tls-cert", &chain), flag("tls-key", &key)];
    let arguments = [files.as_slice(), &[flag("client-ca", &roots)]].concat();
    let (tls_state, mut reloader) = open(&kcp, &arguments).await.unwrap();
    assert!(tls_state.authority.is_none() && kcp.calls().is_empty(), "with files KCP is not called");
    let trust = tls_state.trust().borrow().clone();
    let fingerprint = async || accepted_leaf(&tls_state.tokens.load(), &trust.agents).await.unwrap().fingerprint;
    let before = fingerprint().await;
    reloader.reload_files(now());
    assert_eq!(fingerprint().await, before);

    let second = make(now(), "localhost");
    folder.put("c", &second.chain);
    reloader.reload_files(now());
    reloader.reload_files(now());
    assert_eq!(fingerprint().await, before, "another one's key");
    assert!(metric(&reloader, "tidewatch_pki_file_reloads_total{outcome=\"refused\"} 1"), "logged once");
    for (name, text) in [("c", "garbage"), ("r", "garbage"), ("r", "")] {
        folder.put(name, text);
        reloader.reload_files(now());
        assert_eq!(fingerprint().await, before, "{name}");
        put(&second);
        folder.put("r", ca.certificate_pem());
    }
    put(&make(now() - 40 * 86_400, "localhost"));
    reloader.reload_files(now());
    assert_eq!(fingerprint().await, before, "it has ended");
    fs::remove_file(&key).unwrap();
    reloader.reload_files(now());
    assert_eq!(fingerprint().await, before);

    put(&second);
    reloader.reload_files(now());
    let after = fingerprint().await;
    assert_ne!(after, before);
    let more = Ca::generate("more", now(), CA_VALIDITY).unwrap();
    folder.put("r", &format!("{}{}", ca.certificate_pem(), more.certificate_pem()));
    reloader.reload_files(now());
    assert_eq!(tls_state.trust().borrow().clients.roots().len(), 2);
    assert!(metric(&reloader, "tidewatch_pki_file_reloads_total{outcome=\"taken\"} 2"));
}

#[tokio::test]
async fn foreign_server_certificate_is_used_only_if_agents_accept_it() {
    let folder = Folder::new("pki-foreign");
    let kcp = FakeKcp::default();
    let [ours, strange] = ["ours", "strange"].map(|name| Ca::generate(name, now(), CA_VALIDITY).unwrap());
    let make = |ca: &Ca, name: &str| ca.make_server(&[name.try_into().unwrap()], now(), SERVER_VALIDITY).unwrap();
    let good = make(&ours, "localhost");
    let put = |pair: &PemIdentity| (folder.put("c", &pair.chain), folder.put("k", &pair.key));
    let (chain, key) = put(&good);
    let roots = folder.put("r", ours.certificate_pem());
    let files = [flag("tls-cert", &chain), flag("tls-key", &key)];
    assert!(open(&kcp, &files).await.is_err(), "the roots for agents are unknown");
    let arguments = [files.as_slice(), &[flag("server-ca", &roots)]].concat();
    let (tls_state, mut reloader) = open(&kcp, &arguments).await.unwrap();
    let trust = tls_state.trust().borrow().clone();
    assert_eq!((trust.agents.clone(), trust.clients.clone()), (ours.trust_bundle(), kcp.ca_state().trust().clients));
    let before = accepted_leaf(&tls_state.tokens.load(), &ours.trust_bundle()).await.unwrap().fingerprint;
    for bad in [make(&ours, "elsewhere"), make(&strange, "localhost")] {
        put(&bad);
        reloader.reload_files(now());
        let still = accepted_leaf(&tls_state.tokens.load(), &ours.trust_bundle()).await.unwrap().fingerprint;
        assert_eq!(still, before);
        assert!(open(&kcp, &arguments).await.is_err());
    }
    put(&make(&ours, "localhost"));
    reloader.reload_files(now());
    assert_ne!(accepted_leaf(&tls_state.tokens.load(), &ours.trust_bundle()).await.unwrap().fingerprint, before);
}

#[tokio::test]
async fn contradicting_flags_are_refused() {
    let folder = Folder::new("pki-flags");
    let file = folder.put("f", "");
    for bad in [
        vec!["--issuer=cert-manager:Issuer/a".to_owned()],
        vec![flag("issuer-ca", &file)],
        vec!["--ca-validity-seconds=86400".to_owned(), "--ca-rotation-seconds=10".to_owned()],
        vec![flag("tls-cert", &file), flag("tls-key", &file), flag("client-ca", &file), flag("issuer-ca", &file)],
    ] {
        let kcp = FakeKcp::default();
        assert!(open(&kcp, &bad).await.is_err(), "{bad:?}");
        assert!(kcp.calls().is_empty(), "{bad:?}");
    }
}
