//! From the start of a user's write to the instant at which the receiver marks the Kyma wanted, over the same writes as a plain
//! metadata watch sees them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use kube::{
    Api, ResourceExt as _,
    core::PartialObjectMeta,
    runtime::{WatchStreamExt as _, watcher},
};
use tidewatch_shared::{
    api::Kyma,
    names::{SKR_KYMA, SKR_NAMESPACE},
};

use super::{
    Figure, Settings, api_calls,
    figure::{mebibytes, median, millis, quantile},
    plain_path::{self, Floor},
    setting::Setting,
    writer::{self, Write},
};
use crate::{demo::stamps, landscape::until, progress::Step};

/// At which instant each resource version was seen.
pub(super) type Seen = Arc<Mutex<BTreeMap<u64, SystemTime>>>;

/// Runs the measurement and tells each figure.
///
/// # Errors
/// When the setting does not stand or a write fails.
pub async fn event_path(settings: &Settings, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    let setting = Setting::start(settings).await?;
    let floor = Seen::default();
    let watch = tokio::spawn(watch(setting.runtime.user(), floor.clone()));
    // What is cold on the first writes (connections, caches) is no part of the path.
    writer::toggle(&setting.runtime, settings.rate, settings.pause()).await?;
    let mut runs = Vec::new();
    for number in 1..=settings.runs {
        let step = Step::begin(format!("event path, run {number} of {}: {} s", settings.runs, settings.seconds));
        runs.push(Run::measure(&setting, settings, &floor).await?);
        step.done();
    }
    watch.abort();
    let step = Step::begin(format!("the floor of its CPU time: {} s", settings.seconds));
    let floor = plain_path::measure(&setting, settings).await?;
    step.done();
    paths(&runs, tell);
    costs(&runs, floor, tell);
    memory(&setting, tell).await
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
    async fn measure(setting: &Setting, settings: &Settings, floor: &Seen) -> Result<Self> {
        let before = Spent::now(setting).await?;
        let writes = writer::toggle(&setting.runtime, settings.writes(), settings.pause()).await?;
        let events = wanted(setting, &writes).await?;
        let after = Spent::now(setting).await?;
        let count = f64::from(u32::try_from(writes.len())?);
        let mut event = Vec::new();
        let mut plain = Vec::new();
        let floor = floor.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for write in &writes {
            // A version that was overtaken before it was sent is told by the next one.
            let at = |seen: &BTreeMap<u64, SystemTime>| seen.range(write.resource_version..).next().map(|(_, at)| *at);
            let (wanted, seen) = (at(&events).context("an event")?, at(&floor).context("the plain watch")?);
            event.push(millis(wanted.duration_since(write.begun)?));
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

/// Waits until the last write was wanted, and reads when each was.
async fn wanted(setting: &Setting, writes: &[Write]) -> Result<BTreeMap<u64, SystemTime>> {
    let last = writes.last().map_or(0, |write| write.resource_version);
    let file = setting.landscape.stamp_file();
    until("the last write to be wanted", async || {
        let stamps = stamps::read(&file)?.into_iter().filter(|stamp| stamp.watch == "kyma");
        let events: BTreeMap<u64, SystemTime> =
            stamps.filter_map(|stamp| Some((stamp.resource_version.parse().ok()?, stamp.wanted))).collect();
        Ok(events.keys().next_back().is_some_and(|newest| *newest >= last).then_some(events))
    })
    .await
}

/// What was spent so far.
struct Spent {
    agent: Duration,
    gateway: Duration,
    reconcile: Duration,
    calls: [f64; 2],
}

impl Spent {
    async fn now(setting: &Setting) -> Result<Self> {
        let agent = setting.runtime.with_agent(async |agent| agent.cpu_by_thread()).await??;
        let receiver = setting.landscape.with_receiver(async |receiver| receiver.cpu_by_thread()).await??;
        let named =
            |name: &str| receiver.iter().filter(|(thread, _)| thread.starts_with(name)).map(|(_, spent)| *spent).sum();
        let calls = [
            api_calls::answered(setting.runtime.cluster()).await?,
            api_calls::answered(setting.landscape.kcp()).await?,
        ];
        Ok(Self { agent: agent.values().sum(), gateway: named("gateway"), reconcile: named("reconcile"), calls })
    }
}

fn paths(runs: &[Run], tell: &mut impl FnMut(&Figure)) {
    for (index, figure) in ["event_path_p50", "event_path_p99"].into_iter().enumerate() {
        let of = |pick: fn(&Run) -> [f64; 2]| median(runs.iter().map(|run| pick(run)[index]).collect());
        let ratios = runs.iter().map(|run| run.event[index] / run.floor[index]).collect();
        tell(&Figure::new(figure, of(|run| run.event), "ms").over(of(|run| run.floor), median(ratios), 1.5));
    }
}

fn costs(runs: &[Run], floor: Floor, tell: &mut impl FnMut(&Figure)) {
    let of = |pick: fn(&Run) -> f64| median(runs.iter().map(pick).collect());
    tell(&Figure::new("agent_cpu_per_event", of(|run| run.agent_cpu), "ms").beside(floor.agent).at_most(0.4));
    tell(&Figure::new("gateway_cpu_per_event", of(|run| run.gateway_cpu), "ms").beside(floor.gateway).at_most(0.25));
    tell(&Figure::new("reconcile_cpu_per_event", of(|run| run.reconcile_cpu), "ms"));
    // The user's own write is one of them.
    tell(&Figure::new("runtime_api_calls_per_event", of(|run| run.calls[0]) - 1.0, "calls"));
    tell(&Figure::new("kcp_api_calls_per_event", of(|run| run.calls[1]), "calls"));
}

async fn memory(setting: &Setting, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    let agent = setting.runtime.with_agent(async |agent| agent.memory()).await??;
    let receiver = setting.landscape.with_receiver(async |receiver| receiver.memory()).await??;
    tell(&Figure::new("agent_pss", mebibytes(agent.pss_kib), "MiB").at_most(10.0));
    tell(&Figure::new("agent_peak_rss", mebibytes(agent.peak_rss_kib), "MiB"));
    tell(&Figure::new("receiver_pss", mebibytes(receiver.pss_kib), "MiB"));
    tell(&Figure::new("receiver_peak_rss", mebibytes(receiver.peak_rss_kib), "MiB"));
    Ok(())
}

/// The plain watch: what any Rust client sees.
pub(super) async fn watch(client: kube::Client, seen: Seen) {
    let api = Api::<PartialObjectMeta<Kyma>>::namespaced(client, SKR_NAMESPACE);
    let config = watcher::Config::default().fields(&format!("metadata.name={SKR_KYMA}"));
    let mut stream = watcher(api, config).default_backoff().applied_objects().boxed();
    while let Some(event) = stream.next().await {
        let at = SystemTime::now();
        if let Some(version) = event.ok().and_then(|kyma| kyma.resource_version()?.parse().ok()) {
            seen.lock().unwrap_or_else(PoisonError::into_inner).entry(version).or_insert(at);
        }
    }
}
