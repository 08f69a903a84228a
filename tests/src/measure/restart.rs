//! The receiver is killed, users go on, and it starts again: how long until everything that changed is settled. The floor is a round in
//! which no user changed anything: the same agents tell of something all the same, and the receiver finds nothing to do.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use kube::{Api, api::ListParams};
use tidewatch_shared::{api::Manifest, names::label};
use tokio::time::sleep;

use super::{
    Figure,
    crowded::{Crowded, MODULE, PATIENCE},
    figure::{line, median, quantile},
};
use crate::{
    load::{Contract, Member, until_within},
    progress::Step,
};

const FULL: f64 = 5_000.0;

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
    half: f64,
    all: f64,
}

/// Runs the measurement and tells each figure. The projection is the line through the medians of each number of agents; what does
/// not grow with their number (the agents' own waits between two tries, above all) is so not multiplied.
///
/// # Errors
/// When the setting does not stand, or a change is lost.
pub async fn measure(settings: &Settings, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    ensure!(settings.agents.is_sorted() && settings.agents.len() > 1, "the numbers of agents must rise");
    let mut crowded = Crowded::start(&[]).await?;
    let (mut points, mut floors) = (Vec::new(), Vec::new());
    for agents in &settings.agents {
        crowded.grow(*agents).await?;
        let step = Step::begin(format!("restart with {agents} agents of which none changed"));
        let floor = round(&crowded, settings, Change::none).await?;
        step.done();
        let mut rounds = Vec::new();
        for number in 1..=settings.rounds {
            let step = Step::begin(format!("restart {number} of {} with {agents} agents", settings.rounds));
            rounds.push(round(&crowded, settings, Change::make).await?);
            step.done();
        }
        let count = f64::from(u32::try_from(*agents)?);
        let of = |pick: fn(&Restart) -> f64| median(rounds.iter().map(pick).collect());
        tell(&Figure::new("restart_agents", count, "agents"));
        tell(&Figure::new("restart_ready", of(|round| round.ready), "s").beside(floor.ready));
        tell(&Figure::new("restart_settled_p50", of(|round| round.half), "s").beside(floor.half));
        tell(&Figure::new("restart_settled", of(|round| round.all), "s").beside(floor.all));
        points.push((count, of(|round| round.all)));
        floors.push((count, floor.all));
    }
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
    /// The module is taken, or given up; `None` when nothing changed, and the agent tells of the Kyma all the same.
    takes: Option<bool>,
}

impl<'a> Change<'a> {
    fn make(member: &'a Member) -> Self {
        let takes = !member.shown().is_some_and(|shown| shown.contains(&MODULE.to_owned()));
        member.select(if takes { &[MODULE] } else { &[] });
        Self { member, takes: Some(takes) }
    }

    fn none(member: &'a Member) -> Self {
        member.memory().with(|contract| contract.mark("kyma", 0));
        Self { member, takes: None }
    }

    fn shows(&self) -> bool {
        match self.takes {
            Some(takes) => self.member.shown().is_some_and(|shown| shown.contains(&MODULE.to_owned()) == takes),
            None => self.member.memory().look(Contract::unsettled) == 0,
        }
    }
}

async fn round<'a>(crowded: &'a Crowded, settings: &Settings, change: fn(&'a Member) -> Change<'a>) -> Result<Restart> {
    let Crowded { crowd, landscape, .. } = crowded;
    let members = crowd.members();
    landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    let every = (100 / settings.percent.clamp(1, 100)).max(1);
    // Who has the module gives it up, and who has it not takes it: each is a change.
    let changed: Vec<_> = members.iter().step_by(every).map(change).collect();
    sleep(Duration::from_secs(settings.away.into())).await;

    let begun = Instant::now();
    let starting = async {
        landscape.start_receiver().await?;
        Ok::<_, anyhow::Error>(begun.elapsed().as_secs_f64())
    };
    let mut times = Vec::new();
    let mut waiting: Vec<_> = changed.iter().collect();
    let settling = until_within("every change to show in its runtime", PATIENCE, async || {
        waiting.retain(|change| {
            let shows = change.shows();
            times.extend(shows.then(|| begun.elapsed().as_secs_f64()));
            !shows
        });
        Ok(waiting.is_empty().then_some(()))
    });
    let (ready, ()) = tokio::try_join!(starting, settling)?;
    // Every agent must hear that all of its own is settled, and no Manifest may be missing or left over.
    crowd.at_rest(PATIENCE).await?;
    let manifests = Api::<Manifest>::namespaced(landscape.kcp().client().await?, landscape.namespace());
    let listed = manifests.list(&ListParams::default()).await?;
    let owners: BTreeSet<_> =
        listed.items.iter().filter_map(|manifest| manifest.metadata.labels.as_ref()?.get(label::KYMA_NAME)).collect();
    let is_wrong = |change: &&Change<'_>| {
        let has_one = owners.contains(&change.member.name().to_owned());
        change.takes.is_some_and(|takes| takes != has_one)
    };
    let wrong = changed.iter().filter(is_wrong).count();
    ensure!(wrong == 0, "{wrong} of {} runtimes have no Manifest, or one left over", changed.len());
    Ok(Restart { ready, half: median(times.clone()), all: quantile(&mut times, 1.0) })
}
