//! Places of artefacts: a registry, or an OCI layout on disk.

use std::path::Path;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use serde_json::Value;
use tidewatch_oci::{
    component::ComponentVersion,
    credentials::RegistryAddress,
    digest::{BlobReference, Digest},
    fetch::{FetchError, ImageManifest, Reference, Size},
};

use crate::module::{
    InvalidError,
    layout::Layout,
    registry::{Registry, RegistryFlags, explained},
};

/// Path between registry and name of a component.
const DESCRIPTORS: &str = "/component-descriptors/";
/// Annotation of the manifest with name and version of the component.
const COMPONENT: &str = "software.ocm.componentversion";
/// Registry of an artefact on disk.
const NO_REGISTRY: &str = "<registry>";
/// Maximum size of a manifest in bytes.
const MAX_MANIFEST: u64 = 4 << 20;

/// Place of an artefact.
pub(in crate::module) enum Source {
    /// An OCI layout with one manifest.
    Layout(Layout),
    /// A registry, with the component.
    Registry(Box<Registry>, ComponentVersion),
}

/// Reference of a version in a registry.
pub(crate) fn reference(registry: &RegistryAddress, component: &str, version: &str) -> String {
    format!("{registry}{DESCRIPTORS}{component}:{version}")
}

/// Parses `<registry>/component-descriptors/<name>:<version>`.
fn parse(reference: &str) -> Result<(RegistryAddress, ComponentVersion)> {
    let parts = reference.split_once(DESCRIPTORS);
    let parts = parts.and_then(|(registry, rest)| Some((registry, rest.rsplit_once(':')?)));
    let (registry, (name, version)) = parts.with_context(|| {
        format!("{reference} is no file or folder, and not of the form <registry>{DESCRIPTORS}<name>:<version>")
    })?;
    let address = registry.parse().with_context(|| format!("the registry {registry:?}"))?;
    Ok((address, ComponentVersion::new(name, version)?))
}

impl Source {
    /// Opens an OCI layout on disk, or connects to a registry. Returns it with the registry as a Manifest names it.
    ///
    /// # Errors
    /// The reference is malformed, or layout or credentials cannot be read.
    pub(in crate::module) async fn open(reference: &str, flags: &RegistryFlags) -> Result<(Self, String)> {
        if Path::new(reference).exists() {
            return Ok((Self::layout(Path::new(reference))?, NO_REGISTRY.to_owned()));
        }
        let (address, component) = parse(reference)?;
        let registry = address.to_string();
        Ok((Self::Registry(Box::new(flags.connect(address).await?), component), registry))
    }

    pub(in crate::module) fn layout(path: &Path) -> Result<Self> {
        Layout::open(path).map(Self::Layout)
    }

    /// Reads the manifest with its digest and content.
    pub(in crate::module) async fn manifest(&self) -> Result<(ComponentVersion, Digest, Bytes, ImageManifest)> {
        match self {
            Self::Layout(layout) => {
                let digest = layout.manifest()?;
                let content = layout.blob(&digest, MAX_MANIFEST)?;
                let manifest = ImageManifest::parse(&content, None, "the layout");
                let manifest = manifest.map_err(|error| InvalidError::new(digest, error))?;
                Ok((annotated(&content, digest)?, digest, content, manifest))
            }
            Self::Registry(registry, component) => {
                let repository = component.repository();
                let tag = component.tag();
                let fetched = registry.fetcher.manifest(&registry.target, &repository, Reference::Tag(&tag)).await;
                let (manifest, digest, content) = fetched.map_err(classify).context("read the manifest")?;
                Ok((component.clone(), digest, content, manifest))
            }
        }
    }

    /// Reads and verifies a blob of at most `limit` bytes.
    pub(in crate::module) async fn blob(
        &self,
        repository: &str,
        reference: &BlobReference,
        limit: usize,
    ) -> Result<Bytes> {
        let BlobReference { digest, size, .. } = reference;
        if *size > limit as u64 {
            return Err(InvalidError::new(digest, format!("{size} bytes exceed the limit of {limit} bytes")).into());
        }
        match self {
            Self::Layout(layout) => {
                let content = layout.blob(digest, *size)?;
                match content.len() as u64 == *size {
                    true => Ok(content),
                    false => {
                        let problem = format!("the content has {} bytes instead of {size}", content.len());
                        Err(InvalidError::new(digest, problem).into())
                    }
                }
            }
            Self::Registry(registry, _) => {
                let fetched = registry.fetcher.blob(&registry.target, repository, *digest, Size::Exactly(*size)).await;
                fetched.map_err(classify).with_context(|| format!("read the blob {digest}"))
            }
        }
    }
}

/// Name and version of the component of a manifest in a layout, which has no tag.
fn annotated(manifest: &[u8], digest: Digest) -> Result<ComponentVersion, InvalidError> {
    let document: Value = serde_json::from_slice(manifest).unwrap_or_default();
    let text = document["annotations"][COMPONENT].as_str().and_then(|text| text.rsplit_once(':'));
    let (name, version) =
        text.ok_or_else(|| InvalidError::new(digest, format!("the manifest has no annotation {COMPONENT}")))?;
    ComponentVersion::new(name, version).map_err(|error| InvalidError::new(digest, error))
}

/// Distinguishes an invalid artefact from a failed access.
fn classify(error: FetchError) -> anyhow::Error {
    match error {
        FetchError::DigestMismatch { .. }
        | FetchError::SizeMismatch { .. }
        | FetchError::TooLarge { .. }
        | FetchError::Index { .. } => InvalidError::new("artefact", error).into(),
        error => explained(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_is_registry_component_and_version() {
        let (address, component) =
            parse("http://localhost:5000/a/component-descriptors/kyma-project.io/module/tide:1.2.3").unwrap();
        assert_eq!((address.origin.to_string(), &*address.path), ("http://localhost:5000".to_owned(), "a"));
        assert_eq!(component.to_string(), "kyma-project.io/module/tide:1.2.3");
        for bad in [
            "no/such/folder",
            "reg/component-descriptors/kyma-project.io/module/tide",
            "reg/component-descriptors/tide:1.0.0",
            "a b/component-descriptors/kyma-project.io/module/tide:1.2.3",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
