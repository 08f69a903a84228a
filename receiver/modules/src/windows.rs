//! Maintenance windows: the times at which upgrades of modules that require a downtime may begin.
//!
//! [`Windows`] decides by a policy for one runtime and one time. `file` follows the file of the policy. [`MaintenanceWindows`]
//! holds the last good policy, and the Kymas that wait for a window: these are reconciled when the policy or the system's clock
//! changes, and each at the start of its window.

mod file;
mod flags;
mod metrics;

use std::{collections::HashMap, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use jiff::Timestamp;
use parking_lot::Mutex;
use tidewatch_api::{Kyma, ModuleStatus, facts::KymaFacts, key::KymaKey};
use tidewatch_select::windows::{PolicyError, UNKNOWN, WindowState, Windows};

pub use file::PolicyFile;
pub use flags::Flags;
pub use metrics::Metrics;

/// The policy in use, and the Kymas with a module that waits. Clones share one state.
#[derive(Clone, Debug)]
pub struct MaintenanceWindows(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    windows: ArcSwap<Windows>,
    /// Time that an open window must last at least.
    min_left: Duration,
    /// At most one entry for each Kyma.
    waiting: Mutex<HashMap<KymaKey, WindowState>>,
    metrics: Metrics,
}

impl MaintenanceWindows {
    /// Creates windows without a policy.
    pub fn new(min_left: Duration, metrics: Metrics) -> Self {
        Self(Arc::new(Shared { windows: ArcSwap::default(), min_left, waiting: Mutex::default(), metrics }))
    }

    /// Windows by a policy in the file's format, with a minimum of 20 minutes.
    #[cfg(test)]
    pub(crate) fn with_policy(policy: &serde_json::Value) -> Self {
        let this = Self::new(Duration::from_secs(1_200), Metrics::default());
        this.set_policy(policy);
        this
    }

    /// Replaces the policy.
    #[cfg(test)]
    pub(crate) fn set_policy(&self, policy: &serde_json::Value) {
        self.set(self.parse(policy.to_string().as_bytes()).unwrap());
    }

    /// Window of a Kyma, always open if it skips maintenance windows.
    pub(crate) fn state<'a>(&self, kyma: impl Into<KymaFacts<'a>>, now: Timestamp) -> WindowState {
        self.0.windows.load().state(kyma, now)
    }

    /// Window of a Kyma with a module that needs one. Unless it is open, the Kyma counts as waiting from now on.
    pub(crate) fn await_window(&self, key: &KymaKey, kyma: &Kyma, now: Timestamp) -> WindowState {
        // The lock is held meanwhile: the change of the policy that this decision misses finds the Kyma waiting.
        let mut waiting = self.0.waiting.lock();
        let state = self.state(kyma, now);
        if state == WindowState::Open {
            waiting.remove(key);
        } else {
            waiting.insert(key.clone(), state);
        }
        self.0.metrics.waiting(waiting.values());
        state
    }

    /// Window that the modules of a Kyma wait for according to its status, for a start of the receiver. The Kyma counts as
    /// waiting.
    pub(crate) fn resume(&self, key: &KymaKey, kyma: &Kyma, now: Timestamp) -> Option<WindowState> {
        let is_shown = kyma.status.iter().flat_map(|status| status.modules()).any(is_waiting);
        is_shown.then(|| self.await_window(key, kyma, now))
    }

    /// Records that no module of the Kyma waits for a window.
    pub(crate) fn forget(&self, key: &KymaKey) {
        let mut waiting = self.0.waiting.lock();
        if waiting.remove(key).is_some() {
            self.0.metrics.waiting(waiting.values());
        }
    }

    /// The Kymas that wait.
    fn waiting(&self) -> Vec<KymaKey> {
        self.0.waiting.lock().keys().cloned().collect()
    }

    /// Parses the content of a policy file.
    fn parse(&self, policy: &[u8]) -> Result<Windows, PolicyError> {
        Windows::parse(policy, self.0.min_left)
    }

    /// Takes a policy into use.
    fn set(&self, windows: Windows) {
        self.0.metrics.mistakes(windows.mistakes().count());
        self.0.windows.store(Arc::new(windows));
    }
}

/// Returns true if a module waits for a window, or for a policy that has one.
fn is_waiting(module: &ModuleStatus) -> bool {
    module.maintenance == Some(true) || module.message.as_ref().is_some_and(|message| message.starts_with(UNKNOWN))
}

#[cfg(test)]
mod tests;
