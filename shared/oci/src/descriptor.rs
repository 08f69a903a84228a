//! Component descriptors of the Open Component Model (OCM), versions v2 and v3: the layer and the images of a module.

mod access;
mod member;
mod schema;

use serde::Deserialize;
use serde_json::Value;
use strum::{Display, EnumString};
use thiserror::Error;

use super::{
    archive::{self, ArchiveError, Choice},
    component::{ComponentVersion, Mapping, Repository},
    digest::{BlobReference, Digest, DigestError},
    excerpt::{Excerpt, message},
    yaml,
};
pub use access::AccessType;
pub use member::MemberError;
pub(super) use {member::Object, schema::Parts};

/// Maximum size of the config blob of a component's manifest, in bytes.
pub const MAX_CONFIG_BYTES: usize = 64 * 1024;
/// Maximum size of the layer that contains a component descriptor, as stored, in bytes.
pub const MAX_STORED_BYTES: usize = 2 * 1024 * 1024;
/// Maximum size of a component descriptor, unpacked, in bytes.
pub const MAX_BYTES: usize = 1024 * 1024;
/// Name of the resource with the module's objects.
pub const RAW_MANIFEST: &str = "raw-manifest";
/// File of a component descriptor in its tar archive.
const FILE: &str = "component-descriptor.yaml";
/// Maximum number of values of a component descriptor, keys included.
const MAX_VALUES: usize = 50_000;
/// Media types of component descriptors begin with one of these. The rest names version and encoding, for which the content
/// is authoritative: v3 has no media type of its own.
const MEDIA_TYPES: [&str; 3] = [
    "application/vnd.ocm.software.component-descriptor.",
    "application/vnd.gardener.cloud.cnudie.component-descriptor.",
    "application/vnd.oci.gardener.cloud.cnudie.component-descriptor.",
];

/// A component descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Name and version of the component.
    pub component: ComponentVersion,
    /// Schema that the component descriptor is written in.
    pub schema: Schema,
    /// Mapping of the effective repository context. Local blobs are in the repository that it leads to.
    pub mapping: Mapping,
    /// The resource [`RAW_MANIFEST`]; none if the component has no such resource.
    pub raw_manifest: Option<LocalBlob>,
    /// References of all images, in the descriptor's order.
    pub images: Vec<String>,
    /// All resources, in the descriptor's order.
    pub resources: Vec<Resource>,
}

/// Schema of a component descriptor.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
#[strum(serialize_all = "lowercase")]
pub enum Schema {
    /// `meta.schemaVersion: v2`.
    V2,
    /// `apiVersion: ocm.software/v3alpha1`.
    V3alpha1,
}

/// A blob in the repository of its component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalBlob {
    /// Digests of the parts, at least one. The content is that of all parts, concatenated in this order.
    pub digests: Vec<Digest>,
    /// Media type of the content; empty if the descriptor does not name it.
    pub media_type: String,
}

/// A resource of a component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Name.
    pub name: String,
    /// Version, which may differ from the component's.
    pub version: String,
    /// Type of the content, as in `directoryTree`.
    pub kind: String,
    /// Origin.
    pub relation: Relation,
    /// Type of the access, as in `localBlob`.
    pub access: String,
    /// Reference of the image, if the resource is one.
    pub image: Option<String>,
    /// Digest of the content; absent if the descriptor was made without digests.
    pub digest: Option<ResourceDigest>,
}

/// Origin of a resource.
#[derive(Clone, Copy, Debug, Display, EnumString, PartialEq, Eq)]
#[strum(serialize_all = "lowercase")]
pub enum Relation {
    /// Made together with the component.
    Local,
    /// Made elsewhere.
    External,
}

/// Digest of a resource, in the descriptor's spelling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceDigest {
    /// Hash algorithm, as in `SHA-256`.
    pub hash_algorithm: String,
    /// Normalisation of the content, as in `genericBlobDigest/v1`.
    pub normalisation_algorithm: String,
    /// Hash in hexadecimal digits.
    pub value: String,
}

/// A component descriptor with all members, as signatures cover them.
#[derive(Clone, Debug, PartialEq)]
pub struct Document(Value);

impl Document {
    /// Reads the members that are used: v2 or v3alpha1.
    ///
    /// # Errors
    /// When a member that is read is missing or unexpected, or when the document belongs to another component or version.
    pub fn descriptor(&self, expected: &ComponentVersion) -> Result<Descriptor, DescriptorError> {
        schema::descriptor(&self.0, expected)
    }

    /// The document as JSON.
    pub const fn value(&self) -> &Value {
        &self.0
    }

    /// Adds an entry of `signatures`, in the place of one with the same name.
    #[must_use]
    pub fn with_signature(mut self, signature: Value) -> Self {
        if let Some(members) = self.0.as_object_mut() {
            let signatures = members.entry("signatures").or_insert(Value::Null);
            if !signatures.is_array() {
                *signatures = Value::Array(Vec::new());
            }
            let same = |other: &Value| other["name"] == signature["name"];
            if let Some(signatures) = signatures.as_array_mut() {
                match signatures.iter().position(same) {
                    Some(index) => signatures[index] = signature,
                    None => signatures.push(signature),
                }
            }
        }
        self
    }

    pub(super) fn root(&self) -> Result<Object<'_>, MemberError> {
        Object::root(&self.0)
    }

    pub(super) fn parts(&self) -> Result<Parts<'_>, DescriptorError> {
        schema::parts(self.root()?)
    }
}

impl From<Value> for Document {
    fn from(value: Value) -> Self {
        Self(value)
    }
}

impl Descriptor {
    /// Repository of the component's blobs, below the registry and its optional path.
    pub fn repository(&self) -> Repository {
        self.mapping.repository(&self.component)
    }
}

impl LocalBlob {
    /// Returns true if the content is a tar archive with one file; any other media type means plain YAML.
    pub fn is_tar(&self) -> bool {
        self.media_type == "application/x-tar"
    }
}

/// A component's manifest or descriptor that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DescriptorError {
    /// The config blob does not lead to a component descriptor.
    #[error("the config blob does not refer to a component descriptor: {0}")]
    Config(String),
    /// The digest in the config blob is not supported.
    #[error("the config blob refers to a component descriptor by {0}, which is {1}")]
    Pointer(Excerpt, DigestError),
    /// Config blob or layer exceed their limit, in bytes.
    #[error("{0} bytes exceed the limit of {1} bytes")]
    TooLarge(u64, usize),
    /// The layer has another media type.
    #[error("{0} is not a media type of component descriptors")]
    MediaType(Excerpt),
    /// The layer cannot be unpacked.
    #[error(transparent)]
    Unpack(#[from] ArchiveError),
    /// The component descriptor is not text.
    #[error("the component descriptor is not UTF-8 from byte {0} on")]
    Encoding(usize),
    /// It is not YAML or JSON, or exceeds a limit of the parser.
    #[error("cannot parse the component descriptor: {0}")]
    Yaml(String),
    /// It is not exactly one document.
    #[error("the component descriptor consists of {0} documents")]
    Documents(usize),
    /// It is neither v2 nor v3alpha1.
    #[error("the schema of the component descriptor is not supported: {0}")]
    Schema(String),
    /// A member is missing or has an unexpected value.
    #[error("invalid component descriptor: {0}")]
    Member(#[from] MemberError),
    /// It describes another component or version.
    #[error("the component descriptor of {expected} describes {found}")]
    Mismatch {
        /// Name and version that were requested.
        expected: String,
        /// Name and version in the component descriptor.
        found: Excerpt,
    },
    /// Several resources are [`RAW_MANIFEST`].
    #[error("the component has several resources {RAW_MANIFEST}")]
    SeveralRawManifests,
}

#[derive(Deserialize)]
struct Config {
    #[serde(rename = "componentDescriptorLayer")]
    layer: Layer,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    media_type: String,
    digest: String,
    size: u64,
}

/// Reads the config blob of a component's manifest. Only its member `componentDescriptorLayer` leads to the component
/// descriptor, wherever that layer stands in the manifest. The layer has at most [`MAX_STORED_BYTES`].
///
/// # Errors
/// When the config blob is too large, not JSON, or refers to no layer, to one that is too large, or by another digest than
/// SHA-256.
pub fn component_descriptor_pointer(config: &[u8]) -> Result<BlobReference, DescriptorError> {
    check_size(config.len() as u64, MAX_CONFIG_BYTES)?;
    let config: Config = serde_json::from_slice(config).map_err(|error| DescriptorError::Config(message(&error)))?;
    let Layer { media_type, digest, size } = config.layer;
    check_size(size, MAX_STORED_BYTES)?;
    let digest = digest.parse().map_err(|error| DescriptorError::Pointer(Excerpt::of(&digest), error))?;
    Ok(BlobReference { media_type, digest, size })
}

/// Parses a component descriptor in YAML or JSON, alone or as the file of a tar archive: the content decides, not the
/// media type. At most [`MAX_BYTES`] are unpacked.
///
/// # Errors
/// When the layer is not a component descriptor, too large or damaged.
pub fn parse(layer_media_type: &str, content: &[u8]) -> Result<Document, DescriptorError> {
    if !MEDIA_TYPES.iter().any(|prefix| layer_media_type.starts_with(prefix)) {
        return Err(DescriptorError::MediaType(Excerpt::of(layer_media_type)));
    }
    check_size(content.len() as u64, MAX_STORED_BYTES)?;
    let mut documents =
        yaml::read(&text(content)?, MAX_VALUES).map_err(|error| DescriptorError::Yaml(error.to_string()))?;
    match (documents.pop(), documents.len()) {
        (Some(document), 0) => Ok(Document(document.value)),
        (Some(_), others) => Err(DescriptorError::Documents(others + 1)),
        (None, _) => Err(DescriptorError::Documents(0)),
    }
}

fn text(content: &[u8]) -> Result<String, DescriptorError> {
    let plain = archive::unpacked(content, MAX_STORED_BYTES)?;
    // The header of a tar entry is padded with zero bytes, which neither YAML nor JSON may contain.
    let text = if plain.contains(&0) { archive::file(&plain, MAX_STORED_BYTES, FILE, choose)? } else { plain };
    check_size(text.len() as u64, MAX_BYTES)?;
    String::from_utf8(text).map_err(|error| DescriptorError::Encoding(error.utf8_error().valid_up_to()))
}

fn choose(path: &str) -> Choice {
    let path = path.trim_start_matches('/');
    if path.strip_prefix("./").unwrap_or(path) == FILE { Choice::Take } else { Choice::Skip }
}

fn check_size(bytes: u64, limit: usize) -> Result<(), DescriptorError> {
    if bytes > limit as u64 { Err(DescriptorError::TooLarge(bytes, limit)) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
