//! Report of the fleet as JSON, served by the admin listener and read by the command line.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tidewatch_api::{ConditionStatus, identity::Instance};
use tidewatch_fleet::table::RuntimeView;

/// Report of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Receiver that made the report.
    pub receiver: Receiver,
    /// Totals of all runtimes.
    pub summary: Summary,
    /// Kymas, those with a broken event path first, then those in an unknown state, each group by namespace and name.
    pub runtimes: Vec<RuntimeView>,
}

/// Receiver that made a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Receiver {
    /// Random instance of the process.
    pub instance: Instance,
    /// Version of the program.
    pub version: String,
    /// True if this receiver works on runtimes; otherwise the report has none.
    pub active: bool,
    /// Time since the start of the process, in seconds.
    pub uptime_seconds: u64,
}

/// Totals of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Number of Kymas.
    pub kymas: usize,
    /// Number of Kymas by the reason of their event path.
    pub paths: BTreeMap<String, usize>,
    /// Objects pending in agents.
    pub waiting: u64,
    /// Events that agents could not send.
    pub parked: u64,
    /// Events received above a gap.
    pub gaps: u64,
    /// Events received more than once.
    pub duplicates: u64,
    /// Kymas with recorded events that are not settled.
    pub unsettled: usize,
    /// Kymas with agents that fail to renew their certificates.
    #[serde(default)]
    pub renewals_failing: usize,
}

impl Receiver {
    /// This receiver.
    pub(super) fn new(instance: Instance, uptime: Duration, active: bool) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Self { instance, version, active, uptime_seconds: uptime.as_secs() }
    }
}

impl Report {
    /// Makes the report from views of runtimes, which are in any order, and more than once if they come from two replicas.
    pub(super) fn new(receiver: Receiver, views: Vec<RuntimeView>) -> Self {
        let mut runtimes = views;
        // Stable, so that of the views of one Kyma that of the first answer stays.
        runtimes.sort_by(|a, b| (&a.namespace, &a.kyma).cmp(&(&b.namespace, &b.kyma)));
        runtimes.dedup_by(|a, b| (&a.namespace, &a.kyma) == (&b.namespace, &b.kyma));
        runtimes.sort_unstable_by(|a, b| {
            let order = |runtime: &RuntimeView| match runtime.path.state {
                ConditionStatus::False => 0,
                ConditionStatus::Unknown => 1,
                ConditionStatus::True => 2,
            };
            order(a).cmp(&order(b)).then_with(|| (&a.namespace, &a.kyma).cmp(&(&b.namespace, &b.kyma)))
        });
        Self { receiver, summary: Summary::of(&runtimes), runtimes }
    }

    /// Makes the report from the answers of replicas, each a JSON list of the runtimes of one.
    ///
    /// # Errors
    /// An answer is malformed.
    pub(super) fn merge(receiver: Receiver, answers: Vec<Bytes>) -> Result<Self, serde_json::Error> {
        let mut views = Vec::new();
        for answer in answers {
            views.append(&mut serde_json::from_slice::<Vec<RuntimeView>>(&answer)?);
        }
        Ok(Self::new(receiver, views))
    }
}

impl Summary {
    fn of(runtimes: &[RuntimeView]) -> Self {
        let mut summary = Self { kymas: runtimes.len(), ..Self::default() };
        for runtime in runtimes {
            *summary.paths.entry(runtime.path.reason.clone()).or_default() += 1;
            summary.waiting += runtime.waiting;
            summary.parked += runtime.parked;
            summary.gaps += runtime.gaps;
            summary.duplicates += runtime.duplicates;
            summary.unsettled += usize::from(!runtime.unsettled.is_empty());
            summary.renewals_failing += usize::from(runtime.renewal_failed_since.is_some());
        }
        summary
    }
}
