//! `rotate-ca`: begins a rotation of the built-in CA, and tells how far it is until it has ended.

use std::{
    io::{self, Write as _},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use jiff::Timestamp;
use tidewatch_shared::{certificate::KeyId, table};
use tokio::{
    runtime,
    time::{Instant, sleep},
};

use super::ask::{Ask, Refused, Whom};
use crate::{
    ingress::admin::{ROTATE_PATH, ROTATION_PATH},
    pki::{Order, Ordered, PhaseName, Progress, SecretState},
};

/// How often the receiver is asked how far it is.
const POLL: Duration = Duration::from_secs(1);
/// A receiver that cannot be asked for so long is given up: the rotation goes on without anybody who looks.
const PATIENCE: Duration = Duration::from_secs(5 * 60);
/// Stragglers that are named in one line.
const NAMED: usize = 5;

/// What is asked for, and how it is told.
#[derive(Clone, Debug, Args)]
pub struct RotateCa {
    /// Goes on without the runtimes that have not followed after so many seconds in one phase; they enrol again when they are back.
    /// Without it a phase waits for every runtime that is not away. May be given for a rotation that is under way.
    #[arg(long)]
    pub force_after: Option<u32>,

    /// Begins the rotation and does not wait for its end.
    #[arg(long)]
    pub no_wait: bool,

    /// Prints one JSON object a line, as the receiver says it.
    #[arg(long)]
    pub json: bool,

    /// Which receiver is asked, and how.
    #[command(flatten)]
    pub whom: Whom,
}

impl RotateCa {
    /// Runs it. The process ends with 0 when the rotation has ended, or has begun with `--no-wait`, and else with 1.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        match self.rotate() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("tidewatch-receiver rotate-ca: {error:#}");
                ExitCode::FAILURE
            }
        }
    }

    fn rotate(&self) -> Result<()> {
        let ask = self.whom.ask()?;
        let runtime = runtime::Builder::new_current_thread().enable_all().build().context("build the runtime")?;
        let url = &self.whom.admin_url;
        runtime.block_on(async {
            let order = Order { force_after_seconds: self.force_after };
            let answer = ask.post(ROTATE_PATH, &order).await.with_context(|| format!("ask {url}"))?;
            let Ordered { target } = serde_json::from_slice(&answer).context("read the answer")?;
            if self.no_wait {
                return self.print(&format!("The rotation to the root {target} is under way"), &answer);
            }
            self.follow(&ask, &target).await.with_context(|| format!("ask {url}"))
        })
    }

    async fn follow(&self, ask: &Ask, target: &KeyId) -> Result<()> {
        let (mut told, mut heard, mut is_known) = (String::new(), Instant::now(), false);
        loop {
            match ask.get(ROTATION_PATH).await {
                Ok(answer) => {
                    heard = Instant::now();
                    let progress: Progress = serde_json::from_slice(&answer).context("read the answer")?;
                    match (progress.target == *target, is_known) {
                        (true, _) => is_known = true,
                        // The receiver looks once a second.
                        (false, false) => {
                            sleep(POLL).await;
                            continue;
                        }
                        (false, true) => bail!("the root {target} was replaced by another one, {}", progress.target),
                    }
                    let line = line(&progress, Timestamp::now().as_second());
                    if line != told {
                        self.print(&line, &answer)?;
                        told = line;
                    }
                    if progress.phase == PhaseName::Steady {
                        return Ok(());
                    }
                }
                // It may be restarting, or another one may be about to take over.
                Err(error) if heard.elapsed() < PATIENCE && is_passing(&error) => {}
                Err(error) => return Err(error),
            }
            sleep(POLL).await;
        }
    }

    fn print(&self, line: &str, answer: &[u8]) -> Result<()> {
        let mut out = io::stdout().lock();
        let written = if self.json {
            out.write_all(answer.trim_ascii_end()).and_then(|()| out.write_all(b"\n"))
        } else {
            writeln!(out, "{line}")
        };
        written.and_then(|()| out.flush()).context("write to stdout")
    }
}

/// Whether asking again may help.
fn is_passing(error: &anyhow::Error) -> bool {
    // Who waits for its turn knows of no rotation.
    error.downcast_ref::<Refused>().is_none_or(|refused| refused.status.is_server_error() || refused.status == 404)
}

/// What people read. Nothing in it moves by the clock alone but the minutes.
fn line(progress: &Progress, now: i64) -> String {
    let Progress { phase, since, target, runtimes, waiting_for, stragglers, secret, .. } = progress;
    let mut line = match phase {
        PhaseName::Steady => format!("The root is {target}; no rotation is under way"),
        PhaseName::Spread => format!("{phase}: the root {target} goes to everybody"),
        PhaseName::Reissue => format!("{phase}: certificates are issued by the root {target}"),
        PhaseName::Retire => format!("{phase}: the old root goes"),
    };
    if *phase != PhaseName::Steady {
        let minutes = now.saturating_sub(*since).max(0) / 60;
        line.push_str(&format!("; {waiting_for} of {runtimes} runtimes are awaited, for {minutes} min"));
    }
    match secret {
        SecretState::Good => {}
        SecretState::Lost => line.push_str("; THE SECRET OF THE CA IS GONE"),
        SecretState::Refused => line.push_str("; THE SECRET OF THE CA CANNOT BE USED"),
    }
    for straggler in stragglers.iter().take(NAMED) {
        let (kyma, path) = (table::sanitize(&straggler.kyma), table::sanitize(&straggler.path));
        line.push_str(&format!("\n  {kyma} {} ({path})", straggler.behind.as_str()));
    }
    if *waiting_for > NAMED {
        line.push_str(&format!("\n  and {} more", waiting_for - NAMED.min(stragglers.len())));
    }
    line
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn stragglers_are_named_and_what_is_well_is_one_line() {
        let straggler = |name: usize| json!({"kyma": format!("kcp-system/k-{name}\u{1b}"), "runtimeId": "r", "path": "Proven", "behind": "bundle"});
        let progress = |phase: &str, count: usize| {
            let stragglers: Vec<_> = (0..count).map(straggler).collect();
            let value = json!({"phase": phase, "since": 1_000, "target": "ab", "targetNotAfter": 0, "secret": "good",
                "runtimes": 9, "waitingFor": count, "stragglers": stragglers});
            serde_json::from_value::<Progress>(value).unwrap()
        };
        assert_eq!(line(&progress("steady", 0), 9_000), "The root is ab; no rotation is under way");
        let told = line(&progress("spread", 7), 1_130);
        let lines: Vec<_> = told.lines().collect();
        assert_eq!(lines[0], "spread: the root ab goes to everybody; 7 of 9 runtimes are awaited, for 2 min");
        assert_eq!(lines[1], "  kcp-system/k-0\u{fffd} has not confirmed the newest roots (Proven)");
        assert_eq!((lines.len(), lines[6]), (7, "  and 2 more"));
    }
}
