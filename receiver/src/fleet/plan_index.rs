//! Index of a plan's watches.

use std::{collections::HashMap, sync::Arc};

use tidewatch_shared::{
    event::{Change, Object, Subject},
    plan::{Plan, PlannedWatch},
};

use crate::fleet::queue::{Drift, WorkSet};

/// Plan with its watches by name, shared by all runtimes with that plan.
#[derive(Debug)]
pub(crate) struct PlanIndex {
    pub(super) plan: Arc<Plan>,
    work: HashMap<String, WorkSet>,
}

impl PlanIndex {
    pub(crate) fn new(plan: Arc<Plan>) -> Self {
        let work_of = |watch: &PlannedWatch| (watch.name.clone(), watch.work.iter().copied().collect());
        let work = plan.watches().iter().map(work_of).collect();
        Self { plan, work }
    }

    /// Work of a watch; `None` if the plan has no such watch.
    pub(super) fn work(&self, watch: &str) -> Option<WorkSet> {
        self.work.get(watch).copied()
    }

    /// Drift of any object of a watch. Only the reconciles of Manifests distinguish it from that of any object at all.
    pub(super) fn drift(&self, watch: &str) -> Drift {
        let planned = self.plan.watches().iter().find(|planned| planned.name == watch);
        let is_of_modules = |planned: &&PlannedWatch| self.work(&planned.name) == Some(WorkSet::MANIFEST);
        planned.filter(is_of_modules).map_or(Drift::All, |planned| {
            Drift::of(Object {
                subject: Subject {
                    group: planned.group.clone(),
                    version: planned.version.clone(),
                    resource: planned.resource.clone(),
                    namespace: String::new(),
                    name: String::new(),
                },
                kind: String::new(),
                uid: String::new(),
                resource_version: String::new(),
                generation: None,
                change: Change::Spec,
            })
        })
    }
}
