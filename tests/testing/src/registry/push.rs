//! Upload of an OCI image layout (OCI image specification, *Image Layout*) to a registry.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use serde::{Deserialize, de::DeserializeOwned};

use super::client::{ClientError, RegistryClient};

/// Failure to push a layout.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    /// A file of the layout cannot be read.
    #[error("read {0}")]
    Read(PathBuf, #[source] io::Error),
    /// Index or manifest is malformed.
    #[error("parse {0}")]
    Parse(PathBuf, #[source] serde_json::Error),
    /// The index has no manifest, or several.
    #[error("the index {0} has {1} manifests, not one")]
    Index(PathBuf, usize),
    /// A digest is not of the form `algorithm:encoded`.
    #[error("{0} is not a digest")]
    Digest(String),
    /// The registry refused.
    #[error("push to {0}")]
    Registry(String, #[source] ClientError),
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
}

/// Pushes the single manifest of a layout with its blobs under a tag, and returns its digest.
///
/// # Errors
/// See [`PushError`].
pub async fn push_layout(
    client: &RegistryClient,
    layout: &Path,
    repository: &str,
    tag: &str,
) -> Result<String, PushError> {
    let refused = |error| PushError::Registry(repository.to_owned(), error);
    let path = layout.join("index.json");
    let Index { manifests } = parse(&path, &read(&path)?)?;
    let [descriptor] = manifests.as_slice() else { return Err(PushError::Index(path, manifests.len())) };
    let path = blob(layout, &descriptor.digest)?;
    let content = read(&path)?;
    let manifest: Manifest = parse(&path, &content)?;
    for Descriptor { digest, .. } in [&manifest.config].into_iter().chain(&manifest.layers) {
        client.push_blob(repository, read(&blob(layout, digest)?)?).await.map_err(refused)?;
    }
    client.push_manifest(repository, tag, &descriptor.media_type, content).await.map_err(refused)
}

fn blob(layout: &Path, digest: &str) -> Result<PathBuf, PushError> {
    let (algorithm, encoded) = digest.split_once(':').ok_or_else(|| PushError::Digest(digest.to_owned()))?;
    Ok(layout.join("blobs").join(algorithm).join(encoded))
}

fn read(path: &Path) -> Result<Bytes, PushError> {
    fs::read(path).map(Bytes::from).map_err(|error| PushError::Read(path.to_path_buf(), error))
}

fn parse<T: DeserializeOwned>(path: &Path, content: &[u8]) -> Result<T, PushError> {
    serde_json::from_slice(content).map_err(|error| PushError::Parse(path.to_path_buf(), error))
}
