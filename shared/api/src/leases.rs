//! Leases of the shards: names, annotations, and those that an installation contains.

use std::fmt;

use k8s_openapi::{
    api::{coordination::v1::Lease, rbac::v1::PolicyRule},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use crate::shard::{ShardCount, ShardId};

/// Replicas that can hold shards at the same time: each has one membership Lease.
pub const MAX_REPLICAS: u8 = 8;

/// Lease of the tasks that one replica runs for all shards.
const FLEET: &str = "tidewatch-fleet";

/// Annotation of a membership Lease: the number of shards, which its replica shares with others of the same number. A replica
/// without it shares them with no other one.
pub const SHARDS: &str = "operator.kyma-project.io/tidewatch-shards";
/// Annotation of a membership Lease: the name of its replica.
pub const REPLICA: &str = "operator.kyma-project.io/tidewatch-replica";
/// Annotation of a membership Lease: host and port at which its replica accepts relayed requests.
pub const RELAY_ADDRESS: &str = "operator.kyma-project.io/tidewatch-relay-address";
/// Annotation of a membership Lease whose replica hands its shards over and claims none, because it stops.
pub const LEAVING: &str = "operator.kyma-project.io/tidewatch-leaving";

/// What a Lease stands for, and one replica holds: a shard, or the fleet role. Sorted as the shards, the fleet role last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// A shard.
    Shard(ShardId),
    /// The role of the replica that runs the tasks of the whole fleet.
    Fleet,
}

impl Unit {
    /// All units: the shards and the fleet role.
    pub fn all(shards: ShardCount) -> impl Iterator<Item = Self> {
        shards.shards().map(Self::Shard).chain([Self::Fleet])
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard(shard) => write!(f, "shard {shard}"),
            Self::Fleet => f.write_str("fleet role"),
        }
    }
}

/// Name of the Lease of a shard or of the fleet role.
pub fn unit(unit: Unit) -> String {
    match unit {
        Unit::Shard(shard) => format!("tidewatch-shard-{:02}", shard.number()),
        Unit::Fleet => FLEET.to_owned(),
    }
}

/// Name of a membership Lease, by its number below [`MAX_REPLICAS`].
pub fn member(number: u8) -> String {
    format!("tidewatch-replica-{number}")
}

/// Names of all Leases that a receiver reads and writes.
fn names(shards: ShardCount) -> impl Iterator<Item = String> {
    (0..MAX_REPLICAS).map(member).chain(Unit::all(shards).map(unit))
}

/// The Leases that an installation contains, without holders: the receiver creates none, because a right to create
/// objects cannot be limited to names. They have no spec, so that applying them anew changes no holder.
pub fn objects(namespace: &str, shards: ShardCount) -> impl Iterator<Item = Lease> {
    names(shards).map(move |name| Lease {
        metadata: ObjectMeta { namespace: Some(namespace.to_owned()), name: Some(name), ..ObjectMeta::default() },
        spec: None,
    })
}

/// Rights of a replica to these Leases, in its own namespace. Reading is not limited to names: one list and watch serves
/// all Leases, and a limit to names would need one for each.
pub fn rules(shards: ShardCount) -> Vec<PolicyRule> {
    let rule = |names: Option<Vec<String>>, verbs: [&str; 2]| PolicyRule {
        api_groups: Some(vec!["coordination.k8s.io".to_owned()]),
        resources: Some(vec!["leases".to_owned()]),
        resource_names: names,
        verbs: verbs.map(str::to_owned).to_vec(),
        ..PolicyRule::default()
    };
    vec![rule(None, ["list", "watch"]), rule(Some(names(shards).collect()), ["get", "update"])]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lease_has_a_name_of_its_own_and_no_holder() {
        let count = ShardCount::new(101).unwrap();
        let names: Vec<_> = names(count).collect();
        assert_eq!(names[..2], ["tidewatch-replica-0", "tidewatch-replica-1"]);
        assert_eq!(names[7..9], ["tidewatch-replica-7", "tidewatch-shard-00"]);
        assert_eq!((names.len(), &*names[108], &*names[109]), (110, "tidewatch-shard-100", "tidewatch-fleet"));
        let unique: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
        let leases: Vec<_> = objects("kcp-system", count).collect();
        assert!(leases.iter().all(|lease| lease.spec.is_none() && lease.metadata.annotations.is_none()));
        assert_eq!(leases.len(), names.len());
        let rules = rules(count);
        let writes = rules.iter().filter(|rule| rule.verbs.iter().any(|verb| !["list", "watch"].contains(&&**verb)));
        assert!(writes.map(|rule| rule.resource_names.as_ref().map(Vec::len)).eq([Some(110)]));
    }
}
