//! A user of a simulated runtime who changes its modules, and the time that each change takes.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout_at};

use super::{Agent, FleetMember, RequestError, RequestOutcome};

/// Deadline of a change. A change that is not in the status of the runtime's Kyma by then counts as lost.
const DEADLINE: Duration = Duration::from_secs(120);
/// Pause after a request without a response, and after a refusal that names no time.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Heartbeats of an agent without other requests keep its path proven.
const HEARTBEAT: Duration = Duration::from_secs(20);

/// Changes of one or many users.
#[derive(Debug, Default)]
pub struct ChangeTimes {
    /// From the change until the receiver accepted its event.
    pub accepted: Vec<Duration>,
    /// From the change until the status of the runtime's Kyma shows it.
    pub shown: Vec<Duration>,
    /// Requests that were refused or not answered, and repeated.
    pub repeated: u64,
}

impl ChangeTimes {
    /// Adds those of another user.
    pub fn extend(&mut self, other: Self) {
        self.accepted.extend(other.accepted);
        self.shown.extend(other.shown);
        self.repeated += other.repeated;
    }
}

/// Number of the changes of a user, and the time between two of them: one change at an interval, or once the one before is
/// shown.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Changes.
    pub changes: u32,
    /// Interval.
    pub pause: Duration,
}

/// Selects and deselects a module.
///
/// # Errors
/// When a change is not shown in time.
pub async fn toggle_module(member: &FleetMember, agent: &mut Agent, module: &str, pace: Pace) -> Result<ChangeTimes> {
    let change = || {
        let has_module = || member.status_modules().is_some_and(|shown| shown.iter().any(|shown| shown == module));
        let wanted = !has_module();
        member.select(if wanted { std::slice::from_ref(&module) } else { &[] });
        move || {
            let shown = format!("shows the modules {:?}", member.status_modules().unwrap_or_default());
            (has_module() != wanted).then_some(shown)
        }
    };
    change_at_intervals(member, agent, pace, change).await
}

/// Moves the Kyma between the channels `regular` and `fast`: a change that is shown in its status, and that causes no other
/// writes as long as no module is selected.
///
/// # Errors
/// When a change is not shown in time.
pub async fn switch_channel(member: &FleetMember, agent: &mut Agent, pace: Pace) -> Result<ChangeTimes> {
    let change = || {
        let wanted = other_channel(member);
        member.set_channel(wanted);
        move || missing_channel(member, wanted)
    };
    change_at_intervals(member, agent, pace, change).await
}

/// Moves the Kyma between the channels `regular` and `fast` while its agent runs, and waits until the change is shown.
///
/// # Errors
/// When the change is not shown in time.
pub async fn switch_channel_once(member: &FleetMember) -> Result<()> {
    let wanted = other_channel(member);
    member.set_channel(wanted);
    shown(member, &|| missing_channel(member, wanted), Instant::now() + DEADLINE).await
}

fn other_channel(member: &FleetMember) -> &'static str {
    if member.active_channel().as_deref() == Some("fast") { "regular" } else { "fast" }
}

fn missing_channel(member: &FleetMember, wanted: &str) -> Option<String> {
    let active = member.active_channel();
    (active.as_deref() != Some(wanted)).then(|| format!("shows the channel {active:?} instead of {wanted}"))
}

/// Makes changes. `change` makes one, and returns a check that describes how the status of the runtime's Kyma differs from
/// it.
async fn change_at_intervals<C: Fn() -> Option<String>>(
    member: &FleetMember,
    agent: &mut Agent,
    pace: Pace,
    change: impl Fn() -> C,
) -> Result<ChangeTimes> {
    let mut times = ChangeTimes::default();
    let mut ticks = interval(pace.pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut beat = Instant::now();
    for _ in 0..pace.changes {
        ticks.tick().await;
        if Instant::now() >= beat {
            times.repeated += u64::from(!matches!(agent.send_heartbeat().await, Ok(RequestOutcome::Accepted(_))));
            beat = Instant::now() + HEARTBEAT;
        }
        let begun = Instant::now();
        let difference = change();
        accept(agent, begun + DEADLINE, &mut times).await.with_context(|| member.name().to_owned())?;
        times.accepted.push(begun.elapsed());
        shown(member, &difference, begun + DEADLINE).await?;
        times.shown.push(begun.elapsed());
    }
    Ok(times)
}

/// Sends pending events until they are accepted.
async fn accept(agent: &mut Agent, deadline: Instant, times: &mut ChangeTimes) -> Result<()> {
    loop {
        let wait = match agent.send().await {
            Ok(None) => return Ok(()),
            Ok(Some(RequestOutcome::Accepted(_))) => continue,
            Ok(Some(RequestOutcome::Refused(_, wait))) => wait.unwrap_or(RETRY_PAUSE),
            Err(RequestError::Build) => return Err(RequestError::Build.into()),
            Err(_) => RETRY_PAUSE,
        };
        times.repeated += 1;
        ensure!(Instant::now() + wait < deadline, "an event was not accepted within {DEADLINE:?}");
        sleep(wait).await;
    }
}

/// Waits until the status of the runtime's Kyma does not differ any more.
async fn shown(member: &FleetMember, difference: &impl Fn() -> Option<String>, deadline: Instant) -> Result<()> {
    let cluster = member.cluster();
    loop {
        let mut changed = std::pin::pin!(cluster.changed().notified());
        // Registered before the status is read, so that no change is missed in between.
        changed.as_mut().enable();
        let Some(difference) = difference() else { return Ok(()) };
        let waited = timeout_at(deadline, changed).await;
        ensure!(waited.is_ok(), "{} {difference} after {DEADLINE:?}", member.name());
    }
}
