//! Permissions of the receiver's account in KCP: one table, from which the deployment's Role is generated. The test bed
//! grants that Role, so the tests prove these permissions sufficient.
//!
//! All of them are in the receiver's own namespace, except for [`ca_rules`]. `--admin-auth` also needs the ClusterRole `system:auth-delegator`.

use k8s_openapi::api::{coordination::v1::Lease, rbac::v1::PolicyRule};
use tidewatch_api::{
    leases,
    names::{GROUP, PAUSE, RELEASES, ROLLOUTS},
    shard::ShardCount,
};
use tidewatch_gateway::enrolment;
use tidewatch_installer::upgrade;
use tidewatch_trust::CA_SECRET;

/// Verbs of a watched cache.
const LIST_WATCH: &[&str] = &["list", "watch"];

/// Rules of every receiver, in its own namespace.
pub fn rules() -> Vec<PolicyRule> {
    let mut rules = vec![
        // Writes finalizer, labels and annotations.
        rule(GROUP, &["kymas"], &[], &["get", "list", "watch", "patch"]),
        rule(GROUP, &["kymas/status", "manifests/status", "watchers/status"], &[], &["patch"]),
        rule(GROUP, &["moduletemplates"], &[], LIST_WATCH),
        // Sets and removes the finalizer of mandatory modules.
        rule(GROUP, &["modulereleasemetas"], &[], &["list", "watch", "patch"]),
        // Removes lifecycle-manager's finalizer from deleted Watchers.
        rule(GROUP, &["watchers"], &[], &["list", "watch", "patch"]),
        rule(
            GROUP,
            &["manifests"],
            &[],
            // Server-side apply of an object that does not exist needs both create and patch.
            &["list", "watch", "create", "update", "patch", "delete"],
        ),
        // Access Secrets have arbitrary names.
        rule("", &["secrets"], &[], LIST_WATCH),
        // No right to create: it would include Secrets with tokens of other accounts.
        rule("", &["secrets"], &[CA_SECRET], &["get", "update"]),
        rule("", &["configmaps"], &[PAUSE, enrolment::CONFIG_MAP], LIST_WATCH),
        // Persists the accepted releases of the catalog.
        rule("", &["configmaps"], &[RELEASES], &["list", "watch", "patch"]),
        // For the ConfigMaps of the accepted releases, of the agents' upgrade and of the module rollouts. Create cannot be
        // restricted by name.
        rule("", &["configmaps"], &[], &["create"]),
        rule("", &["configmaps"], &[upgrade::CONFIG_MAP, ROLLOUTS], &["list", "watch", "update"]),
        rule("events.k8s.io", &["events"], &[], &["create", "patch"]),
    ];
    // More shards need other rules.
    rules.extend(leases::rules(ShardCount::default()));
    rules
}

/// The Leases that an installation contains, in the receiver's namespace: it has no right to create any.
pub fn leases(namespace: &str) -> impl Iterator<Item = Lease> {
    leases::objects(namespace, ShardCount::default())
}

/// Rules in the namespace of the CA, if `--ca-namespace` names one.
pub fn ca_rules() -> Vec<PolicyRule> {
    vec![rule("", &["secrets"], &[CA_SECRET], &["get", "list", "watch", "update"])]
}

/// Additional rules of a receiver whose certificates cert-manager issues (`--issuer cert-manager:…`).
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
