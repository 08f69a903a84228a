//! Parts of a module that a change takes from a Kyma. Pure.

use std::collections::BTreeMap;

use super::{held::Part, state::ModuleState};
use crate::catalog::target::VisibilityLabels;

/// Loss of a Kyma that its release meta no longer admits.
const WHOLE: &[Part] = &[Part::Module];

/// Whether a release meta admits a Kyma with these labels.
type Admits = Box<dyn Fn(&BTreeMap<String, String>) -> bool>;

/// Losses of one module's change, computed once per combination of visibility labels, since there are thousands of Kymas.
pub(super) struct Losses {
    /// Every Kyma has a mandatory module.
    everywhere: Option<Part>,
    /// Indexed by the labels `beta` and `internal`.
    by_labels: [[LostParts; 2]; 2],
    was_admitted: Admits,
    is_admitted: Admits,
}

/// Losses of Kymas with equal visibility labels.
struct LostParts {
    /// The module was visible to those that its release meta admitted.
    was_visible: bool,
    /// Losses of those that it still admits.
    parts: Vec<Part>,
}

impl Losses {
    /// Compares two states of a module.
    pub(super) fn between(before: &ModuleState, now: &ModuleState) -> Self {
        let is_replaced = before.component.is_some() && before.component != now.component;
        let everywhere = before.mandatory.as_ref().and_then(|_| match &now.mandatory {
            None => Some(Part::Module),
            Some(_) => is_replaced.then_some(Part::Component),
        });
        let lost = |labels| LostParts::between(before, now, labels, is_replaced);
        Self {
            everywhere,
            by_labels: [false, true]
                .map(|beta| [false, true].map(|internal| lost(VisibilityLabels { beta, internal }))),
            was_admitted: Box::new(before.audience.admits()),
            is_admitted: Box::new(now.audience.admits()),
        }
    }

    /// Parts that a Kyma with these labels loses.
    pub(super) fn of(&self, labels: &BTreeMap<String, String>) -> impl Iterator<Item = &Part> {
        let VisibilityLabels { beta, internal } = VisibilityLabels::of(Some(labels));
        let lost = &self.by_labels[usize::from(beta)][usize::from(internal)];
        let parts: &[Part] = match &self.everywhere {
            Some(part) => std::slice::from_ref(part),
            None if !lost.was_visible || !(self.was_admitted)(labels) => &[],
            None if !(self.is_admitted)(labels) => WHOLE,
            None => &lost.parts,
        };
        parts.iter()
    }
}

impl LostParts {
    fn between(before: &ModuleState, now: &ModuleState, labels: VisibilityLabels, is_replaced: bool) -> Self {
        let ((channels, versions), later) = (before.visible_to(labels), now.visible_to(labels));
        let was_visible = !channels.is_empty();
        if was_visible && later.0.is_empty() {
            return Self { was_visible, parts: vec![Part::Module] };
        }
        let lost_channels: Vec<_> = channels.difference(&later.0).copied().collect();
        // The version of a lost channel goes with it.
        let goes_along =
            |version: &str| lost_channels.iter().any(|channel| before.channels[*channel].version == version);
        let lost_versions = versions.difference(&later.1).filter(|version| !goes_along(version));
        let lost_versions = lost_versions.map(|version| Part::Version((*version).to_owned()));
        let component = is_replaced.then_some(Part::Component).filter(|_| was_visible);
        let lost_channels = lost_channels.iter().map(|channel| Part::Channel((*channel).to_owned()));
        Self { was_visible, parts: component.into_iter().chain(lost_channels).chain(lost_versions).collect() }
    }
}
