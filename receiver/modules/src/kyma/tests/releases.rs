//! Versions and channels of `keda`, the user's selection, and the state of the module.

use super::*;

impl Fixture {
    /// Publishes exactly these versions.
    pub(super) fn publish(&mut self, versions: &[&str]) {
        let template = |version: &&str| {
            let spec = json!({"moduleName": "keda", "version": version, "descriptor": {}});
            of_kyma_group("ModuleTemplate", &format!("keda-{version}"), spec)
        };
        self.set_templates(filled::<ModuleTemplate>(&versions.iter().map(template).collect::<Vec<_>>()).0);
    }

    /// Replaces the release meta, whose channels name these versions, with these entries of versions.
    pub(super) fn release(&mut self, channels: &[(&str, &str)], versions: Value) {
        let channels: Vec<_> =
            channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
        let meta = of_kyma_group(
            "ModuleReleaseMeta",
            "keda",
            json!({"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda", "channels": channels,
                "versions": versions}),
        );
        self.set_release_metas(filled::<ModuleReleaseMeta>(&[meta]).0);
    }

    /// Lets moved channels reach all Kymas at once.
    pub(super) fn roll_out_at_once(&mut self) {
        let flags = catalog::Flags { module_upgrade_rollout_max_delay: Duration::ZERO, ..catalog::Flags::default() };
        let settings = catalog::Settings { flags, ..catalog::Settings::default() };
        self.ctx.catalog = Catalog::deciding(settings, catalog::Metrics::default(), WriteBudgets::default());
    }

    pub(super) fn select(&self, modules: Value) {
        self.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = modules);
    }

    /// State and message of the only module.
    pub(super) fn module(&self) -> (String, String) {
        let module = &self.status()["modules"][0];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (text(&module["state"]), text(&module["message"]))
    }

    /// Version and channel of the only Manifest.
    pub(super) fn version(&self) -> (String, Option<String>) {
        let manifest = self.manifest().unwrap().1;
        let channel = manifest["metadata"]["labels"][label::CHANNEL].as_str().map(str::to_owned);
        (manifest["spec"]["version"].as_str().unwrap().to_owned(), channel)
    }

    /// Sets the state of the only Manifest, as its own controller does.
    pub(super) fn set_manifest_state(&self, state: &str) {
        self.kcp.edit(&self.manifest().unwrap().0, |manifest| manifest["status"] = json!({"state": state}));
    }
}
