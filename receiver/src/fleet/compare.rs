//! Digests of one epoch: what each watch's should be, and whose did not agree.

use tidewatch_shared::{
    digest::Digest,
    heartbeat::{Heartbeat, MAX_WATCHES},
};

use crate::base::short_map::ShortMap;

/// Watch names in plans have at most so many bytes; longer ones cannot be ours.
const MAX_NAME: usize = 253;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Expected {
    /// The next digest is taken as it is.
    #[default]
    Anew,
    /// The first digest taken and each later delta once.
    Is(Digest),
    /// It is asked for; until a `watch.changed` with a sequence higher than `above` (`by`) is accepted, nothing is expected.
    Asked { why: Why, above: u64, by: Option<u64> },
}

/// Why a watch is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// Its digest did not agree.
    Differs,
    /// What its agent has sent is not known here (any more).
    Forgotten,
}

/// The digests of a heartbeat, as of its sequence.
#[derive(Clone, Debug)]
struct Said {
    sequence: u64,
    digests: Vec<(String, Digest)>,
}

/// Only for the epoch whose heartbeats count. Bounded by what one heartbeat may name.
#[derive(Clone, Debug, Default)]
pub(super) struct Compare {
    watches: ShortMap<String, Expected>,
    /// The newest heartbeat, while it is ahead of what is accepted.
    waits: Option<Said>,
}

impl Compare {
    /// A sequence was skipped: sums that were kept prove nothing any more.
    pub(super) fn begin_anew(&mut self) {
        for (_, expected) in self.watches.iter_mut().filter(|(_, expected)| matches!(expected, Expected::Is(_))) {
            *expected = Expected::Anew;
        }
    }

    /// An event of the run was recorded for the first time.
    pub(super) fn moved(&mut self, watch: &str, delta: Digest) {
        if let Some(Expected::Is(digest)) = self.watches.get_mut(watch) {
            *digest += delta;
        }
    }

    /// A `watch.changed` was recorded.
    pub(super) fn listed(&mut self, watch: &str, sequence: u64) {
        if let Some(Expected::Asked { above, by, .. }) = self.watches.get_mut(watch)
            && sequence > *above
        {
            *by = Some(by.map_or(sequence, |first| first.min(sequence)));
        }
    }

    /// What the agent has sent up to the sequence of this heartbeat is not known here, so nothing would ever settle it: its planned
    /// watches are asked for. The next event shows the agent what was forgotten.
    pub(super) fn forgotten(&mut self, heartbeat: &Heartbeat, planned: impl Fn(&str) -> bool) {
        let named = heartbeat.watches.iter().map(|watch| &watch.name).filter(|name| planned(name)).take(MAX_WATCHES);
        for name in named {
            let expected = self.watches.entry(name.as_str());
            if !matches!(expected, Expected::Asked { .. }) {
                *expected = Expected::Asked { why: Why::Forgotten, above: heartbeat.sequence, by: None };
            }
        }
    }

    /// Another plan: what has left it is nobody's to tell any more.
    pub(super) fn replan(&mut self, planned: impl Fn(&str) -> bool) {
        for (_, expected) in self.watches.iter_mut().filter(|(name, _)| !planned(name)) {
            if matches!(expected, Expected::Asked { .. }) {
                *expected = Expected::Anew;
            }
        }
    }

    /// Whether the newest heartbeat spoke of more than what is accepted.
    pub(super) fn is_behind(&self, accepted: u64) -> bool {
        self.waits.as_ref().is_some_and(|said| said.sequence > accepted)
    }

    /// Takes the digests of a heartbeat; [`Self::check`] compares them when their time has come. The newest replaces any before it.
    pub(super) fn said(&mut self, heartbeat: &Heartbeat) {
        let named = heartbeat.watches.iter().filter(|watch| watch.name.len() <= MAX_NAME).take(MAX_WATCHES);
        let digests = named.filter_map(|watch| Some((watch.name.clone(), watch.digest?))).collect();
        self.waits = Some(Said { sequence: heartbeat.sequence, digests });
    }

    /// Compares what waits, if it speaks of exactly what is accepted and nothing is missing. Returns the planned watches that differ.
    pub(super) fn check(&mut self, accepted: u64, whole: bool, planned: impl Fn(&str) -> bool) -> Vec<String> {
        for (_, expected) in self.watches.iter_mut() {
            if matches!(expected, Expected::Asked { by: Some(by), .. } if *by <= accepted) {
                *expected = Expected::Anew;
            }
        }
        let due = self.waits.take_if(|said| said.sequence < accepted || (said.sequence == accepted && whole));
        let Some(said) = due.filter(|said| said.sequence == accepted) else { return Vec::new() };
        if self.watches.len() > MAX_WATCHES {
            // Names that the agent speaks of no more; should one return, it begins anew.
            self.watches.retain(|name, _| said.digests.iter().any(|(said, _)| said == name));
        }
        let mut differing = Vec::new();
        for (name, digest) in said.digests {
            match self.watches.get(&name) {
                Some(Expected::Asked { .. }) => continue,
                Some(Expected::Is(expected)) if *expected == digest => continue,
                Some(Expected::Is(_)) if planned(&name) => {
                    self.watches.insert(name.clone(), Expected::Asked { why: Why::Differs, above: accepted, by: None });
                    differing.push(name);
                }
                Some(Expected::Is(_) | Expected::Anew) | None => {
                    self.watches.insert(name, Expected::Is(digest));
                }
            }
        }
        differing
    }

    /// Watches of which a `watch.changed` is asked for.
    pub(super) fn resend(&self) -> Vec<String> {
        let asked = self.watches.iter().filter(|(_, expected)| matches!(expected, Expected::Asked { .. }));
        asked.map(|(name, _)| name.clone()).collect()
    }

    /// The first of [`Self::resend`] whose digest did not agree.
    pub(super) fn diverged(&self) -> Option<&str> {
        let differs = |expected: &Expected| matches!(expected, Expected::Asked { why: Why::Differs, .. });
        self.watches.iter().find(|(_, expected)| differs(expected)).map(|(name, _)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn heartbeat(sequence: u64, digests: &[(&str, u128)]) -> Heartbeat {
        let watches: Vec<_> = digests
            .iter()
            .map(|(name, digest)| json!({"name": name, "objects": 1, "digest": Digest::new(*digest)}))
            .collect();
        serde_json::from_value(json!({
            "epoch": "00000000000000aa", "sequence": sequence, "counter": 1, "waiting": 0, "parked": 0, "agentVersion": "1",
            "certificate": {"notAfter": "", "fingerprint": ""}, "watches": watches,
        }))
        .unwrap()
    }

    /// One heartbeat at what is accepted.
    fn beat(compare: &mut Compare, sequence: u64, digest: u128) -> Vec<String> {
        compare.said(&heartbeat(sequence, &[("w", digest)]));
        compare.check(sequence, true, |_| true)
    }

    #[test]
    fn the_first_digest_and_each_delta_are_expected() {
        let mut compare = Compare::default();
        assert!(beat(&mut compare, 3, 10).is_empty());
        compare.moved("w", Digest::new(5));
        assert!(beat(&mut compare, 4, 15).is_empty());
        assert_eq!(beat(&mut compare, 4, 16), ["w"]);
        assert_eq!(compare.resend(), ["w"]);
        assert!(beat(&mut compare, 4, 17).is_empty(), "a difference is found once");
    }

    #[test]
    fn a_resend_ends_with_an_accepted_list_of_a_higher_sequence_and_begins_anew() {
        let mut compare = Compare::default();
        beat(&mut compare, 3, 10);
        assert_eq!(beat(&mut compare, 3, 11), ["w"]);
        compare.listed("w", 3);
        compare.check(3, true, |_| true);
        assert_eq!(compare.resend(), ["w"], "no higher sequence");
        compare.listed("w", 6);
        compare.listed("w", 5);
        compare.check(4, false, |_| true);
        assert_eq!(compare.resend(), ["w"], "recorded above a hole, not accepted");
        compare.check(5, true, |_| true);
        assert!(compare.resend().is_empty());
        assert!(beat(&mut compare, 5, 99).is_empty());
        assert_eq!(beat(&mut compare, 5, 98), ["w"]);
    }

    #[test]
    fn a_heartbeat_ahead_waits_and_one_behind_is_dropped() {
        let mut compare = Compare::default();
        beat(&mut compare, 1, 10);
        compare.said(&heartbeat(4, &[("w", 13)]));
        compare.said(&heartbeat(3, &[("w", 12)]));
        for (sequence, delta) in [(2, 1), (3, 1)] {
            compare.moved("w", Digest::new(delta));
            assert!(compare.check(sequence, true, |_| true).is_empty());
        }
        assert!(compare.waits.is_none(), "the newest was compared");
        compare.said(&heartbeat(2, &[("w", 77)]));
        assert!(compare.check(3, true, |_| true).is_empty());
        assert!(compare.waits.is_none(), "behind");
        compare.said(&heartbeat(3, &[("w", 77)]));
        assert!(compare.check(3, false, |_| true).is_empty(), "not while something is missing");
    }

    #[test]
    fn what_is_not_planned_is_followed_but_never_asked_for() {
        let mut compare = Compare::default();
        beat(&mut compare, 1, 10);
        compare.said(&heartbeat(1, &[("w", 11)]));
        assert!(compare.check(1, true, |_| false).is_empty());
        assert!(beat(&mut compare, 1, 11).is_empty());
        compare.begin_anew();
        assert!(beat(&mut compare, 1, 12).is_empty(), "a skipped sequence begins anew");
    }

    #[test]
    fn what_was_forgotten_is_asked_for_and_is_no_difference() {
        let mut compare = Compare::default();
        compare.forgotten(&heartbeat(7, &[("v", 1), ("w", 1), ("gone", 1)]), |name| name != "gone");
        assert_eq!((compare.resend(), compare.diverged()), (vec!["v".to_owned(), "w".to_owned()], None));
        compare.listed("w", 7);
        compare.check(7, true, |_| true);
        assert_eq!(compare.resend().len(), 2, "no higher sequence");
        compare.listed("w", 8);
        compare.check(8, true, |_| true);
        assert_eq!(compare.resend(), ["v"]);
        compare.replan(|name| name == "w");
        assert!(compare.resend().is_empty(), "nobody is left to tell it");
    }

    #[test]
    fn names_have_a_bound() {
        let mut compare = Compare::default();
        for round in 0..5u64 {
            let names: Vec<_> = (0..MAX_WATCHES).map(|n| format!("{round}-{n}")).collect();
            compare.said(&heartbeat(1, &names.iter().map(|name| (name.as_str(), 1)).collect::<Vec<_>>()));
            compare.check(1, true, |_| true);
            assert!(compare.watches.len() <= 2 * MAX_WATCHES);
        }
    }
}
