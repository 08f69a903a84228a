//! Starts and stops the loops of planned watches as the plan changes.

use std::{collections::BTreeMap, sync::Arc};

use tidewatch_api::plan::{Plan, PlannedWatch};
use tokio::{
    sync::{mpsc, watch},
    task::{AbortHandle, JoinSet},
    time::Instant,
};

use super::{
    WatchContext,
    definitions::AllDefinitions,
    group::{Expansion, look_up},
    planned::PlannedSink,
    run,
};
use crate::{
    core::{Core, PlanChanges},
    kubernetes::ApiClient,
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

/// Key of the loop on all CRDs among the loops of watches, whose names are not empty.
const DEFINITIONS: &str = "";
/// Lookups of groups that await the supervisor. More of them wait in their loops.
const EXPANSIONS: usize = 1;

/// Runs one loop per watch of the current plan; `clients` returns the connection of a slot. Returns only when the
/// plan's sender is dropped or a loop ends by itself, neither of which happens in normal operation.
pub(crate) async fn supervise(
    clients: impl Fn(usize) -> ApiClient,
    shared: WatchContext,
    core: Core,
    mut plans: watch::Receiver<PlanState>,
) {
    let (send, mut expansions) = mpsc::channel(EXPANSIONS);
    let running = BTreeMap::new();
    let tasks = JoinSet::new();
    let mut loops = Loops { clients, shared, core, expansions: send, running, tasks };
    let mut last = None;
    loop {
        let PlanState { plan, error } = plans.borrow_and_update().clone();
        if let Some(plan) = plan.filter(|plan| last.as_ref().is_none_or(|last| !Arc::ptr_eq(last, plan))) {
            let changes = loops.core.follow(&plan);
            loops.apply(changes);
            loops.watch_definitions(plan.watches().iter().any(PlannedWatch::is_of_group));
            tracing::info!(revision = plan.revision(), watches = plan.watches().len(), "Following plan");
            last = Some(plan);
        }
        loops.core.set_plan_error(error);
        loop {
            tokio::select! {
                changed = plans.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
                Some(Expansion { id, served }) = expansions.recv() => {
                    let changes = loops.core.expand(id, &served, Instant::now());
                    loops.apply(changes);
                }
                Some(ended) = loops.tasks.join_next() => if !ended.is_err_and(|error| error.is_cancelled()) {
                    return;
                },
            }
        }
    }
}

/// The running loops.
struct Loops<C> {
    clients: C,
    shared: WatchContext,
    core: Core,
    /// Cloned into the loop of each watch on a group.
    expansions: mpsc::Sender<Expansion>,
    /// By the name of the watch.
    running: BTreeMap<Arc<str>, Running>,
    tasks: JoinSet<()>,
}

impl<C: Fn(usize) -> ApiClient> Loops<C> {
    /// Stops and starts loops of watches.
    fn apply(&mut self, PlanChanges { stopped, started }: PlanChanges) {
        stopped.iter().for_each(|name| self.stop(name));
        for started in started {
            let name = started.name.clone();
            let shared = self.shared.clone();
            let core = self.core.clone();
            if started.planned.is_of_group() {
                let expansions = self.expansions.clone();
                self.start(name, |client| look_up(started, client, shared, core, expansions));
            } else {
                let sink = PlannedSink::new(started, &shared.namespace, core, shared.discovery.clone());
                self.start(name, |client| run(client, shared, sink));
            }
        }
    }

    /// Watches all CRDs while a watch of the plan is on a group.
    fn watch_definitions(&mut self, is_needed: bool) {
        if !is_needed {
            self.stop(DEFINITIONS);
        } else if !self.running.contains_key(DEFINITIONS) {
            let shared = self.shared.clone();
            let sink = AllDefinitions::new(shared.discovery.definitions.clone());
            self.start(DEFINITIONS.into(), |client| run(client, shared, sink));
        }
    }

    fn start<F: Future<Output = ()> + Send + 'static>(&mut self, name: Arc<str>, task: impl FnOnce(ApiClient) -> F) {
        let taken = |slot: &usize| self.running.values().any(|other| other.slot == *slot);
        // One slot more than there are loops, so one of them is free. Slot 0 belongs to plan and canary.
        let most = self.running.len() + 1;
        let slot = (1..=most).find(|slot| !taken(slot)).unwrap_or(most);
        let handle = self.tasks.spawn(task((self.clients)(slot)));
        self.running.insert(name, Running { slot, handle });
    }

    fn stop(&mut self, name: &str) {
        if let Some(stopped) = self.running.remove(name) {
            stopped.handle.abort();
        }
    }
}
