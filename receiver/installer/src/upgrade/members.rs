//! Runtimes as one replica assesses them.

use tidewatch_api::key::KymaKey;

use super::Image;

/// Standing of a runtime with its current image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// The event path is proven.
    Proven,
    /// The evidence is incomplete, or the runtime does not have its image yet.
    Pending,
    /// The path has not been proven within the deadline.
    Failing,
    /// The runtime is no evidence for or against the image: it was unwell before, or could not be upgraded in time.
    Unfit,
}

/// A runtime that counts: neither away, nor paused, nor being deleted.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) kyma: KymaKey,
    /// Position in the order of the upgrade; see [`tidewatch_rollout::rank`].
    pub(super) rank: u64,
    /// Observed image, `None` if it has not been observed yet.
    pub(super) image: Option<Image>,
    pub(super) standing: Standing,
}

/// Runtimes of the shards that a replica holds, as assessed.
#[derive(Clone, Debug, Default)]
pub(super) struct Fleet {
    pub(super) members: Vec<Member>,
    /// Kymas of runtimes that do not count.
    pub(super) excluded: Vec<KymaKey>,
}

impl Fleet {
    /// Kymas of all runtimes.
    pub(super) fn kymas(&self) -> impl Iterator<Item = &KymaKey> {
        self.members.iter().map(|member| &member.kyma).chain(&self.excluded)
    }
}
