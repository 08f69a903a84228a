use std::{fs, path::Path};

use clap::Parser;
use rustls::ServerConfig;
use tidewatch_shared::{certificate::Leaf, tls};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;
use crate::{
    pki::{CA_VALIDITY, Ca, Flags, PhaseName, SERVER_VALIDITY, Setup, TlsFlags, TrustBundle, stored, testing::Fake},
    testing::Folder,
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

async fn open(fake: &Fake, arguments: &[String]) -> anyhow::Result<(Standing, Upkeep)> {
    let Line { flags, tls } = Line::parse_from(std::iter::once("x".to_owned()).chain(arguments.iter().cloned()));
    let domain = "kyma.local".parse().unwrap();
    let names = vec!["localhost".parse().unwrap()];
    let setup = Setup { flags: &flags, tls: &tls, names, domain: &domain, namespace: "kcp-system", proxy: None };
    Standing::open(setup, fake.client(), Metrics::default()).await
}

/// The leaf that a client with these roots is shown, if it accepts it.
async fn shown(config: &Arc<ServerConfig>, roots: &TrustBundle) -> Option<Leaf> {
    let (client, server) = tokio::io::duplex(1 << 16);
    let accept = TlsAcceptor::from(config.clone()).accept(server);
    let connector = TlsConnector::from(Arc::new(tls::client_without_client_auth(roots.store().unwrap()).unwrap()));
    let connect = connector.connect("localhost".try_into().unwrap(), client);
    let (_, connected) = tokio::join!(accept, connect);
    let connected = connected.ok()?;
    Leaf::read(&connected.get_ref().1.peer_certificates()?[0]).ok()
}

fn metric(upkeep: &Upkeep, line: &str) -> bool {
    let mut metrics = crate::telemetry::Metrics::new();
    upkeep.metrics.register(metrics.rooms());
    metrics.encode().unwrap().lines().any(|known| known == line)
}

#[tokio::test]
async fn the_secret_is_followed_and_what_cannot_be_used_leaves_all_as_it_was() {
    let fake = Fake::default();
    let (standing, mut upkeep) = open(&fake, &[]).await.unwrap();
    let first = standing.trust().borrow().clone();
    assert!(shown(&standing.tokens().load(), &first.agents).await.is_some());
    upkeep.take(fake.secret().as_ref(), now());
    assert!(matches!(&*standing.held().borrow(), Held::Good(_)) && metric(&upkeep, "tidewatch_pki_ca_secret_good 1"));

    let good = fake.secret().unwrap();
    fake.set("state.json", b"{}");
    for _ in 0..3 {
        upkeep.take(fake.secret().as_ref(), now());
    }
    assert!(matches!(&*standing.held().borrow(), Held::Refused));
    assert!(metric(&upkeep, "tidewatch_pki_ca_secret_refused_total{reason=\"state\"} 1"), "each content is told once");
    assert!(metric(&upkeep, "tidewatch_pki_ca_secret_good 0"));
    assert_eq!(*standing.trust().borrow(), first);

    upkeep.take(None, now());
    assert!(matches!(&*standing.held().borrow(), Held::Lost));
    assert_eq!(*standing.trust().borrow(), first);

    fake.edit(|secret| secret.data = good.data);
    upkeep.take(fake.secret().as_ref(), now());
    assert!(matches!(&*standing.held().borrow(), Held::Good(_)), "restored");
    assert_eq!(*standing.trust().borrow(), first);

    // Another CA, as after a restore of another backup: a leaf of it, and trust in it alone.
    let other = stored::Stored::steady(super::super::standing::make_root(CA_VALIDITY, now()).unwrap(), now());
    fake.edit(|secret| secret.data = Some(other.write()));
    upkeep.take(fake.secret().as_ref(), now());
    let second = standing.trust().borrow().clone();
    assert_eq!(second.issuer.as_ref(), Some(&other.target().id));
    let leaf = shown(&standing.tokens().load(), &second.agents).await.unwrap();
    assert_eq!(leaf.authority.as_ref(), Some(&other.target().id));
    assert!(shown(&standing.tokens().load(), &first.agents).await.is_none());
}

#[tokio::test]
async fn each_phase_takes_effect_as_a_whole() {
    let fake = Fake::default();
    let (standing, mut upkeep) = open(&fake, &[]).await.unwrap();
    let root = fake.stored().target().clone();
    let next = super::super::standing::make_root(CA_VALIDITY, now()).unwrap();
    let leaves_end = now() + 86_400;
    for (phase, issuing, serving) in [
        (stored::Phase::Spread { root: root.clone(), next: next.clone() }, &root, &root),
        (stored::Phase::Reissue { root: root.clone(), next: next.clone(), leaves_end }, &next, &root),
        (stored::Phase::Retire { root: next.clone(), old: root.ca.trust_bundle(), leaves_end }, &next, &next),
        (stored::Phase::Steady { root: next.clone() }, &next, &next),
    ] {
        let stored = Stored { phase, since: now(), force_after: None };
        fake.edit(|secret| secret.data = Some(stored.write()));
        upkeep.take(fake.secret().as_ref(), now());
        assert_eq!(**standing.trust().borrow(), stored.trust(), "{stored:?}");
        let leaf = shown(&standing.tokens().load(), &stored.trust().agents).await.unwrap();
        assert_eq!(leaf.authority.as_ref(), Some(&serving.id), "{stored:?}");
        let request = rcgen::CertificateParams::default();
        let request = request.serialize_request(&rcgen::KeyPair::generate().unwrap()).unwrap();
        let request = crate::pki::Request::from_der(request.der()).unwrap();
        let issued = standing.authority().unwrap().issue(&"r-1".parse().unwrap(), &request).await.unwrap();
        let leaf = tls::certificates(issued.chain.as_bytes()).unwrap().remove(0);
        assert_eq!(Leaf::read(&leaf).unwrap().authority.as_ref(), Some(&issuing.id), "{stored:?}");
    }
}

#[tokio::test]
async fn the_receivers_leaf_is_renewed_at_two_thirds() {
    let fake = Fake::default();
    let (standing, mut upkeep) = open(&fake, &["--server-certificate-validity-seconds=90".to_owned()]).await.unwrap();
    let trust = standing.trust().borrow().clone();
    let first = shown(&standing.tokens().load(), &trust.agents).await.unwrap();
    let begun = now();
    upkeep.age(begun + 55);
    let same = shown(&standing.tokens().load(), &trust.agents).await.unwrap();
    assert_eq!(same.fingerprint, first.fingerprint);
    upkeep.age(begun + 61);
    let renewed = shown(&standing.tokens().load(), &trust.agents).await.unwrap();
    assert!(renewed.fingerprint != first.fingerprint && renewed.not_after >= begun + 61 + 90);
}

#[tokio::test]
async fn that_the_certificate_ends_soon_is_told() {
    const DAY: i64 = 86_400;
    let (folder, fake, begun) = (Folder::new("pki-close"), Fake::default(), now());
    let ca = Ca::generate("files", begun, CA_VALIDITY).unwrap();
    let roots = folder.put("r", ca.certificate_pem());
    for (days, close) in [(90, 14), (30, 5)] {
        let life = Duration::from_secs(days * 86_400);
        let pair = ca.make_server(&["localhost".parse().unwrap()], begun, life).unwrap();
        let (chain, key) = (folder.put("c", &pair.chain), folder.put("k", &pair.key));
        let arguments = [flag("tls-cert", &chain), flag("tls-key", &key), flag("client-ca", &roots)];
        let (_, mut upkeep) = open(&fake, &arguments).await.unwrap();
        let mut told = |at| {
            upkeep.age(at);
            let mut metrics = crate::telemetry::Metrics::new();
            upkeep.metrics.register_incumbent(metrics.incumbent());
            let page = metrics.encode().unwrap();
            page.lines().any(|line| line == "lifecycle_mgr_gateway_secret_server_cert_close_to_expiry 1")
        };
        let end = begun + DAY * days.cast_signed();
        let ages = [begun, end - (close + 1) * DAY, end - (close - 1) * DAY, end + DAY];
        assert_eq!(ages.map(&mut told), [false, false, true, true], "{days} days");
    }
}

#[tokio::test]
async fn a_ca_that_ended_while_nobody_ran_is_replaced_at_the_start() {
    let fake = Fake::default();
    let dead = super::super::standing::make_root(Duration::from_secs(60), now() - 3_600).unwrap();
    fake.edit(|secret| secret.data = Some(Stored::steady(dead.clone(), now() - 3_600).write()));
    let (standing, _) = open(&fake, &[]).await.unwrap();
    assert_ne!(fake.stored().target().id, dead.id);
    assert_eq!(standing.trust().borrow().issuer.as_ref(), Some(&fake.stored().target().id));
    assert_eq!(fake.stored().name(), PhaseName::Steady);
}

fn flag(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}

#[tokio::test]
async fn changed_files_are_taken_when_they_are_good_and_else_the_last_good_ones_stay() {
    let (folder, fake) = (Folder::new("pki-files"), Fake::default());
    let ca = Ca::generate("files", now() - 50 * 86_400, CA_VALIDITY).unwrap();
    let make = |at, name: &str| ca.make_server(&[name.parse().unwrap()], at, SERVER_VALIDITY).unwrap();
    let first = make(now(), "localhost");
    let put = |pair: &PemIdentity| (folder.put("c", &pair.chain), folder.put("k", &pair.key));
    let (chain, key) = put(&first);
    let roots = folder.put("r", ca.certificate_pem());
    let files = [flag("tls-cert", &chain), flag("tls-key", &key)];
    let arguments = [files.as_slice(), &[flag("client-ca", &roots)]].concat();
    let (standing, mut upkeep) = open(&fake, &arguments).await.unwrap();
    assert!(standing.authority().is_none() && fake.calls().is_empty(), "with files nothing is asked of KCP");
    let trust = standing.trust().borrow().clone();
    let fingerprint = async || shown(&standing.tokens().load(), &trust.agents).await.unwrap().fingerprint;
    let before = fingerprint().await;
    upkeep.read_files(now());
    assert_eq!(fingerprint().await, before);

    let second = make(now(), "localhost");
    folder.put("c", &second.chain);
    upkeep.read_files(now());
    upkeep.read_files(now());
    assert_eq!(fingerprint().await, before, "another one's key");
    assert!(metric(&upkeep, "tidewatch_pki_file_reloads_total{outcome=\"refused\"} 1"), "told once");
    for (name, text) in [("c", "garbage"), ("r", "garbage"), ("r", "")] {
        folder.put(name, text);
        upkeep.read_files(now());
        assert_eq!(fingerprint().await, before, "{name}");
        put(&second);
        folder.put("r", ca.certificate_pem());
    }
    put(&make(now() - 40 * 86_400, "localhost"));
    upkeep.read_files(now());
    assert_eq!(fingerprint().await, before, "it has ended");
    fs::remove_file(&key).unwrap();
    upkeep.read_files(now());
    assert_eq!(fingerprint().await, before);

    put(&second);
    upkeep.read_files(now());
    let after = fingerprint().await;
    assert_ne!(after, before);
    let more = Ca::generate("more", now(), CA_VALIDITY).unwrap();
    folder.put("r", &format!("{}{}", ca.certificate_pem(), more.certificate_pem()));
    upkeep.read_files(now());
    assert_eq!(standing.trust().borrow().clients.roots().len(), 2);
    assert!(metric(&upkeep, "tidewatch_pki_file_reloads_total{outcome=\"taken\"} 2"));
}

#[tokio::test]
async fn a_certificate_of_another_ca_is_served_only_if_agents_accept_it() {
    let (folder, fake) = (Folder::new("pki-foreign"), Fake::default());
    let [ours, strange] = ["ours", "strange"].map(|name| Ca::generate(name, now(), CA_VALIDITY).unwrap());
    let make = |ca: &Ca, name: &str| ca.make_server(&[name.parse().unwrap()], now(), SERVER_VALIDITY).unwrap();
    let good = make(&ours, "localhost");
    let put = |pair: &PemIdentity| (folder.put("c", &pair.chain), folder.put("k", &pair.key));
    let (chain, key) = put(&good);
    let roots = folder.put("r", ours.certificate_pem());
    let files = [flag("tls-cert", &chain), flag("tls-key", &key)];
    assert!(open(&fake, &files).await.is_err(), "agents could not be told whom to trust");
    let arguments = [files.as_slice(), &[flag("server-ca", &roots)]].concat();
    let (standing, mut upkeep) = open(&fake, &arguments).await.unwrap();
    let trust = standing.trust().borrow().clone();
    assert_eq!((trust.agents.clone(), trust.clients.clone()), (ours.trust_bundle(), fake.stored().trust().clients));
    let before = shown(&standing.tokens().load(), &ours.trust_bundle()).await.unwrap().fingerprint;
    for bad in [make(&ours, "elsewhere"), make(&strange, "localhost")] {
        put(&bad);
        upkeep.read_files(now());
        let still = shown(&standing.tokens().load(), &ours.trust_bundle()).await.unwrap().fingerprint;
        assert_eq!(still, before);
        assert!(open(&fake, &arguments).await.is_err());
    }
    put(&make(&ours, "localhost"));
    upkeep.read_files(now());
    assert_ne!(shown(&standing.tokens().load(), &ours.trust_bundle()).await.unwrap().fingerprint, before);
}

#[tokio::test]
async fn flags_that_do_not_go_together_are_refused() {
    let folder = Folder::new("pki-flags");
    let file = folder.put("f", "");
    for bad in [
        vec!["--issuer=cert-manager:Issuer/a".to_owned()],
        vec![flag("issuer-ca", &file)],
        vec!["--ca-validity-seconds=86400".to_owned(), "--ca-rotation-seconds=10".to_owned()],
        vec![flag("tls-cert", &file), flag("tls-key", &file), flag("client-ca", &file), flag("issuer-ca", &file)],
    ] {
        let fake = Fake::default();
        assert!(open(&fake, &bad).await.is_err(), "{bad:?}");
        assert!(fake.calls().is_empty(), "{bad:?}");
    }
}
