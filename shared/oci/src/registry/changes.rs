//! Changed results, coalesced by key.

use std::collections::{HashSet, VecDeque};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::key::Key;

/// Distinct keys that wait for the consumer.
const MAX_WAITING: usize = 2_048;

/// A changed result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Another lookup of this key returns another result.
    Key(Key),
    /// Any lookup may return another result: more changed than are remembered, or the address of the registry appeared.
    All,
}

#[derive(Debug, Default)]
struct Waiting {
    order: VecDeque<Key>,
    keys: HashSet<Key>,
    all: bool,
}

/// Changes that the consumer has not taken. A key is there at most once, so a slow consumer loses none.
#[derive(Debug, Default)]
pub(super) struct ChangeSet {
    waiting: Mutex<Waiting>,
    added: Notify,
}

impl ChangeSet {
    pub(super) fn add(&self, key: Key) {
        let mut waiting = self.waiting.lock();
        if waiting.all || waiting.keys.contains(&key) {
            return;
        }
        if waiting.keys.len() >= MAX_WAITING {
            *waiting = Waiting { all: true, ..Waiting::default() };
        } else {
            waiting.keys.insert(key.clone());
            waiting.order.push_back(key);
        }
        drop(waiting);
        self.added.notify_one();
    }

    /// Adds a change of any lookup, which includes those of all keys.
    pub(super) fn add_all(&self) {
        *self.waiting.lock() = Waiting { all: true, ..Waiting::default() };
        self.added.notify_one();
    }

    pub(super) async fn next(&self) -> Change {
        loop {
            if let Some(change) = self.take() {
                return change;
            }
            self.added.notified().await;
        }
    }

    pub(super) fn take(&self) -> Option<Change> {
        let mut waiting = self.waiting.lock();
        if std::mem::take(&mut waiting.all) {
            return Some(Change::All);
        }
        let key = waiting.order.pop_front()?;
        waiting.keys.remove(&key);
        Some(Change::Key(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::component::ComponentVersion;

    fn key(number: usize) -> Key {
        Key::Descriptor(ComponentVersion::new(&format!("example.org/m{number}"), "1.0.0").unwrap())
    }

    #[tokio::test]
    async fn repeated_changes_of_a_key_are_one() {
        let changes = ChangeSet::default();
        [1, 2, 1].map(key).into_iter().for_each(|key| changes.add(key));
        assert_eq!([changes.next().await, changes.next().await], [1, 2].map(|number| Change::Key(key(number))));
        assert_eq!(changes.take(), None);
        changes.add(key(1));
        assert_eq!(changes.take(), Some(Change::Key(key(1))));
    }

    #[test]
    fn overflow_means_all() {
        let changes = ChangeSet::default();
        (0..=MAX_WAITING).map(key).for_each(|key| changes.add(key));
        changes.add(key(0));
        assert_eq!((changes.take(), changes.take()), (Some(Change::All), None));
    }

    #[test]
    fn change_of_all_includes_those_of_keys() {
        let changes = ChangeSet::default();
        changes.add(key(1));
        changes.add_all();
        changes.add(key(2));
        assert_eq!((changes.take(), changes.take()), (Some(Change::All), None));
    }
}
