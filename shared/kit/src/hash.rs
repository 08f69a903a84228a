//! Hashes within this process, for comparisons and pseudo-random orders; not for secrets.

use std::hash::{DefaultHasher, Hash, Hasher as _};

/// Hashes a value.
pub fn hash(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
