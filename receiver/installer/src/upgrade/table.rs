//! Assesses each runtime over time, as input for the decisions of an upgrade.

use std::{collections::HashMap, time::Duration};

use tidewatch_api::{identity::RuntimeId, key::KymaKey};
use tidewatch_fleet::{PathState, table::RuntimeReport};
use tidewatch_rollout::rank;
use tokio::time::Instant;

use super::{
    Image, ImageDecision,
    handle::ObservedImage,
    members::{Member, Standing},
};

/// Observation of a runtime at one moment.
pub(super) struct Observation<'a> {
    pub(super) report: &'a RuntimeReport,
    pub(super) observed: Option<ObservedImage>,
    pub(super) decision: ImageDecision,
}

/// One row per Kyma that counts, so bounded by their number. Times are of this process: a new process grants every
/// runtime the full deadline.
#[derive(Debug, Default)]
pub(super) struct AssessmentTable {
    target: Option<Image>,
    rows: HashMap<KymaKey, Row>,
}

#[derive(Debug, Default)]
struct Row {
    rank: Option<u64>,
    image: Option<Image>,
    /// Start of the time in which the path was not proven.
    unproven_since: Option<Instant>,
    /// Start of the time in which the runtime lacked its assigned image, or its image was not observed.
    lacking_since: Option<Instant>,
    /// The path has been proven with this image.
    was_proven: bool,
}

impl AssessmentTable {
    /// Sets the target. Another target changes every rank.
    pub(super) fn set_target(&mut self, target: &Image) {
        if self.target.as_ref() != Some(target) {
            self.target = Some(target.clone());
            self.rows.values_mut().for_each(|row| (row.rank, row.lacking_since) = (None, None));
        }
    }

    /// Position of a runtime in the order.
    pub(super) fn rank(&mut self, key: &KymaKey, runtime: &RuntimeId) -> u64 {
        let target = self.target.as_deref().unwrap_or_default();
        *self.rows.entry(key.clone()).or_default().rank.get_or_insert_with(|| rank(target, runtime.as_str()))
    }

    /// Restarts the deadlines of a runtime that does not count for now.
    pub(super) fn suspend(&mut self, key: &KymaKey) {
        if let Some(row) = self.rows.get_mut(key) {
            (row.unproven_since, row.lacking_since) = (None, None);
        }
    }

    /// Retains only these rows.
    pub(super) fn retain(&mut self, keep: impl Fn(&KymaKey) -> bool) {
        self.rows.retain(|key, _| keep(key));
    }

    /// Assesses a runtime; its rank must have been requested before.
    pub(super) fn assess(&mut self, observation: Observation<'_>, deadline: Duration, now: Instant) -> Option<Member> {
        let target = self.target.clone()?;
        let row = self.rows.get_mut(&observation.report.kyma)?;
        let standing = row.assess(&observation, &target, deadline, now);
        Some(Member { kyma: observation.report.kyma.clone(), rank: row.rank?, image: row.image.clone(), standing })
    }
}

impl Row {
    fn assess(&mut self, observation: &Observation<'_>, target: &Image, deadline: Duration, now: Instant) -> Standing {
        let Observation { report, observed, decision } = observation;
        if let Some(observed) = observed.as_ref().filter(|observed| self.image.as_ref() != Some(&observed.image)) {
            if self.image.is_some() {
                // A new pod gets the full deadline.
                self.unproven_since = None;
            }
            (self.image, self.was_proven) = (Some(observed.image.clone()), false);
        }
        let has = self.image.as_ref() == Some(target);
        // A heartbeat of the previous agent does not prove the new one.
        let has_reported = |it: &ObservedImage| it.running_since.is_some_and(|it| report.last_heartbeat >= Some(it));
        let is_proven = report.path == PathState::Proven && (!has || observed.as_ref().is_some_and(has_reported));
        if is_proven {
            (self.unproven_since, self.was_proven) = (None, true);
        }
        let unproven_before = !self.was_proven && observed.as_ref().is_some_and(|observed| observed.unproven_before);
        let unproven = if is_proven { None } else { Some(*self.unproven_since.get_or_insert(now)) };
        let lacks = match decision {
            ImageDecision::Use(image) => image == target && !has,
            ImageDecision::KeepOr(_) => self.image.is_none(),
        };
        self.lacking_since = lacks.then(|| self.lacking_since.unwrap_or(now));
        let is_due = |since: Option<Instant>| since.is_some_and(|since| now >= since + deadline);
        match (self.lacking_since, has) {
            (Some(_), _) if is_due(self.lacking_since) => Standing::Unfit,
            (Some(_), _) => Standing::Pending,
            (None, _) if is_proven => Standing::Proven,
            (None, true) if unproven_before => Standing::Unfit,
            (None, _) if is_due(unproven) => Standing::Failing,
            (None, _) => Standing::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidewatch_fleet::Unproven;

    const DEADLINE: Duration = Duration::from_secs(600);
    const S: Duration = Duration::from_secs(1);

    struct SingleRuntime {
        table: AssessmentTable,
        start: Instant,
        /// See [`ObservedImage::unproven_before`].
        unproven_before: bool,
    }

    impl SingleRuntime {
        fn new() -> Self {
            let mut table = AssessmentTable::default();
            table.set_target(&"b".into());
            table.rank(&KymaKey::new("ns", "k"), &"r".parse().unwrap());
            Self { table, start: Instant::now(), unproven_before: false }
        }

        /// Assesses the runtime after `second` seconds. `has` is its image and the start of its pod, `gets` the
        /// assigned image, `beat` the last heartbeat.
        fn at(
            &mut self,
            second: u32,
            has: Option<(&str, Option<u32>)>,
            gets: &str,
            path: PathState,
            beat: u32,
        ) -> Standing {
            let at = |second: u32| self.start + S * second;
            let report = RuntimeReport {
                kyma: KymaKey::new("ns", "k"),
                runtime: "r".parse().unwrap(),
                path,
                last_heartbeat: Some(at(beat)),
                trust_revision: None,
                authority: None,
                silent: Duration::ZERO,
            };
            let observed = has.map(|(image, runs)| ObservedImage {
                image: image.into(),
                running_since: runs.map(at),
                unproven_before: self.unproven_before,
            });
            let observation = Observation { report: &report, observed, decision: ImageDecision::Use(gets.into()) };
            let now = at(second);
            self.table.assess(observation, DEADLINE, now).unwrap().standing
        }
    }

    const SILENT: PathState = PathState::Unproven(Unproven::NoHeartbeat);

    #[test]
    fn upgraded_agent_is_proven_by_its_own_heartbeat_only() {
        let mut one = SingleRuntime::new();
        assert_eq!(one.at(0, Some(("a", Some(0))), "a", PathState::Proven, 0), Standing::Proven);
        assert_eq!(one.at(1, Some(("a", Some(0))), "b", PathState::Proven, 1), Standing::Pending, "it lacks it");
        assert_eq!(one.at(2, Some(("b", None)), "b", PathState::Proven, 1), Standing::Pending, "the old one's word");
        assert_eq!(one.at(5, Some(("b", Some(4))), "b", PathState::Proven, 1), Standing::Pending);
        assert_eq!(one.at(6, Some(("b", Some(4))), "b", PathState::Proven, 6), Standing::Proven);
        assert_eq!(one.at(700, Some(("b", Some(4))), "b", SILENT, 6), Standing::Pending, "it may be passing");
        assert_eq!(one.at(1_299, Some(("b", None)), "b", SILENT, 6), Standing::Pending);
        assert_eq!(one.at(1_300, Some(("b", None)), "b", SILENT, 6), Standing::Failing);
        assert_eq!(one.at(1_301, Some(("b", Some(1_301))), "b", PathState::Proven, 1_301), Standing::Proven);
    }

    #[test]
    fn runtimes_unwell_before_or_late_to_upgrade_are_unfit() {
        let mut broken = SingleRuntime::new();
        broken.at(0, Some(("a", None)), "a", SILENT, 0);
        broken.unproven_before = true;
        assert_eq!(broken.at(1, Some(("b", None)), "b", SILENT, 0), Standing::Unfit, "it was not well before");
        assert_eq!(broken.at(9, Some(("b", Some(8))), "b", PathState::Proven, 9), Standing::Proven);
        // The next reconcile removes the record.
        broken.at(10, Some(("b", None)), "b", SILENT, 9);
        assert_eq!(broken.at(610, Some(("b", None)), "b", SILENT, 9), Standing::Failing, "it was well with this one");

        let mut late = SingleRuntime::new();
        late.at(0, Some(("a", Some(0))), "a", PathState::Proven, 0);
        assert_eq!(late.at(1, Some(("a", Some(0))), "b", PathState::Proven, 1), Standing::Pending);
        assert_eq!(late.at(601, Some(("a", Some(0))), "b", PathState::Proven, 601), Standing::Unfit);
        assert_eq!(late.at(602, Some(("a", Some(0))), "a", PathState::Proven, 602), Standing::Proven);

        let mut old = SingleRuntime::new();
        assert_eq!(old.at(0, Some(("a", None)), "a", SILENT, 0), Standing::Pending);
        assert_eq!(old.at(600, Some(("a", None)), "a", SILENT, 0), Standing::Failing);
    }

    #[test]
    fn acquired_runtime_that_was_unwell_before_its_upgrade_is_unfit() {
        let mut acquired = SingleRuntime::new();
        acquired.unproven_before = true;
        assert_eq!(acquired.at(0, Some(("b", None)), "b", SILENT, 0), Standing::Unfit);
        assert_eq!(acquired.at(700, Some(("b", None)), "b", SILENT, 0), Standing::Unfit);
        acquired.unproven_before = false;
        assert_eq!(acquired.at(701, Some(("b", None)), "b", SILENT, 0), Standing::Failing);
    }

    #[test]
    fn new_process_grants_the_full_deadline() {
        let mut one = SingleRuntime::new();
        assert_eq!(one.at(0, None, "b", PathState::Unknown, 0), Standing::Pending, "not observed");
        assert_eq!(one.at(3, Some(("b", None)), "b", PathState::Unknown, 0), Standing::Pending);
        assert_eq!(one.at(600, Some(("b", None)), "b", SILENT, 0), Standing::Failing);
    }
}
