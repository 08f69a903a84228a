use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::PrivatePkcs8KeyDer;

use super::*;

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
    use aws_lc_rs::encoding::{AsDer, EcPrivateKeyRfc5915Der};

    let key = KeyPair::generate().unwrap();
    let leaf = Leaf::read(CertificateParams::default().self_signed(&key).unwrap().der()).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &key.serialize_der()).unwrap();
    let sec1 = AsDer::<EcPrivateKeyRfc5915Der<'_>>::as_der(&pair.private_key()).unwrap();
    let pem =
        format!("-----BEGIN EC PRIVATE KEY-----\n{}\n-----END EC PRIVATE KEY-----\n", STANDARD.encode(sec1.as_ref()));
    let certificate = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";
    for form in [pem, key.serialize_pem()] {
        let identity = tidewatch_kit::tls::Identity::from_pem(certificate.as_bytes(), form.as_bytes()).unwrap();
        let signer = Signer::new(&identity.key, leaf.fingerprint.clone()).unwrap();
        let headers = signer.sign(&MESSAGE, b"body", NONCE, NOW).unwrap();
        assert!(check(&headers, MESSAGE, b"body", &leaf, NOW).is_ok());
    }
    let rsa = PrivateKeyDer::Pkcs1(vec![0].into());
    assert!(matches!(Signer::new(&rsa, String::new()), Err(SignError::Rsa)));
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
