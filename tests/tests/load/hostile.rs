//! Thirty hostile runtimes of each kind next to a hundred well-behaved ones.

use std::sync::Arc;

use anyhow::Result;
use tidewatch_testing::{
    bed,
    landscape::{Landscape, Options},
    load::{Attack, Coexistence, SimulatedFleet},
};

use crate::exclusive;

const MODULE: &str = "template-operator";
/// Memory limit of the receiver's container in `deploy/base/deployment.yaml`, in KiB.
const MEMORY_LIMIT_KIB: u64 = 2 << 20;

/// All changes of the well-behaved runtimes arrive, and each attack takes effect, or `run` fails; no limit is exceeded.
#[tokio::test(flavor = "multi_thread")]
async fn hostile_runtimes_harm_no_other_runtime_and_stay_within_their_shares() -> Result<()> {
    let _guard = exclusive().await;
    let options = Options { log: "warn".to_owned(), ..Options::default() };
    let landscape = Landscape::start_issuing(bed::shared().await?.kcp().await?, "fleet-hostile", options).await?;
    let landscape = Arc::new(landscape);
    landscape.write_module(MODULE, "1.0.0", "1.1.0").await?;
    let mut fleet = SimulatedFleet::new(landscape.clone()).await?;
    let attacks = vec![Attack::Flood, Attack::HeldBodies, Attack::Runtime];
    let scenario = Coexistence { others: 100, hostile: 30, attacks, onset: 2, changes: 2, pause: 8 };
    let report = scenario.run(&landscape, &mut fleet, MODULE).await?;

    for (changes, times) in [(scenario.onset, &report.onset), (scenario.changes, &report.attacked)] {
        let made = scenario.others * usize::try_from(changes)?;
        assert_eq!(times.shown.len(), made, "changes that the runtimes show");
    }
    assert!(report.peak_rss_kib <= MEMORY_LIMIT_KIB, "the receiver took {} KiB", report.peak_rss_kib);
    assert!(
        f64::from(report.hostile_writes) <= report.allowed_writes,
        "{} writes to KCP for the hostile runtimes, which may cause {}",
        report.hostile_writes,
        report.allowed_writes
    );
    Ok(())
}
