//! `module.yaml`: the description of a module's version by its authors.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_saphyr::options;
use tidewatch_api::{Gvk, Info, Link, Manager, Other};

use super::InvalidError;

/// Name of the file.
pub(super) const FILE: &str = "module.yaml";
/// Provider of Kyma's components.
const PROVIDER: &str = "kyma-project.io";
/// Letters of a word in the name of a module, at least.
const MIN_WORD: usize = 3;
/// Default name of the file with the module's objects.
const MANIFEST: &str = "manifest.yaml";

/// The description of one version of a module.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Config {
    /// Name of the component; its last segment is the module's name.
    pub(super) component: String,
    /// Version of the component and of the module.
    pub(super) version: String,
    /// Provider of the component.
    #[serde(default = "provider")]
    pub(super) provider: String,
    /// Registry that the component descriptor names as its origin.
    pub(super) registry: Option<String>,
    /// File with the module's objects, relative to the folder.
    #[serde(default = "manifest")]
    pub(super) manifest: String,
    /// URL at which the same file is published; the resource `rawManifest` of the ModuleTemplate.
    #[serde(rename = "manifestURL")]
    pub(super) manifest_url: Option<String>,
    /// File with the default module CR, relative to the folder.
    #[serde(rename = "defaultCR")]
    pub(super) default_cr: Option<String>,
    /// References of all images; `None` for those of the manifest's workloads.
    pub(super) images: Option<Vec<String>>,
    /// Labels of the component.
    #[serde(default)]
    pub(super) component_labels: BTreeMap<String, String>,
    /// Labels of the ModuleTemplate.
    #[serde(default)]
    pub(super) labels: BTreeMap<String, String>,
    /// Annotations of the ModuleTemplate.
    #[serde(default)]
    pub(super) annotations: BTreeMap<String, String>,
    /// `spec.manager` of the ModuleTemplate.
    pub(super) manager: Option<Manager>,
    /// `spec.info` of the ModuleTemplate.
    pub(super) info: Option<Info>,
    /// `spec.resources` of the ModuleTemplate.
    pub(super) resources: Option<Vec<Link>>,
    /// `spec.associatedResources` of the ModuleTemplate.
    pub(super) associated_resources: Option<Vec<Gvk>>,
    /// `spec.mandatory` of the ModuleTemplate.
    pub(super) mandatory: Option<bool>,
    /// `spec.requiresDowntime` of the ModuleTemplate.
    pub(super) requires_downtime: Option<bool>,
}

fn provider() -> String {
    PROVIDER.to_owned()
}

fn manifest() -> String {
    MANIFEST.to_owned()
}

/// Reason why a module cannot have a name.
fn name_problem(name: &str) -> Option<String> {
    let is_word = |word: &str| word.len() >= MIN_WORD && word.bytes().all(|byte| byte.is_ascii_lowercase());
    let word = name.split('-').find(|word| !is_word(word))?;
    Some(format!(
        "the module's name {name:?} has the word {word:?}; each word needs at least {MIN_WORD} lower-case letters and no other \
         character"
    ))
}

fn is_url(text: &str) -> bool {
    ["https://", "http://"].iter().any(|scheme| text.starts_with(scheme) && text.len() > scheme.len())
}

impl Config {
    /// Parses the file.
    pub(super) fn parse(text: &str) -> Result<Self, InvalidError> {
        let config: Self = serde_saphyr::from_str_with_options(text, options! { with_snippet: false })
            .map_err(|error| InvalidError::new(FILE, error))?;
        if let Some((path, member)) = config.unknown_member() {
            return Err(InvalidError::new(FILE, format!("{path} has no member {member}")));
        }
        if is_url(&config.manifest) {
            let problem = "manifest names a file of the folder: download it, and write its URL as manifestURL";
            return Err(InvalidError::new(FILE, problem));
        }
        if let Some(problem) = name_problem(config.module()) {
            return Err(InvalidError::new(FILE, format!("component: {problem}")));
        }
        match config.manifest_url.as_deref() {
            Some(url) if !is_url(url) => {
                Err(InvalidError::new(FILE, format!("manifestURL: {url:?} does not begin with https:// or http://")))
            }
            _ => Ok(config),
        }
    }

    /// Name of the module: the last segment of the component's name.
    pub(super) fn module(&self) -> &str {
        self.component.rsplit('/').next().unwrap_or_default()
    }

    /// First member that the types of a ModuleTemplate would keep without knowing it.
    fn unknown_member(&self) -> Option<(&'static str, &str)> {
        let icons =
            self.info.iter().flat_map(|info| info.icons.iter().flatten().map(|icon| ("info.icons", &icon.other)));
        let parts = (self.manager.iter().map(|manager| ("manager", &manager.other)))
            .chain(self.info.iter().map(|info| ("info", &info.other)))
            .chain(icons)
            .chain(self.resources.iter().flatten().map(|link| ("resources", &link.other)))
            .chain(self.associated_resources.iter().flatten().map(|kind| ("associatedResources", &kind.other)));
        parts.filter_map(|(path, other): (_, &Other)| Some((path, other.keys().next()?.as_str()))).next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn component_and_version_are_enough() {
        let config = Config::parse("component: kyma-project.io/module/tide\nversion: 1.2.3\n").unwrap();
        assert_eq!(
            (config.module(), &*config.manifest, &*config.provider),
            ("tide", "manifest.yaml", "kyma-project.io")
        );
        assert!(config.default_cr.is_none() && config.images.is_none() && config.manager.is_none());
    }

    #[test]
    fn misspelt_members_are_refused_by_name() {
        let base = "component: kyma-project.io/module/tide\nversion: 1.2.3\n";
        for (extra, named) in [
            ("defaultCr: a.yaml\n", "defaultCr"),
            ("info: {repository: a, documentation: b, doc: c}\n", "info has no member doc"),
            (
                "manager: {group: apps, version: v1, kind: Deployment, name: a, names: b}\n",
                "manager has no member names",
            ),
            ("associatedResources: [{group: a, version: b, kind: c, d: e}]\n", "associatedResources has no member d"),
            ("info: {repository: a}\n", "documentation"),
            ("manifestURL: manifest.yaml\n", "manifestURL: \"manifest.yaml\" does not begin with https://"),
            ("manifest: https://example.com/manifest.yaml\n", "write its URL as manifestURL"),
        ] {
            let error = Config::parse(&format!("{base}{extra}")).unwrap_err().to_string();
            assert!(error.starts_with("module.yaml: ") && error.contains(named), "{error}");
        }
        for (name, word) in [("ai-core", "ai"), ("x1", "x1"), ("tide-", ""), ("Tide", "Tide"), ("a_b", "a_b")] {
            let error = Config::parse(&format!("component: kyma-project.io/module/{name}\nversion: 1.2.3\n"));
            let expected = format!(
                "module.yaml: component: the module's name {name:?} has the word {word:?}; each word needs at least 3 \
                 lower-case letters and no other character"
            );
            assert_eq!(error.unwrap_err().to_string(), expected);
        }
        assert!(Config::parse("component: kyma-project.io/module/tide\n").unwrap_err().to_string().contains("version"));
    }
}
