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

/// Selects and deselects a module so many times, one change at an interval or once the one before is shown.
///
/// # Errors
/// When a change is not shown in time.
pub async fn toggle_module(
    member: &FleetMember,
    agent: &mut Agent,
    module: &str,
    changes: u32,
    pause: Duration,
) -> Result<ChangeTimes> {
    let mut times = ChangeTimes::default();
    let mut ticks = interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut beat = Instant::now();
    for _ in 0..changes {
        ticks.tick().await;
        if Instant::now() >= beat {
            times.repeated += u64::from(!matches!(agent.send_heartbeat().await, Ok(RequestOutcome::Accepted(_))));
            beat = Instant::now() + HEARTBEAT;
        }
        let has_module = member.status_modules().is_some_and(|shown| shown.iter().any(|shown| shown == module));
        let begun = Instant::now();
        member.select(if has_module { &[] } else { std::slice::from_ref(&module) });
        accept(agent, begun + DEADLINE, &mut times).await.with_context(|| member.name().to_owned())?;
        times.accepted.push(begun.elapsed());
        shown(member, module, !has_module, begun + DEADLINE).await?;
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

/// Waits until the status of the runtime's Kyma has or lacks the module.
async fn shown(member: &FleetMember, module: &str, is_wanted: bool, deadline: Instant) -> Result<()> {
    let cluster = member.cluster();
    loop {
        let mut changed = std::pin::pin!(cluster.changed().notified());
        // Registered before the status is read, so that no change is missed in between.
        changed.as_mut().enable();
        let status = member.status_modules().unwrap_or_default();
        if status.iter().any(|shown| shown == module) == is_wanted {
            return Ok(());
        }
        let waited = timeout_at(deadline, changed).await;
        ensure!(
            waited.is_ok(),
            "{} was to show {module}: {is_wanted}, and shows {status:?} after {DEADLINE:?}",
            member.name()
        );
    }
}
