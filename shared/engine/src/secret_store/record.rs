//! The form of a Manifest in a Secret. Pure.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use k8s_openapi::{ByteString, api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::ResourceExt as _;
use serde_json::{Map, Value, json};
use tidewatch_api::{Manifest, names::label};

use crate::StoreError;

/// Type of the Secrets.
pub(super) const TYPE: &str = "tidewatch.kyma-project.io/installation";
/// Key of the compressed Manifest in a Secret.
pub(super) const KEY: &str = "manifest.json.gz";
/// Begin of the names of the Secrets; the version is that of their form.
const PREFIX: &str = "tidewatch.v1.";
/// Bytes of a compressed Manifest at most; a Secret holds 1 MiB.
pub(super) const MAX_BYTES: usize = 900 << 10;
/// Bytes of a Manifest at most: an inventory of as many objects as a version may have has a tenth of it.
const MAX_DECODED_BYTES: usize = 16 << 20;
/// Members of the metadata that are in the Manifest; the others are those of the Secret.
const RECORDED: [&str; 5] = ["annotations", "deletionTimestamp", "finalizers", "generation", "labels"];

/// Name of the Secret of a module.
pub(super) fn name_of(module: &str) -> String {
    format!("{PREFIX}{module}")
}

/// The Secret of a new Manifest.
///
/// # Errors
/// The Manifest is too large.
pub(super) fn secret_of(manifest: &Manifest) -> Result<Secret, StoreError> {
    let labels = BTreeMap::from([(label::PART_OF.to_owned(), label::PART_OF_TIDEWATCH.to_owned())]);
    Ok(Secret {
        metadata: ObjectMeta {
            name: Some(name_of(&manifest.name_any())),
            labels: Some(labels),
            ..ObjectMeta::default()
        },
        type_: Some(TYPE.to_owned()),
        data: Some(BTreeMap::from([(KEY.to_owned(), ByteString(encoded(manifest)?))])),
        ..Secret::default()
    })
}

/// Patch of the Secret of a Manifest at its resource version.
///
/// # Errors
/// The Manifest is too large.
pub(super) fn content(manifest: &Manifest) -> Result<Value, StoreError> {
    let data = BTreeMap::from([(KEY, ByteString(encoded(manifest)?))]);
    Ok(json!({"metadata": {"resourceVersion": manifest.resource_version()}, "data": data}))
}

/// The Manifest in a Secret.
///
/// # Errors
/// The Secret was edited, or is not one of a module.
pub(super) fn manifest_of(secret: &Secret) -> Result<Manifest, StoreError> {
    let name = secret.name_any();
    let malformed = |problem| StoreError::Malformed(name.clone(), problem);
    if secret.type_.as_deref() != Some(TYPE) {
        return Err(malformed("it has another type"));
    }
    let module = name.strip_prefix(PREFIX).ok_or_else(|| malformed("it has another name"))?;
    let compressed = secret.data.as_ref().and_then(|data| data.get(KEY));
    let compressed = compressed.ok_or_else(|| malformed("it lacks the key manifest.json.gz"))?;
    let mut text = Vec::new();
    let mut decoder = GzDecoder::new(compressed.0.as_slice()).take(MAX_DECODED_BYTES as u64 + 1);
    decoder.read_to_end(&mut text).map_err(|_| malformed("its content is not compressed by gzip"))?;
    if text.len() > MAX_DECODED_BYTES {
        return Err(malformed("its content is too large"));
    }
    let mut whole: Value = serde_json::from_slice(&text).map_err(|_| malformed("its content is not JSON"))?;
    let ObjectMeta { namespace, uid, creation_timestamp, resource_version, .. } = &secret.metadata;
    json_patch::merge(
        &mut whole,
        &json!({"metadata": {"name": module, "namespace": namespace, "uid": uid,
            "creationTimestamp": creation_timestamp, "resourceVersion": resource_version}}),
    );
    serde_json::from_value(whole).map_err(|_| malformed("its content is not a Manifest"))
}

fn encoded(manifest: &Manifest) -> Result<Vec<u8>, StoreError> {
    let failed = |error| StoreError::Request("encode the record of the module", error);
    let mut whole = serde_json::to_value(manifest).map_err(|error| failed(kube::Error::SerdeError(error)))?;
    let metadata = whole["metadata"].as_object_mut().map(std::mem::take).unwrap_or_default();
    let recorded = metadata.into_iter().filter(|(member, _)| RECORDED.contains(&member.as_str()));
    whole["metadata"] = Value::Object(recorded.collect::<Map<_, _>>());
    let text = whole.to_string();
    if text.len() > MAX_DECODED_BYTES {
        return Err(StoreError::TooLarge(text.len(), MAX_DECODED_BYTES));
    }
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    let written = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    let bytes = written.map_err(|error| failed(kube::Error::Service(error.into())))?;
    if bytes.len() > MAX_BYTES {
        return Err(StoreError::TooLarge(bytes.len(), MAX_BYTES));
    }
    Ok(bytes)
}
