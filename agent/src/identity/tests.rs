use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
    date_time_ymd,
};

use tidewatch_shared::certificate::Leaf;

use super::*;
use crate::telemetry::Readiness;

/// A CA of a test, which issues for runtimes and for servers.
pub(crate) struct TestCa(CertifiedIssuer<'static, KeyPair>);

impl TestCa {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "test ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    fn issue(&self, params: CertificateParams) -> (Vec<u8>, Vec<u8>) {
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &self.0).unwrap();
        (leaf.pem().into_bytes(), key.serialize_pem().into_bytes())
    }

    /// Chain and key of a server on loopback.
    pub(crate) fn server(&self) -> (Vec<u8>, Vec<u8>) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.issue(params)
    }

    /// The material of a runtime.
    pub(crate) fn runtime(&self, id: &str) -> Material {
        self.runtime_until(id, 4_000)
    }

    fn runtime_until(&self, id: &str, year: i32) -> Material {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, id);
        params.subject_alt_names = vec![SanType::URI(format!("spiffe://kyma.local/runtime/{id}").try_into().unwrap())];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.not_after = date_time_ymd(year, 1, 1);
        let (chain, key) = self.issue(params);
        Material { chain, key, bundle: self.pem().into_bytes() }
    }

    /// Valid credentials of a runtime, with the leaf as a handshake tells it.
    pub(crate) fn credentials(&self, id: &str) -> (Arc<Credentials>, Leaf) {
        let material = self.runtime(id);
        let leaf = Leaf::read(&tls::certificates(&material.chain).unwrap()[0]).unwrap();
        (Arc::new(Credentials::new(&material, &"kyma.local".parse().unwrap(), NOW).unwrap()), leaf)
    }
}

const NOW: i64 = 1_800_000_000;

struct Fixed(Option<Material>);

impl Source for Fixed {
    fn read(&mut self) -> Result<Material, Load> {
        let missing = || Load::Read { name: "tls.crt", error: std::io::ErrorKind::NotFound.into() };
        self.0.clone().ok_or_else(missing)
    }
}

#[test]
fn only_a_whole_and_valid_set_replaces_the_last_good_one() {
    let (ca, readiness) = (TestCa::new(), Readiness::default());
    let make = Credentials::v3("kyma.local".parse().unwrap());
    let (mut keeper, current) = Keeper::new(Fixed(None), make, readiness.guard("identity"), Metrics::default());
    let fingerprint = || current.borrow().as_ref().map(|now| now.certificate.fingerprint.clone());
    keeper.look(NOW);
    assert_eq!((fingerprint(), readiness.pending()), (None, vec!["identity"]));

    let good = ca.runtime("r-1");
    keeper.source.0 = Some(good.clone());
    keeper.look(NOW);
    let first = fingerprint();
    assert!(first.is_some() && readiness.pending().is_empty());

    let other = ca.runtime("r-1");
    for bad in [
        Material { key: other.key.clone(), ..good.clone() },
        Material { bundle: Vec::new(), ..good.clone() },
        Material { chain: b"garbage".to_vec(), ..good.clone() },
        Material { chain: ca.server().0, ..good.clone() },
        ca.runtime("r-2"),
        ca.runtime_until("r-1", 2_020),
    ] {
        keeper.source.0 = Some(bad);
        keeper.look(NOW);
        assert_eq!(fingerprint(), first);
    }
    keeper.source.0 = None;
    keeper.look(NOW);
    assert_eq!(fingerprint(), first);

    keeper.source.0 = Some(other);
    keeper.look(NOW);
    assert_ne!(fingerprint(), first);
}

#[test]
fn what_has_ended_by_a_wrong_clock_is_good_when_the_clock_is_set() {
    let (ca, readiness, metrics) = (TestCa::new(), Readiness::default(), Metrics::default());
    let make = Credentials::v3("kyma.local".parse().unwrap());
    let source = Fixed(Some(ca.runtime_until("r-1", 2_030)));
    let (mut keeper, current) = Keeper::new(source, make, readiness.guard("identity"), metrics.clone());
    let wrong = 4_000_000_000;
    for _ in 0..3 {
        keeper.look(wrong);
    }
    assert!(current.borrow().is_none());
    assert_eq!(metrics.identity_refused.get(), 1, "said once");
    keeper.look(NOW);
    assert!(current.borrow().is_some());
}

#[test]
fn contract_v2_takes_the_incumbents_certificates_and_v3_does_not() {
    let (ca, v2, v3) = (TestCa::new(), Credentials::v2(), Credentials::v3("kyma.local".parse().unwrap()));
    for algorithm in [&rcgen::PKCS_ECDSA_P384_SHA384, &rcgen::PKCS_ED25519] {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "r-1");
        let key = KeyPair::generate_for(algorithm).unwrap();
        let chain = params.signed_by(&key, &ca.0).unwrap().pem().into_bytes();
        let material = Material { chain, key: key.serialize_pem().into_bytes(), bundle: ca.pem().into_bytes() };
        let credentials = v2(&material, NOW).unwrap();
        assert_eq!((credentials.runtime.as_str(), credentials.signer.is_none()), ("r-1", true));
        assert!(v3(&material, NOW).is_err());
        let other = KeyPair::generate().unwrap().serialize_pem().into_bytes();
        for bad in [
            Material { key: other, ..material.clone() },
            Material { chain: ca.server().0, ..material.clone() },
            Material { bundle: Vec::new(), ..material.clone() },
        ] {
            assert!(v2(&bad, NOW).is_err());
        }
        assert!(matches!(v2(&material, i64::MAX), Err(Load::Expired(_))));
    }
}

#[test]
fn a_folder_is_read_as_a_mounted_secret_lays_it_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = Files::new(folder.path().to_owned());
    assert!(matches!(files.read(), Err(Load::Read { name: "tls.crt", .. })));
    for (name, content) in [("tls.crt", "a"), ("tls.key", "b"), ("ca.crt", "c")] {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    let Ok(Material { chain, key, bundle }) = files.read() else { panic!("readable") };
    assert_eq!((&*chain, &*key, &*bundle), (&b"a"[..], &b"b"[..], &b"c"[..]));
}
