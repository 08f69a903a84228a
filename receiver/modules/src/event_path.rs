//! Acts on the state of event paths: writes conditions, polls runtimes with an unproven path, and verifies the others
//! slowly.
//!
//! The runtime table determines the state of each path; one loop acts on it once a second. Pure modules: `condition`
//! computes the conditions, `poll_scheduler` the times of polls, `write_backoff` the spacing of writes per Kyma.
//! `write` writes a condition, `restart` orders the reconciles after a start.

mod condition;
mod metrics;
mod poll_scheduler;
mod restart;
mod up_to_date;
mod write;
mod write_backoff;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use clap::Args;
use futures::{StreamExt as _, stream};
use jiff::Timestamp;
use kube::Client;
use tidewatch_api::{Condition, Kyma, facts::KymaFacts, key::KymaKey, shard::ShardId};
use tidewatch_cluster::{flags::seconds, limits::CONNECTION_LOST_AFTER};
use tidewatch_fleet::{
    PathState, Unproven,
    pause::Pause,
    plans::Plans,
    queue::{Priority, WorkSet},
    stores::{
        Stores,
        kymas::{self, CachedKyma},
    },
    table::RuntimeTable,
    takeover::Takeover,
};
use tidewatch_kit::{
    clock::{ClockStep, ClockSteps},
    log_error,
    variant::VariantName as _,
};
use tidewatch_trust::RotationHandle;
use tokio::time::{self, Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

pub use metrics::Metrics;
pub use restart::AcquiredKymas;

use self::{
    poll_scheduler::{PollScheduler, TokenBucket},
    up_to_date::{SharedInputs, UpToDate},
    write_backoff::WriteBackoff,
};
use crate::{catalog::Catalog, kyma::REFUSED_AGAIN, windows::MaintenanceWindows};

/// Interval of the loop.
const TICK: Duration = Duration::from_secs(1);
/// Time within which a healthy agent reconnects after its connection ended.
const LOST_AFTER: Duration = Duration::from_secs(5);
/// Upper limit of the time in which a silent agent is detected, also if its connection ends without notice.
const SILENCE_DETECTED_WITHIN: Duration = Duration::from_secs(30);
const _: () = assert!(
    CONNECTION_LOST_AFTER.as_secs() + LOST_AFTER.as_secs() + TICK.as_secs() < SILENCE_DETECTED_WITHIN.as_secs()
);
/// Condition of the installation of the agent.
const INSTALLED: &str = "SKRWebhook";
/// Maximum number of concurrent writes of conditions.
const WRITE_CONCURRENCY: usize = 8;

/// Flags for proven and unproven event paths.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Event path")]
pub struct Flags {
    /// Average interval in seconds between two polls of a runtime whose event path is not proven
    #[arg(long = "fallback-poll-seconds", env = "TIDEWATCH_FALLBACK_POLL_SECONDS", default_value = "300", value_name = "SECONDS", value_parser = seconds(1..=86_400))]
    pub fallback_poll_interval: Duration,

    /// Maximum number of polls and verifications per second, over all runtimes
    #[arg(long, env = "TIDEWATCH_FALLBACK_POLLS_PER_SECOND", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub fallback_polls_per_second: u32,

    /// Maximum number of conditions of event paths written to Kymas per second, over all Kymas
    #[arg(long, env = "TIDEWATCH_CONDITION_WRITES_PER_SECOND", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub condition_writes_per_second: u32,

    /// Average interval in seconds between two verifications of a runtime whose event path is proven, since no watch
    /// reports a revoked permission
    #[arg(long = "verification-seconds", env = "TIDEWATCH_VERIFICATION_SECONDS", default_value = "21600", value_name = "SECONDS", value_parser = seconds(1..=2_592_000))]
    pub verification_interval: Duration,

    /// Time in seconds over which the runtimes without changes are verified after a start
    #[arg(long = "restart-spread-seconds", env = "TIDEWATCH_RESTART_SPREAD_SECONDS", default_value = "300", value_name = "SECONDS", value_parser = seconds(0..=86_400))]
    pub restart_spread: Duration,

    /// Time in seconds after which a silent runtime that cannot be reached either is away: neither alerted on nor
    /// polled
    #[arg(long = "away-seconds", env = "TIDEWATCH_AWAY_SECONDS", default_value = "7200", value_name = "SECONDS", value_parser = seconds(1..=2_592_000))]
    pub away_after: Duration,

    /// Maximum number of heartbeats per second, over all runtimes; with more runtimes their interval grows, up to an
    /// hour
    #[arg(long, env = "TIDEWATCH_MAX_HEARTBEATS_PER_SECOND", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_heartbeats_per_second: u32,
}

/// Controller of event paths.
pub struct EventPathController {
    /// Flags of the controller.
    pub flags: Flags,
    /// Client of KCP.
    pub client: Client,
    /// Caches of KCP.
    pub stores: Stores,
    /// States of the paths, and the queue of reconciles.
    pub fleet: RuntimeTable,
    /// Desired catalog of each runtime, an input of its reconciles.
    pub catalog: Catalog,
    /// Plans of the runtimes, another input.
    pub plans: Plans,
    /// Paused runtimes.
    pub pause: Pause,
    /// Kymas that belong to this receiver.
    pub takeover: Takeover,
    /// Maintenance windows that Kymas wait for.
    pub windows: MaintenanceWindows,
    /// Stragglers of a CA rotation.
    pub rotations: RotationHandle,
    /// Set if agents are installed, and so repaired when they are silent.
    pub installs: bool,
    /// Metrics of the controller.
    pub metrics: Metrics,
}

impl EventPathController {
    /// Enqueues the Kymas of shards that are acquired later.
    pub fn acquired_kymas(&self) -> AcquiredKymas {
        AcquiredKymas {
            spread: self.flags.restart_spread,
            stores: self.stores.clone(),
            plans: self.plans.clone(),
            catalog: self.catalog.clone(),
            windows: self.windows.clone(),
            fleet: self.fleet.clone(),
        }
    }

    /// Runs for ever once the caches have synced, after enqueuing all Kymas.
    pub async fn run(self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        self.acquired_kymas().enqueue_all();
        let mut state = LoopState::new(&self.flags, Instant::now());
        let mut clock = ClockSteps::new(Timestamp::now(), Instant::now());
        let mut tick = time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let now = tick.tick().await;
            self.follow_shards(&mut state);
            if let Some(ClockStep::Forward(step)) = clock.step(Timestamp::now(), Instant::now()) {
                tracing::info!(seconds = step.as_secs(), "The system's clock was set forward");
                self.fleet.clock_advanced(step);
            }
            for (key, path) in self.fleet.changed_paths() {
                self.metrics.transitioned(&path);
                tracing::info!(kyma = %key, path = path.as_str(), "Event path changed");
                self.path_changed(&mut state, &key, &path, now);
                let kyma = self.kyma(&key);
                state.path_changed(key, path, kyma.as_ref(), now);
            }
            let kymas = self.stores.kymas.state();
            state.forget_deleted(&kymas);
            if self.installs {
                state.suspects.extend(self.fleet.lost(LOST_AFTER).into_iter().map(|key| (key, now)));
            }
            // Also without an installer: a manually installed agent gets its Lease from this receiver.
            state.suspects.extend(self.fleet.incomplete(REFUSED_AGAIN).into_iter().map(|key| (key, now)));
            self.repair_installations(&mut state, now);
            self.poll(&mut state, now);
            self.write_conditions(&mut state, &kymas, now).await;
        }
    }

    /// Adapts the rates to this replica's part of the fleet, and forgets the Kymas of released shards.
    fn follow_shards(&self, state: &mut LoopState) {
        let held = self.fleet.held();
        let flags = &self.flags;
        if held == state.held {
            return;
        }
        state.held = held;
        state.up_to_date.clear();
        state.polls.set_rate(self.fleet.share_of_rate(flags.fallback_polls_per_second));
        state.writes.set_rate(self.fleet.share_of_rate(flags.condition_writes_per_second));
        state.retain(|key| !self.fleet.is_elsewhere(key));
    }

    /// Verifies the installation after the loss of a path, which the agent may be unable to report, and after the proof
    /// of a path, for which an installation may wait.
    fn path_changed(&self, state: &mut LoopState, key: &KymaKey, path: &PathState, now: Instant) {
        if !self.installs {
            return;
        }
        match path {
            PathState::Unproven(flaw) if !matches!(flaw, Unproven::Away | Unproven::LegacyAgent) => {
                state.suspects.insert(key.clone(), now);
            }
            PathState::Proven => {
                let is_installed = |kyma: &Kyma| condition::shown(kyma, INSTALLED).is_some_and(Condition::is_true);
                if !self.kyma(key).is_some_and(|kyma| kyma.whole().is_some_and(|kyma| is_installed(kyma))) {
                    self.fleet.enqueue(key, WorkSet::INSTALLER, Priority::Catalog);
                }
            }
            PathState::Unknown | PathState::Unproven(_) => {}
        }
    }

    /// Returns whether a reconcile may be enqueued without a request.
    fn may_reconcile(&self, key: &KymaKey) -> bool {
        self.kyma(key).is_some_and(|kyma| self.pause.of(&*kyma).is_none() && !self.is_foreign(key, kyma.facts()))
    }

    fn kyma(&self, key: &KymaKey) -> Option<Arc<CachedKyma>> {
        kymas::find(&self.stores.kymas, key)
    }

    /// Returns whether a Kyma is being taken over or handed back, or in a shard of another replica, and so gets no conditions.
    fn is_foreign(&self, key: &KymaKey, kyma: KymaFacts<'_>) -> bool {
        kyma.is_hand_back_requested()
            || kyma.is_handed_back()
            || self.takeover.is_pending(key)
            || self.fleet.is_elsewhere(key)
    }

    /// Enqueues verifications of the installations of suspect agents, within the rate of all polls.
    fn repair_installations(&self, state: &mut LoopState, now: Instant) {
        let needs_repair = |key: &KymaKey, since| self.may_reconcile(key) && self.fleet.needs_repair(key, since);
        for key in state.take_repairs(needs_repair, now) {
            tracing::info!(kyma = %key, "Agent is silent or lacks an object, its installation is verified");
            self.metrics.repairs.inc();
            self.fleet.repair(&key);
        }
    }

    /// Enqueues the due verifications. A paused runtime is skipped: its work is enqueued when the pause ends.
    fn poll(&self, state: &mut LoopState, now: Instant) {
        let limit = state.polls.take(usize::MAX, now);
        let due = state.scheduler.due(now, limit);
        state.polls.put_back(limit - due.len());
        for (key, kind) in due {
            if self.may_reconcile(&key) {
                self.metrics.polled(kind);
                self.fleet.verify(&key);
            }
        }
    }

    /// Writes the conditions that differ from the cached ones.
    async fn write_conditions(&self, state: &mut LoopState, kymas: &[Arc<CachedKyma>], now: Instant) {
        let inputs = SharedInputs {
            stragglers: self.rotations.stragglers.borrow().clone(),
            halts: self.catalog.rollouts().halts(),
            paused: self.pause.of_all(),
        };
        state.up_to_date.follow(&inputs, kymas);
        let mut pending = Vec::new();
        for cached in kymas {
            // A reduced one is in a shard of another replica, which writes its conditions.
            let Some(kyma) = cached.whole().filter(|_| !state.up_to_date.contains(cached)) else { continue };
            let Some((name, namespace)) = kyma.metadata.name.as_ref().zip(kyma.metadata.namespace.as_ref()) else {
                continue;
            };
            let key = KymaKey::new(namespace, name);
            if self.is_foreign(&key, kyma.into()) {
                continue;
            }
            let path = state.paths.get(&key);
            let changes: Vec<_> = condition::event_path(path, || self.fleet.kyma_has_used_v3(&key), kyma)
                .into_iter()
                .chain(condition::paused(self.pause.of(kyma), kyma))
                .chain(condition::module_rollout(inputs.halts.as_ref().map(|halts| halts.get(&key)), kyma))
                .chain(condition::rotation(inputs.stragglers.as_ref().map(|stragglers| stragglers.of(&key)), kyma))
                .collect();
            if changes.is_empty() && path.is_none_or(condition::is_independent_of_events) {
                state.up_to_date.insert(cached);
            }
            pending.extend(changes.into_iter().map(|change| (key.clone(), kyma.clone(), change)));
        }
        self.metrics.waiting(pending.len());
        state.write_backoff.select(&mut pending, now);
        // The rest follows with the next ticks.
        pending.truncate(state.writes.take(pending.len(), now));
        let tenures = &self.fleet.tenures();
        let writes = pending.into_iter().map(async |(key, kyma, change)| {
            let tenure = tenures(&key);
            let result = tenure.run(write::condition(&self.client, &kyma, &change)).await;
            (key, change, result)
        });
        let mut written = stream::iter(writes).buffer_unordered(WRITE_CONCURRENCY);
        while let Some((key, change, result)) = written.next().await {
            // The next holder of a shard that is handed over writes it.
            let Some(result) = result else { continue };
            self.metrics.wrote_condition(&result);
            if matches!(result, Err(write::WriteError::Conflict)) {
                // The next tick decides anew, from the updated cache.
                continue;
            }
            if let Err(error) = result {
                log_error!(warn, &error, kyma = %key, condition = change.kind(), "Condition could not be written");
            }
            state.write_backoff.record(key, &change, now);
        }
    }
}

/// State of the loop, bounded by the number of Kymas.
struct LoopState {
    /// Shards by which the rates were set last.
    held: Vec<ShardId>,
    paths: HashMap<KymaKey, PathState>,
    /// Kymas with an agent that may be broken, and since when.
    suspects: BTreeMap<KymaKey, Instant>,
    scheduler: PollScheduler,
    polls: TokenBucket,
    /// An odd token is reserved for a poll.
    polls_first: bool,
    write_backoff: WriteBackoff,
    writes: TokenBucket,
    up_to_date: UpToDate,
}

impl LoopState {
    fn new(flags: &Flags, now: Instant) -> Self {
        Self {
            held: Vec::new(),
            paths: HashMap::new(),
            suspects: BTreeMap::new(),
            scheduler: PollScheduler::new(flags.fallback_poll_interval, flags.verification_interval),
            polls: TokenBucket::new(flags.fallback_polls_per_second, now),
            polls_first: false,
            write_backoff: WriteBackoff::default(),
            writes: TokenBucket::new(flags.condition_writes_per_second, now),
            up_to_date: UpToDate::default(),
        }
    }

    /// Follows a changed path of a Kyma, which is `None` once it is deleted.
    fn path_changed(&mut self, key: KymaKey, path: PathState, kyma: Option<&Arc<CachedKyma>>, now: Instant) {
        self.scheduler.path_changed(&key, &path, now);
        if let Some(kyma) = kyma {
            self.up_to_date.remove(kyma);
        }
        self.paths.insert(key, path);
    }

    /// Takes the suspects to repair now, within the rate of all polls. Suspects that need no repair any more use none of
    /// it, and due polls get half of it.
    fn take_repairs(&mut self, needs_repair: impl Fn(&KymaKey, Instant) -> bool, now: Instant) -> Vec<KymaKey> {
        let available = self.polls.take(usize::MAX, now);
        // Where the rate is one per second, repairs and polls take turns.
        self.polls_first = !self.polls_first;
        let half = (available + usize::from(self.polls_first)) / 2;
        let limit = available - self.scheduler.count_due(now, half);
        let mut repairs = Vec::new();
        while repairs.len() < limit
            && let Some((key, since)) = self.suspects.pop_first()
        {
            if needs_repair(&key, since) {
                repairs.push(key);
            }
        }
        self.polls.put_back(available - repairs.len());
        repairs
    }

    fn forget_deleted(&mut self, kymas: &[Arc<CachedKyma>]) {
        if self.paths.len() <= kymas.len() && self.write_backoff.len() <= 2 * kymas.len() {
            return;
        }
        let present: HashSet<_> = kymas.iter().map(|kyma| kyma.key()).collect();
        self.retain(|key| present.contains(key));
    }

    /// Retains only these Kymas.
    fn retain(&mut self, keep: impl Fn(&KymaKey) -> bool) {
        self.paths.retain(|key, _| keep(key));
        self.suspects.retain(|key, _| keep(key));
        self.scheduler.retain(&keep);
        self.write_backoff.retain(keep);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use http::StatusCode;
    use kube::runtime::reflector::store::Writer;
    use parking_lot::Mutex;
    use serde_json::json;
    use tidewatch_api::{identity::RuntimeId, plan::Plan};
    use tidewatch_cluster::{WriteBudgets, leader::WriteFence, testing};
    use tidewatch_fleet::{Unproven, table};
    use tidewatch_kit::metrics::Registry;
    use tokio::sync::{mpsc, watch};

    use super::*;
    use crate::catalog;

    const S: Duration = Duration::from_secs(1);
    const FLEET: u32 = 5_000;

    fn key(n: u32) -> KymaKey {
        KymaKey::new("ns", format!("k{n}"))
    }

    fn flags() -> Flags {
        Flags {
            fallback_poll_interval: 300 * S,
            fallback_polls_per_second: 20,
            condition_writes_per_second: 20,
            verification_interval: 21_600 * S,
            restart_spread: 300 * S,
            away_after: 7_200 * S,
            max_heartbeats_per_second: 60,
        }
    }

    /// State after all paths were lost so long ago that each Kyma is due for a poll.
    fn after_loss(start: Instant) -> LoopState {
        let mut state = LoopState::new(&flags(), start);
        for key in (0..FLEET).map(key) {
            state.scheduler.path_changed(&key, &PathState::Unproven(Unproven::NoHeartbeat), start);
            state.suspects.insert(key, start);
        }
        state
    }

    #[test]
    fn agents_that_came_back_use_no_part_of_the_rate_of_polls() {
        let start = Instant::now();
        let mut state = after_loss(start);
        let now = start + 301 * S;
        // All but one reconnected after a failure of the load balancer.
        let repairs = state.take_repairs(|silent, _| *silent == key(7), now);
        assert_eq!((repairs, state.suspects.len()), (vec![key(7)], 0));
        let limit = state.polls.take(usize::MAX, now);
        assert_eq!(state.scheduler.due(now, limit).len(), 19);
    }

    #[test]
    fn repairs_and_due_polls_share_the_rate() {
        let start = Instant::now();
        let mut state = after_loss(start);
        let now = start + 301 * S;
        let mut repairs = 0;
        let mut polls = 0;
        for second in 0..100 {
            let now = now + S * second;
            repairs += state.take_repairs(|_, _| true, now).len();
            let limit = state.polls.take(usize::MAX, now);
            polls += state.scheduler.due(now, limit).len();
        }
        assert_eq!((repairs, polls), (1_000, 1_000));
        let mut state = after_loss(start);
        let before_any_is_due = start;
        assert!(state.take_repairs(|_, _| true, before_any_is_due).len() >= 19, "unused polls leave their part");
    }

    fn controller(client: Client, fleet: RuntimeTable) -> EventPathController {
        let empty = Stores {
            kymas: Writer::default().as_reader(),
            templates: Writer::default().as_reader(),
            release_metas: Writer::default().as_reader(),
            manifests: Writer::default().as_reader().into(),
            watchers: Writer::default().as_reader(),
        };
        let catalog =
            Catalog::deciding(catalog::Settings::default(), catalog::Metrics::default(), WriteBudgets::default());
        let (requests, _) = mpsc::channel(1);
        let rotations =
            RotationHandle { requests, progress: watch::channel(None).1, stragglers: watch::channel(None).1 };
        EventPathController {
            flags: flags(),
            client,
            stores: empty,
            fleet,
            catalog,
            plans: Plans::fixed(Plan::new("r".into(), Vec::new()).unwrap()),
            pause: Pause::default(),
            takeover: Takeover::default(),
            windows: MaintenanceWindows::with_policy(&json!({})),
            rotations,
            installs: true,
            metrics: Metrics::register(&mut Registry::default()),
        }
    }

    /// Their next holder writes them. A drain waits for those that are being written, under the fence of their shard.
    #[tokio::test(start_paused = true)]
    async fn conditions_of_a_shard_that_is_drained_or_released_are_not_written() {
        let metrics = table::Metrics::register(&mut Registry::default());
        let fleet = RuntimeTable::alone(1, table::Settings::default(), metrics);
        let shard = |runtime: &str| fleet.shard_of(Some(&runtime.parse().unwrap()), "");
        let kyma = |name: &str| -> Arc<CachedKyma> {
            let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
                "metadata": {"name": name, "namespace": "ns", "uid": name}, "spec": {"channel": "regular"}});
            Arc::new(serde_json::from_value(kyma).unwrap())
        };
        let names = ["r-1", "r-2", "r-3"];
        let [drained, released, held] = names.map(shard);
        assert!(drained != released && released != held && held != drained);
        for name in names {
            let plan = Arc::new(Plan::new("r".into(), Vec::new()).unwrap());
            fleet.place(KymaKey::new("ns", name), name, Some(name.parse::<RuntimeId>().unwrap()), plan);
        }
        fleet.set_synced();
        let table = fleet.clone();
        let written = Arc::<Mutex<Vec<_>>>::default();
        let requests = written.clone();
        let client = testing::client("ns", move |parts, body| {
            let is_permitted = WriteFence::closed().check(&parts.method).is_ok();
            let is_awaited = table.drain(held).now_or_never().is_none();
            let name = parts.uri.path().rsplit('/').nth(1).unwrap().to_owned();
            requests.lock().push((name, is_permitted, is_awaited));
            Some((StatusCode::OK, body.to_vec()))
        });

        let controller = controller(client, fleet.clone());
        let now = Instant::now();
        let mut state = LoopState::new(&controller.flags, now);
        for name in names {
            state.paths.insert(KymaKey::new("ns", name), PathState::Unproven(Unproven::NoHeartbeat));
        }
        assert!(fleet.drain(drained).now_or_never().is_some());
        fleet.release(released);
        controller.write_conditions(&mut state, &names.map(kyma), now).await;
        assert_eq!(*written.lock(), [("r-3".to_owned(), true, true)]);
        assert!(fleet.drain(held).now_or_never().is_some());
        controller.write_conditions(&mut state, &names.map(kyma), now + 3_600 * S).await;
        assert_eq!(written.lock().len(), 1, "drained as well");
    }

    fn bare() -> Kyma {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k", "namespace": "ns", "uid": "u"}, "spec": {"channel": "regular"}}))
        .unwrap()
    }

    /// Kymas with nothing to write are not computed again, until an input changes.
    #[tokio::test(start_paused = true)]
    async fn condition_of_a_changed_path_is_written_after_it_was_up_to_date() {
        let written = Arc::<Mutex<Vec<_>>>::default();
        let requests = written.clone();
        let client = testing::client("ns", move |parts, body| {
            requests.lock().push(parts.uri.path().rsplit('/').nth(1).unwrap().to_owned());
            Some((StatusCode::OK, body.to_vec()))
        });
        let fleet =
            RuntimeTable::alone(1, table::Settings::default(), table::Metrics::register(&mut Registry::default()));
        let controller = controller(client, fleet);
        let now = Instant::now();
        let key = KymaKey::new("ns", "k");
        let mut state = LoopState::new(&controller.flags, now);
        let shown = |path: &PathState| -> Arc<CachedKyma> {
            let Some(condition::Change::Set { reason, message, .. }) =
                condition::event_path(Some(path), || false, &bare())
            else {
                panic!("no condition")
            };
            let mut kyma = json!(bare());
            kyma["status"] = json!({"conditions": [{"type": "EventPath", "status": path.status(), "reason": reason,
                "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
            Arc::new(serde_json::from_value(kyma).unwrap())
        };
        let kymas = [shown(&PathState::Proven)];
        state.path_changed(key.clone(), PathState::Proven, Some(&kymas[0]), now);
        controller.write_conditions(&mut state, &kymas, now).await;
        assert!(written.lock().is_empty() && state.up_to_date.contains(&kymas[0]));
        let failing = PathState::Unproven(Unproven::OldPlan { error: None });
        state.path_changed(key.clone(), failing.clone(), Some(&kymas[0]), now);
        controller.write_conditions(&mut state, &kymas, now).await;
        assert_eq!(*written.lock(), ["k"]);
        assert!(!state.up_to_date.contains(&kymas[0]), "the cache does not have the condition yet");
        let silent = PathState::Unproven(Unproven::NoHeartbeat);
        let kymas = [shown(&silent)];
        state.path_changed(key, silent, Some(&kymas[0]), now);
        controller.write_conditions(&mut state, &kymas, now).await;
        assert!(!state.up_to_date.contains(&kymas[0]), "its condition depends on events, too");
    }
}
