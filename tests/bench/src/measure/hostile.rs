//! Changes of well-behaved runtimes alone, and while hostile runtimes attack the receiver over all of its surfaces.

use std::time::Duration;

use anyhow::Result;
use tidewatch_testing::load::Coexistence;

use super::{
    Figure, Network,
    figure::{mebibytes, millis, quantile},
    fleet_setup::{FleetSetup, MODULE, metric},
};

/// Memory limit of the receiver's container in MiB (`deploy/base/deployment.yaml`).
const MEMORY_LIMIT: f64 = 2_048.0;
/// Reconciles that were delayed because a runtime had used up its share of writes.
const DELAYS: &str = "tidewatch_control_plane_write_delays_total";

/// Extent of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    #[command(flatten)]
    coexistence: Coexistence,
    #[command(flatten)]
    pub(super) network: Network,
}

/// Runs the measurement and emits each figure.
///
/// # Errors
/// When the setup cannot be started, the receiver ends, or a change of a well-behaved runtime is lost.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut setup = FleetSetup::start_complete(settings.network).await?;
    let report = settings.coexistence.run(&setup.landscape, &mut setup.fleet, MODULE).await?;
    for (names, alone, attacked) in [
        (["hostile_accepted_p50", "hostile_accepted_p99"], &report.alone.accepted, &report.attacked.accepted),
        (["hostile_settled_p50", "hostile_settled_p99"], &report.alone.shown, &report.attacked.shown),
    ] {
        let [half, most] = [0.5, 0.99].map(|q| (at_quantile(attacked, q), at_quantile(alone, q)));
        emit(&Figure::new(names[0], half.0, "ms").with_floor(half.1));
        emit(&Figure::new(names[1], most.0, "ms").ratio_at_most(most.1, most.0 / most.1, 1.5));
    }
    for (name, times) in
        [("hostile_onset_accepted_p99", &report.onset.accepted), ("hostile_onset_settled_p99", &report.onset.shown)]
    {
        emit(&Figure::new(name, at_quantile(times, 0.99), "ms"));
    }
    let repeated = f64::from(u32::try_from(report.onset.repeated + report.attacked.repeated)?);
    emit(&Figure::new("hostile_repeated_requests", repeated, "requests"));
    emit(&Figure::new("hostile_kcp_writes", f64::from(report.writes) / report.seconds, "writes/s"));
    let caused = f64::from(report.hostile_writes) / report.seconds;
    emit(&Figure::new("hostile_kcp_writes_caused", caused, "writes/s").at_most(report.allowed_writes / report.seconds));
    emit(&Figure::new("hostile_delayed_reconciles", metric(&report.metrics, DELAYS), "reconciles"));
    emit(&Figure::new("hostile_receiver_peak_rss", mebibytes(report.peak_rss_kib), "MiB").at_most(MEMORY_LIMIT));
    Ok(())
}

fn at_quantile(times: &[Duration], q: f64) -> f64 {
    quantile(&mut times.iter().map(|time| millis(*time)).collect::<Vec<_>>(), q)
}
