//! Kinds that Kubernetes no longer serves in a version (Kubernetes, *Deprecated API Migration Guide*).

/// A kind in a version that is no longer served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removed {
    /// First release without it.
    pub since: &'static str,
    /// Group and version that replace it.
    pub successor: Option<&'static str>,
}

/// Group, version, kinds (all if empty), first release without them, and successor.
type Row = (&'static str, &'static str, &'static [&'static str], &'static str, Option<&'static str>);

const ROWS: &[Row] = &[
    ("extensions", "v1beta1", &["DaemonSet", "Deployment", "ReplicaSet"], "1.16", Some("apps/v1")),
    ("extensions", "v1beta1", &["NetworkPolicy"], "1.16", Some("networking.k8s.io/v1")),
    ("extensions", "v1beta1", &["PodSecurityPolicy"], "1.16", None),
    ("extensions", "v1beta1", &["Ingress"], "1.22", Some("networking.k8s.io/v1")),
    ("apps", "v1beta1", &[], "1.16", Some("apps/v1")),
    ("apps", "v1beta2", &[], "1.16", Some("apps/v1")),
    (
        "admissionregistration.k8s.io",
        "v1beta1",
        &["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"],
        "1.22",
        Some("admissionregistration.k8s.io/v1"),
    ),
    ("apiextensions.k8s.io", "v1beta1", &[], "1.22", Some("apiextensions.k8s.io/v1")),
    ("apiregistration.k8s.io", "v1beta1", &[], "1.22", Some("apiregistration.k8s.io/v1")),
    ("certificates.k8s.io", "v1beta1", &["CertificateSigningRequest"], "1.22", Some("certificates.k8s.io/v1")),
    ("coordination.k8s.io", "v1beta1", &["Lease"], "1.22", Some("coordination.k8s.io/v1")),
    ("networking.k8s.io", "v1beta1", &["Ingress", "IngressClass"], "1.22", Some("networking.k8s.io/v1")),
    ("rbac.authorization.k8s.io", "v1alpha1", &[], "1.22", Some("rbac.authorization.k8s.io/v1")),
    ("rbac.authorization.k8s.io", "v1beta1", &[], "1.22", Some("rbac.authorization.k8s.io/v1")),
    ("scheduling.k8s.io", "v1beta1", &["PriorityClass"], "1.22", Some("scheduling.k8s.io/v1")),
    (
        "storage.k8s.io",
        "v1beta1",
        &["CSIDriver", "CSINode", "StorageClass", "VolumeAttachment"],
        "1.22",
        Some("storage.k8s.io/v1"),
    ),
    ("batch", "v1beta1", &["CronJob"], "1.25", Some("batch/v1")),
    ("discovery.k8s.io", "v1beta1", &[], "1.25", Some("discovery.k8s.io/v1")),
    ("events.k8s.io", "v1beta1", &[], "1.25", Some("events.k8s.io/v1")),
    ("autoscaling", "v2beta1", &[], "1.25", Some("autoscaling/v2")),
    ("policy", "v1beta1", &["PodDisruptionBudget"], "1.25", Some("policy/v1")),
    ("policy", "v1beta1", &["PodSecurityPolicy"], "1.25", None),
    ("node.k8s.io", "v1beta1", &[], "1.25", Some("node.k8s.io/v1")),
    ("autoscaling", "v2beta2", &[], "1.26", Some("autoscaling/v2")),
    ("flowcontrol.apiserver.k8s.io", "v1beta1", &[], "1.26", Some("flowcontrol.apiserver.k8s.io/v1")),
    ("storage.k8s.io", "v1beta1", &["CSIStorageCapacity"], "1.27", Some("storage.k8s.io/v1")),
    ("flowcontrol.apiserver.k8s.io", "v1beta2", &[], "1.29", Some("flowcontrol.apiserver.k8s.io/v1")),
    ("flowcontrol.apiserver.k8s.io", "v1beta3", &[], "1.32", Some("flowcontrol.apiserver.k8s.io/v1")),
];

/// The removal of a kind in a version; `None` if there was none.
pub fn removed(group: &str, version: &str, kind: &str) -> Option<Removed> {
    let is_it = |(of_group, of_version, kinds, ..): &&Row| {
        *of_group == group && *of_version == version && (kinds.is_empty() || kinds.contains(&kind))
    };
    ROWS.iter().find(is_it).map(|(.., since, successor)| Removed { since, successor: *successor })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::{is_of_kubernetes, serves};

    #[test]
    fn no_removed_kind_is_served_and_every_successor_is() {
        for (group, version, kinds, since, successor) in ROWS {
            assert!(is_of_kubernetes(group), "{group}");
            for kind in *kinds {
                assert!(!serves(group, version, kind), "{group}/{version} {kind}");
                let expected = Removed { since, successor: *successor };
                assert_eq!(removed(group, version, kind), Some(expected), "one row only: {group}/{version} {kind}");
                let served =
                    successor.and_then(|it| it.split_once('/')).map(|(group, version)| serves(group, version, kind));
                assert!(served.unwrap_or(true), "{kind}");
            }
        }
        assert_eq!(removed("apps", "v1", "Deployment"), None);
        assert_eq!(removed("storage.k8s.io", "v1beta1", "Other"), None);
    }
}
