//! A folder of generated files, which may also hold other files.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use crate::render::File;

/// The difference between a file and its generated content.
#[derive(Clone, Debug, strum::Display, PartialEq, Eq)]
pub enum Difference {
    /// The file does not exist.
    #[strum(to_string = "{0} is missing")]
    Missing(String),
    /// The content differs.
    #[strum(to_string = "{0} differs")]
    Changed(String),
    /// The file is not generated.
    #[strum(to_string = "{0} is not generated")]
    Surplus(String),
}

/// A folder of generated files.
#[derive(Clone, Debug)]
pub struct Folder {
    /// The path; the folder is created on the first write.
    pub path: PathBuf,
    /// True if the folder may also hold files that are not generated.
    pub shared: bool,
}

impl Folder {
    /// A folder of generated files only, relative to `deploy` within the source tree that this crate was built from.
    pub fn within(name: &str) -> Self {
        Self { path: Path::new(env!("CARGO_MANIFEST_DIR")).join(name), shared: false }
    }

    /// The differences between the folder and the generated files.
    ///
    /// # Errors
    /// The folder or a file in it cannot be read.
    pub fn compare(&self, files: &[File]) -> Result<Vec<Difference>> {
        let present = self.names().with_context(|| format!("cannot list {}", self.path.display()))?;
        let mut differences = Vec::new();
        for File { name, content } in files {
            if !present.contains(name) {
                differences.push(Difference::Missing(name.clone()));
                continue;
            }
            let path = self.path.join(name);
            let found = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            if found != content.as_bytes() {
                differences.push(Difference::Changed(name.clone()));
            }
        }
        let is_surplus = |name: &String| !self.shared && files.iter().all(|file| file.name != *name);
        differences.extend(present.into_iter().filter(is_surplus).map(Difference::Surplus));
        Ok(differences)
    }

    /// Writes and removes files until the folder equals the generated files, and returns the differences before. Files
    /// without a difference are not touched; other files of a shared folder stay.
    ///
    /// # Errors
    /// The folder or a file in it cannot be read, written or removed.
    pub fn write(&self, files: &[File]) -> Result<Vec<Difference>> {
        fs::create_dir_all(&self.path).with_context(|| format!("cannot create {}", self.path.display()))?;
        let differences = self.compare(files)?;
        for difference in &differences {
            let (Difference::Missing(name) | Difference::Changed(name) | Difference::Surplus(name)) = difference;
            let path = self.path.join(name);
            match files.iter().find(|file| file.name == *name) {
                Some(file) => {
                    fs::write(&path, &file.content).with_context(|| format!("cannot write {}", path.display()))?
                }
                None => fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?,
            }
        }
        Ok(differences)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.path) {
            Err(absent) if absent.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let mut names = names.collect::<io::Result<Vec<_>>>()?;
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
        let folder = Folder { path: temporary.path().join("crds"), shared: false };
        let files = [file("a.yaml", "a"), file("b.yaml", "b")];
        let missing = ["a.yaml", "b.yaml"].map(|name| Difference::Missing(name.into()));
        assert_eq!(folder.compare(&files).unwrap(), missing);
        assert_eq!(folder.write(&files).unwrap(), missing);
        assert_eq!(folder.compare(&files).unwrap(), []);

        fs::write(folder.path.join("b.yaml"), "other").unwrap();
        fs::write(folder.path.join("c.yaml"), "c").unwrap();
        let differences = [Difference::Changed("b.yaml".into()), Difference::Surplus("c.yaml".into())];
        assert_eq!(folder.compare(&files).unwrap(), differences);
        assert_eq!(folder.write(&files).unwrap(), differences);
        assert_eq!(folder.compare(&files).unwrap(), []);
    }

    #[test]
    fn a_shared_folder_keeps_other_files() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder { path: temporary.path().to_owned(), shared: true };
        fs::write(folder.path.join("other.toml"), "other").unwrap();
        let files = [file("a.md", "a")];
        assert_eq!(folder.write(&files).unwrap(), [Difference::Missing("a.md".into())]);
        assert_eq!(folder.compare(&files).unwrap(), []);
        assert!(folder.path.join("other.toml").exists());
    }
}
