//! Whether a user's write is slower when the agent runs: latency of the same PATCH with and without it, interleaved; also while the
//! receiver refuses what the agent sends, or hangs. Each round ends with an error when it was not what it is called.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use http::StatusCode;
use tokio::time::sleep;

use super::{
    Figure, Settings,
    crowded::metric,
    event_path::{self, Seen},
    figure::{median, millis, quantile},
    setting::Setting,
    writer,
};
use crate::{
    landscape::DEADLINE,
    load::{Plain, Work},
    product::ProductProcess,
    progress::Step,
};

/// Rounds of each kind.
const ROUNDS: u32 = 8;
/// Answers that are on their way to the agent are there after this time.
const ON_THE_WAY: Duration = Duration::from_millis(200);

/// Who watches while the user writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Beside {
    Nobody,
    /// A metadata watch that does nothing: what any watch costs a write on this machine.
    PlainWatch,
    Agent,
    /// The agent, whose receiver says 503.
    Unavailable,
    /// The agent, whose receiver says 401.
    Unauthorized,
    /// The agent, whose receiver is frozen: its connections stay open and nothing answers.
    Hung,
}

impl Beside {
    const ALL: [Self; 6] =
        [Self::Nobody, Self::PlainWatch, Self::Agent, Self::Unavailable, Self::Unauthorized, Self::Hung];

    /// The names of its median and of its 99th percentile.
    const fn figures(self) -> Option<[&'static str; 2]> {
        match self {
            Self::Nobody => None,
            Self::PlainWatch => Some(["user_write_plain_watch_p50", "user_write_plain_watch_p99"]),
            Self::Agent => Some(["user_write_p50", "user_write_p99"]),
            Self::Unavailable => Some(["user_write_receiver_503_p50", "user_write_receiver_503_p99"]),
            Self::Unauthorized => Some(["user_write_receiver_401_p50", "user_write_receiver_401_p99"]),
            Self::Hung => Some(["user_write_receiver_hung_p50", "user_write_receiver_hung_p99"]),
        }
    }
}

/// The medians and 99th percentiles of the rounds of one kind.
#[derive(Default)]
struct Rounds([Vec<f64>; 2]);

/// Runs the measurement and tells its figures.
///
/// # Errors
/// When the setting does not stand or a write fails.
pub async fn user_write(settings: &Settings, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    let setting = Setting::start(settings).await?;
    let writes = settings.writes().div_ceil(ROUNDS);
    writer::toggle(&setting.runtime, settings.rate, settings.pause()).await?;
    let mut rounds = Beside::ALL.map(|_| Rounds::default());
    for number in 1..=ROUNDS {
        let step = Step::begin(format!("user write, round {number} of {ROUNDS}"));
        // Which one goes first alternates, so that a drift of the machine favours none.
        let mut order = Beside::ALL;
        order.rotate_left(usize::try_from(number)? % Beside::ALL.len());
        for beside in order {
            let taken = round(&setting, settings, beside, writes).await?;
            rounds[beside as usize].add(taken);
        }
        step.done();
    }
    let [nobody, others @ ..] = &rounds;
    for (beside, rounds) in Beside::ALL.into_iter().skip(1).zip(others) {
        for (index, figure) in beside.figures().into_iter().flatten().enumerate() {
            let (with, without) = (&rounds.0[index], &nobody.0[index]);
            let ratios = with.iter().zip(without).map(|(with, without)| with / without).collect();
            let figure = Figure::new(figure, median(with.clone()), "ms");
            let (floor, ratio) = (median(without.clone()), median(ratios));
            // The plain watch is there to compare with; it is nobody's to keep below a bar.
            tell(&if beside == Beside::PlainWatch { figure.beside(floor) } else { figure.over(floor, ratio, 1.05) });
        }
    }
    Ok(())
}

async fn round(setting: &Setting, settings: &Settings, beside: Beside, writes: u32) -> Result<Vec<f64>> {
    if matches!(beside, Beside::Nobody | Beside::PlainWatch) {
        end_agent(setting).await.context("end the agent")?;
    } else {
        setting.runtime.start_agent().await?;
        setting.settle(settings.objects).await?;
    }
    let seen = Seen::default();
    let watch = (beside == Beside::PlainWatch).then(|| tokio::spawn(event_path::watch(setting.runtime.user(), seen)));
    let write = async || writer::toggle(&setting.runtime, writes, settings.pause()).await;
    let taken = match beside {
        Beside::Nobody | Beside::PlainWatch => write().await,
        Beside::Agent => told(setting, write).await,
        Beside::Unavailable => refused(setting, StatusCode::SERVICE_UNAVAILABLE, write).await,
        Beside::Unauthorized => refused(setting, StatusCode::UNAUTHORIZED, write).await,
        Beside::Hung => hung(setting, write).await,
    };
    if let Some(watch) = watch {
        watch.abort();
    }
    Ok(taken?.iter().map(|write| millis(write.took)).collect())
}

/// Ends the agent, unless it has ended already.
async fn end_agent(setting: &Setting) -> Result<()> {
    let ended = async |agent: &ProductProcess| match agent.process().status()? {
        Some(_) => Ok(()),
        None => agent.sigterm(DEADLINE).await.map(drop),
    };
    Ok(setting.runtime.with_agent(ended).await??)
}

/// Requests of the agent with events that ended so.
async fn requests(setting: &Setting, outcome: &str) -> Result<f64> {
    let (_, page) = setting.runtime.with_agent(async |agent| agent.get("/metrics").await).await??;
    Ok(metric(&page, &format!("tidewatch_agent_requests_total{{route=\"events\",outcome=\"{outcome}\"}}")))
}

/// Writes of which the agent tells the receiver.
async fn told(
    setting: &Setting,
    write: impl AsyncFnOnce() -> Result<Vec<writer::Write>>,
) -> Result<Vec<writer::Write>> {
    let before = requests(setting, "taken").await?;
    let taken = write().await?;
    ensure!(requests(setting, "taken").await? > before, "the agent has told the receiver nothing");
    Ok(taken)
}

/// Writes while another server stands in the receiver's place and refuses everything.
async fn refused(
    setting: &Setting,
    status: StatusCode,
    write: impl AsyncFnOnce() -> Result<Vec<writer::Write>>,
) -> Result<Vec<writer::Write>> {
    let landscape = &setting.landscape;
    landscape.with_receiver(async |receiver| receiver.sigterm(DEADLINE).await).await??;
    let plain = Plain::start(landscape, landscape.authority().parse()?, Work::Refuse(status))?;
    let before = requests(setting, status.as_str()).await?;
    let taken = write().await;
    let met = requests(setting, status.as_str()).await? - before;
    drop(plain);
    landscape.start_receiver().await.context("start the receiver again")?;
    ensure!(met >= 1.0, "the agent has met no {status}");
    taken
}

async fn hung(
    setting: &Setting,
    write: impl AsyncFnOnce() -> Result<Vec<writer::Write>>,
) -> Result<Vec<writer::Write>> {
    setting.landscape.with_receiver(async |receiver| receiver.sigstop()).await??;
    sleep(ON_THE_WAY).await;
    let before = requests(setting, "taken").await?;
    let taken = write().await;
    let (answered, untold) = (requests(setting, "taken").await? - before, untold(setting).await?);
    setting.landscape.with_receiver(async |receiver| receiver.sigcont()).await??;
    ensure!(
        answered == 0.0 && untold >= 1.0,
        "{answered} requests were taken while the receiver hung, {untold} events wait"
    );
    taken
}

/// Events of the agent that wait, or were sent and are not settled.
async fn untold(setting: &Setting) -> Result<f64> {
    let (_, page) = setting.runtime.with_agent(async |agent| agent.get("/metrics").await).await??;
    Ok(metric(&page, "tidewatch_agent_events_waiting") + metric(&page, "tidewatch_agent_events_unsettled"))
}

impl Rounds {
    fn add(&mut self, mut taken: Vec<f64>) {
        self.0[0].push(quantile(&mut taken, 0.5));
        self.0[1].push(quantile(&mut taken, 0.99));
    }
}
