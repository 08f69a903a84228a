//! The user of the measurements: toggles an unused field of a module of the runtime's Kyma.

use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tidewatch_api::{
    Kyma,
    names::{SKR_KYMA, SKR_NAMESPACE},
};
use tidewatch_testing::landscape::Runtime;
use tokio::time::{MissedTickBehavior, interval};

use super::runtime_setup::MODULE;

/// One write.
pub(super) struct Write {
    pub(super) begun: SystemTime,
    pub(super) took: Duration,
    pub(super) resource_version: u64,
}

/// Writes so many times, at most one write per pause.
pub(super) async fn toggle(runtime: &Runtime, writes: u32, pause: Duration) -> Result<Vec<Write>> {
    let api = Api::<Kyma>::namespaced(runtime.user(), SKR_NAMESPACE);
    let mut ticks = interval(pause.max(Duration::from_micros(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut done = Vec::new();
    for number in 0..writes {
        ticks.tick().await;
        // Unique over all runs, so every write is a change.
        let controller = format!("{number}-{}", SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_nanos());
        let patch = Patch::Merge(json!({"spec": {"modules": [{"name": MODULE, "controller": controller}]}}));
        let begun = SystemTime::now();
        let start = Instant::now();
        let kyma = api.patch(SKR_KYMA, &PatchParams::default(), &patch).await?;
        let took = start.elapsed();
        done.push(Write { begun, took, resource_version: kyma.resource_version().unwrap_or_default().parse()? });
    }
    Ok(done)
}
