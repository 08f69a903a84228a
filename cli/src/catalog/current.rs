//! The current catalog in KCP in the form of a file, with the Kymas that pin a version.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma,
    names::{GROUP, VERSION, annotation},
    selection::{ModuleSelection, pins},
};
use tidewatch_author::check::Source;

use super::LiveFlags;

/// Name of the source in findings.
const NAME: &str = "control-plane";

/// Reads the templates, release metas and Kymas of the control plane.
pub(super) async fn read(live: &LiveFlags) -> Result<Source> {
    let client = live.cluster.client().await?;
    let objects = live.objects(&client).await?;
    let kymas = live.all::<Kyma>(&client).await.context("list the Kymas")?;
    let templates = objects.templates.iter().map(|template| serde_json::to_string(&**template));
    let metas = objects.release_metas.iter().map(|meta| serde_json::to_string(&**meta));
    let kymas = kymas.iter().filter_map(|kyma| with_pins(kyma)).map(|kyma| Ok(kyma.to_string()));
    let documents: Vec<_> = templates.chain(metas).chain(kymas).collect::<serde_json::Result<_>>()?;
    Ok(Source { name: NAME.into(), text: documents.join("\n---\n") })
}

/// The part of a Kyma that selects modules; `None` if it pins no version of one.
fn with_pins(kyma: &Kyma) -> Option<Value> {
    ModuleSelection::of(kyma).pinned().next()?;
    let selects = |key: &str| key == annotation::ACCEPTED_SPEC || pins::module_of(key).is_some();
    let annotations: BTreeMap<_, _> = kyma.annotations().iter().filter(|(key, _)| selects(key)).collect();
    Some(json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Kyma",
        "metadata": {"name": kyma.name_any(), "annotations": annotations}, "spec": {"modules": kyma.spec.modules()}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kymas_without_a_pin_are_left_out() {
        let kyma = |annotations: Value| {
            let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
                "metadata": {"name": "k", "annotations": annotations},
                "spec": {"channel": "regular", "modules": [{"name": "keda"}]}});
            with_pins(&serde_json::from_value(kyma).unwrap())
        };
        let pin = "version.operator.kyma-project.io/keda";
        let other = "version.operator.kyma-project.io/other";
        assert_eq!(kyma(json!({"a": "b"})), None);
        assert_eq!(kyma(json!({other: "1.0.0"})), None, "of a module that it does not select");
        let pinned = kyma(json!({pin: "1.0.0", "a": "b"})).unwrap();
        assert_eq!(pinned["metadata"]["annotations"], json!({pin: "1.0.0"}));
        assert_eq!(pinned["spec"]["modules"][0]["name"], "keda");
        let accepted = |pins: Value| {
            let spec = json!({"channel": "regular", "modules": [{"name": "keda"}], "pins": pins});
            kyma(json!({annotation::ACCEPTED_SPEC: spec.to_string()}))
        };
        assert_eq!(accepted(json!({"other": "1.0.0"})), None);
        let pinned = accepted(json!({"keda": "1.0.0"})).unwrap();
        assert!(pinned["metadata"]["annotations"][annotation::ACCEPTED_SPEC].as_str().unwrap().contains("1.0.0"));
    }
}
