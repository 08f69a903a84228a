//! Starts and stops the loops of planned watches as the plan changes.

use std::{collections::BTreeMap, sync::Arc};

use tokio::{
    sync::watch,
    task::{AbortHandle, JoinSet},
};

use super::{Shared, planned::Planned, run};
use crate::{
    core::{Core, Started},
    kubernetes::{Connect, Lane},
    plan::Followed,
};

struct Running {
    /// Small numbers that are used again, so that connections do not grow with the number of plans.
    slot: usize,
    handle: AbortHandle,
}

/// Follows the plan for ever; `lanes` gives the connection for a slot. Ends only when a loop does, which none should.
///
/// # Errors
/// [`Connect`] when another connection to the API server cannot be made.
pub(crate) async fn supervise(
    lanes: impl Fn(usize) -> Result<Lane, Connect>,
    shared: Shared,
    core: Core,
    mut plans: watch::Receiver<Followed>,
) -> Result<(), Connect> {
    let mut running: BTreeMap<Box<str>, Running> = BTreeMap::new();
    let mut loops = JoinSet::new();
    let mut last = None;
    loop {
        let Followed { plan, error } = plans.borrow_and_update().clone();
        if let Some(plan) = plan.filter(|plan| last.as_ref().is_none_or(|last| !Arc::ptr_eq(last, plan))) {
            let turnover = core.follow(&plan);
            for name in turnover.stopped {
                if let Some(stopped) = running.remove(&*name) {
                    stopped.handle.abort();
                }
            }
            for started in turnover.started {
                start(&lanes, &shared, &core, started, &mut running, &mut loops)?;
            }
            tracing::info!(revision = plan.revision(), watches = running.len(), "Following a plan");
            last = Some(plan);
        }
        core.plan_said(error);
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

fn start(
    lanes: &impl Fn(usize) -> Result<Lane, Connect>,
    shared: &Shared,
    core: &Core,
    started: Started,
    running: &mut BTreeMap<Box<str>, Running>,
    loops: &mut JoinSet<()>,
) -> Result<(), Connect> {
    let taken = |slot: &usize| running.values().any(|other| other.slot == *slot);
    // As many slots as there are loops, and one more: one of them is free. Slot 0 is for plan and canary.
    let slot = (1..=running.len() + 1).find(|slot| !taken(slot)).unwrap_or(running.len() + 1);
    let lane = lanes(slot)?;
    let name = started.planned.name.as_str().into();
    let handle = loops.spawn(run(lane, shared.clone(), Planned::new(started, &shared.namespace, core.clone())));
    running.insert(name, Running { slot, handle });
    Ok(())
}
