//! A plan with its watches by name.

use std::{collections::HashMap, sync::Arc};

use tidewatch_shared::plan::Plan;

use crate::fleet::queue::Works;

/// Shared by all runtimes of one plan.
#[derive(Debug)]
pub(crate) struct Planned {
    plan: Arc<Plan>,
    works: HashMap<String, Works>,
}

impl Planned {
    pub(crate) fn new(plan: Arc<Plan>) -> Self {
        let works = plan.watches().iter().map(|watch| (watch.name.clone(), Works::from(&watch.work))).collect();
        Self { plan, works }
    }

    pub(crate) fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// The works that a watch stands for; `None` if the plan has no such watch.
    pub(super) fn works(&self, watch: &str) -> Option<Works> {
        self.works.get(watch).copied()
    }
}
