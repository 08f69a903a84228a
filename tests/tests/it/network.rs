//! Networks that cut, delay, swallow and answer with garbage, on each of the four ways, during a load of changes.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tidewatch_tests::{
    landscape::Options,
    proxy::{Mode, Proxy},
};

use crate::{
    load::{KEDA, Load, watch_objects},
    support::{Ground, One, Tested, quick},
};

const PAUSE: Duration = Duration::from_millis(20);
/// How long a way is bad.
const BAD: Duration = Duration::from_secs(2);

async fn proxied(name: &str) -> Result<One> {
    let one = One::to_harm(Ground::Shared, name, &[KEDA], Options { proxied: true, ..quick() }).await?;
    watch_objects(&one).await?;
    one.in_sync().await?;
    Ok(one)
}

/// One bad time after the other on one way, with changes before, during and after each.
async fn bad_times(load: &mut Load, way: &Proxy) -> Result<()> {
    let delay = Mode::Delay(Duration::from_millis(150));
    for mode in [Mode::Cut, delay, Mode::BlackHole, Mode::Noise, Mode::Plain] {
        way.set(mode);
        load.goes_on(15).await?;
        tokio::time::sleep(BAD).await;
        way.resume();
        load.goes_on(15).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_load_outlives_bad_ways_between_agent_and_receiver() -> Tested {
    let one = proxied("way-front").await?;
    let before = one.counts().await?;
    let mut load = Load::start(&one, PAUSE);
    bad_times(&mut load, one.landscape.front().context("a proxy")?).await?;
    load.arrives(&one).await?;
    one.agent_counts("tidewatch_agent_requests_total", &["\"connect\""], 1).await?;
    // What was sent and came twice was recorded once, and what did not come was sent again.
    one.counts_agree_since(before).await?;
    Ok(())
}

#[tokio::test]
async fn a_load_outlives_bad_ways_to_the_api_server() -> Tested {
    let one = proxied("way-server").await?;
    let ways = one.runtime.ways().context("proxies")?;
    let before = one.counts().await?;
    let mut load = Load::start(&one, PAUSE);
    bad_times(&mut load, &ways.agent).await?;
    bad_times(&mut load, &ways.receiver).await?;
    load.arrives(&one).await?;
    one.agent_counts("tidewatch_agent_watch_failures_total", &[], 1).await?;
    one.counts_agree_since(before).await?;
    Ok(())
}

#[tokio::test]
async fn a_load_outlives_bad_ways_to_the_control_plane() -> Tested {
    let one = proxied("way-kcp").await?;
    let before = one.counts().await?;
    let mut load = Load::start(&one, PAUSE);
    bad_times(&mut load, one.landscape.back().context("a proxy")?).await?;
    load.arrives(&one).await?;
    one.receiver_counts("tidewatch_kcp_watch_failures_total", &[], 1).await?;
    // Its Lease holds for longer than that: the receiver of then is that of now, and so are its counts.
    one.counts_agree_since(before).await?;
    Ok(())
}

#[tokio::test]
async fn connections_that_a_firewall_forgets_are_noticed_and_made_anew() -> Tested {
    let one = proxied("way-forgotten").await?;
    let ways = one.runtime.ways().context("proxies")?;
    let (front, back) = (one.landscape.front().context("a proxy")?, one.landscape.back().context("a proxy")?);
    for way in [front, &ways.agent, &ways.receiver, back] {
        let before = one.counts().await?;
        let mut load = Load::start(&one, PAUSE);
        load.goes_on(10).await?;
        way.forget();
        load.goes_on(10).await?;
        load.arrives(&one).await?;
        one.counts_agree_since(before).await?;
    }
    Ok(())
}
