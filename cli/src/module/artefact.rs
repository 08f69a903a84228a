//! The artefact of a module's version: an OCI image manifest whose config leads to the component descriptor and whose
//! layers are the descriptor and the local blobs (OCM specification, *OCI registries*). Pure; equal input produces equal
//! bytes.

use std::{borrow::Cow, collections::BTreeMap, io};

use bytes::Bytes;
use serde_json::{Map, Value, json};
use tar::{Builder, EntryType, Header};
use tidewatch_oci::{component::ComponentVersion, digest::Digest};

use super::layout::Contents;

/// Media type of a manifest.
pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of the config.
const CONFIG: &str = "application/vnd.ocm.software.component.config.v1+json";
/// Media type of the layer with the component descriptor.
pub(super) const DESCRIPTOR: &str = "application/vnd.ocm.software.component-descriptor.v2+yaml+tar";
/// Media type of a tar archive.
pub(super) const TAR: &str = "application/x-tar";
/// Name of the component descriptor in its layer.
const DESCRIPTOR_FILE: &str = "component-descriptor.yaml";
/// Modification time of all files in archives, 2022-01-01T00:00:00Z as in other OCM tools: digests depend on the
/// content alone.
const MTIME: u64 = 1_640_995_200;

/// Bytes with their media type and digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Media type.
    pub media_type: Cow<'static, str>,
    /// Digest of the content.
    pub digest: Digest,
    /// Content.
    pub content: Vec<u8>,
}

impl Blob {
    /// Creates a blob and computes its digest.
    pub fn new(media_type: impl Into<Cow<'static, str>>, content: Vec<u8>) -> Self {
        Self { media_type: media_type.into(), digest: Digest::of(&content), content }
    }

    /// Creates the blob of a tar archive with one file.
    ///
    /// # Errors
    /// The name does not fit into the header of an archive.
    pub(super) fn archive(file: &str, content: &[u8]) -> io::Result<Self> {
        Ok(Self::new(TAR, archive(&[(file, content)])?))
    }

    /// Its content descriptor (OCI image specification).
    pub fn reference(&self) -> Value {
        json!({"mediaType": self.media_type, "digest": self.digest.to_string(), "size": self.content.len()})
    }
}

/// Packs files as a tar archive with fixed owner, mode and time.
pub(super) fn archive(files: &[(&str, &[u8])]) -> io::Result<Vec<u8>> {
    let mut archive = Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(MTIME);
        header.set_size(content.len() as u64);
        archive.append_data(&mut header, name, *content)?;
    }
    archive.into_inner()
}

/// A resource of the component with its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalResource {
    pub(super) name: &'static str,
    pub(super) blob: Blob,
}

/// Everything that a registry stores of one version of a component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Artefact {
    pub(super) component: ComponentVersion,
    /// The config, then the layers in their order.
    pub(super) blobs: Vec<Blob>,
    pub(super) manifest: Blob,
}

impl Artefact {
    /// The content of its layout.
    pub(super) fn contents<'a>(&'a self) -> Contents<'a> {
        Contents { manifest: &self.manifest, blobs: &self.blobs, reference: self.component.version().to_owned() }
    }

    /// Assembles the artefact of a component descriptor and the content of its local resources. The descriptor is the
    /// first layer, because other tools search local blobs behind it.
    ///
    /// # Errors
    /// An archive cannot be written.
    pub(super) fn new(
        component: ComponentVersion,
        descriptor: &str,
        resources: Vec<LocalResource>,
    ) -> io::Result<Self> {
        let (config, descriptor) = head(descriptor)?;
        let layers = resources.iter().map(|LocalResource { name, blob }| {
            let mut layer = blob.reference();
            let identity = json!([{"kind": "resource", "identity": {"name": name}}]);
            layer["annotations"] = json!({"software.ocm.artifact": identity.to_string()});
            layer
        });
        let layers: Vec<_> = [descriptor.reference()].into_iter().chain(layers).collect();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config.reference(),
            "layers": layers,
            "annotations": {
                "software.ocm.componentversion": component.to_string(),
                "software.ocm.creator": "tidewatch",
            },
        });
        let manifest = Blob::new(MANIFEST, manifest.to_string().into_bytes());
        let blobs = [config, descriptor].into_iter().chain(resources.into_iter().map(|resource| resource.blob));
        Ok(Self { component, blobs: blobs.collect(), manifest })
    }

    /// Assembles the artefact again with another component descriptor, and the other layers as they are. `replaced` is the
    /// digest of the layer with the descriptor before.
    ///
    /// # Errors
    /// An archive cannot be written.
    pub(super) fn with_descriptor(
        component: ComponentVersion,
        mut manifest: Map<String, Value>,
        replaced: &Digest,
        descriptor: &str,
        layers: &BTreeMap<Digest, Bytes>,
    ) -> io::Result<Self> {
        let (config, descriptor) = head(descriptor)?;
        manifest.insert("config".to_owned(), config.reference());
        let mut blobs = Vec::new();
        let references = manifest.get_mut("layers").and_then(Value::as_array_mut);
        for reference in references.into_iter().flatten().filter_map(Value::as_object_mut) {
            let is = |digest: &Digest| reference.get("digest").is_some_and(|text| *text == digest.to_string());
            if is(replaced) {
                reference.extend(descriptor.reference().as_object().cloned().unwrap_or_default());
            } else if let Some((_, content)) = layers.iter().find(|(digest, _)| is(digest)) {
                let media_type = reference.get("mediaType").and_then(Value::as_str).unwrap_or_default().to_owned();
                blobs.push(Blob::new(media_type, content.to_vec()));
            }
        }
        let manifest = Value::Object(manifest);
        let manifest = Blob::new(MANIFEST, manifest.to_string().into_bytes());
        Ok(Self { component, blobs: [config, descriptor].into_iter().chain(blobs).collect(), manifest })
    }
}

/// The config, and the layer with the component descriptor, to which it leads.
fn head(descriptor: &str) -> io::Result<(Blob, Blob)> {
    let descriptor = Blob::new(DESCRIPTOR, archive(&[(DESCRIPTOR_FILE, descriptor.as_bytes())])?);
    let config = json!({"componentDescriptorLayer": descriptor.reference()});
    Ok((Blob::new(CONFIG, config.to_string().into_bytes()), descriptor))
}
