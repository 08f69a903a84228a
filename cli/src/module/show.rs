//! `module show`.

pub(super) mod report;
pub(super) mod source;

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use clap::Args;
use tidewatch_oci::{
    component::ComponentVersion,
    credentials::RegistryAddress,
    descriptor::{self, Descriptor, Document},
    digest::{BlobReference, Digest},
    layer,
};

pub(super) use self::source::Source;

use self::report::Report;
use super::{InvalidError, registry::RegistryFlags};
use crate::{block_on, exit, output};

/// Maximum size of all layers together, in bytes.
const MAX_LAYERS_BYTES: u64 = 256 << 20;

/// Arguments of `module show`.
#[derive(Clone, Debug, Args)]
pub struct Show {
    /// <registry>/component-descriptors/<name>:<version>, or an OCI layout: a folder or a tar archive
    #[arg(value_name = "REF")]
    pub reference: String,

    /// Registry of the receiver, which the Manifest refers to; by default that of REF
    #[arg(long, value_name = "REGISTRY")]
    pub receiver_registry: Option<RegistryAddress>,

    /// Access to the registry.
    #[command(flatten)]
    pub registry: RegistryFlags,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// An artefact with its content.
pub(super) struct Stored {
    pub(super) component: ComponentVersion,
    /// Digest of the manifest.
    pub(super) digest: Digest,
    pub(super) manifest: Bytes,
    /// The component descriptor with all members.
    pub(super) document: Document,
    pub(super) descriptor: Descriptor,
    /// The layer with the component descriptor.
    pub(super) pointer: BlobReference,
    /// Verified content of the layers.
    pub(super) layers: BTreeMap<Digest, Bytes>,
    /// Reasons why the artefact is invalid.
    problems: Vec<String>,
}

impl Show {
    pub(super) fn run(&self) -> Result<u8> {
        let report = block_on(self.report())?;
        output::report(self.json, &report)?;
        Ok(if report.is_valid() { exit::SUCCESS } else { exit::INVALID_MODULE })
    }

    async fn report(&self) -> Result<Report> {
        let (source, registry) = Source::open(&self.reference, &self.registry).await?;
        let stored = Stored::read(&source).await?;
        let registry = self.receiver_registry.as_ref().map_or(registry, ToString::to_string);
        Ok(Report::new(&stored, &registry))
    }
}

impl Stored {
    /// Reads manifest, component descriptor and layers, and verifies the digest of each.
    pub(super) async fn read(source: &Source) -> Result<Self> {
        let (component, digest, stored, manifest) = source.manifest().await?;
        let repository = component.repository();
        let config = source
            .blob(&repository, &manifest.config, descriptor::MAX_CONFIG_BYTES)
            .await
            .context("read the config")?;
        let pointer = descriptor::component_descriptor_pointer(&config);
        let pointer = pointer.map_err(|error| InvalidError::new("config", error))?;
        let content = source.blob(&repository, &pointer, descriptor::MAX_STORED_BYTES).await;
        let content = content.context("read the component descriptor")?;
        let invalid = |error| InvalidError::new("component descriptor", error);
        let document = descriptor::parse(&pointer.media_type, &content).map_err(invalid)?;
        let descriptor = document.descriptor(&component).map_err(invalid)?;
        let mut problems = Vec::new();
        if !manifest.layers.iter().any(|layer| layer.digest == pointer.digest) {
            // Registries remove blobs that no manifest refers to.
            problems.push(format!("the component descriptor {} is no layer of the manifest", pointer.digest));
        }
        let repository = descriptor.repository().to_string();
        let mut layers = BTreeMap::new();
        let mut left = MAX_LAYERS_BYTES;
        for layer in manifest.layers.iter().filter(|layer| layer.digest != pointer.digest) {
            if layer.size > left.min(layer::MAX_STORED_BYTES as u64) {
                problems.push(format!("the layer {} of {} bytes is too large", layer.digest, layer.size));
                continue;
            }
            left -= layer.size;
            match source.blob(&repository, layer, layer::MAX_STORED_BYTES).await {
                Ok(content) => {
                    layers.insert(layer.digest, content);
                }
                Err(error) if error.is::<InvalidError>() => problems.push(format!("{error:#}")),
                Err(error) => return Err(error),
            }
        }
        Ok(Self { component, digest, manifest: stored, document, descriptor, pointer, layers, problems })
    }
}

#[cfg(test)]
mod tests;
