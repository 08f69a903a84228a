//! Map of entries by their key, which knows how much memory it holds.

use std::{borrow::Borrow as _, collections::BTreeMap, ops::Deref, sync::Arc};

use crate::memory::{allocation, tree_entry};

/// Counters of an `Arc`, in bytes.
const COUNTERS: usize = 16;

/// A value with allocations of its own.
pub(super) trait Held {
    /// Heap memory beside the value itself, in bytes.
    fn heap(&self) -> usize;
}

/// A map that is read as a `BTreeMap`, and changed by its own methods alone.
#[derive(Debug)]
pub(super) struct Keyed<V> {
    entries: BTreeMap<Arc<str>, V>,
    bytes: usize,
}

impl<V> Default for Keyed<V> {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), bytes: 0 }
    }
}

impl<V> Deref for Keyed<V> {
    type Target = BTreeMap<Arc<str>, V>;

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

impl<V: Held> Keyed<V> {
    /// Memory of all entries at most, in bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    fn cost(key: &str, value: &V) -> usize {
        tree_entry::<Arc<str>, V>() + allocation(COUNTERS + key.len()) + value.heap()
    }

    /// Replaces the entry of a key.
    pub(super) fn insert(&mut self, key: Arc<str>, value: V) {
        self.remove(&key);
        self.bytes += Self::cost(&key, &value);
        self.entries.insert(key, value);
    }

    /// Inserts all entries.
    pub(super) fn extend(&mut self, entries: impl IntoIterator<Item = (Arc<str>, V)>) {
        entries.into_iter().for_each(|(key, value)| self.insert(key, value));
    }

    /// Changes the value of a key. Returns false if there is none.
    pub(super) fn change(&mut self, key: &str, work: impl FnOnce(&mut V)) -> bool {
        let Some(value) = self.entries.get_mut(key) else { return false };
        let before = value.heap();
        work(value);
        self.bytes = self.bytes - before + value.heap();
        true
    }

    /// Removes the entry of a key.
    pub(super) fn remove(&mut self, key: &str) -> Option<V> {
        self.remove_entry(key).map(|(_, value)| value)
    }

    /// Removes the entry of a key, with the key.
    pub(super) fn remove_entry(&mut self, key: &str) -> Option<(Arc<str>, V)> {
        let (key, value) = self.entries.remove_entry(key)?;
        self.bytes -= Self::cost(key.borrow(), &value);
        Some((key, value))
    }

    /// Keeps the entries for which `stays` holds.
    pub(super) fn retain(&mut self, stays: impl Fn(&str, &V) -> bool) {
        self.entries.retain(|key, value| {
            let stays = stays(key, value);
            if !stays {
                self.bytes -= Self::cost(key, value);
            }
            stays
        });
    }

    /// Removes and returns the entries for which `leaves` holds.
    pub(super) fn extract(&mut self, leaves: impl Fn(&V) -> bool) -> Vec<(Arc<str>, V)> {
        let left: Vec<_> = self.entries.extract_if(.., |_, value| leaves(value)).collect();
        self.bytes -= left.iter().map(|(key, value)| Self::cost(key, value)).sum::<usize>();
        left
    }

    /// Removes and returns all entries.
    pub(super) fn take(&mut self) -> BTreeMap<Arc<str>, V> {
        std::mem::take(self).entries
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Held for usize {
        fn heap(&self) -> usize {
            *self
        }
    }

    proptest! {
        #[test]
        fn bytes_are_those_of_the_entries(steps in prop::collection::vec((0u8..6, 0u8..5, 0usize..100), 0..60)) {
            let mut keyed = Keyed::default();
            for (step, key, value) in steps {
                let key = "k".repeat(key.into());
                match step {
                    0 | 1 => keyed.insert(key.as_str().into(), value),
                    2 => drop(keyed.remove(&key)),
                    3 => _ = keyed.change(&key, |held| *held = value),
                    4 => keyed.retain(|other, _| other != key),
                    _ => {
                        let left = keyed.extract(|held| *held > value);
                        keyed.extend(left);
                    }
                }
                prop_assert_eq!(keyed.bytes(), keyed.iter().map(|(key, value)| Keyed::cost(key, value)).sum::<usize>());
            }
            keyed.take();
            prop_assert_eq!(keyed.bytes(), 0);
        }
    }
}
