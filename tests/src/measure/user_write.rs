//! Whether a user's write is slower when the agent runs: latency of the same PATCH with and without it, interleaved.

use anyhow::Result;

use super::{
    Figure, Settings,
    figure::{median, millis, quantile},
    setting::Setting,
    writer,
};
use crate::{landscape::DEADLINE, progress::Step};

/// Pairs of rounds.
const PAIRS: u32 = 8;

/// Runs the measurement and tells its figures.
///
/// # Errors
/// When the setting does not stand or a write fails.
pub async fn user_write(settings: &Settings, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    let setting = Setting::start(settings).await?;
    let writes = settings.writes().div_ceil(PAIRS);
    writer::toggle(&setting.runtime, settings.rate, settings.pause()).await?;
    let (mut with, mut without) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for pair in 1..=PAIRS {
        let step = Step::begin(format!("user write, pair {pair} of {PAIRS}"));
        // Which one goes first alternates, so that a drift of the machine favours neither.
        for agent in [pair % 2 == 0, pair % 2 != 0] {
            if agent {
                setting.runtime.start_agent().await?;
                setting.settle(settings.objects).await?;
            } else {
                setting.runtime.with_agent(async |agent| agent.sigterm(DEADLINE).await).await?.ok();
            }
            let taken = writer::toggle(&setting.runtime, writes, settings.pause()).await?;
            let mut taken: Vec<_> = taken.iter().map(|write| millis(write.took)).collect();
            let into = if agent { &mut with } else { &mut without };
            into[0].push(quantile(&mut taken, 0.5));
            into[1].push(quantile(&mut taken, 0.99));
        }
        step.done();
    }
    for (index, figure) in ["user_write_p50", "user_write_p99"].into_iter().enumerate() {
        let ratios = with[index].iter().zip(&without[index]).map(|(with, without)| with / without).collect();
        let (with, without) = (median(with[index].clone()), median(without[index].clone()));
        tell(&Figure::new(figure, with, "ms").over(without, median(ratios), 1.05));
    }
    Ok(())
}
