//! A layer: files in a compressed tar archive. Owners, times and order are fixed, so that equal files produce an equal
//! layer.

use std::{collections::BTreeSet, fs, io, path::Path};

use anyhow::{Context as _, Result};
use flate2::{Compression, write::GzEncoder};
use tar::{Builder, EntryType, Header};
use tidewatch_cli::module::Blob;
use tidewatch_oci::digest::Digest;

/// Context of an error of the archive.
const PACK: &str = "cannot pack a layer";

/// A compressed layer.
pub(super) struct Layer {
    pub(super) blob: Blob,
    /// Digest of the uncompressed archive, the `diff_id` in the image configuration.
    pub(super) unpacked: Digest,
}

/// Appends files to a layer.
pub(super) struct Writer {
    tar: Builder<Vec<u8>>,
    folders: BTreeSet<String>,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self { tar: Builder::new(Vec::new()), folders: BTreeSet::new() }
    }

    /// Appends a file of the build machine, following symbolic links.
    pub(super) fn file(&mut self, from: &Path, to: &str, mode: u32) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.entry(to, EntryType::Regular, mode, &content)
    }

    /// Appends a text file.
    pub(super) fn text(&mut self, to: &str, content: &str) -> Result<()> {
        self.entry(to, EntryType::Regular, 0o644, content.as_bytes())
    }

    /// Appends an empty folder.
    pub(super) fn folder(&mut self, to: &str, mode: u32) -> Result<()> {
        self.entry(to, EntryType::Directory, mode, &[])
    }

    /// Compresses the layer.
    pub(super) fn finish(self) -> Result<Layer> {
        let tar = self.tar.into_inner().context(PACK)?;
        let unpacked = Digest::of(&tar);
        let mut packed = GzEncoder::new(Vec::new(), Compression::default());
        io::Write::write_all(&mut packed, &tar).context(PACK)?;
        let content = packed.finish().context(PACK)?;
        Ok(Layer { blob: Blob::new("application/vnd.oci.image.layer.v1.tar+gzip", content), unpacked })
    }

    fn entry(&mut self, to: &str, kind: EntryType, mode: u32, content: &[u8]) -> Result<()> {
        let to = to.trim_start_matches('/');
        if let Some((parent, _)) = to.rsplit_once('/')
            && self.folders.insert(parent.to_owned())
        {
            self.entry(parent, EntryType::Directory, 0o755, &[])?;
        }
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        let name = if kind == EntryType::Directory { format!("{to}/") } else { to.to_owned() };
        self.tar.append_data(&mut header, name, content).context(PACK)
    }
}
