//! Accepted state of KCP's releases, persisted in a ConfigMap of KCP. A new process thereby detects changes that
//! happened while none was running, and neither restarts a roll-out nor drops it. Held removals are confirmed by an
//! annotation of the same ConfigMap, which names them.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use tidewatch_api::names::annotation;

use super::removal_guard::{GuardDecision, HeldRemoval, HeldRemovals, LossCause, LostReleases, ModuleState, Releases};

/// Key of the accepted state, [`Releases`] as JSON.
const ACCEPTED: &str = "accepted";
/// Key of the removals that wait for a confirmation, as a list in JSON.
const HELD: &str = "held";
/// Key of the hold of every removal while the accepted state is lost, as JSON.
const LOST: &str = "lost";

/// Relevance of an observed ConfigMap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// The next decision may be another one.
    pub is_input: bool,
    /// The data is not that of the last observation or write.
    pub is_other: bool,
}

/// Accepted state, and the data last seen in the ConfigMap.
#[derive(Debug, Default)]
pub struct Ledger {
    /// `None` as long as no state was accepted.
    pub accepted: Option<Releases>,
    /// Removals that the ConfigMap's annotation confirms.
    pub confirmed: BTreeSet<String>,
    /// Stored state that cannot be parsed. It stays in the ConfigMap until a state is accepted.
    unreadable: Option<String>,
    written: Option<BTreeMap<String, String>>,
    /// See [`Self::was_stored`].
    was_stored: bool,
}

impl Ledger {
    /// Returns whether the ConfigMap has had a decision of the removal guard since this process started: an accepted state, or the
    /// hold of every removal. Until then no Kyma may be marked as reconciled: a reconciled Kyma and no stored state would mean that the
    /// state was lost.
    pub const fn was_stored(&self) -> bool {
        self.was_stored
    }

    /// Observes the ConfigMap. Its accepted state is adopted only by a process that has none of its own yet. Returns
    /// whether it was adopted, or carries a new confirmation, or other data.
    pub fn observe(&mut self, map: Option<&ConfigMap>) -> Observed {
        let before = self.written.take();
        self.written = map.map(|map| map.data.clone().unwrap_or_default());
        let has_decision = |data: &BTreeMap<_, _>| data.contains_key(ACCEPTED) || data.contains_key(LOST);
        self.was_stored |= self.written.as_ref().is_some_and(has_decision);
        let mut adopted = false;
        if self.accepted.is_none() {
            self.unreadable = None;
            let stored = self.written.as_ref().and_then(|data| data.get(ACCEPTED));
            match stored.map(|text| (text, serde_json::from_str(text))) {
                Some((_, Ok(accepted))) => (self.accepted, adopted) = (Some(accepted), true),
                Some((text, Err(error))) => {
                    tracing::warn!(%error, "The accepted state of the releases cannot be parsed");
                    self.unreadable = Some(text.clone());
                }
                None => {}
            }
        }
        let annotation = map.and_then(|map| map.annotations().get(annotation::CONFIRM));
        let confirmed = annotation.map(|text| confirmations(text)).unwrap_or_default();
        let moved = !confirmed.is_subset(&self.confirmed);
        self.confirmed = confirmed;
        Observed { is_input: moved || adopted, is_other: self.written != before }
    }

    /// Adopts the stored state, in a process that does not decide. Without a valid one, the last state stays.
    pub fn follow(&mut self) {
        let stored = self.written.as_ref().and_then(|data| data.get(ACCEPTED));
        if let Some(accepted) = stored.and_then(|text| serde_json::from_str(text).ok()) {
            self.accepted = Some(accepted);
        }
    }

    /// Modules for which the replica that decides has not stored its decision yet, by the decision of one that does not.
    pub fn undecided(&self, decision: &GuardDecision) -> BTreeSet<String> {
        let stored = self.written.as_ref().and_then(|data| data.get(HELD));
        let stored: Vec<HeldRemoval> = stored.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let is_stored = |removal: &&HeldRemoval| stored.iter().any(|stored| stored.change == removal.change);
        let held = decision.held.removals.iter().filter(|removal| !is_stored(removal));
        let accepted = self.accepted.as_ref();
        let none = ModuleState::default();
        let state = |module: &String| accepted.and_then(|accepted| accepted.get(module)).unwrap_or(&none);
        let differs = |(module, next): &(&String, &ModuleState)| state(module).without_times() != next.without_times();
        let changed = decision.accepted.iter().filter(differs).map(|(module, _)| module.clone());
        let gone = accepted.into_iter().flat_map(BTreeMap::keys);
        let gone = gone.filter(|module| !decision.accepted.contains_key(*module)).cloned();
        changed.chain(gone).chain(held.map(|removal| removal.module.clone())).collect()
    }

    /// Why no accepted state was adopted.
    pub const fn loss(&self) -> LossCause {
        if self.unreadable.is_some() { LossCause::Unreadable } else { LossCause::Missing }
    }

    /// Data to write to the ConfigMap; `None` if it is up to date, or while no state was accepted and none is `lost`.
    pub fn pending(&self, held: &HeldRemovals, lost: Option<&LostReleases>) -> Option<BTreeMap<String, String>> {
        let text = |value: serde_json::Result<String>| value.expect("plain data with string keys");
        let accepted = self.accepted.as_ref().map(|accepted| text(serde_json::to_string(accepted)));
        if accepted.is_none() && lost.is_none() {
            return None;
        }
        let held = (!held.is_empty()).then(|| text(serde_json::to_string(&held.removals)));
        let lost = lost.map(|lost| text(serde_json::to_string(lost)));
        let values = [(ACCEPTED, accepted.or_else(|| self.unreadable.clone())), (HELD, held), (LOST, lost)];
        let data: BTreeMap<_, _> =
            values.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        (self.written.as_ref() != Some(&data)).then_some(data)
    }

    /// Held removals as stored in the ConfigMap.
    pub fn held(map: Option<&ConfigMap>) -> Vec<HeldRemoval> {
        let stored = map.and_then(|map| map.data.as_ref()?.get(HELD));
        stored.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }

    /// Hold of every removal as stored in the ConfigMap.
    pub fn lost(map: Option<&ConfigMap>) -> Option<LostReleases> {
        serde_json::from_str(map?.data.as_ref()?.get(LOST)?).ok()
    }

    /// Records the data that were written.
    pub fn mark_written(&mut self, data: BTreeMap<String, String>) {
        self.written = Some(data);
        self.was_stored = true;
    }
}

/// Identifiers that a confirmation names, separated by commas or spaces.
pub fn confirmations(text: &str) -> BTreeSet<String> {
    text.split([',', ' ']).filter(|id| !id.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{
        removal_guard::{Audience, ModuleState, Part},
        target::{ChannelTarget, VisibilityLabels},
    };

    fn map(data: BTreeMap<String, String>, confirmed: Option<&str>) -> ConfigMap {
        let mut map = ConfigMap { data: Some(data), ..ConfigMap::default() };
        map.metadata.annotations =
            confirmed.map(|change| BTreeMap::from([(annotation::CONFIRM.to_owned(), change.to_owned())]));
        map
    }

    #[test]
    fn next_process_continues_from_the_stored_state() {
        let to = ChannelTarget {
            version: "1.0.0".to_owned(),
            labels: VisibilityLabels::default(),
            since: Some(7),
            from: None,
        };
        let versions = BTreeMap::from([("1.0.0".to_owned(), VisibilityLabels::default())]);
        let channels = BTreeMap::from([("fast".to_owned(), to)]);
        let component = Some("example.com/a".to_owned());
        let facts = ModuleState { audience: Audience::All, component, channels, versions, ..ModuleState::default() };
        let mut ledger = Ledger { accepted: Some(Releases::from([("a".to_owned(), facts)])), ..Ledger::default() };
        let none = HeldRemovals::default();
        let data = ledger.pending(&none, None).unwrap();
        assert!(!ledger.was_stored());
        ledger.mark_written(data.clone());
        assert!(ledger.was_stored());
        assert_eq!(ledger.pending(&none, None), None);
        let removal =
            HeldRemoval { change: "c".to_owned(), module: "a".to_owned(), part: Part::Module, runtimes: 4, of: 9 };
        let held = HeldRemovals { removals: vec![removal.clone()], ..HeldRemovals::default() };
        let stored = ledger.pending(&held, None).unwrap();
        assert_eq!(Ledger::held(Some(&map(stored, None))), [removal]);

        let mut next = Ledger::default();
        next.observe(None);
        next.observe(Some(&map(BTreeMap::new(), None)));
        assert!(!next.was_stored(), "an empty ConfigMap has no decision");
        assert!(next.observe(Some(&map(data.clone(), None))).is_input, "the state is adopted");
        assert!(next.was_stored());
        assert!(!next.observe(Some(&map(data.clone(), None))).is_input);
        assert_eq!((&next.accepted, next.pending(&none, None)), (&ledger.accepted, None));
        assert!(next.observe(Some(&map(data.clone(), Some("c")))).is_input);
        assert!(!next.observe(Some(&map(data.clone(), Some("c")))).is_input, "the confirmation was already observed");
        assert!(next.observe(Some(&map(data.clone(), Some("c, d")))).is_input, "a second one");
        assert_eq!(next.confirmed, ["c", "d"].map(str::to_owned).into());
        assert!(!next.observe(Some(&map(data, Some("d")))).is_input, "one was removed");
        assert!(!next.observe(None).is_input && next.was_stored());
        assert!(next.accepted.is_some() && next.pending(&none, None).is_some(), "the ConfigMap is written again");
    }

    #[test]
    fn unreadable_state_is_kept_until_another_one_is_accepted() {
        let mut ledger = Ledger::default();
        let none = HeldRemovals::default();
        assert_eq!(ledger.loss(), LossCause::Missing);
        let stored = BTreeMap::from([(ACCEPTED.to_owned(), "{".to_owned())]);
        assert!(!ledger.observe(Some(&map(stored, None))).is_input);
        assert_eq!(
            (&ledger.accepted, ledger.loss(), ledger.pending(&none, None)),
            (&None, LossCause::Unreadable, None)
        );
        let lost = LostReleases { change: "c".to_owned(), cause: ledger.loss() };
        let data = ledger.pending(&none, Some(&lost)).unwrap();
        assert_eq!((&*data[ACCEPTED], Ledger::lost(Some(&map(data.clone(), None)))), ("{", Some(lost.clone())));
        // The next process finds the same.
        let mut next = Ledger::default();
        let _ = next.observe(Some(&map(data, None)));
        assert!(next.was_stored(), "the hold is a decision");
        assert_eq!((next.loss(), next.pending(&none, Some(&lost))), (LossCause::Unreadable, None));
        // An operator restores it.
        assert!(next.observe(Some(&map(BTreeMap::from([(ACCEPTED.to_owned(), "{}".to_owned())]), None))).is_input);
        assert_eq!(next.accepted, Some(Releases::new()));
    }
}
