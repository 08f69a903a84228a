//! State of the event path from a runtime to this receiver, the input of the condition `EventPath`.

use std::time::Duration;

use strum::{EnumString, IntoStaticStr, VariantNames};
use tidewatch_api::{ConditionStatus, identity::Epoch};
use tidewatch_contract::heartbeat::{EVIDENCE_INTERVALS as INTERVALS, Heartbeat, failing};
use tidewatch_kit::foreign_text;
use tokio::time::Instant;

use super::plan_index::PlanIndex;

/// Maximum length of texts from an agent, in characters.
const MAX_TEXT_CHARS: usize = 256;
/// Error text of a watch that an agent does not know.
const UNKNOWN_WATCH: &str = "the agent does not report it; an agent of an older version does not know watches on all \
    resources of a group";

/// State of the event path. It contains no continuously changing value, so that any difference is a transition. The
/// name is the reason of the condition, and the state in metrics and logs.
#[derive(Clone, Debug, PartialEq, Eq, IntoStaticStr)]
pub enum PathState {
    /// No evidence yet, and none is due: the process, the plan or the agent is too new. No condition is written.
    Unknown,
    /// The canary comes through, and every watch of the current plan is listed and alive.
    Proven,
    /// The path is not proven, for this reason.
    #[strum(transparent)]
    Unproven(Unproven),
}

/// Reason of an unproven path; the first that applies.
#[derive(Clone, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
pub enum Unproven {
    /// No heartbeat for three intervals.
    NoHeartbeat,
    /// No request for hours, and the API server does not answer: the cluster is hibernated or switched off. Not an
    /// alarm.
    Away,
    /// The agent uses contract v2, which has no heartbeat.
    LegacyAgent,
    /// The agent follows another plan than the current one, or could not apply another plan or other settings.
    OldPlan {
        /// The agent's error of reading or applying its plan or settings, at most 256 characters.
        error: Option<String>,
    },
    /// A watch is not established.
    FailingWatch {
        /// Name of the watch in the plan.
        watch: String,
        /// Error text of the agent, at most 256 characters, or the receiver's text for a silent watch; `None` while it
        /// is not listed.
        error: Option<String>,
    },
    /// Digest mismatch of a watch that the agent has not resent yet.
    Diverged {
        /// Name of the watch in the plan.
        watch: String,
    },
    /// The canary did not return for three intervals.
    StaleCanary {
        /// True if it has ever returned.
        came_back: bool,
    },
}

impl PathState {
    /// Returns true if the agent's heartbeats arrive.
    pub const fn receives_heartbeats(&self) -> bool {
        use Unproven::{Away, LegacyAgent, NoHeartbeat};
        !matches!(self, Self::Unknown | Self::Unproven(NoHeartbeat | Away | LegacyAgent))
    }

    /// Status of the condition `EventPath`; `Unknown` for states that are no failure.
    pub const fn status(&self) -> ConditionStatus {
        match self {
            Self::Proven => ConditionStatus::True,
            Self::Unknown | Self::Unproven(Unproven::Away | Unproven::LegacyAgent) => ConditionStatus::Unknown,
            Self::Unproven(_) => ConditionStatus::False,
        }
    }

    /// Names of all states.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ["Unknown", "Proven"].into_iter().chain(Unproven::VARIANTS.iter().copied())
    }
}

/// Contract of an agent's last request to this process. The name is that of the tables and logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Contract {
    /// No request yet.
    #[default]
    #[strum(serialize = "unheard")]
    Unknown,
    /// lifecycle-manager's contract.
    V2,
    /// This receiver's contract.
    V3,
}

/// State recorded by an earlier process that a new one cannot observe at once. Without it, thousands of absent runtimes
/// would raise an alarm at each start. Parsed from the reason of the condition in KCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString)]
pub(crate) enum Inherited {
    /// See [`Unproven::Away`].
    Away,
    /// See [`Unproven::LegacyAgent`].
    LegacyAgent,
}

/// Suffix of the condition's message while an agent that has used contract v3 sends no requests, so that this is known
/// after a restart.
pub const USED_V3_SUFFIX: &str = "; it has spoken contract v3 before";

/// Returns true if a condition in KCP proves that the agent has used contract v3: by a reason that only v3 agents
/// reach, or by its message.
pub(crate) fn condition_shows_v3(reason: &str, message: &str) -> bool {
    let reported_by_v3 = ["Proven", "OldPlan", "FailingWatch", "Diverged", "StaleCanary"];
    reported_by_v3.contains(&reason) || message.ends_with(USED_V3_SUFFIX)
}

/// Thresholds that apply to all paths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathThresholds {
    /// Start of this process's service.
    pub(crate) started: Instant,
    /// Heartbeat interval announced to agents now.
    pub(crate) interval: Duration,
    /// Silence after which an unreachable runtime is away.
    pub(crate) away_after: Duration,
}

/// Data of the last counted heartbeat.
#[derive(Clone, Debug)]
pub(crate) struct LastHeartbeat {
    /// Time of arrival.
    pub(super) at: Instant,
    pub(super) epoch: Epoch,
    canary: Option<Duration>,
    failing: Option<(String, Option<String>)>,
    plan_error: Option<String>,
    pub(crate) plan_revision: Option<String>,
    pub(crate) waiting: u64,
    pub(crate) parked: u64,
    /// Watches of kinds that the runtime does not serve; they are no flaw of the path.
    pub(crate) not_served: usize,
    /// Watches with too many objects to report each change by its object.
    pub(crate) coarse: usize,
    pub(crate) agent_version: String,
    pub(crate) certificate_not_after: String,
    /// `certificate_not_after` in Unix seconds, if it is a valid time.
    pub(crate) certificate_ends: Option<i64>,
    /// Start of the agent's failure to renew, Unix seconds.
    pub(crate) renewal_failed_since: Option<u32>,
}

impl LastHeartbeat {
    pub(super) fn of(heartbeat: &Heartbeat, planned: &PlanIndex, at: Instant) -> Self {
        // An agent that is too old for the watches on groups ignores them, and follows the rest of the plan.
        let unknown = || {
            let names = heartbeat.watches.iter().map(|watch| &*watch.name);
            planned.missing_group(names).map(|watch| (watch, Some(UNKNOWN_WATCH)))
        };
        let failing = failing(&heartbeat.watches).or_else(unknown);
        Self {
            at,
            epoch: heartbeat.epoch,
            canary: heartbeat.canary.map(|canary| Duration::from_secs(canary.age_seconds)),
            failing: failing.map(|(watch, error)| (truncate(watch), error.map(truncate))),
            plan_error: heartbeat.plan_error.as_deref().map(truncate),
            plan_revision: heartbeat.plan_revision.as_deref().map(truncate),
            waiting: heartbeat.waiting,
            parked: heartbeat.parked,
            not_served: heartbeat.watches.iter().filter(|watch| watch.not_served).count(),
            coarse: heartbeat.watches.iter().filter(|watch| watch.coarse).count(),
            agent_version: truncate(&heartbeat.agent_version),
            certificate_not_after: truncate(&heartbeat.certificate.not_after),
            certificate_ends: unix(&heartbeat.certificate.not_after),
            renewal_failed_since: heartbeat.certificate.renewal_failed_since.as_deref().map(failed_since),
        }
    }

    /// Returns true if the agent itself reports that nothing is missing.
    pub(super) fn is_healthy(&self, plan_revision: &str) -> bool {
        let follows_plan = self.plan_error.is_none() && self.plan_revision.as_deref() == Some(plan_revision);
        self.canary.is_some() && self.failing.is_none() && follows_plan
    }

    /// Current age of the canary; `None` if it never returned.
    pub(crate) fn canary_age(&self, now: Instant) -> Option<Duration> {
        self.canary.map(|age| age.saturating_add(now.saturating_duration_since(self.at)))
    }
}

/// Evidence about one path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evidence<'a> {
    /// Latest of: start of the process, placement, change of the plan, start of the agent.
    pub(super) since: Instant,
    /// Longest heartbeat interval that the agent may follow.
    pub(super) interval: Duration,
    pub(super) away_after: Duration,
    /// Time of the runtime's last request, or from which one was possible.
    pub(super) last_request: Instant,
    /// The last request used contract v2.
    pub(super) legacy: bool,
    /// The last reconcile did not reach its API server.
    pub(super) unreachable: bool,
    /// An earlier process recorded it as away, and nothing contradicts that since.
    pub(super) was_away: bool,
    /// Revision of the plan that the agent should follow.
    pub(super) plan_revision: &'a str,
    /// Watch with a digest mismatch.
    pub(super) diverged: Option<&'a str>,
    pub(super) last_heartbeat: Option<&'a LastHeartbeat>,
}

impl Evidence<'_> {
    /// Evaluates the evidence. Positive evidence counts at once, missing evidence only when it is due.
    pub(super) fn evaluate(self, now: Instant) -> PathState {
        match self.flaw(now) {
            None => PathState::Proven,
            // These are observed states, not conclusions from missing evidence.
            Some(flaw @ (Unproven::LegacyAgent | Unproven::Away)) => PathState::Unproven(flaw),
            Some(_) if now < self.since + self.interval * INTERVALS => PathState::Unknown,
            Some(flaw) => PathState::Unproven(flaw),
        }
    }

    fn flaw(self, now: Instant) -> Option<Unproven> {
        let allowed = self.interval * INTERVALS;
        let Some(last_heartbeat) =
            self.last_heartbeat.filter(|last_heartbeat| now.saturating_duration_since(last_heartbeat.at) <= allowed)
        else {
            return Some(self.classify_silence(now));
        };
        if last_heartbeat.plan_revision.as_deref() != Some(self.plan_revision) {
            return Some(Unproven::OldPlan { error: last_heartbeat.plan_error.clone() });
        }
        if let Some((watch, error)) = last_heartbeat.failing.clone() {
            return Some(Unproven::FailingWatch { watch, error });
        }
        if let Some(error) = last_heartbeat.plan_error.clone() {
            return Some(Unproven::OldPlan { error: Some(error) });
        }
        if let Some(watch) = self.diverged {
            return Some(Unproven::Diverged { watch: watch.to_owned() });
        }
        let age = last_heartbeat.canary_age(now);
        age.is_none_or(|age| age > allowed).then_some(Unproven::StaleCanary { came_back: age.is_some() })
    }

    /// Classifies missing heartbeats. A runtime with a reachable API server is not away, regardless of its agent.
    fn classify_silence(self, now: Instant) -> Unproven {
        let long = self.was_away || now.saturating_duration_since(self.last_request) >= self.away_after;
        match (self.legacy, self.unreachable && long) {
            (true, _) => Unproven::LegacyAgent,
            (false, true) => Unproven::Away,
            (false, false) => Unproven::NoHeartbeat,
        }
    }
}

fn unix(time: &str) -> Option<i64> {
    time.parse().ok().map(jiff::Timestamp::as_second)
}

/// Parses the start of a failure into Unix seconds; 0 for an invalid time, because a failure counts even if the agent's
/// clock is wrong.
fn failed_since(time: &str) -> u32 {
    u32::try_from(unix(time).unwrap_or(0).max(0)).unwrap_or(u32::MAX)
}

fn truncate(words: &str) -> String {
    foreign_text::line(words, MAX_TEXT_CHARS)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidewatch_api::plan::Plan;
    use tidewatch_contract::heartbeat::{SILENT_AFTER_SECONDS, SILENT_MESSAGE};
    use tidewatch_kit::variant::VariantName as _;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);
    const AWAY: Duration = Duration::from_secs(7_200);
    const S: Duration = Duration::from_secs(1);

    fn last_heartbeat(at: Instant) -> LastHeartbeat {
        LastHeartbeat {
            at,
            epoch: Epoch::new(1),
            canary: Some(S),
            failing: None,
            plan_revision: Some("r2".into()),
            plan_error: None,
            waiting: 0,
            parked: 0,
            not_served: 0,
            coarse: 0,
            agent_version: String::new(),
            certificate_not_after: String::new(),
            certificate_ends: None,
            renewal_failed_since: None,
        }
    }

    fn evidence(start: Instant, last_heartbeat: Option<&LastHeartbeat>) -> Evidence<'_> {
        Evidence {
            since: start,
            interval: INTERVAL,
            away_after: AWAY,
            last_request: start,
            legacy: false,
            unreachable: false,
            was_away: false,
            plan_revision: "r2",
            diverged: None,
            last_heartbeat,
        }
    }

    #[test]
    fn positive_evidence_counts_at_once_and_missing_evidence_when_due() {
        let start = Instant::now();
        let evaluate = |last_heartbeat: Option<&LastHeartbeat>, now| evidence(start, last_heartbeat).evaluate(now);
        let due = start + INTERVAL * 3;
        let early = start + INTERVAL * 3 - S;
        assert_eq!(evaluate(None, early), PathState::Unknown);
        assert_eq!(evaluate(None, due), PathState::Unproven(Unproven::NoHeartbeat));
        assert_eq!(evaluate(Some(&last_heartbeat(start)), start + S), PathState::Proven);
        assert_eq!(evaluate(Some(&last_heartbeat(due)), due + INTERVAL * 2), PathState::Proven);
        assert_eq!(
            evaluate(Some(&last_heartbeat(due)), due + INTERVAL * 3 + S),
            PathState::Unproven(Unproven::NoHeartbeat)
        );

        let flawed = |change: fn(&mut LastHeartbeat)| {
            let mut last_heartbeat = last_heartbeat(due);
            change(&mut last_heartbeat);
            last_heartbeat
        };
        for (last_heartbeat, flaw) in [
            (flawed(|p| p.plan_revision = Some("r1".into())), Unproven::OldPlan { error: None }),
            (
                flawed(|p| (p.plan_revision, p.plan_error) = (None, Some("no".into()))),
                Unproven::OldPlan { error: Some("no".into()) },
            ),
            (flawed(|p| p.plan_error = Some("no".into())), Unproven::OldPlan { error: Some("no".into()) }),
            (
                flawed(|p| {
                    p.plan_error = Some("no".into());
                    p.failing = Some(("w".into(), Some("403".into())));
                }),
                Unproven::FailingWatch { watch: "w".into(), error: Some("403".into()) },
            ),
            (
                flawed(|p| p.failing = Some(("w".into(), Some("403".into())))),
                Unproven::FailingWatch { watch: "w".into(), error: Some("403".into()) },
            ),
            (flawed(|p| p.canary = Some(INTERVAL * 3 + S)), Unproven::StaleCanary { came_back: true }),
            (flawed(|p| p.canary = None), Unproven::StaleCanary { came_back: false }),
        ] {
            assert_eq!(evaluate(Some(&last_heartbeat), early), PathState::Unknown, "{flaw:?}");
            assert_eq!(evaluate(Some(&last_heartbeat), due + S), PathState::Unproven(flaw));
        }
        let well = last_heartbeat(due);
        let diverged = Evidence { diverged: Some("w"), ..evidence(start, Some(&well)) };
        assert_eq!(diverged.evaluate(due), PathState::Unproven(Unproven::Diverged { watch: "w".into() }));
    }

    #[test]
    fn kind_that_the_runtime_does_not_serve_is_counted_and_is_no_flaw() {
        let absent = |error: Option<&str>| {
            let watches = json!([
                {"name": "kyma", "objects": 1, "listedSecondsAgo": 9, "aliveSecondsAgo": 9},
                {"name": "w", "objects": 0, "listedSecondsAgo": 9, "aliveSecondsAgo": 200, "notServed": true, "error": error},
            ]);
            let heartbeat = json!({
                "epoch": "0000000000000007", "sequence": 1, "counter": 1, "waiting": 0, "parked": 0, "agentVersion": "1",
                "planRevision": "r2", "canary": {"ageSeconds": 1},
                "certificate": {"notAfter": "", "fingerprint": ""}, "watches": watches,
            });
            LastHeartbeat::of(&serde_json::from_value(heartbeat).unwrap(), &plan(json!({})), Instant::now())
        };
        let heartbeat = absent(None);
        assert!(heartbeat.is_healthy("r2") && heartbeat.not_served == 1);
        assert_eq!(evidence(heartbeat.at, Some(&heartbeat)).evaluate(heartbeat.at), PathState::Proven);
        assert!(!absent(Some("403")).is_healthy("r2"), "an error counts all the same");
    }

    fn plan(others: Value) -> PlanIndex {
        let mut plan = json!({"revision": "r2", "watches": []});
        plan.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
        PlanIndex::new(Plan::parse(&plan.to_string()).unwrap().into())
    }

    #[test]
    fn watch_on_a_group_that_the_agent_does_not_report_fails() {
        let watch = |name: &str| {
            json!({"name": name, "group": "example.test", "version": "*", "resource": "*", "manager": "m",
                "field": "spec", "work": ["forward"]})
        };
        let planned = plan(json!({"groupWatches": [watch("b"), watch("a")]}));
        let failing = |names: &[&str]| {
            let state = |name: &&str| json!({"name": name, "objects": 0, "listedSecondsAgo": 9, "aliveSecondsAgo": 9});
            let watches: Vec<_> = names.iter().map(state).collect();
            let heartbeat = json!({
                "epoch": "0000000000000007", "sequence": 1, "counter": 1, "waiting": 0, "parked": 0, "agentVersion": "1",
                "certificate": {"notAfter": "", "fingerprint": ""}, "watches": watches,
            });
            LastHeartbeat::of(&serde_json::from_value(heartbeat).unwrap(), &planned, Instant::now()).failing
        };
        let unknown = |name: &str| Some((name.to_owned(), Some(UNKNOWN_WATCH.to_owned())));
        assert_eq!(failing(&["kyma"]), unknown("a"));
        assert_eq!(failing(&["a", "kyma"]), unknown("b"));
        assert_eq!(failing(&["a", "b", "kyma"]), None);
    }

    #[test]
    fn watch_silent_for_long_fails() {
        let failing = |watches: Value| {
            let heartbeat = json!({
                "epoch": "0000000000000007", "sequence": 1, "counter": 1, "waiting": 0, "parked": 0, "agentVersion": "1",
                "certificate": {"notAfter": "", "fingerprint": ""}, "watches": watches,
            });
            LastHeartbeat::of(&serde_json::from_value(heartbeat).unwrap(), &plan(json!({})), Instant::now()).failing
        };
        fn watch(name: &str, alive: Option<u64>, error: Option<&str>) -> Value {
            json!({"name": name, "objects": 1, "listedSecondsAgo": 900, "aliveSecondsAgo": alive, "error": error})
        }
        let living = watch("a", Some(SILENT_AFTER_SECONDS), None);
        let silent = watch("b", Some(SILENT_AFTER_SECONDS + 1), None);
        let words = |name: &str, words: &str| Some((name.to_owned(), Some(words.to_owned())));
        assert_eq!(failing(json!([living, watch("c", None, None)])), None, "not every agent reports it");
        assert_eq!(failing(json!([living, silent])), words("b", SILENT_MESSAGE));
        assert_eq!(failing(json!([watch("c", Some(900), Some("403")), silent])), words("c", "403"));
    }

    #[test]
    fn silence_is_classified_into_three_states() {
        let start = Instant::now();
        let silent = evidence(start, None);
        fn state(evidence: Evidence<'_>, after: Duration) -> PathState {
            evidence.evaluate(evidence.since + after)
        }
        let unreachable = Evidence { unreachable: true, ..silent };
        assert_eq!(state(unreachable, AWAY - S), PathState::Unproven(Unproven::NoHeartbeat));
        assert_eq!(state(unreachable, AWAY), PathState::Unproven(Unproven::Away));
        assert_eq!(state(silent, AWAY * 9), PathState::Unproven(Unproven::NoHeartbeat), "its API server answers");
        let was_away = Evidence { was_away: true, ..unreachable };
        assert_eq!(state(was_away, S), PathState::Unproven(Unproven::Away), "inherited, so at once");
        let legacy = Evidence { legacy: true, ..was_away };
        assert_eq!(state(legacy, S), PathState::Unproven(Unproven::LegacyAgent), "it has no heartbeat to miss");
        let heartbeat = last_heartbeat(start);
        let both = Evidence { last_heartbeat: Some(&heartbeat), ..legacy };
        assert_eq!(state(both, S), PathState::Proven, "a heartbeat takes precedence");
    }

    #[test]
    fn renewal_failure_counts_regardless_of_the_agents_clock() {
        for (time, since) in [
            ("2026-01-01T00:00:00Z", 1_767_225_600),
            ("1969-01-01T00:00:00Z", 0),
            ("2999-01-01T00:00:00Z", u32::MAX),
            ("long ago", 0),
        ] {
            assert_eq!(failed_since(time), since, "{time}");
        }
    }

    #[test]
    fn condition_shows_the_use_of_v3() {
        use Unproven::{Away, Diverged, FailingWatch, LegacyAgent, NoHeartbeat, OldPlan, StaleCanary};
        let last_request = [
            OldPlan { error: None },
            FailingWatch { watch: String::new(), error: None },
            Diverged { watch: String::new() },
            StaleCanary { came_back: false },
        ];
        for state in last_request.map(PathState::Unproven).into_iter().chain([PathState::Proven]) {
            assert!(state.receives_heartbeats() && condition_shows_v3(state.as_str(), "words"), "{state:?}");
        }
        for state in [NoHeartbeat, Away, LegacyAgent].map(PathState::Unproven).into_iter().chain([PathState::Unknown]) {
            assert!(!state.receives_heartbeats() && !condition_shows_v3(state.as_str(), "words"), "{state:?}");
            assert!(condition_shows_v3(state.as_str(), &format!("words{USED_V3_SUFFIX}")));
        }
    }

    #[test]
    fn every_state_has_a_name_of_the_closed_set() {
        for flaw in [
            Unproven::NoHeartbeat,
            Unproven::Away,
            Unproven::LegacyAgent,
            Unproven::OldPlan { error: None },
            Unproven::FailingWatch { watch: String::new(), error: None },
            Unproven::Diverged { watch: String::new() },
            Unproven::StaleCanary { came_back: true },
        ] {
            let name = PathState::Unproven(flaw).as_str();
            assert!(PathState::names().any(|known| known == name));
        }
        assert_eq!(truncate("a\nb\u{7}c\u{202e}d"), "a b c d");
    }
}
