//! `rotate-ca`: begins a rotation of the built-in CA and shows its progress until it has ended.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use jiff::Timestamp;
use tidewatch_contract::{
    admin::{
        ROTATE_PATH, ROTATION_PATH,
        rotation::{PhaseName, RotationProgress, RotationRequest, RotationResponse, SecretState},
    },
    certificate::KeyId,
};
use tidewatch_kit::table;
use tokio::time::{Instant, sleep};

use crate::{
    admin::{AdminClient, AdminFlags},
    block_on, exit, output,
    request::RefusedError,
};

/// Interval between two queries of the progress.
const POLL: Duration = Duration::from_secs(1);
/// Time without a response after which the command gives up; the rotation continues without it.
const PATIENCE: Duration = Duration::from_secs(5 * 60);
/// Reports about other roots, one per [`POLL`], after which the command gives up if none was about its own.
const MAX_FOREIGN: u32 = 30;
/// Stragglers that one report names.
const MAX_NAMED: usize = 5;

/// Arguments of `rotate-ca`.
#[derive(Clone, Debug, Args)]
pub struct RotateCa {
    /// Seconds per phase after which the rotation continues without stragglers, which enrol again when they are back; by
    /// default a phase waits for every runtime that is not away. Also applies to a rotation in progress
    #[arg(long, value_name = "SECONDS")]
    pub force_after: Option<u32>,

    /// Replace all roots at once because a key was stolen: certificates of the old roots are refused from then on, and
    /// every agent enrols again. Event paths are unproven meanwhile; no change is lost
    #[arg(long, conflicts_with = "force_after")]
    pub compromised: bool,

    /// Begin the rotation and do not wait for its end
    #[arg(long)]
    pub no_wait: bool,

    /// Print the receiver's JSON, one object per line
    #[arg(long)]
    pub json: bool,

    /// The receiver to query.
    #[command(flatten)]
    pub admin: AdminFlags,
}

impl RotateCa {
    pub(crate) fn run(&self) -> Result<u8> {
        block_on(async {
            let client = self.admin.connect().await?;
            let order = RotationRequest { force_after_seconds: self.force_after, compromised: self.compromised };
            let response = client.post(ROTATE_PATH, &order).await;
            let response = response.with_context(|| format!("request a rotation: {client}"))?;
            let RotationResponse { target } = serde_json::from_slice(&response).context("parse the response")?;
            if self.no_wait {
                self.print(&format!("The rotation to the root {target} is in progress"), &response)?;
            } else {
                self.follow(&client, &target).await.with_context(|| format!("query the rotation: {client}"))?;
            }
            Ok(exit::SUCCESS)
        })
    }

    async fn follow(&self, client: &AdminClient<'_>, target: &KeyId) -> Result<()> {
        let mut printed = String::new();
        let mut responded = Instant::now();
        let mut followed = Followed::new(target);
        loop {
            match client.get(ROTATION_PATH).await {
                Ok(response) => {
                    responded = Instant::now();
                    let progress: RotationProgress = serde_json::from_slice(&response).context("parse the response")?;
                    if !followed.observe(&progress)? {
                        sleep(POLL).await;
                        continue;
                    }
                    let text = text(&progress, Timestamp::now().as_second());
                    if text != printed {
                        self.print(&text, &response)?;
                        printed = text;
                    }
                    if progress.phase == PhaseName::Steady {
                        return Ok(());
                    }
                }
                // The receiver may be restarting, or another one may be taking over.
                Err(error) if responded.elapsed() < PATIENCE && is_transient(&error) => {}
                Err(error) => return Err(error),
            }
            sleep(POLL).await;
        }
    }

    fn print(&self, text: &str, response: &[u8]) -> Result<()> {
        let line = if self.json { response.trim_ascii_end() } else { text.as_bytes() };
        output::write(&[line, b"\n"].concat())
    }
}

/// The rotation that the command follows.
struct Followed<'a> {
    /// Root to which it leads.
    target: &'a KeyId,
    /// True after the first report about it.
    is_known: bool,
    /// Number of reports about other roots before that.
    foreign: u32,
}

impl<'a> Followed<'a> {
    const fn new(target: &'a KeyId) -> Self {
        Self { target, is_known: false, foreign: 0 }
    }

    /// Takes note of a report. Returns true if it is about this rotation, and false if it may be old.
    ///
    /// # Errors
    /// The root was replaced by another one, or too many reports were about other roots.
    fn observe(&mut self, progress: &RotationProgress) -> Result<bool> {
        let target = self.target;
        let other = &progress.target;
        if other == target {
            self.is_known = true;
            return Ok(true);
        }
        if self.is_known {
            bail!("the root {target} was replaced by another one, {other}");
        }
        // The receiver updates its progress once a second.
        self.foreign += 1;
        if self.foreign < MAX_FOREIGN {
            return Ok(false);
        }
        let cause = match progress.secret {
            SecretState::Good => "another rotation may have replaced it",
            SecretState::Lost => "the Secret of the CA is gone",
            SecretState::Refused => "the Secret of the CA cannot be used",
        };
        bail!("no report is about the root {target}, the last one is about {other}: {cause}")
    }
}

/// Reports whether a later query may succeed.
fn is_transient(error: &anyhow::Error) -> bool {
    // A standby responds with 404, since it has no rotation.
    let refused = error.downcast_ref::<RefusedError>();
    refused.is_none_or(|refused| refused.status.is_server_error() || refused.status == 404)
}

/// Text form. Only the minutes depend on the clock, so that an unchanged state is printed once a minute at most.
fn text(progress: &RotationProgress, now: i64) -> String {
    let RotationProgress { phase, since, target, runtimes, waiting_for, stragglers, secret, .. } = progress;
    let mut text = match phase {
        PhaseName::Steady => format!("The root is {target}; no rotation is under way"),
        PhaseName::Spread => format!("{phase}: the root {target} goes to every runtime"),
        PhaseName::Reissue => format!("{phase}: certificates are issued by the root {target}"),
        PhaseName::Retire => format!("{phase}: the old root is removed"),
    };
    if *phase != PhaseName::Steady {
        let minutes = now.saturating_sub(*since).max(0) / 60;
        text.push_str(&format!("; {waiting_for} of {runtimes} runtimes are awaited, for {minutes} min"));
    }
    if progress.incomplete {
        text.push_str("; A REPLICA DOES NOT ANSWER, the numbers are old");
    }
    match secret {
        SecretState::Good => {}
        SecretState::Lost => text.push_str("; THE SECRET OF THE CA IS GONE"),
        SecretState::Refused => text.push_str("; THE SECRET OF THE CA CANNOT BE USED"),
    }
    for straggler in stragglers.iter().take(MAX_NAMED) {
        let kyma = table::sanitize(&straggler.kyma);
        let path = table::sanitize(&straggler.path);
        text.push_str(&format!("\n  {kyma} {} ({path})", straggler.behind.as_str()));
    }
    if *waiting_for > MAX_NAMED {
        text.push_str(&format!("\n  and {} more", waiting_for - MAX_NAMED.min(stragglers.len())));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A report about the root `ab` with this number of stragglers.
    fn progress(phase: &str, count: usize) -> RotationProgress {
        let straggler = |name: usize| json!({"kyma": format!("kcp-system/k-{name}\u{1b}"), "runtimeId": "r", "path": "Proven", "behind": "bundle"});
        let stragglers: Vec<_> = (0..count).map(straggler).collect();
        let value = json!({"phase": phase, "since": 1_000, "target": "ab", "targetNotAfter": 0, "secret": "good",
            "runtimes": 9, "waitingFor": count, "stragglers": stragglers});
        serde_json::from_value(value).unwrap()
    }

    fn root(id: &str) -> KeyId {
        serde_json::from_value(json!(id)).unwrap()
    }

    #[test]
    fn reports_about_another_root_end_the_command() {
        let ours = progress("spread", 0);
        let other = RotationProgress { target: root("cd"), ..progress("steady", 0) };
        let target = root("ab");
        for (secret, cause) in [
            (SecretState::Good, "another rotation may have replaced it"),
            (SecretState::Lost, "the Secret of the CA is gone"),
            (SecretState::Refused, "the Secret of the CA cannot be used"),
        ] {
            let other = RotationProgress { secret, ..other.clone() };
            let mut followed = Followed::new(&target);
            for _ in 1..MAX_FOREIGN {
                assert!(!followed.observe(&other).unwrap(), "a report may be old");
            }
            let error = followed.observe(&other).unwrap_err().to_string();
            assert_eq!(error, format!("no report is about the root ab, the last one is about cd: {cause}"));
        }
        let mut followed = Followed::new(&target);
        assert!(!followed.observe(&other).unwrap());
        assert!(followed.observe(&ours).unwrap());
        let error = followed.observe(&other).unwrap_err().to_string();
        assert_eq!(error, "the root ab was replaced by another one, cd");
    }

    #[test]
    fn text_names_stragglers_and_is_one_line_without_any() {
        assert_eq!(text(&progress("steady", 0), 9_000), "The root is ab; no rotation is under way");
        let incomplete = RotationProgress { incomplete: true, ..progress("retire", 0) };
        assert!(text(&incomplete, 1_000).ends_with("; A REPLICA DOES NOT ANSWER, the numbers are old"));
        let page = text(&progress("spread", 7), 1_130);
        let lines: Vec<_> = page.lines().collect();
        assert_eq!(lines[0], "spread: the root ab goes to every runtime; 7 of 9 runtimes are awaited, for 2 min");
        assert_eq!(lines[1], "  kcp-system/k-0\u{fffd} has not confirmed the newest roots (Proven)");
        assert_eq!((lines.len(), lines[6]), (7, "  and 2 more"));
    }
}
