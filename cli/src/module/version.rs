//! Versions of modules as `module render` and `module diff` read them: the artefact with its ModuleTemplate.

use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_saphyr::options;
use tidewatch_api::ModuleTemplate;
use tidewatch_engine::preview::{ComparedVersion, VersionContent, review};
use tidewatch_oci::{descriptor::RAW_MANIFEST, layer};

use super::{
    InvalidError, config, constructor,
    folder::Folder,
    pack::{ARCHIVE, LAYOUT},
    registry::RegistryFlags,
    show::{Source, Stored},
    template,
};

/// Maximum size of a file with a ModuleTemplate, in bytes.
const MAX_TEMPLATE: u64 = 4 << 20;
/// Explanation for a version whose ModuleTemplate is not known.
const NO_TEMPLATE: &str = "no ModuleTemplate is given: the default module CR is that of the artefact, and the manager is the first \
    Deployment or StatefulSet";

/// A version of a module with its content.
pub(super) struct Version {
    pub(super) identity: Identity,
    pub(super) content: VersionContent,
    /// Assumptions about the content.
    pub(super) notes: Vec<String>,
    /// Mistakes in the objects.
    pub(super) mistakes: Vec<String>,
}

/// A version that is compared with those of other modules.
pub(crate) struct ComparedModule {
    /// Name and version of the module.
    pub(crate) name: String,
    pub(crate) version: ComparedVersion,
}

impl ComparedModule {
    /// Reads a version as [`Version::read`] does.
    ///
    /// # Errors
    /// As [`Version::read`], and [`InvalidError`] for an object that cannot be rendered.
    pub(crate) async fn read(reference: &str, registry: &RegistryFlags) -> Result<Self> {
        let Version { identity, content, .. } = Version::read(reference, None, registry).await?;
        let Identity { component, version, .. } = identity;
        let objects = content.applied().map_err(|error| InvalidError::new(&component, error))?;
        let name = format!("{} {version}", component.rsplit('/').next().unwrap_or_default());
        Ok(Self { name, version: ComparedVersion { component, objects } })
    }
}

/// Name, version and digest of an artefact.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Identity {
    pub(super) component: String,
    pub(super) version: String,
    /// Digest of the manifest; absent for a module's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) digest: Option<String>,
}

impl Version {
    /// Reads a version: `reference` is that of a registry, an OCI layout, the output of `module pack`, or a module's
    /// folder. `template` is a file with the ModuleTemplate; without it that of the folder, or the one beside the layout.
    ///
    /// # Errors
    /// [`InvalidError`] for content that is not a module, or a ModuleTemplate of another version; other errors if a file or
    /// the registry cannot be read.
    pub(super) async fn read(reference: &str, template: Option<&Path>, registry: &RegistryFlags) -> Result<Self> {
        let path = Path::new(reference);
        if path.join(config::FILE).is_file() {
            return Self::of_folder(&Folder::read(path)?, template);
        }
        let layout = [LAYOUT, ARCHIVE].map(|name| path.join(name)).into_iter().find(|packed| packed.exists());
        let packed = layout.filter(|_| path.join(template::FILE).is_file());
        let place = packed.as_deref().unwrap_or(path);
        let (source, _) = match packed.as_deref().and_then(Path::to_str) {
            Some(layout) => Source::open(layout, registry).await?,
            None => Source::open(reference, registry).await?,
        };
        Self::of_artefact(&Stored::read(&source).await?, template, beside(place))
    }

    fn of_folder(folder: &Folder, given: Option<&Path>) -> Result<Self> {
        let config = &folder.config;
        let identity = Identity { component: config.component.clone(), version: config.version.clone(), digest: None };
        let images = constructor::images(folder)?.iter().map(|image| image.as_str().to_owned()).collect();
        let template = match given {
            Some(file) => read_template(file, &identity)?,
            None => template::template(folder),
        };
        let objects = folder.manifest.objects.clone();
        let content =
            VersionContent { objects, images, default_cr: template.spec.data, manager: template.spec.manager };
        let mistakes = folder.manifest.review.mistakes.clone();
        Ok(Self { identity, content, notes: Vec::new(), mistakes })
    }

    fn of_artefact(stored: &Stored, given: Option<&Path>, beside: Option<PathBuf>) -> Result<Self> {
        let Stored { component, digest, descriptor, .. } = stored;
        let identity = Identity {
            component: component.name().to_owned(),
            version: component.version().to_owned(),
            digest: Some(digest.to_string()),
        };
        let invalid = |problem: String| InvalidError::new(RAW_MANIFEST, problem);
        let Some(text) = stored.raw_text().map_err(invalid)? else {
            return Err(InvalidError::new("component descriptor", format!("no resource {RAW_MANIFEST}")).into());
        };
        let objects = layer::documents(&text).map_err(|error| invalid(error.to_string()))?;
        let placed = layer::placed_documents(&text).map_err(|error| invalid(error.to_string()))?;
        let template = match (given, beside) {
            (Some(file), _) => Some(read_template(file, &identity)?),
            (None, Some(file)) => Some(read_template(&file, &identity)?),
            (None, None) => None,
        };
        let images = descriptor.images.clone();
        let (default_cr, manager, notes) = match template {
            Some(template) => (template.spec.data, template.spec.manager, Vec::new()),
            None => (stored.default_cr()?, None, vec![NO_TEMPLATE.to_owned()]),
        };
        let content = VersionContent { objects, images, default_cr, manager };
        Ok(Self { identity, content, notes, mistakes: review(&placed).mistakes })
    }
}

/// The ModuleTemplate that `module pack` writes beside a layout.
fn beside(layout: &Path) -> Option<PathBuf> {
    let is_packed = layout.file_name().is_some_and(|name| name == LAYOUT || name == ARCHIVE);
    let file = layout.with_file_name(template::FILE);
    (is_packed && layout.exists() && file.is_file()).then_some(file)
}

fn read_template(file: &Path, identity: &Identity) -> Result<ModuleTemplate> {
    let read = || format!("read {}", file.display());
    let mut text = String::new();
    File::open(file).and_then(|opened| opened.take(MAX_TEMPLATE + 1).read_to_string(&mut text)).with_context(read)?;
    let invalid = |problem: String| InvalidError::new(file.display(), problem);
    if text.len() as u64 > MAX_TEMPLATE {
        return Err(invalid(format!("the file has more than {MAX_TEMPLATE} bytes")).into());
    }
    let template: ModuleTemplate = serde_saphyr::from_str_with_options(&text, options! { with_snippet: false })
        .map_err(|error| invalid(error.to_string()))?;
    let module = identity.component.rsplit('/').next().unwrap_or_default();
    let spec = &template.spec;
    let is_other = |text: &Option<String>, expected: &str| text.as_deref().is_some_and(|text| text != expected);
    if is_other(&spec.module_name, module) || is_other(&spec.version, &identity.version) {
        return Err(invalid(format!("not the ModuleTemplate of {module} {}", identity.version)).into());
    }
    Ok(template)
}
