//! What of an installation its own agent watches, so that whatever somebody breaks comes back at once.

use std::collections::BTreeSet;

use tidewatch_shared::{
    names::{OWN_MANAGER, SKR_NAMESPACE, label},
    plan::{Field, PlannedWatch, Work},
};

use super::{Part, part::POLICIES};

/// The watches that the plan of an installed agent has besides the others. Its Lease and Secrets are in no plan.
#[must_use]
pub fn watches() -> Vec<PlannedWatch> {
    let mut seen = BTreeSet::new();
    let parts = Part::ALL.into_iter().filter(|part| part.is_watched());
    parts.filter(|part| seen.insert(part.kind().plural)).map(watch).collect()
}

fn watch(part: Part) -> PlannedWatch {
    let kind = part.kind();
    // By name, so that nobody can hide an object by taking a label off; where there are several, by the label: what loses it has left the
    // set, and that is told too.
    let (label_selector, field_selector) = if kind == POLICIES {
        (format!("{}={}", label::PART_OF, label::PART_OF_TIDEWATCH), String::new())
    } else {
        (String::new(), format!("metadata.name={}", part.name()))
    };
    PlannedWatch {
        name: format!("installer/{}", kind.plural),
        group: kind.group.to_owned(),
        version: kind.version.to_owned(),
        resource: kind.plural.to_owned(),
        namespace: kind.namespaced.then(|| SKR_NAMESPACE.to_owned()),
        label_selector,
        field_selector,
        field: Field::Spec,
        manager: OWN_MANAGER.to_owned(),
        work: BTreeSet::from([Work::Installer]),
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_shared::plan::Plan;

    use super::*;

    #[test]
    fn every_part_but_the_agents_own_is_watched_by_a_plan_that_holds() {
        let watches = watches();
        let plan = Plan::new("1".into(), watches.clone()).unwrap();
        Plan::parse(&serde_json::to_string(&plan).unwrap()).unwrap();
        for part in Part::ALL {
            let by = watches.iter().find(|watch| watch.resource == part.kind().plural);
            assert_eq!(by.is_some(), part.is_watched(), "{part:?}");
            let selects = |watch: &PlannedWatch| {
                watch.field_selector == format!("metadata.name={}", part.name()) || !watch.label_selector.is_empty()
            };
            assert!(by.is_none_or(selects), "{part:?}");
        }
    }
}
