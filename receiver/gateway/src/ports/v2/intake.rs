//! Processing of events of v2: they enqueue a Kyma, or are forwarded to another manager.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use parking_lot::{Mutex, MutexGuard, RwLock};
use tidewatch_api::{
    facts::KymaFacts,
    identity::RuntimeId,
    key::KymaKey,
    names::{OWN_MANAGER, label},
};
use tidewatch_contract::{certificate::RuntimeCertificate, v2::Event};
use tidewatch_fleet::{
    forward::{self, DeliveryOutcome, Target},
    plans::Plans,
    table::{PlacementError, RuntimeTable},
};

use crate::ports::refusal::Refusal;

/// Concurrent forwards to one manager at most; each waits for the manager's response.
const MAX_FORWARDS: usize = 8;
/// Share of one runtime, so that a single runtime cannot take all slots of a slow manager.
const MAX_FORWARDS_PER_RUNTIME: usize = 4;

/// Consumer of events of v2.
pub trait V2Intake: Send + Sync + 'static {
    /// True if a manager of this name is known.
    fn is_manager(&self, manager: &str) -> bool;

    /// True while the receiver is starting, when managers may not be known yet.
    fn is_starting(&self, _: &RuntimeId) -> bool {
        false
    }

    /// Processes an event for a known manager.
    fn take(
        &self,
        manager: &str,
        caller: &RuntimeCertificate,
        event: Event,
    ) -> impl Future<Output = Result<(), Refusal>> + Send;
}

/// Runtimes that may use v2 although they have used v3: those whose Kyma has the label
/// `operator.kyma-project.io/tidewatch-allow-v2: "true"`. Clones share one state, which the cache of Kymas keeps
/// current.
#[derive(Clone, Default)]
pub struct V2AllowList(Arc<RwLock<HashMap<KymaKey, RuntimeId>>>);

impl V2AllowList {
    /// Applies the current state of a Kyma.
    pub fn apply<'a>(&self, key: &KymaKey, kyma: impl Into<KymaFacts<'a>>) {
        let kyma = kyma.into();
        let allowed = kyma.labels().get(label::ALLOW_V2).is_some_and(|value| value == "true");
        let mut table = self.0.write();
        match kyma.runtime().filter(|_| allowed) {
            Some(runtime) => table.insert(key.clone(), runtime),
            None => table.remove(key),
        };
    }

    /// Removes a deleted Kyma.
    pub fn remove(&self, key: &KymaKey) {
        self.0.write().remove(key);
    }

    /// Searches linearly: the table holds exceptions alone, and is needed only for runtimes that have used v3.
    fn contains(&self, runtime: &RuntimeId) -> bool {
        self.0.read().values().any(|allowed| allowed == runtime)
    }
}

/// Enqueues the Kymas of events of v2, and forwards events for other managers.
pub struct V2Adapter {
    fleet: RuntimeTable,
    plans: Plans,
    allowed: V2AllowList,
    forward: forward::Client,
    forwards: ForwardLimiter,
}

impl V2Adapter {
    /// Serves the managers of the current plan.
    pub fn new(fleet: RuntimeTable, plans: Plans, allowed: V2AllowList, forward: forward::Client) -> Self {
        Self { fleet, plans, allowed, forward, forwards: ForwardLimiter::default() }
    }

    /// Forwards an event to another manager and waits for its response: v2 cannot report a failure later, and
    /// runtime-watcher's agent retries this one.
    async fn forward(&self, manager: &str, caller: &RuntimeCertificate, event: &Event) -> Result<(), Refusal> {
        let target = self.fleet.target_of(manager).ok_or(Refusal::ManagerUnreachable)?;
        let _slot = self.forwards.acquire(&target, &caller.runtime).ok_or(Refusal::ManagerUnreachable)?;
        match self.forward.send(&target, &caller.leaf.der, event).await {
            DeliveryOutcome::Delivered => Ok(()),
            DeliveryOutcome::Refused(_) | DeliveryOutcome::Failed(_) => Err(Refusal::ManagerUnreachable),
        }
    }
}

/// Runtimes of the events being forwarded, by target. Each target has its own slots, so a dead one delays no other.
#[derive(Default)]
struct ForwardLimiter(Mutex<BTreeMap<Arc<Target>, Vec<RuntimeId>>>);

impl ForwardLimiter {
    /// Acquires a slot, if one is free.
    fn acquire<'a>(&'a self, target: &Arc<Target>, runtime: &RuntimeId) -> Option<ForwardSlot<'a>> {
        let mut targets = self.lock();
        let slots = targets.entry(target.clone()).or_default();
        let own = slots.iter().filter(|other| *other == runtime).count();
        if slots.len() >= MAX_FORWARDS || own >= MAX_FORWARDS_PER_RUNTIME {
            return None;
        }
        slots.push(runtime.clone());
        Some(ForwardSlot { limiter: self, target: target.clone(), runtime: runtime.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<Target>, Vec<RuntimeId>>> {
        self.0.lock()
    }
}

/// Slot of one forward, released on drop.
struct ForwardSlot<'a> {
    limiter: &'a ForwardLimiter,
    target: Arc<Target>,
    runtime: RuntimeId,
}

impl Drop for ForwardSlot<'_> {
    fn drop(&mut self) {
        let mut targets = self.limiter.lock();
        let Some(slots) = targets.get_mut(&self.target) else { return };
        if let Some(slot) = slots.iter().position(|runtime| *runtime == self.runtime) {
            slots.swap_remove(slot);
        }
        if slots.is_empty() {
            targets.remove(&self.target);
        }
    }
}

impl V2Intake for V2Adapter {
    fn is_manager(&self, manager: &str) -> bool {
        manager == OWN_MANAGER || self.plans.base().watches().iter().any(|watch| watch.manager == manager)
    }

    fn is_starting(&self, runtime: &RuntimeId) -> bool {
        self.fleet.kyma_of(runtime) == Err(PlacementError::NotSynced)
    }

    async fn take(&self, manager: &str, caller: &RuntimeCertificate, event: Event) -> Result<(), Refusal> {
        let runtime = &caller.runtime;
        if self.fleet.has_used_v3(runtime) && !self.allowed.contains(runtime) {
            return Err(Refusal::Superseded);
        }
        if manager != OWN_MANAGER {
            return self.forward(manager, caller, &event).await;
        }
        match self.fleet.legacy_event(runtime) {
            Ok(()) => Ok(()),
            Err(error @ (PlacementError::NotSynced | PlacementError::Elsewhere)) => Err(error.into()),
            // lifecycle-manager responds with 200 here. Nothing is lost: a Kyma that is created or becomes unambiguous is
            // reconciled for that.
            Err(error @ (PlacementError::Unknown | PlacementError::Ambiguous)) => {
                tracing::info!(%runtime, %error, "Event received from SKR is dropped");
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests;
