//! Text form of an agent's status.

use tidewatch_kit::table::{age, aligned, sanitize};

use super::{IdentityReport, LastHeartbeat, Runtime, Status};
use crate::heartbeat::WatchState;

impl Runtime {
    fn lines(&self) -> [String; 6] {
        let Self { id, epoch, sequence, accepted, waiting, parked, unsettled, gaps, resends, .. } = self;
        let pending = self.heartbeat.as_ref().and_then(|response| response.resend.as_deref()).unwrap_or_default();
        let pending = if pending.is_empty() { String::new() } else { format!(", now of {}", pending.join(", ")) };
        [
            format!("runtime      {id}, epoch {epoch}, sequence {sequence}"),
            format!("path         {} (evidence of this agent)", self.path),
            match &self.heartbeat {
                Some(LastHeartbeat { seconds_ago, interval_seconds, .. }) => {
                    format!("heartbeat    answered {} ago, every {interval_seconds}s", age(Some(*seconds_ago)))
                }
                None => "heartbeat    none answered yet".to_owned(),
            },
            format!(
                "events       {waiting} waiting, {parked} parked, {unsettled} unsettled, accepted up to {accepted}"
            ),
            format!("gaps         {gaps}; {resends} resends requested{pending}"),
            self.plan(),
        ]
    }

    fn plan(&self) -> String {
        let followed = self.plan_revision.as_deref().unwrap_or("none yet");
        let newest = self.heartbeat.as_ref().and_then(|response| response.plan_revision.as_ref());
        let newest = newest.filter(|newest| Some(*newest) != self.plan_revision.as_ref());
        let newest = newest.map(|newest| format!(", the receiver's is {newest}")).unwrap_or_default();
        let refused =
            self.plan_error.as_ref().map(|error| format!(", the newest is refused: {error}")).unwrap_or_default();
        format!("plan         {followed}{newest}{refused}")
    }

    fn row(&self, watch: &WatchState) -> [String; 7] {
        let WatchState { name, objects, listed_seconds_ago, alive_seconds_ago, coarse, not_served, error, .. } = watch;
        let absent = not_served.then(|| "kind not served".to_owned());
        let settled = self.heartbeat.as_ref().and_then(|response| response.settled.as_ref()?.get(name));
        [
            name.clone(),
            objects.to_string(),
            settled.map_or_else(|| "-".to_owned(), u64::to_string),
            age(*listed_seconds_ago),
            age(*alive_seconds_ago),
            if *coarse { "yes" } else { "no" }.to_owned(),
            error.clone().or(absent).unwrap_or_default(),
        ]
    }
}

impl Status {
    /// Text form: a few lines, and a table of the watches.
    pub fn page(&self) -> String {
        let state = match &*self.pending.join(", ") {
            "" => "ready".to_owned(),
            pending => format!("not ready: {pending}"),
        };
        let certificate = self.certificate_not_after.as_deref().unwrap_or("-");
        let mut lines = vec![format!("agent        {}, {state}", self.version)];
        let instance = self.runtime.as_ref().and_then(|runtime| runtime.instance);
        let receiver = instance.map_or_else(|| "no response yet".to_owned(), |instance| instance.to_string());
        let answered = age(self.answered_seconds_ago);
        let offset = self.clock_offset_seconds;
        lines.push(format!("receiver     {receiver}, last took a request {answered} ago, clock offset {offset}s"));
        lines.push(format!("canary       {}", age(self.canary_age_seconds)));
        lines.push(format!("certificate  until {certificate}{}", self.identity.line()));
        let Some(runtime) = &self.runtime else { return page(&lines) };
        lines.extend(runtime.lines());
        let rows = runtime.watches.iter().map(|watch| runtime.row(watch)).collect();
        page(&lines) + "\n" + &aligned(["WATCH", "OBJECTS", "SETTLED", "LISTED", "ALIVE", "COARSE", "ERROR"], rows)
    }
}

impl IdentityReport {
    /// Text that follows the certificate's end in the status output.
    fn line(&self) -> String {
        let from = self.from.map(|from| format!(", from {from}")).unwrap_or_default();
        let unsaved = if self.unsaved { ", not kept in the agent's Secret" } else { "" };
        let since = self.failing_since.as_ref();
        let error = self.error.as_deref().unwrap_or_default();
        let failing =
            since.map(|since| format!(", certificate requests fail since {since}: {error}")).unwrap_or_default();
        format!("{from}{unsaved}{failing}")
    }
}

fn page(lines: &[String]) -> String {
    lines.iter().map(|line| sanitize(line) + "\n").collect()
}

#[cfg(test)]
mod tests {
    use tidewatch_api::{
        ConditionStatus,
        identity::{Epoch, Instance},
    };

    use super::*;
    use crate::admin::{EventPath, agent::IdentitySource};

    #[test]
    fn page_shows_watches_and_errors() {
        let watch = |name: &str, error: Option<&str>| WatchState {
            name: name.into(),
            objects: 3,
            digest: None,
            listed_seconds_ago: error.is_none().then_some(61),
            alive_seconds_ago: None,
            coarse: false,
            not_served: name == "absent",
            error: error.map(str::to_owned),
        };
        let mut status = Status {
            version: "0.1.0".into(),
            pending: vec!["plan".into()],
            answered_seconds_ago: Some(2),
            canary_age_seconds: None,
            certificate_not_after: None,
            identity: IdentityReport::default(),
            clock_offset_seconds: -600,
            runtime: None,
        };
        assert!(status.page().starts_with("agent        0.1.0, not ready: plan\n"), "{}", status.page());
        status.pending.clear();
        status.identity = IdentityReport {
            from: Some(IdentitySource::Enrolment),
            unsaved: true,
            failing_since: Some("2026-01-01T00:00:00Z".into()),
            error: Some("503\nlater".into()),
        };
        status.runtime = Some(Runtime {
            id: "r".into(),
            epoch: Epoch::new(255),
            sequence: 7,
            accepted: 6,
            instance: Some(Instance::new(1)),
            path: EventPath {
                state: ConditionStatus::False,
                reason: "FailingWatch".into(),
                message: Some("pods: 403\nforbidden".into()),
            },
            heartbeat: Some(LastHeartbeat {
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
            watches: vec![watch("kyma", None), watch("pods", Some("403\nforbidden")), watch("absent", None)],
        });
        let page = status.page();
        for line in [
            "agent        0.1.0, ready",
            "receiver     0000000000000001, last took a request 2s ago, clock offset -600s",
            "certificate  until -, from enrolment, not kept in the agent's Secret, certificate requests fail since 2026-01-01T00:00:00Z: \
             503\u{fffd}later",
            "path         False, FailingWatch: pods: 403\u{fffd}forbidden (evidence of this agent)",
            "heartbeat    answered 1m1s ago, every 30s",
            "events       1 waiting, 2 parked, 3 unsettled, accepted up to 6",
            "gaps         4; 5 resends requested, now of kyma, pods",
            "plan         abc, the receiver's is def, the newest is refused: no\u{fffd}[2J",
            "kyma    3        5        1m1s    -      no",
            "pods    3        -        -       -      no      403\u{fffd}forbidden",
            "absent  3        -        1m1s    -      no      kind not served",
        ] {
            assert!(page.lines().any(|there| there == line), "{line:?} is not in\n{page}");
        }
    }
}
