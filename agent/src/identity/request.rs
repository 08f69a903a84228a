//! Generates a key and the request for its certificate: PKCS#10 (RFC 2986) in a single fixed shape. A request is four
//! nested sequences, so it is encoded here: a library for it would take more of the agent's memory than this whole
//! module.
//!
//! The request contains the names because an external issuer signs the names in the request; the built-in CA uses the
//! key alone.

use aws_lc_rs::{
    error::Unspecified,
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair},
};
use tidewatch_api::identity::{RuntimeId, TrustDomain};
use tidewatch_contract::certificate::labelled_pem;

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const UTF8_STRING: u8 = 0x0c;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
/// Attributes of a request: `[0]`, constructed (RFC 2986, section 4.1).
const ATTRIBUTES: u8 = 0xa0;
/// URI in a `GeneralName`: `[6]`, primitive (RFC 5280, section 4.2.1.6).
const URI: u8 = 0x86;

/// 2.5.4.3, `id-at-commonName`.
const COMMON_NAME: &[u8] = &[0x06, 3, 0x55, 0x04, 0x03];
/// 1.2.840.10045.2.1, `id-ecPublicKey`.
const EC_PUBLIC_KEY: &[u8] = &[0x06, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
/// 1.2.840.10045.3.1.7, `secp256r1`.
const P256: &[u8] = &[0x06, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
/// 1.2.840.10045.4.3.2, `ecdsa-with-SHA256`.
const ECDSA_WITH_SHA256: &[u8] = &[0x06, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02];
/// 1.2.840.113549.1.9.14, `id-ExtensionReq`.
const EXTENSION_REQUEST: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x09, 0x0e];
/// 2.5.29.17, `id-ce-subjectAltName`.
const SUBJECT_ALTERNATIVE_NAME: &[u8] = &[0x06, 3, 0x55, 0x1d, 0x11];

/// A generated key and its certificate request, both in PEM.
pub(super) struct KeyAndRequest {
    /// PKCS#8. Leaves the process only for the agent's own Secret.
    pub(super) key: String,
    /// PKCS#10.
    pub(super) request: String,
}

/// Generates a P-256 key and a request that names a runtime, as common name and as URI.
pub(super) fn generate(runtime: &RuntimeId, domain: &TrustDomain) -> Result<KeyAndRequest, Unspecified> {
    let key = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING)?;
    let info = info(runtime, domain, key.public_key().as_ref());
    let signature = key.sign(&SystemRandom::new(), &info)?;
    let request = tlv(SEQUENCE, &[&info, &tlv(SEQUENCE, &[ECDSA_WITH_SHA256]), &bits(signature.as_ref())]);
    Ok(KeyAndRequest {
        key: labelled_pem("PRIVATE KEY", key.to_pkcs8v1()?.as_ref()),
        request: labelled_pem("CERTIFICATE REQUEST", &request),
    })
}

/// Encodes the `CertificationRequestInfo`, which is signed.
fn info(runtime: &RuntimeId, domain: &TrustDomain, point: &[u8]) -> Vec<u8> {
    let common_name = tlv(SEQUENCE, &[COMMON_NAME, &tlv(UTF8_STRING, &[runtime.as_str().as_bytes()])]);
    let subject = tlv(SEQUENCE, &[&tlv(SET, &[&common_name])]);
    let public_key = tlv(SEQUENCE, &[&tlv(SEQUENCE, &[EC_PUBLIC_KEY, P256]), &bits(point)]);
    let names = tlv(SEQUENCE, &[&tlv(URI, &[domain.uri(runtime).as_bytes()])]);
    let extension = tlv(SEQUENCE, &[SUBJECT_ALTERNATIVE_NAME, &tlv(OCTET_STRING, &[&names])]);
    let extensions = tlv(SET, &[&tlv(SEQUENCE, &[&extension])]);
    let attributes = tlv(ATTRIBUTES, &[&tlv(SEQUENCE, &[EXTENSION_REQUEST, &extensions])]);
    tlv(SEQUENCE, &[&tlv(INTEGER, &[&[0]]), &subject, &public_key, &attributes])
}

/// Encodes whole bytes as a bit string, without unused bits.
fn bits(bytes: &[u8]) -> Vec<u8> {
    tlv(BIT_STRING, &[&[0], bytes])
}

/// Encodes tag, length and value (X.690, section 8.1.3). The contents here are far below the limit of 65,535 bytes.
fn tlv(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let [.., high, low] = length.to_be_bytes();
    let mut der = Vec::with_capacity(length + 4);
    der.push(tag);
    match length {
        0..0x80 => der.push(low),
        0x80..0x100 => der.extend([0x81, low]),
        _ => der.extend([0x82, high, low]),
    }
    parts.iter().for_each(|part| der.extend_from_slice(part));
    der
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateSigningRequestParams, DnType, DnValue, PublicKeyData, SanType};

    use super::*;

    #[test]
    fn request_names_its_runtime_and_is_signed_by_its_key() {
        let long = "r".repeat(63);
        for (id, domain) in [("r-1", "kyma.local"), (long.as_str(), &"d".repeat(255))] {
            let (runtime, domain): (RuntimeId, TrustDomain) = (id.parse().unwrap(), domain.parse().unwrap());
            let KeyAndRequest { key, request } = generate(&runtime, &domain).unwrap();
            // Parsing verifies the signature.
            let read = CertificateSigningRequestParams::from_pem(&request).unwrap();
            let names = &read.params.subject_alt_names;
            assert!(matches!(&names[..], [SanType::URI(uri)] if uri.as_str() == domain.uri(&runtime)), "{names:?}");
            let common_name = read.params.distinguished_name.get(&DnType::CommonName);
            assert_eq!(common_name, Some(&DnValue::Utf8String(id.to_owned())));
            let key = rcgen::KeyPair::from_pem(&key).unwrap();
            assert_eq!(read.public_key.der_bytes(), key.der_bytes());
            assert!(key.is_compatible(&rcgen::PKCS_ECDSA_P256_SHA256));
        }
    }

    #[test]
    fn keys_are_unique() {
        let generate = || generate(&"r-1".parse().unwrap(), &"kyma.local".parse().unwrap()).unwrap();
        assert_ne!(generate().key, generate().key);
    }

    #[test]
    fn lengths_use_the_shortest_encoding() {
        for (length, head) in [(0, &[5, 0][..]), (127, &[5, 127]), (128, &[5, 0x81, 128]), (256, &[5, 0x82, 1, 0])] {
            let der = tlv(5, &[&vec![7; length]]);
            assert_eq!((&der[..head.len()], der.len()), (head, head.len() + length));
        }
    }
}
