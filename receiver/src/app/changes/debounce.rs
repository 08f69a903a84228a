//! Debounces changes of templates and release metas: a release meta that the cache receives before its new template
//! would otherwise remove a channel for a moment.

use std::{mem, time::Duration};

use kube::Client;
use parking_lot::Mutex;
use tokio::{sync::Notify, time};
use tokio_util::sync::CancellationToken;

use super::{affected::Affected, components::Components};

/// Delay from the first change until all changes received so far take effect together.
const DEBOUNCE: Duration = Duration::from_millis(300);
/// Delay of the next attempt to persist the accepted releases after a failure.
const RETRY: Duration = Duration::from_secs(15);

/// Kymas affected by catalog changes that have not taken effect yet; bounded by the number of Kymas and their modules.
#[derive(Default)]
pub(super) struct CatalogDebouncer {
    affected: Mutex<Affected>,
    changed: Notify,
}

impl CatalogDebouncer {
    /// Records a change that affects these Kymas besides those that see the changed object.
    pub(super) fn record(&self, affected: Affected) {
        self.affected.lock().add(affected);
        self.changed.notify_one();
    }

    /// Runs forever. Waits until all caches are synced: an object missing from a cache would look removed.
    pub(super) async fn run(
        &self,
        components: &Components,
        client: &Client,
        namespace: &str,
        synced: CancellationToken,
    ) -> &'static str {
        synced.cancelled().await;
        // Changes since the previous process take effect as well.
        self.changed.notify_one();
        let mut role_changes = components.role.changes();
        let mut is_stored = components.catalog.permits_first_reconcile();
        loop {
            tokio::select! {
                () = self.changed.notified() => {}
                () = role_changes.next() => {}
            }
            time::sleep(DEBOUNCE).await;
            let affected = mem::take(&mut *self.affected.lock());
            let renewed = components.catalog.refresh(&components.stores);
            // Persisted first, so that the next process knows since when channels have pointed to their versions.
            let persisted =
                components.role.run(components.catalog.persist_releases(client, namespace)).await.unwrap_or(true);
            if components.catalog.awaits_decision() {
                // They are affected again by the decision of the replica with the fleet role.
                self.affected.lock().add(affected.clone());
            }
            components.apply_catalog_update(namespace, &renewed, affected);
            if !is_stored && components.catalog.permits_first_reconcile() {
                is_stored = true;
                components.enqueue_first_reconciles();
            }
            if !persisted {
                // The next change or the retry, whichever comes first.
                let _ = time::timeout(RETRY, self.changed.notified()).await;
                self.changed.notify_one();
            }
        }
    }
}
