//! What the admin listener shows of this agent, and the text that `status` makes of it.

mod path;

use serde::{Deserialize, Serialize};
use tidewatch_shared::{
    exchange::Settled,
    heartbeat::WatchState,
    identity::{Epoch, Instance},
    table::{age, aligned, plain},
};

use crate::{core::Account, identity::Told};

pub use path::{Path, Proof};

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
    /// Every event of this epoch up to here was accepted.
    pub accepted: u64,
    /// Which receiver answered last.
    pub instance: Option<Instance>,
    /// Whether the event path is proven, by what this agent knows; the receiver's own word is the condition `EventPath`.
    pub path: Path,
    /// What the receiver said to the last heartbeat that it answered; absent before.
    pub heartbeat: Option<Answered>,
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
    /// Times that the receiver turned out to lack something that had been sent, since this agent began: then all that is not settled is
    /// sent again.
    pub gaps: u64,
    /// Watches that it asked to be told anew, since this agent began, each as often as it asked.
    pub resends: u64,
    /// Each watch of the plan.
    pub watches: Vec<WatchState>,
}

/// See [`Runtime::heartbeat`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answered {
    /// How long ago, in seconds.
    pub seconds_ago: u64,
    /// The heartbeat interval that it wants, in seconds.
    pub interval_seconds: u32,
    /// The plan that it wrote last.
    pub plan_revision: Option<String>,
    /// Per watch: the sequence up to which all its work has ended; absent when it was said of an earlier epoch.
    pub settled: Option<Settled>,
    /// Watches whose digests it does not agree to, or of which it does not know what was sent: they are told anew. Absent as above.
    pub resend: Option<Vec<String>>,
}

impl Runtime {
    /// `canary` is the age of the canary in seconds.
    pub(crate) fn new(account: Account, canary: Option<u64>) -> Self {
        let path = Path::of(&account, canary);
        let Account { runtime, epoch, sequence, accepted, instance, heartbeat, plan_revision, plan_error, .. } =
            account;
        let Account { waiting, parked, unsettled, gaps, resends, watches, .. } = account;
        Self {
            id: runtime.as_str().to_owned(),
            epoch,
            sequence,
            accepted,
            instance,
            path,
            heartbeat,
            plan_revision,
            plan_error,
            waiting,
            parked,
            unsettled,
            gaps,
            resends,
            watches,
        }
    }

    fn lines(&self) -> [String; 6] {
        let Self { id, epoch, sequence, accepted, waiting, parked, unsettled, gaps, resends, .. } = self;
        let asked = self.heartbeat.as_ref().and_then(|answer| answer.resend.as_deref()).unwrap_or_default();
        let asked = if asked.is_empty() { String::new() } else { format!(", now of {}", asked.join(", ")) };
        [
            format!("runtime      {id}, epoch {epoch}, sequence {sequence}"),
            format!("path         {} (by what this agent knows)", self.path.line()),
            match &self.heartbeat {
                Some(Answered { seconds_ago, interval_seconds, .. }) => {
                    format!("heartbeat    answered {} ago, every {interval_seconds}s", age(Some(*seconds_ago)))
                }
                None => "heartbeat    none was answered yet".to_owned(),
            },
            format!(
                "events       {waiting} waiting, {parked} parked, {unsettled} unsettled, accepted up to {accepted}"
            ),
            format!("gaps         {gaps}; asked {resends} times to tell a watch anew{asked}"),
            self.plan(),
        ]
    }

    fn plan(&self) -> String {
        let followed = self.plan_revision.as_deref().unwrap_or("none yet");
        let newest = self.heartbeat.as_ref().and_then(|answer| answer.plan_revision.as_ref());
        let newest = newest.filter(|newest| Some(*newest) != self.plan_revision.as_ref());
        let newest = newest.map(|newest| format!(", the receiver's is {newest}")).unwrap_or_default();
        let refused = self.plan_error.as_ref().map(|why| format!(", the newest is refused: {why}")).unwrap_or_default();
        format!("plan         {followed}{newest}{refused}")
    }

    fn row(&self, watch: &WatchState) -> [String; 7] {
        let WatchState { name, objects, listed_seconds_ago, alive_seconds_ago, coarse, error, .. } = watch;
        let settled = self.heartbeat.as_ref().and_then(|answer| answer.settled.as_ref()?.get(name));
        [
            name.clone(),
            objects.to_string(),
            settled.map_or_else(|| "-".to_owned(), u64::to_string),
            age(*listed_seconds_ago),
            age(*alive_seconds_ago),
            if *coarse { "yes" } else { "no" }.to_owned(),
            error.clone().unwrap_or_default(),
        ]
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
        lines.extend(runtime.lines());
        let rows = runtime.watches.iter().map(|watch| runtime.row(watch)).collect();
        page(&lines) + "\n" + &aligned(["WATCH", "OBJECTS", "SETTLED", "LISTED", "ALIVE", "COARSE", "ERROR"], rows)
    }
}

fn page(lines: &[String]) -> String {
    lines.iter().map(|line| plain(line) + "\n").collect()
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
            accepted: 6,
            instance: Some(Instance::new(1)),
            path: Path {
                state: Proof::False,
                reason: "FailingWatch".into(),
                message: Some("pods: 403\nforbidden".into()),
            },
            heartbeat: Some(Answered {
                seconds_ago: 61,
                interval_seconds: 30,
                plan_revision: Some("def".into()),
                settled: Some([("kyma".to_owned(), 5)].into()),
                resend: Some(vec!["kyma".into(), "pods".into()]),
            }),
            plan_revision: Some("abc".into()),
            plan_error: Some("no\u{1b}[2J".into()),
            waiting: 1,
            parked: 2,
            unsettled: 3,
            gaps: 4,
            resends: 5,
            watches: vec![watch("kyma", None), watch("pods", Some("403\nforbidden"))],
        });
        let page = status.page();
        for line in [
            "agent        0.1.0, ready",
            "receiver     0000000000000001, last took a request 2s ago, clock offset -600s",
            "certificate  until -, from enrolment, not kept in the agent's Secret, asking fails since 2026-01-01T00:00:00Z: \
             503\u{fffd}later",
            "path         False, FailingWatch: pods: 403\u{fffd}forbidden (by what this agent knows)",
            "heartbeat    answered 1m1s ago, every 30s",
            "events       1 waiting, 2 parked, 3 unsettled, accepted up to 6",
            "gaps         4; asked 5 times to tell a watch anew, now of kyma, pods",
            "plan         abc, the receiver's is def, the newest is refused: no\u{fffd}[2J",
            "kyma   3        5        1m1s    -      no",
            "pods   3        -        -       -      no      403\u{fffd}forbidden",
        ] {
            assert!(page.lines().any(|there| there == line), "{line:?} is not in\n{page}");
        }
    }
}
