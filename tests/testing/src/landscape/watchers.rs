//! Watchers for a landscape, as an operator of KCP applies them.

use anyhow::Result;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_api::{Watcher, names::OWN_MANAGER};

use super::Landscape;

impl Landscape {
    /// Applies a Watcher; see [`watcher`] for its body.
    ///
    /// # Errors
    /// When KCP refuses it.
    pub async fn write_watcher(&self, watcher: &Value) -> Result<()> {
        let name = watcher["metadata"]["name"].as_str().unwrap_or_default();
        let params = PatchParams::apply("operator").force();
        self.watchers().patch(name, &params, &Patch::Apply(watcher)).await?;
        Ok(())
    }

    /// Deletes a Watcher.
    ///
    /// # Errors
    /// When KCP refuses.
    pub async fn delete_watcher(&self, name: &str) -> Result<()> {
        self.watchers().delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// The Watchers of this landscape.
    pub fn watchers(&self) -> Api<Watcher> {
        Api::namespaced(self.operator(), &self.name)
    }

    /// Name of a Watcher's watch in the plan.
    pub fn watch_of(&self, watcher: &str) -> String {
        format!("watcher/{}/{watcher}", self.name)
    }
}

/// A Watcher of the lifecycle manager's own for the objects of a resource (group, version, plural) with the label
/// `watched=<its name>`.
pub fn watcher(name: &str, (group, version, resource): (&str, &str, &str), field: &str) -> Value {
    json!({
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Watcher",
        "metadata": {"name": name},
        "spec": {
            "field": field,
            "gateway": {"selector": {}},
            "labelsToWatch": {WATCHED: name},
            "manager": OWN_MANAGER,
            "resourceToWatch": {"group": group, "version": version, "resource": resource},
            "serviceInfo": {"name": "events", "namespace": "kcp-system", "port": 8082},
        },
    })
}

/// The label by which [`watcher`] selects.
pub const WATCHED: &str = "watched";
