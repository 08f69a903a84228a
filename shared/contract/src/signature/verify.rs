//! Verification by the receiver, on the raw bytes and before any parsing of the body.

use aws_lc_rs::{
    constant_time::verify_slices_are_equal,
    signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey},
};
use thiserror::Error;

use super::{Message, Nonce, WINDOW_SECONDS, content_digest, read_input, read_signature, signature_base};
use crate::certificate::Leaf;

/// The error of verifying a request (status 401).
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum VerifyError {
    /// A field is missing, duplicated, not canonical, or outside of the profile.
    #[error("the signature violates the profile")]
    Profile,
    /// `keyid` does not identify the certificate of the connection.
    #[error("the signature names another certificate")]
    KeyId,
    /// `created` differs too much from the receiver's clock, or the signature has expired.
    #[error("the signature's time lies outside the window")]
    Clock,
    /// The body does not match `Content-Digest`.
    #[error("the body does not match its digest")]
    Digest,
    /// The signature does not verify.
    #[error("the signature does not verify")]
    Signature,
}

/// A received request with its three header values.
#[derive(Clone, Copy, Debug)]
pub struct SignedRequest<'a> {
    /// The signed components.
    pub message: Message<'a>,
    /// Value of `Content-Digest`.
    pub content_digest: &'a str,
    /// Value of `Signature-Input`.
    pub signature_input: &'a str,
    /// Value of `Signature`.
    pub signature: &'a str,
    /// The raw body.
    pub body: &'a [u8],
}

/// The parameters of a valid signature, which only [`verify`] constructs: holding one proves that a signature was
/// checked, and it is not `Clone`, so it vouches for one request. The nonce has not been checked for reuse: the
/// receiver's replay window does that.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifiedSignature {
    /// Time of signing in Unix seconds, by the signer's clock.
    pub created: i64,
    /// Never reused by an honest signer.
    pub nonce: Nonce,
}

#[cfg(any(test, feature = "testing"))]
impl VerifiedSignature {
    /// Stands for a signature that was not checked.
    #[must_use]
    pub const fn unchecked(created: i64, nonce: Nonce) -> Self {
        Self { created, nonce }
    }
}

/// Verifies a request against the leaf of its connection; `now` is the time in Unix seconds.
///
/// # Errors
/// [`VerifyError`]. The time is checked after the signature, so that unauthenticated requests cannot probe the
/// receiver's clock.
pub fn verify(signed: &SignedRequest<'_>, leaf: &Leaf, now: i64) -> Result<VerifiedSignature, VerifyError> {
    let (parameters, inner_list) = read_input(signed.signature_input).ok_or(VerifyError::Profile)?;
    let signature = read_signature(signed.signature).ok_or(VerifyError::Profile)?;
    let nonce = read_nonce(&parameters.nonce).ok_or(VerifyError::Profile)?;
    if parameters.keyid != leaf.fingerprint {
        return Err(VerifyError::KeyId);
    }
    let digest = content_digest(signed.body);
    if verify_slices_are_equal(digest.as_bytes(), signed.content_digest.as_bytes()).is_err() {
        return Err(VerifyError::Digest);
    }
    let base = signature_base(&signed.message, signed.content_digest, inner_list);
    UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &leaf.public_key)
        .verify(base.as_bytes(), &signature)
        .map_err(|_| VerifyError::Signature)?;
    let lifetime = parameters.expires.saturating_sub(parameters.created);
    if !(1..=WINDOW_SECONDS).contains(&lifetime) {
        return Err(VerifyError::Profile);
    }
    if (parameters.created - now).abs() > WINDOW_SECONDS || parameters.expires < now {
        return Err(VerifyError::Clock);
    }
    Ok(VerifiedSignature { created: parameters.created, nonce })
}

fn read_nonce(text: &str) -> Option<Nonce> {
    let (epoch, counter) = text.split_once('-')?;
    let canonical = !counter.is_empty() && counter.bytes().all(|byte| byte.is_ascii_digit());
    let counter = canonical.then(|| counter.parse().ok()).flatten()?;
    Some(Nonce { epoch: epoch.parse().ok()?, counter })
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::{
        rand::SystemRandom,
        signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair},
    };
    use base64::{Engine, engine::general_purpose::STANDARD};
    use rcgen::{CertificateParams, KeyPair};
    use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
    use tidewatch_api::identity::Epoch;

    use super::*;
    use crate::signature::{Headers, Signer};

    const NOW: i64 = 1_800_000_000;
    const MESSAGE: Message<'_> =
        Message { method: "POST", authority: "kcp.test:8443", path: "/v3/events", content_type: "application/json" };
    const NONCE: Nonce = Nonce { epoch: Epoch::new(1), counter: 7 };

    fn party() -> (Signer, Leaf) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        let leaf = Leaf::read(certificate.der()).unwrap();
        let der = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        (Signer::new(&der, leaf.fingerprint.clone()).unwrap(), leaf)
    }

    fn check(
        headers: &Headers,
        message: Message<'_>,
        body: &[u8],
        leaf: &Leaf,
        now: i64,
    ) -> Result<VerifiedSignature, VerifyError> {
        let Headers { content_digest, signature_input, signature } = headers;
        verify(&SignedRequest { message, content_digest, signature_input, signature, body }, leaf, now)
    }

    #[test]
    fn only_the_signed_message_verifies() {
        let (signer, leaf) = party();
        let headers = signer.sign(&MESSAGE, b"body", NONCE, NOW).unwrap();
        assert_eq!(check(&headers, MESSAGE, b"body", &leaf, NOW), Ok(VerifiedSignature { created: NOW, nonce: NONCE }));
        assert_eq!(check(&headers, MESSAGE, b"Body", &leaf, NOW), Err(VerifyError::Digest));
        for other in [
            Message { method: "PUT", ..MESSAGE },
            Message { authority: "kcp.test", ..MESSAGE },
            Message { path: "/v3/heartbeat", ..MESSAGE },
            Message { content_type: "text/plain", ..MESSAGE },
        ] {
            assert_eq!(check(&headers, other, b"body", &leaf, NOW), Err(VerifyError::Signature));
        }
        let (_, stranger) = party();
        assert_eq!(check(&headers, MESSAGE, b"body", &stranger, NOW), Err(VerifyError::KeyId));
        let impostor = Leaf { public_key: stranger.public_key, ..leaf };
        assert_eq!(check(&headers, MESSAGE, b"body", &impostor, NOW), Err(VerifyError::Signature));
    }

    #[test]
    fn keys_sign_in_each_of_their_forms_and_rsa_is_named() {
        use aws_lc_rs::{
            encoding::{AsDer, EcPrivateKeyRfc5915Der},
            signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair},
        };

        let key = KeyPair::generate().unwrap();
        let leaf = Leaf::read(CertificateParams::default().self_signed(&key).unwrap().der()).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &key.serialize_der()).unwrap();
        let sec1 = AsDer::<EcPrivateKeyRfc5915Der<'_>>::as_der(&pair.private_key()).unwrap();
        let pem = format!(
            "-----BEGIN EC PRIVATE KEY-----\n{}\n-----END EC PRIVATE KEY-----\n",
            STANDARD.encode(sec1.as_ref())
        );
        let certificate = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";
        for form in [pem, key.serialize_pem()] {
            let identity = tidewatch_kit::tls::Identity::from_pem(certificate.as_bytes(), form.as_bytes()).unwrap();
            let signer = Signer::new(&identity.key, leaf.fingerprint.clone()).unwrap();
            let headers = signer.sign(&MESSAGE, b"body", NONCE, NOW).unwrap();
            assert!(check(&headers, MESSAGE, b"body", &leaf, NOW).is_ok());
        }
        let rsa = PrivateKeyDer::Pkcs1(vec![0].into());
        assert!(matches!(Signer::new(&rsa, String::new()), Err(crate::signature::SignError::Rsa)));
    }

    #[test]
    fn the_window_is_a_minute_either_way() {
        let (signer, leaf) = party();
        let headers = signer.sign(&MESSAGE, b"", NONCE, NOW).unwrap();
        for (offset, good) in [(-61, false), (-60, true), (0, true), (60, true), (61, false)] {
            let expected = if good { Ok(()) } else { Err(VerifyError::Clock) };
            assert_eq!(check(&headers, MESSAGE, b"", &leaf, NOW + offset).map(drop), expected, "{offset}");
        }
    }

    #[test]
    fn the_profile_is_closed() {
        let (signer, leaf) = party();
        let good = signer.sign(&MESSAGE, b"", NONCE, NOW).unwrap();
        let input = |from: &str, to: &str| {
            assert!(good.signature_input.contains(from), "{from}");
            Headers { signature_input: good.signature_input.replacen(from, to, 1), ..good.clone() }
        };
        let signature = |to: &str| Headers { signature: to.replace("SIG", &good.signature), ..good.clone() };
        for bad in [
            input("\"@method\" ", ""),
            input("\"@method\" \"@authority\"", "\"@authority\" \"@method\""),
            input("\"content-digest\"", "\"content-digest\" \"date\""),
            input("\"@path\"", "\"@path\";req"),
            input(";alg=\"ecdsa-p256-sha256\"", ""),
            input("ecdsa-p256-sha256", "hmac-sha256"),
            input("tidewatch-v3", "tidewatch-v2"),
            input(";tag=", ";extra=1;tag="),
            input(";created=", ";created=1;created="),
            input(";created=", "; created="),
            input("tidewatch=", "other="),
            input("tidewatch=", "a=(), tidewatch="),
            input("tidewatch=(", "tidewatch=();x, tidewatch=("),
            input(&format!("created={NOW}"), "created=\"1\""),
            input("nonce=\"0000000000000001-7\"", "nonce=\"7\""),
            input(&format!("expires={}", NOW + 60), &format!("expires={}", NOW + 61)),
            signature(""),
            signature("SIG, SIG"),
            signature("SIG;x"),
            signature("SIG, b=:AA==:"),
            signature("tidewatch=1"),
        ] {
            let error = check(&bad, MESSAGE, b"", &leaf, NOW).unwrap_err();
            // The lifetime is signed: changing it invalidates the signature before the lifetime is checked.
            assert!(matches!(error, VerifyError::Profile | VerifyError::Signature), "{bad:?}: {error:?}");
            assert!(error == VerifyError::Profile || bad.signature_input.contains(&format!("expires={}", NOW + 61)));
        }
    }

    /// Signs parameters of any form with a valid key, bypassing [`Signer`].
    fn signed_over(parameters: &str) -> (Headers, Leaf) {
        let key = KeyPair::generate().unwrap();
        let leaf = Leaf::read(CertificateParams::default().self_signed(&key).unwrap().der()).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &key.serialize_der()).unwrap();
        let inner_list = parameters.replace("KEY", &leaf.fingerprint);
        let content_digest = content_digest(b"");
        let base = signature_base(&MESSAGE, &content_digest, &inner_list);
        let signature = STANDARD.encode(pair.sign(&SystemRandom::new(), base.as_bytes()).unwrap().as_ref());
        let signature_input = format!("tidewatch={inner_list}");
        (Headers { content_digest, signature_input, signature: format!("tidewatch=:{signature}:") }, leaf)
    }

    #[test]
    fn a_valid_signature_is_accepted_for_at_most_a_minute_and_not_after_its_expiry() {
        let components = "(\"@method\" \"@authority\" \"@path\" \"content-type\" \"content-digest\")";
        let rest = "nonce=\"0000000000000001-7\";alg=\"ecdsa-p256-sha256\";keyid=\"KEY\";tag=\"tidewatch-v3\"";
        for (created, expires, expected) in [
            (NOW, NOW + 60, Ok(())),
            (NOW, NOW + 1, Ok(())),
            (NOW, NOW + 61, Err(VerifyError::Profile)),
            (NOW, NOW, Err(VerifyError::Profile)),
            (NOW, NOW - 1, Err(VerifyError::Profile)),
            (NOW - 30, NOW, Ok(())),
            (NOW - 30, NOW - 1, Err(VerifyError::Clock)),
            (NOW + 60, NOW + 120, Ok(())),
            (NOW + 61, NOW + 62, Err(VerifyError::Clock)),
            (999_999_999_999_999, 999_999_999_999_999, Err(VerifyError::Profile)),
            (-999_999_999_999_999, -999_999_999_999_940, Err(VerifyError::Clock)),
        ] {
            let (headers, leaf) = signed_over(&format!("{components};created={created};expires={expires};{rest}"));
            assert_eq!(check(&headers, MESSAGE, b"", &leaf, NOW).map(drop), expected, "{created} {expires}");
        }
    }

    #[test]
    fn a_valid_signature_of_another_profile_is_rejected() {
        let components = "\"@method\" \"@authority\" \"@path\" \"content-type\" \"content-digest\"";
        let times = format!("created={NOW};expires={}", NOW + 60);
        let nonce = "nonce=\"0000000000000001-7\"";
        let rest = "alg=\"ecdsa-p256-sha256\";keyid=\"KEY\";tag=\"tidewatch-v3\"";
        for parameters in [
            format!("();{times};{nonce};{rest}"),
            format!("({components} \"date\");{times};{nonce};{rest}"),
            format!("({components}  );{times};{nonce};{rest}"),
            format!("({components});{times};{nonce};{rest};x"),
            format!("({components});{times};{nonce};{rest};tag=\"tidewatch-v3\""),
            format!("({components});{times};{rest}"),
            format!("({components});{nonce};{rest}"),
            format!("({components});{times};nonce=\"0000000000000001\";{rest}"),
            format!("({components});{times};nonce=\"0000000000000001-\";{rest}"),
            format!("({components});{times};nonce=\"1-7\";{rest}"),
            format!("({components});{times};nonce=\"0000000000000001-18446744073709551616\";{rest}"),
            format!("({components});{times};{nonce};alg=\"ed25519\";keyid=\"KEY\";tag=\"tidewatch-v3\""),
            format!("({components});{times};{nonce};alg=\"ecdsa-p256-sha256\";keyid=\"KEY\";tag=\"tidewatch-v2\""),
        ] {
            let (headers, leaf) = signed_over(&parameters);
            assert_eq!(check(&headers, MESSAGE, b"", &leaf, NOW), Err(VerifyError::Profile), "{parameters}");
        }
    }

    #[test]
    fn parameters_may_be_in_any_order() {
        let header = "tidewatch=(\"@method\" \"@authority\" \"@path\" \"content-type\" \"content-digest\");tag=\"tidewatch-v3\";\
                      created=1;nonce=\"0000000000000001-7\";keyid=\"k\";alg=\"ecdsa-p256-sha256\";expires=2";
        let (parameters, inner_list) = read_input(header).unwrap();
        assert_eq!((parameters.created, parameters.expires), (1, 2));
        assert!(inner_list.starts_with("(\"@method\"") && inner_list.ends_with("expires=2"));
    }
}
