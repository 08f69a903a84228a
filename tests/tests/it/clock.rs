//! Agents with a wrong clock: the receiver reports the offset once, and the agent signs with the corrected time from
//! then on, also under a load of changes.

use std::time::Duration;

use anyhow::Result;
use tidewatch_testing::landscape::Options;

use crate::{
    load::{KEDA, Load, watch_objects},
    support::{Isolation, SingleRuntime, TestResult, quick_options},
};

const CHANGES: usize = 60;
const PAUSE: Duration = Duration::from_millis(20);

/// Runs a load with an agent that has a clock `ahead` seconds fast.
async fn load_with_clock_offset(name: &str, ahead: i64) -> Result<()> {
    let options = Options { agent: vec![format!("--clock-offset-seconds={ahead}")], ..quick_options() };
    let setup = SingleRuntime::isolated(Isolation::Shared, name, &[KEDA], options).await?;
    setup.receiver_metric_reaches("tidewatch_gateway_requests_refused_total", &["\"clock\""], 1).await?;
    watch_objects(&setup).await?;
    setup.in_sync().await?;
    let before = setup.counts().await?;
    Load::run(&setup, CHANGES, PAUSE).await?;
    setup.counts_agree_since(before).await?;
    let page = setup.agent_page().await?;
    let offset = page.lines().find_map(|line| line.strip_prefix("tidewatch_agent_clock_offset_seconds "));
    let offset: i64 = offset.unwrap_or_default().trim().parse()?;
    // The `Date` header has whole seconds, and the request took time as well.
    assert!((offset + ahead).abs() <= 5, "{ahead} seconds ahead, corrected by {offset}");
    let refused = crate::sync::sum(&page, "tidewatch_agent_requests_total", &["\"401\""]);
    assert!((1..=2).contains(&refused), "the wrong clock was refused {refused} times");
    Ok(())
}

#[tokio::test]
async fn a_fast_clock_is_corrected() -> TestResult {
    load_with_clock_offset("clock-ahead", 600).await?;
    Ok(())
}

#[tokio::test]
async fn a_slow_clock_is_corrected() -> TestResult {
    load_with_clock_offset("clock-behind", -600).await?;
    Ok(())
}
