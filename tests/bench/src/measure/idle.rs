//! Writes of an idle system: only the receiver's membership Lease in KCP, and only the canary Lease in a runtime.

use std::time::Duration;

use anyhow::Result;
use tidewatch_api::{leases, names::AGENT_OBJECT};
use tidewatch_testing::progress::Step;

use super::{Figure, Settings, runtime_setup::RuntimeSetup};

/// Waits and counts, by the API servers' audit logs.
///
/// # Errors
/// When the setup cannot be started.
pub async fn idle(settings: &Settings, minutes: u32, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let setup = RuntimeSetup::start(settings).await?;
    // Lets the reconciles of the start pass: the second one comes a request deadline after the first.
    tokio::time::sleep(Duration::from_secs(45)).await;
    let kcp = setup.landscape.kcp();
    let runtime = setup.runtime.cluster();
    let marks = (kcp.audit_mark()?, runtime.audit_mark()?);
    let step = Step::begin(format!("idle for {minutes} min"));
    tokio::time::sleep(Duration::from_secs(60) * minutes).await;
    step.done();
    let ours = |writes: Vec<tidewatch_testing::control_plane::audit::Write>| {
        writes.into_iter().filter(|write| !write.is_kubernetes_own())
    };
    let member = leases::member(0);
    let renewal =
        |write: &tidewatch_testing::control_plane::audit::Write| write.resource == "leases" && write.name == member;
    let (renewals, kcp): (Vec<_>, Vec<_>) = ours(kcp.writes_since(marks.0)?).partition(renewal);
    let canary = |write: &tidewatch_testing::control_plane::audit::Write| {
        write.resource == "leases" && write.name == AGENT_OBJECT
    };
    let (canaries, others): (Vec<_>, Vec<_>) = ours(runtime.writes_since(marks.1)?).partition(canary);
    emit(&Figure::new("idle_writes_kcp", f64::from(u32::try_from(kcp.len())?), "writes").at_most(0.0));
    emit(&Figure::new("idle_writes_runtime", f64::from(u32::try_from(others.len())?), "writes").at_most(0.0));
    emit(&Figure::new("idle_lease_writes", f64::from(u32::try_from(renewals.len())?), "writes"));
    emit(&Figure::new("idle_canary_writes", f64::from(u32::try_from(canaries.len())?), "writes"));
    Ok(())
}
