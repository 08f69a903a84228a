//! Time from the start of a user's write to the instant at which the receiver enqueues the Kyma, over the same writes
//! as observed by a plain metadata watch.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use kube::{
    Api, ResourceExt as _,
    core::PartialObjectMeta,
    runtime::{WatchStreamExt as _, watcher},
};
use parking_lot::Mutex;
use tidewatch_api::{
    Kyma,
    names::{SKR_KYMA, SKR_NAMESPACE},
};
use tidewatch_testing::{landscape::until, progress::Step, stamps};

use super::{
    Figure, Settings, api_calls,
    figure::{mebibytes, median, millis, quantile, time_of},
    plain_path::{self, Floor},
    runtime_setup::RuntimeSetup,
    writer::{self, Write},
};

/// Instant at which each resource version was observed.
pub(super) type Observations = Arc<Mutex<BTreeMap<u64, SystemTime>>>;

/// Runs the measurement and emits each figure.
///
/// # Errors
/// When the setup cannot be started or a write fails.
pub async fn event_path(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let setup = RuntimeSetup::start(settings).await?;
    let floor = Observations::default();
    let watch = tokio::spawn(watch(setup.runtime.user(), floor.clone()));
    // Warms up connections and caches, which are not part of the path.
    writer::toggle(&setup.runtime, settings.rate, settings.pause()).await?;
    let mut runs = Vec::new();
    for number in 1..=settings.runs {
        let step = Step::begin(format!("event path, run {number} of {}: {} s", settings.runs, settings.seconds));
        runs.push(Run::measure(&setup, settings, &floor).await?);
        step.done();
    }
    watch.abort();
    let step = Step::begin(format!("floor of the CPU time: {} s", settings.seconds));
    let floor = plain_path::measure(&setup, settings).await?;
    step.done();
    paths(&runs, emit);
    costs(&runs, floor, emit);
    memory(&setup, emit).await
}

struct Run {
    event: [f64; 2],
    floor: [f64; 2],
    agent_cpu: f64,
    gateway_cpu: f64,
    reconcile_cpu: f64,
    calls: [f64; 2],
}

impl Run {
    async fn measure(setup: &RuntimeSetup, settings: &Settings, floor: &Observations) -> Result<Self> {
        let before = Spent::now(setup).await?;
        let writes = writer::toggle(&setup.runtime, settings.writes(), settings.pause()).await?;
        let events = enqueued(setup, &writes).await?;
        let after = Spent::now(setup).await?;
        let count = f64::from(u32::try_from(writes.len())?);
        let mut event = Vec::new();
        let mut plain = Vec::new();
        let floor = floor.lock().clone();
        for write in &writes {
            // A version that was superseded before it was sent is covered by the next one.
            let at = |seen: &BTreeMap<u64, SystemTime>| seen.range(write.resource_version..).next().map(|(_, at)| *at);
            let enqueued = at(&events).context("no event of a write")?;
            let seen = at(&floor).context("no watch event of a write")?;
            event.push(millis(enqueued.duration_since(write.begun)?));
            plain.push(millis(seen.duration_since(write.begun)?));
        }
        Ok(Self {
            event: [quantile(&mut event, 0.5), quantile(&mut event, 0.99)],
            floor: [quantile(&mut plain, 0.5), quantile(&mut plain, 0.99)],
            agent_cpu: millis(after.agent - before.agent) / count,
            gateway_cpu: millis(after.gateway - before.gateway) / count,
            reconcile_cpu: millis(after.reconcile - before.reconcile) / count,
            calls: [(after.calls[0] - before.calls[0]) / count, (after.calls[1] - before.calls[1]) / count],
        })
    }
}

/// Waits until the last write was enqueued, and reads the instant of each.
async fn enqueued(setup: &RuntimeSetup, writes: &[Write]) -> Result<BTreeMap<u64, SystemTime>> {
    let last = writes.last().map_or(0, |write| write.resource_version);
    let file = setup.landscape.stamp_file();
    until("the last write to be enqueued", async || {
        let stamps = stamps::read(&file)?.into_iter().filter(|stamp| stamp.watch == "kyma");
        let events: BTreeMap<u64, SystemTime> =
            stamps.filter_map(|stamp| Some((stamp.resource_version.parse().ok()?, stamp.enqueued))).collect();
        Ok(events.keys().next_back().is_some_and(|newest| *newest >= last).then_some(events))
    })
    .await
}

/// CPU time and requests so far.
struct Spent {
    agent: Duration,
    gateway: Duration,
    reconcile: Duration,
    calls: [f64; 2],
}

impl Spent {
    async fn now(setup: &RuntimeSetup) -> Result<Self> {
        let agent = setup.runtime.with_agent(async |agent| agent.cpu_by_thread()).await??;
        let receiver = setup.landscape.with_receiver(async |receiver| receiver.cpu_by_thread()).await??;
        let [gateway, reconcile] = ["gateway", "reconcile"].map(|name| time_of(&receiver, name));
        let calls =
            [api_calls::answered(setup.runtime.cluster()).await?, api_calls::answered(setup.landscape.kcp()).await?];
        Ok(Self { agent: agent.values().sum(), gateway, reconcile, calls })
    }
}

fn paths(runs: &[Run], emit: &mut impl FnMut(&Figure)) {
    for (index, figure) in ["event_path_p50", "event_path_p99"].into_iter().enumerate() {
        let of = |pick: fn(&Run) -> [f64; 2]| median(runs.iter().map(|run| pick(run)[index]).collect());
        let ratios = runs.iter().map(|run| run.event[index] / run.floor[index]).collect();
        emit(&Figure::new(figure, of(|run| run.event), "ms").ratio_at_most(of(|run| run.floor), median(ratios), 1.5));
    }
}

fn costs(runs: &[Run], floor: Floor, emit: &mut impl FnMut(&Figure)) {
    let of = |pick: fn(&Run) -> f64| median(runs.iter().map(pick).collect());
    emit(&Figure::new("agent_cpu_per_event", of(|run| run.agent_cpu), "ms").with_floor(floor.agent).at_most(0.4));
    emit(
        &Figure::new("gateway_cpu_per_event", of(|run| run.gateway_cpu), "ms").with_floor(floor.gateway).at_most(0.25),
    );
    emit(&Figure::new("reconcile_cpu_per_event", of(|run| run.reconcile_cpu), "ms"));
    // One of them is the user's own write.
    emit(&Figure::new("runtime_api_calls_per_event", of(|run| run.calls[0]) - 1.0, "calls"));
    emit(&Figure::new("kcp_api_calls_per_event", of(|run| run.calls[1]), "calls"));
}

async fn memory(setup: &RuntimeSetup, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let agent = setup.runtime.with_agent(async |agent| agent.memory()).await??;
    let receiver = setup.landscape.with_receiver(async |receiver| receiver.memory()).await??;
    emit(&Figure::new("agent_pss", mebibytes(agent.pss_kib), "MiB").at_most(10.0));
    emit(&Figure::new("agent_peak_rss", mebibytes(agent.peak_rss_kib), "MiB"));
    emit(&Figure::new("receiver_pss", mebibytes(receiver.pss_kib), "MiB"));
    emit(&Figure::new("receiver_peak_rss", mebibytes(receiver.peak_rss_kib), "MiB"));
    Ok(())
}

/// The plain watch: events as any Rust client observes them.
pub(super) async fn watch(client: kube::Client, seen: Observations) {
    let api = Api::<PartialObjectMeta<Kyma>>::namespaced(client, SKR_NAMESPACE);
    let config = watcher::Config::default().fields(&format!("metadata.name={SKR_KYMA}"));
    let mut stream = watcher(api, config).default_backoff().applied_objects().boxed();
    while let Some(event) = stream.next().await {
        let at = SystemTime::now();
        if let Some(version) = event.ok().and_then(|kyma| kyma.resource_version()?.parse().ok()) {
            seen.lock().entry(version).or_insert(at);
        }
    }
}
