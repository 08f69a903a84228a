//! Task of the active receiver that drives an upgrade: it assesses the runtimes, computes the next step, and writes it
//! to the ConfigMap. A step takes effect when the watch returns it.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Client, runtime::reflector::ObjectRef};
use tidewatch_shared::api::Kyma;
use tokio::time::{self, Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::{
    CONFIG_MAP, Flags, ImageDecision, Metrics, UpgradeHandle, UpgradeState,
    decide::{self, Counts, Criteria, Fleet},
    store::Snapshot,
    table::{AssessmentTable, Observation},
};
use crate::{
    base::{key::KymaKey, pause::Pause, stores::Stores, takeover::Takeover},
    fleet::{
        PathState, Unproven,
        queue::{Priority, WorkSet},
        table::{PathReport, RuntimeTable},
    },
    kube::{
        recorder::EventRecorder,
        state_map::{ReadStateMapError, StateMap},
    },
};

/// Interval between ticks during an upgrade.
const INTERVAL: Duration = Duration::from_secs(1);
/// Number of ticks per evaluation while nothing can progress.
const IDLE_TICKS: u32 = 10;
/// Maximum number of runtimes enqueued per tick: the restart of an agent causes a reconcile of its runtime.
const MAX_ENQUEUED: usize = 20;

/// Dependencies of the task.
pub struct Dependencies {
    /// States of event paths, and the queue of reconciles.
    pub fleet: RuntimeTable,
    /// Caches of KCP.
    pub stores: Stores,
    /// Paused runtimes.
    pub pause: Pause,
    /// Kymas that belong to this receiver.
    pub takeover: Takeover,
    /// Records the progress as Kubernetes Events.
    pub recorder: EventRecorder,
    /// Metrics of the upgrade.
    pub metrics: Metrics,
}

/// Task that drives the upgrade.
pub struct UpgradeTask {
    flags: Flags,
    image: String,
    namespace: String,
    map: StateMap,
    snapshot: Snapshot,
    handle: UpgradeHandle,
    dependencies: Dependencies,
    table: AssessmentTable,
    /// Runtimes enqueued since the state last changed.
    enqueued: HashSet<KymaKey>,
    idle: u32,
}

impl UpgradeTask {
    /// Reads the stored state. The client must be fenced, so that only the active receiver writes. Decisions are
    /// published in the [`UpgradeHandle`].
    ///
    /// # Errors
    /// [`ReadStateMapError`].
    pub async fn open(
        client: Client,
        namespace: &str,
        image: &str,
        flags: Flags,
        dependencies: Dependencies,
    ) -> Result<(Self, UpgradeHandle), ReadStateMapError> {
        let map = StateMap::new(client, namespace, CONFIG_MAP);
        let snapshot = Snapshot::of(map.read().await?.as_ref(), image);
        let handle = UpgradeHandle::new(match &snapshot {
            Snapshot::Valid { state, .. } => state.clone(),
            Snapshot::Absent | Snapshot::Invalid => UpgradeState::unknown(image, Timestamp::now().as_second()),
        });
        let upgrade = Self {
            flags,
            image: image.to_owned(),
            namespace: namespace.to_owned(),
            map,
            snapshot,
            handle: handle.clone(),
            dependencies,
            table: AssessmentTable::default(),
            enqueued: HashSet::new(),
            idle: 0,
        };
        Ok((upgrade, handle))
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
                    None => return "watch of the agents' upgrade",
                },
                now = ticks.tick() => {
                    if self.is_due() {
                        self.tick(now).await;
                    }
                }
            }
        }
    }

    /// Evaluates only every [`IDLE_TICKS`] ticks while no upgrade is in progress, or only a change of the ConfigMap can
    /// resume it.
    fn is_due(&mut self) -> bool {
        let state = self.handle.state.load();
        let rests = match &self.snapshot {
            Snapshot::Absent => false,
            Snapshot::Invalid => true,
            Snapshot::Valid { .. } => *state.target == *self.image && (state.is_done() || state.halted().is_some()),
        };
        self.idle = if rests { (self.idle + 1) % IDLE_TICKS } else { 0 };
        self.idle == 0
    }

    /// Takes over the ConfigMap from the watch.
    fn observe(&mut self, map: Option<&ConfigMap>) {
        let snapshot = Snapshot::of(map, &self.image);
        if let Snapshot::Valid { state, metadata } = &snapshot
            && **self.handle.state.load() != *state
        {
            self.announce(state, metadata.uid.as_deref().unwrap_or_default());
            self.handle.state.store(Arc::new(state.clone()));
            self.enqueued.clear();
        }
        if let Snapshot::Absent = &snapshot {
            if matches!(self.snapshot, Snapshot::Valid { .. }) {
                tracing::warn!("ConfigMap {CONFIG_MAP} was deleted, it is created again");
            }
            self.map.deleted();
        }
        self.snapshot = snapshot;
        // A changed ConfigMap, such as a confirmation, is evaluated at the next tick.
        self.idle = IDLE_TICKS - 1;
    }

    fn announce(&self, state: &UpgradeState, uid: &str) {
        let (target, stage) = (&state.target, state.stage());
        let note = match (state.halted(), state.is_done()) {
            (Some(reason), _) => {
                tracing::error!(%target, stage, reason, "Agent upgrade halted");
                format!("the upgrade to {target} has halted in stage {stage}: {reason}")
            }
            (None, true) => {
                tracing::info!(%target, "Agent image applies to every runtime");
                format!("every runtime gets {target}")
            }
            (None, false) => {
                tracing::info!(%target, stage, of = self.flags.agent_upgrade_stages.count(), "Agent upgrade progressed");
                format!("the upgrade to {target} is in stage {stage} of {}", self.flags.agent_upgrade_stages.count())
            }
        };
        self.dependencies.recorder.report_upgrade(&self.namespace, CONFIG_MAP, uid, state.halted().is_some(), note);
    }

    async fn tick(&mut self, now: Instant) {
        let current = self.handle.state.load_full();
        let is_refused = matches!(self.snapshot, Snapshot::Invalid);
        self.dependencies.metrics.set_state(&current, is_refused);
        let unix = Timestamp::now().as_second();
        let retargeted = current.retarget(&self.image, unix);
        let fleet = self.fleet(&current, &retargeted, now);
        self.dependencies.metrics.set_counts(&Counts::of(&retargeted, &fleet.members), fleet.excluded);
        if current.target == retargeted.target {
            self.enqueue_outdated(&current, &fleet);
        }
        if is_refused || !self.map.is_writable(self.snapshot.version(), now) {
            return;
        }
        let criteria = Criteria {
            stages: &self.flags.agent_upgrade_stages,
            pause: i64::try_from(self.flags.agent_upgrade_pause.as_secs()).unwrap_or(i64::MAX),
            max_failures: self.flags.agent_upgrade_max_failures,
            confirmed: self.snapshot.confirms(&retargeted.target),
            now: unix,
        };
        let next = decide::step(&retargeted, &fleet, criteria).unwrap_or(retargeted);
        if next != *current || matches!(self.snapshot, Snapshot::Absent) {
            let outcome = self.map.write(self.snapshot.metadata().cloned(), next.to_data()).await;
            self.dependencies.metrics.count_write(outcome);
        }
    }

    /// Assesses all runtimes. `current` is the state in effect, `retargeted` the next one.
    fn fleet(&mut self, current: &UpgradeState, retargeted: &UpgradeState, now: Instant) -> Fleet {
        let reports = self.dependencies.fleet.path_reports();
        let known: BTreeSet<_> = reports.iter().map(|report| &report.kyma).collect();
        self.table.retain(|key| known.contains(key));
        self.handle.retain(|key| known.contains(key));
        self.enqueued.retain(|key| known.contains(key));
        self.table.set_target(&retargeted.target);
        let mut fleet = Fleet::default();
        for report in &reports {
            if !self.is_eligible(report) {
                fleet.excluded += 1;
                self.table.suspend(&report.kyma);
                continue;
            }
            let rank = self.table.rank(&report.kyma, &report.runtime);
            let decision = if current.target == retargeted.target {
                current.image_for_rank(rank)
            } else {
                current.image_for(&report.runtime)
            };
            let observation = Observation { report, observed: self.handle.observed_image(&report.kyma), decision };
            fleet.members.extend(self.table.assess(observation, self.flags.agent_upgrade_deadline, now));
        }
        fleet
    }

    /// Returns whether a runtime counts.
    fn is_eligible(&self, report: &PathReport) -> bool {
        if matches!(report.path, PathState::Unproven(Unproven::Away | Unproven::LegacyAgent)) {
            return false;
        }
        let key = &report.kyma;
        let kyma = self.dependencies.stores.kymas.get(&ObjectRef::new(&key.name).within(&key.namespace));
        let Dependencies { takeover, pause, .. } = &self.dependencies;
        let is_reconciled =
            |kyma: &Kyma| kyma.metadata.deletion_timestamp.is_none() && takeover.reconciles(kyma, pause);
        kyma.is_some_and(|kyma| is_reconciled(&kyma)) && !takeover.is_pending(key)
    }

    /// Enqueues, once each, runtimes that do not have their assigned image; the queue retries failed reconciles.
    fn enqueue_outdated(&mut self, state: &UpgradeState, fleet: &Fleet) {
        let lacks = |member: &&decide::Member| match state.image_for_rank(member.rank) {
            ImageDecision::Use(image) => match &member.image {
                Some(has) => *has != image,
                // Images are observed by verifications within minutes after a start; an upgrade does not wait for them.
                None => !state.is_done() && image == state.target,
            },
            ImageDecision::KeepOr(_) => member.image.is_none(),
        };
        let enqueued = &self.enqueued;
        let next =
            fleet.members.iter().filter(lacks).filter(|member| !enqueued.contains(&member.kyma)).take(MAX_ENQUEUED);
        let next: Vec<_> = next.map(|member| member.kyma.clone()).collect();
        for key in next {
            self.dependencies.fleet.enqueue(&key, WorkSet::INSTALLER, Priority::Catalog);
            self.enqueued.insert(key);
        }
    }
}

#[cfg(test)]
mod tests;
