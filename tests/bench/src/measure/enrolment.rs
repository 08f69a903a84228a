//! All agents enrol: the time until each has a certificate and a proven event path, and the receiver's cost. Twice:
//!
//! * As after an outage of the receiver that outlasted the certificates. The receiver has just started: it lists
//!   everything, connects to every runtime, and fetches each runtime's token keys. The agents have retried for hours,
//!   and so are spread over the longest pause between two attempts.
//! * Again, all at the same time, when the receiver has all of that. The remaining cost is that of one enrolment: TLS,
//!   token, request to the runtime, certificate.

use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use tidewatch_testing::{
    load::{EnrolmentEndpoint, until_within},
    progress::{self, Step},
};

use super::{
    Figure, Network,
    figure::{cpu_of, line, mebibytes},
    fleet_setup::{FleetSetup, WAIT_LIMIT},
};

const TARGET: f64 = 5_000.0;

/// Extent of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Numbers of agents, one landscape each, ascending; at least two, for the projection
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 2_000])]
    pub agents: Vec<usize>,
    #[command(flatten)]
    pub(super) network: Network,
}

/// The samples of one number of agents; times in seconds from the start of the receiver's process.
struct Samples {
    ready: f64,
    half: f64,
    enrolled: f64,
    proven: f64,
    /// CPU time of the receiver until all paths are proven, in seconds.
    cpu: f64,
    /// CPU time of this process in the same time: all agents and their API servers.
    others: f64,
    /// Attempts without a response: before the receiver listened, or beyond its connection limits.
    failures: f64,
    /// Attempts that were refused.
    refused: f64,
    /// Seconds until all agents have a second certificate, and the receiver's CPU time meanwhile, all heartbeats
    /// included.
    again: f64,
    again_cpu: f64,
    again_failed: f64,
    pss: f64,
    peak_rss: f64,
}

/// Runs the measurement and emits each figure. The projection is the line through the numbers of agents, and never less
/// than the value of the largest. No figure has a bar.
///
/// # Errors
/// When the setup cannot be started, or an agent gets no certificate.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    ensure!(
        settings.agents.is_sorted() && settings.agents.len() > 1,
        "at least two ascending numbers of agents are required"
    );
    let mut rounds = Vec::new();
    for agents in &settings.agents {
        let seen = round(*agents, settings.network).await?;
        let count = f64::from(u32::try_from(*agents)?);
        for (figure, value, unit) in [
            ("enrolment_agents", count, "agents"),
            ("enrolment_receiver_ready", seen.ready, "s"),
            ("enrolment_enrolled_p50", seen.half, "s"),
            ("enrolment_enrolled", seen.enrolled, "s"),
            ("enrolment_proven", seen.proven, "s"),
            ("enrolment_unanswered", seen.failures, "requests"),
            ("enrolment_refused", seen.refused, "requests"),
            ("enrolment_receiver_cpu", seen.cpu, "s"),
            ("enrolment_agents_and_runtimes_cpu", seen.others, "s"),
            ("enrolment_receiver_cpu_per_agent_from_start", seen.cpu * 1e3 / count, "ms"),
            ("enrolment_enrolled_again", seen.again, "s"),
            ("enrolment_again_in_vain", seen.again_failed, "requests"),
            ("enrolment_receiver_cpu_per_enrolment", seen.again_cpu * 1e3 / count, "ms"),
            ("enrolment_receiver_pss", seen.pss, "MiB"),
            ("enrolment_receiver_peak_rss", seen.peak_rss, "MiB"),
        ] {
            emit(&Figure::new(figure, value, unit));
        }
        rounds.push((count, seen));
    }
    for (figure, unit, of) in [
        ("enrolment_enrolled_at_5000", "s", (|seen| seen.enrolled) as fn(&Samples) -> f64),
        ("enrolment_proven_at_5000", "s", |seen| seen.proven),
        ("enrolment_receiver_cpu_at_5000", "s", |seen| seen.cpu),
        ("enrolment_receiver_pss_at_5000", "MiB", |seen| seen.pss),
        ("enrolment_receiver_peak_rss_at_5000", "MiB", |seen| seen.peak_rss),
    ] {
        let points: Vec<_> = rounds.iter().map(|(count, seen)| (*count, of(seen))).collect();
        let least = points.last().map_or(0.0, |(_, value)| *value);
        emit(&Figure::new(figure, line(&points, TARGET).0.max(least), unit));
    }
    Ok(())
}

async fn round(agents: usize, network: Network) -> Result<Samples> {
    let mut setup = FleetSetup::start_issuing(network).await?;
    setup.register(agents).await?;
    let address = setup.landscape.agents_enrolment().context("the receiver has no enrolment port")?;
    let endpoint = EnrolmentEndpoint::new(address, setup.landscape.ca().trust_bundle().store()?)?;
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;

    let step = Step::begin(format!("enrolling {agents} agents"));
    let begun = Instant::now();
    let others = cpu_of(std::process::id())?;
    setup.fleet.enrol(&endpoint);
    let starting = async {
        setup.landscape.start_receiver().await?;
        Ok::<_, anyhow::Error>(begun.elapsed().as_secs_f64())
    };
    let enrolling = enrolled(&setup, begun, agents);
    let (ready, (half, enrolled)) = tokio::try_join!(starting, enrolling)?;
    setup.proven(agents).await?;
    let proven = begun.elapsed().as_secs_f64();
    let others = cpu_of(std::process::id())? - others;
    let cpu = setup.receiver_cpu().await?;
    let (failures, refused) = failed_attempts(&setup);
    progress::print_line(&format!("refused requests by status: {:?}", setup.fleet.counters().refusals()));
    setup.fleet.at_rest(WAIT_LIMIT).await?;
    step.done();

    let step = Step::begin(format!("enrolling {agents} agents once more"));
    let begun = Instant::now();
    let before = setup.receiver_cpu().await?;
    let vain = failed_attempts(&setup);
    setup.fleet.enrol_again(&endpoint);
    let (_, again) = self::enrolled(&setup, begun, 2 * agents).await?;
    let again_cpu = setup.receiver_cpu().await? - before;
    let after = failed_attempts(&setup);
    step.done();

    let memory = setup.receiver_memory().await?;
    Ok(Samples {
        ready,
        half,
        enrolled,
        proven,
        cpu,
        others,
        failures,
        refused,
        again,
        again_cpu,
        again_failed: after.0 + after.1 - vain.0 - vain.1,
        pss: mebibytes(memory.pss_kib),
        peak_rss: mebibytes(memory.peak_rss_kib),
    })
}

/// Waits until so many certificates were issued since the fleet began; returns the seconds until half of them and until
/// all of them.
async fn enrolled(setup: &FleetSetup, begun: Instant, of: usize) -> Result<(f64, f64)> {
    let mut half = None;
    let of = of as u64;
    until_within("every agent to have a certificate", WAIT_LIMIT, async || {
        let count = setup.fleet.counters().enrolments();
        let counters = setup.fleet.counters();
        let passed = begun.elapsed().as_secs_f64();
        if count * 2 >= of {
            half.get_or_insert(passed);
        }
        if count < of {
            bail!(
                "{count} of {of} agents have one, {} failed requests, refusals {:?}",
                counters.failures(),
                counters.refusals()
            );
        }
        Ok(Some((half.unwrap_or(passed), passed)))
    })
    .await
}

/// Attempts so far without a response, and attempts that were refused.
fn failed_attempts(setup: &FleetSetup) -> (f64, f64) {
    let counters = setup.fleet.counters();
    let number = |count: u64| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    (number(counters.failures()), number(counters.refusals().values().sum()))
}
