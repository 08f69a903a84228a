//! Accounts of the product's processes, with the minimal rights.

use std::fs;

use anyhow::Result;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::Secret,
    rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tidewatch_api::names::{AGENT_OBJECT, GROUP, SKR_NAMESPACE};
use tidewatch_trust::CA_SECRET;

use crate::{control_plane::Cluster, paths};

/// Account of the receiver in KCP.
pub(super) const RECEIVER: &str = "tidewatch-receiver";
/// Account of the agent in a runtime.
pub(super) const AGENT: &str = AGENT_OBJECT;
/// Account in a runtime for the token in the access Secret.
pub(super) const CONTROL_PLANE: &str = "tidewatch-control-plane";

const READ: [&str; 3] = ["get", "list", "watch"];

/// Rights of the receiver in KCP, and its Leases, as `deploy/base` has them: so the tests prove that these are sufficient.
pub(super) async fn grant_receiver(kcp: &Cluster, namespace: &str) -> Result<()> {
    let client = kcp.client().await?;
    let base = paths::workspace().join("deploy/base");
    let role: Role = serde_saphyr::from_str(&fs::read_to_string(base.join("role.yaml"))?)?;
    apply(&Api::<Role>::namespaced(client.clone(), namespace), RECEIVER, json!({"rules": role.rules})).await?;
    // Empty, as an installation contains them.
    apply(&Api::<Secret>::namespaced(client.clone(), namespace), CA_SECRET, json!({})).await?;
    let leases = Api::<Lease>::namespaced(client.clone(), namespace);
    for lease in serde_saphyr::from_multiple::<Lease>(&fs::read_to_string(base.join("leases.yaml"))?)? {
        apply(&leases, &lease.name_any(), json!({})).await?;
    }
    let binding = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": RECEIVER},
        "subjects": [{"kind": "ServiceAccount", "name": RECEIVER, "namespace": namespace}],
    });
    apply(&Api::<RoleBinding>::namespaced(client, namespace), RECEIVER, binding).await
}

/// Rights of the agent in its runtime: read the resources of the plan, those of modules in their namespace and its ConfigMap
/// included, and renew its Lease.
pub(super) async fn grant_agent(runtime: &Cluster) -> Result<()> {
    let client = runtime.client().await?;
    let planned = json!([
        {"apiGroups": [GROUP], "resources": ["*"], "verbs": READ},
        {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": READ},
        {"apiGroups": [""], "resources": ["namespaces"], "resourceNames": [SKR_NAMESPACE], "verbs": READ},
        // Kinds of the modules.
        {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["clusterroles", "clusterrolebindings"], "verbs": READ},
        {"apiGroups": ["admissionregistration.k8s.io"], "resources": ["validatingwebhookconfigurations"], "verbs": READ},
    ]);
    apply(&Api::<ClusterRole>::all(client.clone()), AGENT, json!({"rules": planned})).await?;
    let subjects = json!([{"kind": "ServiceAccount", "name": AGENT, "namespace": SKR_NAMESPACE}]);
    let binding = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": AGENT}, "subjects": subjects,
    });
    apply(&Api::<ClusterRoleBinding>::all(client.clone()), AGENT, binding).await?;
    let own = json!([
        {"apiGroups": [""], "resources": ["configmaps", "pods", "serviceaccounts", "services"], "verbs": READ},
        {"apiGroups": ["apps"], "resources": ["deployments", "statefulsets"], "verbs": READ},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [AGENT_OBJECT],
         "verbs": ["list", "watch", "patch"]},
    ]);
    apply(&Api::<Role>::namespaced(client.clone(), SKR_NAMESPACE), AGENT, json!({"rules": own})).await?;
    let binding = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": AGENT}, "subjects": subjects,
    });
    apply(&Api::<RoleBinding>::namespaced(client, SKR_NAMESPACE), AGENT, binding).await
}

/// Lets the agent list and watch one more resource, in all namespaces.
pub(super) async fn grant_watch(runtime: &Cluster, group: &str, resource: &str) -> Result<()> {
    let client = runtime.client().await?;
    let name = watch_role(resource);
    let rules = json!([{"apiGroups": [group], "resources": [resource], "verbs": READ}]);
    apply(&Api::<ClusterRole>::all(client.clone()), &name, json!({"rules": rules})).await?;
    let binding = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": AGENT, "namespace": SKR_NAMESPACE}],
    });
    apply(&Api::<ClusterRoleBinding>::all(client), &name, binding).await
}

/// Revokes [`grant_watch`].
pub(super) async fn revoke_watch(runtime: &Cluster, resource: &str) -> Result<()> {
    let bindings = Api::<ClusterRoleBinding>::all(runtime.client().await?);
    bindings.delete(&watch_role(resource), &DeleteParams::default()).await?;
    Ok(())
}

fn watch_role(resource: &str) -> String {
    format!("{AGENT}-{}", resource.replace('*', "all"))
}

/// Rights of the access Secret's account in a runtime: it is the control plane's own, and a cluster admin.
pub(super) async fn grant_control_plane(runtime: &Cluster) -> Result<()> {
    let binding = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": CONTROL_PLANE, "namespace": "kube-system"}],
    });
    apply(&Api::<ClusterRoleBinding>::all(runtime.client().await?), CONTROL_PLANE, binding).await
}

async fn apply<K>(api: &Api<K>, name: &str, mut body: Value) -> Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Serialize + DeserializeOwned + std::fmt::Debug,
{
    body["apiVersion"] = json!(K::api_version(&()));
    body["kind"] = json!(K::kind(&()));
    body["metadata"] = json!({"name": name});
    api.patch(name, &PatchParams::apply("test-bed").force(), &Patch::Apply(&body)).await?;
    Ok(())
}
