//! Keys, certificates, tokens and kubeconfigs of one cluster.

use std::{fs, io, path::Path};

use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use base64::{Engine as _, prelude::BASE64_STANDARD, prelude::BASE64_URL_SAFE_NO_PAD};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use serde_json::{Value, json};

/// Reason why a cluster's credentials could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A key or certificate cannot be made.
    #[error("make a certificate")]
    Certificate(#[source] rcgen::Error),
    /// The system provides no random bytes.
    #[error("draw a token")]
    Random,
    /// A file for the API server cannot be written.
    #[error("write the credentials")]
    Write(#[source] io::Error),
}

/// Users with all rights in a cluster of the test bed. They differ in name only, so that the audit log distinguishes
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClusterUser {
    /// The test bed itself.
    Admin,
    /// The user of a runtime, with the writes under test.
    User,
    /// lifecycle-manager or another third party that writes.
    Other,
    /// The controller manager, the scheduler and kwok.
    Workloads,
}

impl ClusterUser {
    const ALL: [Self; 4] = [Self::Admin, Self::User, Self::Other, Self::Workloads];

    /// User name at the API server.
    pub fn name(self) -> &'static str {
        match self {
            Self::Admin => "test-bed",
            Self::User => "user",
            Self::Other => "other",
            Self::Workloads => "workloads",
        }
    }
}

/// Credentials of one API server and its clients, generated for each cluster.
#[derive(Debug)]
pub struct Credentials {
    /// The cluster's CA, PEM. The API server's certificate names 127.0.0.1 and localhost.
    pub ca_pem: String,
    /// Private key of the ServiceAccount issuer, PKCS#8 PEM, P-256.
    pub issuer_key_pem: String,
    /// Public key of the ServiceAccount issuer, PEM.
    pub issuer_public_pem: String,
    tokens: Vec<(ClusterUser, String)>,
}

/// Files in the cluster's folder that the API server reads.
pub(crate) mod files {
    pub(crate) const CA: &str = "ca.crt";
    pub(crate) const CERTIFICATE: &str = "server.crt";
    pub(crate) const KEY: &str = "server.key";
    pub(crate) const ISSUER_KEY: &str = "issuer.key";
    pub(crate) const ISSUER_PUBLIC: &str = "issuer.pub";
    pub(crate) const TOKENS: &str = "tokens.csv";
}

impl Credentials {
    /// Generates them, and writes the API server's files into `dir`.
    ///
    /// # Errors
    /// See [`CredentialsError`].
    pub fn create(cluster: &str, dir: &Path) -> Result<Self, CredentialsError> {
        let (ca_pem, certificate, key) = certificates(cluster).map_err(CredentialsError::Certificate)?;
        let issuer = KeyPair::generate().map_err(CredentialsError::Certificate)?;
        let tokens = ClusterUser::ALL.into_iter().map(|user| Ok((user, token()?))).collect::<Result<Vec<_>, _>>()?;
        let csv: String = tokens
            .iter()
            .map(|(user, token)| format!("{token},{name},{name},\"system:masters\"\n", name = user.name()))
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

    /// Bearer token of a user.
    pub fn token(&self, user: ClusterUser) -> &str {
        self.tokens.iter().find(|(owner, _)| *owner == user).map_or("", |(_, token)| token)
    }

    /// A kubeconfig for the server at `url` with a bearer token, in JSON: it is valid YAML too, and the agent reads
    /// only JSON.
    pub fn kubeconfig(&self, cluster: &str, url: &str, token: &str) -> String {
        kubeconfig(cluster, url, self.ca_pem.as_bytes(), token).to_string()
    }
}

/// A kubeconfig in the form of Gardener's `adminkubeconfig`: one cluster and one context for each advertised address of
/// the API server, one user, and a current context. Only the address of the current context can be reached; the others
/// come first and last, and the last one relies on public roots.
pub fn kubeconfig(cluster: &str, url: &str, ca_pem: &[u8], token: &str) -> Value {
    let ca = BASE64_STANDARD.encode(ca_pem);
    let internal = format!("{cluster}-internal");
    let external = format!("{cluster}-external");
    let wildcard = format!("{cluster}-wildcard");
    let context = |name: &str| json!({"name": name, "context": {"cluster": name, "user": cluster}});
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": external,
        "clusters": [
            {"name": internal, "cluster": {
                "server": "https://api.internal.invalid", "certificate-authority-data": ca,
            }},
            {"name": external, "cluster": {"server": url, "certificate-authority-data": ca}},
            {"name": wildcard, "cluster": {"server": "https://api.wildcard.invalid"}},
        ],
        "contexts": [context(&internal), context(&external), context(&wildcard)],
        "users": [{"name": cluster, "user": {"token": token}}],
    })
}

/// A CA, and a server certificate with its key for loopback; all PEM.
///
/// # Errors
/// No random numbers.
pub fn certificates(name: &str) -> Result<(String, String, String), rcgen::Error> {
    let mut ca = CertificateParams::default();
    ca.distinguished_name.push(DnType::CommonName, format!("{name}-ca"));
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let ca_key = KeyPair::generate()?;
    let ca_pem = ca.self_signed(&ca_key)?.pem();
    let issuer = Issuer::new(ca, ca_key);
    let mut server = CertificateParams::new(["127.0.0.1".to_owned(), "localhost".to_owned()])?;
    server.distinguished_name.push(DnType::CommonName, format!("{name}-server"));
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
        let text = credentials.kubeconfig("kcp", "https://127.0.0.1:1", credentials.token(ClusterUser::User));
        let config = kube::config::Kubeconfig::from_yaml(&text).expect("kube reads it");
        let current = config.clusters.iter().find(|named| Some(&named.name) == config.current_context.as_ref());
        let cluster = current.and_then(|named| named.cluster.as_ref()).expect("a cluster");
        assert_eq!(cluster.insecure_skip_tls_verify, None);
        let ca = cluster.certificate_authority_data.as_ref().expect("a CA");
        assert_eq!(BASE64_STANDARD.decode(ca).expect("base64"), credentials.ca_pem.as_bytes());
    }

    #[test]
    fn tokens_differ() {
        let dir = tempfile::tempdir().expect("a folder");
        let credentials = Credentials::create("kcp", dir.path()).expect("made");
        assert_ne!(credentials.token(ClusterUser::User), credentials.token(ClusterUser::Admin));
        assert!(credentials.token(ClusterUser::User).len() >= 32);
    }
}
