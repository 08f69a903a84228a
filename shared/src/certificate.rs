//! What is read from a leaf certificate: the runtime it names, its key, its end.

use std::{collections::BTreeSet, fmt};

use aws_lc_rs::digest;
use base64::{Engine, engine::general_purpose::STANDARD};
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use x509_parser::prelude::{FromDer, GeneralName, ParsedExtension, X509Certificate};

use crate::{
    hex,
    identity::{RuntimeId, TrustDomain},
};

/// Why a certificate names no runtime.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ReadCertificate {
    /// Not X.509.
    #[error("the certificate is not readable")]
    Parse,
    /// Not an uncompressed P-256 point.
    #[error("the certificate's key is not P-256")]
    Key,
    /// There must be exactly one URI, and it must be `spiffe://<trust domain>/runtime/<id>`.
    #[error("the certificate names no runtime of this trust domain")]
    Uri,
    /// The common name must equal the runtime id.
    #[error("the certificate's common name is not its runtime id")]
    CommonName,
    /// clientAuth must stand in the extended key usage.
    #[error("the certificate is not meant for clients")]
    Usage,
    /// A CA's certificate is nobody's identity.
    #[error("the certificate is that of a certificate authority")]
    Authority,
}

/// A leaf as far as every side reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The certificate itself.
    pub der: CertificateDer<'static>,
    /// Hex SHA-256 of the DER: the `keyid` of signatures.
    pub fingerprint: String,
    /// The P-256 point, uncompressed.
    pub public_key: Vec<u8>,
    /// End of validity, in Unix seconds.
    pub not_after: i64,
    /// Start of validity, in Unix seconds.
    pub not_before: i64,
    /// The key that signed it, as its authority key identifier names it; `None` when it names none.
    pub authority: Option<KeyId>,
}

/// Names a CA's key, as a subject key identifier or an authority key identifier does (RFC 5280, sections 4.2.1.1 and 4.2.1.2): hex.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct KeyId(String);

impl KeyId {
    /// Longer identifiers are not read as one. RFC 7093 knows 20 bytes, and SHA-512 would have 64.
    const MAX_BYTES: usize = 64;

    fn new(bytes: &[u8]) -> Option<Self> {
        (1..=Self::MAX_BYTES).contains(&bytes.len()).then(|| Self(hex::encode(bytes)))
    }

    /// The id of a certificate's own key; `None` when it names none.
    ///
    /// # Errors
    /// [`ReadCertificate::Parse`].
    pub fn of_subject(der: &CertificateDer<'_>) -> Result<Option<Self>, ReadCertificate> {
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

    /// As hex.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The names in a certificate, as alternatives of its subject.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// URIs, as they stand.
    pub uris: Vec<String>,
    /// DNS names, as they stand.
    pub dns: Vec<String>,
}

impl Names {
    /// Reads them; a certificate without alternatives has none.
    ///
    /// # Errors
    /// [`ReadCertificate::Parse`].
    pub fn read(der: &CertificateDer<'_>) -> Result<Self, ReadCertificate> {
        let certificate = parse(der)?;
        let alternatives = certificate.subject_alternative_name().map_err(|_| ReadCertificate::Parse)?;
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

/// A leaf that names a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeCertificate {
    /// Who.
    pub runtime: RuntimeId,
    /// With which certificate.
    pub leaf: Leaf,
}

/// Hex SHA-256 of a certificate.
#[must_use]
pub fn fingerprint(der: &[u8]) -> String {
    hex::encode(digest::digest(&digest::SHA256, der).as_ref())
}

/// A certificate as PEM (RFC 7468, section 5).
#[must_use]
pub fn to_pem(der: &[u8]) -> String {
    labelled_pem("CERTIFICATE", der)
}

/// DER as PEM under a label of RFC 7468, for example `PRIVATE KEY`.
#[must_use]
pub fn labelled_pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut pem = String::with_capacity(text.len() + text.len() / 64 + 2 * label.len() + 40);
    pem.extend(["-----BEGIN ", label, "-----\n"]);
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let (line, after) = rest.split_at(rest.len().min(64));
        pem.push_str(line);
        pem.push('\n');
        rest = after;
    }
    pem.extend(["-----END ", label, "-----\n"]);
    pem
}

/// Names a set of roots: 16 hex digits that change with the set and with nothing else, neither order nor doubles. Both sides
/// compare it, so there is one way to compute it. 64 bits tell one bundle of a fleet from the next; nothing is proved by them.
#[must_use]
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
    /// [`ReadCertificate::Parse`] and [`ReadCertificate::Key`].
    pub fn read(der: &CertificateDer<'_>) -> Result<Self, ReadCertificate> {
        parse(der).and_then(|certificate| Self::of(&certificate, der))
    }

    fn of(certificate: &X509Certificate<'_>, der: &CertificateDer<'_>) -> Result<Self, ReadCertificate> {
        let public_key = certificate.public_key().subject_public_key.data.to_vec();
        let is_p256_point = public_key.len() == 65 && public_key[0] == 4;
        let validity = certificate.validity();
        let (not_before, not_after) = (validity.not_before.timestamp(), validity.not_after.timestamp());
        let leaf = Self {
            der: der.clone().into_owned(),
            fingerprint: fingerprint(der),
            public_key,
            not_after,
            not_before,
            authority: KeyId::of_authority(certificate),
        };
        is_p256_point.then_some(leaf).ok_or(ReadCertificate::Key)
    }
}

impl RuntimeCertificate {
    /// Reads the runtime from a leaf whose chain was verified: URI, common name and usage, all three.
    ///
    /// # Errors
    /// [`ReadCertificate`].
    pub fn read(der: &CertificateDer<'_>, domain: &TrustDomain) -> Result<Self, ReadCertificate> {
        let certificate = parse(der)?;
        let alternatives = certificate.subject_alternative_name().map_err(|_| ReadCertificate::Parse)?;
        let names = alternatives.as_ref().map_or(&[][..], |extension| &extension.value.general_names);
        let mut uris = names.iter().filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        });
        let (Some(uri), None) = (uris.next(), uris.next()) else {
            return Err(ReadCertificate::Uri);
        };
        let runtime = domain.runtime_of(uri).ok_or(ReadCertificate::Uri)?;
        let mut common_names = certificate.subject().iter_common_name();
        let (Some(common_name), None) = (common_names.next(), common_names.next()) else {
            return Err(ReadCertificate::CommonName);
        };
        if common_name.as_str() != Ok(runtime.as_str()) {
            return Err(ReadCertificate::CommonName);
        }
        let usage = certificate.extended_key_usage().map_err(|_| ReadCertificate::Parse)?;
        if !usage.is_some_and(|usage| usage.value.client_auth) {
            return Err(ReadCertificate::Usage);
        }
        if certificate.is_ca() {
            return Err(ReadCertificate::Authority);
        }
        Ok(Self { runtime, leaf: Leaf::of(&certificate, der)? })
    }
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, ReadCertificate> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        _ => Err(ReadCertificate::Parse),
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
    fn only_uri_name_and_usage_together_make_an_identity() {
        use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        let domain: TrustDomain = "kyma.local".parse().unwrap();
        let uri = "spiffe://kyma.local/runtime/r-1";
        let good = leaf(&[uri], "r-1", &[ClientAuth]);
        let read = RuntimeCertificate::read(&good, &domain).unwrap();
        assert_eq!((read.runtime.as_str(), read.leaf.public_key.len()), ("r-1", 65));
        for (bad, why) in [
            (leaf(&[], "r-1", &[ClientAuth]), ReadCertificate::Uri),
            (leaf(&[uri, uri], "r-1", &[ClientAuth]), ReadCertificate::Uri),
            (leaf(&["spiffe://other/runtime/r-1"], "r-1", &[ClientAuth]), ReadCertificate::Uri),
            (leaf(&[uri], "r-2", &[ClientAuth]), ReadCertificate::CommonName),
            (leaf(&[uri], "r-1", &[ServerAuth]), ReadCertificate::Usage),
            (leaf(&[uri], "r-1", &[]), ReadCertificate::Usage),
            (CertificateDer::from(vec![0x30, 0x00]), ReadCertificate::Parse),
        ] {
            assert_eq!(RuntimeCertificate::read(&bad, &domain), Err(why));
        }
    }
}
