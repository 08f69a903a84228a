//! Runtimes without a Kyma, whose connections close.

use tidewatch_api::identity::RuntimeId;
use tidewatch_fleet::table::RuntimeTable;
use tokio::sync::broadcast;

/// Knows which runtimes have no Kyma.
pub trait Departures: Send + Sync + 'static {
    /// True if definitely no Kyma has that runtime id.
    fn is_unknown(&self, runtime: &RuntimeId) -> bool;

    /// Reports each runtime id that no Kyma has any more.
    fn departures(&self) -> broadcast::Receiver<RuntimeId>;
}

impl Departures for RuntimeTable {
    fn is_unknown(&self, runtime: &RuntimeId) -> bool {
        Self::is_unknown(self, runtime)
    }

    fn departures(&self) -> broadcast::Receiver<RuntimeId> {
        Self::departures(self)
    }
}
