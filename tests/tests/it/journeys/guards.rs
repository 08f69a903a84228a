//! Admission policies as in BTP runtimes: in the namespace of Kyma no NetworkPolicy without rules, and no workload that others
//! than the control plane delete; images of listed registries only in namespaces that ask for it.

use anyhow::Result;
use k8s_openapi::api::{
    admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
    core::v1::{Namespace, Pod},
    networking::v1::NetworkPolicy,
};
use kube::{
    Api,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_api::names::SKR_NAMESPACE;
use tidewatch_testing::{control_plane::Cluster, landscape::until};

const RULES: &str = "has(object.spec.ingress) && size(object.spec.ingress) > 0 \
                     || has(object.spec.egress) && size(object.spec.egress) > 0";
/// The control plane's account.
const CONTROL_PLANE: &str = "system:serviceaccount:kube-system:tidewatch-control-plane";
/// A namespace that asks for the verification of images, to see whether the policy is in force.
const PROBE: &str = "verified";

/// Installs the policies, and waits until they are in force. `listed` is the beginning of the images that are admitted.
pub(super) async fn guard(cluster: &Cluster, listed: &str) -> Result<()> {
    let client = cluster.client().await?;
    let rules = json!({
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": SKR_NAMESPACE}},
            "resourceRules": [{"apiGroups": ["networking.k8s.io"], "apiVersions": ["v1"],
                "resources": ["networkpolicies"], "operations": ["CREATE", "UPDATE"]}],
        },
        "validations": [{"expression": RULES, "message": "a NetworkPolicy needs rules"}],
    });
    let images = json!({
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"namespaces.warden.kyma-project.io/validate": "enabled"}},
            "resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
        },
        "validations": [{"expression": format!("object.spec.containers.all(one, one.image.startsWith('{listed}'))"),
            "message": "the image is not of a listed registry"}],
    });
    let deletions = json!({
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": SKR_NAMESPACE}},
            "resourceRules": [{"apiGroups": ["apps"], "apiVersions": ["v1"],
                "resources": ["deployments", "statefulsets", "daemonsets"], "operations": ["DELETE"]}],
        },
        "validations": [{"expression": format!("request.userInfo.username == '{CONTROL_PLANE}'"),
            "message": "only the control plane deletes workloads"}],
    });
    install(cluster, "network-policies-with-rules", rules).await?;
    install(cluster, "deletion-of-workloads", deletions).await?;
    install(cluster, "listed-images", images).await?;

    let namespace =
        json!({"metadata": {"name": PROBE, "labels": {"namespaces.warden.kyma-project.io/validate": "enabled"}}});
    Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &serde_json::from_value(namespace)?).await?;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let policy: NetworkPolicy =
        serde_json::from_value(json!({"metadata": {"name": "probe"}, "spec": {"podSelector": {}}}))?;
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "probe"}, "spec": {"containers": [{"name": "probe", "image": "unlisted.test/probe"}]},
    }))?;
    let policies = Api::<NetworkPolicy>::namespaced(client.clone(), SKR_NAMESPACE);
    let pods = Api::<Pod>::namespaced(client, PROBE);
    until("the admission policies to be in force", async || {
        let refused = |error: kube::Error, words: &str| error.to_string().contains(words);
        let by_rules = policies.create(&dry, &policy).await.is_err_and(|error| refused(error, "needs rules"));
        let by_image = pods.create(&dry, &pod).await.is_err_and(|error| refused(error, "listed registry"));
        Ok((by_rules && by_image).then_some(()))
    })
    .await
}

async fn install(cluster: &Cluster, name: &str, mut spec: Value) -> Result<()> {
    let client = cluster.client().await?;
    let params = PatchParams::apply("landscape").force();
    spec["failurePolicy"] = json!("Fail");
    let policy = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name}, "spec": spec});
    Api::<ValidatingAdmissionPolicy>::all(client.clone()).patch(name, &params, &Patch::Apply(&policy)).await?;
    let binding = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}});
    Api::<ValidatingAdmissionPolicyBinding>::all(client).patch(name, &params, &Patch::Apply(&binding)).await?;
    Ok(())
}
