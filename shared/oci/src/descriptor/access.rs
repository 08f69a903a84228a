//! Accesses of resources: local blobs and images.

use super::{
    Excerpt, LocalBlob,
    member::{MemberError, Object},
};

/// Type of an access, as far as it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessType {
    /// A blob of the component's own manifest.
    LocalBlob,
    /// The same in an older form: `digest` instead of `localReference`, and no media type.
    LegacyLocalBlob,
    /// An image or another artifact of a registry.
    Image,
    /// No content.
    None,
    /// Any other type.
    Other,
}

impl AccessType {
    /// Reads a type. `/v1` is the version of all these types, and may be left out. `OCIArtifact` stands in the OCM
    /// specification only, the other aliases also in its implementations.
    pub fn of(name: &str) -> Self {
        match name.strip_suffix("/v1").unwrap_or(name) {
            "localBlob" | "LocalBlob" => Self::LocalBlob,
            "localOciBlob" => Self::LegacyLocalBlob,
            "ociArtifact" | "ociRegistry" | "OCIImage" | "ociImage" | "OCIArtifact" => Self::Image,
            "none" | "None" => Self::None,
            _ => Self::Other,
        }
    }
}

/// Reads the access of a resource that has to be a local blob. Its reference is one digest, or a list of digests separated
/// by commas if the blob was split.
pub(super) fn local_blob(access: &Object<'_>) -> Result<LocalBlob, MemberError> {
    let name = access.text("type")?;
    let (key, media_type) = match AccessType::of(name) {
        AccessType::LocalBlob => ("localReference", access.optional_text("mediaType")?),
        AccessType::LegacyLocalBlob => ("digest", ""),
        AccessType::Image | AccessType::None | AccessType::Other => {
            return Err(access.error("type", format!("is {}, a local blob is required", Excerpt::of(name))));
        }
    };
    let reference = access.text(key)?;
    let digests = reference.split(',').map(|digest| digest.trim().parse());
    let digests = digests.collect::<Result<_, _>>().map_err(|error| access.error(key, format!("is {error}")))?;
    Ok(LocalBlob { digests, media_type: media_type.to_owned() })
}
