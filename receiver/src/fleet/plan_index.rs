//! Index of a plan's watches.

use std::{collections::HashMap, sync::Arc};

use tidewatch_shared::plan::{Plan, PlannedWatch};

use crate::fleet::queue::WorkSet;

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
}
