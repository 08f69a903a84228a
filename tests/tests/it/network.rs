//! Network faults on each of the four connections during a load of changes: cuts, distance, dropped packets, resets and garbage.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tidewatch_testing::{
    landscape::Options,
    proxy::{Conditions, Mode, Proxy},
};

use crate::{
    load::{KEDA, Load, watch_objects},
    support::{Isolation, SingleRuntime, TestResult, quick_options},
};

const PAUSE: Duration = Duration::from_millis(20);
/// Duration of a fault.
const FAULT_DURATION: Duration = Duration::from_secs(2);

async fn proxied(name: &str) -> Result<SingleRuntime> {
    let setup =
        SingleRuntime::isolated(Isolation::Shared, name, &[KEDA], Options { proxied: true, ..quick_options() }).await?;
    watch_objects(&setup).await?;
    setup.in_sync().await?;
    Ok(setup)
}

/// Applies one fault after the other to a connection, with changes before, during and after each.
async fn inject_faults(load: &mut Load, proxy: &Proxy) -> Result<()> {
    for mode in [Mode::Cut, Mode::BlackHole, Mode::Swallow, Mode::Noise, Mode::Plain] {
        proxy.set(mode);
        load.advance(15).await?;
        tokio::time::sleep(FAULT_DURATION).await;
        proxy.resume();
        load.advance(15).await?;
    }
    let far = Conditions { round_trip: Duration::from_millis(300), ..Conditions::default() };
    let reset_while_idle = Conditions { idle_limit: Some(Duration::from_millis(500)), ..Conditions::default() };
    for conditions in [far, reset_while_idle] {
        proxy.set_conditions(conditions);
        load.advance(15).await?;
        tokio::time::sleep(FAULT_DURATION).await;
        proxy.set_conditions(Conditions::default());
        load.advance(15).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_load_survives_network_faults_between_agent_and_receiver() -> TestResult {
    let setup = proxied("way-front").await?;
    let before = setup.counts().await?;
    let mut load = Load::start(&setup, PAUSE);
    inject_faults(&mut load, setup.landscape.agents_proxy().context("a proxy")?).await?;
    load.finish(&setup).await?;
    setup.agent_metric_reaches("tidewatch_agent_requests_total", &["\"connect\""], 1).await?;
    // A retransmitted request was recorded once, and a lost one was sent again.
    setup.counts_agree_since(before).await?;
    Ok(())
}

#[tokio::test]
async fn a_load_survives_network_faults_to_the_api_server() -> TestResult {
    let setup = proxied("way-server").await?;
    let proxies = setup.runtime.proxies().context("proxies")?;
    let before = setup.counts().await?;
    let mut load = Load::start(&setup, PAUSE);
    inject_faults(&mut load, &proxies.agent).await?;
    inject_faults(&mut load, &proxies.receiver).await?;
    load.finish(&setup).await?;
    setup.agent_metric_reaches("tidewatch_agent_watch_failures_total", &[], 1).await?;
    setup.counts_agree_since(before).await?;
    Ok(())
}

#[tokio::test]
async fn a_load_survives_network_faults_to_the_control_plane() -> TestResult {
    let setup = proxied("way-kcp").await?;
    let before = setup.counts().await?;
    let mut load = Load::start(&setup, PAUSE);
    inject_faults(&mut load, setup.landscape.kcp_proxy().context("a proxy")?).await?;
    load.finish(&setup).await?;
    setup.receiver_metric_reaches("tidewatch_kcp_watch_failures_total", &[], 1).await?;
    // The Lease outlasts the faults, so it is still the same receiver with the same counts.
    setup.counts_agree_since(before).await?;
    Ok(())
}

#[tokio::test]
async fn silently_dropped_connections_are_detected_and_replaced() -> TestResult {
    let setup = proxied("way-forgotten").await?;
    let proxies = setup.runtime.proxies().context("proxies")?;
    let front = setup.landscape.agents_proxy().context("a proxy")?;
    let back = setup.landscape.kcp_proxy().context("a proxy")?;
    for proxy in [front, &proxies.agent, &proxies.receiver, back] {
        let before = setup.counts().await?;
        let mut load = Load::start(&setup, PAUSE);
        load.advance(10).await?;
        proxy.drop_established();
        load.advance(10).await?;
        load.finish(&setup).await?;
        setup.counts_agree_since(before).await?;
    }
    Ok(())
}
