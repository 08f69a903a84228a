//! Task of a staged change, whose state is a ConfigMap of KCP. The replica with the fleet role decides and writes. A step takes
//! effect in each replica when the watch returns it, so that another receiver can continue from any point.

use std::{
    future::{self, Future},
    time::Duration,
};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use tidewatch_cluster::{leader::FleetRole, state_map::StateMap};
use tokio::time::{self, Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::recorder::{EventRecorder, PendingEvent};

/// Interval between evaluations while a change progresses.
pub const INTERVAL: Duration = Duration::from_secs(1);
/// Number of intervals per evaluation otherwise.
pub const IDLE_TICKS: u32 = 10;

/// What a staged change brings, and how its runtimes are assessed.
pub trait Subject: Send + Sync {
    /// Description of the watch of the ConfigMap.
    const WATCH: &'static str;

    /// Takes over the ConfigMap from the watch, and returns Events about its steps.
    fn observe(&mut self, map: Option<&ConfigMap>) -> Vec<PendingEvent>;

    /// Waits for a change that is evaluated at once. Cancel safe.
    fn changed(&self) -> impl Future<Output = ()> + Send {
        future::pending()
    }

    /// Returns whether nothing can progress soon.
    fn rests(&self) -> bool;

    /// Assesses the runtimes. With the fleet role, computes the next state and writes it.
    fn evaluate(&mut self, map: &mut StateMap, now: Instant) -> impl Future<Output = ()> + Send;
}

/// Task of a staged change.
pub struct StagedTask<S> {
    /// What is changed.
    pub subject: S,
    /// The state, which the subject has read.
    pub map: StateMap,
    role: FleetRole,
    /// Records the Events.
    pub recorder: EventRecorder,
    idle: u32,
}

impl<S: Subject> StagedTask<S> {
    /// The first tick evaluates the change.
    pub fn new(subject: S, map: StateMap, role: FleetRole, recorder: EventRecorder) -> Self {
        Self { subject, map, role, recorder, idle: IDLE_TICKS - 1 }
    }

    /// Runs once the caches of KCP have synced; returns only if the watch ends, which it never does by itself.
    pub async fn run(mut self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let mut maps = self.map.watch();
        let mut ticks = time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                map = maps.next() => match map {
                    Some(map) => self.observe(map.as_ref()),
                    None => return S::WATCH,
                },
                () = self.subject.changed() => self.subject.evaluate(&mut self.map, Instant::now()).await,
                now = ticks.tick() => {
                    if self.is_due() {
                        self.subject.evaluate(&mut self.map, now).await;
                    }
                }
            }
        }
    }

    /// Counts a tick, and returns whether it evaluates the change.
    pub fn is_due(&mut self) -> bool {
        self.idle = if self.subject.rests() { (self.idle + 1) % IDLE_TICKS } else { 0 };
        self.idle == 0
    }

    /// Takes over the ConfigMap from the watch.
    pub fn observe(&mut self, map: Option<&ConfigMap>) {
        let is_own = self.map.has_written();
        self.map.observe(map);
        let events = self.subject.observe(map);
        // Every replica observes the state. One posts the Events: the writer, also if it has given the role back since, or the
        // holder of the role, since the writer may have ended.
        if is_own || self.role.is_held() {
            self.recorder.publish(events);
        }
        // A changed ConfigMap, such as a confirmation, is evaluated at the next tick.
        self.idle = IDLE_TICKS - 1;
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use parking_lot::Mutex;
    use tidewatch_cluster::{leader::WriteFence, testing::FakeApiServer};

    use super::*;
    use crate::recorder::{Metrics, Regarding};

    /// Creates the ConfigMap, and rests. Records what the task does with it.
    #[derive(Clone)]
    struct Created {
        seen: Arc<Mutex<Vec<&'static str>>>,
        role: FleetRole,
    }

    impl Subject for Created {
        const WATCH: &'static str = "watch of a test";

        fn observe(&mut self, map: Option<&ConfigMap>) -> Vec<PendingEvent> {
            self.seen.lock().push(if map.is_some() { "observed" } else { "absent" });
            let regarding = Regarding::config_map("kcp-system", "state");
            let created = PendingEvent { regarding, warning: false, reason: "Created", note: "created".to_owned() };
            map.map(|_| created).into_iter().collect()
        }

        fn rests(&self) -> bool {
            true
        }

        async fn evaluate(&mut self, map: &mut StateMap, now: Instant) {
            self.seen.lock().push("evaluated");
            if !map.exists() && map.is_writable(now) {
                map.write(BTreeMap::new()).await;
                self.role.end();
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn state_is_evaluated_at_each_change_and_seldom_otherwise() {
        let kcp = FakeApiServer::default();
        // The second task observes what the first wrote, and the first one gives the role back before it does.
        for notes in [1, 0] {
            let role = FleetRole::held(WriteFence::default());
            let recorder = EventRecorder::new(Metrics::default());
            let subject = Created { seen: Arc::default(), role: role.clone() };
            if notes == 0 {
                role.end();
            }
            let map = StateMap::new(kcp.client(), "kcp-system", "state");
            let task = StagedTask::new(subject.clone(), map, role, recorder.clone());
            let synced = CancellationToken::new();
            synced.cancel();
            let ended = time::timeout(INTERVAL * IDLE_TICKS * 3, task.run(synced)).await;
            assert!(ended.is_err() && kcp.object("configmaps/state").is_some(), "{ended:?}");
            let mut seen = subject.seen.lock().clone();
            let observed = seen.iter().position(|it| *it == "observed").unwrap();
            let later = seen.split_off(observed + 1);
            assert!(later.iter().all(|it| *it == "evaluated") && (3..=4).contains(&later.len()), "{later:?}");
            assert_eq!(recorder.pending_notes().len(), notes);
        }
    }
}
