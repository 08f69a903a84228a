//! The folder of a module's version: `module.yaml` and the files that it names.

use std::{
    fs::File,
    io::Read as _,
    path::{Component, Path},
};

use anyhow::{Context as _, Result};
use serde_json::Value;
use tidewatch_engine::preview::{Review, review};
use tidewatch_oci::layer;

use super::{
    InvalidError,
    config::{self, Config},
};

/// Maximum size of each file in bytes: with the headers of an archive, the receiver's limit of a layer.
const MAX_BYTES: u64 = layer::MAX_STORED_BYTES as u64 - 4096;
/// Maximum length of a file's name, that of a tar header.
const MAX_NAME: usize = 100;

/// A file with Kubernetes objects.
#[derive(Clone, Debug)]
pub(super) struct ObjectFile {
    /// Name without folders.
    pub(super) name: String,
    /// Content as read.
    pub(super) content: Vec<u8>,
    /// The objects in their order.
    pub(super) objects: Vec<Value>,
    /// Findings about them.
    pub(super) review: Review,
}

/// The folder's content.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    pub(super) config: Config,
    pub(super) manifest: ObjectFile,
    /// File with the default module CR.
    pub(super) default_cr: Option<ObjectFile>,
}

impl Folder {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// [`InvalidError`] for content that is not a module; other errors if a file cannot be read.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let text = text(config::FILE, read(folder, config::FILE)?)?;
        let config = Config::parse(&text)?;
        let manifest = ObjectFile::read(folder, &config.manifest)?;
        if manifest.objects.is_empty() {
            return Err(InvalidError::new(&config.manifest, "the file has no object").into());
        }
        let default_cr = config.default_cr.as_deref().map(|file| ObjectFile::read(folder, file)).transpose()?;
        if let Some(file) = &default_cr
            && file.objects.len() != 1
        {
            let problem = format!("the file has {} objects instead of one", file.objects.len());
            return Err(InvalidError::new(&file.name, problem).into());
        }
        Ok(Self { config, manifest, default_cr })
    }

    /// The default module CR.
    pub(super) fn default_object(&self) -> Option<&Value> {
        self.default_cr.as_ref()?.objects.first()
    }

    /// The CustomResourceDefinition of the default module CR's kind.
    pub(super) fn default_definition(&self) -> Option<&Value> {
        let object = self.default_object()?;
        let (group, _) = object["apiVersion"].as_str()?.split_once('/')?;
        self.manifest.objects.iter().find(|definition| {
            definition["kind"] == "CustomResourceDefinition"
                && definition["spec"]["group"] == group
                && definition["spec"]["names"]["kind"] == object["kind"]
        })
    }

    /// Refuses a manifest that API servers refuse, or that has an object of which the receiver keeps one of several forms.
    ///
    /// # Errors
    /// [`InvalidError`] with the mistakes.
    pub(super) fn refuse_mistakes(&self) -> Result<(), InvalidError> {
        InvalidError::of_mistakes(&self.config.manifest, &self.manifest.review.mistakes)
    }

    /// Probable mistakes that do not make the module invalid.
    pub(super) fn warnings(&self) -> Vec<String> {
        let in_file = |warning: &String| format!("{}: {warning}", self.config.manifest);
        let mut warnings: Vec<_> = self.manifest.review.warnings.iter().map(in_file).collect();
        if let Some(object) = self.default_object() {
            let kind = text_of(&object["kind"]);
            let version = text_of(&object["apiVersion"]);
            let file = &self.config.manifest;
            let version = version.rsplit('/').next().unwrap_or_default();
            match self.default_definition() {
                None => {
                    warnings.push(format!("{file} has no CustomResourceDefinition of the default CR's kind {kind}"))
                }
                Some(definition) if !serves(definition, version) => {
                    warnings.push(format!("the CustomResourceDefinition of {kind} in {file} does not serve {version}"));
                }
                Some(_) => {}
            }
        }
        if let Some(manager) = &self.config.manager
            && !self.manifest.objects.iter().any(|object| {
                object["kind"] == *manager.kind
                    && object["metadata"]["name"] == *manager.name
                    && manager.namespace.as_ref().is_none_or(|namespace| object["metadata"]["namespace"] == **namespace)
            })
        {
            warnings.push(format!("{} has no {} {}, the manager", self.config.manifest, manager.kind, manager.name));
        }
        warnings
    }
}

impl ObjectFile {
    fn read(folder: &Path, file: &str) -> Result<Self> {
        let is_inside = Path::new(file).components().all(|part| matches!(part, Component::Normal(_)));
        let name = file.rsplit('/').next().unwrap_or_default();
        if !is_inside || name.is_empty() || name.len() > MAX_NAME || name.starts_with("._") || name.contains('\\') {
            let problem = format!("{file:?} is not the name of a file in the folder");
            return Err(InvalidError::new(config::FILE, problem).into());
        }
        let content = read(folder, file)?;
        let text = text(file, content.clone())?;
        let invalid = |error| InvalidError::new(file, error);
        let review = review(&layer::placed_documents(&text).map_err(invalid)?);
        let objects = layer::documents(&text).map_err(invalid)?;
        Ok(Self { name: name.to_owned(), content, objects, review })
    }
}

/// Reads one file of the folder.
fn read(folder: &Path, file: &str) -> Result<Vec<u8>> {
    let path = folder.join(file);
    let context = || format!("read {}", path.display());
    let mut content = Vec::new();
    File::open(&path).and_then(|opened| opened.take(MAX_BYTES + 1).read_to_end(&mut content)).with_context(context)?;
    if content.len() as u64 > MAX_BYTES {
        return Err(InvalidError::new(file, format!("the file has more than {MAX_BYTES} bytes")).into());
    }
    Ok(content)
}

fn text(file: &str, content: Vec<u8>) -> Result<String, InvalidError> {
    String::from_utf8(content).map_err(|_| InvalidError::new(file, "the file is not UTF-8"))
}

fn text_of(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns true if a CustomResourceDefinition serves a version.
fn serves(definition: &Value, version: &str) -> bool {
    let mut versions = definition["spec"]["versions"].as_array().into_iter().flatten();
    versions.any(|served| served["name"] == version && served["served"] == true)
}
