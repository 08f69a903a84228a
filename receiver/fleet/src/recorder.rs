//! Kubernetes Events about Kymas, Watchers and the catalog, and lifecycle-manager's gauges of states.
//!
//! Both derive from the caches of KCP, so no reconcile waits for them. `event_diff` compares the previous state of an
//! object with the current one, `event_queue` holds the resulting Events; both are pure. `publish` writes one Event
//! after another, rate limited; an Event that finds the queue full, or the share of its object used up, is counted and
//! dropped, since the status contains it too. `states` computes its gauges at scrape.

mod event_diff;
mod event_queue;
mod metrics;
mod publish;
mod states;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, fmt, sync::Arc};

use kube::Client;
use parking_lot::{Mutex, MutexGuard};
use tidewatch_api::{Kyma, State, Watcher, facts::KymaFacts, key::KymaKey};
use tokio::{sync::Notify, time::Instant};

pub use metrics::Metrics;
pub use states::{ServedKymas, register as register_states};

use self::{event_diff::KymaSnapshot, event_queue::EventQueue};
pub use event_diff::{PendingEvent, Regarding};

/// Records changes of the caches as Events. Clones share one state.
#[derive(Clone)]
pub struct EventRecorder(Arc<Shared>);

struct Shared {
    state: Mutex<RecorderState>,
    posted: Notify,
    metrics: Metrics,
}

/// Last observed states, bounded by the number of Kymas and Watchers, and the bounded queue.
#[derive(Default)]
struct RecorderState {
    kymas: HashMap<KymaKey, KymaSnapshot>,
    watchers: HashMap<KymaKey, State>,
    queue: EventQueue,
}

impl EventRecorder {
    /// Makes a recorder; nothing is written before [`EventRecorder::run`].
    pub fn new(metrics: Metrics) -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), posted: Notify::new(), metrics }))
    }

    /// Observes a Kyma without posting Events: one of the first list of this process, or one that this replica begins to serve.
    pub fn initial_kyma(&self, key: &KymaKey, kyma: &Kyma) {
        self.lock().kymas.insert(key.clone(), KymaSnapshot::of(kyma));
    }

    /// Observes a new or changed Kyma.
    pub fn kyma(&self, key: &KymaKey, kyma: &Kyma) {
        let now = KymaSnapshot::of(kyma);
        let mut state = self.lock();
        // A Kyma that was recreated under the same name is a new one.
        let before = state.kymas.get(key).filter(|before| before.uid == now.uid);
        let events = event_diff::of_kyma(before, &now, kyma);
        state.kymas.insert(key.clone(), now);
        self.post(state, events);
    }

    /// Returns true if a Kyma has been observed.
    pub fn has_observed(&self, key: &KymaKey) -> bool {
        self.lock().kymas.contains_key(key)
    }

    /// Forgets a Kyma that another replica serves from now on.
    pub fn forget_kyma(&self, key: &KymaKey) {
        self.lock().kymas.remove(key);
    }

    /// Observes a Kyma that was deleted or is no longer selected; `posts` unless it belongs to another replica.
    pub fn deleted_kyma<'a>(&self, key: &KymaKey, kyma: impl Into<KymaFacts<'a>>, posts: bool) {
        let mut state = self.lock();
        state.kymas.remove(key);
        self.post(state, event_diff::of_deleted_kyma(key, kyma.into()).into_iter().filter(|_| posts).collect());
    }

    /// Posts Events that a controller has composed. The queue is bounded; those beyond its capacity are dropped and
    /// counted.
    pub fn publish(&self, events: Vec<PendingEvent>) {
        self.post(self.lock(), events);
    }

    /// Posts an Event about an invalid object; its last valid state stays in effect if it is `known`.
    pub(crate) fn report_invalid(&self, regarding: Regarding, known: bool, cause: &impl fmt::Display) {
        let effect = if known { "its last valid state stays in effect" } else { "it is ignored" };
        let note = format!("the object is invalid, and {effect}: {cause}");
        self.publish(vec![PendingEvent::warning(regarding, "Unreadable", note)]);
    }

    /// Observes a Watcher of the first list of this process, or in a replica without the fleet role, without posting Events.
    pub fn initial_watcher(&self, key: &KymaKey, watcher: &Watcher) {
        self.lock().watchers.insert(key.clone(), event_diff::state_of(watcher));
    }

    /// Observes a new or changed Watcher.
    pub fn watcher(&self, key: &KymaKey, watcher: &Watcher) {
        let now = event_diff::state_of(watcher);
        let mut state = self.lock();
        let before = state.watchers.insert(key.clone(), now).unwrap_or_default();
        self.post(state, event_diff::of_watcher(before, watcher).into_iter().collect());
    }

    /// Observes a deleted Watcher.
    pub fn deleted_watcher(&self, key: &KymaKey) {
        self.lock().watchers.remove(key);
    }

    /// Notes of the Events that wait to be written.
    #[cfg(any(test, feature = "testing"))]
    pub fn pending_notes(&self) -> Vec<String> {
        self.lock().queue.pending.iter().map(|event| event.note.clone()).collect()
    }

    /// Writes posted Events, forever. The client needs no fence: an Event of a former holder harms nothing.
    pub async fn run(self, client: Client) -> &'static str {
        publish::run(&self, &client).await
    }

    fn post(&self, mut state: MutexGuard<'_, RecorderState>, events: Vec<PendingEvent>) {
        if events.is_empty() {
            return;
        }
        let now = Instant::now();
        for event in events {
            if let Err(reason) = state.queue.post(event, now) {
                self.0.metrics.dropped(reason);
            }
        }
        self.0.metrics.waiting(state.queue.pending.len());
        drop(state);
        self.0.posted.notify_one();
    }

    fn next(&self) -> Option<event_queue::EventWrite> {
        let mut state = self.lock();
        let next = state.queue.next(Instant::now());
        self.0.metrics.waiting(state.queue.pending.len());
        next
    }

    fn lock(&self) -> MutexGuard<'_, RecorderState> {
        self.0.state.lock()
    }
}
