//! A folder that holds generated files, and nothing else or whatever else.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use thiserror::Error;

use crate::render::File;

/// Why a folder cannot be compared or written.
#[derive(Debug, Error)]
#[error("{action} {}", .path.display())]
pub struct FolderError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// How a file differs from what would be generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// It is not there.
    Missing(String),
    /// It has another content.
    Changed(String),
    /// Nothing generates it.
    Surplus(String),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(name) => write!(f, "{name} is missing"),
            Self::Changed(name) => write!(f, "{name} differs"),
            Self::Surplus(name) => write!(f, "{name} is not generated"),
        }
    }
}

/// A folder of generated files.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    /// Files that nothing generates may stand here too.
    shared: bool,
}

impl Folder {
    /// A folder of `deploy` in the source tree that this crate was built from.
    #[must_use]
    pub fn within(name: &str) -> Self {
        Self::at(Self::deploy().path.join(name))
    }

    /// `deploy` itself, where other files stand too.
    #[must_use]
    pub fn deploy() -> Self {
        Self { path: env!("CARGO_MANIFEST_DIR").into(), shared: true }
    }

    /// Any folder that holds generated files alone; it is made when it is first written to.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), shared: false }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is not as these files are.
    ///
    /// # Errors
    /// [`FolderError`] if the folder or a file in it cannot be read.
    pub fn compare(&self, files: &[File]) -> Result<Vec<Difference>, FolderError> {
        let present = self.names()?;
        let mut differences = Vec::new();
        for file in files {
            if !present.contains(&file.name) {
                differences.push(Difference::Missing(file.name.clone()));
                continue;
            }
            let path = self.path.join(&file.name);
            let content = fs::read(&path).map_err(|source| FolderError { action: "cannot read", path, source })?;
            if content != file.content.as_bytes() {
                differences.push(Difference::Changed(file.name.clone()));
            }
        }
        let is_surplus = |name: &String| !self.shared && files.iter().all(|file| file.name != *name);
        let surplus = present.into_iter().filter(is_surplus);
        differences.extend(surplus.map(Difference::Surplus));
        Ok(differences)
    }

    /// Makes it hold these files, alone unless it is shared; returns what was not so before. What is as it shall be is not touched.
    ///
    /// # Errors
    /// [`FolderError`] if the folder or a file in it cannot be read, written or removed.
    pub fn write(&self, files: &[File]) -> Result<Vec<Difference>, FolderError> {
        let at = |action, path: &Path| {
            let path = path.to_owned();
            move |source| FolderError { action, path, source }
        };
        fs::create_dir_all(&self.path).map_err(at("cannot make", &self.path))?;
        let differences = self.compare(files)?;
        for difference in &differences {
            match difference {
                Difference::Surplus(name) => {
                    let path = self.path.join(name);
                    fs::remove_file(&path).map_err(at("cannot remove", &path))?;
                }
                Difference::Missing(name) | Difference::Changed(name) => {
                    let path = self.path.join(name);
                    let content = files.iter().find(|file| file.name == *name).map(|file| file.content.as_bytes());
                    fs::write(&path, content.unwrap_or_default()).map_err(at("cannot write", &path))?;
                }
            }
        }
        Ok(differences)
    }

    fn names(&self) -> Result<Vec<String>, FolderError> {
        let error = |source| FolderError { action: "cannot list", path: self.path.clone(), source };
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(absent) if absent.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(error(source)),
        };
        let names = entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
        let mut names = names.collect::<Result<Vec<_>, _>>().map_err(error)?;
        names.sort_unstable();
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, content: &str) -> File {
        File { name: name.into(), content: content.into() }
    }

    #[test]
    fn a_folder_holds_what_was_generated_and_nothing_else() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::at(temporary.path().join("crds"));
        let files = [file("a.yaml", "a"), file("b.yaml", "b")];
        let missing = ["a.yaml", "b.yaml"].map(|name| Difference::Missing(name.into()));
        assert_eq!(folder.compare(&files).unwrap(), missing);
        assert_eq!(folder.write(&files).unwrap(), missing);
        assert_eq!(folder.compare(&files).unwrap(), []);

        fs::write(folder.path().join("b.yaml"), "other").unwrap();
        fs::write(folder.path().join("c.yaml"), "c").unwrap();
        let differences = [Difference::Changed("b.yaml".into()), Difference::Surplus("c.yaml".into())];
        assert_eq!(folder.compare(&files).unwrap(), differences);
        assert_eq!(folder.write(&files).unwrap(), differences);
        assert_eq!(folder.compare(&files).unwrap(), []);
    }

    #[test]
    fn a_shared_folder_keeps_what_is_not_generated() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder { shared: true, ..Folder::at(temporary.path()) };
        fs::write(folder.path().join("other.toml"), "other").unwrap();
        let files = [file("a.md", "a")];
        assert_eq!(folder.write(&files).unwrap(), [Difference::Missing("a.md".into())]);
        assert_eq!(folder.compare(&files).unwrap(), []);
        assert!(folder.path().join("other.toml").exists());
    }
}
