//! Whether a user's write is slower when the agent runs: latency of the same PATCH with and without it, interleaved.

use anyhow::Result;

use super::{
    Figure, Settings,
    event_path::{self, Seen},
    figure::{median, millis, quantile},
    setting::Setting,
    writer,
};
use crate::{landscape::DEADLINE, progress::Step};

/// Rounds of each kind.
const ROUNDS: u32 = 8;

/// Who watches while the user writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nobody,
    /// A metadata watch that does nothing: what any watch costs a write on this machine.
    PlainWatch,
    Agent,
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
    let [mut nobody, mut plain, mut agent] = <[Rounds; 3]>::default();
    for number in 1..=ROUNDS {
        let step = Step::begin(format!("user write, round {number} of {ROUNDS}"));
        // Which one goes first alternates, so that a drift of the machine favours none.
        let mut order = [Beside::Nobody, Beside::PlainWatch, Beside::Agent];
        order.rotate_left(usize::try_from(number % 3)?);
        for beside in order {
            let taken = round(&setting, settings, beside, writes).await?;
            let into = match beside {
                Beside::Nobody => &mut nobody,
                Beside::PlainWatch => &mut plain,
                Beside::Agent => &mut agent,
            };
            into.add(taken);
        }
        step.done();
    }
    for (index, [with_agent, with_plain]) in
        [["user_write_p50", "user_write_plain_watch_p50"], ["user_write_p99", "user_write_plain_watch_p99"]]
            .into_iter()
            .enumerate()
    {
        for (figure, rounds) in [(with_agent, &agent), (with_plain, &plain)] {
            let (with, without) = (&rounds.0[index], &nobody.0[index]);
            let ratios = with.iter().zip(without).map(|(with, without)| with / without).collect();
            tell(&Figure::new(figure, median(with.clone()), "ms").over(median(without.clone()), median(ratios), 1.05));
        }
    }
    Ok(())
}

async fn round(setting: &Setting, settings: &Settings, beside: Beside, writes: u32) -> Result<Vec<f64>> {
    if beside == Beside::Agent {
        setting.runtime.start_agent().await?;
        setting.settle(settings.objects).await?;
    } else {
        // It ends once; afterwards there is none to end.
        setting.runtime.with_agent(async |agent| agent.sigterm(DEADLINE).await).await?.ok();
    }
    let seen = Seen::default();
    let watch = (beside == Beside::PlainWatch).then(|| tokio::spawn(event_path::watch(setting.runtime.user(), seen)));
    let taken = writer::toggle(&setting.runtime, writes, settings.pause()).await;
    if let Some(watch) = watch {
        watch.abort();
    }
    Ok(taken?.iter().map(|write| millis(write.took)).collect())
}

impl Rounds {
    fn add(&mut self, mut taken: Vec<f64>) {
        self.0[0].push(quantile(&mut taken, 0.5));
        self.0[1].push(quantile(&mut taken, 0.99));
    }
}
