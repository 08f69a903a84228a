//! IPv6 alone between agents and receiver: the receiver listens on `[::1]` and on nothing else.

use std::net::Ipv6Addr;

use tidewatch_testing::landscape::Options;

use crate::{
    load::KEDA,
    support::{Fleet, Isolation, SingleRuntime, TestResult, quick_options},
};

fn ipv6() -> Options {
    Options { loopback: Ipv6Addr::LOCALHOST.into(), ..quick_options() }
}

#[tokio::test]
async fn an_agent_enrols_and_sends_events_over_ipv6() -> TestResult {
    let fleet = Fleet::with_one_runtime("ipv6-issued", ipv6()).await?;
    assert!(fleet.landscape.agents_authority().starts_with("[::1]:"));
    fleet.only().delivers(&["keda"]).await?;
    Ok(())
}

#[tokio::test]
async fn an_agent_with_identity_files_is_probed_and_sends_events_over_ipv6() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::Shared, "ipv6-files", &[KEDA], ipv6()).await?;
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the module", |status| status.modules().len() == 1).await?;
    Ok(())
}
