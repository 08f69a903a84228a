//! Metrics of the shards.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_kit::{
    metric_set,
    metrics::{OutcomeLabel, ReasonLabel},
};

metric_set! {
    /// Metrics of the shards of this replica; clones share them.
    #[derive(Debug)]
    pub struct Metrics {
        /// Number of shards into which this replica divides the runtimes.
        pub(super) shards: Gauge = "shards",
        /// Shards that this replica holds.
        pub(super) held: Gauge = "shards_held",
        /// 1 while this replica holds the fleet role, and so runs the tasks of the whole fleet.
        pub(super) fleet_role: Gauge = "fleet_role_held",
        /// Shards that this replica wants, the fleet role included: all shards divided by the live replicas.
        pub(super) wanted: Gauge = "shards_wanted",
        /// Shards that this replica acquired.
        pub(super) acquired: Counter = "shards_acquired",
        /// Shards that this replica no longer holds, by reason: handed-over, hand-over-timeout, expired, or taken.
        pub(super) ended: Family<ReasonLabel, Counter> = "shards_ended",
        /// 1 while this replica claims no shard, by reason: standby, other-count, no-membership, lease-missing (also while only
        /// the Lease of some shard is missing), or unconfirmed.
        pub(super) refused: Family<ReasonLabel, Gauge> = "shards_refused",
        /// Writes of the Leases of shards and memberships, by outcome: written, conflict (another
        /// writer was first), or failed.
        pub(super) writes: Family<OutcomeLabel, Counter> = "shard_lease_writes",
    }
}
