//! Work that reconciles and changes in KCP enqueue.

use std::time::Duration;

use tidewatch_api::{key::KymaKey, plan::Work};
use tidewatch_kit::random::rotate;
use tokio::time::Instant;

use super::RuntimeTable;
use crate::queue::{DelayReason, Drift, Priority, QueuedWork, WorkSet};

/// Repairs the agent's installation without trusting any cache.
const REPAIR: QueuedWork = QueuedWork { work: WorkSet::INSTALLER, priority: Priority::Catalog, drift: Drift::All };
/// Delay of a status in which nothing but a message changes.
const MESSAGE_DELAY: Duration = Duration::from_secs(1);
/// Verifies the runtime without trusting any cache.
const VERIFICATION: QueuedWork =
    QueuedWork { work: WorkSet::RUNTIME, priority: Priority::Verification, drift: Drift::All };

impl RuntimeTable {
    /// Enqueues work of a Kyma after a change in KCP. Unknown Kymas are ignored.
    pub fn enqueue(&self, key: &KymaKey, work: WorkSet, priority: Priority) {
        self.with_kyma(key, |state, now| state.shared.queue().enqueue(key, QueuedWork::new(work, priority), now));
    }

    /// Enqueues a verification: a reconcile of the Kyma that compares every object written to its runtime. Unknown
    /// Kymas are ignored.
    pub fn verify(&self, key: &KymaKey) {
        self.with_kyma(key, |state, now| state.shared.queue().enqueue(key, VERIFICATION, now));
    }

    /// Enqueues a comparison of the agent's installation. Unknown Kymas are ignored.
    pub fn repair(&self, key: &KymaKey) {
        self.with_kyma(key, |state, now| state.shared.queue().enqueue(key, REPAIR, now));
    }

    /// Same as [`Self::verify`], at a random time within `spread` and after its first tenth, in which changes are reconciled.
    pub fn verify_within(&self, key: &KymaKey, spread: Duration) {
        self.with_kyma(key, |state, now| {
            let quiet = spread / 10;
            let mut queue = state.shared.queue();
            let at = now + quiet + queue.jitter(spread - quiet);
            queue.enqueue_after(key, DelayReason::Spread, at, VERIFICATION, now);
        });
    }

    /// Resumes all paused work at once, each at its own priority.
    pub fn unpause(&self) {
        self.in_chunks(|state, keys, now| state.shared.queue().unpark(keys, now));
    }

    /// Enqueues work of every Kyma, spread to about this many Kymas of the fleet per second.
    pub fn enqueue_all(&self, work: WorkSet, priority: Priority, per_second: u32) {
        // With those of other replicas, which enqueue them over the same time.
        let count = u32::try_from(self.directory().kymas()).unwrap_or(u32::MAX);
        // As many as one second takes need not wait.
        let spread = Duration::from_secs((count / per_second.max(1)).into());
        self.in_chunks(|state, keys, now| {
            let mut queue = state.shared.queue();
            for key in keys {
                let at = now + queue.jitter(spread);
                queue.enqueue_after(key, DelayReason::Spread, at, QueuedWork::new(work, priority), now);
            }
        });
    }

    /// Enqueues work of these Kymas after a change in KCP, this many per second; Kymas that already wait keep their
    /// turn. A Kyma that is unknown, or in a shard of another replica, has its turn without effect: replicas that are given
    /// the same Kymas of the fleet keep the rate together. Such turns do not add up over several changes.
    pub fn enqueue_paced(&self, mut keys: Vec<KymaKey>, work: WorkSet, per_second: u32) {
        let queued = QueuedWork::new(work, Priority::Catalog);
        let step = Duration::from_secs(1) / per_second.max(1);
        rotate(&mut keys);
        // Of a replica that holds all Kymas, at most each waits for a turn.
        let all = step.saturating_mul(u32::try_from(self.directory().kymas()).unwrap_or(u32::MAX));
        // Locked before any shard, so that two changes take turns one after the other.
        let mut pace = self.0.pace.lock();
        let now = Instant::now();
        let mut at = pace.filter(|at| *at > now).unwrap_or(now).min(now + all);
        for key in &keys {
            let is_waiting = self.with_kyma(key, |state, now| {
                let mut queue = state.shared.queue();
                let is_waiting = queue.is_delayed(key, DelayReason::Paced);
                queue.enqueue_after(key, DelayReason::Paced, at, queued.clone(), now);
                is_waiting
            });
            if is_waiting != Some(true) {
                at += step;
            }
        }
        *pace = Some(at);
    }

    /// Brings the reconciles at a time of the system's clock forward, after that clock was set forward by `step`.
    pub fn clock_advanced(&self, step: Duration) {
        self.in_chunks(|state, keys, now| state.shared.queue().advance(keys, DelayReason::Rollout, step, now));
    }

    /// Enqueues the status of a Kyma in a second: messages that change until then are shown together.
    pub fn show_message(&self, key: &KymaKey) {
        let queued = QueuedWork::new(WorkSet::STATUS, Priority::User);
        self.with_kyma(key, |state, now| {
            state.shared.queue().enqueue_after(key, DelayReason::Message, now + MESSAGE_DELAY, queued, now)
        });
    }

    /// Enqueues a reconcile of a Kyma after a delay, for the rollout of a version. The earliest of several delays
    /// applies.
    pub fn roll_out(&self, key: &KymaKey, after: Duration) {
        let queued = QueuedWork::new(WorkSet::of(&[Work::Kyma]), Priority::Catalog);
        self.with_kyma(key, |state, now| {
            state.shared.queue().enqueue_after(key, DelayReason::Rollout, now + after, queued, now)
        });
    }
}
