use rcgen::KeyPair;
use tidewatch_cluster::testing::Folder;
use tidewatch_contract::{
    admin::rotation::PhaseName,
    certificate::{ReadCertificateError, RuntimeCertificate},
    v2::{ReadCallerError, read_caller},
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;
use crate::{
    CA_VALIDITY, Ca, PemIdentity, RUNTIME_VALIDITY, SERVER_VALIDITY,
    testing::{Rotating, fixed_authority},
};

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

fn domain() -> TrustDomain {
    "kyma.local".parse().unwrap()
}

fn name(text: &str) -> ReplicaName {
    text.parse().unwrap()
}

async fn of_authority(authority: &Authority, replica: &str) -> (ReplicaTls, ReplicaCertificate) {
    let source = ReplicaSource::Issuer(authority.clone());
    let metrics = ReplicaMetrics::default();
    ReplicaCertificate::open(name(replica), domain(), source, authority.trust(), metrics).await.unwrap()
}

/// True if a client with this configuration and the server accept each other.
async fn accept_each_other(server: &ReplicaTls, client: ClientConfig) -> bool {
    let (near, far) = tokio::io::duplex(1 << 16);
    let accept = TlsAcceptor::from(server.server.load_full()).accept(far);
    let connect = TlsConnector::from(Arc::new(client)).connect("any.name".try_into().unwrap(), near);
    let (accepted, connected) = tokio::join!(accept, connect);
    accepted.is_ok() && connected.is_ok()
}

async fn connects(client: &ReplicaTls, server: &ReplicaTls, replica: &str) -> bool {
    accept_each_other(server, client.client().config(&name(replica)).unwrap()).await
}

#[tokio::test]
async fn replicas_accept_each_other_under_their_own_names_alone() {
    let authority = fixed_authority(Ca::generate("a", now(), CA_VALIDITY).unwrap(), domain(), RUNTIME_VALIDITY);
    let ((one, certificate), (two, _)) = (of_authority(&authority, "r-1").await, of_authority(&authority, "r-2").await);
    assert!(connects(&one, &two, "r-2").await && connects(&two, &one, "r-1").await);
    assert!(!connects(&one, &two, "r-1").await, "another replica than the one dialled");
    let stranger = fixed_authority(Ca::generate("b", now(), CA_VALIDITY).unwrap(), domain(), RUNTIME_VALIDITY);
    let (stranger, _) = of_authority(&stranger, "r-1").await;
    assert!(!connects(&one, &stranger, "r-1").await && !connects(&stranger, &one, "r-1").await);

    let leaf = &certificate.current.leaf;
    assert_eq!(replica_of(&leaf.der, &domain()), Some(name("r-1")));
    assert_eq!(replica_of(&leaf.der, &"other".parse().unwrap()), None);
    assert_eq!(RuntimeCertificate::read(&leaf.der, &domain()), Err(ReadCertificateError::Uri));
    assert_eq!(read_caller(&leaf.der).err(), Some(ReadCallerError::NotId), "nor is it one of contract v2");
    assert!(leaf.not_after <= now() + 24 * 3_600);
}

/// An agent whose runtime has the name of a replica gets neither end of a connection.
#[tokio::test]
async fn certificates_of_agents_and_of_the_event_port_serve_no_replica() {
    let ca = Ca::generate("a", now(), CA_VALIDITY).unwrap();
    let agent = ca.make_runtime(&"r-1".parse().unwrap(), &domain(), now(), RUNTIME_VALIDITY).unwrap();
    let server = ca.make_server(&["r-1".try_into().unwrap()], now(), SERVER_VALIDITY).unwrap();
    let roots = ca.trust_bundle();
    for identity in [agent, server] {
        let refused = check(&identity.identity().unwrap(), &name("r-1"), &domain(), &roots, UnixTime::now());
        assert!(matches!(refused, Err(ReplicaError::Rejected(_))));
    }
}

#[tokio::test]
async fn replicas_accept_each_other_in_every_phase_of_a_ca_rotation() {
    let mut rotating = Rotating::new().await;
    let authority = rotating.tls_state.authority.clone().unwrap();
    let mut replicas = Vec::new();
    for replica in ["r-1", "r-2"] {
        replicas.push(of_authority(&authority, replica).await);
    }
    let issuers = rotating.roots().map(|root| root.key_id().cloned());
    for (phase, issuer) in
        [(PhaseName::Spread, 0), (PhaseName::Reissue, 1), (PhaseName::Retire, 1), (PhaseName::Steady, 1)]
    {
        rotating.enter(phase);
        for at in 0..2 {
            replicas[at].1.refresh(now()).await;
            assert_eq!(replicas[at].1.current.leaf.authority, issuers[issuer], "{phase:?}");
            // The second one has not followed yet in the first turn.
            assert!(connects(&replicas[0].0, &replicas[1].0, "r-2").await, "{phase:?}");
            assert!(connects(&replicas[1].0, &replicas[0].0, "r-1").await, "{phase:?}");
        }
    }
    let time = UnixTime::now();
    let [old, new] = rotating.roots().map(|root| {
        let agent = root.make_runtime(&"r-9".parse().unwrap(), &domain(), now(), RUNTIME_VALIDITY).unwrap();
        agent.identity().unwrap().chain.remove(0)
    });
    let agents = replicas[0].0.agents();
    let accepts = |leaf| agents.verify_client_cert(leaf, &[], time).is_ok();
    assert!(!accepts(&old) && accepts(&new), "the roots of forwarded certificates follow as well");
}

#[tokio::test]
async fn certificate_is_renewed_after_two_thirds_of_its_life() {
    let authority = fixed_authority(Ca::generate("a", now(), CA_VALIDITY).unwrap(), domain(), RUNTIME_VALIDITY);
    let (tls, mut certificate) = of_authority(&authority, "r-1").await;
    let first = (certificate.current.leaf.fingerprint.clone(), tls.client());
    certificate.refresh(now() + 15 * 3_600).await;
    assert_eq!(certificate.current.leaf.fingerprint, first.0);
    certificate.refresh(now() + 17 * 3_600).await;
    assert_ne!(certificate.current.leaf.fingerprint, first.0);
    assert!(!Arc::ptr_eq(&tls.client(), &first.1), "new connections use it");
}

#[tokio::test]
async fn files_are_checked_and_reloaded() {
    let ca = Ca::generate("a", now(), CA_VALIDITY).unwrap();
    let agents = Ca::generate("b", now(), CA_VALIDITY).unwrap();
    let folder = Folder::new("replica-files");
    let path = |file: &str| folder.0.join(file);
    let write = |PemIdentity { chain, key }: &PemIdentity| [folder.put("chain", chain), folder.put("key", key)];
    let make = |replica: &str| ca.make_replica(&name(replica), &domain(), now(), RUNTIME_VALIDITY).unwrap();
    folder.put("roots", ca.certificate_pem());
    let files = ReplicaFiles { certificate: path("chain"), key: path("key"), roots: path("roots") };
    // The agents' roots are others.
    let authority = fixed_authority(agents, domain(), RUNTIME_VALIDITY);
    let open = || {
        let source = ReplicaSource::Files(files.clone());
        ReplicaCertificate::open(name("r-1"), domain(), source, authority.trust(), ReplicaMetrics::default())
    };
    write(&make("r-2"));
    assert!(open().await.is_err(), "the certificate of another replica");
    write(&make("r-1"));
    let (tls, mut certificate) = open().await.unwrap();
    assert!(connects(&tls, &tls, "r-1").await);
    let first = certificate.current.leaf.fingerprint.clone();
    write(&PemIdentity { key: KeyPair::generate().unwrap().serialize_pem(), ..make("r-1") });
    certificate.reload_files();
    assert_eq!(certificate.current.leaf.fingerprint, first, "the key of another certificate");
    write(&make("r-1"));
    certificate.reload_files();
    assert_ne!(certificate.current.leaf.fingerprint, first);
    certificate.refresh(now() + 30 * 86_400).await;
    assert!(connects(&tls, &tls, "r-1").await, "files are renewed by their issuer");
}
