//! All agents come for a certificate: how long until each has one and its event path is proven, and what it costs the receiver. Twice:
//!
//! * As after a time without a receiver that was longer than their certificates. The receiver has just started: it reads everything,
//!   looks into every runtime, and asks each for its keys. The agents have tried for hours, and so are spread over the longest pause
//!   between two of their tries.
//! * Again, all in one moment, when the receiver has all of that. What is left is what one enrolment costs: TLS, token, question to the
//!   runtime, certificate.

use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

use super::{
    Figure,
    crowded::{Crowded, PATIENCE},
    figure::{cpu_of, line, mebibytes},
};
use crate::{
    load::{Office, until_within},
    progress::{self, Step},
};

const FULL: f64 = 5_000.0;

/// How much is measured.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// How many agents, one landscape each, upwards; two numbers at least, or there is nothing to project from.
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 2_000])]
    pub agents: Vec<usize>,
}

/// What was seen with one number of agents; times in seconds from the start of the receiver's process.
struct Seen {
    ready: f64,
    half: f64,
    enrolled: f64,
    proven: f64,
    /// CPU of the receiver until then, in seconds.
    cpu: f64,
    /// CPU of this process in the same time: all the agents, and all their API servers.
    others: f64,
    /// Tries without an answer: before the receiver listened, or when it had no room.
    faults: f64,
    /// Tries that were refused.
    refused: f64,
    /// Seconds until all have a second certificate, and the receiver's CPU in that time, the heartbeats of all included.
    again: f64,
    again_cpu: f64,
    again_vain: f64,
    pss: f64,
    peak_rss: f64,
}

/// Runs the measurement and tells each figure. The projection is the line through the numbers of agents, and never less than what the
/// largest of them needed. No bar is named for any of it.
///
/// # Errors
/// When the setting does not stand, or an agent gets no certificate.
pub async fn measure(settings: &Settings, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    ensure!(
        settings.agents.is_sorted() && settings.agents.len() > 1,
        "two numbers of agents at least, and they must rise"
    );
    let mut rounds = Vec::new();
    for agents in &settings.agents {
        let seen = round(*agents).await?;
        let count = f64::from(u32::try_from(*agents)?);
        for (figure, value, unit) in [
            ("enrolment_agents", count, "agents"),
            ("enrolment_receiver_ready", seen.ready, "s"),
            ("enrolment_enrolled_p50", seen.half, "s"),
            ("enrolment_enrolled", seen.enrolled, "s"),
            ("enrolment_proven", seen.proven, "s"),
            ("enrolment_unanswered", seen.faults, "requests"),
            ("enrolment_refused", seen.refused, "requests"),
            ("enrolment_receiver_cpu", seen.cpu, "s"),
            ("enrolment_agents_and_runtimes_cpu", seen.others, "s"),
            ("enrolment_receiver_cpu_per_agent_from_start", seen.cpu * 1e3 / count, "ms"),
            ("enrolment_enrolled_again", seen.again, "s"),
            ("enrolment_again_in_vain", seen.again_vain, "requests"),
            ("enrolment_receiver_cpu_per_enrolment", seen.again_cpu * 1e3 / count, "ms"),
            ("enrolment_receiver_pss", seen.pss, "MiB"),
            ("enrolment_receiver_peak_rss", seen.peak_rss, "MiB"),
        ] {
            tell(&Figure::new(figure, value, unit));
        }
        rounds.push((count, seen));
    }
    for (figure, unit, of) in [
        ("enrolment_enrolled_at_5000", "s", (|seen| seen.enrolled) as fn(&Seen) -> f64),
        ("enrolment_proven_at_5000", "s", |seen| seen.proven),
        ("enrolment_receiver_cpu_at_5000", "s", |seen| seen.cpu),
        ("enrolment_receiver_pss_at_5000", "MiB", |seen| seen.pss),
        ("enrolment_receiver_peak_rss_at_5000", "MiB", |seen| seen.peak_rss),
    ] {
        let points: Vec<_> = rounds.iter().map(|(count, seen)| (*count, of(seen))).collect();
        let least = points.last().map_or(0.0, |(_, value)| *value);
        tell(&Figure::new(figure, line(&points, FULL).0.max(least), unit));
    }
    Ok(())
}

async fn round(agents: usize) -> Result<Seen> {
    let mut crowded = Crowded::start_issuing().await?;
    crowded.register(agents).await?;
    let port = crowded.landscape.enrolment_port().context("a receiver that issues")?;
    let office = Office::new(([127, 0, 0, 1], port).into(), crowded.landscape.ca().trust_bundle().store()?)?;
    crowded.landscape.with_receiver(async |receiver| receiver.kill9()).await?;

    let step = Step::begin(format!("{agents} agents enrol"));
    let (begun, others) = (Instant::now(), cpu_of(std::process::id())?);
    crowded.crowd.enrol(&office);
    let starting = async {
        crowded.landscape.start_receiver().await?;
        Ok::<_, anyhow::Error>(begun.elapsed().as_secs_f64())
    };
    let enrolling = enrolled(&crowded, begun, agents);
    let (ready, (half, enrolled)) = tokio::try_join!(starting, enrolling)?;
    crowded.proven(agents).await?;
    let proven = begun.elapsed().as_secs_f64();
    let others = cpu_of(std::process::id())? - others;
    let cpu = crowded.receiver_cpu().await?;
    let (faults, refused) = in_vain(&crowded);
    progress::say(&format!("refused so far, by status: {:?}", crowded.crowd.tally().refusals()));
    crowded.crowd.at_rest(PATIENCE).await?;
    step.done();

    let step = Step::begin(format!("{agents} agents enrol once more"));
    let (begun, before, vain) = (Instant::now(), crowded.receiver_cpu().await?, in_vain(&crowded));
    crowded.crowd.enrol_again(&office);
    let (_, again) = self::enrolled(&crowded, begun, 2 * agents).await?;
    let again_cpu = crowded.receiver_cpu().await? - before;
    let after = in_vain(&crowded);
    step.done();

    let memory = crowded.receiver_memory().await?;
    Ok(Seen {
        ready,
        half,
        enrolled,
        proven,
        cpu,
        others,
        faults,
        refused,
        again,
        again_cpu,
        again_vain: after.0 + after.1 - vain.0 - vain.1,
        pss: mebibytes(memory.pss_kib),
        peak_rss: mebibytes(memory.peak_rss_kib),
    })
}

/// Waits until so many certificates were issued since the crowd began; when half of them were, and when all, in seconds.
async fn enrolled(crowded: &Crowded, begun: Instant, of: usize) -> Result<(f64, f64)> {
    let (mut half, of) = (None, of as u64);
    until_within("every agent to have a certificate", PATIENCE, async || {
        let (count, tally) = (crowded.crowd.tally().enrolments(), crowded.crowd.tally());
        let passed = begun.elapsed().as_secs_f64();
        if count * 2 >= of {
            half.get_or_insert(passed);
        }
        if count < of {
            bail!("{count} of {of} have one, {} faults, refusals {:?}", tally.faults(), tally.refusals());
        }
        Ok(Some((half.unwrap_or(passed), passed)))
    })
    .await
}

/// Tries so far that had no answer, and tries that were refused.
fn in_vain(crowded: &Crowded) -> (f64, f64) {
    let tally = crowded.crowd.tally();
    let number = |count: u64| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    (number(tally.faults()), number(tally.refusals().values().sum()))
}
