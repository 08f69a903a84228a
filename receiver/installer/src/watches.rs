//! Watches of the agent on its own installation, so that changed or deleted objects are repaired at once.

use std::collections::BTreeSet;

use strum::VariantArray as _;
use tidewatch_api::{
    names::{SKR_NAMESPACE, label},
    plan::{PlannedWatch, Work},
};

use super::{
    Component,
    component::{POLICIES, VERSION},
};

/// Returns the watches for the plan of installed agents. The Lease and the Secrets are in no plan.
pub fn watches() -> Vec<PlannedWatch> {
    let mut seen = BTreeSet::new();
    let components = Component::VARIANTS.iter().filter(|component| component.is_watched());
    components.filter(|component| seen.insert(component.kind().plural)).copied().map(watch).collect()
}

fn watch(component: Component) -> PlannedWatch {
    let kind = component.kind();
    // Single objects are selected by name, so that removing a label hides none. Several objects of one resource are
    // selected by label: an object that loses the label leaves the set, which is an event too.
    let (label_selector, field_selector) = if kind == POLICIES {
        (format!("{}={}", label::PART_OF, label::PART_OF_TIDEWATCH), String::new())
    } else {
        (String::new(), format!("metadata.name={}", component.name()))
    };
    let name = format!("installer/{}", kind.plural);
    PlannedWatch {
        namespace: kind.namespaced.then(|| SKR_NAMESPACE.to_owned()),
        label_selector,
        field_selector,
        ..PlannedWatch::ours(&name, kind.group, VERSION, kind.plural, Work::Installer)
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_api::plan::Plan;

    use super::*;

    #[test]
    fn every_watched_component_has_a_valid_planned_watch() {
        let watches = watches();
        let plan = Plan::new("1".into(), watches.clone()).unwrap();
        Plan::parse(&serde_json::to_string(&plan).unwrap()).unwrap();
        for component in Component::VARIANTS {
            let by = watches.iter().find(|watch| watch.resource == component.kind().plural);
            assert_eq!(by.is_some(), component.is_watched(), "{component:?}");
            let selects = |watch: &PlannedWatch| {
                watch.field_selector == format!("metadata.name={}", component.name())
                    || !watch.label_selector.is_empty()
            };
            assert!(by.is_none_or(selects), "{component:?}");
        }
    }
}
