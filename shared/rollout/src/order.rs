//! Order of the runtimes in a change, and the ring that follows another.

use aws_lc_rs::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use super::{Rings, Share};

/// A ring of a change: all runtimes up to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ring {
    /// Number in the list of shares, from 1.
    pub number: u32,
    /// Highest [`rank`] in the ring. It is stored, so that added or deleted runtimes do not move others.
    #[serde(with = "hex_rank")]
    pub through: u64,
}

impl Ring {
    /// Returns whether the ring has all runtimes.
    pub const fn is_last(self) -> bool {
        self.through == u64::MAX
    }
}

/// Runtimes by their ranks. The order of the whole fleet is the merge of those of its parts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Order {
    /// Ascending.
    #[serde(with = "packed_ranks")]
    ranks: Vec<u64>,
    /// Lowest rank of a runtime that can prove the change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    first_evidence: Option<u64>,
}

/// Ranks in JSON: 8 bytes each, in base64, since there can be very many.
mod packed_ranks {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(ranks: &[u64], serializer: S) -> Result<S::Ok, S::Error> {
        let bytes: Vec<u8> = ranks.iter().flat_map(|rank| rank.to_be_bytes()).collect();
        serializer.serialize_str(&STANDARD.encode(bytes))
    }

    /// Sorts the ranks, whatever their order is.
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
        let bytes = STANDARD.decode(String::deserialize(deserializer)?).map_err(D::Error::custom)?;
        let (ranks, rest) = bytes.as_chunks();
        if !rest.is_empty() {
            return Err(D::Error::custom("expected 8 bytes for each rank"));
        }
        let mut ranks: Vec<_> = ranks.iter().map(|rank| u64::from_be_bytes(*rank)).collect();
        ranks.sort_unstable();
        Ok(ranks)
    }
}

/// A rank in JSON: a number of 64 bits is written in hexadecimal, as text.
mod hex_rank {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
    pub(super) fn serialize<S: Serializer>(rank: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{rank:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}

/// A runtime in the order of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// See [`rank`].
    pub rank: u64,
    /// Returns whether the runtime can prove the change.
    pub is_evidence: bool,
}

/// Position of a runtime in the order of a change: equal in every process, different for every target, and effectively
/// random.
pub fn rank(target: &str, runtime: &str) -> u64 {
    let text = [target.as_bytes(), b"\0", runtime.as_bytes()].concat();
    let mut first = [0; 8];
    first.copy_from_slice(&digest(&SHA256, &text).as_ref()[..8]);
    u64::from_be_bytes(first)
}

impl Order {
    /// Adds the runtimes of another part of the fleet.
    pub fn merge(&mut self, other: Self) {
        self.ranks.extend(other.ranks);
        // Both parts are sorted, which a stable sort makes use of.
        self.ranks.sort();
        self.first_evidence = self.first_evidence.into_iter().chain(other.first_evidence).min();
    }

    /// Returns the first ring from `number` on that has a further runtime.
    pub fn next_ring(&self, number: u32, before: u64, rings: &Rings) -> Option<Ring> {
        rings.from(number).find_map(|(number, share)| {
            let further = || self.rank_through(share).filter(|through| *through > before);
            let through = if share.is_whole() { Some(u64::MAX) } else { further() };
            Some(Ring { number, through: through? })
        })
    }

    /// Returns whether a runtime can prove the change.
    pub const fn has_evidence(&self) -> bool {
        self.first_evidence.is_some()
    }

    /// Returns a ring with further runtimes of its share, up to the first runtime that is evidence.
    pub fn extended(&self, ring: Ring, rings: &Rings) -> Option<Ring> {
        let (_, share) = rings.from(ring.number).next()?;
        let through = self.rank_through(share).filter(|through| *through > ring.through)?;
        Some(Ring { through, ..ring })
    }

    /// Returns the highest rank of a share, extended up to the first runtime that is evidence, if there is one.
    pub fn rank_through(&self, share: Share) -> Option<u64> {
        let count = self.ranks.len();
        let last = *self.ranks.get(share.floor_of(count).min(count).checked_sub(1)?)?;
        Some(self.first_evidence.map_or(last, |first| last.max(first)))
    }
}

impl FromIterator<Candidate> for Order {
    fn from_iter<I: IntoIterator<Item = Candidate>>(candidates: I) -> Self {
        let mut first_evidence = None;
        let add = |Candidate { rank, is_evidence }| {
            first_evidence = first_evidence.into_iter().chain(is_evidence.then_some(rank)).min();
            rank
        };
        let mut ranks: Vec<_> = candidates.into_iter().map(add).collect();
        ranks.sort_unstable();
        Self { ranks, first_evidence }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(evidence: &[usize]) -> Order {
        (0..200).rev().map(|n| Candidate { rank: n, is_evidence: evidence.contains(&(n as usize)) }).collect()
    }

    #[test]
    fn ring_reaches_its_share_and_the_first_evidence() {
        let share = |text: &str| text.parse::<Share>().unwrap();
        assert_eq!(order(&[0]).rank_through(share("1%")), Some(1));
        assert_eq!(order(&[7, 9]).rank_through(share("1%")), Some(7));
        assert_eq!(order(&[]).rank_through(share("1%")), Some(1), "no runtime is evidence");
        assert_eq!(order(&[3]).rank_through(share("100%")), Some(199));
        assert_eq!(Order::default().rank_through(share("1%")), None);
    }

    #[test]
    fn next_ring_has_further_runtimes() {
        let rings: Rings = "1%,2%,50%,100%".parse().unwrap();
        let next = |number, before, evidence: &[usize]| order(evidence).next_ring(number, before, &rings);
        assert_eq!(next(1, 0, &[0]), Some(Ring { number: 1, through: 1 }));
        assert_eq!(next(2, 7, &[7]), Some(Ring { number: 3, through: 99 }), "2% are within the ring before");
        assert_eq!(next(4, 99, &[0]), Some(Ring { number: 4, through: u64::MAX }));
        assert_eq!(next(9, 99, &[0]), Some(Ring { number: 4, through: u64::MAX }), "the list has become shorter");
    }

    #[test]
    fn order_of_the_fleet_is_the_merge_of_its_parts_in_any_form() {
        let candidate = |n: u64| Candidate { rank: n.wrapping_mul(0x9e37_79b9_7f4a_7c15), is_evidence: n % 7 == 3 };
        let whole: Order = (0..100).map(candidate).collect();
        for parts in [1, 2, 3, 99] {
            let parts = (0..parts).map(|part| (0..100).filter(|n| n % parts == part).map(candidate).collect::<Order>());
            let mut merged = Order::default();
            for part in parts {
                let json = serde_json::to_string(&part).unwrap();
                merged.merge(serde_json::from_str(&json).unwrap());
            }
            assert_eq!(merged, whole);
        }
        let parse = |ranks: &str| serde_json::from_value::<Order>(serde_json::json!({"ranks": ranks}));
        assert_eq!(parse("AAAAAAAAAAI=").unwrap().rank_through("1%".parse().unwrap()), Some(2));
        assert_eq!(parse("AAAAAAAAAAIAAAAAAAAAAQ==").unwrap().ranks, [1, 2], "unsorted");
        assert!(parse("AAAAAAAAAA==").is_err() && parse("?").is_err());
    }

    #[test]
    fn order_depends_on_the_target_and_the_runtime_only() {
        assert_eq!(rank("b", "r-1"), rank("b", "r-1"));
        assert_ne!(rank("b", "r-1"), rank("c", "r-1"), "each target has another order");
        assert_ne!(rank("b", "r-1"), rank("b", "r-2"));
    }
}
