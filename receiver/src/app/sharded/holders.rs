//! The relay's view of the holders of the shards.

use std::sync::Arc;

use tidewatch_api::{identity::RuntimeId, shard::ShardCount};
use tidewatch_fleet::shards::{Holder, HoldersHandle};
use tidewatch_gateway::relay::{self, Holders as _, IsFleetHolder, Replica};

/// Holders of the shards, as the elector published them.
#[derive(Clone)]
pub struct ShardHolders {
    pub(in crate::app) holders: HoldersHandle,
    pub(in crate::app) shards: ShardCount,
}

impl ShardHolders {
    /// Finds the shards of the runtimes in the holders that an elector publishes.
    pub fn new(holders: HoldersHandle, shards: ShardCount) -> Self {
        Self { holders, shards }
    }

    /// True if each shard and the fleet role have a holder.
    pub(super) fn are_complete(&self) -> bool {
        self.holders.current().are_complete(self.shards)
    }

    /// Recognizes another replica that holds the fleet role.
    pub(in crate::app) fn is_fleet_holder(&self) -> IsFleetHolder {
        let holders = self.clone();
        Arc::new(move |replica| matches!(holders.fleet_holder(), relay::Holder::At(holder) if holder.name == *replica))
    }
}

impl relay::Holders for ShardHolders {
    fn shards(&self) -> ShardCount {
        self.shards
    }

    fn holder(&self, runtime: &RuntimeId) -> relay::Holder {
        place(self.holders.current().get(self.shards.of_runtime(runtime)))
    }

    fn fleet_holder(&self) -> relay::Holder {
        place(self.holders.current().fleet())
    }

    fn replicas(&self) -> Vec<Arc<Replica>> {
        let holders = self.holders.current();
        let units = self.shards.shards().filter_map(|shard| holders.get(shard)).chain(holders.fleet());
        let others = units.filter(|holder| !holder.is_own).filter_map(replica);
        others.fold(Vec::new(), |mut replicas, replica| {
            if !replicas.contains(&replica) {
                replicas.push(replica);
            }
            replicas
        })
    }
}

fn place(holder: Option<&Holder>) -> relay::Holder {
    match holder {
        Some(holder) if holder.is_own => relay::Holder::Here,
        Some(holder) => replica(holder).map_or(relay::Holder::Unknown, relay::Holder::At),
        None => relay::Holder::Unknown,
    }
}

/// The replica that a Lease names; `None` if its name or address is invalid.
fn replica(holder: &Holder) -> Option<Arc<Replica>> {
    let name = holder.name.parse().ok()?;
    let address = holder.relay_address.as_ref()?.parse().ok()?;
    Some(Arc::new(Replica { name, address }))
}

#[cfg(test)]
mod tests {
    use tidewatch_api::leases::Unit;
    use tokio::time::Instant;

    use super::*;

    const ADDRESS: &str = "127.0.0.1:9000";

    fn holder(name: &str, address: Option<&str>) -> Holder {
        let name = name.into();
        let relay_address = address.map(Into::into);
        Holder { name, relay_address, is_own: false, renewed: Instant::now(), moved: None }
    }

    fn own() -> Holder {
        Holder { is_own: true, ..holder("own", Some("127.0.0.1:8999")) }
    }

    fn at(name: &str, address: &str) -> Arc<Replica> {
        Arc::new(Replica { name: name.parse().unwrap(), address: address.parse().unwrap() })
    }

    /// Four shards and the fleet role, with these holders.
    fn holders(of: [Option<Holder>; 5]) -> ShardHolders {
        let shards = ShardCount::new(4).unwrap();
        let handle = HoldersHandle::fixed(shards, |unit| match unit {
            Unit::Shard(shard) => of[shard.index()].clone(),
            Unit::Fleet => of[4].clone(),
        });
        ShardHolders::new(handle, shards)
    }

    /// The first runtime of a shard.
    fn runtime(shard: usize) -> RuntimeId {
        let shards = ShardCount::new(4).unwrap();
        let mut runtimes = (0..).map(|n| format!("r-{n}").parse().unwrap());
        runtimes.find(|runtime| shards.of_runtime(runtime).index() == shard).unwrap()
    }

    #[test]
    fn requests_go_to_the_holder_of_the_shard_of_their_runtime() {
        let known = holders([Some(own()), Some(holder("b", Some(ADDRESS))), None, None, Some(own())]);
        let [here, there, nowhere] = [0, 1, 2].map(|shard| known.holder(&runtime(shard)));
        assert_eq!(here, relay::Holder::Here);
        assert_eq!(there, relay::Holder::At(at("b", ADDRESS)));
        assert_eq!(nowhere, relay::Holder::Unknown);
        assert_eq!(known.fleet_holder(), relay::Holder::Here);
        let unlisted = ShardHolders::new(HoldersHandle::default(), ShardCount::new(4).unwrap());
        assert_eq!(unlisted.holder(&runtime(0)), relay::Holder::Unknown, "the Leases are not listed yet");
        assert_eq!(unlisted.fleet_holder(), relay::Holder::Unknown);
    }

    #[test]
    fn fleet_holder_is_recognized_by_its_name() {
        let recognized = |fleet: Option<Holder>, name: &str| {
            holders([None, None, None, None, fleet]).is_fleet_holder()(&name.parse().unwrap())
        };
        let b = || Some(holder("b", Some(ADDRESS)));
        assert!(recognized(b(), "b"));
        assert!(!recognized(b(), "c") && !recognized(None, "b"));
        assert!(!recognized(Some(own()), "b"), "this replica took the role over");
    }

    /// Names and addresses are those that any writer of the Lease put there.
    #[test]
    fn holder_with_an_invalid_name_or_address_is_unknown() {
        let long = "a".repeat(254);
        let invalid = [
            ("", Some(ADDRESS)),
            ("not a name", Some(ADDRESS)),
            ("a/b", Some(ADDRESS)),
            (long.as_str(), Some(ADDRESS)),
            ("b", None),
            ("b", Some("")),
            ("b", Some("127.0.0.1")),
            ("b", Some("127.0.0.1:65536")),
            ("b", Some("host.example:9000")),
            ("b", Some("127.0.0.1:9000\n")),
        ];
        for (name, address) in invalid {
            let invalid = || Some(holder(name, address));
            let known = holders([invalid(), None, None, None, invalid()]);
            assert_eq!(known.holder(&runtime(0)), relay::Holder::Unknown, "{name} {address:?}");
            assert_eq!(known.fleet_holder(), relay::Holder::Unknown, "{name} {address:?}");
            assert_eq!(known.replicas(), [], "{name} {address:?}");
        }
        // This replica needs no connection to itself.
        let known = holders([Some(Holder { relay_address: None, ..own() }), None, None, None, None]);
        assert_eq!(known.holder(&runtime(0)), relay::Holder::Here);
    }

    #[test]
    fn replicas_are_named_once_without_this_one() {
        let b = || Some(holder("b", Some(ADDRESS)));
        let c = Some(holder("c", Some("127.0.0.1:9001")));
        let known = holders([b(), Some(own()), b(), None, c]);
        assert_eq!(known.replicas(), [at("b", ADDRESS), at("c", "127.0.0.1:9001")], "c holds the fleet role alone");
        assert_eq!(holders([Some(own()), None, None, None, Some(own())]).replicas(), []);
    }
}
