//! What operators read of Kymas, Watchers and the catalog besides statuses: Kubernetes Events, and the incumbent's gauges of states.
//!
//! Both follow what the caches of KCP say, so no pass ever waits for them. `news` compares what was with what is, `board` keeps what
//! is to be told: both pure. `publish` writes, one Event after the other and not too many; what finds no room is counted and
//! forgotten, for the status says it too. `states` is computed when somebody asks for it.

mod board;
mod metrics;
mod news;
mod publish;
mod states;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kube::Client;
use tidewatch_shared::api::{Kyma, State, Watcher};
use tokio::{sync::Notify, time::Instant};

pub use metrics::Metrics;
pub use states::register as register_states;

use self::{board::Board, news::Facet};
use crate::base::key::KymaKey;
pub(crate) use news::{About, News};

/// The handle; clones share what is known and what is to be told.
#[derive(Clone)]
pub struct Record(Arc<Shared>);

struct Shared {
    known: Mutex<Known>,
    stirred: Notify,
    metrics: Metrics,
}

/// Bounded by the number of Kymas and Watchers; the board has a bound of its own.
#[derive(Default)]
struct Known {
    kymas: HashMap<KymaKey, Facet>,
    watchers: HashMap<KymaKey, State>,
    board: Board,
}

impl Record {
    /// Nothing is known, and nothing is written before [`Record::run`].
    #[must_use]
    pub fn new(metrics: Metrics) -> Self {
        Self(Arc::new(Shared { known: Mutex::default(), stirred: Notify::new(), metrics }))
    }

    /// A Kyma that stood there when this process began: what it says is no news.
    pub(crate) fn found_kyma(&self, key: &KymaKey, kyma: &Kyma) {
        self.lock().kymas.insert(key.clone(), Facet::of(kyma));
    }

    /// A Kyma as it is now.
    pub(crate) fn kyma(&self, key: &KymaKey, kyma: &Kyma) {
        let now = Facet::of(kyma);
        let mut known = self.lock();
        let before = known.kymas.get(key).filter(|before| before.is_same_object(&now));
        let news = news::of_kyma(before, &now, kyma);
        known.kymas.insert(key.clone(), now);
        self.post(known, news);
    }

    /// A Kyma that is gone, or is not selected any more.
    pub(crate) fn lost_kyma(&self, key: &KymaKey, kyma: &Kyma) {
        let mut known = self.lock();
        known.kymas.remove(key);
        self.post(known, news::of_lost_kyma(kyma).into_iter().collect());
    }

    /// Posts Events that a controller has composed. The queue is bounded; those beyond its capacity are dropped and counted.
    pub(crate) fn publish(&self, news: Vec<News>) {
        self.post(self.lock(), news);
    }

    /// An object of our group in KCP cannot be read; `known` if it could be before. The object is namespace, name and uid.
    pub(crate) fn unreadable(
        &self,
        kind: &'static str,
        object: (String, String, String),
        known: bool,
        cause: &impl fmt::Display,
    ) {
        self.post(self.lock(), vec![news::of_unreadable(kind, object, known, cause)]);
    }

    /// A Watcher that stood there when this process began.
    pub(crate) fn found_watcher(&self, key: &KymaKey, watcher: &Watcher) {
        self.lock().watchers.insert(key.clone(), news::state_of(watcher));
    }

    /// A Watcher as it is now.
    pub(crate) fn watcher(&self, key: &KymaKey, watcher: &Watcher) {
        let now = news::state_of(watcher);
        let mut known = self.lock();
        let before = known.watchers.insert(key.clone(), now).unwrap_or_default();
        self.post(known, news::of_watcher(before, watcher).into_iter().collect());
    }

    /// A Watcher that is gone.
    pub(crate) fn lost_watcher(&self, key: &KymaKey) {
        self.lock().watchers.remove(key);
    }

    /// The upgrade of agents goes on, or has halted; it stands in this ConfigMap.
    pub(crate) fn upgrade(&self, namespace: &str, name: &str, uid: &str, halted: bool, note: String) {
        self.post(self.lock(), vec![news::of_upgrade(namespace, name, uid, halted, note)]);
    }

    /// Writes what there is to tell, for ever.
    pub async fn run(self, client: Client) -> &'static str {
        publish::run(&self, &client).await
    }

    fn post(&self, mut known: MutexGuard<'_, Known>, news: Vec<News>) {
        if news.is_empty() {
            return;
        }
        let dropped = news.into_iter().map(|news| known.board.post(news)).filter(|posted| !posted).count();
        self.0.metrics.dropped(dropped);
        self.0.metrics.waiting(known.board.waiting());
        drop(known);
        self.0.stirred.notify_one();
    }

    fn next(&self) -> Option<board::Write> {
        let mut known = self.lock();
        let next = known.board.next(Instant::now());
        self.0.metrics.waiting(known.board.waiting());
        next
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Every change is whole before the lock is let go.
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
