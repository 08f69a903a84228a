//! Keys, certificates, tokens and kubeconfigs of one cluster.

use std::{fs, io, path::Path};

use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use base64::{Engine as _, prelude::BASE64_STANDARD, prelude::BASE64_URL_SAFE_NO_PAD};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use serde_json::json;

/// Why a cluster's credentials could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// Key or certificate.
    #[error("make a certificate")]
    Certificate(#[source] rcgen::Error),
    /// The system gives no random bytes.
    #[error("draw a token")]
    Random,
    /// A file for the API server.
    #[error("write the credentials")]
    Write(#[source] io::Error),
}

/// Who may do everything in a cluster of the test bed. They differ in name only, so that the audit log tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Person {
    /// The test bed itself.
    Admin,
    /// The user whose writes are the matter of the test.
    User,
    /// The stand-in for the incumbent or another third party that writes.
    Other,
    /// The controller manager, the scheduler and kwok.
    Workloads,
}

impl Person {
    const ALL: [Self; 4] = [Self::Admin, Self::User, Self::Other, Self::Workloads];

    /// The user name that the API server sees.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Admin => "test-bed",
            Self::User => "user",
            Self::Other => "other",
            Self::Workloads => "workloads",
        }
    }
}

/// What one API server is started with and its clients need. All of it is drawn anew for each cluster.
#[derive(Debug)]
pub struct Credentials {
    /// The cluster's CA, PEM. The API server's certificate names 127.0.0.1 and localhost.
    pub ca_pem: String,
    /// Private key of the ServiceAccount issuer, PKCS#8 PEM, P-256.
    pub issuer_key_pem: String,
    /// Public key of the ServiceAccount issuer, PEM.
    pub issuer_public_pem: String,
    tokens: Vec<(Person, String)>,
}

/// The files in the cluster's folder that the API server reads.
pub(crate) mod files {
    pub(crate) const CA: &str = "ca.crt";
    pub(crate) const CERTIFICATE: &str = "server.crt";
    pub(crate) const KEY: &str = "server.key";
    pub(crate) const ISSUER_KEY: &str = "issuer.key";
    pub(crate) const ISSUER_PUBLIC: &str = "issuer.pub";
    pub(crate) const TOKENS: &str = "tokens.csv";
}

impl Credentials {
    /// Makes them and writes what the API server reads into `dir`.
    ///
    /// # Errors
    /// See [`CredentialsError`].
    pub fn create(cluster: &str, dir: &Path) -> Result<Self, CredentialsError> {
        let (ca_pem, certificate, key) = certificates(cluster).map_err(CredentialsError::Certificate)?;
        let issuer = KeyPair::generate().map_err(CredentialsError::Certificate)?;
        let tokens = Person::ALL.into_iter().map(|person| Ok((person, token()?))).collect::<Result<Vec<_>, _>>()?;
        let csv: String = tokens
            .iter()
            .map(|(person, token)| format!("{token},{name},{name},\"system:masters\"\n", name = person.name()))
            .collect();
        let this =
            Self { ca_pem, issuer_key_pem: issuer.serialize_pem(), issuer_public_pem: issuer.public_key_pem(), tokens };
        let texts = [
            (files::CA, &this.ca_pem),
            (files::CERTIFICATE, &certificate),
            (files::KEY, &key),
            (files::ISSUER_KEY, &this.issuer_key_pem),
            (files::ISSUER_PUBLIC, &this.issuer_public_pem),
            (files::TOKENS, &csv),
        ];
        texts.iter().try_for_each(|(file, text)| fs::write(dir.join(file), text)).map_err(CredentialsError::Write)?;
        Ok(this)
    }

    /// The bearer token of one of the people.
    #[must_use]
    pub fn token(&self, person: Person) -> &str {
        self.tokens.iter().find(|(who, _)| *who == person).map_or("", |(_, token)| token)
    }

    /// A kubeconfig for the server at `url` with a bearer token, in JSON: that is YAML too, and the agent reads nothing else.
    #[must_use]
    pub fn kubeconfig(&self, cluster: &str, url: &str, token: &str) -> String {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": cluster, "cluster": {
                "server": url,
                "certificate-authority-data": BASE64_STANDARD.encode(&self.ca_pem),
            }}],
            "users": [{"name": "bearer", "user": {"token": token}}],
            "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": "bearer"}}],
            "current-context": cluster,
        });
        config.to_string()
    }
}

/// A CA, and a server certificate with its key for loopback; all PEM.
fn certificates(cluster: &str) -> Result<(String, String, String), rcgen::Error> {
    let mut ca = CertificateParams::default();
    ca.distinguished_name.push(DnType::CommonName, format!("{cluster}-ca"));
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let ca_key = KeyPair::generate()?;
    let ca_pem = ca.self_signed(&ca_key)?.pem();
    let issuer = Issuer::new(ca, ca_key);
    let mut server = CertificateParams::new(["127.0.0.1".to_owned(), "localhost".to_owned()])?;
    server.distinguished_name.push(DnType::CommonName, format!("{cluster}-apiserver"));
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    server.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    Ok((ca_pem, server.signed_by(&key, &issuer)?.pem(), key.serialize_pem()))
}

fn token() -> Result<String, CredentialsError> {
    let mut bytes = [0; 24];
    SystemRandom::new().fill(&mut bytes).map_err(|_| CredentialsError::Random)?;
    Ok(BASE64_URL_SAFE_NO_PAD.encode(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubeconfig_carries_the_ca_and_never_insecure() {
        let dir = tempfile::tempdir().expect("a folder");
        let credentials = Credentials::create("kcp", dir.path()).expect("made");
        let text = credentials.kubeconfig("kcp", "https://127.0.0.1:1", credentials.token(Person::User));
        let config = kube::config::Kubeconfig::from_yaml(&text).expect("kube reads it");
        let cluster = config.clusters[0].cluster.as_ref().expect("a cluster");
        assert_eq!(cluster.insecure_skip_tls_verify, None);
        let ca = cluster.certificate_authority_data.as_ref().expect("a CA");
        assert_eq!(BASE64_STANDARD.decode(ca).expect("base64"), credentials.ca_pem.as_bytes());
    }

    #[test]
    fn tokens_differ() {
        let dir = tempfile::tempdir().expect("a folder");
        let credentials = Credentials::create("kcp", dir.path()).expect("made");
        assert_ne!(credentials.token(Person::User), credentials.token(Person::Admin));
        assert!(credentials.token(Person::User).len() >= 32);
    }
}
