//! Starts and stops the loops of planned watches as the plan changes.

use std::{collections::BTreeMap, sync::Arc};

use tidewatch_shared::plan::Plan;
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinSet},
};

use super::{WatchContext, planned::PlannedSink, run};
use crate::{
    core::Core,
    kubernetes::{ApiClient, ClientSetupError},
};

/// The plan to follow, as read from the agent's ConfigMap.
#[derive(Clone, Debug, Default)]
pub(crate) struct PlanState {
    /// The last valid plan.
    pub(crate) plan: Option<Arc<Plan>>,
    /// Error of the newest ConfigMap; the last valid plan stays in force.
    pub(crate) error: Option<String>,
}

struct Running {
    /// Lowest free number, reused so that the number of connections does not grow with the number of plans.
    slot: usize,
    handle: AbortHandle,
}

/// Runs one loop per watch of the current plan; `clients` returns the connection of a slot. Returns only when the
/// plan's sender is dropped or a loop ends by itself, neither of which happens in normal operation.
///
/// # Errors
/// [`ClientSetupError`] when another connection to the API server cannot be made.
pub(crate) async fn supervise(
    clients: impl Fn(usize) -> Result<ApiClient, ClientSetupError>,
    shared: WatchContext,
    core: Core,
    mut plans: watch::Receiver<PlanState>,
) -> Result<(), ClientSetupError> {
    let mut running: BTreeMap<Box<str>, Running> = BTreeMap::new();
    let mut loops = JoinSet::new();
    let mut last = None;
    loop {
        let PlanState { plan, error } = plans.borrow_and_update().clone();
        if let Some(plan) = plan.filter(|plan| last.as_ref().is_none_or(|last| !Arc::ptr_eq(last, plan))) {
            let turnover = core.follow(&plan);
            for name in turnover.stopped {
                if let Some(stopped) = running.remove(&*name) {
                    stopped.handle.abort();
                }
            }
            for started in turnover.started {
                let taken = |slot: &usize| running.values().any(|other| other.slot == *slot);
                // One slot more than there are loops, so one of them is free. Slot 0 belongs to plan and canary.
                let slot = (1..=running.len() + 1).find(|slot| !taken(slot)).unwrap_or(running.len() + 1);
                let client = clients(slot)?;
                let name = started.planned.name.as_str().into();
                let sink = PlannedSink::new(started, &shared.namespace, core.clone(), shared.discovery.clone());
                let handle = loops.spawn(run(client, shared.clone(), sink));
                running.insert(name, Running { slot, handle });
            }
            tracing::info!(revision = plan.revision(), watches = running.len(), "Following plan");
            last = Some(plan);
        }
        core.set_plan_error(error);
        loop {
            tokio::select! {
                changed = plans.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return Ok(()),
                },
                Some(ended) = loops.join_next() => if !ended.is_err_and(|error| error.is_cancelled()) {
                    return Ok(());
                },
            }
        }
    }
}
