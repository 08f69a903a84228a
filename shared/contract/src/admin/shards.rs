//! Report of the shards.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Receiver;

/// Report of the shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardsReport {
    /// Receiver that made the report.
    pub receiver: Receiver,
    /// Holders; `None` if this receiver is not active.
    pub ownership: Option<Ownership>,
}

/// Holders of the shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ownership {
    /// Holder of the role that runs the fleet-wide tasks; `None` if it has none.
    pub fleet: Option<HolderView>,
    /// Shards in order.
    pub shards: Vec<ShardView>,
}

/// One shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardView {
    /// Its number.
    pub shard: u16,
    /// Its holder; `None` if it has none.
    pub holder: Option<HolderView>,
    /// Number of runtimes.
    pub runtimes: usize,
}

/// Holder of a shard or of the fleet role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HolderView {
    /// Name of the replica.
    pub name: String,
    /// Time since the last renewal that the reporting replica observed, in seconds.
    pub renewed_seconds: u64,
    /// Time of the last move, by the holder's clock, in RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<Timestamp>,
}

impl Ownership {
    /// Shards without a holder.
    pub fn unheld(&self) -> impl Iterator<Item = u16> {
        self.shards.iter().filter(|shard| shard.holder.is_none()).map(|shard| shard.shard)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn report_names_each_holder_and_the_shards_without_one() {
        let moved = Some("2026-11-25T20:00:00Z".parse().unwrap());
        let held = Some(HolderView { name: "pod-1".to_owned(), renewed_seconds: 3, moved });
        let shards =
            vec![ShardView { shard: 0, holder: held, runtimes: 5 }, ShardView { shard: 1, holder: None, runtimes: 6 }];
        let ownership = Ownership { fleet: None, shards };
        let holder = json!({"name": "pod-1", "renewedSeconds": 3, "moved": "2026-11-25T20:00:00Z"});
        let expected = json!({"fleet": null, "shards": [
            {"shard": 0, "holder": holder, "runtimes": 5}, {"shard": 1, "holder": null, "runtimes": 6},
        ]});
        assert_eq!(json!(ownership), expected);
        assert_eq!(from_value::<Ownership>(expected).unwrap(), ownership);
        assert_eq!(ownership.unheld().collect::<Vec<_>>(), [1]);
    }
}
