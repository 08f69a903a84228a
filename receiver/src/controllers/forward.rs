//! Sends events of other managers' Watchers to their services in contract v2. The pending events and the client are in
//! [`fleet::forward`](crate::fleet::forward).

use futures::{StreamExt as _, stream::FuturesUnordered};
use tokio_util::sync::CancellationToken;

use crate::fleet::{forward::Client, hub::Hub};

/// Runs until `shutdown`; what is on its way then is dropped, and the agents keep it. Requests at once are bounded by the lanes.
pub async fn run(hub: Hub, client: Client, shutdown: CancellationToken) -> &'static str {
    let mut sending = FuturesUnordered::new();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return "forwarding",
            Some((delivery, outcome)) = sending.next() => hub.forwarded(&delivery, outcome),
            delivery = hub.next_delivery() => sending.push({
                let client = client.clone();
                async move {
                    let outcome = client.send(&delivery.target, &delivery.leaf, &delivery.event).await;
                    (delivery, outcome)
                }
            }),
        }
    }
}
