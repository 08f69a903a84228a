//! Pace of sweeps under contract v2, where each object of a list is a request of its own. Changes do not wait for it.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Core, State};

/// Admits one object per interval, of one watch after the other.
#[derive(Debug)]
pub(super) struct Pace {
    interval: Duration,
    /// Earliest time of the next object.
    next: Option<Instant>,
    /// Watch of the last object.
    served: Option<Arc<str>>,
}

impl Pace {
    fn new(per_second: NonZeroU32) -> Self {
        Self { interval: Duration::from_secs(1) / per_second.get(), next: None, served: None }
    }
}

impl Core {
    /// Limits the rate at which objects are sent again that have not changed, by contract v2 alone: to this number per
    /// second for all watches.
    #[must_use]
    pub fn paced(self, per_second: NonZeroU32) -> Self {
        self.with(|state| state.pace = Some(Pace::new(per_second)));
        self
    }
}

impl State {
    /// Enqueues the next object of a sweep if one is due; without a pace, as many as fit. A watch with a waiting event
    /// has no turn: a listener that fails must not accumulate objects, which would follow each other at once later.
    pub(super) fn sweep_paced(&mut self, now: Instant) {
        let Some(pace) = &mut self.pace else { return self.sweep() };
        if pace.next.is_some_and(|next| next > now) {
            return;
        }
        let names = self.outbox.idle_sweeps();
        let after = |name: &&Arc<str>| pace.served.as_ref().is_none_or(|served| *name > served);
        let Some(name) = names.iter().find(after).or(names.first()) else { return };
        let Some(watched) = self.watches.get(name) else { return };
        (pace.next, pace.served) = (Some(now + pace.interval), Some(name.clone()));
        self.outbox.sweep(name, 1, &watched.index);
    }

    /// Time of the next object of a sweep; `None` if none waits for the pace.
    pub(super) fn sweep_due(&self, now: Instant) -> Option<Instant> {
        let next = self.pace.as_ref()?.next.unwrap_or(now);
        (!self.outbox.idle_sweeps().is_empty()).then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_api::plan::Plan;

    use super::*;
    use crate::{
        core::{ObjectState, Version, WatchId},
        telemetry::Metrics,
    };

    const RATE: NonZeroU32 = NonZeroU32::new(2).unwrap();
    const INTERVAL: Duration = Duration::from_millis(500);

    fn seen(version: u64) -> ObjectState {
        ObjectState { uid: "u".into(), version: Version::Number(version), generation: None, metadata: 0 }
    }

    /// One watch for each manager, with these objects.
    fn core<const N: usize>(managers: [(&str, &[&str]); N]) -> (Core, [WatchId; N]) {
        let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default()).paced(RATE);
        let watches = managers.map(|(manager, _)| {
            json!({"name": manager, "group": "g", "version": "v1", "resource": "things", "field": "spec",
                "manager": manager, "work": ["kyma"]})
        });
        let plan = Plan::parse(&json!({"revision": "1", "watches": watches.to_vec()}).to_string()).unwrap();
        let mut started = core.follow(&plan).started;
        started.sort_by_key(|started| managers.iter().position(|(manager, _)| *manager == started.planned.name));
        for (started, (_, names)) in started.iter().zip(managers) {
            core.list_begun(started.id);
            let objects = names.iter().map(|name| (format!("ns/{name}").into(), seen(1))).collect();
            core.listed(started.id, objects, Instant::now());
            core.list_complete(started.id, Instant::now());
        }
        let ids: Vec<_> = started.iter().map(|started| started.id).collect();
        (core, ids.try_into().unwrap())
    }

    /// Sends and settles everything that is due; returns the names.
    fn sent(core: &Core, now: Instant) -> Vec<String> {
        let next = || core.single(now, &|_, due| due);
        std::iter::from_fn(next)
            .inspect(|single| core.single_accepted(&single.manager))
            .map(|single| single.event.name)
            .collect()
    }

    fn due(core: &Core, now: Instant) -> Option<Instant> {
        core.single_due(now, &|_, due| due)
    }

    #[test]
    fn objects_of_a_list_are_spaced_and_changes_are_not() {
        let (now, (core, [id])) = (Instant::now(), core([("m", &["a", "b", "c", "d"])]));
        assert_eq!((due(&core, now), sent(&core, now)), (Some(now), vec!["a".to_owned()]));
        assert_eq!((due(&core, now), sent(&core, now)), (Some(now + INTERVAL), vec![]));
        core.present(id, "ns/d", seen(2), now);
        assert_eq!((due(&core, now), sent(&core, now)), (Some(now), vec!["d".to_owned()]));
        for (n, name) in [(1, "b"), (2, "c"), (3, "d")] {
            let now = now + INTERVAL * n;
            assert_eq!((due(&core, now), sent(&core, now)), (Some(now), vec![name.to_owned()]));
        }
        assert_eq!(due(&core, now + INTERVAL * 4), None);
    }

    #[test]
    fn objects_do_not_accumulate_for_a_failing_listener_and_others_have_their_turn() {
        let (now, (core, _)) = (Instant::now(), core([("m", &["a", "b", "c", "d"]), ("n", &["x", "y"])]));
        let mut names = Vec::new();
        let later = now + Duration::from_secs(3_600);
        let fails = |manager: &str, due: Instant| if manager == "m" { later } else { due };
        assert_eq!(core.single(now, &|_, due| due).unwrap().event.name, "a");
        core.single_failed("m");
        for n in 1..10 {
            while let Some(single) = core.single(now + INTERVAL * n, &fails) {
                core.single_accepted(&single.manager);
                names.push(single.event.name);
            }
        }
        assert_eq!(names, ["x", "y"]);
        assert_eq!(sent(&core, later), ["a", "b"], "the one that waited, and the next one");
        assert_eq!(due(&core, later), Some(later + INTERVAL));
    }
}
