//! Reduced form of a Manifest.

use tidewatch_api::{Resource, Shared, State, key::KymaKey};

/// A Manifest without its body, at one resourceVersion. Its label names a Kyma, and no owner reference names another one.
#[derive(Debug)]
pub struct ReducedManifest {
    pub(super) key: KymaKey,
    pub(super) object_version: Option<Box<str>>,
    /// Uid in the owner references, if there are any.
    pub(super) owner: Option<Shared<String>>,
    pub(super) kyma: Shared<String>,
    pub(super) module: Option<Shared<String>>,
    pub(super) channel: Option<Shared<String>>,
    pub(super) version: Option<Shared<String>>,
    pub(super) mark: Option<Shared<String>>,
    pub(super) operation: Option<Shared<String>>,
    pub(super) synced: Option<Shared<Vec<Resource>>>,
    pub(super) flags: Flags,
}

/// Facts of one value each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Flags {
    /// State in the status; `None` without a status.
    pub state: Option<State>,
    /// The label of mandatory modules is set.
    pub is_mandatory: bool,
    /// The label `skip-reconciliation` is set. It stops the reconciles, unless the selector turns it around.
    pub is_skipped: bool,
    /// The annotation of unmanaged modules is set.
    pub is_unmanaged: bool,
    /// It is being deleted.
    pub is_deleting: bool,
    /// The layer that the spec names is applied.
    pub is_synced: bool,
}
