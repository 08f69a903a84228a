//! Sends events of other managers' Watchers to their services in contract v2. The pending events and the client are in
//! [`fleet::forward`](tidewatch_fleet::forward).

use futures::{StreamExt as _, stream::FuturesUnordered};
use tidewatch_fleet::{forward::Client, table::RuntimeTable};
use tokio_util::sync::CancellationToken;

/// Runs until `shutdown`, and then drops pending requests: the agents still have their events. The lanes of the targets
/// bound the concurrency.
pub async fn run(fleet: RuntimeTable, client: Client, shutdown: CancellationToken) -> &'static str {
    let mut sending = FuturesUnordered::new();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return "forwarding",
            Some((delivery, outcome)) = sending.next() => fleet.forwarded(&delivery, outcome),
            delivery = fleet.next_delivery() => sending.push({
                let client = client.clone();
                async move {
                    let outcome = client.send(&delivery.target, &delivery.leaf, &delivery.event).await;
                    (delivery, outcome)
                }
            }),
        }
    }
}
