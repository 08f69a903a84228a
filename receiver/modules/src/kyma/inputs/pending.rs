//! Writes the annotation of the inputs after its reconcile has ended, at a limited rate: it is only a hint for the next start,
//! and must delay neither the work that waits for a worker nor the writes that users wait for.
//!
//! Each Kyma has at most one entry, to which later reconciles add. A write replaces exactly the value that the reconcile read,
//! so it changes nothing after a hand-back, or after another replica has taken over. An entry that cannot be written is
//! dropped: the next start then reconciles that Kyma once more.

use std::{collections::BTreeMap, ops::Bound, sync::Arc, time::Duration};

use json_patch::{
    PatchOperation::{Replace, Test},
    ReplaceOperation, TestOperation,
    jsonptr::PointerBuf,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use parking_lot::Mutex;
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use tidewatch_api::{
    Kyma,
    key::KymaKey,
    names::{annotation, field_manager},
};
use tidewatch_cluster::leader::{WriteFence, fenced};
use tidewatch_kit::{log_error, metric_set, random::Random};
use tokio::{sync::Notify, time::sleep};

/// Pause between two writes: at most 20 in a second.
const PAUSE: Duration = Duration::from_millis(50);
/// Bound of the backoff after a first failure, and of every backoff.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));
/// Failures after which an entry is dropped.
const MAX_FAILURES: u32 = 5;

/// The annotation of one Kyma.
#[derive(Clone, Debug)]
struct Pending {
    uid: String,
    /// Value in KCP as last read or written.
    before: String,
    after: String,
    /// Fence of the reconcile; without one that of the client permits the write.
    fence: Option<WriteFence>,
    failures: u32,
}

metric_set! {
    /// Writes of the annotation of the inputs.
    #[derive(Debug)]
    pub struct Metrics {
        /// Kymas whose annotation of the inputs waits to be written.
        pending: Gauge = "kyma_inputs_pending",
        /// Annotations of the inputs that could not be written; the next start reconciles their Kymas once more.
        dropped: Counter = "kyma_inputs_dropped",
    }
}

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Written {
    /// The annotation has the new value.
    Stored,
    /// The annotation has another value, the Kyma was replaced, or the shard was released.
    Outdated,
    /// The write failed, and may succeed later.
    Failed,
}

/// Annotations that wait to be written, by Kyma. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct PendingInputs(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    pending: Mutex<BTreeMap<KymaKey, Pending>>,
    added: Notify,
    metrics: Metrics,
}

impl PendingInputs {
    /// Creates an empty one with these metrics.
    pub fn new(metrics: Metrics) -> Self {
        Self(Arc::new(Inner { metrics, ..Inner::default() }))
    }

    /// Adds ended work: `after` returns the annotation that follows on a value, or `None` if it stays. `stored` is the value that the
    /// reconcile read.
    pub(super) fn update(
        &self,
        key: &KymaKey,
        uid: &str,
        stored: &str,
        fence: Option<WriteFence>,
        after: impl Fn(&str) -> Option<String>,
    ) {
        self.change(|all| match all.get_mut(key) {
            Some(pending) if pending.uid == uid => {
                if let Some(after) = after(&pending.after) {
                    (pending.after, pending.fence, pending.failures) = (after, fence, 0);
                }
            }
            _ => {
                let Some(after) = after(stored) else { return };
                let pending = Pending { uid: uid.to_owned(), before: stored.to_owned(), after, fence, failures: 0 };
                all.insert(key.clone(), pending);
                self.0.added.notify_one();
            }
        });
    }

    /// Drops the entry of a Kyma.
    pub(crate) fn forget(&self, key: &KymaKey) {
        self.change(|all| drop(all.remove(key)));
    }

    /// Writes the annotations, one after the other, for ever. Returns the name of the task.
    pub async fn run(self, kcp: Client) -> &'static str {
        let mut random = Random::default();
        let mut failures = 0;
        let mut last = None;
        loop {
            let Some(key) = self.following(last.as_ref()) else {
                self.0.added.notified().await;
                continue;
            };
            match self.write(&kcp, &key).await {
                Some(Written::Failed) => failures += 1,
                _ => failures = 0,
            }
            let backoff = if failures == 0 { Duration::ZERO } else { random.backoff(BACKOFF.0, BACKOFF.1, failures) };
            last = Some(key);
            sleep(PAUSE + backoff).await;
        }
    }

    /// The next Kyma after this one, in the order of the keys and then from their start: each has its turn.
    fn following(&self, last: Option<&KymaKey>) -> Option<KymaKey> {
        let all = self.0.pending.lock();
        let from = last.map_or(Bound::Unbounded, Bound::Excluded);
        let next = all.range::<KymaKey, _>((from, Bound::Unbounded)).next();
        next.or_else(|| all.first_key_value()).map(|(key, _)| key.clone())
    }

    /// Writes the annotation of a Kyma. `None` if none waits.
    async fn write(&self, kcp: &Client, key: &KymaKey) -> Option<Written> {
        let pending = self.0.pending.lock().get(key).cloned()?;
        let write = send(kcp, key, &pending);
        let written = match pending.fence.clone() {
            Some(fence) => fenced(fence, write).await,
            None => write.await,
        };
        self.settle(key, &pending, written);
        Some(written)
    }

    /// Writes all annotations that wait now, once.
    #[cfg(test)]
    pub(crate) async fn write_all(&self, kcp: &Client) {
        let keys: Vec<_> = self.0.pending.lock().keys().cloned().collect();
        for key in keys {
            self.write(kcp, &key).await;
        }
    }

    /// Removes a written entry, unless a reconcile has added to it meanwhile.
    fn settle(&self, key: &KymaKey, sent: &Pending, written: Written) {
        self.change(|all| {
            let Some(pending) = all.get_mut(key).filter(|pending| pending.uid == sent.uid) else { return };
            let is_kept = match written {
                Written::Stored => {
                    pending.before.clone_from(&sent.after);
                    pending.after != pending.before
                }
                Written::Outdated => false,
                Written::Failed => {
                    pending.failures += 1;
                    pending.failures < MAX_FAILURES
                }
            };
            if !is_kept {
                all.remove(key);
                if written != Written::Stored {
                    self.0.metrics.dropped.inc();
                }
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<KymaKey, Pending>)) {
        let mut all = self.0.pending.lock();
        change(&mut all);
        self.0.metrics.pending.set(i64::try_from(all.len()).unwrap_or(i64::MAX));
    }
}

/// Replaces the annotation, if the Kyma still has the value that the reconcile read.
async fn send(kcp: &Client, key: &KymaKey, pending: &Pending) -> Written {
    let annotation = PointerBuf::from_tokens(["metadata", "annotations", annotation::INPUTS]);
    let uid = PointerBuf::from_tokens(["metadata", "uid"]);
    let patch = json_patch::Patch(vec![
        Test(TestOperation { path: uid, value: pending.uid.as_str().into() }),
        Test(TestOperation { path: annotation.clone(), value: pending.before.as_str().into() }),
        Replace(ReplaceOperation { path: annotation, value: pending.after.as_str().into() }),
    ]);
    let api: Api<Kyma> = Api::namespaced(kcp.clone(), &key.namespace);
    let params = PatchParams::apply(field_manager::LIFECYCLE_OPERATOR);
    let Err(error) = api.patch_metadata(&key.name, &params, &Patch::Json::<()>(patch)).await else {
        return Written::Stored;
    };
    log_error!(debug, &error, kyma = %key, "The inputs were not noted");
    match error {
        // A failed test is 422.
        kube::Error::Api(status) if [404, 409, 422].contains(&status.code) => Written::Outdated,
        _ if pending.fence.as_ref().is_some_and(|fence| !fence.is_open()) => Written::Outdated,
        _ => Written::Failed,
    }
}

#[cfg(test)]
mod tests;
