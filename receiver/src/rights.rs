//! What the receiver's account may do in KCP: one table, from which the Role of its deployment is generated and which the test bed
//! grants, so that whatever the tests see work has these rights and no others.
//!
//! All of it is in the receiver's own namespace. Beyond that, `--admin-auth` needs the ClusterRole `system:auth-delegator`.

use k8s_openapi::api::rbac::v1::PolicyRule;
use tidewatch_shared::names::{GROUP, RELEASES};

use crate::{base::pause, controllers::installer::upgrade, ingress::enrolment, pki::CA_SECRET};

/// Reads of a cache.
const FOLLOW: &[&str] = &["list", "watch"];

/// What every receiver needs, in its own namespace.
#[must_use]
pub fn rules() -> Vec<PolicyRule> {
    vec![
        // Finalizer, labels and notes of ours.
        rule(GROUP, &["kymas"], &[], &["get", "list", "watch", "patch"]),
        rule(GROUP, &["kymas/status", "watchers/status"], &[], &["patch"]),
        rule(GROUP, &["moduletemplates", "modulereleasemetas"], &[], FOLLOW),
        // One that is deleted is rid of the incumbent's finalizer.
        rule(GROUP, &["watchers"], &[], &["list", "watch", "patch"]),
        rule(
            GROUP,
            &["manifests"],
            &[],
            // Server-side apply of what is not there asks for both create and patch.
            &["list", "watch", "create", "update", "patch", "delete"],
        ),
        // Access Secrets come and go under any name.
        rule("", &["secrets"], &[], FOLLOW),
        // Create cannot be limited by name.
        rule("", &["secrets"], &[], &["create"]),
        rule("", &["secrets"], &[CA_SECRET], &["get", "update"]),
        rule("", &["configmaps"], &[pause::CONFIG_MAP, enrolment::CONFIG_MAP], FOLLOW),
        // What is accepted of the catalog is written down.
        rule("", &["configmaps"], &[RELEASES], &["list", "watch", "patch"]),
        // That, and how far an upgrade of agents is.
        rule("", &["configmaps"], &[], &["create"]),
        rule("", &["configmaps"], &[upgrade::CONFIG_MAP], &["list", "watch", "update"]),
        // Under any name, because that is a flag.
        rule("coordination.k8s.io", &["leases"], &[], &["get", "create", "update"]),
        rule("events.k8s.io", &["events"], &[], &["create", "patch"]),
    ]
}

/// What a receiver needs besides when cert-manager issues for it (`--issuer cert-manager:…`).
#[must_use]
pub fn cert_manager_rules() -> Vec<PolicyRule> {
    vec![rule("cert-manager.io", &["certificaterequests"], &[], &["get", "create", "delete"])]
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
