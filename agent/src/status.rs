//! What the admin listener shows of this agent, and the text that `status` makes of it.

use serde::{Deserialize, Serialize};
use tidewatch_shared::{
    heartbeat::WatchState,
    identity::{Epoch, Instance},
    table::{age, aligned, plain},
};

use crate::{core::Account, identity::Told};

/// The path that shows it.
pub const STATUS_PATH: &str = "/status";

/// One agent, at one instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// The agent's version.
    pub version: String,
    /// What must still happen before it is ready; empty when it is.
    pub pending: Vec<String>,
    /// Since the receiver last took a request, in seconds, by the wall clock.
    pub answered_seconds_ago: Option<u64>,
    /// Age of the canary in seconds; absent before it came back.
    pub canary_age_seconds: Option<u64>,
    /// End of the certificate, in RFC 3339; absent before there is one.
    pub certificate_not_after: Option<String>,
    /// Where the certificate is from, and what goes wrong with it.
    #[serde(default)]
    pub identity: Told,
    /// Added to the clock when signing, in seconds.
    pub clock_offset_seconds: i64,
    /// Watches and events; absent until an identity says which runtime this is.
    pub runtime: Option<Runtime>,
}

/// See [`Status::runtime`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Runtime {
    /// Which it is.
    pub id: String,
    /// The life of the sequences.
    pub epoch: Epoch,
    /// The last sequence given to an event.
    pub sequence: u64,
    /// Which receiver answered last.
    pub instance: Option<Instance>,
    /// The plan that is followed.
    pub plan_revision: Option<String>,
    /// Why the newest plan, or the settings beside it, was refused.
    pub plan_error: Option<String>,
    /// Events that wait to be sent.
    pub waiting: usize,
    /// Events that cannot be sent.
    pub parked: usize,
    /// Events that were sent and are not settled.
    pub unsettled: usize,
    /// Each watch of the plan.
    pub watches: Vec<WatchState>,
}

impl From<Account> for Runtime {
    fn from(account: Account) -> Self {
        let Account { runtime, epoch, sequence, instance, plan_revision, plan_error, .. } = account;
        let Account { waiting, parked, unsettled, watches, .. } = account;
        let id = runtime.as_str().to_owned();
        Self { id, epoch, sequence, instance, plan_revision, plan_error, waiting, parked, unsettled, watches }
    }
}

impl Status {
    /// For people: a few lines, and a table of the watches.
    pub(crate) fn page(&self) -> String {
        let state = match &*self.pending.join(", ") {
            "" => "ready".to_owned(),
            pending => format!("not ready: {pending}"),
        };
        let certificate = self.certificate_not_after.as_deref().unwrap_or("-");
        let mut lines = vec![format!("agent        {}, {state}", self.version)];
        let instance = self.runtime.as_ref().and_then(|runtime| runtime.instance);
        let receiver = instance.map_or_else(|| "no answer yet".to_owned(), |instance| instance.to_string());
        let (answered, offset) = (age(self.answered_seconds_ago), self.clock_offset_seconds);
        lines.push(format!("receiver     {receiver}, last took a request {answered} ago, clock offset {offset}s"));
        lines.push(format!("canary       {}", age(self.canary_age_seconds)));
        lines.push(format!("certificate  until {certificate}{}", self.identity.line()));
        let Some(runtime) = &self.runtime else { return page(&lines) };
        let Runtime { id, epoch, sequence, plan_revision, plan_error, waiting, parked, unsettled, .. } = runtime;
        lines.push(format!("runtime      {id}, epoch {epoch}, sequence {sequence}"));
        lines.push(format!("events       {waiting} waiting, {parked} parked, {unsettled} unsettled"));
        let refused = plan_error.as_ref().map(|why| format!(", the newest is refused: {why}")).unwrap_or_default();
        lines.push(format!("plan         {}{refused}", plan_revision.as_deref().unwrap_or("none yet")));
        let rows = runtime.watches.iter().map(row).collect();
        page(&lines) + "\n" + &aligned(["WATCH", "OBJECTS", "LISTED", "ALIVE", "COARSE", "ERROR"], rows)
    }
}

fn page(lines: &[String]) -> String {
    lines.iter().map(|line| plain(line) + "\n").collect()
}

fn row(watch: &WatchState) -> [String; 6] {
    let WatchState { name, objects, listed_seconds_ago, alive_seconds_ago, coarse, error, .. } = watch;
    let coarse = if *coarse { "yes" } else { "no" };
    [
        name.clone(),
        objects.to_string(),
        age(*listed_seconds_ago),
        age(*alive_seconds_ago),
        coarse.to_owned(),
        error.clone().unwrap_or_default(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Provenance;

    #[test]
    fn people_see_watches_and_what_is_wrong() {
        let watch = |name: &str, error: Option<&str>| WatchState {
            name: name.into(),
            objects: 3,
            digest: None,
            listed_seconds_ago: error.is_none().then_some(61),
            alive_seconds_ago: None,
            coarse: false,
            error: error.map(str::to_owned),
        };
        let mut status = Status {
            version: "0.1.0".into(),
            pending: vec!["plan".into()],
            answered_seconds_ago: Some(2),
            canary_age_seconds: None,
            certificate_not_after: None,
            identity: Told::default(),
            clock_offset_seconds: -600,
            runtime: None,
        };
        assert!(status.page().starts_with("agent        0.1.0, not ready: plan\n"), "{}", status.page());
        status.pending.clear();
        status.identity = Told {
            from: Some(Provenance::Enrolment),
            unkept: true,
            failing_since: Some("2026-01-01T00:00:00Z".into()),
            error: Some("503\nlater".into()),
        };
        status.runtime = Some(Runtime {
            id: "r".into(),
            epoch: Epoch::new(255),
            sequence: 7,
            instance: Some(Instance::new(1)),
            plan_revision: Some("abc".into()),
            plan_error: Some("no\u{1b}[2J".into()),
            waiting: 1,
            parked: 2,
            unsettled: 3,
            watches: vec![watch("kyma", None), watch("pods", Some("403\nforbidden"))],
        });
        let page = status.page();
        for line in [
            "agent        0.1.0, ready",
            "receiver     0000000000000001, last took a request 2s ago, clock offset -600s",
            "certificate  until -, from enrolment, not kept in the agent's Secret, asking fails since 2026-01-01T00:00:00Z: \
             503\u{fffd}later",
            "events       1 waiting, 2 parked, 3 unsettled",
            "plan         abc, the newest is refused: no\u{fffd}[2J",
            "kyma   3        1m1s    -      no",
            "pods   3        -       -      no      403\u{fffd}forbidden",
        ] {
            assert!(page.lines().any(|there| there == line), "{line:?} is not in\n{page}");
        }
    }
}
