//! What is written while nobody does anything: nothing but the active receiver's Lease in KCP, and nothing but the canary Lease in a
//! runtime.

use std::time::Duration;

use anyhow::Result;
use tidewatch_shared::names::AGENT_OBJECT;

use super::{Figure, Settings, setting::Setting};
use crate::progress::Step;

/// The Lease by which one receiver is active, under its default name.
const LEASE: &str = "tidewatch-receiver";

/// Waits and counts, by the API servers' audit logs.
///
/// # Errors
/// When the setting does not stand.
pub async fn idle(settings: &Settings, minutes: u32, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    let setting = Setting::start(settings).await?;
    // The passes that the start itself asked for: the second one comes a request deadline after the first.
    tokio::time::sleep(Duration::from_secs(45)).await;
    let (kcp, runtime) = (setting.landscape.kcp(), setting.runtime.cluster());
    let marks = (kcp.audit_mark()?, runtime.audit_mark()?);
    let step = Step::begin(format!("idle for {minutes} min"));
    tokio::time::sleep(Duration::from_secs(60) * minutes).await;
    step.done();
    let ours =
        |writes: Vec<crate::control_plane::audit::Write>| writes.into_iter().filter(|write| !write.is_kubernetes_own());
    let renewal = |write: &crate::control_plane::audit::Write| write.resource == "leases" && write.name == LEASE;
    let (renewals, kcp): (Vec<_>, Vec<_>) = ours(kcp.writes_since(marks.0)?).partition(renewal);
    let canary = |write: &crate::control_plane::audit::Write| write.resource == "leases" && write.name == AGENT_OBJECT;
    let (canaries, others): (Vec<_>, Vec<_>) = ours(runtime.writes_since(marks.1)?).partition(canary);
    tell(&Figure::new("idle_writes_kcp", f64::from(u32::try_from(kcp.len())?), "writes").at_most(0.0));
    tell(&Figure::new("idle_writes_runtime", f64::from(u32::try_from(others.len())?), "writes").at_most(0.0));
    tell(&Figure::new("idle_lease_writes", f64::from(u32::try_from(renewals.len())?), "writes"));
    tell(&Figure::new("idle_canary_writes", f64::from(u32::try_from(canaries.len())?), "writes"));
    Ok(())
}
