//! A map of few entries in one allocation of exact size. With thousands of runtimes the spare capacity of the standard
//! maps would dominate: a B-tree node has room for eleven entries, a hash table for at least four.

use std::{borrow::Borrow, collections::BTreeMap};

/// Map as a sorted vector: lookups are binary searches, insertions and removals move the entries behind. For maps that
/// are read far more often than changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShortMap<K, V>(Vec<(K, V)>);

impl<K, V> Default for ShortMap<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Ord, V> ShortMap<K, V> {
    fn find<Q: Ord + ?Sized>(&self, key: &Q) -> Result<usize, usize>
    where
        K: Borrow<Q>,
    {
        self.0.binary_search_by(|(at, _)| at.borrow().cmp(key))
    }

    /// Returns the value of a key.
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.find(key).ok().map(|at| &self.0[at].1)
    }

    /// Returns the value of a key, to change it.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        self.find(key).ok().map(|at| &mut self.0[at].1)
    }

    /// Returns true if the map contains the key.
    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.find(key).is_ok()
    }

    /// Returns the value of a key, and inserts the default value if there is none.
    pub fn entry<Q: Ord + ToOwned<Owned = K> + ?Sized>(&mut self, key: &Q) -> &mut V
    where
        K: Borrow<Q>,
        V: Default,
    {
        let at = self.find(key).unwrap_or_else(|at| {
            self.put(at, key.to_owned(), V::default());
            at
        });
        &mut self.0[at].1
    }

    /// Sets the value of a key, and returns the previous one.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.find(&key) {
            Ok(at) => Some(std::mem::replace(&mut self.0[at].1, value)),
            Err(at) => {
                self.put(at, key, value);
                None
            }
        }
    }

    /// Removes a key, and returns its value.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let (_, value) = self.0.remove(self.find(key).ok()?);
        self.0.shrink_to_fit();
        Some(value)
    }

    /// Removes all entries that the predicate refuses.
    pub fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        self.0.retain(|(key, value)| keep(key, value));
        self.0.shrink_to_fit();
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Entries, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    /// Entries with mutable values, by key.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.0.iter_mut().map(|(key, value)| (&*key, value))
    }

    /// Keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.iter().map(|(key, _)| key)
    }

    fn put(&mut self, at: usize, key: K, value: V) {
        self.0.reserve_exact(1);
        self.0.insert(at, (key, value));
    }
}

impl<K: Ord, V> Extend<(K, V)> for ShortMap<K, V> {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, entries: I) {
        for (key, value) in entries {
            self.insert(key, value);
        }
    }
}

impl<K: Ord, V> FromIterator<(K, V)> for ShortMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        // One sort: insertions one by one would move the entries behind each time.
        let mut sorted: Vec<_> = entries.into_iter().collect::<BTreeMap<_, _>>().into_iter().collect();
        sorted.shrink_to_fit();
        Self(sorted)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_btree_map_and_allocates_exactly(steps in vec((0..4_u8, 0..12_u8, any::<u8>()), 0..60)) {
            let mut short = ShortMap::default();
            let mut tree = BTreeMap::new();
            for (operation, key, value) in steps {
                match operation {
                    0 => prop_assert_eq!(short.insert(key, value), tree.insert(key, value)),
                    1 => prop_assert_eq!(short.remove(&key), tree.remove(&key)),
                    2 => {
                        *short.entry(&key) = value;
                        *tree.entry(key).or_default() = value;
                    }
                    _ => {
                        short.retain(|at, _| at % 5 != key % 5);
                        tree.retain(|at, _| at % 5 != key % 5);
                    }
                }
                prop_assert!(short.iter().eq(tree.iter()) && short.keys().eq(tree.keys()) && short.len() == tree.len());
                prop_assert_eq!((short.get(&key), short.contains_key(&key)), (tree.get(&key), tree.contains_key(&key)));
                prop_assert_eq!(short.0.capacity(), short.0.len(), "no spare capacity");
            }
            let collected: ShortMap<_, _> = tree.into_iter().rev().collect();
            prop_assert_eq!(collected.0.capacity(), collected.0.len(), "no spare capacity");
            prop_assert_eq!(collected, short);
        }
    }
}
