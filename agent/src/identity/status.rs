//! Reported status of the identity: its origin, its storage in the Secret, and the last failure.

use std::sync::Arc;

use jiff::Timestamp;
use parking_lot::Mutex;
use tidewatch_contract::admin::agent::{IdentityReport, IdentitySource};

/// Shared handle to the status; clones share it.
#[derive(Clone, Default)]
pub(crate) struct IdentityStatus(Arc<Mutex<IdentityReport>>);

impl IdentityStatus {
    /// Records that an identity is in use.
    pub(crate) fn set_source(&self, from: IdentitySource) {
        self.with(|report| {
            *report = IdentityReport { from: Some(from), unsaved: report.unsaved, ..IdentityReport::default() }
        });
    }

    /// Records whether the agent's Secret contains the identity.
    pub(super) fn set_stored(&self, stored: bool) {
        self.with(|report| report.unsaved = !stored);
    }

    /// Records a failed certificate request, at a time in Unix seconds.
    pub(super) fn record_failure(&self, unix: i64, error: String) {
        self.with(|report| {
            let now = || Timestamp::from_second(unix).ok().map(|time| time.to_string());
            report.failing_since = report.failing_since.take().or_else(now);
            report.error = Some(error);
        });
    }

    /// See [`IdentityReport::unsaved`].
    pub(crate) fn is_unsaved(&self) -> bool {
        self.with(|report| report.unsaved)
    }

    /// Current status.
    pub(crate) fn report(&self) -> IdentityReport {
        self.with(|report| report.clone())
    }

    fn with<R>(&self, work: impl FnOnce(&mut IdentityReport) -> R) -> R {
        work(&mut self.0.lock())
    }
}
