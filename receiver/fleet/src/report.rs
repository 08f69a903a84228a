//! Reports of changes in the modules of a runtime. The queue of the Manifests takes each from the table, and hands it back once
//! it is settled.

use tidewatch_api::key::KymaKey;

use super::{queue::Drift, runtime::Snapshot};

/// Changes in the modules of a runtime that its agent reported. Their events are settled once each affected Manifest has
/// finished a reconcile that began after the report.
#[derive(Clone, Debug)]
pub struct ModuleReport {
    /// Kyma of the runtime.
    pub kyma: KymaKey,
    /// The changed objects.
    pub drift: Drift,
    /// Distinguishes successive Kymas of one name.
    pub(super) generation: u64,
    /// Events that were accepted before the report was taken.
    pub(super) snapshot: Snapshot,
}
