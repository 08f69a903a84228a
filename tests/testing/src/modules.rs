//! The sample modules in `tests/modules`.

pub mod large;
pub mod published;
pub mod shapes;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use kube::core::DynamicObject;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::paths;

/// Failure to read a module.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// A file cannot be read.
    #[error("read {0}")]
    Read(PathBuf, #[source] io::Error),
    /// A file is not YAML of the expected form.
    #[error("parse {0}")]
    Parse(PathBuf, #[source] Box<serde_saphyr::Error>),
    /// A document is not an object of Kubernetes with a name.
    #[error("{0}: document {1} is not an object of Kubernetes: {2}")]
    Object(PathBuf, usize, String),
    /// The default module CR is not one object.
    #[error("{0} has {1} objects instead of one")]
    DefaultCr(PathBuf, usize),
}

/// One version of a module.
#[derive(Clone, Debug)]
pub struct Module {
    /// Name of its component.
    pub component: String,
    /// Its version.
    pub version: String,
    /// Its objects, in the order of the manifest.
    pub objects: Vec<DynamicObject>,
    /// Its default module CR.
    pub default_cr: Option<DynamicObject>,
    /// The workload that decides on its readiness, as in a ModuleTemplate.
    pub manager: Option<Value>,
}

/// The used members of `module.yaml`.
#[derive(Deserialize)]
struct Description {
    component: String,
    version: String,
    manifest: PathBuf,
    #[serde(rename = "defaultCR")]
    default_cr: Option<PathBuf>,
    manager: Option<Value>,
}

/// Folder of a version of a module.
pub fn folder(module: &str, version: &str) -> PathBuf {
    root().join(module).join(version)
}

fn root() -> PathBuf {
    paths::workspace().join("tests").join("modules")
}

impl Module {
    /// Reads a version of a module.
    ///
    /// # Errors
    /// See [`ModuleError`].
    pub fn read(module: &str, version: &str) -> Result<Self, ModuleError> {
        let folder = folder(module, version);
        let path = folder.join("module.yaml");
        let Description { component, version, manifest, default_cr, manager } =
            parse(&path, |text| serde_saphyr::from_str(text))?;
        let objects = objects(&folder.join(manifest))?;
        let default_cr = default_cr.map(|file| only_object(folder.join(file))).transpose()?;
        Ok(Self { component, version, objects, default_cr, manager })
    }
}

fn only_object(path: PathBuf) -> Result<DynamicObject, ModuleError> {
    let mut objects = objects(&path)?;
    match (objects.pop(), objects.len()) {
        (Some(object), 0) => Ok(object),
        (Some(_), others) => Err(ModuleError::DefaultCr(path, others + 1)),
        (None, _) => Err(ModuleError::DefaultCr(path, 0)),
    }
}

/// The objects of a YAML stream.
fn objects(path: &Path) -> Result<Vec<DynamicObject>, ModuleError> {
    let documents: Vec<Value> = parse(path, |text| serde_saphyr::from_multiple(text))?;
    let parsed = documents.into_iter().enumerate().map(|(index, document)| {
        object(document).map_err(|reason| ModuleError::Object(path.to_path_buf(), index + 1, reason))
    });
    parsed.collect()
}

fn object(document: Value) -> Result<DynamicObject, String> {
    let object: DynamicObject = serde_json::from_value(document).map_err(|error| error.to_string())?;
    let types = object.types.as_ref();
    if types.is_none_or(|types| types.api_version.is_empty() || types.kind.is_empty()) {
        return Err("no apiVersion or kind".to_owned());
    }
    match object.metadata.name.as_deref() {
        None | Some("") => Err("no name".to_owned()),
        Some(_) => Ok(object),
    }
}

fn parse<T: DeserializeOwned>(
    path: &Path,
    read: impl FnOnce(&str) -> Result<T, serde_saphyr::Error>,
) -> Result<T, ModuleError> {
    let text = fs::read_to_string(path).map_err(|error| ModuleError::Read(path.to_path_buf(), error))?;
    read(&text).map_err(|error| ModuleError::Parse(path.to_path_buf(), Box::new(error)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kube::ResourceExt as _;
    use serde_json::json;

    use super::*;

    /// Names of the folders in a folder.
    fn folders(path: &Path) -> Vec<String> {
        let entries = fs::read_dir(path).expect("a folder").map(|entry| entry.expect("an entry"));
        let folders = entries.filter(|entry| entry.path().is_dir());
        folders.map(|entry| entry.file_name().into_string().expect("text")).collect()
    }

    fn identities(module: &Module) -> BTreeSet<(String, String)> {
        let kind = |object: &DynamicObject| object.types.as_ref().map(|types| types.kind.clone());
        module.objects.iter().map(|object| (kind(object).expect("a kind"), object.name_any())).collect()
    }

    #[test]
    fn every_folder_is_the_module_and_version_that_it_is_named_after() {
        let mut read = 0;
        for name in folders(&root()).into_iter().filter(|name| name != "shapes") {
            for version in folders(&root().join(&name)) {
                let module = Module::read(&name, &version).unwrap_or_else(|error| panic!("{error:?}"));
                assert_eq!(
                    (&*module.component, &*module.version),
                    (&*format!("kyma-project.io/module/{name}"), &*version)
                );
                let objects = module.objects.len();
                let distinct = identities(&module).len();
                assert!(objects > 0 && objects == distinct, "{name} {version}: {objects} objects, {distinct} distinct");
                read += 1;
            }
        }
        assert!(read >= 8, "{read} folders");
    }

    #[test]
    fn objects_without_type_or_name_are_refused() {
        let complete = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
        assert!(object(complete.clone()).is_ok());
        for member in ["apiVersion", "kind", "metadata"] {
            let mut broken = complete.clone();
            broken.as_object_mut().expect("an object").remove(member);
            assert!(object(broken).is_err(), "{member}");
        }
    }

    #[test]
    fn each_upgrade_of_the_sample_module_changes_what_its_name_promises() {
        let of = |version| Module::read("sample", version).expect("read");
        let first = of("1.0.0");
        let second = of("1.1.0");
        let broken = of("1.2.0-broken-image");
        let third = of("2.0.0");
        let before = identities(&first);
        let after = identities(&second);
        assert_eq!((before.difference(&after).count(), after.difference(&before).count()), (1, 1));
        assert_eq!(identities(&third), before);
        let named = |module: &Module, kind: &str| {
            let found =
                module.objects.iter().find(|object| object.types.as_ref().is_some_and(|types| types.kind == kind));
            found.cloned().expect("there").data
        };
        let image = &named(&broken, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"];
        assert_eq!(image, "tidewatch.local/sample-operator:does-not-exist");
        let stored = |module: &Module| {
            let definition = named(module, "CustomResourceDefinition");
            let versions = definition["spec"]["versions"].as_array().expect("versions").clone();
            let stored: Vec<_> = versions.iter().filter(|version| version["storage"] == true).collect();
            assert_eq!(stored.len(), 1);
            stored[0]["name"].clone()
        };
        assert_eq!((stored(&first), stored(&third)), (json!("v1alpha1"), json!("v1beta1")));
    }
}
