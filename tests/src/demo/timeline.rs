//! When what happened in one act, in milliseconds since its write began.

use std::{fmt, time::Duration};

use serde::Serialize;

/// One act. `None` where a step has no place in the act.
#[derive(Clone, Debug, Serialize)]
pub struct Timeline {
    /// What was done, in words.
    pub act: String,
    /// The write was answered.
    pub written_ms: f64,
    /// The agent saw it in its watch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seen_ms: Option<f64>,
    /// The receiver verified the event and made the Kyma wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_ms: Option<f64>,
    /// What the receiver had to do was done: a Manifest in KCP, or a catalog object in the runtime.
    pub reconciled_ms: f64,
    /// The status of the runtime's Kyma tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status_ms: Option<f64>,
}

/// Milliseconds with three decimals.
pub(super) fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.act)?;
        let steps = [
            ("written", Some(self.written_ms)),
            ("seen by the agent", self.seen_ms),
            ("accepted by the receiver", self.accepted_ms),
            ("reconciled", self.reconciled_ms.into()),
            ("status back in the runtime", self.status_ms),
        ];
        for (step, at) in steps {
            if let Some(at) = at {
                writeln!(f, "  {at:>9.1} ms  {step}")?;
            }
        }
        Ok(())
    }
}
