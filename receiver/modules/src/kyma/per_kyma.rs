//! Results of earlier reconciles, by Kyma.

use std::collections::HashMap;

use parking_lot::Mutex;
use tidewatch_api::key::KymaKey;

/// One result for each Kyma at most; removed with its Kyma.
#[derive(Debug, Default)]
pub(super) struct PerKyma<T>(Mutex<HashMap<KymaKey, T>>);

impl<T> PerKyma<T> {
    /// Takes the entry of a Kyma. A successful reconcile puts one back; after a failed or aborted one there is none.
    pub(super) fn take(&self, key: &KymaKey) -> Option<T> {
        self.0.lock().remove(key)
    }

    /// Stores the entry after a reconcile.
    pub(super) fn keep(&self, key: &KymaKey, entry: T) {
        self.0.lock().insert(key.clone(), entry);
    }

    /// Drops the entry of a Kyma.
    pub(super) fn forget(&self, key: &KymaKey) {
        self.0.lock().remove(key);
    }
}
