//! The report of `module show`.

use std::fmt;

use serde::Serialize;
use serde_json::Value;
use strum::Display;
use tidewatch_kit::table;
use tidewatch_oci::{
    descriptor::{RAW_MANIFEST, Relation, Resource, ResourceDigest},
    digest::{BlobReference, Digest},
    layer::{self, LayerKind},
};
use tidewatch_select::kyma::layer::install_source;

use super::Stored;
use crate::module::{InvalidError, constructor::DEFAULT_CR};

/// Hash algorithm that is verified, in both spellings.
const SHA_256: [&str; 2] = ["SHA-256", "sha256"];
/// Normalisation of a blob's digest: its bytes as stored.
const GENERIC: &str = "genericBlobDigest/v1";

/// Type of a resource with a tar archive.
const DIRECTORY: &str = "directoryTree";

/// Content of an artefact.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::module) struct Report {
    component: String,
    version: String,
    /// Schema of the component descriptor.
    schema: String,
    /// Digest of the manifest.
    digest: String,
    descriptor: BlobReference,
    resources: Vec<ResourceReport>,
    images: Vec<String>,
    objects: Vec<ObjectReport>,
    manifest: Option<ManifestReport>,
    /// Reasons why the artefact is invalid.
    pub(in crate::module) problems: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ResourceReport {
    name: String,
    version: String,
    #[serde(rename = "type")]
    kind: String,
    relation: String,
    access: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    verification: Verification,
}

/// Result of the comparison of a resource's digest with its content.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
enum Verification {
    /// The content has this digest.
    Verified,
    /// No content of the artefact has this digest.
    Mismatch,
    /// The resource has no digest.
    NoDigest,
    /// The resource is not part of the artefact, or its digest is computed otherwise.
    NotVerified,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ObjectReport {
    api_version: String,
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    name: String,
}

/// Members of a Manifest's `spec`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ManifestReport {
    /// `install.source`.
    source: Value,
    localized_images: Vec<String>,
}

impl Report {
    /// Verifies the resources, and reads the objects. `registry` is that of the Manifest.
    pub(in crate::module) fn new(stored: &Stored, registry: &str) -> Self {
        let Stored { component, digest, descriptor, pointer, .. } = stored;
        let mut problems = stored.problems.clone();
        let resources: Vec<_> = descriptor.resources.iter().map(|resource| stored.resource(resource)).collect();
        for resource in resources.iter().filter(|resource| resource.verification == Verification::Mismatch) {
            problems.push(format!("no content of the artefact has the digest of the resource {}", resource.name));
        }
        let objects = stored.objects().unwrap_or_else(|problem| {
            problems.push(format!("{RAW_MANIFEST}: {problem}"));
            Vec::new()
        });
        let manifest = match install_source(descriptor, registry) {
            Ok(source) => Some(ManifestReport { source, localized_images: descriptor.images.clone() }),
            Err(problem) => {
                problems.push(problem);
                None
            }
        };
        Self {
            component: component.name().to_owned(),
            version: component.version().to_owned(),
            schema: descriptor.schema.to_string(),
            digest: digest.to_string(),
            descriptor: pointer.clone(),
            resources,
            images: descriptor.images.clone(),
            objects,
            manifest,
            problems,
        }
    }

    pub(super) fn is_valid(&self) -> bool {
        self.problems.is_empty()
    }
}

impl Stored {
    fn resource(&self, resource: &Resource) -> ResourceReport {
        ResourceReport {
            name: resource.name.clone(),
            version: resource.version.clone(),
            kind: resource.kind.clone(),
            relation: resource.relation.to_string(),
            access: resource.access.clone(),
            digest: resource.digest.as_ref().map(|digest| digest.value.clone()),
            verification: self.verification(resource),
        }
    }

    fn verification(&self, resource: &Resource) -> Verification {
        let Some(ResourceDigest { hash_algorithm, normalisation_algorithm, value }) = &resource.digest else {
            return Verification::NoDigest;
        };
        let is_known = SHA_256.contains(&hash_algorithm.as_str()) && normalisation_algorithm == GENERIC;
        if resource.relation == Relation::External || !is_known {
            return Verification::NotVerified;
        }
        let digest: Option<Digest> = format!("sha256:{value}").parse().ok();
        let holds = match (digest, self.content_of_raw_manifest()) {
            (None, _) => false,
            (Some(digest), Some(content)) if resource.name == RAW_MANIFEST => Digest::of(&content) == digest,
            (Some(digest), _) => self.layers.contains_key(&digest),
        };
        if holds { Verification::Verified } else { Verification::Mismatch }
    }

    /// The parts of `raw-manifest`, concatenated.
    pub(in crate::module) fn content_of_raw_manifest(&self) -> Option<Vec<u8>> {
        let blob = self.descriptor.raw_manifest.as_ref()?;
        let mut content = Vec::new();
        for digest in &blob.digests {
            content.extend_from_slice(self.layers.get(digest)?);
        }
        Some(content)
    }

    fn objects(&self) -> Result<Vec<ObjectReport>, String> {
        Ok(self.raw_objects()?.iter().map(ObjectReport::new).collect())
    }

    /// The objects of `raw-manifest`; none without it.
    fn raw_objects(&self) -> Result<Vec<Value>, String> {
        let Some(text) = self.raw_text()? else { return Ok(Vec::new()) };
        layer::documents(&text).map_err(|error| error.to_string())
    }

    /// The text of `raw-manifest`; `None` without it.
    pub(in crate::module) fn raw_text(&self) -> Result<Option<String>, String> {
        let Some(blob) = &self.descriptor.raw_manifest else { return Ok(None) };
        let content = self.content_of_raw_manifest().ok_or("its content is not in the artefact")?;
        let kind = if blob.is_tar() { LayerKind::Dir } else { LayerKind::Plain };
        layer::yaml_text(kind, &content).map(Some).map_err(|error| error.to_string())
    }

    /// The default module CR of the artefact, `None` if it has none. The receiver takes that of the ModuleTemplate.
    ///
    /// # Errors
    /// The layer is missing, or is no object.
    pub(in crate::module) fn default_cr(&self) -> Result<Option<Value>, InvalidError> {
        let Some(resource) = self.descriptor.resources.iter().find(|resource| resource.name == DEFAULT_CR) else {
            return Ok(None);
        };
        let invalid = |problem: String| InvalidError::new(DEFAULT_CR, problem);
        let digest = resource.digest.as_ref().and_then(|digest| format!("sha256:{}", digest.value).parse().ok());
        let content = digest.and_then(|digest: Digest| self.layers.get(&digest));
        let content = content.ok_or_else(|| invalid("its content is not in the artefact".to_owned()))?;
        let kind = if resource.kind == DIRECTORY { LayerKind::Dir } else { LayerKind::Plain };
        let text = layer::yaml_text(kind, content).map_err(|error| invalid(error.to_string()))?;
        let objects = layer::documents(&text).map_err(|error| invalid(error.to_string()))?;
        Ok(objects.into_iter().next())
    }
}

impl ObjectReport {
    fn new(object: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let metadata = &object["metadata"];
        Self {
            api_version: text(&object["apiVersion"]),
            kind: text(&object["kind"]),
            namespace: metadata["namespace"].as_str().map(str::to_owned),
            name: text(&metadata["name"]),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { component, version, schema, digest, descriptor, .. } = self;
        writeln!(f, "{component}:{version} {digest}")?;
        writeln!(f, "component descriptor: {schema}, {} bytes, {}\n", descriptor.size, descriptor.digest)?;
        let rows = self.resources.iter().map(|resource| {
            let digest = resource.digest.clone().unwrap_or_else(|| "-".to_owned());
            let ResourceReport { name, version, access, verification, .. } = resource;
            [name.clone(), version.clone(), access.clone(), verification.to_string(), digest]
        });
        f.write_str(&table::aligned(["RESOURCE", "VERSION", "ACCESS", "DIGEST", ""], rows.collect()))?;
        if !self.objects.is_empty() {
            let rows = self.objects.iter().map(|ObjectReport { kind, namespace, name, .. }| {
                [kind.clone(), namespace.clone().unwrap_or_else(|| "-".to_owned()), name.clone()]
            });
            write!(f, "\n{}", table::aligned(["KIND", "NAMESPACE", "NAME"], rows.collect()))?;
        }
        if let Some(ManifestReport { source, localized_images }) = &self.manifest {
            writeln!(f, "\nManifest: install.source: {source}")?;
            for image in localized_images {
                writeln!(f, "Manifest: localizedImages: {}", table::sanitize(image))?;
            }
        }
        for problem in &self.problems {
            writeln!(f, "problem: {}", table::sanitize(problem))?;
        }
        Ok(())
    }
}
