//! Facts about a Kyma that readers of all Kymas need, read from the object or from its reduced form.

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt as _;

use crate::{
    ConditionStatus, Kyma,
    identity::RuntimeId,
    labels::is_true,
    names::{annotation, finalizer, label},
    selection::{self, ModuleSelection, SelectedVersion},
};

/// Digest of the parts of a Kyma, besides its labels, whose change makes an event a change.
pub type RestDigest = [u8; 32];

/// A Kyma without its body, at one resourceVersion.
#[derive(Debug)]
pub struct ReducedKyma {
    /// Name.
    pub name: Box<str>,
    /// Namespace, which most Kymas share.
    pub namespace: Arc<String>,
    /// Uid, empty if it has none.
    pub uid: Box<str>,
    /// resourceVersion.
    pub object_version: Option<Box<str>>,
    /// All labels.
    pub labels: BTreeMap<String, String>,
    /// Selected modules, which many Kymas share.
    pub selection: Arc<ModuleSelection>,
    /// Digest that was computed before the object was reduced.
    pub rest: RestDigest,
    flags: Flags,
}

/// Facts that are either true or not.
#[derive(Clone, Copy, Debug)]
struct Flags {
    is_deleting: bool,
    is_managed: bool,
    has_finalizer: bool,
    skips_windows: bool,
    lacks_access: bool,
}

/// Parts of a Kyma that both of its forms have.
#[derive(Clone, Copy, Debug)]
pub enum KymaFacts<'a> {
    /// Facts of the object.
    Whole(&'a Kyma),
    /// Facts that were recorded when the object was reduced.
    Reduced(&'a ReducedKyma),
}

impl<'a> From<&'a Kyma> for KymaFacts<'a> {
    fn from(kyma: &'a Kyma) -> Self {
        Self::Whole(kyma)
    }
}

impl<'a> From<&'a Arc<Kyma>> for KymaFacts<'a> {
    fn from(kyma: &'a Arc<Kyma>) -> Self {
        Self::Whole(kyma)
    }
}

impl<'a> KymaFacts<'a> {
    /// All labels.
    pub fn labels(self) -> &'a BTreeMap<String, String> {
        match self {
            Self::Whole(kyma) => kyma.labels(),
            Self::Reduced(reduced) => &reduced.labels,
        }
    }

    /// Uid of the object, empty if it has none.
    pub fn uid(self) -> &'a str {
        match self {
            Self::Whole(kyma) => kyma.metadata.uid.as_deref().unwrap_or_default(),
            Self::Reduced(reduced) => &reduced.uid,
        }
    }

    /// resourceVersion of the object.
    pub fn object_version(self) -> Option<&'a str> {
        match self {
            Self::Whole(kyma) => kyma.metadata.resource_version.as_deref(),
            Self::Reduced(reduced) => reduced.object_version.as_deref(),
        }
    }

    /// Runtime id by the label.
    pub fn runtime(self) -> Option<RuntimeId> {
        self.labels().get(label::RUNTIME_ID).and_then(|id| id.parse().ok())
    }

    /// Returns true if the Kyma has a deletion timestamp.
    pub fn is_deleting(self) -> bool {
        match self {
            Self::Whole(kyma) => kyma.metadata.deletion_timestamp.is_some(),
            Self::Reduced(reduced) => reduced.flags.is_deleting,
        }
    }

    /// Returns true if Tidewatch has reconciled the Kyma and has not handed it back since.
    pub fn is_managed(self) -> bool {
        match self {
            Self::Whole(kyma) => kyma.annotations().contains_key(annotation::INPUTS),
            Self::Reduced(reduced) => reduced.flags.is_managed,
        }
    }

    /// Returns true if the label requests the hand-back.
    pub fn is_hand_back_requested(self) -> bool {
        let value = self.labels().get(label::HAND_BACK);
        value.is_some_and(|value| value.eq_ignore_ascii_case(label::HAND_BACK_REQUESTED))
    }

    /// Returns true if the Kyma was handed back.
    pub fn is_handed_back(self) -> bool {
        self.labels().get(label::HAND_BACK).is_some_and(|value| value == label::HAND_BACK_DONE)
    }

    /// Returns true if the label `tidewatch-pause` pauses the runtime.
    pub fn is_paused(self) -> bool {
        is_true(Some(self.labels()), label::PAUSE)
    }

    /// Returns true if the label `skip-reconciliation` is set. It stops the reconciles, unless the selector turns it around.
    pub fn is_skipped(self) -> bool {
        is_true(Some(self.labels()), label::SKIP_RECONCILIATION)
    }

    /// Returns true if the Kyma has the finalizer of the controllers that reconcile it.
    pub fn has_finalizer(self) -> bool {
        match self {
            Self::Whole(kyma) => kyma.finalizers().iter().any(|name| name == finalizer::KYMA),
            Self::Reduced(reduced) => reduced.flags.has_finalizer,
        }
    }

    /// Returns true if upgrades wait for no maintenance window.
    pub fn skips_windows(self) -> bool {
        match self {
            Self::Whole(kyma) => kyma.spec.skip_maintenance_windows.unwrap_or_default(),
            Self::Reduced(reduced) => reduced.flags.skips_windows,
        }
    }

    /// Returns true if the condition `RuntimeAccess` is False.
    pub fn lacks_access(self) -> bool {
        match self {
            Self::Whole(kyma) => {
                let access = kyma.status.as_ref().and_then(|status| status.condition("RuntimeAccess"));
                access.is_some_and(|access| access.status == ConditionStatus::False)
            }
            Self::Reduced(reduced) => reduced.flags.lacks_access,
        }
    }

    /// Version that the Kyma selects of a module; `None` if it does not select the module.
    pub fn selected(self, module: &str) -> Option<SelectedVersion> {
        match self {
            Self::Whole(kyma) => selection::selected(kyma, module),
            Self::Reduced(reduced) => reduced.selection.of_module(module).cloned(),
        }
    }
}

impl ReducedKyma {
    /// Reduces a Kyma.
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
}
