//! Reduced form of a Kyma.

use std::collections::BTreeMap;

use kube::ResourceExt as _;
use tidewatch_shared::api::{Kyma, Shared};

use super::{KymaFacts, ModuleSelection};

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
    rest: RestDigest,
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
    /// Reduces a Kyma.
    #[must_use]
    pub fn of(kyma: &Kyma, rest: RestDigest) -> Self {
        let facts = KymaFacts::from(kyma);
        Self {
            name: kyma.name_any().into(),
            namespace: kyma.namespace().unwrap_or_default().into(),
            uid: facts.uid().into(),
            object_version: facts.object_version().map(Into::into),
            labels: facts.labels().clone(),
            selection: ModuleSelection::of(kyma).into(),
            rest,
            flags: Flags {
                is_deleting: facts.is_deleting(),
                is_managed: facts.is_managed(),
                has_finalizer: facts.has_finalizer(),
                skips_windows: facts.skips_windows(),
                lacks_access: facts.lacks_access(),
            },
        }
    }

    /// Digest that was computed before the object was reduced.
    #[must_use]
    pub const fn rest(&self) -> RestDigest {
        self.rest
    }
}
