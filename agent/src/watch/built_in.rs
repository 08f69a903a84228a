//! Kinds of Kubernetes itself, in versions that every supported API server serves: their watches begin without a lookup.

use super::ServedResource;

/// Kinds of one group in one version.
struct Group {
    group: &'static str,
    version: &'static str,
    kinds: &'static [Kind],
}

/// A kind whose objects can be listed and watched.
struct Kind {
    resource: &'static str,
    kind: &'static str,
    has_status: bool,
}

const fn plain(resource: &'static str, kind: &'static str) -> Kind {
    Kind { resource, kind, has_status: false }
}

const fn with_status(resource: &'static str, kind: &'static str) -> Kind {
    Kind { resource, kind, has_status: true }
}

/// The kinds that modules have. Custom resources have other groups, since Kubernetes reserves these.
static GROUPS: &[Group] = &[
    Group {
        group: "",
        version: "v1",
        kinds: &[
            plain("configmaps", "ConfigMap"),
            plain("endpoints", "Endpoints"),
            plain("limitranges", "LimitRange"),
            with_status("namespaces", "Namespace"),
            with_status("nodes", "Node"),
            with_status("persistentvolumeclaims", "PersistentVolumeClaim"),
            with_status("persistentvolumes", "PersistentVolume"),
            with_status("pods", "Pod"),
            plain("podtemplates", "PodTemplate"),
            with_status("replicationcontrollers", "ReplicationController"),
            with_status("resourcequotas", "ResourceQuota"),
            plain("serviceaccounts", "ServiceAccount"),
            with_status("services", "Service"),
        ],
    },
    Group {
        group: "admissionregistration.k8s.io",
        version: "v1",
        kinds: &[
            plain("mutatingwebhookconfigurations", "MutatingWebhookConfiguration"),
            with_status("validatingadmissionpolicies", "ValidatingAdmissionPolicy"),
            plain("validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding"),
            plain("validatingwebhookconfigurations", "ValidatingWebhookConfiguration"),
        ],
    },
    Group {
        group: "apiextensions.k8s.io",
        version: "v1",
        kinds: &[with_status("customresourcedefinitions", "CustomResourceDefinition")],
    },
    Group { group: "apiregistration.k8s.io", version: "v1", kinds: &[with_status("apiservices", "APIService")] },
    Group {
        group: "apps",
        version: "v1",
        kinds: &[
            plain("controllerrevisions", "ControllerRevision"),
            with_status("daemonsets", "DaemonSet"),
            with_status("deployments", "Deployment"),
            with_status("replicasets", "ReplicaSet"),
            with_status("statefulsets", "StatefulSet"),
        ],
    },
    Group {
        group: "autoscaling",
        version: "v2",
        kinds: &[with_status("horizontalpodautoscalers", "HorizontalPodAutoscaler")],
    },
    Group { group: "batch", version: "v1", kinds: &[with_status("cronjobs", "CronJob"), with_status("jobs", "Job")] },
    Group { group: "coordination.k8s.io", version: "v1", kinds: &[plain("leases", "Lease")] },
    Group { group: "discovery.k8s.io", version: "v1", kinds: &[plain("endpointslices", "EndpointSlice")] },
    Group {
        group: "flowcontrol.apiserver.k8s.io",
        version: "v1",
        kinds: &[
            with_status("flowschemas", "FlowSchema"),
            with_status("prioritylevelconfigurations", "PriorityLevelConfiguration"),
        ],
    },
    Group {
        group: "networking.k8s.io",
        version: "v1",
        kinds: &[
            plain("ingressclasses", "IngressClass"),
            with_status("ingresses", "Ingress"),
            plain("networkpolicies", "NetworkPolicy"),
        ],
    },
    Group { group: "node.k8s.io", version: "v1", kinds: &[plain("runtimeclasses", "RuntimeClass")] },
    Group { group: "policy", version: "v1", kinds: &[with_status("poddisruptionbudgets", "PodDisruptionBudget")] },
    Group {
        group: "rbac.authorization.k8s.io",
        version: "v1",
        kinds: &[
            plain("clusterrolebindings", "ClusterRoleBinding"),
            plain("clusterroles", "ClusterRole"),
            plain("rolebindings", "RoleBinding"),
            plain("roles", "Role"),
        ],
    },
    Group { group: "scheduling.k8s.io", version: "v1", kinds: &[plain("priorityclasses", "PriorityClass")] },
    Group {
        group: "storage.k8s.io",
        version: "v1",
        kinds: &[
            plain("csidrivers", "CSIDriver"),
            plain("csinodes", "CSINode"),
            plain("csistoragecapacities", "CSIStorageCapacity"),
            plain("storageclasses", "StorageClass"),
            with_status("volumeattachments", "VolumeAttachment"),
        ],
    },
];

impl Kind {
    /// The answer of a lookup.
    fn served(&self, version: &str) -> ServedResource {
        ServedResource {
            version: version.to_owned(),
            kind: self.kind.to_owned(),
            has_status: self.has_status,
            is_watchable: true,
        }
    }
}

/// The resource of a group in a version, if Kubernetes itself has it.
pub(super) fn find(group: &str, version: &str, resource: &str) -> Option<ServedResource> {
    let group = GROUPS.iter().find(|known| known.group == group && known.version == version)?;
    let kind = group.kinds.iter().find(|known| known.resource == resource)?;
    Some(kind.served(version))
}

/// A kind that this agent knows without a lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltIn {
    /// API group; empty for the core group.
    pub group: &'static str,
    /// Plural name.
    pub resource: &'static str,
    /// The rest, as a lookup would find it.
    pub served: ServedResource,
}

/// All kinds that this agent knows without a lookup.
pub fn built_in() -> impl Iterator<Item = BuiltIn> {
    GROUPS.iter().flat_map(|Group { group, version, kinds }| {
        kinds.iter().map(|kind| BuiltIn { group, resource: kind.resource, served: kind.served(version) })
    })
}
