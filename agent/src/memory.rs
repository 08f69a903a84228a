//! Upper bounds of heap memory, for the limits of index and outbox. A test counts what the allocator hands out.

/// Entries of a full node of a `BTreeMap`, and those of a node at least.
const NODE: (usize, usize) = (11, 5);
/// Share of an entry in the other fields of its node, and in the nodes above, in bytes.
const NODE_SHARE: usize = 16;

/// Memory of an allocation with the allocator's own share: a header of 8 bytes, in multiples of 16.
pub(crate) const fn allocation(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { (bytes + 8).next_multiple_of(16) }
}

/// Memory of one entry of a `BTreeMap`, in bytes, if its nodes are as empty as they can be.
pub(crate) const fn tree_entry<K, V>() -> usize {
    let (full, least) = NODE;
    (size_of::<K>() + size_of::<V>()) * full / least + NODE_SHARE
}
