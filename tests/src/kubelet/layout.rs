//! Volumes as files. A change is seen whole or not at all, as from a real kubelet: the files stand in a folder of their own, a link
//! `..data` leads there and is exchanged by one rename, and each name in the volume is a link through `..data`.

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

/// The files of a volume by path, relative and without `..`; see [`safe`].
pub(super) type Files = BTreeMap<String, Content>;

/// Whether a path may stand in a volume.
pub(super) fn safe(path: &str) -> bool {
    let plain = |segment: &str| !segment.is_empty() && segment != "." && !segment.starts_with("..");
    !path.is_empty() && path.split('/').all(plain)
}

/// A volume in a folder of its own, which need not exist.
#[derive(Debug)]
pub(super) struct Laid {
    folder: PathBuf,
    files: Option<Files>,
    number: u64,
}

impl Laid {
    pub(super) const fn new(folder: PathBuf) -> Self {
        Self { folder, files: None, number: 0 }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// An empty folder that is the container's.
    pub(super) fn empty(&self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)
    }

    /// Makes the volume hold these files and no others; whether that was a change.
    pub(super) fn put(&mut self, files: &Files) -> io::Result<bool> {
        if self.files.as_ref() == Some(files) {
            return Ok(false);
        }
        fs::create_dir_all(&self.folder)?;
        self.number += 1;
        let stand = format!("..{}", self.number);
        let written = self.folder.join(&stand);
        for (path, content) in files {
            let path = written.join(path);
            fs::create_dir_all(path.parent().unwrap_or(&written))?;
            fs::write(&path, &content.bytes)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(content.mode))?;
        }
        fs::create_dir_all(&written)?;
        let before = fs::read_link(self.folder.join(DATA)).ok();
        symlink(&stand, self.folder.join(DATA_NEXT))?;
        fs::rename(self.folder.join(DATA_NEXT), self.folder.join(DATA))?;
        self.link(files)?;
        if let Some(before) = before {
            fs::remove_dir_all(self.folder.join(before))?;
        }
        self.files = Some(files.clone());
        Ok(true)
    }

    /// One link for each first segment; those of what is gone are taken away.
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
    fn files_are_exchanged_as_one() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut laid = Laid::new(dir.path().join("volume"));
        assert!(laid.put(&files(&[("tls.crt", "one"), ("tls.key", "one"), ("deep/er", "x")])).expect("written"));
        assert!(!laid.put(&files(&[("tls.crt", "one"), ("tls.key", "one"), ("deep/er", "x")])).expect("the same"));
        let read = |name: &str| fs::read_to_string(laid.folder().join(name)).ok();
        assert_eq!((read("tls.crt").as_deref(), read("deep/er").as_deref()), (Some("one"), Some("x")));
        let mode = fs::metadata(laid.folder().join("tls.key")).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o400);
        // A reader that holds the folder sees the old files until the one rename.
        let old = fs::canonicalize(laid.folder().join(DATA)).expect("a link");
        assert!(laid.put(&files(&[("tls.crt", "two"), ("ca.crt", "two")])).expect("written"));
        let read = |name: &str| fs::read_to_string(laid.folder().join(name)).ok();
        assert_eq!((read("tls.crt").as_deref(), read("ca.crt").as_deref()), (Some("two"), Some("two")));
        assert_eq!((read("tls.key"), read("deep/er"), old.exists()), (None, None, false));
        assert!(laid.put(&Files::new()).expect("emptied"));
        assert_eq!(fs::read_dir(laid.folder()).expect("there").count(), 2, "the link and what it leads to");
    }

    #[test]
    fn no_path_leaves_its_volume() {
        assert!(safe("a") && safe("a/b.c"));
        for bad in ["", "/a", "a/", "..", "../a", "a/../b", "..data", "./a"] {
            assert!(!safe(bad), "{bad}");
        }
    }
}
