//! Plans of the runtimes: a base plan of all of them, and watches that each one needs in addition.

use std::{collections::HashMap, sync::Arc};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tidewatch_api::{
    key::KymaKey,
    plan::{Plan, PlannedWatch},
};

/// Plans that are kept although no runtime uses them any more.
const MAX_UNUSED: usize = 256;

/// Watches that one runtime needs in addition.
type Additional = Box<dyn Fn(&KymaKey) -> Vec<PlannedWatch> + Send + Sync>;

/// Adds watches to a plan.
pub type Extend = fn(&Plan, Vec<PlannedWatch>) -> Plan;

/// The plans. Clones share them.
#[derive(Clone)]
pub struct Plans(Arc<Inner>);

struct Inner {
    base: ArcSwap<Plan>,
    additional: Additional,
    extend: Extend,
    /// Plans by their additional watches: runtimes with equal ones share a plan.
    extended: Mutex<HashMap<Vec<PlannedWatch>, Arc<Plan>>>,
}

impl Plans {
    /// Creates plans from a base plan and the additional watches of each runtime.
    pub fn new(base: Plan, additional: Additional, extend: Extend) -> Self {
        Self(Arc::new(Inner { base: ArcSwap::from_pointee(base), additional, extend, extended: Mutex::default() }))
    }

    /// Plan without additional watches. It is replaced as a whole when a Watcher changes.
    pub fn base(&self) -> Arc<Plan> {
        self.0.base.load_full()
    }

    /// Replaces the base plan.
    pub fn set_base(&self, base: Plan) {
        let mut extended = self.0.extended.lock();
        self.0.base.store(Arc::new(base));
        extended.clear();
    }

    /// Plan of one runtime.
    pub fn of(&self, key: &KymaKey) -> Arc<Plan> {
        let additional = (self.0.additional)(key);
        let mut extended = self.0.extended.lock();
        let base = self.base();
        if additional.is_empty() {
            return base;
        }
        if let Some(known) = extended.get(&additional) {
            return known.clone();
        }
        if extended.len() >= MAX_UNUSED {
            extended.retain(|_, plan| Arc::strong_count(plan) > 1);
        }
        let plan = Arc::new((self.0.extend)(&base, additional.clone()));
        extended.insert(additional, plan.clone());
        plan
    }
}

#[cfg(any(test, feature = "testing"))]
impl Plans {
    /// The same plan for all runtimes.
    pub fn fixed(plan: Plan) -> Self {
        Self::new(plan, Box::new(|_| Vec::new()), |plan, _| plan.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tidewatch_api::plan::{Field, Work};

    use super::*;

    fn watch(name: &str) -> PlannedWatch {
        PlannedWatch {
            name: name.to_owned(),
            group: String::new(),
            version: "v1".to_owned(),
            resource: "things".to_owned(),
            namespace: None,
            label_selector: String::new(),
            field_selector: String::new(),
            field: Field::Spec,
            manager: "m".to_owned(),
            work: BTreeSet::from([Work::Manifest]),
        }
    }

    fn extend(base: &Plan, additional: Vec<PlannedWatch>) -> Plan {
        let revision = format!("{}+{}", base.revision(), additional.len());
        Plan::new(revision, [base.watches(), &additional].concat()).unwrap()
    }

    #[test]
    fn runtimes_with_equal_watches_share_a_plan() {
        let base = |revision: &str| Plan::new(revision.into(), vec![watch("base")]).unwrap();
        // The name of the Kyma is the name of its additional watch.
        let additional = |key: &KymaKey| if key.name == "none" { vec![] } else { vec![watch(&key.name)] };
        let plans = Plans::new(base("1"), Box::new(additional), extend);
        let of = |name: &str, namespace: &str| plans.of(&KymaKey::new(namespace, name));
        assert!(Arc::ptr_eq(&of("none", "x"), &plans.base()));
        let a = of("a", "x");
        assert!(Arc::ptr_eq(&a, &of("a", "y")));
        assert_eq!((a.revision(), a.watches().len()), ("1+1", 2));
        assert_ne!(a.watches(), of("b", "x").watches());

        plans.set_base(base("2"));
        assert_eq!((of("none", "x").revision(), of("a", "x").revision()), ("2", "2+1"));
    }

    #[test]
    fn unused_plans_are_bounded() {
        let additional = |key: &KymaKey| vec![watch(&key.name)];
        let plans = Plans::new(Plan::new("1".into(), vec![]).unwrap(), Box::new(additional), extend);
        let used = plans.of(&KymaKey::new("ns", "used"));
        (0..MAX_UNUSED * 3).for_each(|n| drop(plans.of(&KymaKey::new("ns", format!("n{n}")))));
        assert!(plans.0.extended.lock().len() <= MAX_UNUSED);
        assert!(Arc::ptr_eq(&used, &plans.of(&KymaKey::new("ns", "used"))));
    }
}
