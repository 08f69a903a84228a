//! A folder of generated files, which may also hold other files.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use thiserror::Error;

use crate::render::File;

/// The error of comparing or writing a folder.
#[derive(Debug, Error)]
#[error("{action} {}", .path.display())]
pub struct FolderError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// The difference between a file and its generated content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// The file does not exist.
    Missing(String),
    /// The content differs.
    Changed(String),
    /// The file is not generated.
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
    /// True if the folder may also hold files that are not generated.
    shared: bool,
}

impl Folder {
    /// A folder in `deploy`, within the source tree that this crate was built from.
    #[must_use]
    pub fn within(name: &str) -> Self {
        Self::at(Path::new(env!("CARGO_MANIFEST_DIR")).join(name))
    }

    /// A folder in `docs` of generated pages only.
    #[must_use]
    pub fn docs(name: &str) -> Self {
        Self::at(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name))
    }

    /// A folder in `docs` that also holds other pages.
    #[must_use]
    pub fn docs_shared(name: &str) -> Self {
        Self { shared: true, ..Self::docs(name) }
    }

    /// A folder of generated files only; created on the first write.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), shared: false }
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The differences between the folder and the generated files.
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

    /// Writes and removes files until the folder equals the generated files, and returns the differences before. Files
    /// without a difference are not touched; other files of a shared folder stay.
    ///
    /// # Errors
    /// [`FolderError`] if the folder or a file in it cannot be read, written or removed.
    pub fn write(&self, files: &[File]) -> Result<Vec<Difference>, FolderError> {
        let at = |action, path: &Path| {
            let path = path.to_owned();
            move |source| FolderError { action, path, source }
        };
        fs::create_dir_all(&self.path).map_err(at("cannot create", &self.path))?;
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
    fn write_makes_the_folder_equal_to_the_generated_files() {
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
    fn a_shared_folder_keeps_other_files() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder { shared: true, ..Folder::at(temporary.path()) };
        fs::write(folder.path().join("other.toml"), "other").unwrap();
        let files = [file("a.md", "a")];
        assert_eq!(folder.write(&files).unwrap(), [Difference::Missing("a.md".into())]);
        assert_eq!(folder.compare(&files).unwrap(), []);
        assert!(folder.path().join("other.toml").exists());
    }
}
