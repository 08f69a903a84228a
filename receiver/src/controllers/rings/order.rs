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
pub(in crate::controllers) struct Candidate {
    /// See [`rank`].
    pub(in crate::controllers) rank: u64,
    /// Returns whether the runtime can prove the change.
    pub(in crate::controllers) is_evidence: bool,
}

/// Position of a runtime in the order of a change: equal in every process, different for every target, and effectively
/// random.
pub(in crate::controllers) fn rank(target: &str, runtime: &str) -> u64 {
    let text = [target.as_bytes(), b"\0", runtime.as_bytes()].concat();
    let mut first = [0; 8];
    first.copy_from_slice(&digest(&SHA256, &text).as_ref()[..8]);
    u64::from_be_bytes(first)
}

/// Returns the first ring from `number` on that has a further runtime.
pub(in crate::controllers) fn next_ring(
    number: u32,
    before: u64,
    candidates: &[Candidate],
    rings: &Rings,
) -> Option<Ring> {
    rings.from(number).find_map(|(number, share)| {
        let further = || rank_through(share, candidates).filter(|through| *through > before);
        let through = if share.is_whole() { Some(u64::MAX) } else { further() };
        Some(Ring { number, through: through? })
    })
}

/// Returns the highest rank of a share, extended up to the first runtime that is evidence, if there is one.
pub(in crate::controllers) fn rank_through(share: Share, candidates: &[Candidate]) -> Option<u64> {
    let mut order = candidates.to_vec();
    order.sort_unstable_by_key(|candidate| candidate.rank);
    let last = share.floor_of(order.len()).min(order.len()).checked_sub(1)?;
    let first = order.iter().position(|candidate| candidate.is_evidence);
    order.get(first.map_or(last, |first| last.max(first))).map(|candidate| candidate.rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(evidence: &[usize]) -> Vec<Candidate> {
        (0..200).rev().map(|n| Candidate { rank: n, is_evidence: evidence.contains(&(n as usize)) }).collect()
    }

    #[test]
    fn ring_reaches_its_share_and_the_first_evidence() {
        let share = |text: &str| text.parse::<Share>().unwrap();
        assert_eq!(rank_through(share("1%"), &candidates(&[0])), Some(1));
        assert_eq!(rank_through(share("1%"), &candidates(&[7, 9])), Some(7));
        assert_eq!(rank_through(share("1%"), &candidates(&[])), Some(1), "no runtime is evidence");
        assert_eq!(rank_through(share("100%"), &candidates(&[3])), Some(199));
        assert_eq!(rank_through(share("1%"), &[]), None);
    }

    #[test]
    fn next_ring_has_further_runtimes() {
        let rings: Rings = "1%,2%,50%,100%".parse().unwrap();
        let next = |number, before, evidence: &[usize]| next_ring(number, before, &candidates(evidence), &rings);
        assert_eq!(next(1, 0, &[0]), Some(Ring { number: 1, through: 1 }));
        assert_eq!(next(2, 7, &[7]), Some(Ring { number: 3, through: 99 }), "2% are within the ring before");
        assert_eq!(next(4, 99, &[0]), Some(Ring { number: 4, through: u64::MAX }));
        assert_eq!(next(9, 99, &[0]), Some(Ring { number: 4, through: u64::MAX }), "the list has become shorter");
    }

    #[test]
    fn order_depends_on_the_target_and_the_runtime_only() {
        assert_eq!(rank("b", "r-1"), rank("b", "r-1"));
        assert_ne!(rank("b", "r-1"), rank("c", "r-1"), "each target has another order");
        assert_ne!(rank("b", "r-1"), rank("b", "r-2"));
    }
}
