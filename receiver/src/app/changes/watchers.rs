//! Upkeep of Watchers: the plan follows them, and each is told in its status whether it is served.

use std::{collections::HashMap, error::Error as _, sync::Arc, time::Duration};

use kube::Client;
use tokio::{sync::Notify, time};

use super::{essence::key_of, placing::Placing, wakes::Rooms};
use crate::{
    controllers::watcher::{self, Serving},
    kube::follow::Guard,
};

/// Several Watchers that change together make one plan.
const SETTLE: Duration = Duration::from_millis(50);
/// How soon a status that could not be written is tried again.
const RETRY: Duration = Duration::from_secs(15);

/// Runs for ever.
pub(super) async fn run(
    client: Client,
    namespace: String,
    (rooms, placing): (Rooms, Placing),
    changed: Arc<Notify>,
    pending: Guard,
) -> &'static str {
    // Until the first plan is made.
    let mut pending = Some(pending);
    loop {
        tokio::select! {
            () = changed.notified() => {}
            () = rooms.hub.forward_health_moved() => {}
        }
        time::sleep(SETTLE).await;
        let mut watchers = rooms.stores.watchers.state();
        watchers.sort_unstable_by_key(|watcher| key_of(watcher.as_ref()));
        let (plan, rejected) = watcher::plan_with(rooms.installed.to_vec(), &watchers);
        // First, so that no event of a new watch finds none.
        rooms.hub.set_routes(watcher::routes(&watchers, &plan));
        placing.replan(plan);
        let health = rooms.hub.forward_health();
        drop(pending.take());
        let mut rejected: HashMap<_, _> =
            rejected.into_iter().map(|rejected| (rejected.watcher.clone(), rejected)).collect();
        let mut failed = false;
        for watcher in &watchers {
            let key = key_of(watcher.as_ref());
            let (rejected, route) = (rejected.remove(&key), health.get(watcher::watch_name(&key).as_str()));
            let serving = match (&rejected, route) {
                (Some(rejected), _) => Serving::Rejected(rejected),
                (None, Some((target, health))) => Serving::Forwarded(target, *health),
                (None, None) => Serving::Here,
            };
            if let Err(error) = watcher::report(&client, &namespace, watcher, &serving).await {
                let cause = error.source().map(tracing::field::display);
                tracing::warn!(watcher = %key, %error, cause, "Status of a Watcher could not be written");
                failed = true;
            }
        }
        if failed {
            // Whichever comes first starts the next round: a change, or the time to try again.
            let _ = time::timeout(RETRY, changed.notified()).await;
            changed.notify_one();
        }
    }
}
