//! Ownership of the shards by Leases in KCP: each shard has at most one holder at a time, among all replicas.
//!
//! `ownership` decides purely on the observed Leases.
//!
//! | Lease | holder | renewed |
//! |---|---|---|
//! | `tidewatch-replica-0` … `-7` | one replica each | by it, every third of the duration |
//! | `tidewatch-shard-00` … | the replica that owns the shard | never: it lasts as long as the membership of its holder |
//! | that of the unsharded receiver | all sharded replicas together, with the number of shards as annotation | by the first that sees it older than a third of the duration |
//!
//! With 15 s, three replicas and 24 shards that is 0.6 writes a second for the memberships and 0.2 to 0.6 for the Lease of
//! the unsharded receiver, whatever the number of shards, and one watch per replica that delivers as many events. Single
//! renewals of the shards would be 4.8 more.

pub mod names;
mod ownership;
mod record;
