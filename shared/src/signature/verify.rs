//! Verifying, by the receiver: on the raw bytes, before anything is parsed.

use aws_lc_rs::{
    constant_time::verify_slices_are_equal,
    signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey},
};
use thiserror::Error;

use super::{Message, Nonce, WINDOW_SECONDS, content_digest, fields};
use crate::certificate::Leaf;

/// Why a request is not taken as signed (401).
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// A field is missing, doubled, not canonical, or says something that the profile does not know.
    #[error("the signature is not of this profile")]
    Profile,
    /// `keyid` is not the certificate of this connection.
    #[error("the signature names another certificate")]
    KeyId,
    /// `created` lies too far from our clock, or the signature has expired.
    #[error("the signature's time lies outside the window")]
    Clock,
    /// The body is not what `Content-Digest` says.
    #[error("the body does not match its digest")]
    Digest,
    /// The signature does not verify.
    #[error("the signature does not verify")]
    Signature,
}

/// A request as received, with its three header values.
#[derive(Clone, Copy, Debug)]
pub struct Signed<'a> {
    /// What is covered.
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

/// What a good signature tells. The nonce is not yet known to be fresh: that is the receiver's replay window to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Unix seconds by the signer's clock.
    pub created: i64,
    /// Never used twice by an honest signer.
    pub nonce: Nonce,
}

/// Verifies a request against the leaf of its connection, at a time in Unix seconds.
///
/// # Errors
/// [`Refusal`]. The time is judged after the signature, so that an unsigned request learns nothing about our clock's window.
pub fn verify(signed: &Signed<'_>, leaf: &Leaf, now: i64) -> Result<Verified, Refusal> {
    let (parameters, inner_list) = fields::read_input(signed.signature_input).ok_or(Refusal::Profile)?;
    let signature = fields::read_signature(signed.signature).ok_or(Refusal::Profile)?;
    let nonce = read_nonce(&parameters.nonce).ok_or(Refusal::Profile)?;
    if parameters.keyid != leaf.fingerprint {
        return Err(Refusal::KeyId);
    }
    let digest = content_digest(signed.body);
    if verify_slices_are_equal(digest.as_bytes(), signed.content_digest.as_bytes()).is_err() {
        return Err(Refusal::Digest);
    }
    let base = fields::signature_base(&signed.message, signed.content_digest, inner_list);
    UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &leaf.public_key)
        .verify(base.as_bytes(), &signature)
        .map_err(|_| Refusal::Signature)?;
    let lifetime = parameters.expires.saturating_sub(parameters.created);
    if !(1..=WINDOW_SECONDS).contains(&lifetime) {
        return Err(Refusal::Profile);
    }
    if (parameters.created - now).abs() > WINDOW_SECONDS || parameters.expires < now {
        return Err(Refusal::Clock);
    }
    Ok(Verified { created: parameters.created, nonce })
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
    use rustls_pki_types::PrivatePkcs8KeyDer;

    use super::*;
    use crate::{
        identity::Epoch,
        signature::{Headers, Signer},
    };

    const NOW: i64 = 1_800_000_000;
    const MESSAGE: Message<'_> =
        Message { method: "POST", authority: "kcp.test:8443", path: "/v3/events", content_type: "application/json" };
    const NONCE: Nonce = Nonce { epoch: Epoch::new(1), counter: 7 };

    fn party() -> (Signer, Leaf) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        let leaf = Leaf::read(certificate.der()).unwrap();
        let der = PrivatePkcs8KeyDer::from(key.serialize_der());
        (Signer::new(&der, leaf.fingerprint.clone()).unwrap(), leaf)
    }

    fn check(headers: &Headers, message: Message<'_>, body: &[u8], leaf: &Leaf, now: i64) -> Result<Verified, Refusal> {
        let Headers { content_digest, signature_input, signature } = headers;
        verify(&Signed { message, content_digest, signature_input, signature, body }, leaf, now)
    }

    #[test]
    fn what_was_signed_verifies_and_nothing_else() {
        let (signer, leaf) = party();
        let headers = signer.sign(&MESSAGE, b"body", NONCE, NOW).unwrap();
        assert_eq!(check(&headers, MESSAGE, b"body", &leaf, NOW), Ok(Verified { created: NOW, nonce: NONCE }));
        assert_eq!(check(&headers, MESSAGE, b"Body", &leaf, NOW), Err(Refusal::Digest));
        for other in [
            Message { method: "PUT", ..MESSAGE },
            Message { authority: "kcp.test", ..MESSAGE },
            Message { path: "/v3/heartbeat", ..MESSAGE },
            Message { content_type: "text/plain", ..MESSAGE },
        ] {
            assert_eq!(check(&headers, other, b"body", &leaf, NOW), Err(Refusal::Signature));
        }
        let (_, stranger) = party();
        assert_eq!(check(&headers, MESSAGE, b"body", &stranger, NOW), Err(Refusal::KeyId));
        let impostor = Leaf { public_key: stranger.public_key, ..leaf };
        assert_eq!(check(&headers, MESSAGE, b"body", &impostor, NOW), Err(Refusal::Signature));
    }

    #[test]
    fn the_window_is_a_minute_either_way() {
        let (signer, leaf) = party();
        let headers = signer.sign(&MESSAGE, b"", NONCE, NOW).unwrap();
        for (offset, good) in [(-61, false), (-60, true), (0, true), (60, true), (61, false)] {
            let expected = if good { Ok(()) } else { Err(Refusal::Clock) };
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
            let refused = check(&bad, MESSAGE, b"", &leaf, NOW).unwrap_err();
            // A changed lifetime is signed text: it fails there before it is judged.
            assert!(matches!(refused, Refusal::Profile | Refusal::Signature), "{bad:?}: {refused:?}");
            assert!(refused == Refusal::Profile || bad.signature_input.contains(&format!("expires={}", NOW + 61)));
        }
    }

    /// A good signature over any text of parameters, by one who has the key and not our way of writing.
    fn signed_over(parameters: &str) -> (Headers, Leaf) {
        let key = KeyPair::generate().unwrap();
        let leaf = Leaf::read(CertificateParams::default().self_signed(&key).unwrap().der()).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &key.serialize_der()).unwrap();
        let inner_list = parameters.replace("KEY", &leaf.fingerprint);
        let content_digest = content_digest(b"");
        let base = fields::signature_base(&MESSAGE, &content_digest, &inner_list);
        let signature = STANDARD.encode(pair.sign(&SystemRandom::new(), base.as_bytes()).unwrap().as_ref());
        let signature_input = format!("tidewatch={inner_list}");
        (Headers { content_digest, signature_input, signature: format!("tidewatch=:{signature}:") }, leaf)
    }

    #[test]
    fn a_good_signature_holds_for_a_minute_at_most_and_not_after_its_end() {
        let components = "(\"@method\" \"@authority\" \"@path\" \"content-type\" \"content-digest\")";
        let rest = "nonce=\"0000000000000001-7\";alg=\"ecdsa-p256-sha256\";keyid=\"KEY\";tag=\"tidewatch-v3\"";
        for (created, expires, expected) in [
            (NOW, NOW + 60, Ok(())),
            (NOW, NOW + 1, Ok(())),
            (NOW, NOW + 61, Err(Refusal::Profile)),
            (NOW, NOW, Err(Refusal::Profile)),
            (NOW, NOW - 1, Err(Refusal::Profile)),
            (NOW - 30, NOW, Ok(())),
            (NOW - 30, NOW - 1, Err(Refusal::Clock)),
            (NOW + 60, NOW + 120, Ok(())),
            (NOW + 61, NOW + 62, Err(Refusal::Clock)),
            (999_999_999_999_999, 999_999_999_999_999, Err(Refusal::Profile)),
            (-999_999_999_999_999, -999_999_999_999_940, Err(Refusal::Clock)),
        ] {
            let (headers, leaf) = signed_over(&format!("{components};created={created};expires={expires};{rest}"));
            assert_eq!(check(&headers, MESSAGE, b"", &leaf, NOW).map(drop), expected, "{created} {expires}");
        }
    }

    #[test]
    fn a_good_signature_of_another_profile_is_refused() {
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
            assert_eq!(check(&headers, MESSAGE, b"", &leaf, NOW), Err(Refusal::Profile), "{parameters}");
        }
    }

    #[test]
    fn parameters_may_stand_in_any_order() {
        let header = "tidewatch=(\"@method\" \"@authority\" \"@path\" \"content-type\" \"content-digest\");tag=\"tidewatch-v3\";\
                      created=1;nonce=\"0000000000000001-7\";keyid=\"k\";alg=\"ecdsa-p256-sha256\";expires=2";
        let (parameters, inner_list) = fields::read_input(header).unwrap();
        assert_eq!((parameters.created, parameters.expires), (1, 2));
        assert!(inner_list.starts_with("(\"@method\"") && inner_list.ends_with("expires=2"));
    }
}
