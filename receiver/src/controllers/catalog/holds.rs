//! Effect of held removals on the catalog. Pure.

use std::collections::BTreeSet;

use super::desired::HeldObjects;

/// Removals of the catalog that are held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    /// Every removal: it is not known what was accepted before.
    everything: bool,
    /// Modules that stay as a whole.
    modules: BTreeSet<String>,
}

impl From<BTreeSet<String>> for Holds {
    fn from(modules: BTreeSet<String>) -> Self {
        Self { everything: false, modules }
    }
}

impl Holds {
    /// Holds every removal.
    #[must_use]
    pub fn everything() -> Self {
        Self { everything: true, ..Self::default() }
    }

    /// Returns whether a module stays as a whole.
    #[must_use]
    pub fn holds(&self, module: &str) -> bool {
        self.everything || self.modules.contains(module)
    }

    /// Objects of the catalog that stay as they are.
    pub(super) fn objects(&self) -> HeldObjects {
        HeldObjects { everything: self.everything, modules: self.modules.clone() }
    }
}
