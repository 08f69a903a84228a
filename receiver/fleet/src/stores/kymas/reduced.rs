//! Reduced form of a Kyma.

use std::collections::BTreeMap;

use tidewatch_api::{Shared, selection::ModuleSelection};

/// Digest of the parts of a Kyma, besides its labels, whose change makes an event a change.
pub type RestDigest = [u8; 32];

/// A Kyma without its body, at one resourceVersion.
#[derive(Debug)]
pub struct ReducedKyma {
    pub(super) name: Box<str>,
    /// Most Kymas have the same.
    pub(crate) namespace: Shared<String>,
    pub(super) uid: Box<str>,
    pub(super) object_version: Option<Box<str>>,
    pub(super) labels: BTreeMap<String, String>,
    /// Many Kymas have the same.
    pub(crate) selection: Shared<ModuleSelection>,
    pub(super) rest: RestDigest,
    pub(super) flags: Flags,
}

/// Facts that are either true or not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flags {
    pub(super) is_deleting: bool,
    pub(super) is_managed: bool,
    pub(super) has_finalizer: bool,
    pub(super) skips_windows: bool,
    pub(super) lacks_access: bool,
}

impl ReducedKyma {
    /// Digest that was computed before the object was reduced.
    #[must_use]
    pub const fn rest(&self) -> RestDigest {
        self.rest
    }
}
