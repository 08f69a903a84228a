//! A private folder with contents by digest, bounded in bytes. Blocking.

use std::{
    collections::HashMap,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::digest::Digest;

/// Files that are considered at start; more are deleted.
const MAX_FILES: usize = 16_384;
/// Folder of the contents, by algorithm as in an OCI image layout.
const BLOBS: &str = "sha256";
/// Ending of files that are being written.
const TEMPORARY: &str = ".tmp";
/// Mode of folders: another user could replace the tags, which have no digest.
const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// Result of reading a content.
#[derive(Debug)]
pub(super) enum Found {
    /// Content, verified.
    Content(Vec<u8>),
    /// No such file.
    Absent,
    /// The file did not match its digest and is deleted.
    Corrupt,
}

/// A file of the folder.
#[derive(Clone, Copy, Debug)]
struct Stored {
    bytes: u64,
    /// Number of the last use.
    used: u64,
}

/// The folder with its index in memory, from one scan at start. It is private to this process.
#[derive(Debug)]
pub(super) struct Folder {
    root: PathBuf,
    max_bytes: u64,
    files: HashMap<Digest, Stored>,
    bytes: u64,
    uses: u64,
}

impl Folder {
    /// Creates the folder, or takes over an existing one of the same user. Surplus and unfinished files are deleted.
    pub(super) fn open(root: PathBuf, max_bytes: u64) -> io::Result<Self> {
        private_folder(&root)?;
        let blobs = root.join(BLOBS);
        private_folder(&blobs)?;
        let mut found = Vec::new();
        for entry in fs::read_dir(&blobs)? {
            let entry = entry?;
            let digest = entry.file_name().to_str().and_then(|name| format!("{BLOBS}:{name}").parse::<Digest>().ok());
            match (digest, entry.metadata()) {
                (Some(digest), Ok(metadata)) if metadata.is_file() && found.len() < MAX_FILES => {
                    found.push((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), digest, metadata.len()));
                }
                // Another process may have been faster.
                _ => drop(fs::remove_file(entry.path())),
            }
        }
        found.sort_by_key(|(modified, ..)| *modified);
        let mut folder = Self { root, max_bytes, files: HashMap::new(), bytes: 0, uses: 0 };
        for (_, digest, bytes) in found {
            folder.insert(digest, bytes);
        }
        Ok(folder)
    }

    /// Bytes of all contents.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Path of a content.
    pub(super) fn path(&self, digest: &Digest) -> PathBuf {
        self.root.join(BLOBS).join(digest.hex())
    }

    /// Reads and verifies a content, and marks it as used.
    pub(super) fn read(&mut self, digest: &Digest) -> io::Result<Found> {
        let path = self.path(digest);
        let Some(stored) = self.files.get_mut(digest) else { return Ok(Found::Absent) };
        self.uses += 1;
        stored.used = self.uses;
        let length = stored.bytes;
        let content = match read_exactly(&path, length) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.forget(digest);
                return Ok(Found::Absent);
            }
            content => content?,
        };
        if let Some(content) = content.filter(|content| Digest::of(content) == *digest) {
            return Ok(Found::Content(content));
        }
        self.forget(digest);
        fs::remove_file(&path)?;
        Ok(Found::Corrupt)
    }

    /// Writes a content, after the least recently used ones have made room, and returns the number of evicted ones. A
    /// content larger than the limit is not stored.
    pub(super) fn write(&mut self, digest: &Digest, content: &[u8]) -> io::Result<u64> {
        let bytes = content.len() as u64;
        if bytes > self.max_bytes || self.files.contains_key(digest) {
            return Ok(0);
        }
        let evicted = self.evict(self.max_bytes - bytes)?;
        replace(&self.path(digest), content)?;
        self.insert(*digest, bytes);
        Ok(evicted)
    }

    /// Deletes least recently used contents until at most this many bytes remain, and returns their number.
    pub(super) fn evict(&mut self, bytes: u64) -> io::Result<u64> {
        let mut evicted = 0;
        while self.bytes > bytes {
            let oldest = self.files.iter().min_by_key(|(_, stored)| stored.used).map(|(digest, _)| *digest);
            let Some(oldest) = oldest else { break };
            match fs::remove_file(self.path(&oldest)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => self.forget(&oldest),
            }
            evicted += 1;
        }
        Ok(evicted)
    }

    /// Reads a further file of the folder, of at most this many bytes.
    pub(super) fn read_file(&self, name: &str, max_bytes: u64) -> io::Result<Option<Vec<u8>>> {
        let path = self.root.join(name);
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() && metadata.len() <= max_bytes => read_exactly(&path, metadata.len()),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Replaces a further file of the folder, which does not count towards the limit.
    pub(super) fn write_file(&self, name: &str, content: &[u8]) -> io::Result<()> {
        replace(&self.root.join(name), content)
    }

    fn insert(&mut self, digest: Digest, bytes: u64) {
        self.uses += 1;
        self.bytes += bytes;
        self.files.insert(digest, Stored { bytes, used: self.uses });
    }

    fn forget(&mut self, digest: &Digest) {
        if let Some(stored) = self.files.remove(digest) {
            self.bytes = self.bytes.saturating_sub(stored.bytes);
        }
    }
}

/// Creates a folder for this user alone, or verifies that an existing one is: another user could replace its contents.
fn private_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(path)?;
    let metadata = fs::symlink_metadata(path)?;
    if !metadata.is_dir() || metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "not a folder of this user"));
    }
    if metadata.permissions().mode() & 0o777 == FOLDER_MODE {
        return Ok(());
    }
    fs::set_permissions(path, fs::Permissions::from_mode(FOLDER_MODE))
}

/// Reads a file of a known length and marks it as used for the next start; `None` if its length differs.
fn read_exactly(path: &Path, length: u64) -> io::Result<Option<Vec<u8>>> {
    let file = File::open(path)?;
    if file.metadata()?.len() != length {
        return Ok(None);
    }
    // The order of eviction after a restart is not worth an error.
    let _ = file.set_modified(SystemTime::now());
    let mut content = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    file.take(length).read_to_end(&mut content)?;
    Ok(Some(content))
}

/// Writes a file under a temporary name, and renames it when it is on disk.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(TEMPORARY);
    let temporary = PathBuf::from(temporary);
    let written = OpenOptions::new().write(true).create(true).truncate(true).mode(FILE_MODE).open(&temporary);
    let written = written.and_then(|mut file| file.write_all(content).and_then(|()| file.sync_all()));
    written.and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        // On a full disk the unfinished file would keep its space.
        let _ = fs::remove_file(&temporary);
    })
}
