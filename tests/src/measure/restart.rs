//! The receiver is killed, users go on, and it starts again: how long until everything that changed is settled.
//!
//! A round ends by the receiver's own word: every agent was heard again by the process that has started, every change shows in its runtime,
//! no agent has anything left to send, and nothing that was accepted waits for its work. So it also has each agent's wait until it tries
//! again, or until its next heartbeat is due. The floor is a round that ends at the same, and in which no user changed anything. Whether it
//! has ended is looked at four times a second.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kube::{Api, api::ListParams};
use tidewatch_receiver::{
    admin::{FLEET_PATH, report::Report},
    fleet::Contract as Spoken,
};
use tidewatch_shared::{api::Manifest, names::label};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::{
    Figure,
    crowded::{Crowded, MODULE, PATIENCE, metric},
    figure::{line, median},
};
use crate::{
    http,
    landscape::DEADLINE,
    load::{Contract, Member},
    progress::Step,
};

const FULL: f64 = 5_000.0;
/// How often it is looked at: a page of metrics, and the table of all runtimes only once it may say that all is done.
const LOOK: Duration = Duration::from_millis(250);

/// How much is measured.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// How many agents, some rounds each, upwards; two numbers at least, or there is nothing to project from.
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 2_000])]
    pub agents: Vec<usize>,
    /// Rounds with each number of agents, beside the one in which nothing changes.
    #[arg(long, default_value_t = 3)]
    pub rounds: u32,
    /// How many of a hundred runtimes change while the receiver is away.
    #[arg(long, default_value_t = 5)]
    pub percent: usize,
    /// How long it is away, in seconds.
    #[arg(long, default_value_t = 20)]
    pub away: u32,
}

/// One restart, in seconds from the start of the process.
struct Restart {
    ready: f64,
    /// Until half of the changes showed.
    shown: f64,
    /// Until all of them showed, and nothing that had been accepted waited.
    changes: f64,
    settled: f64,
}

/// Runs the measurement and tells each figure. The projection is the line through the medians of each number of agents; what does
/// not grow with their number (the agents' own waits between two tries, above all) is so not multiplied.
///
/// # Errors
/// When the setting does not stand, or a change is lost.
pub async fn measure(settings: &Settings, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    ensure!(settings.agents.is_sorted() && settings.agents.len() > 1, "the numbers of agents must rise");
    let mut crowded = Crowded::start(&[]).await?;
    let (mut points, mut floors, mut changes) = (Vec::new(), Vec::new(), Vec::new());
    for agents in &settings.agents {
        crowded.grow(*agents).await?;
        let step = Step::begin(format!("restart with {agents} agents of which none changed"));
        let floor = round(&crowded, settings, None).await?;
        step.done();
        let mut rounds = Vec::new();
        for number in 1..=settings.rounds {
            let step = Step::begin(format!("restart {number} of {} with {agents} agents", settings.rounds));
            rounds.push(round(&crowded, settings, Some(settings.percent)).await?);
            step.done();
        }
        let count = f64::from(u32::try_from(*agents)?);
        let of = |pick: fn(&Restart) -> f64| median(rounds.iter().map(pick).collect());
        tell(&Figure::new("restart_agents", count, "agents"));
        tell(&Figure::new("restart_ready", of(|round| round.ready), "s").beside(floor.ready));
        tell(&Figure::new("restart_shown_p50", of(|round| round.shown), "s"));
        tell(&Figure::new("restart_changes_settled", of(|round| round.changes), "s"));
        tell(&Figure::new("restart_settled", of(|round| round.settled), "s").beside(floor.settled));
        changes.push((count, of(|round| round.changes)));
        points.push((count, of(|round| round.settled)));
        floors.push((count, floor.settled));
    }
    tell(&Figure::new("restart_changes_settled_at_5000", at_full(&changes), "s").at_most(30.0));
    let (settled, floor) = (at_full(&points), at_full(&floors));
    tell(&Figure::new("restart_settled_at_5000", settled, "s").beside(floor).at_most(30.0));
    Ok(())
}

/// Noise may let the line fall; the largest crowd never does better than it did.
fn at_full(points: &[(f64, f64)]) -> f64 {
    let least = points.last().map_or(0.0, |(_, seconds)| *seconds);
    line(points, FULL).0.max(least)
}

/// What the user of one runtime did while the receiver was away.
struct Change<'a> {
    member: &'a Member,
    /// The module is taken, or given up.
    takes: bool,
}

impl<'a> Change<'a> {
    /// Who has the module gives it up, and who has it not takes it: each is a change.
    fn make(member: &'a Member) -> Self {
        let takes = !has_module(member);
        member.select(if takes { &[MODULE] } else { &[] });
        Self { member, takes }
    }

    fn shows(&self) -> bool {
        self.member.shown().is_some() && has_module(self.member) == self.takes
    }
}

fn has_module(member: &Member) -> bool {
    member.shown().is_some_and(|shown| shown.iter().any(|module| module == MODULE))
}

/// One restart, with changes in so many of a hundred runtimes.
async fn round(crowded: &Crowded, settings: &Settings, percent: Option<usize>) -> Result<Restart> {
    let Crowded { crowd, landscape, .. } = crowded;
    landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    let every = percent.map(|percent| (100 / percent.clamp(1, 100)).max(1));
    let changed: Vec<_> =
        every.into_iter().flat_map(|every| crowd.members().iter().step_by(every)).map(Change::make).collect();
    sleep(Duration::from_secs(settings.away.into())).await;

    let begun = Instant::now();
    landscape.start_receiver().await?;
    let ready = begun.elapsed().as_secs_f64();
    let mut shown = Vec::new();
    let mut hidden: Vec<_> = changed.iter().collect();
    until("every change to show in its runtime", async || {
        hidden.retain(|change| {
            let shows = change.shows();
            shown.extend(shows.then(|| begun.elapsed().as_secs_f64()));
            !shows
        });
        Ok((!hidden.is_empty()).then(|| format!("{} do not show", hidden.len())))
    })
    .await?;
    until("everything that was accepted to be settled", async || unsettled(crowded, 0).await).await?;
    let changes = begun.elapsed().as_secs_f64();
    until("the same with every agent heard", async || match unconnected(crowded).await? {
        None => unsettled(crowded, crowd.members().len()).await,
        missing => Ok(missing),
    })
    .await?;
    let settled = begun.elapsed().as_secs_f64();
    // Every agent must hear that all of its own is settled, and no Manifest may be missing or left over.
    crowd.at_rest(PATIENCE).await?;
    let manifests = Api::<Manifest>::namespaced(landscape.kcp().client().await?, landscape.namespace());
    let listed = manifests.list(&ListParams::default()).await?;
    let owners: BTreeSet<_> =
        listed.items.iter().filter_map(|manifest| manifest.metadata.labels.as_ref()?.get(label::KYMA_NAME)).collect();
    let wrong =
        changed.iter().filter(|change| owners.contains(&change.member.name().to_owned()) != change.takes).count();
    ensure!(wrong == 0, "{wrong} of {} runtimes have no Manifest, or one left over", changed.len());
    Ok(Restart { ready, shown: median(shown), changes, settled })
}

/// Looks until nothing is missing; `missing` says what is, in words.
async fn until(what: &str, mut missing: impl AsyncFnMut() -> Result<Option<String>>) -> Result<()> {
    let (mut last, mut looks) = (String::new(), interval(LOOK));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let looking = async {
        loop {
            looks.tick().await;
            last = match missing().await {
                Ok(None) => return,
                Ok(Some(missing)) => missing,
                // A receiver that is busy answers at the next look.
                Err(error) => format!("{error:#}"),
            };
        }
    };
    timeout(PATIENCE, looking).await.with_context(|| format!("waited {PATIENCE:?} for {what}: {last}"))
}

/// How many agents are not connected to the receiver. Whoever was heard is connected, so this tells when it is worth to ask for more.
async fn unconnected(crowded: &Crowded) -> Result<Option<String>> {
    let connected = metric(&crowded.metrics().await?, "tidewatch_gateway_connections");
    let agents = crowded.crowd.members().len();
    Ok((connected < f64::from(u32::try_from(agents)?)).then(|| format!("{connected} of {agents} are connected")))
}

/// What waits in agents or, by the receiver's word, for work; and whether fewer agents than these were heard.
async fn unsettled(crowded: &Crowded, agents: usize) -> Result<Option<String>> {
    // What the receiver knows of that is as old as the last heartbeat.
    let speaking = crowded.crowd.members().iter().filter(|member| member.memory().look(Contract::has_news)).count();
    if speaking > 0 {
        return Ok(Some(format!("{speaking} agents have something to send")));
    }
    let admin = crowded.landscape.with_receiver(async |receiver| receiver.admin()).await?;
    let (_, report) = http::get(admin.context("its admin listener")?, FLEET_PATH, DEADLINE).await?;
    let report: Report = serde_json::from_str(&report).context("read the fleet")?;
    let heard = report.runtimes.iter().filter(|runtime| runtime.contract != Spoken::Unheard.as_str()).count();
    let unsettled = report.summary.unsettled;
    let is_settled = heard >= agents && unsettled == 0;
    Ok((!is_settled).then(|| format!("{heard} agents were heard, {unsettled} runtimes are not settled")))
}
