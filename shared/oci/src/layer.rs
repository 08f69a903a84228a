//! Layers with the objects of a module: from the stored bytes to YAML, and from YAML to objects.

mod objects;
mod place;

use thiserror::Error;

use super::archive::{self, ArchiveError, Choice};

pub use objects::{PlacedObject, documents, placed_documents};
pub use place::Place;

/// Maximum size of a layer as stored, in bytes.
pub const MAX_STORED_BYTES: usize = 16 * 1024 * 1024;
/// Maximum size of a layer, unpacked, in bytes.
pub const MAX_BYTES: usize = 64 * 1024 * 1024;
/// Maximum number of objects of a layer.
pub const MAX_OBJECTS: usize = 5_000;
/// Maximum number of values of a layer, keys included. As measured, 613 CRDs of 15 MB have 590,000 values and take 90 MB in
/// memory. The worst values, objects with one member each, take 330 bytes each. One layer is parsed at a time.
const MAX_VALUES: usize = 1_000_000;

/// Form of a layer; both may be compressed with gzip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// A tar archive with one YAML file; `oci-dir` in a Manifest.
    Dir,
    /// YAML; `oci-ref` in a Manifest.
    Plain,
}

/// A layer without usable objects.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LayerError {
    /// The layer exceeds [`MAX_STORED_BYTES`].
    #[error("a layer of {0} bytes exceeds {MAX_STORED_BYTES} bytes")]
    TooLarge(usize),
    /// It cannot be unpacked.
    #[error(transparent)]
    Unpack(#[from] ArchiveError),
    /// It is not text.
    #[error("the layer is not UTF-8 from byte {0} on")]
    Encoding(usize),
    /// It is not YAML, or exceeds a limit of the parser.
    #[error("cannot parse the layer as YAML: {0}")]
    Yaml(String),
    /// The layer has more than [`MAX_VALUES`].
    #[error(
        "line {line}: the layer has more than {MAX_VALUES} values (each key, text, number, list and object counts, also when \
         an alias repeats it); shorten the schemas of its CRDs, or split the module"
    )]
    TooManyValues {
        /// Line of the first value beyond the limit, counted from 1.
        line: usize,
    },
    /// A document or an item of a list is not an object of Kubernetes.
    #[error("{place}: {reason}")]
    Object {
        /// Place and name of the object, as far as known.
        place: Place,
        /// The missing or wrong member, or the type of the document.
        reason: &'static str,
    },
    /// The layer contains more than [`MAX_OBJECTS`].
    #[error("the layer contains more than {MAX_OBJECTS} objects")]
    TooMany,
}

/// Unpacks a layer to its YAML text. Of a tar archive that is the first regular file whose name does not begin with `._`,
/// which archives made on macOS add. At most [`MAX_BYTES`] are unpacked.
///
/// # Errors
/// When the layer is too large, damaged, without such a file or not UTF-8, or when the path of the file leads out of the
/// archive.
pub fn yaml_text(kind: LayerKind, content: &[u8]) -> Result<String, LayerError> {
    if content.len() > MAX_STORED_BYTES {
        return Err(LayerError::TooLarge(content.len()));
    }
    let text = match kind {
        LayerKind::Plain => archive::unpacked(content, MAX_BYTES)?,
        LayerKind::Dir => archive::file(content, MAX_BYTES, "with YAML", choose)?,
    };
    String::from_utf8(text).map_err(|error| LayerError::Encoding(error.utf8_error().valid_up_to()))
}

fn choose(path: &str) -> Choice {
    let name = path.rsplit('/').next().unwrap_or(path);
    if name.starts_with("._") {
        Choice::Skip
    } else if leads_out(path) {
        Choice::Refuse
    } else {
        Choice::Take
    }
}

/// Returns whether a path leads out of the archive. One that begins with `/` begins at its root, as for lifecycle-manager.
fn leads_out(path: &str) -> bool {
    let mut depth = 0_usize;
    for step in path.split('/') {
        match step {
            "" | "." => {}
            ".." => match depth.checked_sub(1) {
                Some(less) => depth = less,
                None => return true,
            },
            _ => depth += 1,
        }
    }
    depth == 0
}

#[cfg(test)]
mod tests;
