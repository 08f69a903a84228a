use std::{net::SocketAddr, path::Path, time::Duration};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType, date_time_ymd,
};
use tidewatch_contract::certificate::Leaf;

use super::*;
use crate::telemetry::Readiness;

/// Test CA that issues certificates for runtimes and for servers.
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

    /// Material of a runtime.
    pub(crate) fn runtime(&self, id: &str) -> KeyMaterial {
        self.runtime_until(id, 4_000)
    }

    /// Signs a request in PEM, for a certificate that is valid for `seconds` from now.
    pub(crate) fn sign(&self, request: &str, id: &str, seconds: i64, is_ca: bool) -> String {
        let mut request = CertificateSigningRequestParams::from_pem(request).unwrap();
        request.params = Self::params(id);
        let at = |unix: i64| date_time_ymd(1970, 1, 1) + Duration::from_secs(u64::try_from(unix).unwrap());
        let now = clock::unix_seconds();
        (request.params.not_before, request.params.not_after) = (at(now - 600), at(now + seconds));
        if is_ca {
            request.params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        }
        request.signed_by(&self.0).unwrap().pem()
    }

    fn params(id: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, id);
        params.subject_alt_names = vec![SanType::URI(format!("spiffe://kyma.local/runtime/{id}").try_into().unwrap())];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params
    }

    pub(crate) fn runtime_until(&self, id: &str, year: i32) -> KeyMaterial {
        let mut params = Self::params(id);
        params.not_after = date_time_ymd(year, 1, 1);
        let (chain, key) = self.issue(params);
        KeyMaterial { chain, key, bundle: self.pem().into_bytes() }
    }

    /// Valid credentials of a runtime, with its leaf as read from a handshake.
    pub(crate) fn credentials(&self, id: &str, receiver: SocketAddr) -> (Arc<Credentials>, Leaf) {
        let material = self.runtime(id);
        let leaf = Leaf::read(&tls::certificates(&material.chain).unwrap()[0]).unwrap();
        let receiver = format!("https://{receiver}").parse().unwrap();
        (Arc::new(Credentials::new(&material, &"kyma.local".parse().unwrap(), receiver, NOW).unwrap()), leaf)
    }
}

const NOW: i64 = 1_800_000_000;

fn receiver() -> Endpoint {
    "https://kcp:1".parse().unwrap()
}

fn write(folder: &Path, material: &KeyMaterial) {
    let files = [("tls.crt", &material.chain), ("tls.key", &material.key), ("ca.crt", &material.bundle)];
    files.iter().for_each(|(name, content)| std::fs::write(folder.join(name), content).unwrap());
}

fn reloader(folder: &Path, readiness: &Readiness, metrics: &Metrics) -> (FileReloader, CurrentCredentials) {
    FileReloader::new(
        folder.to_owned(),
        "kyma.local".parse().unwrap(),
        receiver(),
        IdentityStatus::default(),
        readiness.pending("identity"),
        metrics.clone(),
    )
}

#[test]
fn only_complete_and_valid_material_replaces_the_last_valid_one() {
    let ca = TestCa::new();
    let readiness = Readiness::default();
    let folder = tempfile::tempdir().unwrap();
    let (mut reloader, current) = reloader(folder.path(), &readiness, &Metrics::default());
    let fingerprint = || current.borrow().as_ref().map(|now| now.certificate.fingerprint.clone());
    reloader.refresh(NOW).unwrap();
    assert_eq!((fingerprint(), readiness.missing()), (None, vec!["identity"]));

    let good = ca.runtime("r-1");
    write(folder.path(), &good);
    reloader.refresh(NOW).unwrap();
    let first = fingerprint();
    assert!(first.is_some() && readiness.missing().is_empty());

    let other = ca.runtime("r-1");
    for bad in [
        KeyMaterial { key: other.key.clone(), ..good.clone() },
        KeyMaterial { bundle: Vec::new(), ..good.clone() },
        KeyMaterial { chain: b"garbage".to_vec(), ..good.clone() },
        KeyMaterial { chain: ca.server().0, ..good.clone() },
        ca.runtime_until("r-1", 2_020),
    ] {
        write(folder.path(), &bad);
        reloader.refresh(NOW).unwrap();
        assert_eq!(fingerprint(), first);
    }
    std::fs::remove_file(folder.path().join("tls.key")).unwrap();
    reloader.refresh(NOW).unwrap();
    assert_eq!(fingerprint(), first);

    write(folder.path(), &other);
    reloader.refresh(NOW).unwrap();
    assert_ne!(fingerprint(), first);
}

#[tokio::test(start_paused = true)]
async fn files_of_another_runtime_end_the_agent() {
    let ca = TestCa::new();
    let readiness = Readiness::default();
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &ca.runtime("r-1"));
    let (reloader, mut current) = reloader(folder.path(), &readiness, &Metrics::default());
    let running = tokio::spawn(reloader.run());
    current.wait_for(Option::is_some).await.unwrap();
    write(folder.path(), &ca.runtime("r-2"));
    let current = "r-1".parse().unwrap();
    let new = "r-2".parse().unwrap();
    let stop = tokio::time::timeout(FILE_POLL_INTERVAL * 2, running).await.expect("the reloader ends").unwrap();
    assert_eq!(stop, IdentityStop::OtherRuntime { current, new, named_by: "certificate" });
}

#[test]
fn certificate_expired_by_a_wrong_clock_is_valid_once_the_clock_is_corrected() {
    let ca = TestCa::new();
    let readiness = Readiness::default();
    let metrics = Metrics::default();
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &ca.runtime_until("r-1", 2_030));
    let (mut reloader, current) = reloader(folder.path(), &readiness, &metrics);
    let wrong = 4_000_000_000;
    for _ in 0..3 {
        reloader.refresh(wrong).unwrap();
    }
    assert!(current.borrow().is_none());
    assert_eq!(metrics.identity_refused.get(), 1, "reported once");
    reloader.refresh(NOW).unwrap();
    assert!(current.borrow().is_some());
}

#[test]
fn folder_with_the_layout_of_a_mounted_secret_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let Err(error) = files::read(folder.path()) else { panic!("there are no files") };
    assert!(error.to_string().starts_with("tls.crt: "), "{error}");
    for (name, content) in [("tls.crt", "a"), ("tls.key", "b"), ("ca.crt", "c")] {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    let Ok(KeyMaterial { chain, key, bundle }) = files::read(folder.path()) else { panic!("readable") };
    assert_eq!((&*chain, &*key, &*bundle), (&b"a"[..], &b"b"[..], &b"c"[..]));
}
