//! Objects that the test bed writes in place of an operator of KCP.

use anyhow::Result;
use k8s_openapi::{
    api::core::v1::Secret, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tidewatch_api::{
    Kyma, crds,
    names::{KUBECONFIG_KEY, label},
};

use super::until;
use crate::control_plane::Cluster;

/// Applies the product's five CRDs and waits until they are served.
pub(super) async fn install_crds(kcp: &Cluster) -> Result<()> {
    let api = Api::<CustomResourceDefinition>::all(kcp.client().await?);
    for crd in crds::crds() {
        let name = crd.name_any();
        api.patch(&name, &PatchParams::apply("test-bed").force(), &Patch::Apply(&crd)).await?;
        until(&format!("the CRD {name} to be established"), async || {
            let conditions = api.get(&name).await?.status.and_then(|status| status.conditions).unwrap_or_default();
            Ok(conditions
                .iter()
                .find(|condition| condition.type_ == "Established" && condition.status == "True")
                .map(drop))
        })
        .await?;
    }
    Ok(())
}

/// Writes an access Secret.
pub(super) async fn write_access(kcp: &Cluster, namespace: &str, kyma: &str, kubeconfig: &str) -> Result<()> {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": format!("kubeconfig-{kyma}"), "labels": {label::KYMA_NAME: kyma}},
        "stringData": {KUBECONFIG_KEY: kubeconfig},
    });
    let api = Api::<Secret>::namespaced(kcp.client().await?, namespace);
    api.patch(&format!("kubeconfig-{kyma}"), &PatchParams::apply("test-bed").force(), &Patch::Apply(&secret)).await?;
    Ok(())
}

/// Writes a Kyma that follows the channel `regular`, without modules.
pub(super) async fn write_kyma(kcp: &Cluster, namespace: &str, name: &str, runtime_id: &str) -> Result<()> {
    let kyma = json!({
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
        "metadata": {"name": name, "labels": {label::RUNTIME_ID: runtime_id}},
        "spec": {"channel": "regular"},
    });
    let api = Api::<Kyma>::namespaced(kcp.client().await?, namespace);
    api.patch(name, &PatchParams::apply("test-bed").force(), &Patch::Apply(&kyma)).await?;
    Ok(())
}
