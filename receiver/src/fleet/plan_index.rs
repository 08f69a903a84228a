//! Index of a plan's watches.

use std::{collections::HashMap, sync::Arc};

use tidewatch_shared::plan::Plan;

use crate::fleet::queue::WorkSet;

/// Plan with its watches by name, shared by all runtimes with that plan.
#[derive(Debug)]
pub(crate) struct PlanIndex {
    plan: Arc<Plan>,
    work: HashMap<String, WorkSet>,
}

impl PlanIndex {
    pub(crate) fn new(plan: Arc<Plan>) -> Self {
        let work = plan.watches().iter().map(|watch| (watch.name.clone(), WorkSet::from(&watch.work))).collect();
        Self { plan, work }
    }

    pub(crate) fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Work of a watch; `None` if the plan has no such watch.
    pub(super) fn work(&self, watch: &str) -> Option<WorkSet> {
        self.work.get(watch).copied()
    }
}
