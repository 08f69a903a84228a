//! Manifests of well-known operators as their projects publish them, downloaded from Go modules on demand and never
//! committed. `tests/data/published-manifests.yaml` lists them.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, ensure};
use aws_lc_rs::digest::{SHA256, digest};
use kube::core::DynamicObject;
use serde::Deserialize;
use tidewatch_kit::hex;
use tokio::process::Command;

use crate::paths;

/// Beginning of the names of their modules: other tests have modules that are named like the operators.
const PREFIX: &str = "published-";
const LIST: &str = include_str!("../../../data/published-manifests.yaml");

/// A published manifest.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    name: String,
    module: String,
    version: String,
    sum: String,
    #[serde(default)]
    files: Vec<PathBuf>,
    kustomization: Option<PathBuf>,
    /// Reason for which it is installed after the others have left; `None` if it shares the runtime with them.
    pub alone: Option<String>,
}

/// Output of `go mod download -json`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Downloaded {
    dir: PathBuf,
    sum: String,
    error: String,
}

/// The list.
///
/// # Errors
/// It is not of the expected form.
pub fn list() -> Result<Vec<Published>> {
    serde_saphyr::from_str(LIST).context("tests/data/published-manifests.yaml")
}

/// Text of the manifest of a module; `None` if it is none of the list, or not downloaded.
pub(crate) fn manifest(module: &str) -> Option<String> {
    let name = module.strip_prefix(PREFIX)?;
    let published = list().ok()?.into_iter().find(|published| published.name == name)?;
    fs::read_to_string(published.path()).ok()
}

impl Published {
    /// Name of its module.
    pub fn module_name(&self) -> String {
        format!("{PREFIX}{}", self.name)
    }

    /// Its version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Its objects, once it is downloaded.
    ///
    /// # Errors
    /// It is not downloaded, or no YAML of objects.
    pub fn objects(&self) -> Result<Vec<DynamicObject>> {
        Ok(super::objects(&self.path())?)
    }

    /// File of the downloaded manifest, another one for another entry of the list.
    fn path(&self) -> PathBuf {
        let entry = hex::encode(digest(&SHA256, format!("{self:?}").as_bytes()).as_ref());
        folder().join(format!("{}-{}-{}.yaml", self.name, self.version, entry.get(..8).unwrap_or_default()))
    }

    /// Downloads it, unless it is there: seconds, and up to some hundred MiB that are removed again.
    ///
    /// # Errors
    /// The `go` of the search path cannot download it, it has another checksum, or it cannot be rendered.
    pub async fn download(&self, kubectl: &Path) -> Result<()> {
        let path = self.path();
        if path.is_file() {
            return Ok(());
        }
        fs::create_dir_all(folder())?;
        let cache = tempfile::tempdir_in(folder())?;
        let module = format!("{}@{}", self.module, self.version);
        let mut go = Command::new("go");
        go.args(["mod", "download", "-modcacherw", "-json", &module]).env("GOWORK", "off");
        go.env("GOMODCACHE", cache.path().join("modules")).current_dir(cache.path());
        let output = output(go).await?;
        let found: Downloaded = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("go mod download {module}: {}", String::from_utf8_lossy(&output.stderr)))?;
        ensure!(found.error.is_empty(), "go mod download {module}: {}", found.error);
        ensure!(found.sum == self.sum, "{module} has the checksum {}", found.sum);
        let text = match &self.kustomization {
            Some(folder) => kustomize(kubectl, &found.dir.join(folder)).await?,
            None => read(&found.dir, &self.files)?,
        };
        let partial = cache.path().join("manifest.yaml");
        fs::write(&partial, text)?;
        Ok(fs::rename(partial, path)?)
    }
}

fn folder() -> PathBuf {
    paths::target().join("published")
}

async fn output(mut command: Command) -> Result<std::process::Output> {
    command.stdin(Stdio::null()).kill_on_drop(true);
    command.output().await.with_context(|| format!("run {:?}", command.as_std().get_program()))
}

async fn kustomize(kubectl: &Path, folder: &Path) -> Result<String> {
    let mut command = Command::new(kubectl);
    command.arg("kustomize").arg(folder);
    let output = output(command).await?;
    ensure!(output.status.success(), "kubectl kustomize: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The files one after the other, and those of a folder by their names.
fn read(root: &Path, files: &[PathBuf]) -> Result<String> {
    let mut texts = Vec::new();
    for file in files {
        let path = root.join(file);
        let mut paths = vec![path.clone()];
        if path.is_dir() {
            paths = fs::read_dir(&path)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
            paths.retain(|path| path.extension() == Some(OsStr::new("yaml")) && !path.ends_with("kustomization.yaml"));
            paths.sort();
        }
        for path in paths {
            texts.push(fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?);
        }
    }
    Ok(texts.join("\n---\n"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_entry_of_the_list_names_what_is_downloaded() {
        let list = list().expect("the list");
        let names: BTreeSet<_> = list.iter().map(Published::module_name).collect();
        let paths: BTreeSet<_> = list.iter().map(Published::path).collect();
        assert_eq!((names.len(), paths.len()), (list.len(), list.len()));
        for published in &list {
            assert!(published.sum.starts_with("h1:"), "{published:?}");
            assert_eq!(published.files.is_empty(), published.kustomization.is_some(), "{published:?}");
        }
        assert_eq!(manifest("published-no-such-manifest"), None);
    }

    #[test]
    fn folder_stands_for_its_manifests() {
        let folder = tempfile::tempdir().expect("a folder");
        let files =
            [("b.yaml", "b: 1"), ("a.yaml", "a: 1"), ("kustomization.yaml", "resources: []"), ("README.md", "#")];
        for (name, text) in files {
            fs::write(folder.path().join(name), text).expect("written");
        }
        let read = |files: &[&str]| {
            read(folder.path(), &files.iter().map(PathBuf::from).collect::<Vec<_>>()).expect("readable")
        };
        assert_eq!(read(&["", "b.yaml"]), "a: 1\n---\nb: 1\n---\nb: 1");
    }
}
