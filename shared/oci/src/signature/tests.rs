//! Tests of signatures.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use x509_parser::pem::Pem;

use super::{
    testing::{PAIRS, document, published, resource, signed, trusted},
    *,
};
use crate::{component::ComponentVersion, descriptor::Descriptor, digest::Digest};

const NAME: &str = "release";
const LAYER: &[u8] = b"kind: ConfigMap\n";

fn method(normalisation: Normalisation, hash: HashAlgorithm, algorithm: SignatureAlgorithm) -> Method {
    Method { normalisation, hash, algorithm }
}

/// A module with a label that signs, one that does not, and an image.
fn module() -> Value {
    let layer = Digest::of(LAYER);
    let mut raw_manifest = resource("raw-manifest", "directoryTree", "genericBlobDigest/v1", &layer.hex());
    raw_manifest["access"] =
        json!({"type": "localBlob", "localReference": layer.to_string(), "mediaType": "application/x-tar"});
    let mut image = resource("tide", "ociArtifact", "ociArtifactDigest/v1", &Digest::of(b"image").hex());
    image["access"] = json!({"type": "ociArtifact", "imageReference": "reg.example.org/tide:1.2.0"});
    document(json!({
        "name": "example.org/tide", "version": "1.2.0", "provider": "example.org", "repositoryContexts": [], "sources": [],
        "componentReferences": [], "resources": [raw_manifest, image], "labels": [
            {"name": "signs", "value": {"a": [1, "<"]}, "version": "v1", "signing": true},
            {"name": "other", "value": "x", "signing": false},
        ],
    }))
}

fn descriptor(value: &Value) -> Descriptor {
    let component = ComponentVersion::new("example.org/tide", "1.2.0").unwrap();
    Document::from(value.clone()).descriptor(&component).unwrap()
}

fn release() -> ComponentKeys {
    trusted([("release.pem", &PAIRS[0].public)])
}

/// Verifies with the key of the signer.
fn checked(value: &Value) -> Result<String, SignatureError> {
    verify(&Document::from(value.clone()), &release())
}

fn at(value: &Value, pointer: &str, new: Value) -> Value {
    let mut changed = value.clone();
    *changed.pointer_mut(pointer).unwrap() = new;
    changed
}

#[test]
fn every_combination_of_algorithms_is_verified() {
    use {HashAlgorithm::*, Normalisation::*, SignatureAlgorithm::*};
    for normalisation in [V1, V2, V3, V4Alpha1] {
        for (hash, algorithm) in [(Sha256, Pkcs1), (Sha256, Pss), (Sha512, Pkcs1), (Sha512, Pss)] {
            let value = signed(&module(), NAME, method(normalisation, hash, algorithm));
            assert_eq!(checked(&value), Ok(NAME.to_owned()), "{normalisation} {hash:?} {algorithm}");
            let other = trusted([("release.pem", &PAIRS[1].public)]);
            let refused = verify(&Document::from(value), &other).unwrap_err();
            assert_eq!(refused, SignatureError::Mismatch { name: Excerpt::of(NAME) });
        }
    }
}

/// Signatures of another implementation, Go's crypto/rsa.
#[test]
fn foreign_signatures_are_verified() {
    let keys = trusted([("go.pem", include_str!("data/go.pem"))]);
    let verify = |algorithm: &str, media_type: &str, value: &str| {
        let digest = json!({
            "hashAlgorithm": "SHA-256", "normalisationAlgorithm": "jsonNormalisation/v3",
            "value": "10ac0b3a850e1f1becf56d5d45e9742fa0a91103d25ba93cc3a509f68797e90f",
        });
        let signature = json!({"algorithm": algorithm, "mediaType": media_type, "value": value.trim_end()});
        let signature = json!({"name": "go", "digest": digest, "signature": signature});
        super::verify(&Document::from(published()).with_signature(signature), &keys).map_err(|error| error.reason())
    };
    let pkcs1 = "RSASSA-PKCS1-V1_5";
    let pss = "RSASSA-PSS";
    let rsa = "application/vnd.ocm.signature.rsa";
    let rsa_pss = "application/vnd.ocm.signature.rsa.pss";
    let pem = "application/x-pem-file";
    let longest = include_str!("data/go-pss-longest.hex");
    let in_pem = include_str!("data/go-pss.sig.pem");
    let with_chain = format!("{in_pem}-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    let go = || Ok("go".to_owned());
    for (algorithm, media_type, value, result) in [
        (pkcs1, rsa, include_str!("data/go-pkcs1.hex"), go()),
        (pss, rsa_pss, longest, go()),
        (pss, rsa_pss, include_str!("data/go-pss-digest.hex"), go()),
        (pss, pem, in_pem, go()),
        (pss, pem, &*with_chain, go()),
        (pss, rsa_pss, include_str!("data/go-pss-20.hex"), Err("mismatch")),
        (pkcs1, pem, in_pem, Err("mismatch")),
        (pkcs1, rsa_pss, longest, Err("algorithm")),
        (pss, rsa, longest, Err("algorithm")),
        (pss, "text/plain", longest, Err("algorithm")),
        ("rsassa-pss", rsa_pss, longest, Err("algorithm")),
        (pss, rsa_pss, &longest[2..], Err("mismatch")),
        (pss, rsa_pss, &longest[1..], Err("encoding")),
        (pss, rsa_pss, "zz", Err("encoding")),
        (pss, pem, longest, Err("encoding")),
        (pss, pem, &in_pem[..in_pem.len() - 10], Err("encoding")),
        (pss, pem, "-----BEGIN SIGNATURE-----\n?\n-----END SIGNATURE-----", Err("encoding")),
        (pss, pem, "-----BEGIN SIGNATURE----------END SIGNATURE-----", Err("mismatch")),
    ] {
        assert_eq!(verify(algorithm, media_type, value), result, "{algorithm} {media_type} {value:.40}");
    }
}

/// Changes of a signed component descriptor, with the reason of the refusal if it is one.
#[test]
fn changes_of_a_signed_descriptor() {
    let value = signed(&module(), NAME, Method::default());
    let digest = Digest::of(b"other").hex();
    for (pointer, new, reason) in [
        ("/component/labels/0/value/a/0", json!(2), Some("digest")),
        ("/component/labels/0/version", json!("v2"), Some("digest")),
        ("/component/labels/0/signing", json!(false), Some("digest")),
        ("/component/labels/1/value", json!("y"), None),
        ("/component/labels/1/signing", Value::Null, None),
        ("/component/provider", json!({"name": "example.org"}), None),
        ("/component/provider", json!("example.com"), Some("digest")),
        ("/component/version", json!("1.2.1"), Some("digest")),
        ("/component/repositoryContexts", json!([{"componentNameMapping": "urlPath"}]), None),
        ("/component/sources", json!([{"name": "s"}]), Some("digest")),
        ("/component/resources/0/digest/value", json!(digest), Some("digest")),
        ("/component/resources/0/digest", Value::Null, Some("digest")),
        ("/component/resources/0/access/mediaType", json!("text/yaml"), None),
        ("/component/resources/1/name", json!("raw-manifest"), Some("digest")),
        ("/component/resources/1/access/type", json!("none"), Some("digest")),
        ("/component/resources", json!([]), Some("digest")),
        ("/signatures", json!([]), Some("no_signature")),
        ("/signatures", Value::Null, Some("no_signature")),
        ("/signatures", json!("release"), Some("malformed")),
        ("/signatures/0", json!("release"), Some("malformed")),
        ("/signatures/0/name", json!("other"), Some("unknown_key")),
        ("/signatures/0/name", Value::Null, Some("malformed")),
        ("/signatures/0/digest", Value::Null, Some("malformed")),
        ("/signatures/0/digest/value", json!(digest), Some("digest")),
        ("/signatures/0/digest/normalisationAlgorithm", json!("jsonNormalisation/v9"), Some("normalisation")),
        ("/signatures/0/digest/hashAlgorithm", json!("MD5"), Some("hash")),
        ("/signatures/0/digest/hashAlgorithm", json!("sha256"), None),
        ("/signatures/0/digest/hashAlgorithm", json!("SHA-512"), Some("digest")),
        ("/signatures/0/signature/algorithm", json!("ECDSA"), Some("algorithm")),
        ("/signatures/0/signature/mediaType", json!("application/x-pem-file"), Some("encoding")),
        ("/signatures/0/signature/value", json!("00"), Some("mismatch")),
        ("/signatures/0/signature/value", json!("0g"), Some("encoding")),
        ("/signatures/0/signature/value", json!(""), Some("malformed")),
    ] {
        let reached = checked(&at(&value, pointer, new.clone())).map_err(|error| error.reason());
        assert_eq!(reached.err(), reason, "{pointer} = {new}");
    }
}

#[test]
fn one_valid_signature_suffices() {
    let valid = signed(&module(), NAME, Method::default());
    let by_other = PAIRS[1].signing().sign(&Document::from(module()), NAME, Method::default()).unwrap();
    let mut both = valid.clone();
    both["signatures"].as_array_mut().unwrap().insert(0, by_other.clone());
    assert_eq!(checked(&both), Ok(NAME.to_owned()), "an invalid one of the same name comes first");
    both["signatures"][1]["name"] = json!("other");
    assert_eq!(checked(&both).unwrap_err().reason(), "mismatch", "the valid one has another name");
    let rotating =
        trusted([("release.pem", &*format!("{}{}", PAIRS[1].public, PAIRS[0].public)), ("x", &PAIRS[0].public)]);
    assert_eq!(verify(&Document::from(valid.clone()), &rotating), Ok(NAME.to_owned()), "a file with two keys");
    let mut many = valid.clone();
    many["signatures"] = (0..MAX_SIGNATURES).map(|_| by_other.clone()).collect();
    many["signatures"][MAX_SIGNATURES - 1] = valid["signatures"][0].clone();
    assert_eq!(checked(&many), Ok(NAME.to_owned()), "as many as permitted");
    many["signatures"] = (0..=MAX_SIGNATURES).map(|_| by_other.clone()).collect();
    assert_eq!(checked(&many), Err(SignatureError::TooMany));
}

#[test]
fn refusals_name_the_keys_and_are_bounded() {
    let names = ["a", "b", "c", "d", "e", "f"];
    let keys = trusted(names.map(|name| (name, &*PAIRS[1].public)));
    let mut value = signed(&module(), &"n\u{1b}".repeat(5_000), Method::default());
    let text = |value: &Value| verify(&Document::from(value.clone()), &keys).unwrap_err().to_string();
    let unknown = text(&value);
    assert!(unknown.ends_with("expected is one of \"a\", \"b\", \"c\", \"d\", \"e\", …"), "{unknown}");
    assert!(unknown.len() < 1_500 && !unknown.contains('\u{1b}'), "{unknown}");
    value["signatures"] = Value::Null;
    assert_eq!(text(&value), "it has no signature; expected is one of \"a\", \"b\", \"c\", \"d\", \"e\", …");
}

#[test]
fn signing_again_replaces_the_signature_of_this_name() {
    let once = signed(&module(), NAME, Method::default());
    assert_eq!(signed(&once, NAME, Method::default()), once, "the signature is no part of the form");
    let twice = signed(&once, "other", Method::default());
    assert_eq!(twice["signatures"].as_array().unwrap().len(), 2);
    let results = results(&Document::from(twice), &release()).unwrap();
    let expected = [(NAME, Some(Ok(()))), ("other", None)];
    assert_eq!(results, expected.map(|(name, result)| SignatureResult { name: name.to_owned(), result }));
}

/// Results of the coverage: the images, or the text of the refusal.
#[test]
fn only_covered_contents_are_used() {
    let module = module();
    let image = Digest::of(b"image");
    let other = Digest::of(b"other");
    let pinned = format!("reg.example.org/tide:1.2.0@{image}");
    let covered = cover(descriptor(&module)).unwrap();
    assert_eq!((covered.descriptor.images, covered.raw_manifest), (vec![pinned.clone()], None));
    let excluded = json!({
        "hashAlgorithm": "NO-DIGEST", "normalisationAlgorithm": "EXCLUDE-FROM-SIGNATURE", "value": "NO-DIGEST",
    });
    let layer = "/component/resources/0";
    let tide = "/component/resources/1";
    for (pointer, new, result) in [
        (format!("{tide}/access/imageReference"), json!(pinned), Ok(vec![pinned.clone()])),
        (format!("{tide}/digest"), excluded.clone(), Ok(Vec::new())),
        (format!("{tide}/digest/hashAlgorithm"), json!("sha256"), Ok(vec![pinned.clone()])),
        (format!("{tide}/digest"), Value::Null, Err("\"tide\" has no digest")),
        (format!("{tide}/access"), json!({"type": "none"}), Ok(Vec::new())),
        (
            tide.to_owned(),
            json!({"name": "tide", "version": "v1", "type": "t", "relation": "local", "access": {"type": "none"}}),
            Ok(Vec::new()),
        ),
        (format!("{tide}/access/imageReference"), json!(format!("r/i@{other}")), Err("instead of the signed digest")),
        (format!("{tide}/digest/hashAlgorithm"), json!("SHA-512"), Err("\"tide\" has a malformed digest")),
        (format!("{tide}/digest/hashAlgorithm"), json!("MD5"), Err("unknown hash algorithm \"MD5\"")),
        (format!("{tide}/digest/value"), json!("../x"), Err("\"tide\" has a malformed digest")),
        (format!("{tide}/digest/normalisationAlgorithm"), json!("x/v1"), Err("unknown normalisation \"x/v1\"")),
        (format!("{layer}/digest/value"), json!(other.hex()), Err("\"raw-manifest\" has the digest")),
        (format!("{layer}/access/localReference"), json!(other.to_string()), Err("\"raw-manifest\" has the digest")),
        (format!("{layer}/digest"), excluded, Err("\"raw-manifest\" is excluded from the signature")),
        (format!("{layer}/digest"), Value::Null, Err("\"raw-manifest\" has no digest")),
        (format!("{layer}/digest/normalisationAlgorithm"), json!("ociArtifactDigest/v1"), Err("unknown normalisation")),
    ] {
        let reached = cover(descriptor(&at(&module, &pointer, new.clone())));
        match (reached.map(|covered| covered.descriptor.images), result) {
            (Ok(images), Ok(expected)) => assert_eq!(images, expected, "{pointer} = {new}"),
            (Err(error), Err(text)) => assert!(error.to_string().contains(text), "{pointer} = {new}: {error}"),
            (reached, _) => panic!("{pointer} = {new}: {reached:?}"),
        }
    }
}

#[test]
fn content_is_compared_if_its_place_is_not_the_signed_digest() {
    let content = HashAlgorithm::Sha512.digest(LAYER).to_string();
    let digest =
        json!({"hashAlgorithm": "SHA-512", "normalisationAlgorithm": "genericBlobDigest/v1", "value": content});
    let module = at(&module(), "/component/resources/0/digest", digest);
    let digest = cover(descriptor(&module)).unwrap().raw_manifest.unwrap();
    assert_eq!(digest.verify(LAYER), Ok(()));
    assert_eq!(digest.verify(b"other").unwrap_err().reason(), "resource");
}

#[test]
fn keys_are_rsa_keys_of_a_sufficient_size() {
    let parse = |file: &str, pem: &str| ComponentKeys::parse(&[(file.to_owned(), pem.as_bytes().to_vec())].into());
    let problem = |pem: &str| match parse("k.pem", pem).unwrap_err() {
        KeyError::File { problem, .. } => problem,
        KeyError::Empty => panic!("there is a file"),
    };
    let good = include_str!("data/go.pem");
    for (file, name) in [("k.pem", "k"), ("k.x.pub", "k.x"), ("k.crt", "k"), ("k", "k"), (".pem", ".pem")] {
        assert_eq!(parse(file, good).unwrap().names().collect::<Vec<_>>(), [name]);
    }
    assert_eq!(problem(""), KeyProblem::NoKey);
    assert_eq!(problem("release"), KeyProblem::NoKey);
    assert_eq!(problem(&good[..100]), KeyProblem::Pem);
    assert_eq!(problem(include_str!("data/rsa-1024.pem")), KeyProblem::Bits(1_024));
    assert_eq!(problem(include_str!("data/p256.pem")), KeyProblem::NotRsa);
    assert_eq!(problem(&good.replace("PUBLIC KEY", "RSA PUBLIC KEY")), KeyProblem::NotRsa);
    assert_eq!(problem(&good.replace("PUBLIC KEY", "CERTIFICATE")), KeyProblem::NotRsa);
    assert_eq!(problem(&PAIRS[0].private), KeyProblem::Block(Excerpt::of("PRIVATE KEY")));
    let changed = |change: fn(&mut Vec<u8>)| {
        let mut block = Pem::iter_from_buffer(good.as_bytes()).next().unwrap().unwrap();
        change(&mut block.contents);
        format!("-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n", BASE64_STANDARD.encode(&block.contents))
    };
    assert_eq!(problem(&changed(|der| der.push(0))), KeyProblem::NotRsa, "a byte follows the key");
    // The last byte of the OID rsaEncryption, for that of id-RSASSA-PSS.
    const OID: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1];
    let restricted = changed(|der| {
        let begin = der.windows(OID.len()).position(|bytes| bytes == OID).unwrap();
        der[begin + OID.len() - 1] = 0x0a;
    });
    assert_eq!(problem(&restricted), KeyProblem::NotRsa, "a key of another algorithm");
    assert_eq!(problem(&good.repeat(17)), KeyProblem::TooMany);
    assert_eq!(ComponentKeys::parse(&std::collections::BTreeMap::new()), Err(KeyError::Empty));
}

#[test]
fn keys_are_read_from_every_kind_of_block() {
    let pair = rcgen::KeyPair::from_pem(&PAIRS[0].private).unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["a.example".into()]).unwrap().self_signed(&pair).unwrap();
    let value = Document::from(signed(&module(), NAME, Method::default()));
    for pem in [&certificate.pem(), &PAIRS[0].public] {
        assert_eq!(verify(&value, &trusted([("release", pem)])), Ok(NAME.to_owned()));
    }
    assert_eq!(trusted([("release", &certificate.pem())]), release());
}

#[test]
fn private_keys_are_rsa_keys_without_encryption() {
    assert!(SigningKey::from_pem(PAIRS[0].private.as_bytes()).is_ok());
    for pem in
        ["", "x", &PAIRS[0].public, "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----"]
    {
        assert_eq!(SigningKey::from_pem(pem.as_bytes()).unwrap_err(), SignError::Pem);
    }
    let p256 = rcgen::KeyPair::generate().unwrap().serialize_pem();
    assert_eq!(SigningKey::from_pem(p256.as_bytes()).unwrap_err(), SignError::Key);
}
