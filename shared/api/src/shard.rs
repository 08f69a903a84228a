//! Shards: fixed parts of the fleet, each owned by one replica at a time.

use std::{fmt, num::NonZeroU16, str::FromStr};

use aws_lc_rs::digest;
use thiserror::Error;

use crate::identity::RuntimeId;

/// Number of shards, the same in all replicas. From 1 to [`ShardCount::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShardCount(NonZeroU16);

/// A number of shards out of range.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("expected a number of shards from 1 to {}", ShardCount::MAX)]
pub struct ShardCountError;

/// One shard, by its number from 0. Only [`ShardCount`] makes them, so that each is below the number of shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId(u16);

impl ShardCount {
    /// Most shards: each has a Lease that all replicas observe.
    pub const MAX: u16 = 256;
    /// A single shard.
    pub const ONE: Self = Self(NonZeroU16::MIN);

    /// Checks a number of shards.
    ///
    /// # Errors
    /// The number is 0 or above [`Self::MAX`].
    pub fn new(count: u16) -> Result<Self, ShardCountError> {
        NonZeroU16::new(count).filter(|count| count.get() <= Self::MAX).map(Self).ok_or(ShardCountError)
    }

    /// The number.
    pub fn get(self) -> u16 {
        self.0.get()
    }

    /// All shards in order.
    pub fn shards(self) -> impl DoubleEndedIterator<Item = ShardId> + ExactSizeIterator {
        (0..self.get()).map(ShardId)
    }

    /// Returns the shard of this number, if there is one.
    pub fn shard(self, number: u16) -> Option<ShardId> {
        (number < self.get()).then_some(ShardId(number))
    }

    /// Shard of a runtime.
    pub fn of_runtime(self, runtime: &RuntimeId) -> ShardId {
        self.of(b"runtime/", runtime.as_str())
    }

    /// Shard of a Kyma without a runtime id, by the uid of the object.
    pub fn of_kyma(self, uid: &str) -> ShardId {
        self.of(b"kyma/", uid)
    }

    /// Stable over processes, versions and architectures, since replicas of two versions must agree.
    fn of(self, kind: &[u8], name: &str) -> ShardId {
        let mut hash = digest::Context::new(&digest::SHA256);
        hash.update(kind);
        hash.update(name.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.finish().as_ref()[..8]);
        let shard = u64::from_be_bytes(first) % u64::from(self.get());
        ShardId(u16::try_from(shard).unwrap_or_default())
    }
}

impl Default for ShardCount {
    /// 24 shards, which 2, 3, 4, 6 and 8 replicas share evenly.
    fn default() -> Self {
        Self::new(24).unwrap_or(Self::ONE)
    }
}

impl FromStr for ShardCount {
    type Err = ShardCountError;

    fn from_str(text: &str) -> Result<Self, ShardCountError> {
        text.parse().map_err(|_| ShardCountError).and_then(Self::new)
    }
}

impl fmt::Display for ShardCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl ShardId {
    /// The number, from 0.
    pub fn number(self) -> u16 {
        self.0
    }

    /// The number as an index.
    pub fn index(self) -> usize {
        self.0.into()
    }
}

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(count: u16) -> ShardCount {
        ShardCount::new(count).unwrap()
    }

    #[test]
    fn number_of_shards_is_limited() {
        for refused in ["0", "257", "65536", "-1", "", "many"] {
            assert_eq!(refused.parse::<ShardCount>(), Err(ShardCountError), "{refused}");
        }
        assert_eq!("1".parse(), Ok(ShardCount::ONE));
        assert_eq!("24".parse(), Ok(ShardCount::default()));
        assert_eq!("256".parse(), Ok(count(ShardCount::MAX)));
        assert_eq!(count(3).shards().map(ShardId::number).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((count(3).shard(2).map(ShardId::index), count(3).shard(3)), (Some(2), None));
    }

    #[test]
    fn shards_are_the_same_in_every_version() {
        let runtime = "f1c2d3e4-0000-4000-8000-000000000001".parse().unwrap();
        let found = [1, 24, 256].map(|n| (count(n).of_runtime(&runtime).number(), count(n).of_kyma("a-uid").number()));
        assert_eq!(found, [(0, 0), (18, 15), (178, 119)]);
    }

    #[test]
    fn runtimes_are_spread_evenly() {
        let count = count(24);
        let mut runtimes = vec![0_u32; 24];
        for n in 0..24_000 {
            runtimes[count.of_runtime(&format!("runtime-{n}").parse().unwrap()).index()] += 1;
        }
        assert!(runtimes.iter().all(|n| (850..1_150).contains(n)), "{runtimes:?}");
    }
}
