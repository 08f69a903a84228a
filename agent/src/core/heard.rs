//! What the receiver said of this agent's heartbeats, for whoever asks how the path stands.

use tidewatch_shared::{exchange::HeartbeatAnswer, identity::Epoch};
use tokio::time::Instant;

use crate::status::Answered;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// A heartbeat was made; in contract v2 there are none.
    pub(super) made: bool,
    last: Option<Last>,
    /// Watches that it asked to be told anew, each as often as it asked.
    pub(super) resends: u64,
}

/// The last answer.
#[derive(Debug)]
struct Last {
    at: Instant,
    epoch: Epoch,
    answer: HeartbeatAnswer,
}

impl Heard {
    /// A heartbeat of an epoch was answered.
    pub(super) fn answered(&mut self, now: Instant, epoch: Epoch, answer: &HeartbeatAnswer) {
        self.last = Some(Last { at: now, epoch, answer: answer.clone() });
    }

    /// The last answer. Of another epoch than the one that is spoken in now, what it says of events is void.
    pub(super) fn told(&self, epoch: Epoch, now: Instant) -> Option<Answered> {
        let Last { at, epoch: of, answer } = self.last.as_ref()?;
        let is_of_now = *of == epoch;
        Some(Answered {
            seconds_ago: now.saturating_duration_since(*at).as_secs(),
            interval_seconds: answer.heartbeat_seconds,
            plan_revision: answer.plan_revision.clone(),
            settled: is_of_now.then(|| answer.settled.clone()),
            resend: is_of_now.then(|| answer.resend.clone()),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use tidewatch_shared::{exchange::EventsAnswer, plan::Plan};

    use super::*;
    use crate::{core::Core, telemetry::Metrics};

    fn answer(more: &Value) -> HeartbeatAnswer {
        let mut answer = json!({"instance": "00000000000000ff", "settled": {"w": 7}, "heartbeatSeconds": 30,
            "planRevision": "p", "serverTime": ""});
        answer.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(answer).unwrap()
    }

    #[test]
    fn what_is_said_of_events_holds_in_its_epoch_alone() {
        let (mut heard, at) = (Heard::default(), Instant::now());
        assert_eq!(heard.told(Epoch::new(1), at), None);
        heard.answered(at, Epoch::new(1), &answer(&json!({"resend": ["v"]})));
        let told = Answered {
            seconds_ago: 5,
            interval_seconds: 30,
            plan_revision: Some("p".into()),
            settled: Some([("w".to_owned(), 7)].into()),
            resend: Some(vec!["v".into()]),
        };
        let now = at + Duration::from_secs(5);
        assert_eq!(heard.told(Epoch::new(1), now), Some(told.clone()));
        assert_eq!(heard.told(Epoch::new(2), now), Some(Answered { settled: None, resend: None, ..told }));
    }

    #[test]
    fn what_the_receiver_asks_for_and_what_it_lacks_is_counted() {
        let (core, now) = (Core::new("r-1".parse().unwrap(), 100, Metrics::default()), Instant::now());
        let watch = json!({"name": "w", "group": "g", "version": "v1", "resource": "things", "field": "spec",
            "manager": "m", "work": ["kyma"]});
        let plan = Plan::parse(&json!({"revision": "p", "watches": [watch]}).to_string()).unwrap();
        let id = core.follow(&plan).started[0].id;
        core.list_begun(id);
        core.list_complete(id, now);
        assert!(!core.account(now).beats);
        let epoch = core.plain_heartbeat().epoch;
        core.heartbeat_answered(now, epoch, &answer(&json!({"settled": {}, "resend": ["w", "of another plan"]})));
        let account = core.account(now);
        assert_eq!((account.beats, account.resends, account.gaps, account.accepted), (true, 1, 0, 0));

        let batch = core.batch(now).unwrap();
        let (instance, settled, refused) = (answer(&json!({})).instance, [].into(), Vec::new());
        let accepted = EventsAnswer { instance, accepted: 1, since: 1, settled, refused, heartbeat_seconds: 30 };
        core.answered(now, batch.epoch, &accepted);
        assert_eq!(core.account(now).accepted, 1);
        core.heartbeat_answered(now, batch.epoch, &answer(&json!({"settled": {}, "since": 2})));
        let account = core.account(now);
        assert_eq!((account.resends, account.gaps, account.accepted), (1, 1, 0), "a new epoch has begun");
        assert!(account.heartbeat.is_some_and(|heartbeat| heartbeat.resend.is_none()));
    }
}
