//! Kinds of Kubernetes itself, in the versions that every supported API server serves. The others are discovered.

use std::borrow::Cow;

use k8s_openapi::{
    ClusterResourceScope, NamespaceResourceScope, Resource,
    api::{
        admissionregistration::v1 as admission, apps::v1 as apps, autoscaling::v1 as autoscaling,
        autoscaling::v2 as autoscaling_v2, batch::v1 as batch, certificates::v1 as certificates,
        coordination::v1 as coordination, core::v1 as core, discovery::v1 as discovery, events::v1 as events,
        flowcontrol::v1 as flowcontrol, networking::v1 as networking, node::v1 as node, policy::v1 as policy,
        rbac::v1 as rbac, scheduling::v1 as scheduling, storage::v1 as storage,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1 as apiextensions,
    kube_aggregator::pkg::apis::apiregistration::v1 as apiregistration,
};

use super::Kind;

/// Scope of a type of Kubernetes.
trait Scope {
    const IS_NAMESPACED: bool;
}

impl Scope for NamespaceResourceScope {
    const IS_NAMESPACED: bool = true;
}

impl Scope for ClusterResourceScope {
    const IS_NAMESPACED: bool = false;
}

const fn kind<K: Resource<Scope: Scope>>() -> Kind {
    Kind {
        group: Cow::Borrowed(K::GROUP),
        version: Cow::Borrowed(K::VERSION),
        kind: Cow::Borrowed(K::KIND),
        plural: Cow::Borrowed(K::URL_PATH_SEGMENT),
        namespaced: <K::Scope as Scope>::IS_NAMESPACED,
    }
}

/// The kinds, from the constants of their types. Of several versions, the preferred one is first.
static BUILT_IN: &[Kind] = &[
    kind::<core::ConfigMap>(),
    kind::<core::Endpoints>(),
    kind::<core::Event>(),
    kind::<core::LimitRange>(),
    kind::<core::Namespace>(),
    kind::<core::Node>(),
    kind::<core::PersistentVolume>(),
    kind::<core::PersistentVolumeClaim>(),
    kind::<core::Pod>(),
    kind::<core::PodTemplate>(),
    kind::<core::ReplicationController>(),
    kind::<core::ResourceQuota>(),
    kind::<core::Secret>(),
    kind::<core::Service>(),
    kind::<core::ServiceAccount>(),
    kind::<apps::ControllerRevision>(),
    kind::<apps::DaemonSet>(),
    kind::<apps::Deployment>(),
    kind::<apps::ReplicaSet>(),
    kind::<apps::StatefulSet>(),
    kind::<batch::CronJob>(),
    kind::<batch::Job>(),
    kind::<rbac::ClusterRole>(),
    kind::<rbac::ClusterRoleBinding>(),
    kind::<rbac::Role>(),
    kind::<rbac::RoleBinding>(),
    kind::<admission::MutatingWebhookConfiguration>(),
    kind::<admission::ValidatingAdmissionPolicy>(),
    kind::<admission::ValidatingAdmissionPolicyBinding>(),
    kind::<admission::ValidatingWebhookConfiguration>(),
    kind::<apiextensions::CustomResourceDefinition>(),
    kind::<apiregistration::APIService>(),
    kind::<networking::Ingress>(),
    kind::<networking::IngressClass>(),
    kind::<networking::NetworkPolicy>(),
    kind::<policy::PodDisruptionBudget>(),
    kind::<autoscaling_v2::HorizontalPodAutoscaler>(),
    kind::<autoscaling::HorizontalPodAutoscaler>(),
    kind::<coordination::Lease>(),
    kind::<scheduling::PriorityClass>(),
    kind::<storage::CSIDriver>(),
    kind::<storage::CSINode>(),
    kind::<storage::CSIStorageCapacity>(),
    kind::<storage::StorageClass>(),
    kind::<storage::VolumeAttachment>(),
    kind::<node::RuntimeClass>(),
    kind::<discovery::EndpointSlice>(),
    kind::<events::Event>(),
    kind::<flowcontrol::FlowSchema>(),
    kind::<flowcontrol::PriorityLevelConfiguration>(),
    kind::<certificates::CertificateSigningRequest>(),
];

/// Groups of Kubernetes itself of which no kind is served by every API server, or is an object.
pub(super) const OTHER_GROUPS: [&str; 8] = [
    "auditregistration.k8s.io",
    "authentication.k8s.io",
    "authorization.k8s.io",
    "imagepolicy.k8s.io",
    "internal.apiserver.k8s.io",
    "resource.k8s.io",
    "settings.k8s.io",
    "storagemigration.k8s.io",
];

/// All kinds in all versions.
pub(super) fn all() -> impl Iterator<Item = &'static Kind> {
    BUILT_IN.iter()
}

/// A kind in this version.
pub(super) fn find(group: &str, version: &str, kind: &str) -> Option<&'static Kind> {
    of_kind(group, kind).find(|it| it.version == version)
}

/// All versions of a kind.
pub(super) fn of_kind(group: &str, kind: &str) -> impl Iterator<Item = &'static Kind> {
    BUILT_IN.iter().filter(move |it| it.group == group && it.kind == kind)
}

/// Returns true for an API group of Kubernetes itself.
pub(super) fn has_group(group: &str) -> bool {
    BUILT_IN.iter().any(|it| it.group == group)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_stable_group_has_its_kinds_once() {
        let keys: BTreeSet<_> = BUILT_IN.iter().map(|it| (&it.group, &it.version, &it.kind)).collect();
        assert_eq!(keys.len(), BUILT_IN.len());
        let groups: BTreeSet<_> = BUILT_IN.iter().map(|it| &*it.group).collect();
        let expected = [
            "",
            "admissionregistration.k8s.io",
            "apiextensions.k8s.io",
            "apiregistration.k8s.io",
            "apps",
            "autoscaling",
            "batch",
            "certificates.k8s.io",
            "coordination.k8s.io",
            "discovery.k8s.io",
            "events.k8s.io",
            "flowcontrol.apiserver.k8s.io",
            "networking.k8s.io",
            "node.k8s.io",
            "policy",
            "rbac.authorization.k8s.io",
            "scheduling.k8s.io",
            "storage.k8s.io",
        ];
        assert_eq!(Vec::from_iter(groups), expected);
        let others: Vec<_> =
            BUILT_IN.iter().filter(|it| it.version != "v1").map(|it| (&*it.version, &*it.kind)).collect();
        assert_eq!(others, [("v2", "HorizontalPodAutoscaler")]);
    }

    #[test]
    fn plurals_and_scopes_are_those_of_kubernetes() {
        for (group, kind, plural, namespaced) in [
            ("", "Endpoints", "endpoints", true),
            ("", "Namespace", "namespaces", false),
            ("networking.k8s.io", "Ingress", "ingresses", true),
            ("networking.k8s.io", "NetworkPolicy", "networkpolicies", true),
            ("rbac.authorization.k8s.io", "ClusterRole", "clusterroles", false),
            ("storage.k8s.io", "CSIStorageCapacity", "csistoragecapacities", true),
            ("scheduling.k8s.io", "PriorityClass", "priorityclasses", false),
        ] {
            let found = find(group, "v1", kind).unwrap();
            assert_eq!((&*found.plural, found.namespaced), (plural, namespaced), "{kind}");
        }
        assert_eq!(find("", "v1", "Binding"), None, "a request, not an object");
        assert_eq!(find("apps", "v1beta1", "Deployment"), None);
        assert_eq!(of_kind("autoscaling", "HorizontalPodAutoscaler").next().unwrap().version, "v2");
        assert!(has_group("") && has_group("apps") && !has_group("operator.kyma-project.io"));
    }
}
