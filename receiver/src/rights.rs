//! What the receiver's account may do in KCP: one table, from which the Role of its deployment is generated and which the test bed
//! grants, so that whatever the tests see work has these rights and no others.
//!
//! All of it is in the receiver's own namespace. Beyond that, `--admin-auth` needs the ClusterRole `system:auth-delegator`.

use k8s_openapi::api::rbac::v1::PolicyRule;
use tidewatch_shared::names::GROUP;

/// Reads of a cache.
const READ: &[&str] = &["get", "list", "watch"];
/// The Secret that holds the built-in CA.
const CA_SECRET: &str = "tidewatch-ca";

/// What every receiver needs, in its own namespace.
#[must_use]
pub fn rules() -> Vec<PolicyRule> {
    vec![
        // Finalizer, labels and notes of ours.
        rule(GROUP, &["kymas"], &[], &["get", "list", "watch", "update", "patch"]),
        rule(GROUP, &["kymas/status", "watchers/status"], &[], &["get", "update", "patch"]),
        rule(GROUP, &["moduletemplates", "modulereleasemetas", "watchers"], &[], READ),
        rule(
            GROUP,
            &["manifests"],
            &[],
            &["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"],
        ),
        // Access Secrets come and go under any name.
        rule("", &["secrets"], &[], READ),
        // Create cannot be limited by name.
        rule("", &["secrets"], &[], &["create"]),
        rule("", &["secrets"], &[CA_SECRET], &["update", "patch"]),
        rule("", &["configmaps"], &["tidewatch", "tidewatch-revocations"], READ),
        rule("coordination.k8s.io", &["leases"], &[], &["get", "create", "update"]),
        rule("events.k8s.io", &["events"], &[], &["create", "patch"]),
    ]
}

/// What a receiver needs besides when cert-manager issues for it (`--issuer cert-manager:…`).
#[must_use]
pub fn cert_manager_rules() -> Vec<PolicyRule> {
    vec![rule("cert-manager.io", &["certificaterequests"], &[], &["get", "list", "watch", "create", "delete"])]
}

fn rule(group: &str, resources: &[&str], names: &[&str], verbs: &[&str]) -> PolicyRule {
    let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(owned(resources)),
        resource_names: (!names.is_empty()).then(|| owned(names)),
        verbs: owned(verbs),
        ..PolicyRule::default()
    }
}
