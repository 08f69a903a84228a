//! Whether the way from a runtime to here is proven: the input of the condition `EventPath`.

use std::time::Duration;

use tidewatch_shared::heartbeat::{Heartbeat, WatchState};
use tokio::time::Instant;

/// Evidence is awaited, and stays good, for so many heartbeat intervals.
const INTERVALS: u32 = 3;
/// Words of an agent are cut to so many characters.
const MAX_WORDS: usize = 256;

/// What the evidence says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathState {
    /// No evidence yet, and none is due: this process or the plan is too new. Writes nothing.
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
    /// The agent follows another plan than ours.
    OldPlan {
        /// Why it refused ours, in its words, at most 256 characters.
        refused: Option<String>,
    },
    /// A watch does not stand.
    FailingWatch {
        /// Its name in the plan.
        watch: String,
        /// In the agent's words, at most 256 characters; `None` while it is not listed.
        error: Option<String>,
    },
    /// The canary did not come back for three intervals.
    StaleCanary {
        /// How old it is; `None` if it never came back.
        age: Option<Duration>,
    },
}

/// What stays of the last heartbeat that counted.
#[derive(Clone, Debug)]
pub(crate) struct Pulse {
    pub(super) at: Instant,
    canary: Option<Duration>,
    failing: Option<(String, Option<String>)>,
    plan_revision: Option<String>,
    plan_error: Option<String>,
    pub(crate) waiting: u64,
    pub(crate) parked: u64,
    pub(crate) agent_version: String,
}

impl Pulse {
    pub(super) fn of(heartbeat: &Heartbeat, at: Instant) -> Self {
        let fails = |watch: &&WatchState| watch.error.is_some() || watch.listed_seconds_ago.is_none();
        // An error says more than a list that is not complete yet.
        let failing = heartbeat.watches.iter().filter(fails).max_by_key(|watch| watch.error.is_some());
        Self {
            at,
            canary: heartbeat.canary.map(|canary| Duration::from_secs(canary.age_seconds)),
            failing: failing.map(|watch| (cut(&watch.name), watch.error.as_deref().map(cut))),
            plan_revision: heartbeat.plan_revision.as_deref().map(cut),
            plan_error: heartbeat.plan_error.as_deref().map(cut),
            waiting: heartbeat.waiting,
            parked: heartbeat.parked,
            agent_version: cut(&heartbeat.agent_version),
        }
    }
}

/// What is judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evidence<'a> {
    /// When this process started, the runtime was placed, or its plan changed: the latest.
    pub(super) since: Instant,
    /// The wanted heartbeat interval.
    pub(super) interval: Duration,
    /// The plan that the runtime should follow.
    pub(super) plan_revision: &'a str,
    pub(super) pulse: Option<&'a Pulse>,
}

impl Evidence<'_> {
    /// Good evidence counts at once; its absence only when it is due.
    pub(super) fn judge(self, now: Instant) -> PathState {
        match self.flaw(now) {
            None => PathState::Proven,
            Some(_) if now < self.since + self.interval * INTERVALS => PathState::Unknown,
            Some(flaw) => PathState::Unproven(flaw),
        }
    }

    fn flaw(self, now: Instant) -> Option<Unproven> {
        let allowed = self.interval * INTERVALS;
        let silent = |pulse: &Pulse| now.saturating_duration_since(pulse.at);
        let Some(pulse) = self.pulse.filter(|pulse| silent(pulse) <= allowed) else {
            return Some(Unproven::NoHeartbeat);
        };
        if pulse.plan_revision.as_deref() != Some(self.plan_revision) {
            return Some(Unproven::OldPlan { refused: pulse.plan_error.clone() });
        }
        if let Some((watch, error)) = pulse.failing.clone() {
            return Some(Unproven::FailingWatch { watch, error });
        }
        let age = pulse.canary.map(|age| age.saturating_add(silent(pulse)));
        age.is_none_or(|age| age > allowed).then_some(Unproven::StaleCanary { age })
    }
}

fn cut(words: &str) -> String {
    words.chars().take(MAX_WORDS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);
    const S: Duration = Duration::from_secs(1);

    fn pulse(at: Instant) -> Pulse {
        Pulse {
            at,
            canary: Some(S),
            failing: None,
            plan_revision: Some("r2".into()),
            plan_error: None,
            waiting: 0,
            parked: 0,
            agent_version: String::new(),
        }
    }

    #[test]
    fn good_evidence_counts_at_once_and_its_absence_when_it_is_due() {
        let start = Instant::now();
        let judge = |pulse: Option<&Pulse>, now| {
            Evidence { since: start, interval: INTERVAL, plan_revision: "r2", pulse }.judge(now)
        };
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
            (flawed(|p| p.canary = Some(INTERVAL * 3 + S)), Unproven::StaleCanary { age: Some(INTERVAL * 3 + S + S) }),
            (flawed(|p| p.canary = None), Unproven::StaleCanary { age: None }),
        ] {
            assert_eq!(judge(Some(&pulse), early), PathState::Unknown, "{flaw:?}");
            assert_eq!(judge(Some(&pulse), due + S), PathState::Unproven(flaw));
        }
    }
}
