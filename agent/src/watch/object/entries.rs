//! Maps and lists of metadata, of which only a hash is kept: a user may create labels by the hundred thousand, and each
//! needs twenty times its bytes.

use std::{
    fmt,
    hash::{BuildHasher as _, Hash, RandomState},
    marker::PhantomData,
    sync::LazyLock,
};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};

/// Keys of all hashes of this process. They are random, so that no author of objects can construct a collision.
static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// A hash that differs between processes.
pub(super) fn hash(value: impl Hash) -> u64 {
    KEYS.hash_one(value)
}

/// Hash of the entries of a map, in any order, or of a list. It is 0 for an empty one and for `null`.
pub(super) fn entries<'de, T, D>(deserializer: D) -> Result<u64, D::Error>
where
    T: Deserialize<'de> + Hash,
    D: Deserializer<'de>,
{
    struct Entries<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de> + Hash> Visitor<'de> for Entries<T> {
        type Value = u64;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a map or a list")
        }

        fn visit_unit<E>(self) -> Result<u64, E> {
            Ok(0)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<u64, A::Error> {
            let mut sum: u64 = 0;
            while let Some(entry) = entries.next_entry::<String, T>()? {
                sum = sum.wrapping_add(hash(entry));
            }
            Ok(sum)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<u64, A::Error> {
            let mut all = 0;
            while let Some(entry) = entries.next_element::<T>()? {
                all = hash((all, entry));
            }
            Ok(all)
        }
    }
    deserializer.deserialize_any(Entries(PhantomData::<T>))
}
