//! The OCI image layout on disk (image-spec, image-layout.md): content-addressed blobs, and an index that references
//! the manifest.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use aws_lc_rs::digest as sha;
use serde_json::{Value, json};
use tidewatch_kit::hex;

/// Bytes with a media type.
pub(super) struct Blob {
    pub(super) media_type: &'static str,
    pub(super) content: Vec<u8>,
}

impl Blob {
    pub(super) fn json(media_type: &'static str, value: &Value) -> Self {
        Self { media_type, content: value.to_string().into_bytes() }
    }
}

/// The digest of bytes: `sha256:…`.
pub(super) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(sha::digest(&sha::SHA256, bytes).as_ref()))
}

/// A layout in progress, written next to the one that it replaces.
pub(super) struct Layout {
    to: PathBuf,
    new: PathBuf,
}

impl Layout {
    pub(super) fn create(to: &Path) -> Result<Self> {
        let mut name = to.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let this = Self { to: to.to_owned(), new: to.with_file_name(name) };
        remove(&this.new)?;
        let blobs = this.new.join("blobs").join("sha256");
        fs::create_dir_all(&blobs).with_context(|| format!("cannot create {}", blobs.display()))?;
        Ok(this)
    }

    /// Writes a blob and returns its descriptor.
    pub(super) fn put(&self, blob: &Blob) -> Result<Value> {
        let digest = digest(&blob.content);
        let path = self.new.join("blobs").join(digest.replace(':', "/"));
        fs::write(&path, &blob.content).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(json!({"mediaType": blob.media_type, "digest": digest, "size": blob.content.len()}))
    }

    /// Writes the index with the manifest, replaces the previous layout, and returns the digest of the manifest.
    pub(super) fn finish(self, mut manifest: Value, reference: &str) -> Result<String> {
        let digest = manifest["digest"].as_str().unwrap_or_default().to_owned();
        manifest["annotations"] = json!({"org.opencontainers.image.ref.name": reference});
        let index = json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [manifest]});
        for (name, value) in [("oci-layout", json!({"imageLayoutVersion": "1.0.0"})), ("index.json", index)] {
            let path = self.new.join(name);
            fs::write(&path, value.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
        }
        remove(&self.to)?;
        fs::rename(&self.new, &self.to).with_context(|| format!("cannot replace {}", self.to.display()))?;
        Ok(digest)
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(absent) if absent.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.with_context(|| format!("cannot remove {}", path.display())),
    }
}
