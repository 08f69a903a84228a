//! Tests of lookups with `--component-keys`.

use serde_json::Value;

use super::{
    super::{key::Value as Found, table::Table},
    *,
};
use crate::signature::{
    HashAlgorithm, Method,
    testing::{PAIRS, signed, trusted},
};

fn own_keys() -> ComponentKeys {
    trusted([("release.pem", &PAIRS[0].public)])
}

fn other_keys() -> ComponentKeys {
    trusted([("release.pem", &PAIRS[1].public)])
}

/// The component descriptor with the digest of its layer.
fn with_digest(algorithm: &str, value: &str) -> Value {
    let mut document: Value = serde_json::from_str(&descriptor()).unwrap();
    document["component"]["resources"][0]["digest"] =
        json!({"hashAlgorithm": algorithm, "normalisationAlgorithm": "genericBlobDigest/v1", "value": value});
    document
}

fn unsigned() -> Value {
    with_digest("SHA-256", &Digest::of(LAYER.as_bytes()).hex())
}

fn push(fixture: &Fixture, descriptor: &Value) {
    fixture.server.component(REPOSITORY, "1.2.0", &descriptor.to_string());
}

/// A fixture without keys, with this descriptor in its registry.
fn fixture(folder: &Path, descriptor: &Value) -> Fixture {
    let fixture = Fixture::open(FakeRegistry::default(), folder);
    push(&fixture, descriptor);
    fixture.server.blob(REPOSITORY, LAYER.as_bytes());
    fixture
}

fn release(descriptor: &Value) -> Value {
    signed(descriptor, "release", Method::default())
}

#[tokio::test(start_paused = true)]
async fn unsigned_component_is_refused_until_it_is_signed() {
    let folder = folder();
    let fixture = fixture(folder.path(), &unsigned());
    fixture.registry.set_component_keys(own_keys());
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    fixture.changed(&key()).await;
    assert_eq!(
        fixture.failure().to_string(),
        "the component descriptor example.org/tide:1.2.0 is not trusted: it has no signature; expected is one of \"release\""
    );
    assert_eq!(of_result(&fixture.metrics.verifications, "no_signature"), 1);
    push(&fixture, &release(&unsigned()));
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
    assert_eq!(of_result(&fixture.metrics.verifications, "ok"), 1);
}

#[tokio::test(start_paused = true)]
async fn known_descriptor_is_verified_when_keys_are_given_and_may_be_signed_later() {
    let folder = folder();
    {
        let fixture = fixture(folder.path(), &unsigned());
        assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
        fixture.changed(&key()).await;
        assert!(fixture.is_ready(), "without keys");
        assert_eq!(of_result(&fixture.metrics.verifications, "no_signature"), 0);
        fixture.stop.cancel();
    }
    // The store of the process before knows the tag.
    let fixture = fixture(folder.path(), &unsigned());
    fixture.registry.set_component_keys(own_keys());
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    fixture.changed(&key()).await;
    assert!(matches!(*fixture.failure(), LookupError::Untrusted { .. }));
    push(&fixture, &release(&unsigned()));
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
}

#[tokio::test(start_paused = true)]
async fn changed_keys_verify_all_descriptors_again_without_the_registry() {
    let folder = folder();
    let fixture = fixture(folder.path(), &release(&unsigned()));
    fixture.registry.set_component_keys(own_keys());
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
    let requests = fixture.server.received().len();
    fixture.registry.set_component_keys(other_keys());
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending, "nothing is trusted meanwhile");
    fixture.changed(&key()).await;
    assert!(
        fixture
            .failure()
            .to_string()
            .ends_with("the signature \"release\" was not made with the trusted key of this name")
    );
    fixture.registry.set_component_keys(own_keys());
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
    assert_eq!(fixture.server.count("blobs"), 2, "the store has them");
    assert!(fixture.server.received().len() > requests, "the refused tag was read again");
}

#[tokio::test(start_paused = true)]
async fn wrong_keys_while_the_registry_is_down_lose_no_known_tag() {
    let folder = folder();
    let fixture = fixture(folder.path(), &release(&unsigned()));
    fixture.registry.set_component_keys(own_keys());
    let _ = fixture.registry.descriptor(&component());
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
    fixture.server.script("/v2/", [Reply::status(403)]);
    fixture.registry.set_component_keys(other_keys());
    let _ = fixture.registry.descriptor(&component());
    fixture.changed(&key()).await;
    let _ = fixture.failure();
    fixture.registry.set_component_keys(own_keys());
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
}

#[tokio::test(start_paused = true)]
async fn layer_must_have_the_signed_digest() {
    let folder = folder();
    let value = HashAlgorithm::Sha512.digest(LAYER.as_bytes()).to_string();
    let fixture = fixture(folder.path(), &release(&with_digest("SHA-512", &value)));
    fixture.registry.set_component_keys(own_keys());
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    fixture.changed(&key()).await;
    assert!(fixture.is_ready(), "{:?}", fixture.registry.descriptor(&component()));

    // The place is not signed: it may lead to another content.
    let elsewhere = |algorithm: &str, value: &str| {
        let mut changed = release(&with_digest(algorithm, value));
        changed["component"]["resources"][0]["access"]["localReference"] = json!(digest_of(b"kind: Secret\n"));
        changed
    };
    let sha256 = Digest::of(LAYER.as_bytes()).hex();
    for (algorithm, value) in [("SHA-512", &value), ("SHA-256", &sha256)] {
        let folder = tempfile::tempdir().unwrap();
        let fixture = self::fixture(folder.path(), &elsewhere(algorithm, value));
        fixture.server.blob(REPOSITORY, b"kind: Secret\n");
        fixture.registry.set_component_keys(own_keys());
        assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
        fixture.changed(&key()).await;
        let text = fixture.failure().to_string();
        assert!(text.contains("the resource \"raw-manifest\" has the digest"), "{text}");
        assert_eq!(of_result(&fixture.metrics.verifications, "resource"), 1);
    }
}

#[test]
fn result_that_began_with_former_keys_is_discarded() {
    let now = Instant::now();
    let mut table = Table::new(1 << 20, 1);
    let document = crate::descriptor::Document::from(unsigned());
    let descriptor = Arc::new(document.descriptor(&component()).unwrap());
    let value = || Found::Descriptor(descriptor.clone());
    table.lookup(&key(), now);
    assert_eq!(table.begin(now), Some(key()));
    table.renew_descriptors(now);
    assert!(!table.settle(&key(), Ok(value()), now), "no lookup returns it");
    assert!(table.lookup(&key(), now).outcome.is_none());
    assert_eq!(table.begin(now), Some(key()), "it is fetched again");
    assert!(table.settle(&key(), Ok(value()), now));
    assert!(table.lookup(&key(), now).outcome.is_some());
    table.renew_descriptors(now);
    table.renew_descriptors(now);
    assert_eq!((table.begin(now), table.begin(now)), (Some(key()), None), "once");
}
