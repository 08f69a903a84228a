//! The component descriptor of a folder, v2, and the content of its local resources. Pure.

use std::{collections::BTreeSet, io};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tidewatch_oci::{
    component::ComponentVersion, credentials::RegistryAddress, descriptor::RAW_MANIFEST, digest::Digest,
};

use super::{
    InvalidError,
    artefact::{Artefact, Blob, LocalResource},
    config::{self, Config},
    folder::Folder,
    image::{self, ImageReference},
    template,
};

/// Maximum size of a component descriptor in bytes, which is lifecycle-manager's limit.
pub(super) const MAX_DESCRIPTOR: usize = 100 << 10;
/// Name of the resource with the default module CR.
pub(super) const DEFAULT_CR: &str = "default-cr";
/// Origin of a component whose registry is not known.
const UNKNOWN_REGISTRY: &str = "registry.invalid";
/// Digits of a digest that distinguish images of the same name and version.
const IDENTITY_DIGITS: usize = 8;

/// Packs a folder. `registry` is the origin in the descriptor if the folder names none.
///
/// # Errors
/// [`InvalidError`] if name, version, an object, an image or the size of the descriptor is invalid.
pub(super) fn pack(folder: &Folder, registry: Option<&RegistryAddress>) -> Result<Artefact> {
    let component = component(&folder.config)?;
    folder.refuse_mistakes()?;
    let resources = local_resources(folder).context("pack the files")?;
    let images = images(folder)?;
    let context = repository_context(&folder.config, registry)?;
    let descriptor = descriptor(&folder.config, context, &resources, &images);
    let descriptor = template::to_yaml(&descriptor).context("write the component descriptor")?;
    if descriptor.len() > MAX_DESCRIPTOR {
        let problem = format!("the component descriptor has {} bytes, more than {MAX_DESCRIPTOR}", descriptor.len());
        return Err(InvalidError::new(config::FILE, problem).into());
    }
    Artefact::new(component, &descriptor, resources).context("pack the component descriptor")
}

/// Name and version of the component. A version with `+` is refused, because registries cannot name it by a tag.
fn component(config: &Config) -> Result<ComponentVersion, InvalidError> {
    if config.version.contains('+') {
        let problem = format!("the version {} has build metadata, which a tag cannot contain", config.version);
        return Err(InvalidError::new(config::FILE, problem));
    }
    ComponentVersion::new(&config.component, &config.version).map_err(|error| InvalidError::new(config::FILE, error))
}

fn local_resources(folder: &Folder) -> io::Result<Vec<LocalResource>> {
    let files = [(RAW_MANIFEST, Some(&folder.manifest)), (DEFAULT_CR, folder.default_cr.as_ref())];
    let files = files.into_iter().filter_map(|(name, file)| Some((name, file?)));
    files.map(|(name, file)| Ok(LocalResource { name, blob: Blob::archive(&file.name, &file.content)? })).collect()
}

/// Images that `module.yaml` lists, else those of the manifest's workloads.
pub(super) fn images(folder: &Folder) -> Result<Vec<ImageReference>, InvalidError> {
    let (place, images) = match &folder.config.images {
        Some(images) => (config::FILE, images.iter().map(String::as_str).collect()),
        None => (&*folder.config.manifest, image::of_workloads(&folder.manifest.objects)),
    };
    images
        .into_iter()
        .map(|image| ImageReference::parse(image).map_err(|error| InvalidError::new(place, error)))
        .collect()
}

/// The entry of `repositoryContexts`, without which lifecycle-manager finds no layers.
fn repository_context(config: &Config, registry: Option<&RegistryAddress>) -> Result<Value, InvalidError> {
    let configured = config.registry.as_deref().map(|text| {
        let address: Result<RegistryAddress, _> = text.parse();
        address.map_err(|error| InvalidError::new(config::FILE, format!("registry {text:?}: {error}")))
    });
    let configured = configured.transpose()?;
    let (base, path) = match configured.as_ref().or(registry) {
        Some(address) => (address.origin.to_string(), &*address.path),
        None => (UNKNOWN_REGISTRY.to_owned(), ""),
    };
    let mut context = json!({"type": "OCIRegistry", "baseUrl": base, "componentNameMapping": "urlPath"});
    if !path.is_empty() {
        context["subPath"] = path.into();
    }
    Ok(context)
}

/// The descriptor. It has every member that the schema of v2 requires, also empty ones, because readers validate it.
fn descriptor(config: &Config, context: Value, resources: &[LocalResource], images: &[ImageReference]) -> Value {
    let local = resources.iter().map(|LocalResource { name, blob }| {
        json!({
            "name": name,
            "version": config.version,
            "type": "directoryTree",
            "relation": "local",
            "access": {"type": "localBlob", "localReference": blob.digest.to_string(), "mediaType": blob.media_type},
            "digest": {
                "hashAlgorithm": "SHA-256",
                "normalisationAlgorithm": "genericBlobDigest/v1",
                "value": blob.digest.hex(),
            },
        })
    });
    let mut component = json!({
        "name": config.component,
        "version": config.version,
        "provider": config.provider,
        "repositoryContexts": [context],
        "sources": [],
        "componentReferences": [],
        "resources": local.chain(image_resources(images)).collect::<Vec<_>>(),
    });
    if !config.component_labels.is_empty() {
        let labels = config.component_labels.iter();
        let labels = labels.map(|(name, value)| json!({"name": name, "value": value, "version": "v1"}));
        component["labels"] = labels.collect();
    }
    json!({"meta": {"schemaVersion": "v2"}, "component": component})
}

/// Resources of the images, each with an identity of its own.
fn image_resources(images: &[ImageReference]) -> Vec<Value> {
    let mut identities = BTreeSet::new();
    let mut seen = BTreeSet::new();
    let distinct = images.iter().filter(|image| seen.insert(*image));
    distinct
        .map(|image| {
            let mut name = image.resource_name();
            let version = image.resource_version();
            if !identities.insert((name.clone(), version.clone())) {
                let digits = Digest::of(image.as_str().as_bytes()).hex();
                name.push('-');
                name.extend(digits.chars().take(IDENTITY_DIGITS));
            }
            let mut resource = json!({
                "name": name,
                "version": version,
                "type": "ociArtifact",
                "relation": "external",
                "access": {"type": "ociArtifact", "imageReference": image.as_str()},
                "labels": [{
                    "name": "scan.security.kyma-project.io/type", "value": "third-party-image", "version": "v1",
                }],
            });
            if let Some(digest) = image.digest() {
                resource["digest"] = json!({
                    "hashAlgorithm": "SHA-256",
                    "normalisationAlgorithm": "ociArtifactDigest/v1",
                    "value": digest.hex(),
                });
            }
            resource
        })
        .collect()
}
