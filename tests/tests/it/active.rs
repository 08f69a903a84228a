//! Several receivers for one namespace: one is active, and the next follows when it is gone, frozen, or asked to go.

use ::http::StatusCode;
use anyhow::{Context as _, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, api::DeleteParams};
use serde_json::Value;
use tidewatch_tests::{
    http,
    landscape::{DEADLINE, Options, until},
    ports,
    product::ProductProcess,
};

use crate::support::{Ground, One, Tested, is_renewal, module, quick};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");
const LEASE: &str = "tidewatch-receiver";

/// A Lease so short that its expiry can be waited for, and so long that a busy machine renews it in time.
fn short() -> Options {
    Options { lease_seconds: 8, ..quick() }
}

async fn leases(one: &One) -> Result<Api<Lease>> {
    Ok(Api::namespaced(one.landscape.kcp().client().await?, one.landscape.namespace()))
}

async fn holder(one: &One) -> Result<Option<String>> {
    let lease = leases(one).await?.get(LEASE).await?;
    Ok(lease.spec.and_then(|spec| spec.holder_identity))
}

/// Waits until a receiver says that it waits for its turn, and proves that it takes no event.
async fn waits(receiver: &ProductProcess) -> Result<()> {
    until("a receiver that waits", async || {
        let (status, text) = receiver.get("/readyz").await?;
        Ok((status == StatusCode::SERVICE_UNAVAILABLE && text == "not ready: lease\n").then_some(()))
    })
    .await?;
    let (_, page) = receiver.get("/metrics").await?;
    anyhow::ensure!(page.lines().any(|line| line == "tidewatch_active 0"), "{page}");
    let (status, report) = http::get(receiver.admin().context("its admin listener")?, "/fleet", DEADLINE).await?;
    let report: Value = serde_json::from_str(&report)?;
    anyhow::ensure!(status == StatusCode::OK && report["receiver"]["active"] == false, "{report}");
    Ok(())
}

#[tokio::test]
async fn the_next_receiver_follows_one_that_is_killed_and_one_that_is_asked_to_go() -> Tested {
    let one = One::to_harm(Ground::Shared, "active", &[KEDA], short()).await?;
    let port = one.landscape.event_port();
    let second = one.landscape.start_standby("second", port).await?;
    waits(&second).await?;
    assert!(holder(&one).await?.is_some_and(|holder| holder.starts_with("receiver_")));

    // Killed: the change that comes up meanwhile arrives at the second one.
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    one.runtime.select(&["keda"]).await?;
    second.ready(DEADLINE).await?;
    assert!(holder(&one).await?.is_some_and(|holder| holder.starts_with("second_")));
    one.skr_status("the change", |status| module(status, "keda").is_some()).await?;

    // Asked to go: it gives the Lease back, so that nobody waits for its end.
    let third = one.landscape.start_standby("third", port).await?;
    waits(&third).await?;
    let ended = second.sigterm(DEADLINE).await?;
    assert!(ended.success(), "{ended}");
    let after = holder(&one).await?;
    assert!(after.as_ref().is_none_or(|holder| holder.starts_with("third_")), "{after:?}");
    third.ready(DEADLINE).await?;
    one.runtime.select(&[]).await?;
    one.skr_status("the change", |status| status.modules().is_empty()).await?;
    let transitions = leases(&one).await?.get(LEASE).await?.spec.and_then(|spec| spec.lease_transitions);
    assert_eq!(transitions, Some(3));
    Ok(())
}

#[tokio::test]
async fn a_receiver_that_was_frozen_writes_nothing_more() -> Tested {
    // Without events, which end at the frozen one, the standby is to look soon.
    let receiver = ["--restart-spread-seconds=0", "--fallback-poll-seconds=5"].map(str::to_owned).into();
    let options = Options { proxied: true, receiver, ..short() };
    let one = One::to_harm(Ground::Shared, "frozen", &[KEDA], options).await?;
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    one.quiet().await?;
    let standby = one.landscape.start_standby("standby", ports::free()?).await?;
    waits(&standby).await?;

    // It is frozen in the middle of a pass that would write: its requests to the runtime are not answered.
    let way = &one.runtime.ways().context("the proxies")?.receiver;
    way.black_hole();
    one.runtime.select(&[]).await?;
    let admin = one.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    until("the pass to begin", async || {
        let (_, report) = http::get(admin, "/fleet", DEADLINE).await?;
        let report: Value = serde_json::from_str(&report)?;
        Ok((report["runtimes"][0]["inWork"] == true).then_some(()))
    })
    .await?;
    one.landscape.with_receiver(async |receiver| receiver.sigstop()).await??;
    way.resume();
    standby.ready(DEADLINE).await?;
    until("the standby's work", async || Ok(one.manifests().await?.is_empty().then_some(()))).await?;
    // The last that it has to write: that no heartbeat reaches it.
    one.kcp_status("the event path", |status| {
        status.condition("EventPath").is_some_and(|condition| condition.message.contains("heartbeat"))
    })
    .await?;
    one.quiet().await?;

    let marks = (one.landscape.kcp().audit_mark()?, one.runtime.cluster().audit_mark()?);
    let ended = one
        .landscape
        .with_receiver(async |receiver| {
            receiver.sigcont()?;
            receiver.process().ended(DEADLINE).await
        })
        .await??;
    assert!(!ended.success(), "{ended}");
    assert!(holder(&one).await?.is_some_and(|holder| holder.starts_with("standby_")));
    let account = format!("system:serviceaccount:{}:", one.landscape.namespace());
    let in_kcp = one.landscape.kcp().writes_since(marks.0)?;
    let in_kcp: Vec<_> = in_kcp.iter().filter(|write| write.user.starts_with(&account) && !is_renewal(write)).collect();
    assert!(in_kcp.is_empty(), "{in_kcp:?}");
    let in_runtime = one.runtime.cluster().writes_since(marks.1)?;
    let in_runtime: Vec<_> =
        in_runtime.iter().filter(|write| write.user.starts_with("system:serviceaccount:kube-system:")).collect();
    assert!(in_runtime.is_empty(), "{in_runtime:?}");
    Ok(())
}

#[tokio::test]
async fn a_lease_that_is_taken_away_ends_the_receiver_at_once() -> Tested {
    let one = One::with("taken-away", &[KEDA], short()).await?;
    leases(&one).await?.delete(LEASE, &DeleteParams::default()).await?;
    let ended = one.landscape.with_receiver(async |receiver| receiver.process().ended(DEADLINE).await).await??;
    assert_eq!(ended.code(), Some(1), "{ended}");
    one.landscape.start_receiver().await?;
    assert!(holder(&one).await?.is_some_and(|holder| holder.starts_with("receiver_")));
    Ok(())
}
