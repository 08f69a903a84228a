//! The folder of `--component-keys`: files with public keys, which may be a mounted Secret or ConfigMap.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use thiserror::Error;

use super::signature::{ComponentKeys, KeyError};

/// Maximum size of a file, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// Maximum number of files.
const MAX_FILES: usize = 64;

/// Contents of the files, by their names.
pub type KeyFiles = BTreeMap<String, Vec<u8>>;

/// A folder whose files cannot be read.
#[derive(Debug, Error)]
pub enum KeyFolderError {
    /// The folder or a file is not readable.
    #[error("read {path}")]
    Read {
        /// Path of the folder or the file.
        path: PathBuf,
        /// Error of the read.
        source: io::Error,
    },
    /// A file is too large.
    #[error("{path} exceeds {MAX_FILE_BYTES} bytes")]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
    },
    /// There are too many files.
    #[error("{path} has more than {MAX_FILES} files")]
    TooMany {
        /// Path of the folder.
        path: PathBuf,
    },
    /// The name of a file is not UTF-8, so no signature has it.
    #[error("the name of {path} is not UTF-8")]
    Name {
        /// Path of the file.
        path: PathBuf,
    },
    /// The files do not contain usable keys.
    #[error("the public keys in {path} are not usable")]
    Keys {
        /// Path of the folder.
        path: PathBuf,
        /// Mistake.
        source: KeyError,
    },
}

/// Reads the files of a folder. Names that begin with a dot are left out: a mounted volume keeps its versions there.
///
/// # Errors
/// [`KeyFolderError`].
pub fn read(folder: &Path) -> Result<KeyFiles, KeyFolderError> {
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |source| KeyFolderError::Read { path, source }
    };
    let mut files = KeyFiles::new();
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        let path = entry.map_err(unreadable(folder))?.path();
        let name = path.file_name().unwrap_or_default();
        let Some(name) = name.to_str().map(str::to_owned) else { return Err(KeyFolderError::Name { path }) };
        if name.starts_with('.') || !fs::metadata(&path).map_err(unreadable(&path))?.is_file() {
            continue;
        }
        if files.len() == MAX_FILES {
            return Err(KeyFolderError::TooMany { path: folder.to_owned() });
        }
        files.insert(name, content(&path)?);
    }
    Ok(files)
}

/// Reads one file.
///
/// # Errors
/// [`KeyFolderError`].
pub fn content(path: &Path) -> Result<Vec<u8>, KeyFolderError> {
    let mut content = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut content));
    read.map_err(|source| KeyFolderError::Read { path: path.to_owned(), source })?;
    match content.len() as u64 > MAX_FILE_BYTES {
        true => Err(KeyFolderError::TooLarge { path: path.to_owned() }),
        false => Ok(content),
    }
}

/// Reads and parses the keys of a folder. Blocking: called at start.
///
/// # Errors
/// [`KeyFolderError`].
pub fn keys(folder: &Path) -> Result<ComponentKeys, KeyFolderError> {
    let files = read(folder)?;
    ComponentKeys::parse(&files).map_err(|source| KeyFolderError::Keys { path: folder.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn mounted_volume_has_its_files_once() {
        let folder = tempfile::tempdir().unwrap();
        let version = folder.path().join("..2026_01_01");
        fs::create_dir(&version).unwrap();
        fs::write(version.join("release.pem"), "a").unwrap();
        symlink("..2026_01_01", folder.path().join("..data")).unwrap();
        symlink("..data/release.pem", folder.path().join("release.pem")).unwrap();
        fs::create_dir(folder.path().join("other")).unwrap();
        assert_eq!(read(folder.path()).unwrap(), KeyFiles::from([("release.pem".to_owned(), b"a".to_vec())]));
        assert!(matches!(keys(folder.path()), Err(KeyFolderError::Keys { source: KeyError::File { .. }, .. })));
    }

    #[test]
    fn unusable_folders_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = || keys(folder.path()).unwrap_err();
        assert!(matches!(error(), KeyFolderError::Keys { source: KeyError::Empty, .. }));
        let file = folder.path().join("release.pem");
        fs::write(&file, vec![b' '; 1 + usize::try_from(MAX_FILE_BYTES).unwrap()]).unwrap();
        assert_eq!(error().to_string(), format!("{} exceeds 65536 bytes", file.display()));
        for number in 0..=MAX_FILES {
            fs::write(folder.path().join(number.to_string()), "").unwrap();
        }
        fs::remove_file(file).unwrap();
        assert!(matches!(error(), KeyFolderError::TooMany { .. }));
        drop(fs::remove_dir_all(folder.path()));
        assert!(matches!(error(), KeyFolderError::Read { .. }));
    }
}
