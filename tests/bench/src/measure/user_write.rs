//! Effect of the agent on a user's write: latency of the same PATCH with and without it, interleaved; also while the
//! receiver refuses the agent's requests, or hangs. A round fails when its scenario did not take place.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use http::StatusCode;
use tidewatch_testing::{
    landscape::DEADLINE,
    load::{PlainServer, ServerMode},
    product::ProductProcess,
    progress::Step,
};
use tokio::time::sleep;

use super::{
    Figure, Settings,
    event_path::{self, Observations},
    figure::{median, millis, quantile},
    fleet_setup::metric,
    runtime_setup::RuntimeSetup,
    writer,
};

/// Rounds of each scenario.
const ROUNDS: u32 = 8;
/// Time for responses in transit to reach the agent.
const ON_THE_WAY: Duration = Duration::from_millis(200);

/// The watcher during the user's writes, and the state of its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Scenario {
    NoWatch,
    /// A metadata watch that does nothing: the cost of any watch for a write on this machine.
    PlainWatch,
    Agent,
    /// The agent, with a receiver that answers 503.
    Unavailable,
    /// The agent, with a receiver that answers 401.
    Unauthorized,
    /// The agent, with a stopped receiver: its connections stay open and no response comes.
    Hung,
}

impl Scenario {
    const ALL: [Self; 6] =
        [Self::NoWatch, Self::PlainWatch, Self::Agent, Self::Unavailable, Self::Unauthorized, Self::Hung];

    /// Names of the figures for the median and the 99th percentile.
    const fn figures(self) -> Option<[&'static str; 2]> {
        match self {
            Self::NoWatch => None,
            Self::PlainWatch => Some(["user_write_plain_watch_p50", "user_write_plain_watch_p99"]),
            Self::Agent => Some(["user_write_p50", "user_write_p99"]),
            Self::Unavailable => Some(["user_write_receiver_503_p50", "user_write_receiver_503_p99"]),
            Self::Unauthorized => Some(["user_write_receiver_401_p50", "user_write_receiver_401_p99"]),
            Self::Hung => Some(["user_write_receiver_hung_p50", "user_write_receiver_hung_p99"]),
        }
    }
}

/// Medians and 99th percentiles of the rounds of one scenario.
#[derive(Default)]
struct Rounds([Vec<f64>; 2]);

/// Runs the measurement and emits its figures.
///
/// # Errors
/// When the setup cannot be started or a write fails.
pub async fn user_write(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let setup = RuntimeSetup::start(settings).await?;
    let writes = settings.writes().div_ceil(ROUNDS);
    writer::toggle(&setup.runtime, settings.rate, settings.pause()).await?;
    let mut rounds = Scenario::ALL.map(|_| Rounds::default());
    for number in 1..=ROUNDS {
        let step = Step::begin(format!("user write, round {number} of {ROUNDS}"));
        // Rotates the order, so that a drift of the machine favours no scenario.
        let mut order = Scenario::ALL;
        order.rotate_left(usize::try_from(number)? % Scenario::ALL.len());
        for scenario in order {
            let taken = round(&setup, settings, scenario, writes).await?;
            rounds[scenario as usize].add(taken);
        }
        step.done();
    }
    let [baseline, others @ ..] = &rounds;
    for (scenario, rounds) in Scenario::ALL.into_iter().skip(1).zip(others) {
        for (index, figure) in scenario.figures().into_iter().flatten().enumerate() {
            let with = &rounds.0[index];
            let without = &baseline.0[index];
            let ratios = with.iter().zip(without).map(|(with, without)| with / without).collect();
            let figure = Figure::new(figure, median(with.clone()), "ms");
            let floor = median(without.clone());
            let ratio = median(ratios);
            // The plain watch is for comparison only and has no bar.
            emit(&if scenario == Scenario::PlainWatch {
                figure.with_floor(floor)
            } else {
                figure.ratio_at_most(floor, ratio, 1.05)
            });
        }
    }
    Ok(())
}

async fn round(setup: &RuntimeSetup, settings: &Settings, scenario: Scenario, writes: u32) -> Result<Vec<f64>> {
    if matches!(scenario, Scenario::NoWatch | Scenario::PlainWatch) {
        end_agent(setup).await.context("end the agent")?;
    } else {
        setup.runtime.start_agent().await?;
        setup.settle(settings.objects).await?;
    }
    let seen = Observations::default();
    let watch = (scenario == Scenario::PlainWatch).then(|| tokio::spawn(event_path::watch(setup.runtime.user(), seen)));
    let write = async || writer::toggle(&setup.runtime, writes, settings.pause()).await;
    let taken = match scenario {
        Scenario::NoWatch | Scenario::PlainWatch => write().await,
        Scenario::Agent => while_accepted(setup, write).await,
        Scenario::Unavailable => while_refused(setup, StatusCode::SERVICE_UNAVAILABLE, write).await,
        Scenario::Unauthorized => while_refused(setup, StatusCode::UNAUTHORIZED, write).await,
        Scenario::Hung => while_hung(setup, write).await,
    };
    if let Some(watch) = watch {
        watch.abort();
    }
    Ok(taken?.iter().map(|write| millis(write.took)).collect())
}

/// Ends the agent, unless it has ended already.
async fn end_agent(setup: &RuntimeSetup) -> Result<()> {
    let ended = async |agent: &ProductProcess| match agent.process().status()? {
        Some(_) => Ok(()),
        None => agent.sigterm(DEADLINE).await.map(drop),
    };
    Ok(setup.runtime.with_agent(ended).await??)
}

/// Number of the agent's event requests with this outcome.
async fn requests(setup: &RuntimeSetup, outcome: &str) -> Result<f64> {
    let (_, page) = setup.runtime.with_agent(async |agent| agent.get("/metrics").await).await??;
    Ok(metric(&page, &format!("tidewatch_agent_requests_total{{outcome=\"{outcome}\",route=\"events\"}}")))
}

/// Writes whose events the agent sends to the receiver.
async fn while_accepted(
    setup: &RuntimeSetup,
    write: impl AsyncFnOnce() -> Result<Vec<writer::Write>>,
) -> Result<Vec<writer::Write>> {
    let before = requests(setup, "taken").await?;
    let taken = write().await?;
    ensure!(requests(setup, "taken").await? > before, "the receiver accepted no event of the agent");
    Ok(taken)
}

/// Writes while another server at the receiver's address refuses every request.
async fn while_refused(
    setup: &RuntimeSetup,
    status: StatusCode,
    write: impl AsyncFnOnce() -> Result<Vec<writer::Write>>,
) -> Result<Vec<writer::Write>> {
    let landscape = &setup.landscape;
    landscape.with_receiver(async |receiver| receiver.sigterm(DEADLINE).await).await??;
    let plain = PlainServer::start(landscape, landscape.authority().parse()?, ServerMode::Answer(status))?;
    let before = requests(setup, status.as_str()).await?;
    let taken = write().await;
    let refusals = requests(setup, status.as_str()).await? - before;
    drop(plain);
    landscape.start_receiver().await.context("start the receiver again")?;
    ensure!(refusals >= 1.0, "the agent received no {status}");
    taken
}

async fn while_hung(
    setup: &RuntimeSetup,
    write: impl AsyncFnOnce() -> Result<Vec<writer::Write>>,
) -> Result<Vec<writer::Write>> {
    setup.landscape.with_receiver(async |receiver| receiver.sigstop()).await??;
    sleep(ON_THE_WAY).await;
    let before = requests(setup, "taken").await?;
    let taken = write().await;
    let accepted = requests(setup, "taken").await? - before;
    let unsettled = unsettled_events(setup).await?;
    setup.landscape.with_receiver(async |receiver| receiver.sigcont()).await??;
    ensure!(
        accepted == 0.0 && unsettled >= 1.0,
        "{accepted} requests were accepted while the receiver hung, {unsettled} events are unsettled"
    );
    taken
}

/// Events of the agent that are pending, or sent and not settled.
async fn unsettled_events(setup: &RuntimeSetup) -> Result<f64> {
    let (_, page) = setup.runtime.with_agent(async |agent| agent.get("/metrics").await).await??;
    Ok(metric(&page, "tidewatch_agent_events_waiting") + metric(&page, "tidewatch_agent_events_unsettled"))
}

impl Rounds {
    fn add(&mut self, mut taken: Vec<f64>) {
        self.0[0].push(quantile(&mut taken, 0.5));
        self.0[1].push(quantile(&mut taken, 0.99));
    }
}
