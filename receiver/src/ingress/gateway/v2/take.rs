//! Where an event of v2 goes.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use kube::ResourceExt as _;
use tidewatch_shared::{
    api::Kyma,
    identity::RuntimeId,
    names::{OWN_MANAGER, label},
    v2::{Caller, Event},
};

use crate::{
    base::{key::KymaKey, stores::CurrentPlan},
    fleet::{
        forward::{self, Outcome, Target},
        hub::{Hub, Unplaced},
    },
};

/// Why an event was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// The caches of KCP have not synced.
    NotSynced,
    /// The runtime has spoken v3, to this process or as its Kyma's condition tells, and its Kyma does not allow it back.
    Superseded,
    /// Another manager did not take it.
    Unreachable,
}

/// Who takes events of v2.
pub trait Take: Send + Sync + 'static {
    /// Whether a manager of this name is known.
    fn is_manager(&self, manager: &str) -> bool;

    /// Whether managers may be missing of which it will know when it has started.
    fn is_starting(&self, _: &RuntimeId) -> bool {
        false
    }

    /// Takes an event for a known manager.
    fn take(&self, manager: &str, caller: &Caller, event: Event) -> impl Future<Output = Result<(), NotTaken>> + Send;

    /// Whether no Kyma has that runtime id, for certain: then its connections end.
    fn is_gone(&self, _: &RuntimeId) -> bool {
        false
    }
}

/// Runtimes that may speak v2 although they have spoken v3: those whose Kyma has the label
/// `operator.kyma-project.io/tidewatch-allow-v2: "true"`. Clones share one state, which the cache of Kymas keeps current.
#[derive(Clone, Default)]
pub struct Allowed(Arc<RwLock<HashMap<KymaKey, RuntimeId>>>);

impl Allowed {
    /// A Kyma as it is now.
    pub fn apply(&self, key: &KymaKey, kyma: &Kyma) {
        let allowed = kyma.labels().get(label::ALLOW_V2).is_some_and(|value| value == "true");
        let runtime = kyma.labels().get(label::RUNTIME_ID).and_then(|id| id.parse().ok());
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        match runtime.filter(|_| allowed) {
            Some(runtime) => table.insert(key.clone(), runtime),
            None => table.remove(key),
        };
    }

    /// A Kyma is gone.
    pub fn remove(&self, key: &KymaKey) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    /// Only asked of a runtime that has spoken v3, and the table holds exceptions alone.
    fn holds(&self, runtime: &RuntimeId) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).values().any(|allowed| allowed == runtime)
    }
}

/// Events for one other manager that are passed on at the same time; each waits for its manager's word.
const PASSING: usize = 8;
/// Those of them that may be of one runtime, so that none takes all places of a manager that is slow.
const PASSING_OF_ONE: usize = 4;

/// Maps events of v2 to the queue, and passes those for other managers on.
pub struct Legacy {
    hub: Hub,
    plan: CurrentPlan,
    allowed: Allowed,
    forward: forward::Client,
    passing: Passing,
}

impl Legacy {
    /// For the managers of the current plan.
    #[must_use]
    pub fn new(hub: Hub, plan: CurrentPlan, allowed: Allowed, forward: forward::Client) -> Self {
        Self { hub, plan, allowed, forward, passing: Passing::default() }
    }

    /// Gives an event to another manager and waits for its word: v2 has no way to say later that it was not taken, and a failure here
    /// is one that the incumbent's agent tries again.
    async fn pass(&self, manager: &str, caller: &Caller, event: &Event) -> Result<(), NotTaken> {
        let target = self.hub.target_of(manager).ok_or(NotTaken::Unreachable)?;
        let _place = self.passing.enter(&target, &caller.runtime).ok_or(NotTaken::Unreachable)?;
        match self.forward.send(&target, &caller.leaf, event).await {
            Outcome::Delivered => Ok(()),
            Outcome::Refused(_) | Outcome::Failed(_) => Err(NotTaken::Unreachable),
        }
    }
}

/// Whose events are being passed on, by target. Each has places of its own, so a dead one delays no other.
#[derive(Default)]
struct Passing(Mutex<BTreeMap<Arc<Target>, Vec<RuntimeId>>>);

impl Passing {
    /// A place among those that are passed on to this target, until dropped.
    fn enter<'a>(&'a self, target: &Arc<Target>, runtime: &RuntimeId) -> Option<Place<'a>> {
        let mut passing = self.lock();
        let places = passing.entry(target.clone()).or_default();
        if places.len() >= PASSING || places.iter().filter(|other| *other == runtime).count() >= PASSING_OF_ONE {
            return None;
        }
        places.push(runtime.clone());
        Some(Place { passing: self, target: target.clone(), runtime: runtime.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<Target>, Vec<RuntimeId>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Place<'a> {
    passing: &'a Passing,
    target: Arc<Target>,
    runtime: RuntimeId,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut passing = self.passing.lock();
        let Some(places) = passing.get_mut(&self.target) else { return };
        if let Some(place) = places.iter().position(|runtime| *runtime == self.runtime) {
            places.swap_remove(place);
        }
        if places.is_empty() {
            passing.remove(&self.target);
        }
    }
}

impl Take for Legacy {
    fn is_manager(&self, manager: &str) -> bool {
        manager == OWN_MANAGER || self.plan.load().watches().iter().any(|watch| watch.manager == manager)
    }

    fn is_starting(&self, runtime: &RuntimeId) -> bool {
        self.hub.placed(runtime) == Err(Unplaced::NotSynced)
    }

    async fn take(&self, manager: &str, caller: &Caller, event: Event) -> Result<(), NotTaken> {
        let runtime = &caller.runtime;
        if self.hub.speaks_v3(runtime) && !self.allowed.holds(runtime) {
            return Err(NotTaken::Superseded);
        }
        if manager != OWN_MANAGER {
            return self.pass(manager, caller, &event).await;
        }
        match self.hub.legacy_event(runtime) {
            Ok(()) => Ok(()),
            Err(Unplaced::NotSynced) => Err(NotTaken::NotSynced),
            // The incumbent answers 200 here. Nothing is lost: a Kyma that comes, or becomes the only one, is worked on for that.
            Err(why @ (Unplaced::Unknown | Unplaced::Ambiguous)) => {
                tracing::info!(%runtime, %why, "Event received from SKR is dropped");
                Ok(())
            }
        }
    }

    fn is_gone(&self, runtime: &RuntimeId) -> bool {
        self.hub.is_unknown(runtime)
    }
}

#[cfg(test)]
mod tests;
