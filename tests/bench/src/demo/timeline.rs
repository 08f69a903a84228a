//! Timeline of one act, in milliseconds since its write began.

use std::{fmt, time::Duration};

use serde::Serialize;

/// One act. `None` for a step that does not apply to the act.
#[derive(Clone, Debug, Serialize)]
pub struct Timeline {
    /// Description of the change.
    pub act: String,
    /// The act removes the module.
    #[serde(skip)]
    pub is_removal: bool,
    /// The API server answered the write.
    pub written_ms: f64,
    /// The agent observed the change in its watch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seen_ms: Option<f64>,
    /// The receiver verified the event and enqueued the Kyma.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_ms: Option<f64>,
    /// The receiver's writes were complete: a Manifest in KCP, or a catalog object in the runtime.
    pub reconciled_ms: f64,
    /// The status of the runtime's Kyma shows the change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status_ms: Option<f64>,
    /// The manager of the module exists in the runtime, or is gone from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub applied_ms: Option<f64>,
    /// The manager of the module is available.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_ms: Option<f64>,
    /// The module is ready in the status of the runtime's Kyma.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_ms: Option<f64>,
}

/// Milliseconds with three decimals.
pub(super) fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.act)?;
        let applied = if self.is_removal { "objects removed" } else { "objects applied" };
        let steps = [
            ("written", Some(self.written_ms)),
            ("seen by the agent", self.seen_ms),
            ("accepted by the receiver", self.accepted_ms),
            ("reconciled", self.reconciled_ms.into()),
            ("status back in the runtime", self.status_ms),
            (applied, self.applied_ms),
            ("manager available", self.available_ms),
            ("module ready in the runtime's Kyma", self.ready_ms),
        ];
        for (step, at) in steps {
            if let Some(at) = at {
                writeln!(f, "  {at:>9.1} ms  {step}")?;
            }
        }
        Ok(())
    }
}
