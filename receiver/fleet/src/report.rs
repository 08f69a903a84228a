//! Reports of changes in the modules of a runtime, which the reconciles of Manifests settle.

use tidewatch_api::key::KymaKey;

use super::{queue::Drift, runtime::Snapshot};

/// Changes in the modules of a runtime that its agent reported.
#[derive(Debug)]
pub struct ModuleReport {
    /// The changed objects.
    pub drift: Drift,
    /// Settles the events of the report.
    pub ticket: ReportTicket,
}

/// Identifies the events of a report. They are settled once each affected Manifest has finished a reconcile that began
/// after the report.
#[derive(Clone, Debug)]
pub struct ReportTicket {
    /// Kyma of the runtime.
    pub kyma: KymaKey,
    /// Distinguishes successive Kymas of one name.
    pub(super) generation: u64,
    /// Events that were accepted before the report was taken.
    pub(super) snapshot: Snapshot,
}
