//! Metrics of maintenance windows.

use prometheus_client::metrics::{family::Family, gauge::Gauge};
use tidewatch_kit::{metric_set, metrics::StateLabel};
use tidewatch_select::windows::WindowState;

metric_set! {
    /// State of the policy, and the Kymas that wait; clones share the gauges.
    #[derive(Debug)]
    pub struct Metrics {
        /// Validity of the policy of maintenance windows: 0 if its file is refused, not readable, or gone since it was read, 1
        /// otherwise.
        good: Gauge = "maintenance_window_policy_good",
        /// Parts of the policy of maintenance windows in use that could not be read, or are read otherwise than they are
        /// written.
        mistakes: Gauge = "maintenance_window_policy_mistakes",
        /// Kymas with a module whose upgrade waits for a maintenance window, by state: `waiting` for a known one, `unknown` if
        /// none can be determined.
        kymas: Family<StateLabel, Gauge> = "maintenance_window_kymas",
        /// The gauge with lifecycle-manager's name.
        pub lifecycle_manager: LifecycleManagerMetrics = _,
    }
}

metric_set! {
    /// The gauge with lifecycle-manager's name.
    #[derive(Debug)]
    pub struct LifecycleManagerMetrics {
        /// Whether the policy of maintenance windows was read: 1 if its file exists and its content is in use, 0 otherwise.
        read: Gauge = "lifecycle_mgr_maintenance_window_config_read_success",
    }
}

impl Metrics {
    /// Sets the result of the last read. `is_current` is true if the content of the file is in use, or there has been no
    /// file.
    pub(super) fn read(&self, exists: bool, is_current: bool) {
        self.good.set(is_current.into());
        self.lifecycle_manager.read.set((exists && is_current).into());
    }

    pub(super) fn mistakes(&self, count: usize) {
        self.mistakes.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn waiting<'a>(&self, states: impl Iterator<Item = &'a WindowState>) {
        let mut waiting = 0;
        let mut unknown = 0;
        for state in states {
            match state {
                WindowState::Open => {}
                WindowState::Opens(_) => waiting += 1,
                WindowState::Unknown(_) => unknown += 1,
            }
        }
        for (state, count) in [("waiting", waiting), ("unknown", unknown)] {
            self.kymas.get_or_create(&StateLabel { state }).set(count);
        }
    }
}
