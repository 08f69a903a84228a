//! Receivers without a relay in one namespace: a standby takes over when the one with the shard is killed, frozen or shut
//! down.

use ::http::StatusCode;
use anyhow::{Context as _, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{DeleteParams, ObjectMeta, PostParams},
};
use serde_json::Value;
use tidewatch_testing::{
    http,
    landscape::{DEADLINE, Options, until},
    ports,
    product::ProductProcess,
};

use crate::support::{Isolation, SingleRuntime, TestResult, is_renewal, module, quick_options};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");
/// Its holder has the shard and the fleet role.
const LEASE: &str = "tidewatch-replica-0";

/// Options with a lease short enough to await its expiry, and long enough for a busy machine to renew it in time.
fn short_lease() -> Options {
    Options { lease_seconds: 8, ..quick_options() }
}

async fn leases(setup: &SingleRuntime) -> Result<Api<Lease>> {
    Ok(Api::namespaced(setup.landscape.kcp().client().await?, setup.landscape.namespace()))
}

async fn holder(setup: &SingleRuntime) -> Result<Option<String>> {
    let lease = leases(setup).await?.get(LEASE).await?;
    Ok(lease.spec.and_then(|spec| spec.holder_identity))
}

/// Waits until a receiver reports that it stands by, and checks that it accepts no event.
async fn stands_by(receiver: &ProductProcess) -> Result<()> {
    until("a receiver that stands by", async || {
        let (status, text) = receiver.get("/readyz").await?;
        let (_, page) = receiver.get("/metrics").await?;
        let shown = ["tidewatch_active 0", "tidewatch_shards 1", r#"tidewatch_shards_refused{reason="standby"} 1"#];
        let is_shown = shown.iter().all(|sample| page.lines().any(|line| line == *sample));
        let is_ready = status != StatusCode::SERVICE_UNAVAILABLE || text != "not ready: shards\n";
        Ok((is_shown && !is_ready).then_some(()))
    })
    .await?;
    let (status, report) = http::get(receiver.admin().context("its admin listener")?, "/fleet", DEADLINE).await?;
    let report: Value = serde_json::from_str(&report)?;
    anyhow::ensure!(status == StatusCode::OK && report["receiver"]["active"] == false, "{report}");
    Ok(())
}

#[tokio::test]
async fn a_standby_takes_over_after_a_crash_and_after_a_shutdown() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::Shared, "active", &[KEDA], short_lease()).await?;
    let port = setup.landscape.event_port();
    let second = setup.landscape.start_standby("second", port).await?;
    stands_by(&second).await?;
    assert!(holder(&setup).await?.is_some_and(|holder| holder.starts_with("receiver_")));

    // Kill the lease holder: the change made meanwhile arrives at the second receiver.
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    setup.runtime.select(&["keda"]).await?;
    second.ready(DEADLINE).await?;
    assert!(holder(&setup).await?.is_some_and(|holder| holder.starts_with("second_")));
    setup.skr_status("the change", |status| module(status, "keda").is_some()).await?;

    // Shut down the lease holder: it releases the Lease, so the standby does not wait for its expiry.
    let third = setup.landscape.start_standby("third", port).await?;
    stands_by(&third).await?;
    let ended = second.sigterm(DEADLINE).await?;
    assert!(ended.success(), "{ended}");
    let after = holder(&setup).await?;
    assert!(after.as_ref().is_none_or(|holder| holder.starts_with("third_")), "{after:?}");
    third.ready(DEADLINE).await?;
    setup.runtime.select(&[]).await?;
    setup.skr_status("the change", |status| status.modules().is_empty()).await?;
    let transitions = leases(&setup).await?.get(LEASE).await?.spec.and_then(|spec| spec.lease_transitions);
    assert_eq!(transitions, Some(3));
    Ok(())
}

#[tokio::test]
async fn a_receiver_that_was_frozen_past_its_lease_writes_nothing_more() -> TestResult {
    // Events stop at the frozen receiver, so the standby has to poll soon.
    let receiver = ["--restart-spread-seconds=0", "--fallback-poll-seconds=5"].map(str::to_owned).into();
    let options = Options { proxied: true, receiver, ..short_lease() };
    let setup = SingleRuntime::isolated(Isolation::Shared, "frozen", &[KEDA], options).await?;
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    setup.becomes_idle().await?;
    let standby = setup.landscape.start_standby("standby", ports::free()?).await?;
    stands_by(&standby).await?;

    // Freeze it in the middle of a reconcile that would write: its requests to the runtime stay unanswered.
    let proxy = &setup.runtime.proxies().context("the proxies")?.receiver;
    proxy.black_hole();
    setup.runtime.select(&[]).await?;
    let admin =
        setup.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    until("the reconcile to begin", async || {
        let (_, report) = http::get(admin, "/fleet", DEADLINE).await?;
        let report: Value = serde_json::from_str(&report)?;
        Ok((report["runtimes"][0]["inWork"] == true).then_some(()))
    })
    .await?;
    setup.landscape.with_receiver(async |receiver| receiver.sigstop()).await??;
    proxy.resume();
    standby.ready(DEADLINE).await?;
    until("the standby to delete the Manifest", async || Ok(setup.manifests().await?.is_empty().then_some(()))).await?;
    // The standby's last write to KCP: no heartbeat reaches it.
    setup
        .kcp_status("the event path", |status| {
            status.condition("EventPath").is_some_and(|condition| condition.message.contains("heartbeat"))
        })
        .await?;
    setup.becomes_idle().await?;

    let marks = (setup.landscape.kcp().audit_mark()?, setup.runtime.cluster().audit_mark()?);
    let ended = setup
        .landscape
        .with_receiver(async |receiver| {
            receiver.sigcont()?;
            receiver.process().ended(DEADLINE).await
        })
        .await??;
    assert!(!ended.success(), "{ended}");
    assert!(holder(&setup).await?.is_some_and(|holder| holder.starts_with("standby_")));
    let account = format!("system:serviceaccount:{}:", setup.landscape.namespace());
    let in_kcp = setup.landscape.kcp().writes_since(marks.0)?;
    let in_kcp: Vec<_> = in_kcp.iter().filter(|write| write.user.starts_with(&account) && !is_renewal(write)).collect();
    assert!(in_kcp.is_empty(), "{in_kcp:?}");
    let in_runtime = setup.runtime.cluster().writes_since(marks.1)?;
    let in_runtime: Vec<_> =
        in_runtime.iter().filter(|write| write.user.starts_with("system:serviceaccount:kube-system:")).collect();
    assert!(in_runtime.is_empty(), "{in_runtime:?}");
    Ok(())
}

#[tokio::test]
async fn a_receiver_exits_when_it_loses_its_lease() -> TestResult {
    let setup = SingleRuntime::with_options("taken-away", &[KEDA], short_lease()).await?;
    leases(&setup).await?.delete(LEASE, &DeleteParams::default()).await?;
    let ended = setup.landscape.with_receiver(async |receiver| receiver.process().ended(DEADLINE).await).await??;
    assert_eq!(ended.code(), Some(1), "{ended}");
    // The receiver has no right to create it.
    let lease = Lease { metadata: ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() }, spec: None };
    leases(&setup).await?.create(&PostParams::default(), &lease).await?;
    setup.landscape.start_receiver().await?;
    assert!(holder(&setup).await?.is_some_and(|holder| holder.starts_with("receiver_")));
    Ok(())
}
