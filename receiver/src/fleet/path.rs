//! Whether the way from a runtime to here is proven: the input of the condition `EventPath`.

use std::time::Duration;

use tidewatch_shared::{
    api::ConditionStatus,
    heartbeat::{EVIDENCE_INTERVALS as INTERVALS, Heartbeat, failing},
    identity::Epoch,
};
use tokio::time::Instant;

/// Words of an agent are cut to so many characters.
const MAX_WORDS: usize = 256;

/// What the evidence says. No numbers that move stand in it, so two that differ are a transition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathState {
    /// No evidence yet, and none is due: this process, the plan or the agent is too new. Writes nothing.
    Unknown,
    /// The canary comes through, and every watch of the current plan is listed and lives.
    Proven,
    /// It is not proven; the reason in words.
    Unproven(Unproven),
}

/// Why a path is not proven; the first that holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unproven {
    /// No heartbeat came for three intervals.
    NoHeartbeat,
    /// Nothing was heard for hours, and its API server does not answer either: hibernated, or switched off. No alarm.
    Away,
    /// The agent speaks contract v2, which has no heartbeat.
    LegacyAgent,
    /// The agent follows another plan than ours.
    OldPlan {
        /// Why it refused ours, in its words, at most 256 characters.
        refused: Option<String>,
    },
    /// A watch does not stand.
    FailingWatch {
        /// Its name in the plan.
        watch: String,
        /// In the agent's words, at most 256 characters, or in ours when it is silent; `None` while it is not listed.
        error: Option<String>,
    },
    /// The digest of a watch did not agree, and the agent has not told of that watch anew yet.
    Diverged {
        /// Its name in the plan.
        watch: String,
    },
    /// The canary did not come back for three intervals.
    StaleCanary {
        /// Whether it ever came back.
        came_back: bool,
    },
}

impl PathState {
    /// Whether the agent's heartbeats come.
    #[must_use]
    pub const fn is_heard(&self) -> bool {
        use Unproven::{Away, LegacyAgent, NoHeartbeat};
        !matches!(self, Self::Unknown | Self::Unproven(NoHeartbeat | Away | LegacyAgent))
    }

    /// What the condition `EventPath` says, and so everybody who is asked. `Unknown` where nobody claims that something is broken.
    #[must_use]
    pub const fn status(&self) -> ConditionStatus {
        match self {
            Self::Proven => ConditionStatus::True,
            Self::Unknown | Self::Unproven(Unproven::Away | Unproven::LegacyAgent) => ConditionStatus::Unknown,
            Self::Unproven(_) => ConditionStatus::False,
        }
    }

    /// Every name that [`Self::as_str`] can give.
    pub const NAMES: [&'static str; 9] = [
        "Unknown",
        "Proven",
        "NoHeartbeat",
        "Away",
        "LegacyAgent",
        "OldPlan",
        "FailingWatch",
        "Diverged",
        "StaleCanary",
    ];

    /// The state as the reason of the condition, metrics and logs name it.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Unknown => "Unknown",
            Self::Proven => "Proven",
            Self::Unproven(Unproven::NoHeartbeat) => "NoHeartbeat",
            Self::Unproven(Unproven::Away) => "Away",
            Self::Unproven(Unproven::LegacyAgent) => "LegacyAgent",
            Self::Unproven(Unproven::OldPlan { .. }) => "OldPlan",
            Self::Unproven(Unproven::FailingWatch { .. }) => "FailingWatch",
            Self::Unproven(Unproven::Diverged { .. }) => "Diverged",
            Self::Unproven(Unproven::StaleCanary { .. }) => "StaleCanary",
        }
    }
}

/// The contract in which an agent last spoke to this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contract {
    /// It has not spoken yet.
    #[default]
    Unheard,
    /// The incumbent's.
    V2,
    /// Ours.
    V3,
}

impl Contract {
    /// The contract as tables and logs name it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unheard => "unheard",
            Self::V2 => "v2",
            Self::V3 => "v3",
        }
    }
}

/// What an earlier process saw and a new one cannot see at once: thousands that are away would otherwise be alarms at each start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inherited {
    /// See [`Unproven::Away`].
    Away,
    /// See [`Unproven::LegacyAgent`].
    LegacyAgent,
}

/// Ends the condition's message while an agent is not heard of that has spoken contract v3: so that it is known after a restart as well.
pub(crate) const SPOKE_V3: &str = "; it has spoken contract v3 before";

/// Whether a condition in KCP says that the agent has spoken contract v3: by a reason that nobody else can have, or in its message.
pub(crate) fn has_spoken_v3(reason: &str, message: &str) -> bool {
    let heartbeats = ["Proven", "OldPlan", "FailingWatch", "Diverged", "StaleCanary"];
    heartbeats.contains(&reason) || message.ends_with(SPOKE_V3)
}

impl Inherited {
    /// From the reason of the condition in KCP.
    pub(crate) fn of(reason: &str) -> Option<Self> {
        match reason {
            "Away" => Some(Self::Away),
            "LegacyAgent" => Some(Self::LegacyAgent),
            _ => None,
        }
    }
}

/// By what all paths are judged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// When this process began to serve.
    pub(crate) started: Instant,
    /// The heartbeat interval that agents are told now.
    pub(crate) interval: Duration,
    /// Who is silent and out of reach for so long is away.
    pub(crate) away_after: Duration,
}

/// What stays of the last heartbeat that counted.
#[derive(Clone, Debug)]
pub(crate) struct Pulse {
    pub(super) at: Instant,
    pub(super) epoch: Epoch,
    canary: Option<Duration>,
    failing: Option<(String, Option<String>)>,
    plan_error: Option<String>,
    pub(crate) plan_revision: Option<String>,
    pub(crate) waiting: u64,
    pub(crate) parked: u64,
    pub(crate) agent_version: String,
    pub(crate) certificate_not_after: String,
    /// The same in unix seconds, if it is a time.
    pub(crate) certificate_ends: Option<i64>,
    /// Since when its renewal fails, in unix seconds.
    pub(crate) renewal_failed_since: Option<u32>,
}

impl Pulse {
    pub(super) fn of(heartbeat: &Heartbeat, at: Instant) -> Self {
        Self {
            at,
            epoch: heartbeat.epoch,
            canary: heartbeat.canary.map(|canary| Duration::from_secs(canary.age_seconds)),
            failing: failing(&heartbeat.watches).map(|(watch, error)| (cut(watch), error.map(cut))),
            plan_error: heartbeat.plan_error.as_deref().map(cut),
            plan_revision: heartbeat.plan_revision.as_deref().map(cut),
            waiting: heartbeat.waiting,
            parked: heartbeat.parked,
            agent_version: cut(&heartbeat.agent_version),
            certificate_not_after: cut(&heartbeat.certificate.not_after),
            certificate_ends: unix(&heartbeat.certificate.not_after),
            renewal_failed_since: heartbeat.certificate.renewal_failed_since.as_deref().map(failed_since),
        }
    }

    /// Whether the agent itself said that nothing is missing.
    pub(super) fn is_well(&self, plan_revision: &str) -> bool {
        self.canary.is_some() && self.failing.is_none() && self.plan_revision.as_deref() == Some(plan_revision)
    }

    /// When it came.
    pub(crate) const fn at(&self) -> Instant {
        self.at
    }

    /// How old the canary is by now; `None` if it never came back.
    pub(crate) fn canary_age(&self, now: Instant) -> Option<Duration> {
        self.canary.map(|age| age.saturating_add(now.saturating_duration_since(self.at)))
    }
}

/// What is judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evidence<'a> {
    /// When this process started, the runtime was placed, its plan changed, or its agent began anew: the latest.
    pub(super) since: Instant,
    /// The longest heartbeat interval that the agent may follow.
    pub(super) interval: Duration,
    pub(super) away_after: Duration,
    /// When the runtime was last heard of, or could first have been.
    pub(super) heard: Instant,
    /// What was last heard of it was contract v2.
    pub(super) legacy: bool,
    /// The last pass did not reach its API server.
    pub(super) unreachable: bool,
    /// An earlier process saw it away, and nothing speaks against it since.
    pub(super) was_away: bool,
    /// The plan that the runtime should follow.
    pub(super) plan_revision: &'a str,
    /// A watch whose digest did not agree.
    pub(super) diverged: Option<&'a str>,
    pub(super) pulse: Option<&'a Pulse>,
}

impl Evidence<'_> {
    /// Good evidence counts at once; its absence only when it is due.
    pub(super) fn judge(self, now: Instant) -> PathState {
        match self.flaw(now) {
            None => PathState::Proven,
            // Known, and not concluded from an absence.
            Some(flaw @ (Unproven::LegacyAgent | Unproven::Away)) => PathState::Unproven(flaw),
            Some(_) if now < self.since + self.interval * INTERVALS => PathState::Unknown,
            Some(flaw) => PathState::Unproven(flaw),
        }
    }

    fn flaw(self, now: Instant) -> Option<Unproven> {
        let allowed = self.interval * INTERVALS;
        let Some(pulse) = self.pulse.filter(|pulse| now.saturating_duration_since(pulse.at) <= allowed) else {
            return Some(self.silence(now));
        };
        if pulse.plan_revision.as_deref() != Some(self.plan_revision) {
            return Some(Unproven::OldPlan { refused: pulse.plan_error.clone() });
        }
        if let Some((watch, error)) = pulse.failing.clone() {
            return Some(Unproven::FailingWatch { watch, error });
        }
        if let Some(watch) = self.diverged {
            return Some(Unproven::Diverged { watch: watch.to_owned() });
        }
        let age = pulse.canary_age(now);
        age.is_none_or(|age| age > allowed).then_some(Unproven::StaleCanary { came_back: age.is_some() })
    }

    /// A runtime whose API server answers is not away, whatever became of its agent.
    fn silence(self, now: Instant) -> Unproven {
        let long = self.was_away || now.saturating_duration_since(self.heard) >= self.away_after;
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

/// That something fails counts, whatever an agent with a strange clock thinks since when: 0 for what is no time.
fn failed_since(time: &str) -> u32 {
    u32::try_from(unix(time).unwrap_or(0).max(0)).unwrap_or(u32::MAX)
}

fn cut(words: &str) -> String {
    words.chars().filter(|c| !c.is_control()).take(MAX_WORDS).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidewatch_shared::heartbeat::{SILENT_AFTER_SECONDS, SILENT_MESSAGE};

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);
    const AWAY: Duration = Duration::from_secs(7_200);
    const S: Duration = Duration::from_secs(1);

    fn pulse(at: Instant) -> Pulse {
        Pulse {
            at,
            epoch: Epoch::new(1),
            canary: Some(S),
            failing: None,
            plan_revision: Some("r2".into()),
            plan_error: None,
            waiting: 0,
            parked: 0,
            agent_version: String::new(),
            certificate_not_after: String::new(),
            certificate_ends: None,
            renewal_failed_since: None,
        }
    }

    fn evidence(start: Instant, pulse: Option<&Pulse>) -> Evidence<'_> {
        Evidence {
            since: start,
            interval: INTERVAL,
            away_after: AWAY,
            heard: start,
            legacy: false,
            unreachable: false,
            was_away: false,
            plan_revision: "r2",
            diverged: None,
            pulse,
        }
    }

    #[test]
    fn good_evidence_counts_at_once_and_its_absence_when_it_is_due() {
        let start = Instant::now();
        let judge = |pulse: Option<&Pulse>, now| evidence(start, pulse).judge(now);
        let (due, early) = (start + INTERVAL * 3, start + INTERVAL * 3 - S);
        assert_eq!(judge(None, early), PathState::Unknown);
        assert_eq!(judge(None, due), PathState::Unproven(Unproven::NoHeartbeat));
        assert_eq!(judge(Some(&pulse(start)), start + S), PathState::Proven);
        assert_eq!(judge(Some(&pulse(due)), due + INTERVAL * 2), PathState::Proven);
        assert_eq!(judge(Some(&pulse(due)), due + INTERVAL * 3 + S), PathState::Unproven(Unproven::NoHeartbeat));

        let flawed = |change: fn(&mut Pulse)| {
            let mut pulse = pulse(due);
            change(&mut pulse);
            pulse
        };
        for (pulse, flaw) in [
            (flawed(|p| p.plan_revision = Some("r1".into())), Unproven::OldPlan { refused: None }),
            (
                flawed(|p| (p.plan_revision, p.plan_error) = (None, Some("no".into()))),
                Unproven::OldPlan { refused: Some("no".into()) },
            ),
            (
                flawed(|p| p.failing = Some(("w".into(), Some("403".into())))),
                Unproven::FailingWatch { watch: "w".into(), error: Some("403".into()) },
            ),
            (flawed(|p| p.canary = Some(INTERVAL * 3 + S)), Unproven::StaleCanary { came_back: true }),
            (flawed(|p| p.canary = None), Unproven::StaleCanary { came_back: false }),
        ] {
            assert_eq!(judge(Some(&pulse), early), PathState::Unknown, "{flaw:?}");
            assert_eq!(judge(Some(&pulse), due + S), PathState::Unproven(flaw));
        }
        let well = pulse(due);
        let diverged = Evidence { diverged: Some("w"), ..evidence(start, Some(&well)) };
        assert_eq!(diverged.judge(due), PathState::Unproven(Unproven::Diverged { watch: "w".into() }));
    }

    #[test]
    fn a_watch_that_was_not_heard_of_for_long_does_not_stand() {
        let failing = |watches: Value| {
            let heartbeat = json!({
                "epoch": "0000000000000007", "sequence": 1, "counter": 1, "waiting": 0, "parked": 0, "agentVersion": "1",
                "certificate": {"notAfter": "", "fingerprint": ""}, "watches": watches,
            });
            Pulse::of(&serde_json::from_value(heartbeat).unwrap(), Instant::now()).failing
        };
        fn watch(name: &str, alive: Option<u64>, error: Option<&str>) -> Value {
            json!({"name": name, "objects": 1, "listedSecondsAgo": 900, "aliveSecondsAgo": alive, "error": error})
        }
        let (living, silent) =
            (watch("a", Some(SILENT_AFTER_SECONDS), None), watch("b", Some(SILENT_AFTER_SECONDS + 1), None));
        let words = |name: &str, words: &str| Some((name.to_owned(), Some(words.to_owned())));
        assert_eq!(failing(json!([living, watch("c", None, None)])), None, "not every agent says it");
        assert_eq!(failing(json!([living, silent])), words("b", SILENT_MESSAGE));
        assert_eq!(failing(json!([watch("c", Some(900), Some("403")), silent])), words("c", "403"));
    }

    #[test]
    fn silence_has_three_names() {
        let start = Instant::now();
        let silent = evidence(start, None);
        fn state(evidence: Evidence<'_>, after: Duration) -> PathState {
            evidence.judge(evidence.since + after)
        }
        let unreachable = Evidence { unreachable: true, ..silent };
        assert_eq!(state(unreachable, AWAY - S), PathState::Unproven(Unproven::NoHeartbeat));
        assert_eq!(state(unreachable, AWAY), PathState::Unproven(Unproven::Away));
        assert_eq!(state(silent, AWAY * 9), PathState::Unproven(Unproven::NoHeartbeat), "its API server answers");
        let was_away = Evidence { was_away: true, ..unreachable };
        assert_eq!(state(was_away, S), PathState::Unproven(Unproven::Away), "known from before, so at once");
        let legacy = Evidence { legacy: true, ..was_away };
        assert_eq!(state(legacy, S), PathState::Unproven(Unproven::LegacyAgent), "it has no heartbeat to miss");
        let spoke = pulse(start);
        let both = Evidence { pulse: Some(&spoke), ..legacy };
        assert_eq!(state(both, S), PathState::Proven, "a heartbeat says more");
    }

    #[test]
    fn a_renewal_that_fails_counts_whatever_the_agents_clock_says() {
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
    fn a_condition_tells_who_has_spoken_v3() {
        use Unproven::{Away, Diverged, FailingWatch, LegacyAgent, NoHeartbeat, OldPlan, StaleCanary};
        let heard = [
            OldPlan { refused: None },
            FailingWatch { watch: String::new(), error: None },
            Diverged { watch: String::new() },
            StaleCanary { came_back: false },
        ];
        for state in heard.map(PathState::Unproven).into_iter().chain([PathState::Proven]) {
            assert!(state.is_heard() && has_spoken_v3(state.as_str(), "words"), "{state:?}");
        }
        for state in [NoHeartbeat, Away, LegacyAgent].map(PathState::Unproven).into_iter().chain([PathState::Unknown]) {
            assert!(!state.is_heard() && !has_spoken_v3(state.as_str(), "words"), "{state:?}");
            assert!(has_spoken_v3(state.as_str(), &format!("words{SPOKE_V3}")));
        }
    }

    #[test]
    fn every_state_has_a_name_of_the_closed_set() {
        for flaw in [
            Unproven::NoHeartbeat,
            Unproven::Away,
            Unproven::LegacyAgent,
            Unproven::OldPlan { refused: None },
            Unproven::FailingWatch { watch: String::new(), error: None },
            Unproven::Diverged { watch: String::new() },
            Unproven::StaleCanary { came_back: true },
        ] {
            assert!(PathState::NAMES.contains(&PathState::Unproven(flaw).as_str()));
        }
        assert_eq!(cut("a\nb\u{7}c"), "abc");
    }
}
