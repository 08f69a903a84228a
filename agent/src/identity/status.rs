//! Reported status of the identity: its origin, its storage in the Secret, and the last failure.

use std::sync::Arc;

use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use strum::Display;

/// Origin of the identity in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum IdentitySource {
    /// Files that another component renews.
    Files,
    /// The agent's own Secret, written by an earlier agent process.
    #[strum(to_string = "the agent's Secret")]
    Secret,
    /// Requested with a token.
    Enrolment,
    /// Requested with the previous certificate.
    Renewal,
}

/// Shared handle to the status; clones share it.
#[derive(Clone, Default)]
pub(crate) struct IdentityStatus(Arc<Mutex<IdentityReport>>);

/// Status of the identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IdentityReport {
    /// Origin; absent before there is an identity.
    pub from: Option<IdentitySource>,
    /// The agent's Secret does not contain the identity, so the next agent process has to enrol. Never set for files.
    #[serde(rename = "unkept")]
    pub unsaved: bool,
    /// Time since which certificate requests fail, in RFC 3339.
    pub failing_since: Option<String>,
    /// Text of the last failure.
    pub error: Option<String>,
}

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

impl IdentityReport {
    /// Text that follows the certificate's end in the status output.
    pub(crate) fn line(&self) -> String {
        let from = self.from.map(|from| format!(", from {from}")).unwrap_or_default();
        let unsaved = if self.unsaved { ", not kept in the agent's Secret" } else { "" };
        let since = self.failing_since.as_ref();
        let error = self.error.as_deref().unwrap_or_default();
        let failing =
            since.map(|since| format!(", certificate requests fail since {since}: {error}")).unwrap_or_default();
        format!("{from}{unsaved}{failing}")
    }
}
