//! The receiver is killed, users make changes, and it starts again: the time until all changes are settled.
//!
//! A round ends by the receiver's own report: the new process has received a request from every agent, every change
//! shows in its runtime, no agent has events to send, and no accepted event waits for its reconcile. This includes each
//! agent's backoff, or the time until its next heartbeat. The floor is a round with the same end, in which no user
//! changed anything. The condition is polled four times a second.

use std::{
    collections::BTreeSet,
    process,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kube::{Api, api::ListParams};
use tidewatch_api::{Manifest, names::label};
use tidewatch_fleet::Contract as Spoken;
use tidewatch_kit::variant::VariantName as _;
use tidewatch_testing::{
    load::{FleetMember, ProtocolState},
    progress::Step,
};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::{
    Figure, Network,
    figure::{cpu_of, line, median},
    fleet_setup::{FleetSetup, MODULE, WAIT_LIMIT, metric, sample},
};

const TARGET: f64 = 5_000.0;
/// Poll interval: the metrics page, and the table of all runtimes only when the metrics allow that the round has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Extent of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Numbers of agents, some rounds each, ascending; at least two, for the projection
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 2_000])]
    pub agents: Vec<usize>,
    /// Rounds with each number of agents, besides the one without changes
    #[arg(long, default_value_t = 3)]
    pub rounds: u32,
    /// Percentage of runtimes that change while the receiver is down
    #[arg(long, default_value_t = 5)]
    pub percent: usize,
    /// Downtime of the receiver, in seconds
    #[arg(long, default_value_t = 20)]
    pub away: u32,
    #[command(flatten)]
    pub(super) network: Network,
}

/// Conditions of one restart.
pub(super) struct Round<'a> {
    /// Percentage of runtimes that change while the receiver is down, if any do.
    pub(super) percent: Option<usize>,
    /// Downtime of the receiver, in seconds.
    pub(super) away: u32,
    /// Modules that every runtime selects besides.
    pub(super) others: &'a [&'a str],
}

/// One restart, in seconds from the start of the process.
pub(super) struct Restart {
    pub(super) ready: f64,
    /// Until half of the changes showed in their runtimes.
    pub(super) shown: f64,
    /// Until all of them showed, and no accepted event was unsettled.
    pub(super) changes: f64,
    pub(super) settled: f64,
    /// CPU time until the receiver was ready.
    pub(super) cpu_until_ready: CpuTimes,
    /// CPU time until all was settled.
    pub(super) cpu: CpuTimes,
}

/// CPU times of the processes that share the machine, in seconds.
#[derive(Clone, Copy)]
pub(super) struct CpuTimes {
    /// The receiver's threads that serve agents.
    pub(super) gateway: f64,
    /// The receiver's other threads.
    pub(super) reconciles: f64,
    /// API server and etcd of KCP.
    pub(super) kcp: f64,
    /// This process: agents and API servers of the runtimes.
    pub(super) fleet: f64,
}

impl CpuTimes {
    /// Reads the times so far; those of the receiver are zero before its process starts.
    async fn read(setup: &FleetSetup, is_started: bool) -> Result<Self> {
        let (receiver, gateway) =
            if is_started { (setup.receiver_cpu().await?, setup.gateway_cpu().await?) } else { (0.0, 0.0) };
        let kcp = setup.landscape.kcp();
        let store = kcp.store().map_or(Ok(0.0), |store| cpu_of(store.process().pid()))?;
        Ok(Self {
            gateway,
            reconciles: receiver - gateway,
            kcp: cpu_of(kcp.server().process().pid())? + store,
            fleet: cpu_of(process::id())?,
        })
    }

    /// The times since a reading before the start of the receiver's process.
    async fn since(before: &Self, setup: &FleetSetup) -> Result<Self> {
        let now = Self::read(setup, true).await?;
        Ok(Self { kcp: now.kcp - before.kcp, fleet: now.fleet - before.fleet, ..now })
    }
}

/// Runs the measurement and emits each figure. The projection is the line through the medians of each number of agents,
/// so constant terms (above all the agents' own backoff) are not multiplied.
///
/// # Errors
/// When the setup cannot be started, or a change is lost.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    ensure!(
        settings.agents.is_sorted() && settings.agents.len() > 1,
        "at least two ascending numbers of agents are required"
    );
    let mut setup = FleetSetup::start(settings.network, &[]).await?;
    let mut points = Vec::new();
    let mut floors = Vec::new();
    let mut changes = Vec::new();
    for agents in &settings.agents {
        setup.grow(*agents).await?;
        let step = Step::begin(format!("restart with {agents} agents without changes"));
        let unchanged = Round { percent: None, away: settings.away, others: &[] };
        let changed = Round { percent: Some(settings.percent), ..unchanged };
        let floor = round(&setup, &unchanged).await?;
        step.done();
        let mut rounds = Vec::new();
        for number in 1..=settings.rounds {
            let step = Step::begin(format!("restart {number} of {} with {agents} agents", settings.rounds));
            rounds.push(round(&setup, &changed).await?);
            step.done();
        }
        let count = f64::from(u32::try_from(*agents)?);
        let of = |pick: fn(&Restart) -> f64| median(rounds.iter().map(pick).collect());
        emit(&Figure::new("restart_agents", count, "agents"));
        emit(&Figure::new("restart_ready", of(|round| round.ready), "s").with_floor(floor.ready));
        emit(&Figure::new("restart_shown_p50", of(|round| round.shown), "s"));
        emit(&Figure::new("restart_changes_settled", of(|round| round.changes), "s"));
        emit(&Figure::new("restart_settled", of(|round| round.settled), "s").with_floor(floor.settled));
        changes.push((count, of(|round| round.changes)));
        points.push((count, of(|round| round.settled)));
        floors.push((count, floor.settled));
    }
    emit(&Figure::new("restart_changes_settled_at_5000", at_full(&changes), "s").at_most(30.0));
    let settled = at_full(&points);
    let floor = at_full(&floors);
    emit(&Figure::new("restart_settled_at_5000", settled, "s").with_floor(floor).at_most(30.0));
    Ok(())
}

/// Projection that never falls below the largest fleet's value: noise may give the line a negative slope.
fn at_full(points: &[(f64, f64)]) -> f64 {
    let least = points.last().map_or(0.0, |(_, seconds)| *seconds);
    line(points, TARGET).0.max(least)
}

/// Change by the user of one runtime while the receiver was down.
struct Change<'a> {
    member: &'a FleetMember,
    /// The module is selected (true) or deselected (false).
    takes: bool,
}

impl<'a> Change<'a> {
    /// Toggles the module: each runtime that has it deselects it, and each other selects it.
    fn make(member: &'a FleetMember, others: &[&str]) -> Self {
        let takes = !has_module(member);
        let selected: Vec<_> = others.iter().copied().chain(takes.then_some(MODULE)).collect();
        member.select(&selected);
        Self { member, takes }
    }

    fn shows(&self) -> bool {
        self.member.status_modules().is_some() && has_module(self.member) == self.takes
    }
}

fn has_module(member: &FleetMember) -> bool {
    member.status_modules().is_some_and(|shown| shown.iter().any(|module| module == MODULE))
}

/// One restart, with changes in some of the runtimes.
pub(super) async fn round(setup: &FleetSetup, round: &Round<'_>) -> Result<Restart> {
    let (FleetSetup { fleet, landscape, .. }, Round { percent, away, others }) = (setup, round);
    // Otherwise it also reconciles Kymas again for earlier changes.
    until("the inputs of all Kymas to be recorded", async || {
        let pending = sample(&setup.metrics().await?, "tidewatch_kyma_inputs_pending")?;
        Ok((pending > 0.0).then(|| format!("those of {pending} are not")))
    })
    .await?;
    landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    let every = percent.map(|percent| (100 / percent.clamp(1, 100)).max(1));
    let chosen = every.into_iter().flat_map(|every| fleet.members().iter().step_by(every));
    let changed: Vec<_> = chosen.map(|member| Change::make(member, others)).collect();
    sleep(Duration::from_secs((*away).into())).await;

    let begun = Instant::now();
    let before = CpuTimes::read(setup, false).await?;
    landscape.start_receiver().await?;
    let ready = begun.elapsed().as_secs_f64();
    let cpu_until_ready = CpuTimes::since(&before, setup).await?;
    let mut shown = Vec::new();
    let mut hidden: Vec<_> = changed.iter().collect();
    until("every change to show in its runtime", async || {
        hidden.retain(|change| {
            let shows = change.shows();
            shown.extend(shows.then(|| begun.elapsed().as_secs_f64()));
            !shows
        });
        Ok((!hidden.is_empty()).then(|| format!("{} changes do not show", hidden.len())))
    })
    .await?;
    until("all accepted events to be settled", async || unsettled(setup, 0).await).await?;
    let changes = begun.elapsed().as_secs_f64();
    until("a request of every agent and all events to be settled", async || match unconnected(setup).await? {
        None => unsettled(setup, fleet.members().len()).await,
        missing => Ok(missing),
    })
    .await?;
    let settled = begun.elapsed().as_secs_f64();
    let cpu = CpuTimes::since(&before, setup).await?;
    // Every agent must receive that its events are settled, and no Manifest may be missing or left over.
    fleet.at_rest(WAIT_LIMIT).await?;
    let manifests = Api::<Manifest>::namespaced(landscape.kcp().client().await?, landscape.namespace());
    let listed =
        manifests.list_metadata(&ListParams::default().labels(&format!("{}={MODULE}", label::MODULE_NAME))).await?;
    let owners: BTreeSet<_> =
        listed.items.iter().filter_map(|manifest| manifest.metadata.labels.as_ref()?.get(label::KYMA_NAME)).collect();
    let wrong =
        changed.iter().filter(|change| owners.contains(&change.member.name().to_owned()) != change.takes).count();
    ensure!(wrong == 0, "{wrong} of {} runtimes have no Manifest, or one left over", changed.len());
    Ok(Restart { ready, shown: median(shown), changes, settled, cpu_until_ready, cpu })
}

/// Polls until nothing is missing; `missing` describes the remainder.
async fn until(condition: &str, mut missing: impl AsyncFnMut() -> Result<Option<String>>) -> Result<()> {
    let mut last = String::new();
    let mut ticks = interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let polling = async {
        loop {
            ticks.tick().await;
            last = match missing().await {
                Ok(None) => return,
                Ok(Some(missing)) => missing,
                // A busy receiver answers at the next poll.
                Err(error) => format!("{error:#}"),
            };
        }
    };
    timeout(WAIT_LIMIT, polling)
        .await
        .with_context(|| format!("timed out after {WAIT_LIMIT:?} waiting for {condition}: {last}"))
}

/// Describes how many agents are not connected to the receiver. An agent with a received request is connected, so the
/// expensive check waits for this one.
async fn unconnected(setup: &FleetSetup) -> Result<Option<String>> {
    let connected = metric(&setup.metrics().await?, "tidewatch_gateway_connections");
    let agents = setup.fleet.members().len();
    Ok((connected < f64::from(u32::try_from(agents)?)).then(|| format!("{connected} of {agents} are connected")))
}

/// Describes the events that are pending in agents or, by the receiver's report, unsettled, and the lack of agents with
/// a received request.
async fn unsettled(setup: &FleetSetup, agents: usize) -> Result<Option<String>> {
    // The receiver's view of an agent's pending events is as old as the last heartbeat.
    let speaking =
        setup.fleet.members().iter().filter(|member| member.handle().read(ProtocolState::has_pending)).count();
    if speaking > 0 {
        return Ok(Some(format!("{speaking} agents have pending events")));
    }
    let report = setup.report().await?;
    let connected = report.runtimes.iter().filter(|runtime| runtime.contract != Spoken::Unknown.as_str()).count();
    let unsettled = report.summary.unsettled;
    let is_settled = connected >= agents && unsettled == 0;
    Ok((!is_settled).then(|| format!("requests of {connected} agents, {unsettled} runtimes not settled")))
}
