//! Agents whose clock is wrong: they are told, and sign with the receiver's clock from then on, also under a load of changes.

use std::time::Duration;

use anyhow::Result;
use tidewatch_tests::landscape::Options;

use crate::{
    load::{KEDA, Load, watch_objects},
    support::{Ground, One, Tested, quick},
};

const CHANGES: usize = 60;
const PAUSE: Duration = Duration::from_millis(20);

/// An agent whose clock is so many seconds ahead.
async fn works_with(name: &str, ahead: i64) -> Result<()> {
    let options = Options { agent: vec![format!("--clock-offset-seconds={ahead}")], ..quick() };
    let one = One::to_harm(Ground::Shared, name, &[KEDA], options).await?;
    one.receiver_counts("tidewatch_gateway_requests_refused_total", &["\"clock\""], 1).await?;
    watch_objects(&one).await?;
    one.in_sync().await?;
    let before = one.counts().await?;
    Load::run(&one, CHANGES, PAUSE).await?;
    one.counts_agree_since(before).await?;
    let page = one.agent_page().await?;
    let offset = page.lines().find_map(|line| line.strip_prefix("tidewatch_agent_clock_offset_seconds "));
    let offset: i64 = offset.unwrap_or_default().trim().parse()?;
    // `Date` has whole seconds, and the request took its time.
    assert!((offset + ahead).abs() <= 5, "{ahead} seconds ahead, {offset} added");
    let refused = crate::sync::sum(&page, "tidewatch_agent_requests_total", &["\"401\""]);
    assert!((1..=2).contains(&refused), "it is told once, not {refused} times");
    Ok(())
}

#[tokio::test]
async fn a_clock_that_is_ahead_is_corrected() -> Tested {
    works_with("clock-ahead", 600).await?;
    Ok(())
}

#[tokio::test]
async fn a_clock_that_is_behind_is_corrected() -> Tested {
    works_with("clock-behind", -600).await?;
    Ok(())
}
