//! Modules for a landscape: templates and release metas as an operator of KCP applies them.

use anyhow::Result;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    ModuleReleaseMeta, ModuleTemplate,
    names::{SKR_NAMESPACE, annotation, label},
};

use super::Landscape;
use crate::{
    artefacts::{self, module_group},
    modules::Module,
};

impl Landscape {
    /// Writes the template of one version of a module.
    ///
    /// # Errors
    /// When KCP refuses it.
    pub async fn write_template(&self, module: &str, version: &str) -> Result<()> {
        let template = template(module, version);
        let api = Api::<ModuleTemplate>::namespaced(self.operator(), &self.name);
        api.patch(&format!("{module}-{version}"), &PatchParams::apply("operator").force(), &Patch::Apply(&template))
            .await?;
        Ok(())
    }

    /// Writes the release meta of a module: the version of each channel.
    ///
    /// # Errors
    /// When KCP refuses it.
    pub async fn write_channels(&self, module: &str, channels: &[(&str, &str)]) -> Result<()> {
        let meta = release_meta(module, channels);
        let api = Api::<ModuleReleaseMeta>::namespaced(self.operator(), &self.name);
        api.patch(module, &PatchParams::apply("operator").force(), &Patch::Apply(&meta)).await?;
        Ok(())
    }

    /// Writes a module with two versions: `regular` points to the first, `fast` to the second.
    ///
    /// # Errors
    /// When KCP refuses it.
    pub async fn write_module(&self, module: &str, regular: &str, fast: &str) -> Result<()> {
        self.write_template(module, regular).await?;
        self.write_template(module, fast).await?;
        self.write_channels(module, &[("regular", regular), ("fast", fast)]).await
    }

    /// Writes a sample module of `tests/modules` like [`Self::write_module`].
    ///
    /// # Errors
    /// When its folder cannot be read, or KCP refuses it.
    pub async fn write_sample(&self, module: &str, regular: &str, fast: &str) -> Result<()> {
        let api = Api::<ModuleTemplate>::namespaced(self.operator(), &self.name);
        for version in [regular, fast] {
            let Module { default_cr, manager, .. } = Module::read(module, version)?;
            let mut template = template(module, version);
            if let Some(spec) = template["spec"].as_object_mut() {
                spec.remove("data");
                spec.extend(default_cr.map(|default| ("data".to_owned(), json!(default))));
                spec.insert("manager".to_owned(), json!(manager));
            }
            let params = PatchParams::apply("operator").force();
            api.patch(&format!("{module}-{version}"), &params, &Patch::Apply(&template)).await?;
        }
        self.write_channels(module, &[("regular", regular), ("fast", fast)]).await
    }

    /// Writes a version of a wide module, see [`artefacts::WIDE`], and points the channel `regular` to it.
    ///
    /// # Errors
    /// When KCP refuses it.
    pub async fn write_wide(&self, module: &str, version: &str) -> Result<()> {
        let api = Api::<ModuleTemplate>::namespaced(self.operator(), &self.name);
        let mut template = template(module, version);
        template["spec"]["manager"] = json!({"group": "apps", "version": "v1", "kind": "Deployment",
            "namespace": SKR_NAMESPACE, "name": artefacts::manager(module)});
        let params = PatchParams::apply("operator").force();
        api.patch(&format!("{module}-{version}"), &params, &Patch::Apply(&template)).await?;
        self.write_channels(module, &[("regular", version)]).await
    }

    /// Writes a version of a module without default module CR and manager, and points the channel `regular` to it.
    ///
    /// # Errors
    /// When KCP refuses it.
    pub async fn write_bare(&self, module: &str, version: &str) -> Result<()> {
        let api = Api::<ModuleTemplate>::namespaced(self.operator(), &self.name);
        let mut template = template(module, version);
        template["spec"].as_object_mut().and_then(|spec| spec.remove("data"));
        let params = PatchParams::apply("operator").force();
        api.patch(&format!("{module}-{version}"), &params, &Patch::Apply(&template)).await?;
        self.write_channels(module, &[("regular", version)]).await
    }

    /// Deletes the template of one version.
    ///
    /// # Errors
    /// When KCP refuses.
    pub async fn delete_template(&self, module: &str, version: &str) -> Result<()> {
        let api = Api::<ModuleTemplate>::namespaced(self.operator(), &self.name);
        api.delete(&format!("{module}-{version}"), &DeleteParams::default()).await?;
        Ok(())
    }
}

/// A template as modulectl writes it, with a default module CR and without a manager: the module is ready once its objects are applied.
pub fn template(module: &str, version: &str) -> Value {
    json!({
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
        "metadata": {
            "name": format!("{module}-{version}"),
            "labels": {label::MODULE_NAME: module},
            "annotations": {annotation::CLUSTER_SCOPED: "false"},
        },
        "spec": {
            "moduleName": module,
            "version": version,
            "info": {"repository": format!("https://example.test/{module}"), "documentation": format!("https://example.test/{module}/docs")},
            "data": {
                "apiVersion": format!("{}/v1alpha1", module_group(module)), "kind": "Sample",
                "metadata": {"name": "default"}, "spec": {"resourceFilePath": "./module-data"},
            },
            "descriptor": {},
            "resources": [{"name": "rawManifest", "link": format!("https://example.test/{module}/{version}.yaml")}],
        },
    })
}

/// A release meta.
pub fn release_meta(module: &str, channels: &[(&str, &str)]) -> Value {
    let channels: Vec<_> =
        channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
    json!({
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
        "metadata": {"name": module},
        "spec": {"moduleName": module, "ocmComponentName": component(module), "channels": channels},
    })
}

fn component(module: &str) -> String {
    format!("kyma-project.io/module/{module}")
}
