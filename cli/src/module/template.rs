//! The ModuleTemplate of a folder, checked as `catalog check` does.

use anyhow::{Context as _, Result};
use jiff::{Timestamp, tz::TimeZone};
use kube::core::ObjectMeta;
use serde_json::{Value, json};
use serde_saphyr::ser_options;
use tidewatch_receiver::controllers::catalog::check::{self, CheckOptions, Severity, Source};
use tidewatch_shared::{
    api::{ModuleTemplate, ModuleTemplateSpec},
    names::{GROUP, KCP_NAMESPACE, VERSION, annotation, label},
};

use super::{InvalidError, config, folder::Folder};

/// Name of the file.
pub(super) const FILE: &str = "moduletemplate.yaml";
/// Channel of the release meta that completes the catalog of a check.
const CHANNEL: &str = "regular";

/// Builds the ModuleTemplate `<module>-<version>`. Its descriptor is empty: the receiver reads it from the registry.
pub(super) fn template(folder: &Folder) -> ModuleTemplate {
    let config = &folder.config;
    let mut labels = config.labels.clone();
    labels.insert(label::MODULE_NAME.to_owned(), config.module().to_owned());
    let mut annotations = config.annotations.clone();
    if let Some(definition) = folder.default_definition() {
        let is_cluster_scoped = definition["spec"]["scope"] == "Cluster";
        annotations.insert(annotation::CLUSTER_SCOPED.to_owned(), is_cluster_scoped.to_string());
    }
    let metadata = ObjectMeta {
        name: Some(format!("{}-{}", config.module(), config.version)),
        namespace: Some(KCP_NAMESPACE.to_owned()),
        labels: Some(labels),
        annotations: Some(annotations).filter(|annotations| !annotations.is_empty()),
        ..ObjectMeta::default()
    };
    let spec = ModuleTemplateSpec {
        module_name: Some(config.module().to_owned()),
        version: Some(config.version.clone()),
        mandatory: config.mandatory,
        data: folder.default_object().cloned(),
        descriptor: json!({}),
        info: config.info.clone(),
        resources: config.resources.clone(),
        associated_resources: config.associated_resources.clone(),
        manager: config.manager.clone(),
        requires_downtime: config.requires_downtime,
        ..ModuleTemplateSpec::default()
    };
    ModuleTemplate { metadata, spec }
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
    let errors: Vec<_> = errors.map(|finding| format!("{}: {}", finding.path, finding.message)).collect();
    match errors.is_empty() {
        true => Ok(yaml),
        false => Err(InvalidError::new(config::FILE, errors.join("; ")).into()),
    }
}

/// Writes YAML within the subset that readers of YAML 1.1 and 1.2 understand equally.
pub(super) fn to_yaml(value: &Value) -> Result<String> {
    Ok(serde_saphyr::to_string_with_options(value, ser_options! { prefer_block_scalars: false })?)
}
