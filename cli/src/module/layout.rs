//! OCI image layouts (OCI image specification, *Image Layout*): a folder, or a tar archive of one.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;
use tar::Archive;
use tidewatch_oci::digest::Digest;

use super::{
    InvalidError,
    artefact::{self, Blob},
};

/// File that marks a layout.
const MARKER: &str = "oci-layout";
/// File with the references of a layout.
const INDEX: &str = "index.json";
/// Media type of [`INDEX`].
const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
/// Maximum size of [`INDEX`] in bytes.
const MAX_INDEX: u64 = 4 << 20;
/// Maximum size of a tar archive that is read, in bytes.
const MAX_ARCHIVE: u64 = 256 << 20;
/// Maximum number of entries of a tar archive that is read.
const MAX_ENTRIES: usize = 1_000;

/// Content of a layout: one manifest, and the blobs that it references.
#[derive(Clone, Debug)]
pub struct Contents<'a> {
    /// The manifest.
    pub manifest: &'a Blob,
    /// The blobs, in any order.
    pub blobs: &'a [Blob],
    /// Reference of the manifest in the layout, as a tag.
    pub reference: String,
}

/// Files of a layout, by their paths.
fn files(contents: &Contents<'_>) -> Vec<(String, Vec<u8>)> {
    let mut manifest = contents.manifest.reference();
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": contents.reference});
    let index = json!({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [manifest]});
    let head = [(MARKER, json!({"imageLayoutVersion": "1.0.0"})), (INDEX, index)];
    let head = head.into_iter().map(|(name, value)| (name.to_owned(), value.to_string().into_bytes()));
    let blobs = contents.blobs.iter().chain([contents.manifest]);
    let blobs: BTreeMap<_, _> = blobs.map(|Blob { digest, content, .. }| (digest, content)).collect();
    head.chain(blobs.into_iter().map(|(digest, content)| (blob_path(digest), content.clone()))).collect()
}

fn blob_path(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Writes a tar archive of the layout.
pub(super) fn write_archive(contents: Contents<'_>, to: &Path) -> Result<()> {
    let files = files(&contents);
    let files: Vec<_> = files.iter().map(|(path, content)| (&**path, &**content)).collect();
    let archive = artefact::archive(&files).context("pack the layout")?;
    let new = beside(to);
    fs::write(&new, archive).with_context(|| format!("write {}", new.display()))?;
    fs::rename(&new, to).with_context(|| format!("write {}", to.display()))
}

/// Writes the folder of the layout next to its place, and replaces an earlier layout as a whole.
///
/// # Errors
/// A file cannot be written, or the folder has something else than a layout, which stays as it is.
pub fn write_folder(contents: Contents<'_>, to: &Path) -> Result<()> {
    let is_empty = fs::read_dir(to).is_ok_and(|mut entries| entries.next().is_none());
    if to.exists() && !is_empty && !to.join(MARKER).is_file() {
        bail!("{} exists and is no OCI image layout", to.display());
    }
    let new = beside(to);
    remove(&new)?;
    let blobs = new.join("blobs").join("sha256");
    fs::create_dir_all(&blobs).with_context(|| format!("create {}", blobs.display()))?;
    for (path, content) in files(&contents) {
        let path = new.join(path);
        fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
    }
    remove(to)?;
    fs::rename(&new, to).with_context(|| format!("write {}", to.display()))
}

/// Path of what replaces a file or folder.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    path.with_file_name(name)
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(absent) if absent.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.with_context(|| format!("remove {}", folder.display())),
    }
}

/// A layout on disk.
#[derive(Debug)]
pub(super) enum Layout {
    /// A folder.
    Folder(PathBuf),
    /// The files of a tar archive.
    Archive(BTreeMap<String, Bytes>),
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Reference>,
}

#[derive(Deserialize)]
struct Reference {
    digest: String,
}

impl Layout {
    /// Opens a folder, or a file that is a tar archive.
    ///
    /// # Errors
    /// [`InvalidError`] if it is no layout; other errors if it cannot be read.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let read = || format!("read {}", path.display());
        if fs::metadata(path).with_context(read)?.is_dir() {
            return match path.join(MARKER).is_file() {
                true => Ok(Self::Folder(path.to_owned())),
                false => Err(InvalidError::new(path.display(), format!("the folder has no file {MARKER}")).into()),
            };
        }
        let file = File::open(path).with_context(read)?;
        if file.metadata().with_context(read)?.len() > MAX_ARCHIVE {
            return Err(InvalidError::new(path.display(), format!("the file exceeds {MAX_ARCHIVE} bytes")).into());
        }
        let files = entries(file.take(MAX_ARCHIVE));
        let files = files.map_err(|error| InvalidError::new(path.display(), format!("not a tar archive: {error}")))?;
        match files.contains_key(MARKER) {
            true => Ok(Self::Archive(files)),
            false => Err(InvalidError::new(path.display(), format!("the archive has no file {MARKER}")).into()),
        }
    }

    /// Digest of the only manifest.
    pub(super) fn manifest(&self) -> Result<Digest> {
        let content = self.file(INDEX, MAX_INDEX)?;
        let index: Index = serde_json::from_slice(&content).map_err(|error| InvalidError::new(INDEX, error))?;
        let [reference] = &*index.manifests else {
            let problem = format!("the layout has {} manifests instead of one", index.manifests.len());
            return Err(InvalidError::new(INDEX, problem).into());
        };
        let digest = reference.digest.parse();
        Ok(digest.map_err(|error| InvalidError::new(INDEX, format!("{:?} is {error}", reference.digest)))?)
    }

    /// Content of a blob, verified.
    ///
    /// # Errors
    /// [`InvalidError`] if the blob is missing, exceeds the limit, or has another digest.
    pub(super) fn blob(&self, digest: &Digest, limit: u64) -> Result<Bytes> {
        let path = blob_path(digest);
        let content = self.file(&path, limit)?;
        let actual = Digest::of(&content);
        match actual == *digest {
            true => Ok(content),
            false => Err(InvalidError::new(path, format!("the content has the digest {actual}")).into()),
        }
    }

    fn file(&self, name: &str, limit: u64) -> Result<Bytes> {
        let missing = || InvalidError::new(name, "the layout has no such file");
        let content = match self {
            Self::Archive(files) => files.get(name).cloned().ok_or_else(missing)?,
            Self::Folder(folder) => {
                let path = folder.join(name);
                let mut content = Vec::new();
                match File::open(&path).and_then(|file| file.take(limit + 1).read_to_end(&mut content)) {
                    Err(absent) if absent.kind() == io::ErrorKind::NotFound => return Err(missing().into()),
                    read => read.with_context(|| format!("read {}", path.display()))?,
                };
                content.into()
            }
        };
        match content.len() as u64 <= limit {
            true => Ok(content),
            false => Err(InvalidError::new(name, format!("the file exceeds {limit} bytes")).into()),
        }
    }
}

/// Regular files of a tar archive, whose content is bounded, too: sparse entries are larger than their part of it.
fn entries(archive: impl Read) -> io::Result<BTreeMap<String, Bytes>> {
    let mut files = BTreeMap::new();
    let mut left = MAX_ARCHIVE;
    for entry in Archive::new(archive).entries()?.take(MAX_ENTRIES) {
        let mut entry = entry?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let mut content = Vec::new();
        entry.by_ref().take(left + 1).read_to_end(&mut content)?;
        left = left.checked_sub(content.len() as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        files.insert(path.strip_prefix("./").unwrap_or(&path).to_owned(), content.into());
    }
    Ok(files)
}
