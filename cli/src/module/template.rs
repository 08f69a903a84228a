//! The ModuleTemplate of a folder, checked as `catalog check` does.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use jiff::{Timestamp, tz::TimeZone};
use kube::core::ObjectMeta;
use serde_json::{Value, json};
use serde_saphyr::ser_options;
use tidewatch_api::{
    Link, ModuleTemplate, ModuleTemplateSpec,
    names::{GROUP, KCP_NAMESPACE, VERSION, annotation, label},
};
use tidewatch_author::check::{self, CheckOptions, Severity, Source};

use super::{
    InvalidError,
    config::{self, Config},
    folder::Folder,
};

/// Name of the file.
pub(super) const FILE: &str = "moduletemplate.yaml";
/// Download with the manifest, from which the Kyma CLI recognises modules that were installed by hand.
const RAW_MANIFEST: &str = "rawManifest";
/// Channel of the release meta that completes the catalog of a check.
const CHANNEL: &str = "regular";

/// Builds the ModuleTemplate `<module>-<version>`. Its descriptor is empty: the receiver reads it from the registry.
pub(super) fn template(folder: &Folder) -> ModuleTemplate {
    let config = &folder.config;
    let mut labels = config.labels.clone();
    labels.insert(label::MODULE_NAME.to_owned(), config.module().to_owned());
    let mut annotations = config.annotations.clone();
    let scope = folder.default_definition().map(|definition| definition["spec"]["scope"] == "Cluster");
    let is_cluster_scoped = || annotation::CLUSTER_SCOPED.to_owned();
    match scope {
        Some(scope) => drop(annotations.insert(is_cluster_scoped(), scope.to_string())),
        // What the manifest does not tell, the author may. The dashboard Busola needs an annotation in any case.
        None => drop(annotations.entry(is_cluster_scoped()).or_insert_with(|| false.to_string())),
    }
    let metadata = ObjectMeta {
        name: Some(format!("{}-{}", config.module(), config.version)),
        namespace: Some(KCP_NAMESPACE.to_owned()),
        labels: Some(labels),
        annotations: Some(annotations),
        ..ObjectMeta::default()
    };
    let spec = ModuleTemplateSpec {
        module_name: Some(config.module().to_owned()),
        version: Some(config.version.clone()),
        mandatory: config.mandatory,
        data: folder.default_object().cloned(),
        descriptor: json!({}),
        info: config.info.clone(),
        resources: resources(config),
        associated_resources: config.associated_resources.clone(),
        manager: config.manager.clone(),
        requires_downtime: config.requires_downtime,
        ..ModuleTemplateSpec::default()
    };
    ModuleTemplate { metadata, spec }
}

/// The downloads of `module.yaml`, and the published manifest unless they name it already.
fn resources(config: &Config) -> Option<Vec<Link>> {
    let published = config.manifest_url.as_ref().map(|link| Link {
        name: RAW_MANIFEST.to_owned(),
        link: link.clone(),
        ..Link::default()
    });
    let mut resources = config.resources.clone().unwrap_or_default();
    if !resources.iter().any(|resource| resource.name == RAW_MANIFEST) {
        resources.extend(published);
    }
    (config.resources.is_some() || !resources.is_empty()).then_some(resources)
}

/// Renders the template and checks it together with a release meta that releases it.
///
/// # Errors
/// [`InvalidError`] with the findings that are errors.
pub(super) fn render(folder: &Folder) -> Result<String> {
    let template = serde_json::to_value(template(folder)).context("write the ModuleTemplate as JSON")?;
    let yaml = to_yaml(&template).context("write the ModuleTemplate as YAML")?;
    let config = &folder.config;
    let mut release = json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "ModuleReleaseMeta",
        "metadata": {"name": config.module(), "namespace": KCP_NAMESPACE},
        "spec": {"moduleName": config.module(), "ocmComponentName": config.component},
    });
    if config.mandatory == Some(true) {
        release["spec"]["mandatory"] = json!({"version": config.version});
    } else {
        release["spec"]["channels"] = json!([{"channel": CHANNEL, "version": config.version}]);
    }
    let sources = [
        Source { name: FILE.into(), text: yaml.clone() },
        Source { name: config::FILE.into(), text: release.to_string() },
    ];
    let today = Timestamp::now().to_zoned(TimeZone::UTC).date();
    let options = CheckOptions { restricted: None, today, whole: true };
    let report = check::check(&sources, None, &options)?;
    let errors = report.findings.iter().filter(|finding| finding.severity == Severity::Error);
    let mut errors: Vec<_> = errors.map(|finding| format!("{}: {}", finding.path, finding.message)).collect();
    // Template and release meta share the name of the module.
    let mut seen = BTreeSet::new();
    errors.retain(|error| seen.insert(error.clone()));
    match errors.is_empty() {
        true => Ok(yaml),
        false => Err(InvalidError::new(config::FILE, errors.join("; ")).into()),
    }
}

/// Writes YAML within the subset that readers of YAML 1.1 and 1.2 understand equally.
pub(super) fn to_yaml(value: &Value) -> Result<String> {
    Ok(serde_saphyr::to_string_with_options(value, ser_options! { prefer_block_scalars: false })?)
}
