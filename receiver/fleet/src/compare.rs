//! Digest comparison of one epoch: expected digest per watch, and mismatches.

use tidewatch_contract::{
    digest::Digest,
    heartbeat::{Heartbeat, MAX_WATCHES},
};
use tidewatch_kit::short_map::ShortMap;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Expected {
    /// The next digest becomes the expectation.
    #[default]
    Unset,
    /// First digest plus the delta of every event since.
    Digest(Digest),
    /// A `watch.changed` is requested; nothing is expected until one with a sequence above `above` is accepted. `by` is
    /// the lowest such sequence received.
    Requested { reason: ResendReason, above: u64, by: Option<u64> },
}

/// Reason of a requested `watch.changed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResendReason {
    /// Digest mismatch.
    Differs,
    /// Events that the agent has sent are not recorded here.
    Unknown,
}

/// Digests of a heartbeat and the sequence they describe.
#[derive(Clone, Debug)]
struct PendingDigests {
    sequence: u64,
    digests: Vec<(String, Digest)>,
}

/// Expected digests of the epoch that counts. Bounded by the watches of one heartbeat.
#[derive(Clone, Debug, Default)]
pub(super) struct Compare {
    watches: ShortMap<String, Expected>,
    /// Newest heartbeat, while it is ahead of the accepted sequence.
    pending: Option<PendingDigests>,
}

impl Compare {
    /// Drops all expectations, because a sequence was skipped and the sums no longer hold.
    pub(super) fn reset(&mut self) {
        self.unset(|_, expected| matches!(expected, Expected::Digest(_)));
    }

    fn unset(&mut self, is_void: impl Fn(&str, &Expected) -> bool) {
        for (_, expected) in self.watches.iter_mut().filter(|(name, expected)| is_void(name, expected)) {
            *expected = Expected::Unset;
        }
    }

    /// Adds the delta of an event recorded for the first time.
    pub(super) fn apply_delta(&mut self, watch: &str, delta: Digest) {
        if let Some(Expected::Digest(digest)) = self.watches.get_mut(watch) {
            *digest += delta;
        }
    }

    /// Notes a recorded `watch.changed`.
    pub(super) fn relisted(&mut self, watch: &str, sequence: u64) {
        if let Some(Expected::Requested { above, by, .. }) = self.watches.get_mut(watch)
            && sequence > *above
        {
            *by = Some(by.map_or(sequence, |first| first.min(sequence)));
        }
    }

    /// Requests all planned watches of a heartbeat, because events that the agent sent up to its sequence are not
    /// recorded here and would never settle. With its next event the agent learns which ones are missing.
    pub(super) fn request_unknown(&mut self, heartbeat: &Heartbeat, planned: impl Fn(&str) -> bool) {
        let named = heartbeat.watches.iter().map(|watch| &watch.name).filter(|name| planned(name)).take(MAX_WATCHES);
        for name in named {
            let expected = self.watches.entry(name.as_str());
            if !matches!(expected, Expected::Requested { .. }) {
                *expected = Expected::Requested { reason: ResendReason::Unknown, above: heartbeat.sequence, by: None };
            }
        }
    }

    /// Requests a watch whose events up to this sequence may be lost here, although they were accepted.
    pub(super) fn request(&mut self, watch: &str, above: u64) {
        let expected = self.watches.entry(watch);
        if !matches!(expected, Expected::Requested { by: None, .. }) {
            *expected = Expected::Requested { reason: ResendReason::Unknown, above, by: None };
        }
    }

    /// True if a `watch.changed` of the watch is requested and not accepted yet.
    pub(super) fn is_requested(&self, watch: &str) -> bool {
        matches!(self.watches.get(watch), Some(Expected::Requested { .. }))
    }

    /// Withdraws requests for watches that left the plan: no agent would answer them.
    pub(super) fn replan(&mut self, planned: impl Fn(&str) -> bool) {
        self.unset(|name, expected| matches!(expected, Expected::Requested { .. }) && !planned(name));
    }

    /// Returns true if the newest heartbeat is ahead of the accepted sequence.
    pub(super) fn is_behind(&self, accepted: u64) -> bool {
        self.pending.as_ref().is_some_and(|pending| pending.sequence > accepted)
    }

    /// Stores the digests of a heartbeat, replacing earlier ones, until [`Self::check`] can compare them. Names that are
    /// not planned are ignored: an agent may invent any number of them.
    pub(super) fn set_pending(&mut self, heartbeat: &Heartbeat, planned: impl Fn(&str) -> bool) {
        let named = heartbeat.watches.iter().filter(|watch| planned(&watch.name)).take(MAX_WATCHES);
        let digests = named.filter_map(|watch| Some((watch.name.clone(), watch.digest?))).collect();
        self.pending = Some(PendingDigests { sequence: heartbeat.sequence, digests });
    }

    /// Compares the pending digests if they describe exactly the accepted sequence and there is no gap. Returns the
    /// planned watches that differ.
    pub(super) fn check(&mut self, accepted: u64, gapless: bool, planned: impl Fn(&str) -> bool) -> Vec<String> {
        self.unset(|_, expected| matches!(expected, Expected::Requested { by: Some(by), .. } if *by <= accepted));
        let due =
            self.pending.take_if(|pending| pending.sequence < accepted || (pending.sequence == accepted && gapless));
        let Some(pending) = due.filter(|pending| pending.sequence == accepted) else { return Vec::new() };
        if self.watches.len() > MAX_WATCHES {
            // Names missing from the newest heartbeat are dropped; a name that returns starts without expectation.
            self.watches.retain(|name, _| pending.digests.iter().any(|(pending, _)| pending == name));
        }
        let mut differing = Vec::new();
        for (name, digest) in pending.digests {
            match self.watches.get(&name) {
                Some(Expected::Requested { .. }) => continue,
                Some(Expected::Digest(expected)) if *expected == digest => continue,
                Some(Expected::Digest(_)) if planned(&name) => {
                    self.watches.insert(
                        name.clone(),
                        Expected::Requested { reason: ResendReason::Differs, above: accepted, by: None },
                    );
                    differing.push(name);
                }
                Some(Expected::Digest(_) | Expected::Unset) | None => {
                    self.watches.insert(name, Expected::Digest(digest));
                }
            }
        }
        differing
    }

    /// Watches for which a `watch.changed` is requested.
    pub(super) fn resend(&self) -> Vec<String> {
        let requested = self.watches.iter().filter(|(_, expected)| matches!(expected, Expected::Requested { .. }));
        requested.map(|(name, _)| name.clone()).collect()
    }

    /// First watch of [`Self::resend`] with a digest mismatch.
    pub(super) fn diverged(&self) -> Option<&str> {
        let differs =
            |expected: &Expected| matches!(expected, Expected::Requested { reason: ResendReason::Differs, .. });
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

    /// Compares one heartbeat at the accepted sequence.
    fn compare_heartbeat(compare: &mut Compare, sequence: u64, digest: u128) -> Vec<String> {
        compare.set_pending(&heartbeat(sequence, &[("w", digest)]), |_| true);
        compare.check(sequence, true, |_| true)
    }

    #[test]
    fn first_digest_plus_deltas_is_expected() {
        let mut compare = Compare::default();
        assert!(compare_heartbeat(&mut compare, 3, 10).is_empty());
        compare.apply_delta("w", Digest::new(5));
        assert!(compare_heartbeat(&mut compare, 4, 15).is_empty());
        assert_eq!(compare_heartbeat(&mut compare, 4, 16), ["w"]);
        assert_eq!(compare.resend(), ["w"]);
        assert!(compare_heartbeat(&mut compare, 4, 17).is_empty(), "a mismatch is reported once");
    }

    #[test]
    fn resend_ends_with_an_accepted_list_of_a_higher_sequence() {
        let mut compare = Compare::default();
        compare_heartbeat(&mut compare, 3, 10);
        assert_eq!(compare_heartbeat(&mut compare, 3, 11), ["w"]);
        compare.relisted("w", 3);
        compare.check(3, true, |_| true);
        assert_eq!(compare.resend(), ["w"], "no higher sequence");
        compare.relisted("w", 6);
        compare.relisted("w", 5);
        compare.check(4, false, |_| true);
        assert_eq!(compare.resend(), ["w"], "recorded above a gap, not accepted");
        compare.check(5, true, |_| true);
        assert!(compare.resend().is_empty());
        assert!(compare_heartbeat(&mut compare, 5, 99).is_empty());
        assert_eq!(compare_heartbeat(&mut compare, 5, 98), ["w"]);
    }

    #[test]
    fn heartbeat_ahead_waits_and_one_behind_is_dropped() {
        let mut compare = Compare::default();
        compare_heartbeat(&mut compare, 1, 10);
        compare.set_pending(&heartbeat(4, &[("w", 13)]), |_| true);
        compare.set_pending(&heartbeat(3, &[("w", 12)]), |_| true);
        for (sequence, delta) in [(2, 1), (3, 1)] {
            compare.apply_delta("w", Digest::new(delta));
            assert!(compare.check(sequence, true, |_| true).is_empty());
        }
        assert!(compare.pending.is_none(), "the newest heartbeat was compared");
        compare.set_pending(&heartbeat(2, &[("w", 77)]), |_| true);
        assert!(compare.check(3, true, |_| true).is_empty());
        assert!(compare.pending.is_none(), "behind");
        compare.set_pending(&heartbeat(3, &[("w", 77)]), |_| true);
        assert!(compare.check(3, false, |_| true).is_empty(), "not while there is a gap");
    }

    #[test]
    fn unplanned_watch_is_compared_but_never_requested() {
        let mut compare = Compare::default();
        compare_heartbeat(&mut compare, 1, 10);
        compare.set_pending(&heartbeat(1, &[("w", 11)]), |_| true);
        assert!(compare.check(1, true, |_| false).is_empty());
        assert!(compare_heartbeat(&mut compare, 1, 11).is_empty());
        compare.reset();
        assert!(compare_heartbeat(&mut compare, 1, 12).is_empty(), "a skipped sequence resets the expectation");
    }

    #[test]
    fn unknown_events_request_a_resend_without_a_mismatch() {
        let mut compare = Compare::default();
        compare.request_unknown(&heartbeat(7, &[("v", 1), ("w", 1), ("gone", 1)]), |name| name != "gone");
        assert_eq!((compare.resend(), compare.diverged()), (vec!["v".to_owned(), "w".to_owned()], None));
        compare.relisted("w", 7);
        compare.check(7, true, |_| true);
        assert_eq!(compare.resend().len(), 2, "no higher sequence");
        compare.relisted("w", 8);
        compare.check(8, true, |_| true);
        assert_eq!(compare.resend(), ["v"]);
        compare.replan(|name| name == "w");
        assert!(compare.resend().is_empty(), "no agent would answer");
    }

    #[test]
    fn watch_names_are_bounded() {
        let mut compare = Compare::default();
        for round in 0..5u64 {
            let names: Vec<_> = (0..MAX_WATCHES).map(|n| format!("{round}-{n}")).collect();
            compare
                .set_pending(&heartbeat(1, &names.iter().map(|name| (name.as_str(), 1)).collect::<Vec<_>>()), |_| true);
            compare.check(1, true, |_| true);
            assert!(compare.watches.len() <= 2 * MAX_WATCHES);
        }
    }
}
