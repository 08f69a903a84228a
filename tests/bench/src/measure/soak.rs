//! Memory and open files of the receiver over an hour, while users, agents, Kymas, plans, channels and certificates
//! change all the time and the number of runtimes stays the same.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use tidewatch_api::{
    names::{AGENT_OBJECT, PLAN_KEY, SKR_NAMESPACE},
    plan::Plan,
};
use tidewatch_testing::{
    landscape::watchers,
    load::{ChurnCounters, EnrolmentEndpoint, installed_endpoint, until_within},
    product::open_files,
    progress::{self, Step},
};
use tokio::{
    task::{AbortHandle, JoinSet},
    time::sleep,
};

use super::{
    Figure, Network,
    figure::mebibytes,
    fleet_setup::{FleetSetup, MODULE, WAIT_LIMIT},
};

/// Duration of a round.
const ROUND: Duration = Duration::from_secs(20);
/// Rounds between two changes of the plan.
const PLAN_ROUNDS: u32 = 3;
/// Rounds between two moves of the channel, which upgrade the module in all runtimes that have it.
const CHANNEL_ROUNDS: u32 = 15;
/// Rounds between two lines of progress.
const PROGRESS_ROUNDS: u32 = 15;
/// Watcher that comes and goes.
const WATCHER: &str = "soak";
/// Largest ratio between the last and the second quarter of the time.
const FLAT: f64 = 1.05;

/// Extent of the measurement.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Settings {
    /// Runtimes at any time
    #[arg(long, default_value_t = 200)]
    pub runtimes: usize,
    /// Duration in minutes
    #[arg(long, default_value_t = 60)]
    pub minutes: u32,
    /// Seconds between two changes of one user
    #[arg(long, default_value_t = 40)]
    pub pause: u32,
    /// Runtimes that are replaced by new ones in each round of 20 seconds
    #[arg(long, default_value_t = 2)]
    pub replaced: usize,
    #[command(flatten)]
    pub(super) network: Network,
}

/// Sizes of the receiver at the end of a round.
struct Sample {
    pss: f64,
    open_files: f64,
    series: f64,
}

struct Soak {
    settings: Settings,
    setup: FleetSetup,
    endpoint: EnrolmentEndpoint,
    counters: Arc<ChurnCounters>,
    /// Users and agents of the runtimes, the oldest first.
    running: VecDeque<AbortHandle>,
    tasks: JoinSet<Result<()>>,
    turns: u32,
    plans: u64,
}

/// Runs the measurement and emits each figure. The floor of a size is its mean in the second quarter of the time; the
/// first quarter is the warm-up.
///
/// # Errors
/// When the setup cannot be started, the receiver ends, or a change is lost.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut soak = Soak::start(*settings).await?;
    let receiver = soak.process().await?;
    let begun = Instant::now();
    let lasts = Duration::from_secs(60 * u64::from(settings.minutes));
    let mut samples = Vec::new();
    let step = Step::begin(format!("changes of {} runtimes for {} minutes", settings.runtimes, settings.minutes));
    for round in 1.. {
        if begun.elapsed() >= lasts {
            break;
        }
        let end = Instant::now() + ROUND;
        soak.change(round).await.with_context(|| format!("round {round}"))?;
        sleep(end.saturating_duration_since(Instant::now())).await;
        let sample = soak.sample().await?;
        if round.is_multiple_of(PROGRESS_ROUNDS) {
            soak.print(&sample, begun.elapsed());
        }
        samples.push(sample);
    }
    step.done();
    ensure!(soak.process().await? == receiver, "the receiver has ended and was started again");
    ensure!(samples.len() >= 8, "{} rounds are too few to compare a quarter with another", samples.len());
    for (figure, unit, size) in [
        ("soak_receiver_pss", "MiB", (|sample| sample.pss) as fn(&Sample) -> f64),
        ("soak_receiver_open_files", "files", |sample| sample.open_files),
        ("soak_metric_series", "series", |sample| sample.series),
    ] {
        let (before, after) = quarters(&samples, size);
        emit(&Figure::new(figure, after, unit).ratio_at_most(before, after / before, FLAT));
    }
    let refused: u64 = soak.setup.fleet.counters().refusals().values().sum();
    let count = |number: u64| f64::from(u32::try_from(number).unwrap_or(u32::MAX));
    for (figure, value, unit) in [
        ("soak_changes", soak.counters.changes(), "changes"),
        ("soak_certificates", soak.counters.certificates(), "certificates"),
        ("soak_agent_restarts", soak.counters.restarts(), "restarts"),
        ("soak_plans", soak.plans, "plans"),
        ("soak_runtimes_replaced", (samples.len() * settings.replaced) as u64, "runtimes"),
        ("soak_refused_requests", refused, "requests"),
    ] {
        emit(&Figure::new(figure, count(value), unit));
    }
    Ok(())
}

/// Means of the second and of the last quarter.
fn quarters(samples: &[Sample], size: impl Fn(&Sample) -> f64) -> (f64, f64) {
    let quarter = samples.len() / 4;
    let mean = |samples: &[Sample]| {
        samples.iter().map(&size).sum::<f64>() / f64::from(u32::try_from(samples.len()).unwrap_or(u32::MAX))
    };
    (mean(&samples[quarter..2 * quarter]), mean(&samples[samples.len() - quarter..]))
}

impl Soak {
    async fn start(settings: Settings) -> Result<Self> {
        let mut setup = FleetSetup::start_complete(settings.network).await?;
        setup.register(settings.runtimes).await?;
        let endpoint = until_within("the installed agents", WAIT_LIMIT, async || {
            installed_endpoint(&setup.landscape, &setup.fleet).map(Some)
        })
        .await?;
        let running = VecDeque::new();
        let tasks = JoinSet::new();
        let mut soak = Self { settings, setup, endpoint, counters: Arc::default(), running, tasks, turns: 0, plans: 0 };
        soak.begin().await?;
        Ok(soak)
    }

    /// Starts users and agents of the new runtimes.
    async fn begin(&mut self) -> Result<()> {
        let fleet = &mut self.setup.fleet;
        fleet.certify(&self.endpoint).await?;
        let pause = Duration::from_secs(self.settings.pause.into());
        let offset = pause / u32::try_from(self.settings.runtimes.max(1))?;
        for (number, runtime) in (0_u32..).zip(fleet.take_changing(&self.endpoint, MODULE, pause, &self.counters)) {
            let first = self.turns;
            self.turns += 1;
            let task = self.tasks.spawn(async move {
                sleep(offset * number).await;
                runtime.run(first).await
            });
            self.running.push_back(task);
        }
        Ok(())
    }

    /// The changes of one round: some runtimes are replaced, and at times the plan or a channel changes.
    async fn change(&mut self, round: u32) -> Result<()> {
        for task in self.running.drain(..self.settings.replaced.min(self.running.len())) {
            task.abort();
        }
        self.setup.fleet.unregister(self.settings.replaced, WAIT_LIMIT).await?;
        self.setup.fleet.grow(self.settings.runtimes).await?;
        self.setup.fleet.served(WAIT_LIMIT).await?;
        until_within("the agents of the new runtimes", WAIT_LIMIT, async || {
            installed_endpoint(&self.setup.landscape, &self.setup.fleet).map(Some)
        })
        .await?;
        self.begin().await?;
        if round.is_multiple_of(PLAN_ROUNDS) {
            self.change_plan(round / PLAN_ROUNDS).await?;
        }
        if round.is_multiple_of(CHANNEL_ROUNDS) {
            let versions = if (round / CHANNEL_ROUNDS) % 2 == 1 { ["1.1.0", "1.1.0"] } else { ["1.0.0", "1.1.0"] };
            let [regular, fast] = versions;
            self.setup.landscape.write_channels(MODULE, &[("regular", regular), ("fast", fast)]).await?;
        }
        while let Some(ended) = self.tasks.try_join_next() {
            match ended {
                Ok(result) => return result.and_then(|()| bail!("a user has ended")),
                Err(error) if error.is_cancelled() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Adds or removes a Watcher, and lets every agent follow the plan in its runtime.
    async fn change_plan(&mut self, number: u32) -> Result<()> {
        let landscape = &self.setup.landscape;
        if number % 2 == 1 {
            landscape.write_watcher(&watchers::watcher(WATCHER, ("", "v1", "configmaps"), "spec")).await?;
        } else {
            landscape.delete_watcher(WATCHER).await?;
        }
        let name = landscape.watch_of(WATCHER);
        let key = format!("/configmaps/{SKR_NAMESPACE}/{AGENT_OBJECT}");
        until_within("the plan in every runtime", WAIT_LIMIT, async || {
            for member in self.setup.fleet.members() {
                let map = member.cluster().object(&key).context("a runtime has no plan")?;
                let plan = Plan::parse(map["data"][PLAN_KEY].as_str().context("a ConfigMap has no plan")?)?;
                let has_watch = plan.watches().iter().any(|watch| watch.name == name);
                ensure!(has_watch == (number % 2 == 1), "{} has the previous plan", member.name());
                member.handle().update(|state| state.follow(&plan));
            }
            Ok(Some(()))
        })
        .await?;
        self.plans += 1;
        Ok(())
    }

    async fn process(&self) -> Result<u32> {
        self.setup.landscape.with_receiver(async |receiver| receiver.process().pid()).await
    }

    async fn sample(&self) -> Result<Sample> {
        let series = self.setup.metrics().await?.lines().filter(|line| !line.starts_with('#')).count();
        let memory = self.setup.receiver_memory().await?;
        let files = open_files(self.process().await?)?;
        let count = |number: usize| f64::from(u32::try_from(number).unwrap_or(u32::MAX));
        Ok(Sample { pss: mebibytes(memory.pss_kib), open_files: count(files), series: count(series) })
    }

    fn print(&self, sample: &Sample, passed: Duration) {
        progress::print_line(&format!(
            "{} min: {:.1} MiB, {} open files, {} series; {} changes, {} certificates",
            passed.as_secs() / 60,
            sample.pss,
            sample.open_files,
            sample.series,
            self.counters.changes(),
            self.counters.certificates()
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_does_not_count() {
        let samples: Vec<_> = [90.0, 90.0, 10.0, 20.0, 70.0, 70.0, 30.0, 40.0]
            .map(|pss| Sample { pss, open_files: 0.0, series: 0.0 })
            .into();
        assert_eq!(quarters(&samples, |sample| sample.pss), (15.0, 35.0));
    }
}
