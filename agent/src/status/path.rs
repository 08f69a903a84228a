//! How the way to the receiver stands by what its agent knows: what it says in heartbeats, and what it is answered.

use serde::{Deserialize, Serialize};
use tidewatch_shared::heartbeat::{EVIDENCE_INTERVALS, failing};

use crate::core::Account;

/// See [`super::Runtime::path`]. The reasons are those of the condition `EventPath`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Path {
    /// Whether it is proven.
    pub state: Proof,
    /// Why, or why not: one word.
    pub reason: String,
    /// What more is known of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// As conditions spell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Proof {
    /// It is.
    True,
    /// Something speaks against it.
    False,
    /// No heartbeat was made yet; in contract v2 there are none.
    Unknown,
}

impl Proof {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

impl Path {
    /// `canary` is the age of the canary in seconds. The order is that in which the receiver looks, and the first that holds is told; but at
    /// once, where the receiver first waits for better evidence.
    pub(super) fn of(account: &Account, canary: Option<u64>) -> Self {
        let Some(answer) = &account.heartbeat else {
            return if account.beats {
                Self::broken("NoHeartbeat", Some("none was answered yet".to_owned()))
            } else {
                Self { state: Proof::Unknown, reason: "Unknown".to_owned(), message: None }
            };
        };
        let allowed = u64::from(answer.interval_seconds.max(1)) * u64::from(EVIDENCE_INTERVALS);
        if answer.seconds_ago > allowed {
            return Self::broken("NoHeartbeat", None);
        }
        if answer.plan_revision.is_some() && account.plan_revision != answer.plan_revision {
            let refused = account.plan_error.as_ref();
            return Self::broken("OldPlan", refused.map(|why| format!("the agent refuses the plan: {why}")));
        }
        if let Some((watch, error)) = failing(&account.watches) {
            let message = error.map_or_else(|| format!("{watch} is not listed"), |error| format!("{watch}: {error}"));
            return Self::broken("FailingWatch", Some(message));
        }
        if let Some(watch) = answer.resend.iter().flatten().next() {
            return Self::broken("Diverged", Some(watch.clone()));
        }
        match canary {
            None => Self::broken("StaleCanary", Some("the canary never came back".to_owned())),
            Some(age) if age > allowed => Self::broken("StaleCanary", None),
            Some(_) => Self { state: Proof::True, reason: "Proven".to_owned(), message: None },
        }
    }

    fn broken(reason: &str, message: Option<String>) -> Self {
        Self { state: Proof::False, reason: reason.to_owned(), message }
    }

    /// For people.
    pub(super) fn line(&self) -> String {
        let Self { state, reason, message } = self;
        let message = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
        format!("{}, {reason}{message}", state.as_str())
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_shared::{heartbeat::WatchState, identity::Epoch};

    use super::*;
    use crate::status::Answered;

    fn account() -> Account {
        Account {
            runtime: "r-1".parse().unwrap(),
            epoch: Epoch::new(1),
            sequence: 7,
            accepted: 7,
            instance: None,
            beats: true,
            heartbeat: Some(Answered {
                seconds_ago: 90,
                interval_seconds: 30,
                plan_revision: Some("p".into()),
                settled: None,
                resend: Some(Vec::new()),
            }),
            plan_revision: Some("p".into()),
            plan_error: None,
            waiting: 0,
            parked: 0,
            unsettled: 0,
            gaps: 0,
            resends: 0,
            watches: vec![WatchState {
                name: "pods".into(),
                objects: 1,
                digest: None,
                listed_seconds_ago: Some(5),
                alive_seconds_ago: Some(5),
                coarse: false,
                error: None,
            }],
        }
    }

    fn told(change: impl FnOnce(&mut Account), canary: Option<u64>) -> String {
        let mut account = account();
        change(&mut account);
        Path::of(&account, canary).line()
    }

    #[test]
    fn the_first_that_speaks_against_it_is_told() {
        assert_eq!(told(|_| {}, Some(90)), "True, Proven");
        assert_eq!(told(|_| {}, Some(91)), "False, StaleCanary");
        assert_eq!(told(|_| {}, None), "False, StaleCanary: the canary never came back");
        let asked = |account: &mut Account| {
            account.heartbeat.as_mut().unwrap().resend = Some(vec!["pods".into()]);
        };
        assert_eq!(told(asked, None), "False, Diverged: pods");
        let fails = |account: &mut Account| account.watches[0].error = Some("403".into());
        let both = |account: &mut Account| (asked(account), fails(account)).0;
        assert_eq!(told(both, Some(0)), "False, FailingWatch: pods: 403");
        let unlisted = |account: &mut Account| account.watches[0].listed_seconds_ago = None;
        assert_eq!(told(unlisted, Some(0)), "False, FailingWatch: pods is not listed");
        let old = |account: &mut Account| account.plan_revision = None;
        assert_eq!(told(|account| (old(account), fails(account)).0, Some(0)), "False, OldPlan");
        let refused = |account: &mut Account| (old(account), account.plan_error = Some("no".into())).0;
        assert_eq!(told(refused, Some(0)), "False, OldPlan: the agent refuses the plan: no");
        let silent = |account: &mut Account| account.heartbeat.as_mut().unwrap().seconds_ago = 91;
        assert_eq!(told(|account| (silent(account), old(account)).0, Some(0)), "False, NoHeartbeat");
    }

    #[test]
    fn without_an_answer_nothing_is_proven_and_without_a_heartbeat_nothing_is_known() {
        let unanswered = |account: &mut Account| account.heartbeat = None;
        assert_eq!(told(unanswered, Some(0)), "False, NoHeartbeat: none was answered yet");
        assert_eq!(told(|account| (unanswered(account), account.beats = false).0, Some(0)), "Unknown, Unknown");
    }

    #[test]
    fn a_receiver_that_names_no_plan_is_not_contradicted() {
        let unnamed = |account: &mut Account| account.heartbeat.as_mut().unwrap().plan_revision = None;
        assert_eq!(told(unnamed, Some(0)), "True, Proven");
    }
}
