//! Bytes that the receiver reads from an OCI registry: component descriptors and layers of modules.

use std::{collections::HashSet, sync::LazyLock};

use rcgen::{KeyPair, PKCS_RSA_SHA256, RsaKeySize};
use serde_json::Value;
use tidewatch_oci::{
    component::ComponentVersion,
    descriptor::{self, Document},
    layer::{self, LayerKind},
    signature::{self, ComponentKeys, Normalisation},
};

use super::seeds::{COMPONENT, COMPONENT_VERSION, DESCRIPTOR_MEDIA_TYPE};

/// A key of which no input has a signature.
static KEYS: LazyLock<ComponentKeys> = LazyLock::new(|| {
    let key = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048).expect("the library makes keys");
    let files = [("release".to_owned(), key.public_key_pem().into_bytes())];
    ComponentKeys::parse(&files.into()).expect("this is a key")
});

/// Normal forms and signatures of a component descriptor: each form is JSON that depends on covered members alone, and no
/// signature is valid.
fn signatures(document: &Document) {
    use Normalisation::{V1, V2, V3, V4Alpha1};
    let unsigned = document.clone().with_signature(serde_json::json!({"name": "x"}));
    for algorithm in [V1, V2, V3, V4Alpha1] {
        let Ok(form) = algorithm.normal_form(document) else { continue };
        assert!(serde_json::from_str::<Value>(&form).is_ok(), "{form}");
        assert_eq!(algorithm.normal_form(&unsigned).as_ref(), Ok(&form), "signatures are not covered");
    }
    assert!(signature::verify(document, &KEYS).is_err());
    let _ = signature::results(document, &KEYS);
}

/// The layer with a component descriptor: bounded, and it describes the component that was requested.
pub fn descriptor(data: &[u8]) {
    let _ = descriptor::component_descriptor_pointer(data);
    let expected = ComponentVersion::new(COMPONENT, COMPONENT_VERSION).expect("this is a component");
    let Ok(document) = descriptor::parse(DESCRIPTOR_MEDIA_TYPE, data) else { return };
    signatures(&document);
    let Ok(read) = document.descriptor(&expected) else { return };
    let _ = signature::cover(read.clone());
    assert!(data.len() <= descriptor::MAX_STORED_BYTES);
    assert_eq!((read.component.name(), read.component.version()), (COMPONENT, COMPONENT_VERSION));
    let named = read.resources.iter().filter(|resource| resource.name == descriptor::RAW_MANIFEST).count();
    assert_eq!(named, usize::from(read.raw_manifest.is_some()));
    assert!(read.raw_manifest.is_none_or(|layer| !layer.digests.is_empty()), "a blob without a part");
    assert!(read.images.len() + named <= read.resources.len());
    assert!(read.images.iter().all(|image| !image.is_empty()));
}

/// A layer, plain or in an archive: bounded, and each of its objects has a key of its own.
pub fn layer(data: &[u8]) {
    for kind in [LayerKind::Dir, LayerKind::Plain] {
        let Ok(text) = layer::yaml_text(kind, data) else { continue };
        assert!(data.len() <= layer::MAX_STORED_BYTES && text.len() <= layer::MAX_BYTES);
        let Ok(objects) = layer::documents(&text) else { continue };
        assert!(objects.len() <= layer::MAX_OBJECTS);
        let keys: HashSet<_> = objects.iter().map(key).collect();
        assert_eq!(keys.len(), objects.len(), "two objects have one key");
        assert_eq!(layer::documents(&text).ok(), Some(objects), "a text has two meanings");
    }
}

fn key(object: &Value) -> [&str; 4] {
    let text = |value: &'_ Value| value.as_str().is_some_and(|text| !text.is_empty());
    let metadata = &object["metadata"];
    assert!(text(&object["apiVersion"]) && text(&object["kind"]) && text(&metadata["name"]), "{object}");
    [&object["apiVersion"], &object["kind"], &metadata["namespace"], &metadata["name"]]
        .map(|value| value.as_str().unwrap_or_default())
}
