//! The built-in certificate authority.

use std::time::Duration;

use aws_lc_rs::rand;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SerialNumber, date_time_ymd,
};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject};
use tidewatch_api::{
    identity::{RuntimeId, TrustDomain},
    replica::ReplicaName,
};
use tidewatch_contract::certificate::{KeyId, Leaf, to_pem};
use tidewatch_kit::tls::{Identity, TlsConfigError};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{BACKDATE, PkiError, TrustBundle};

/// Latest notAfter that this CA writes: 2100-01-01.
const LAST_SECOND: i64 = 4_102_444_800;

/// Common name in the certificates of all replicas. No runtime id contains a space, so contract v2, which identifies a
/// runtime by its common name alone, finds none in it.
pub(super) const REPLICA_COMMON_NAME: &str = "tidewatch replica";

/// A certificate authority: one certificate and its P-256 key.
pub struct Ca {
    certificate: CertificateDer<'static>,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
    key_id: Option<KeyId>,
    not_before: i64,
    not_after: i64,
}

/// A certificate chain, leaf first, and the leaf's key; both in PEM, as in Secrets and files.
#[derive(Clone)]
pub struct PemIdentity {
    /// Leaf first, without the root.
    pub chain: String,
    /// PKCS#8.
    pub key: String,
}

impl PemIdentity {
    /// Parses it for a TLS configuration.
    ///
    /// # Errors
    /// [`TlsConfigError`].
    pub fn identity(&self) -> Result<Identity, TlsConfigError> {
        Identity::from_pem(self.chain.as_bytes(), self.key.as_bytes())
    }
}

impl Ca {
    /// Generates a root with a new key, valid from ten minutes before `now` (Unix seconds) until `validity` after it.
    ///
    /// # Errors
    /// [`PkiError`].
    pub fn generate(name: &str, now: i64, validity: Duration) -> Result<Self, PkiError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(PkiError::GenerateKey)?;
        let mut params = params(name, now, end(now, validity)?)?;
        // No intermediates: the key of a leaf can never issue, whatever the leaf's extensions are.
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).map_err(PkiError::Sign)?;
        Self::from_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes())
    }

    /// Reads a CA. The first certificate is the issuer; further ones are ignored.
    ///
    /// # Errors
    /// [`PkiError`]: also when key and certificate do not belong together. The validity period is checked when it issues.
    pub fn from_pem(certificate: &[u8], key: &[u8]) -> Result<Self, PkiError> {
        let certificate = CertificateDer::from_pem_slice(certificate).map_err(|_| PkiError::ReadCertificate)?;
        let leaf = Leaf::read(&certificate).map_err(|_| PkiError::NotCa)?;
        if !may_issue(&certificate) {
            return Err(PkiError::NotCa);
        }
        let key = std::str::from_utf8(key).map_err(|_| PkiError::ReadKey(rcgen::Error::CouldNotParseKeyPair))?;
        let key = KeyPair::from_pkcs8_pem_and_sign_algo(key, &PKCS_ECDSA_P256_SHA256).map_err(PkiError::ReadKey)?;
        if key.public_key_raw() != leaf.public_key {
            return Err(PkiError::KeyMismatch);
        }
        let issuer = Issuer::from_ca_cert_der(&certificate, key).map_err(|_| PkiError::ReadCertificate)?;
        let pem = to_pem(&certificate);
        let key_id = KeyId::of_subject(&certificate).map_err(|_| PkiError::NotCa)?;
        Ok(Self { certificate, pem, issuer, key_id, not_before: leaf.not_before, not_after: leaf.not_after })
    }

    /// Its certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Its certificate as PEM.
    pub fn certificate_pem(&self) -> &str {
        &self.pem
    }

    /// Key identifier that the leaves carry. `None` when the certificate has none; every generated root has one.
    pub const fn key_id(&self) -> Option<&KeyId> {
        self.key_id.as_ref()
    }

    /// Time of generation, in Unix seconds: ten minutes after notBefore.
    pub const fn generated_at(&self) -> i64 {
        self.not_before + BACKDATE.as_secs().cast_signed()
    }

    /// notAfter, in Unix seconds.
    pub const fn not_after(&self) -> i64 {
        self.not_after
    }

    /// Its key as PKCS#8 PEM, for its Secret or file.
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// A trust bundle of this CA alone.
    pub fn trust_bundle(&self) -> TrustBundle {
        TrustBundle::of(vec![self.certificate.clone()])
    }

    /// Generates a key and issues the certificate of a runtime for it, where files replace enrolment.
    ///
    /// # Errors
    /// [`PkiError`].
    pub fn make_runtime(
        &self,
        runtime: &RuntimeId,
        domain: &TrustDomain,
        now: i64,
        validity: Duration,
    ) -> Result<PemIdentity, PkiError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(PkiError::GenerateKey)?;
        let chain = self.issue_runtime(runtime, domain, &key, now, validity)?;
        Ok(PemIdentity { chain, key: key.serialize_pem() })
    }

    /// Generates a key and issues a server certificate for all given names.
    ///
    /// # Errors
    /// [`PkiError`].
    pub fn make_server(&self, names: &[ServerName<'_>], now: i64, validity: Duration) -> Result<PemIdentity, PkiError> {
        if names.is_empty() {
            return Err(PkiError::NoName);
        }
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(PkiError::GenerateKey)?;
        let mut params = params("tidewatch", now, self.end_within(now, validity)?)?;
        let names: Vec<_> = names.iter().map(|name| name.to_str().into_owned()).collect();
        params.subject_alt_names = CertificateParams::new(names).map_err(PkiError::Name)?.subject_alt_names;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        Ok(PemIdentity { chain: self.leaf(params, &key)?, key: key.serialize_pem() })
    }

    /// Issues the certificate of a runtime for a key, as PEM chain. It expires after `validity`, or with the CA.
    pub(super) fn issue_runtime(
        &self,
        runtime: &RuntimeId,
        domain: &TrustDomain,
        key: &impl PublicKeyData,
        now: i64,
        validity: Duration,
    ) -> Result<String, PkiError> {
        let mut params = params(runtime.as_str(), now, self.end_within(now, validity)?)?;
        params.subject_alt_names = vec![SanType::URI(domain.uri(runtime).try_into().map_err(PkiError::Name)?)];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.leaf(params, key)
    }

    /// Generates a key and issues the certificate of a replica for it. It expires after `validity`, or with the CA.
    ///
    /// # Errors
    /// [`PkiError`].
    pub fn make_replica(
        &self,
        replica: &ReplicaName,
        domain: &TrustDomain,
        now: i64,
        validity: Duration,
    ) -> Result<PemIdentity, PkiError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(PkiError::GenerateKey)?;
        let mut params = params(REPLICA_COMMON_NAME, now, self.end_within(now, validity)?)?;
        params.subject_alt_names = vec![SanType::URI(replica.uri(domain).try_into().map_err(PkiError::Name)?)];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Ok(PemIdentity { chain: self.leaf(params, &key)?, key: key.serialize_pem() })
    }

    pub(super) fn leaf(&self, mut params: CertificateParams, key: &impl PublicKeyData) -> Result<String, PkiError> {
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        Ok(params.signed_by(key, &self.issuer).map_err(PkiError::Sign)?.pem())
    }

    fn end_within(&self, now: i64, validity: Duration) -> Result<i64, PkiError> {
        if now < self.not_before || now >= self.not_after {
            return Err(PkiError::CaExpired);
        }
        Ok(end(now, validity)?.min(self.not_after))
    }
}

/// RFC 5280, sections 4.2.1.9 and 4.2.1.3. An absent key usage forbids nothing.
fn may_issue(certificate: &CertificateDer<'_>) -> bool {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return false };
    let Ok(usage) = certificate.key_usage() else { return false };
    certificate.is_ca() && usage.is_none_or(|usage| usage.value.key_cert_sign())
}

fn end(now: i64, validity: Duration) -> Result<i64, PkiError> {
    let seconds = i64::try_from(validity.as_secs()).map_err(|_| PkiError::Time)?;
    let end = now.checked_add(seconds).ok_or(PkiError::Time)?;
    if now < 0 || end > LAST_SECOND {
        return Err(PkiError::Time);
    }
    Ok(end)
}

pub(super) fn params(common_name: &str, now: i64, not_after: i64) -> Result<CertificateParams, PkiError> {
    let at = |second: i64| {
        let since = u64::try_from(second).map_err(|_| PkiError::Time)?;
        Ok(date_time_ymd(1970, 1, 1) + Duration::from_secs(since))
    };
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = at(now - BACKDATE.as_secs().cast_signed())?;
    params.not_after = at(not_after)?;
    params.serial_number = Some(serial()?);
    Ok(params)
}

/// 127 random bits: RFC 5280, section 4.1.2.2, requires a unique positive number.
fn serial() -> Result<SerialNumber, PkiError> {
    let mut bytes = [0; 16];
    rand::fill(&mut bytes).map_err(|_| PkiError::Serial)?;
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

#[cfg(test)]
mod tests {
    use tidewatch_contract::certificate::RuntimeCertificate;
    use tidewatch_kit::tls::certificates;

    use super::*;
    use crate::{CA_VALIDITY, RUNTIME_VALIDITY, SERVER_VALIDITY};

    const NOW: i64 = 1_800_000_000;

    fn ca() -> Ca {
        Ca::generate("test root", NOW, CA_VALIDITY).unwrap()
    }

    fn parties() -> (RuntimeId, TrustDomain) {
        ("r-1".parse().unwrap(), "kyma.local".parse().unwrap())
    }

    #[test]
    fn runtime_leaf_has_the_expected_identity_and_validity() {
        let (runtime, domain) = parties();
        let made = ca().make_runtime(&runtime, &domain, NOW, RUNTIME_VALIDITY).unwrap();
        let identity = made.identity().unwrap();
        let read = RuntimeCertificate::read(&identity.chain[0], &domain).unwrap();
        assert_eq!((read.runtime, identity.chain.len()), (runtime, 1));
        assert_eq!((read.leaf.not_before, read.leaf.not_after), (NOW - 600, NOW + 86_400));
    }

    #[test]
    fn ca_round_trips_as_pem() {
        let (runtime, domain) = parties();
        let first = ca();
        let again = Ca::from_pem(first.certificate_pem().as_bytes(), first.key_pem().as_bytes()).unwrap();
        assert_eq!(again.certificate(), first.certificate());
        again.make_runtime(&runtime, &domain, NOW, RUNTIME_VALIDITY).unwrap();
        let server = first.make_server(&["localhost".try_into().unwrap()], NOW, SERVER_VALIDITY).unwrap();
        let pair = |certificate: &str, key: &str| Ca::from_pem(certificate.as_bytes(), key.as_bytes()).err().unwrap();
        assert!(matches!(pair(first.certificate_pem(), &ca().key_pem()), PkiError::KeyMismatch));
        assert!(matches!(pair(&server.chain, &server.key), PkiError::NotCa));
        assert!(matches!(pair(first.certificate_pem(), "no key"), PkiError::ReadKey(_)));
        assert!(matches!(pair("no certificate", &first.key_pem()), PkiError::ReadCertificate));
    }

    #[test]
    fn no_leaf_outlives_its_ca_and_an_expired_ca_issues_nothing() {
        let (runtime, domain) = parties();
        let ca = Ca::generate("short", NOW, Duration::from_secs(3_600)).unwrap();
        let made = ca.make_runtime(&runtime, &domain, NOW, RUNTIME_VALIDITY).unwrap();
        assert_eq!(Leaf::read(&made.identity().unwrap().chain[0]).unwrap().not_after, NOW + 3_600);
        for now in [NOW + 3_600, NOW - 601] {
            assert!(matches!(ca.make_runtime(&runtime, &domain, now, RUNTIME_VALIDITY), Err(PkiError::CaExpired)));
        }
    }

    #[test]
    fn server_names_are_dns_names_or_addresses() {
        for bad in ["", "a b", "-a", "https://a"] {
            assert!(crate::flags::server_name(bad).is_err(), "{bad}");
        }
        let names = ["kcp.example", "127.0.0.1", "::1"].map(|name| crate::flags::server_name(name).unwrap());
        let made = ca().make_server(&names, NOW, SERVER_VALIDITY).unwrap();
        let der = certificates(made.chain.as_bytes()).unwrap().remove(0);
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();
        assert_eq!(certificate.subject_alternative_name().unwrap().unwrap().value.general_names.len(), 3);
        assert!(matches!(ca().make_server(&[], NOW, SERVER_VALIDITY), Err(PkiError::NoName)));
    }

    #[test]
    fn invalid_times_are_refused() {
        for (now, validity) in [(-1, CA_VALIDITY), (0, CA_VALIDITY), (NOW, Duration::MAX), (i64::MAX, CA_VALIDITY)] {
            assert!(matches!(Ca::generate("no", now, validity), Err(PkiError::Time)), "{now}");
        }
    }
}
