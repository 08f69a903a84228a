//! Task of the Watchers: derives plan and routes from them, and writes the status of each. Of several replicas the one with the fleet
//! role writes, with the worst health of the deliveries of all; the others report to it that theirs changed.

use std::{error::Error as _, future, sync::Arc, time::Duration};

use kube::Client;
use tidewatch_api::key::KymaKey;
use tidewatch_fleet::{forward::Health, watch::SyncGuard};
use tidewatch_installer::watcher::{self, ForwardHealth, ServingMode};
use tokio::{
    sync::Notify,
    time::{self, Instant},
};

use super::{components::Components, placer::KymaPlacer};

/// Debounce delay: Watchers that change together cause one new plan.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// Delay of the retry after a request that failed, and of the next question while a service fails in any replica: a replica
/// that is gone, or has no events left for the service, reports no change.
const RETRY: Duration = Duration::from_secs(15);

/// Runs forever. `pending` is dropped when the first plan is in place.
pub(super) async fn run(
    client: Client,
    namespace: String,
    components: Components,
    placer: KymaPlacer,
    mut health: ForwardHealth,
    changed: Arc<Notify>,
    pending: SyncGuard,
) -> &'static str {
    let mut pending = Some(pending);
    let mut role_changes = components.role.changes();
    let mut retry_at = None;
    loop {
        tokio::select! {
            () = changed.notified() => {}
            () = role_changes.next() => {}
            () = health.changed() => {}
            () = sleep_until(retry_at) => {}
        }
        time::sleep(DEBOUNCE).await;
        let mut watchers = components.stores.watchers.state();
        watchers.sort_unstable_by_key(|watcher| KymaKey::of(watcher.as_ref()));
        let (plan, routes, rejected) = watcher::plan(components.installed.to_vec(), &watchers);
        // Routes before the plan, so that an event of a new watch finds its route.
        components.fleet.set_routes(routes.clone());
        placer.replan(plan);
        drop(pending.take());
        if !components.role.is_held() {
            let reported = health.report().await;
            retry_at = reported.is_err().then(|| Instant::now() + RETRY);
            continue;
        }
        // Unknown while a shard has no holder: the status of forwarded Watchers stays as it is.
        let fleet_health = health.of_fleet().await;
        let writing = async {
            let mut failed = false;
            for watcher in &watchers {
                let key = KymaKey::of(watcher.as_ref());
                let watch = watcher::watch_name(&key);
                let serving = match (rejected.get(&key), routes.of(&watch), &fleet_health) {
                    (Some(error), _, _) => ServingMode::Rejected(error),
                    (None, Some(target), Ok(health)) => {
                        ServingMode::Forwarded(target, health.get(&watch).copied().unwrap_or_default())
                    }
                    (None, Some(_), Err(_)) => continue,
                    (None, None, _) => ServingMode::Local,
                };
                if let Err(error) = watcher::write_status(&client, &namespace, watcher, &serving).await {
                    let cause = error.source().map(tracing::field::display);
                    tracing::warn!(watcher = %key, %error, cause, "Watcher status write failed");
                    failed = true;
                }
            }
            failed
        };
        let failed = components.role.run(writing).await == Some(true);
        let is_healthy = fleet_health.is_ok_and(|health| health.values().all(|health| *health == Health::Healthy));
        retry_at = (failed || !is_healthy).then(|| Instant::now() + RETRY);
    }
}

/// Waits until a time; for ever without one.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => time::sleep_until(at).await,
        None => future::pending().await,
    }
}
