//! Volumes as files. Readers see a change whole or not at all, as from a real kubelet: the files are in a folder of
//! their own, a link `..data` points to it and is replaced by one rename, and each name in the volume is a link through
//! `..data`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

const DATA: &str = "..data";
const DATA_NEXT: &str = "..data_next";

/// One file of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    /// Permissions, for instance `0o400`.
    pub(super) mode: u32,
}

/// The files of a volume by path, relative and without `..`; see [`is_safe`].
pub(super) type Files = BTreeMap<String, Content>;

/// Returns true if a path stays within its volume.
pub(super) fn is_safe(path: &str) -> bool {
    let plain = |segment: &str| !segment.is_empty() && segment != "." && !segment.starts_with("..");
    !path.is_empty() && path.split('/').all(plain)
}

/// A volume in a folder of its own, which need not exist.
#[derive(Debug)]
pub(super) struct VolumeDir {
    folder: PathBuf,
    files: Option<Files>,
    number: u64,
}

impl VolumeDir {
    pub(super) const fn new(folder: PathBuf) -> Self {
        Self { folder, files: None, number: 0 }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes an empty folder for the container's own use.
    pub(super) fn empty(&self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)
    }

    /// Makes the volume contain exactly these files; false if it did already.
    pub(super) fn put(&mut self, files: &Files) -> io::Result<bool> {
        if self.files.as_ref() == Some(files) {
            return Ok(false);
        }
        fs::create_dir_all(&self.folder)?;
        self.number += 1;
        let version = format!("..{}", self.number);
        let written = self.folder.join(&version);
        for (path, content) in files {
            let path = written.join(path);
            fs::create_dir_all(path.parent().unwrap_or(&written))?;
            fs::write(&path, &content.bytes)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(content.mode))?;
        }
        fs::create_dir_all(&written)?;
        let before = fs::read_link(self.folder.join(DATA)).ok();
        symlink(&version, self.folder.join(DATA_NEXT))?;
        fs::rename(self.folder.join(DATA_NEXT), self.folder.join(DATA))?;
        self.link(files)?;
        if let Some(before) = before {
            fs::remove_dir_all(self.folder.join(before))?;
        }
        self.files = Some(files.clone());
        Ok(true)
    }

    /// Makes one link for each first segment, and removes the links of former files.
    fn link(&self, files: &Files) -> io::Result<()> {
        let names: BTreeSet<_> = files.keys().filter_map(|path| path.split('/').next()).collect();
        for entry in fs::read_dir(&self.folder)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if !name.starts_with("..") && !names.contains(name.as_str()) {
                fs::remove_file(self.folder.join(name))?;
            }
        }
        for name in names {
            let link = self.folder.join(name);
            if fs::symlink_metadata(&link).is_err() {
                symlink(Path::new(DATA).join(name), link)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(files: &[(&str, &str)]) -> Files {
        let content = |text: &str| Content { bytes: text.into(), mode: 0o400 };
        files.iter().map(|(path, text)| ((*path).to_owned(), content(text))).collect()
    }

    #[test]
    fn files_are_replaced_atomically() {
        let root = tempfile::tempdir().expect("a folder");
        let mut dir = VolumeDir::new(root.path().join("volume"));
        assert!(dir.put(&files(&[("tls.crt", "one"), ("tls.key", "one"), ("deep/er", "x")])).expect("written"));
        assert!(!dir.put(&files(&[("tls.crt", "one"), ("tls.key", "one"), ("deep/er", "x")])).expect("the same"));
        let read = |name: &str| fs::read_to_string(dir.folder().join(name)).ok();
        assert_eq!((read("tls.crt").as_deref(), read("deep/er").as_deref()), (Some("one"), Some("x")));
        let mode = fs::metadata(dir.folder().join("tls.key")).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o400);
        // A reader that holds the old folder sees the old files until the rename.
        let old = fs::canonicalize(dir.folder().join(DATA)).expect("a link");
        assert!(dir.put(&files(&[("tls.crt", "two"), ("ca.crt", "two")])).expect("written"));
        let read = |name: &str| fs::read_to_string(dir.folder().join(name)).ok();
        assert_eq!((read("tls.crt").as_deref(), read("ca.crt").as_deref()), (Some("two"), Some("two")));
        assert_eq!((read("tls.key"), read("deep/er"), old.exists()), (None, None, false));
        assert!(dir.put(&Files::new()).expect("emptied"));
        assert_eq!(fs::read_dir(dir.folder()).expect("there").count(), 2, "the link and its target");
    }

    #[test]
    fn paths_cannot_leave_their_volume() {
        assert!(is_safe("a") && is_safe("a/b.c"));
        for bad in ["", "/a", "a/", "..", "../a", "a/../b", "..data", "./a"] {
            assert!(!is_safe(bad), "{bad}");
        }
    }
}
