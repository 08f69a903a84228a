//! State of the installation in one runtime, as known from earlier reconciles.

use std::collections::BTreeMap;

use strum::VariantArray as _;

use super::{
    Component,
    desired::{DesiredObject, Params},
    upgrade::Image,
};

/// Verified state of one installation, about 200 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstallationState {
    /// Hash of the verified object by [`Component`]; 0 if it is not verified.
    verified: [u64; Component::VARIANTS.len()],
    /// lifecycle-manager's objects that have no component are deleted.
    pub(super) obsolete_removed: bool,
    /// Hashes of the forms in which this API server stores objects to which it, or an admission webhook, adds fields.
    pub(super) accepted_forms: BTreeMap<Component, u64>,
    /// Image of the Deployment when it was last verified.
    pub(super) image: Option<Image>,
    /// The Deployment has the annotation [`UNPROVEN_BEFORE`](tidewatch_api::names::annotation::UNPROVEN_BEFORE) with
    /// this image.
    pub(super) unproven_before: bool,
    /// The Deployment names no PriorityClass, because the runtime refused it.
    pub(super) without_priority: bool,
    /// The Deployment was written or found unavailable, and has not been available since.
    pub(super) awaiting_pod: bool,
    /// Checks of an agent that is not running yet.
    pub(super) rechecks: u8,
}

impl InstallationState {
    /// Marks one object as possibly changed.
    pub fn invalidate(&mut self, plural: &str, name: &str) {
        if let Some(component) = Component::of(plural, name) {
            self.doubt(component);
        }
    }

    /// Marks a component as possibly changed.
    pub(super) fn doubt(&mut self, component: Component) {
        self.verified[component as usize] = 0;
    }

    /// Marks all objects as possibly changed.
    pub fn invalidate_all(&mut self) {
        (self.verified, self.obsolete_removed) = (Default::default(), false);
    }

    pub(super) fn is_verified(&self, desired: &DesiredObject, params: &Params<'_>) -> bool {
        self.verified[desired.component as usize] == desired.hash(params)
    }

    /// Returns true for the ConfigMap, if it is as it was last written: its content changes with the plan, and is applied
    /// without a read.
    pub(super) fn is_as_written(&self, component: Component) -> bool {
        component == Component::ConfigMap && self.verified[component as usize] != 0
    }

    pub(super) fn mark_verified(&mut self, desired: &DesiredObject, params: &Params<'_>) {
        self.verified[desired.component as usize] = desired.hash(params);
    }
}
