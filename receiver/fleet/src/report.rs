//! Reports of changes in the modules of a runtime. The queue of the Manifests takes each from the table, and hands its events back
//! once they are settled.

use tidewatch_api::key::KymaKey;

use super::{queue::Drift, runtime::Snapshot};

/// Changes in the modules of a runtime that its agent reported.
#[derive(Debug)]
pub struct ModuleReport {
    /// The changed objects.
    pub drift: Drift,
    /// The events that reported them.
    pub events: ReportedEvents,
}

/// Events of a report. They are settled once each affected Manifest has finished a reconcile that began after the report.
#[derive(Clone, Debug)]
pub struct ReportedEvents {
    /// Kyma of the runtime.
    pub kyma: KymaKey,
    /// Distinguishes successive Kymas of one name.
    pub(super) generation: u64,
    /// Events that were accepted before the report was taken.
    pub(super) snapshot: Snapshot,
}
