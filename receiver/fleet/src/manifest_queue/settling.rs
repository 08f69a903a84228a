//! Settlement of reports: which Manifests still have to be reconciled since their runtime reported a change.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    mem,
};

use tidewatch_api::key::{KymaKey, ManifestKey};

use crate::report::ReportedEvents;

/// Reports of one Kyma that are kept apart. Later ones join the last of them, so that a runtime that never stops
/// reporting settles all the same.
const MAX_OPEN: usize = 2;

/// Reports that are not settled.
#[derive(Debug, Default)]
pub(super) struct Settling {
    by_kyma: HashMap<KymaKey, VecDeque<OpenReport>>,
    /// Number of reports so far.
    count: u64,
    /// Events of settled reports that were not taken.
    settled: Vec<ReportedEvents>,
}

#[derive(Debug)]
struct OpenReport {
    number: u64,
    events: ReportedEvents,
    /// Manifests without a finished reconcile that began after the report.
    manifests: BTreeSet<ManifestKey>,
}

impl Settling {
    /// Adds a report that affects these Manifests.
    pub(super) fn add(&mut self, manifests: BTreeSet<ManifestKey>, events: ReportedEvents) {
        let kyma = events.kyma.clone();
        let open = self.by_kyma.entry(kyma.clone()).or_default();
        let mut report = OpenReport { number: self.count, events, manifests };
        self.count += 1;
        if open.len() >= MAX_OPEN
            && let Some(last) = open.pop_back()
        {
            report.manifests.extend(last.manifests);
        }
        open.push_back(report);
        self.settle(&kyma);
    }

    /// Number of reports so far.
    pub(super) const fn count(&self) -> u64 {
        self.count
    }

    /// Records the result of a reconcile of a Manifest that began after so many reports.
    pub(super) fn reconciled(&mut self, kyma: &KymaKey, manifest: &ManifestKey, reports_before: u64) {
        for report in self.by_kyma.get_mut(kyma).into_iter().flatten() {
            if report.number < reports_before {
                report.manifests.remove(manifest);
            }
        }
        self.settle(kyma);
    }

    /// Drops a Manifest of a Kyma, which no report waits for any longer.
    pub(super) fn remove(&mut self, kyma: &KymaKey, manifest: &ManifestKey) {
        for report in self.by_kyma.get_mut(kyma).into_iter().flatten() {
            report.manifests.remove(manifest);
        }
        self.settle(kyma);
    }

    /// Drops all reports of a Kyma.
    pub(super) fn forget(&mut self, kyma: &KymaKey) {
        self.by_kyma.remove(kyma);
    }

    /// Takes the events of the reports that have been settled, in the order in which they came.
    pub(super) fn take(&mut self) -> Vec<ReportedEvents> {
        mem::take(&mut self.settled)
    }

    fn settle(&mut self, kyma: &KymaKey) {
        let Some(open) = self.by_kyma.get_mut(kyma) else { return };
        while let Some(report) = open.pop_front_if(|report| report.manifests.is_empty()) {
            self.settled.push(report.events);
        }
        if open.is_empty() {
            self.by_kyma.remove(kyma);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tidewatch_api::plan::Plan;
    use tokio::time::Instant;

    use super::*;
    use crate::{plan_index::PlanIndex, runtime::Runtime};

    fn kyma() -> KymaKey {
        KymaKey::new("ns", "k")
    }

    fn key(name: &str) -> ManifestKey {
        ManifestKey::new("ns", name)
    }

    /// A report of the Kyma `k`, distinguished by its generation.
    fn report(settling: &mut Settling, generation: u64, manifests: &[&str]) {
        let plan = Arc::new(Plan::new("r".into(), Vec::new()).unwrap());
        let snapshot = Runtime::new(Arc::new(PlanIndex::new(plan)), false, Instant::now()).snapshot();
        let events = ReportedEvents { kyma: kyma(), generation, snapshot };
        settling.add(manifests.iter().map(|name| key(name)).collect(), events);
    }

    /// A whole reconcile of a Manifest, with a result.
    fn reconcile(settling: &mut Settling, name: &str) {
        settling.reconciled(&kyma(), &key(name), settling.count());
    }

    fn settled(settling: &mut Settling) -> Option<u64> {
        settling.take().last().map(|events| events.generation)
    }

    #[test]
    fn report_is_settled_when_each_manifest_has_a_result() {
        let mut settling = Settling::default();
        report(&mut settling, 1, &["a", "b"]);
        reconcile(&mut settling, "a");
        assert_eq!(settled(&mut settling), None);
        reconcile(&mut settling, "b");
        assert_eq!((settled(&mut settling), settled(&mut settling)), (Some(1), None));
        report(&mut settling, 2, &[]);
        assert_eq!(settled(&mut settling), Some(2), "it affects no Manifest");
        assert!(settling.by_kyma.is_empty());
    }

    #[test]
    fn reconcile_that_began_before_a_report_does_not_settle_it() {
        let mut settling = Settling::default();
        let reports_before = settling.count();
        report(&mut settling, 1, &["a"]);
        settling.reconciled(&kyma(), &key("a"), reports_before);
        assert_eq!(settled(&mut settling), None);
        reconcile(&mut settling, "a");
        assert_eq!(settled(&mut settling), Some(1));
    }

    #[test]
    fn later_report_is_not_settled_before_an_earlier_one() {
        let mut settling = Settling::default();
        report(&mut settling, 1, &["a"]);
        report(&mut settling, 2, &["b"]);
        reconcile(&mut settling, "b");
        assert_eq!(settled(&mut settling), None);
        reconcile(&mut settling, "a");
        assert_eq!(
            (settled(&mut settling), settled(&mut settling)),
            (Some(2), None),
            "the last one includes the first"
        );
    }

    #[test]
    fn endless_reports_are_settled_and_few_are_kept() {
        let mut settling = Settling::default();
        let mut last = None;
        for generation in 0..100 {
            report(&mut settling, generation, &["a", "b"]);
            assert!(settling.by_kyma[&kyma()].len() <= MAX_OPEN);
            reconcile(&mut settling, if generation % 2 == 0 { "a" } else { "b" });
            last = settled(&mut settling).or(last);
        }
        assert!(last.is_some_and(|last| last >= 97), "{last:?}");
        reconcile(&mut settling, "a");
        reconcile(&mut settling, "b");
        assert_eq!(settled(&mut settling), Some(99));
    }

    #[test]
    fn reports_that_are_joined_wait_for_the_manifests_of_each() {
        let mut settling = Settling::default();
        for (generation, manifest) in [(1, "first"), (2, "a"), (3, "b")] {
            report(&mut settling, generation, &[manifest]);
        }
        reconcile(&mut settling, "first");
        reconcile(&mut settling, "b");
        assert_eq!(settled(&mut settling), Some(1));
        reconcile(&mut settling, "a");
        assert_eq!(settled(&mut settling), Some(3));
    }

    #[test]
    fn removed_manifest_is_awaited_no_longer() {
        let mut settling = Settling::default();
        report(&mut settling, 1, &["a", "b"]);
        reconcile(&mut settling, "a");
        settling.remove(&kyma(), &key("b"));
        assert_eq!(settled(&mut settling), Some(1));
    }
}
