//! The fields of a leaf certificate that agent and receiver evaluate: the runtime that it names, its key and its
//! validity.

use std::{collections::BTreeSet, fmt};

use aws_lc_rs::digest;
use base64::{Engine, engine::general_purpose::STANDARD};
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tidewatch_api::identity::{RuntimeId, TrustDomain};
use tidewatch_kit::hex;
use x509_parser::prelude::{FromDer, GeneralName, ParsedExtension, X509Certificate};

/// The error of reading a certificate.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ReadCertificateError {
    /// Not X.509.
    #[error("the certificate is not readable")]
    Parse,
    /// Not an uncompressed P-256 point.
    #[error("the certificate's key is not P-256")]
    Key,
    /// The subject alternative names must contain exactly one URI, `spiffe://<trust domain>/runtime/<id>`.
    #[error("the certificate names no runtime of this trust domain")]
    Uri,
    /// The common name must equal the runtime id.
    #[error("the certificate's common name differs from its runtime id")]
    CommonName,
    /// The extended key usage must include clientAuth.
    #[error("the certificate lacks the extended key usage clientAuth")]
    Usage,
    /// The certificate of a CA does not identify a runtime.
    #[error("the certificate belongs to a certificate authority")]
    Authority,
}

/// The fields of a leaf certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The DER encoding.
    pub der: CertificateDer<'static>,
    /// Hex SHA-256 of the DER: the `keyid` of signatures.
    pub fingerprint: String,
    /// The P-256 point, uncompressed; in contract v2 ([`crate::v2::read_caller`]) any key.
    pub public_key: Vec<u8>,
    /// End of validity, in Unix seconds.
    pub not_after: i64,
    /// Start of validity, in Unix seconds.
    pub not_before: i64,
    /// The key of the issuer, from the authority key identifier; `None` if the extension is absent.
    pub authority: Option<KeyId>,
}

/// The identifier of a CA key, in hex: a subject key identifier or an authority key identifier (RFC 5280, sections
/// 4.2.1.1 and 4.2.1.2).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct KeyId(String);

impl KeyId {
    /// Limit in bytes; longer identifiers are ignored. RFC 7093 defines 20 bytes, a SHA-512 hash has 64.
    const MAX_BYTES: usize = 64;

    fn new(bytes: &[u8]) -> Option<Self> {
        (1..=Self::MAX_BYTES).contains(&bytes.len()).then(|| Self(hex::encode(bytes)))
    }

    /// The subject key identifier of a certificate; `None` if the extension is absent.
    ///
    /// # Errors
    /// [`ReadCertificateError::Parse`].
    pub fn of_subject(der: &CertificateDer<'_>) -> Result<Option<Self>, ReadCertificateError> {
        let certificate = parse(der)?;
        let id = certificate.iter_extensions().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0),
            _ => None,
        });
        Ok(id.and_then(Self::new))
    }

    fn of_authority(certificate: &X509Certificate<'_>) -> Option<Self> {
        let id = certificate.iter_extensions().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::AuthorityKeyIdentifier(id) => id.key_identifier.as_ref().map(|id| id.0),
            _ => None,
        });
        id.and_then(Self::new)
    }

    /// The identifier in hex.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The subject alternative names of a certificate, as far as they are URIs or DNS names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubjectAltNames {
    /// The URIs, unmodified.
    pub uris: Vec<String>,
    /// The DNS names, unmodified.
    pub dns: Vec<String>,
}

impl SubjectAltNames {
    /// Reads the names of a certificate; both lists are empty if the extension is absent.
    ///
    /// # Errors
    /// [`ReadCertificateError::Parse`].
    pub fn read(der: &CertificateDer<'_>) -> Result<Self, ReadCertificateError> {
        Self::of(&parse(der)?)
    }

    fn of(certificate: &X509Certificate<'_>) -> Result<Self, ReadCertificateError> {
        let alternatives = certificate.subject_alternative_name().map_err(|_| ReadCertificateError::Parse)?;
        let mut names = Self::default();
        for name in alternatives.as_ref().map_or(&[][..], |extension| &extension.value.general_names) {
            match name {
                GeneralName::URI(uri) => names.uris.push((*uri).to_owned()),
                GeneralName::DNSName(dns) => names.dns.push((*dns).to_owned()),
                _ => {}
            }
        }
        Ok(names)
    }
}

/// A leaf certificate that identifies a runtime: by all of its names in contract v3, by its common name in contract v2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeCertificate {
    /// The runtime.
    pub runtime: RuntimeId,
    /// The certificate.
    pub leaf: Leaf,
}

/// End of the validity of a certificate of any kind, in Unix seconds.
///
/// # Errors
/// [`ReadCertificateError::Parse`].
pub fn not_after(der: &CertificateDer<'_>) -> Result<i64, ReadCertificateError> {
    Ok(parse(der)?.validity().not_after.timestamp())
}

/// The SHA-256 of a certificate, in hex.
pub fn fingerprint(der: &[u8]) -> String {
    hex::encode(digest::digest(&digest::SHA256, der).as_ref())
}

/// Encodes a certificate as PEM (RFC 7468, section 5).
pub fn to_pem(der: &[u8]) -> String {
    labelled_pem("CERTIFICATE", der)
}

/// Encodes DER as PEM under a label of RFC 7468, for example `PRIVATE KEY`.
pub fn labelled_pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut pem = String::with_capacity(text.len() + text.len() / 64 + 2 * label.len() + 40);
    pem.extend(["-----BEGIN ", label, "-----\n"]);
    for line in text.as_bytes().chunks(64) {
        pem.extend(line.iter().copied().map(char::from));
        pem.push('\n');
    }
    pem.extend(["-----END ", label, "-----\n"]);
    pem
}

/// The revision of a set of roots, in 16 hex digits: independent of order and duplicates, different for different sets.
/// Agent and receiver compare revisions, so both compute them here. 64 bits distinguish the bundles of a fleet; they
/// are not a proof of identity.
pub fn trust_revision(roots: &[CertificateDer<'_>]) -> String {
    let roots: BTreeSet<&[u8]> = roots.iter().map(AsRef::as_ref).collect();
    let mut context = digest::Context::new(&digest::SHA256);
    for root in roots {
        context.update(&(root.len() as u64).to_be_bytes());
        context.update(root);
    }
    hex::encode(&context.finish().as_ref()[..8])
}

impl Leaf {
    /// Reads a leaf.
    ///
    /// # Errors
    /// [`ReadCertificateError::Parse`] and [`ReadCertificateError::Key`].
    pub fn read(der: &CertificateDer<'_>) -> Result<Self, ReadCertificateError> {
        Self::of(&parse(der)?, der).with_p256_key()
    }

    /// The fields of a leaf with any key.
    pub(crate) fn of(certificate: &X509Certificate<'_>, der: &CertificateDer<'_>) -> Self {
        let validity = certificate.validity();
        Self {
            der: der.clone().into_owned(),
            fingerprint: fingerprint(der),
            public_key: certificate.public_key().subject_public_key.data.to_vec(),
            not_after: validity.not_after.timestamp(),
            not_before: validity.not_before.timestamp(),
            authority: KeyId::of_authority(certificate),
        }
    }

    fn with_p256_key(self) -> Result<Self, ReadCertificateError> {
        let is_p256_point = self.public_key.len() == 65 && self.public_key[0] == 4;
        is_p256_point.then_some(self).ok_or(ReadCertificateError::Key)
    }
}

impl RuntimeCertificate {
    /// Reads the runtime from a leaf of a verified chain: URI, common name and extended key usage must all match.
    ///
    /// # Errors
    /// [`ReadCertificateError`].
    pub fn read(der: &CertificateDer<'_>, domain: &TrustDomain) -> Result<Self, ReadCertificateError> {
        let certificate = parse(der)?;
        let names = SubjectAltNames::of(&certificate)?;
        let [uri] = &names.uris[..] else { return Err(ReadCertificateError::Uri) };
        let runtime = domain.runtime_of(uri).ok_or(ReadCertificateError::Uri)?;
        let mut common_names = certificate.subject().iter_common_name();
        let (Some(common_name), None) = (common_names.next(), common_names.next()) else {
            return Err(ReadCertificateError::CommonName);
        };
        if common_name.as_str() != Ok(runtime.as_str()) {
            return Err(ReadCertificateError::CommonName);
        }
        let usage = certificate.extended_key_usage().map_err(|_| ReadCertificateError::Parse)?;
        if !usage.is_some_and(|usage| usage.value.client_auth) {
            return Err(ReadCertificateError::Usage);
        }
        if certificate.is_ca() {
            return Err(ReadCertificateError::Authority);
        }
        Ok(Self { runtime, leaf: Leaf::of(&certificate, der).with_p256_key()? })
    }
}

pub(crate) fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, ReadCertificateError> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        _ => Err(ReadCertificateError::Parse),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, SanType};

    use super::*;

    fn leaf(uris: &[&str], common_name: &str, usage: &[ExtendedKeyUsagePurpose]) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
        params.extended_key_usages = usage.to_vec();
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn an_identity_requires_uri_common_name_and_usage() {
        use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        let domain: TrustDomain = "kyma.local".parse().unwrap();
        let uri = "spiffe://kyma.local/runtime/r-1";
        let good = leaf(&[uri], "r-1", &[ClientAuth]);
        let read = RuntimeCertificate::read(&good, &domain).unwrap();
        assert_eq!((read.runtime.as_str(), read.leaf.public_key.len()), ("r-1", 65));
        for (bad, expected) in [
            (leaf(&[], "r-1", &[ClientAuth]), ReadCertificateError::Uri),
            (leaf(&[uri, uri], "r-1", &[ClientAuth]), ReadCertificateError::Uri),
            (leaf(&["spiffe://other/runtime/r-1"], "r-1", &[ClientAuth]), ReadCertificateError::Uri),
            (leaf(&[uri], "r-2", &[ClientAuth]), ReadCertificateError::CommonName),
            (leaf(&[uri], "r-1", &[ServerAuth]), ReadCertificateError::Usage),
            (leaf(&[uri], "r-1", &[]), ReadCertificateError::Usage),
            (CertificateDer::from(vec![0x30, 0x00]), ReadCertificateError::Parse),
        ] {
            assert_eq!(RuntimeCertificate::read(&bad, &domain), Err(expected));
        }
    }
}
