//! Kinds of Kubernetes itself, in versions that every supported API server serves: their watches begin without a lookup.

use super::ServedResource;

/// A kind whose objects can be listed and watched.
#[derive(Clone, Copy, Debug)]
pub struct BuiltIn {
    /// API group; empty for the core group.
    pub group: &'static str,
    /// API version.
    pub version: &'static str,
    /// Plural name.
    pub resource: &'static str,
    kind: &'static str,
    has_status: bool,
}

const fn plain(group: &'static str, version: &'static str, resource: &'static str, kind: &'static str) -> BuiltIn {
    BuiltIn { group, version, resource, kind, has_status: false }
}

const fn with_status(
    group: &'static str,
    version: &'static str,
    resource: &'static str,
    kind: &'static str,
) -> BuiltIn {
    BuiltIn { has_status: true, ..plain(group, version, resource, kind) }
}

/// The kinds that modules have. Custom resources have other groups, since Kubernetes reserves these.
pub static BUILT_IN_KINDS: &[BuiltIn] = &[
    plain("", "v1", "configmaps", "ConfigMap"),
    plain("", "v1", "endpoints", "Endpoints"),
    plain("", "v1", "limitranges", "LimitRange"),
    with_status("", "v1", "namespaces", "Namespace"),
    with_status("", "v1", "nodes", "Node"),
    with_status("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    with_status("", "v1", "persistentvolumes", "PersistentVolume"),
    with_status("", "v1", "pods", "Pod"),
    plain("", "v1", "podtemplates", "PodTemplate"),
    with_status("", "v1", "replicationcontrollers", "ReplicationController"),
    with_status("", "v1", "resourcequotas", "ResourceQuota"),
    plain("", "v1", "serviceaccounts", "ServiceAccount"),
    with_status("", "v1", "services", "Service"),
    plain("admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration"),
    with_status("admissionregistration.k8s.io", "v1", "validatingadmissionpolicies", "ValidatingAdmissionPolicy"),
    plain(
        "admissionregistration.k8s.io",
        "v1",
        "validatingadmissionpolicybindings",
        "ValidatingAdmissionPolicyBinding",
    ),
    plain("admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration"),
    with_status("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"),
    with_status("apiregistration.k8s.io", "v1", "apiservices", "APIService"),
    plain("apps", "v1", "controllerrevisions", "ControllerRevision"),
    with_status("apps", "v1", "daemonsets", "DaemonSet"),
    with_status("apps", "v1", "deployments", "Deployment"),
    with_status("apps", "v1", "replicasets", "ReplicaSet"),
    with_status("apps", "v1", "statefulsets", "StatefulSet"),
    with_status("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
    with_status("batch", "v1", "cronjobs", "CronJob"),
    with_status("batch", "v1", "jobs", "Job"),
    plain("coordination.k8s.io", "v1", "leases", "Lease"),
    plain("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"),
    with_status("flowcontrol.apiserver.k8s.io", "v1", "flowschemas", "FlowSchema"),
    with_status("flowcontrol.apiserver.k8s.io", "v1", "prioritylevelconfigurations", "PriorityLevelConfiguration"),
    plain("networking.k8s.io", "v1", "ingressclasses", "IngressClass"),
    with_status("networking.k8s.io", "v1", "ingresses", "Ingress"),
    plain("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    plain("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass"),
    with_status("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    plain("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding"),
    plain("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole"),
    plain("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    plain("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    plain("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass"),
    plain("storage.k8s.io", "v1", "csidrivers", "CSIDriver"),
    plain("storage.k8s.io", "v1", "csinodes", "CSINode"),
    plain("storage.k8s.io", "v1", "csistoragecapacities", "CSIStorageCapacity"),
    plain("storage.k8s.io", "v1", "storageclasses", "StorageClass"),
    with_status("storage.k8s.io", "v1", "volumeattachments", "VolumeAttachment"),
];

impl BuiltIn {
    /// The answer of a lookup.
    pub fn served(&self) -> ServedResource {
        ServedResource {
            version: self.version.to_owned(),
            kind: self.kind.to_owned(),
            has_status: self.has_status,
            is_watchable: true,
        }
    }
}

/// The resource of a group in a version, if Kubernetes itself has it.
pub(super) fn find(group: &str, version: &str, resource: &str) -> Option<ServedResource> {
    let is_same = |known: &&BuiltIn| known.group == group && known.version == version && known.resource == resource;
    BUILT_IN_KINDS.iter().find(is_same).map(BuiltIn::served)
}
