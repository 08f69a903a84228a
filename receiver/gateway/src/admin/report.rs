//! Makes the report of the fleet.

use std::time::Duration;

use bytes::Bytes;
use tidewatch_api::{ConditionStatus, identity::Instance};
use tidewatch_contract::admin::{
    Receiver,
    fleet::{Report, RuntimeView, Summary},
};

/// This receiver.
pub(super) fn receiver(instance: Instance, uptime: Duration, active: bool) -> Receiver {
    let version = env!("CARGO_PKG_VERSION").to_owned();
    Receiver { instance, version, active, uptime_seconds: uptime.as_secs() }
}

/// Makes the report from views of runtimes, which are in any order, and more than once if they come from two replicas.
pub(super) fn report(receiver: Receiver, views: Vec<RuntimeView>) -> Report {
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
    Report { receiver, summary: summary(&runtimes), runtimes }
}

/// Makes the report from the answers of replicas, each a JSON list of the runtimes of one.
///
/// # Errors
/// An answer is malformed.
pub(super) fn merge(receiver: Receiver, answers: Vec<Bytes>) -> Result<Report, serde_json::Error> {
    let mut views = Vec::new();
    for answer in answers {
        views.append(&mut serde_json::from_slice::<Vec<RuntimeView>>(&answer)?);
    }
    Ok(report(receiver, views))
}

fn summary(runtimes: &[RuntimeView]) -> Summary {
    let mut summary = Summary { kymas: runtimes.len(), ..Summary::default() };
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
