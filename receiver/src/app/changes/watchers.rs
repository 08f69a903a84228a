//! Task of the Watchers: derives plan and routes from them, and writes the status of each. Of several replicas the one with the fleet
//! role writes, with the health of its own deliveries.

use std::{error::Error as _, sync::Arc, time::Duration};

use kube::Client;
use tokio::{sync::Notify, time};

use super::{handlers::Components, placer::KymaPlacer};
use crate::{
    base::key::KymaKey,
    controllers::watcher::{self, ServingMode},
    kube::watch::SyncGuard,
};

/// Debounce delay: Watchers that change together cause one new plan.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// Delay of the retry after a status write that failed.
const RETRY: Duration = Duration::from_secs(15);

/// Runs forever. `pending` is dropped when the first plan is in place.
pub(super) async fn run(
    client: Client,
    namespace: String,
    (components, placer): (Components, KymaPlacer),
    changed: Arc<Notify>,
    pending: SyncGuard,
) -> &'static str {
    let mut pending = Some(pending);
    let mut role_changes = components.role.changes();
    loop {
        tokio::select! {
            () = changed.notified() => {}
            () = role_changes.next() => {}
            () = components.fleet.forward_health_changed() => {}
        }
        time::sleep(DEBOUNCE).await;
        let mut watchers = components.stores.watchers.state();
        watchers.sort_unstable_by_key(|watcher| KymaKey::of(watcher.as_ref()));
        let (plan, routes, rejected) = watcher::plan(components.installed.to_vec(), &watchers);
        // Routes before the plan, so that an event of a new watch finds its route.
        components.fleet.set_routes(routes);
        placer.replan(plan);
        let health = components.fleet.forward_health();
        drop(pending.take());
        let writing = async {
            let mut failed = false;
            for watcher in &watchers {
                let key = KymaKey::of(watcher.as_ref());
                let serving = match (rejected.get(&key), health.get(watcher::watch_name(&key).as_str())) {
                    (Some(error), _) => ServingMode::Rejected(error),
                    (None, Some((target, health))) => ServingMode::Forwarded(target, *health),
                    (None, None) => ServingMode::Local,
                };
                if let Err(error) = watcher::write_status(&client, &namespace, watcher, &serving).await {
                    let cause = error.source().map(tracing::field::display);
                    tracing::warn!(watcher = %key, %error, cause, "Watcher status write failed");
                    failed = true;
                }
            }
            failed
        };
        if components.role.run(writing).await == Some(true) {
            // A change or the retry, whichever comes first.
            let _ = time::timeout(RETRY, changed.notified()).await;
            changed.notify_one();
        }
    }
}
