//! Certificate requests (PKCS#10, RFC 2986). The built-in CA reads only the key; the rest matters only for an issuer
//! that signs all of a request. A request for a CA certificate does not come from an agent, and both refuse it.

use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use rcgen::{PKCS_ECDSA_P256_SHA256, PublicKeyData, SubjectPublicKeyInfo};
use rustls_pki_types::{CertificateSigningRequestDer, pem::PemObject};
use thiserror::Error;
use tidewatch_api::identity::{RuntimeId, TrustDomain};
use tidewatch_contract::certificate::labelled_pem;
use x509_parser::{
    certification_request::X509CertificationRequestInfo,
    oid_registry::{OID_X509_COMMON_NAME, OID_X509_EXT_BASIC_CONSTRAINTS},
    prelude::{FromDer, GeneralName, ParsedCriAttribute, ParsedExtension, X509CertificationRequest, X509Extension},
};

/// Longest request, in bytes; a P-256 request with names has a few hundred.
const MAX_BYTES: usize = 16 << 10;

/// Reason for which a request is refused.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ParseRequestError {
    /// More than 16 KiB.
    #[error("the certificate request is too large")]
    TooLarge,
    /// Neither PEM nor PKCS#10.
    #[error("the certificate request is not readable")]
    Parse,
    /// A key other than P-256.
    #[error("the certificate request's key is not P-256")]
    Key,
    /// The signature does not verify, so the sender does not hold the key.
    #[error("the certificate request's signature does not verify")]
    Signature,
    /// A request for a certificate that could sign others.
    #[error("the certificate request is for a certificate authority")]
    Authority,
}

/// A request with a verified signature, so its sender holds the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SigningRequest {
    pub(super) key: SubjectPublicKeyInfo,
    der: Vec<u8>,
}

impl SigningRequest {
    /// Reads a request from DER.
    ///
    /// # Errors
    /// [`ParseRequestError`].
    pub fn from_der(der: &[u8]) -> Result<Self, ParseRequestError> {
        if der.len() > MAX_BYTES {
            return Err(ParseRequestError::TooLarge);
        }
        let Ok(([], request)) = X509CertificationRequest::from_der(der) else {
            return Err(ParseRequestError::Parse);
        };
        let info = &request.certification_request_info;
        let key = SubjectPublicKeyInfo::from_der(info.subject_pki.raw).map_err(|_| ParseRequestError::Key)?;
        if key.algorithm() != &PKCS_ECDSA_P256_SHA256 || key.der_bytes().len() != 65 || key.der_bytes()[0] != 4 {
            return Err(ParseRequestError::Key);
        }
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key.der_bytes())
            .verify(info.raw, &request.signature_value.data)
            .map_err(|_| ParseRequestError::Signature)?;
        if requested_extensions(info).any(requests_ca) {
            return Err(ParseRequestError::Authority);
        }
        Ok(Self { key, der: der.to_vec() })
    }

    /// Reads a request from PEM.
    ///
    /// # Errors
    /// [`ParseRequestError`].
    pub fn from_pem(pem: &[u8]) -> Result<Self, ParseRequestError> {
        if pem.len() > 2 * MAX_BYTES {
            return Err(ParseRequestError::TooLarge);
        }
        let der = CertificateSigningRequestDer::from_pem_slice(pem).map_err(|_| ParseRequestError::Parse)?;
        Self::from_der(&der)
    }

    /// Serializes it as PEM.
    pub(super) fn to_pem(&self) -> String {
        labelled_pem("CERTIFICATE REQUEST", &self.der)
    }

    /// True if it requests exactly one runtime's identity and nothing else, so that it is safe for an issuer that signs
    /// all of it.
    pub(super) fn names_exactly(&self, runtime: &RuntimeId, domain: &TrustDomain) -> bool {
        let Ok((_, request)) = X509CertificationRequest::from_der(&self.der) else { return false };
        let info = &request.certification_request_info;
        let mut subject = info.subject.iter_attributes();
        let (Some(name), None) = (subject.next(), subject.next()) else { return false };
        if name.attr_type() != &OID_X509_COMMON_NAME || name.as_str() != Ok(runtime.as_str()) {
            return false;
        }
        let mut attributes = info.attributes().iter();
        let (Some(attribute), None) = (attributes.next(), attributes.next()) else { return false };
        let ParsedCriAttribute::ExtensionRequest(request) = attribute.parsed_attribute() else {
            return false;
        };
        let mut is_named = false;
        for extension in &request.extensions {
            match extension.parsed_extension() {
                ParsedExtension::SubjectAlternativeName(names) if !is_named => {
                    let [GeneralName::URI(uri)] = names.general_names.as_slice() else { return false };
                    if *uri != domain.uri(runtime) {
                        return false;
                    }
                    is_named = true;
                }
                ParsedExtension::BasicConstraints(constraints) if !constraints.ca => {}
                _ => return false,
            }
        }
        is_named
    }
}

/// Requested extensions (RFC 2985, section 5.4.2).
fn requested_extensions<'a>(info: &'a X509CertificationRequestInfo<'a>) -> impl Iterator<Item = &'a X509Extension<'a>> {
    info.attributes().iter().flat_map(|attribute| match attribute.parsed_attribute() {
        ParsedCriAttribute::ExtensionRequest(request) => request.extensions.as_slice(),
        _ => &[],
    })
}

/// True if an extension requests a CA certificate (RFC 5280, section 4.2.1.9); one that is not parsable counts as such.
fn requests_ca(extension: &X509Extension<'_>) -> bool {
    let is_leaf =
        matches!(extension.parsed_extension(), ParsedExtension::BasicConstraints(constraints) if !constraints.ca);
    extension.oid == OID_X509_EXT_BASIC_CONSTRAINTS && !is_leaf
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CustomExtension, DnType, IsCa, KeyPair, PKCS_ECDSA_P384_SHA384, SanType,
    };
    use tidewatch_contract::certificate::RuntimeCertificate;

    use super::*;
    use crate::{CA_VALIDITY, Ca, RUNTIME_VALIDITY};

    const CA: Result<(), ParseRequestError> = Err(ParseRequestError::Authority);

    fn request(key: &KeyPair) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "another");
        let uri = "spiffe://kyma.local/runtime/another";
        params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        params.serialize_request(key).unwrap().der().to_vec()
    }

    #[test]
    fn names_in_a_request_are_ignored_and_its_key_is_used() {
        let key = KeyPair::generate().unwrap();
        let read = SigningRequest::from_der(&request(&key)).unwrap();
        let ca = Ca::generate("root", 1_800_000_000, CA_VALIDITY).unwrap();
        let runtime = "r-1".parse().unwrap();
        let domain = "kyma.local".parse().unwrap();
        let chain = ca.issue_runtime(&runtime, &domain, &read.key, 1_800_000_000, RUNTIME_VALIDITY).unwrap();
        let leaf = tidewatch_kit::tls::certificates(chain.as_bytes()).unwrap().remove(0);
        let certificate = RuntimeCertificate::read(&leaf, &domain).unwrap();
        assert_eq!((certificate.runtime, &*certificate.leaf.public_key), (runtime, key.public_key_raw()));
    }

    #[test]
    fn request_for_a_replica_gets_the_certificate_of_its_runtime() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI("spiffe://kyma.local/replica/a".try_into().unwrap())];
        let request = SigningRequest::from_der(params.serialize_request(&key).unwrap().der()).unwrap();
        let ca = Ca::generate("root", 1_800_000_000, CA_VALIDITY).unwrap();
        let runtime = "r-1".parse().unwrap();
        let domain = "kyma.local".parse().unwrap();
        let chain = ca.issue_runtime(&runtime, &domain, &request.key, 1_800_000_000, RUNTIME_VALIDITY).unwrap();
        let leaf = tidewatch_kit::tls::certificates(chain.as_bytes()).unwrap().remove(0);
        assert_eq!(crate::replica_of(&leaf, &domain), None);
        assert_eq!(RuntimeCertificate::read(&leaf, &domain).unwrap().runtime, runtime);
    }

    #[test]
    fn only_a_request_for_exactly_one_identity_is_forwarded() {
        let (runtime, domain): (RuntimeId, TrustDomain) = ("r-1".parse().unwrap(), "kyma.local".parse().unwrap());
        let uri = |text: &str| SanType::URI(text.try_into().unwrap());
        let good = || {
            let mut params = CertificateParams::default();
            params.distinguished_name = rcgen::DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, "r-1");
            params.subject_alt_names = vec![uri("spiffe://kyma.local/runtime/r-1")];
            params
        };
        let parse = |change: fn(&mut CertificateParams)| {
            let mut params = good();
            change(&mut params);
            let request = params.serialize_request(&KeyPair::generate().unwrap()).unwrap();
            SigningRequest::from_der(request.der()).unwrap().names_exactly(&runtime, &domain)
        };
        assert!(parse(|_| {}));
        let bad: [fn(&mut CertificateParams); 9] = [
            |params| {
                params.subject_alt_names = vec![SanType::URI("spiffe://kyma.local/replica/r-1".try_into().unwrap())]
            },
            |params| params.subject_alt_names.push(SanType::URI("spiffe://kyma.local/replica/r-1".try_into().unwrap())),
            |params| params.subject_alt_names.clear(),
            |params| {
                params.subject_alt_names = vec![SanType::URI("spiffe://kyma.local/runtime/r-2".try_into().unwrap())]
            },
            |params| params.subject_alt_names = vec![SanType::URI("spiffe://other/runtime/r-1".try_into().unwrap())],
            |params| params.subject_alt_names.push(SanType::DnsName("kcp.example".try_into().unwrap())),
            |params| params.subject_alt_names.push(SanType::URI("spiffe://kyma.local/runtime/r-1".try_into().unwrap())),
            |params| params.distinguished_name.push(DnType::OrganizationName, "system:masters"),
            |params| params.distinguished_name.push(DnType::CommonName, "r-2"),
        ];
        for (at, change) in bad.into_iter().enumerate() {
            assert!(!parse(change), "{at}");
        }
    }

    #[test]
    fn request_for_a_ca_is_refused_and_an_explicit_non_ca_is_accepted() {
        let parse = |change: &dyn Fn(&mut CertificateParams)| {
            let mut params = CertificateParams::default();
            change(&mut params);
            let request = params.serialize_request(&KeyPair::generate().unwrap()).unwrap();
            SigningRequest::from_der(request.der()).map(drop)
        };
        // RFC 5280, section 4.2.1.9, in the encodings of various libraries.
        let flag = |content: &'static [u8]| {
            move |params: &mut CertificateParams| {
                let mut extension = CustomExtension::from_oid_content(&[2, 5, 29, 19], content.to_vec());
                extension.set_criticality(true);
                params.custom_extensions = vec![extension];
            }
        };
        assert_eq!(parse(&|params| params.is_ca = IsCa::ExplicitNoCa), Ok(()));
        assert_eq!(parse(&flag(&[0x30, 0x00])), Ok(()), "the default is FALSE");
        assert_eq!(parse(&|params| params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0))), CA);
        assert_eq!(parse(&flag(&[0x30, 0x03, 0x01, 0x01, 0xff])), CA);
        assert_eq!(parse(&flag(&[0x30, 0x05, 0x01])), CA, "an unreadable flag counts as CA");
    }

    #[test]
    fn only_a_p256_key_that_signed_the_request_is_accepted() {
        let other = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap();
        assert_eq!(SigningRequest::from_der(&request(&other)), Err(ParseRequestError::Key));
        let good = request(&KeyPair::generate().unwrap());
        let at = good.windows(7).position(|window| window == b"another").unwrap();
        let mut tampered = good.clone();
        tampered[at] = b'A';
        assert_eq!(SigningRequest::from_der(&tampered), Err(ParseRequestError::Signature));
        let mut longer = good.clone();
        longer.push(0);
        assert_eq!(SigningRequest::from_der(&longer), Err(ParseRequestError::Parse));
        assert_eq!(SigningRequest::from_der(&good[..good.len() - 1]), Err(ParseRequestError::Parse));
        assert_eq!(SigningRequest::from_der(&vec![0x30; MAX_BYTES + 1]), Err(ParseRequestError::TooLarge));
        assert_eq!(SigningRequest::from_pem(b"nothing"), Err(ParseRequestError::Parse));
    }
}
