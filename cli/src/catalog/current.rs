//! The current catalog in KCP in the form of a file, with the Kymas that select a fixed version.

use anyhow::{Context as _, Result};
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tidewatch_receiver::controllers::catalog::check::Source;
use tidewatch_shared::{
    api::Kyma,
    names::{GROUP, VERSION, annotation},
};

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
    let kymas = kymas.iter().filter_map(|kyma| with_fixed_versions(kyma)).map(|kyma| Ok(kyma.to_string()));
    let documents: Vec<_> = templates.chain(metas).chain(kymas).collect::<serde_json::Result<_>>()?;
    Ok(Source { name: NAME.into(), text: documents.join("\n---\n") })
}

/// The part of a Kyma that selects modules; `None` if it selects no version.
fn with_fixed_versions(kyma: &Kyma) -> Option<Value> {
    let accepted = kyma.annotations().get(annotation::ACCEPTED_SPEC);
    let modules = kyma.spec.modules();
    let is_fixed = accepted.is_some_and(|spec| spec.contains("\"version\""))
        || modules.iter().any(|module| module.version.is_some());
    let annotations = accepted.map(|spec| json!({annotation::ACCEPTED_SPEC: spec}));
    is_fixed.then(|| {
        json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Kyma",
            "metadata": {"name": kyma.name_any(), "annotations": annotations}, "spec": {"modules": modules}})
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kymas_without_a_fixed_version_are_left_out() {
        let kyma = |modules: Value, accepted: Option<Value>| {
            let annotations = accepted.map(|spec| json!({annotation::ACCEPTED_SPEC: spec.to_string()}));
            let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
                "metadata": {"name": "k", "annotations": annotations}, "spec": {"channel": "regular", "modules": modules}});
            with_fixed_versions(&serde_json::from_value(kyma).unwrap())
        };
        let (fixed, follows) = (json!([{"name": "keda", "version": "1.0.0"}]), json!([{"name": "keda"}]));
        assert_eq!(kyma(follows.clone(), None), None);
        assert_eq!(kyma(fixed.clone(), None).unwrap()["spec"]["modules"][0]["version"], "1.0.0");
        let accepted = kyma(follows, Some(json!({"modules": fixed}))).unwrap();
        assert!(accepted["metadata"]["annotations"][annotation::ACCEPTED_SPEC].as_str().unwrap().contains("1.0.0"));
    }
}
