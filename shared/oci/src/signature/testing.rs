//! Keys and signed component descriptors for tests.

use std::{collections::BTreeMap, sync::LazyLock};

use rcgen::{KeyPair, PKCS_RSA_SHA256, RsaKeySize};
use serde_json::{Value, json};

use super::{ComponentKeys, Method, SigningKey};
use crate::descriptor::Document;

/// A key pair in PEM.
pub(crate) struct PemPair {
    pub(crate) private: String,
    pub(crate) public: String,
}

/// The key of the signer, and that of another one.
pub(crate) static PAIRS: LazyLock<[PemPair; 2]> = LazyLock::new(|| [PemPair::new(), PemPair::new()]);

impl PemPair {
    fn new() -> Self {
        let pair = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048).unwrap();
        Self { private: pair.serialize_pem(), public: pair.public_key_pem() }
    }

    pub(crate) fn signing(&self) -> SigningKey {
        SigningKey::from_pem(self.private.as_bytes()).unwrap()
    }
}

/// Trusted keys by file.
pub(crate) fn trusted<const N: usize>(files: [(&str, &str); N]) -> ComponentKeys {
    let files: BTreeMap<_, _> = files.map(|(name, pem)| (name.to_owned(), pem.as_bytes().to_vec())).into();
    ComponentKeys::parse(&files).unwrap()
}

/// A component descriptor with a signature of the first key.
pub(crate) fn signed(document: &Value, name: &str, method: Method) -> Value {
    let document = Document::from(document.clone());
    let signature = PAIRS[0].signing().sign(&document, name, method).unwrap();
    document.with_signature(signature).value().clone()
}

/// A local resource with a digest.
pub(crate) fn resource(name: &str, kind: &str, algorithm: &str, value: &str) -> Value {
    json!({
        "name": name, "version": "v1", "type": kind, "relation": "local", "access": {"type": "localBlob"},
        "digest": {"hashAlgorithm": "SHA-256", "normalisationAlgorithm": algorithm, "value": value},
    })
}

/// A component descriptor v2.
pub(crate) fn document(component: Value) -> Value {
    json!({"meta": {"schemaVersion": "v2"}, "component": component})
}

/// Component `github.com/mandelsoft/test` of the OCM reference implementation's tests of its command `sign`.
pub(crate) fn published() -> Value {
    let generic = "genericBlobDigest/v1";
    let artefact = "ociArtifactDigest/v1";
    document(json!({
        "name": "github.com/mandelsoft/test", "version": "v1", "provider": "mandelsoft", "repositoryContexts": [],
        "sources": [], "componentReferences": [], "resources": [
            resource("testdata", "PlainText", generic, "810ff2fb242a5dee4220f2cb0e6a519891fb67f2f828a6cab4ef8894633b1f50"),
            resource("value", "ociImage", artefact, "0c4abdb72cf59cb4b77f4aacb4775f9f546ebc3face189b2224a966c8826ca9f"),
            resource("ref", "ociImage", artefact, "c2d2dca275c33c1270dea6168a002d67c0e98780d7a54960758139ae19984bd7"),
        ],
    }))
}
