//! Delays the requests of connections that open during a start, until the caches of KCP have synced.
//!
//! After a restart all agents connect within seconds. Their handshakes take as much CPU time before the caches have synced as
//! afterwards, but a request is refused before, and each refused one returns. So connections are accepted at once, and the
//! first request on each is read once it can be answered. Waiting in the kernel's backlog instead would lose most of them: it is
//! shorter than a fleet, and TCP retries with growing delays.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// Limit of the wait, shorter than the deadline of an agent's request (15 s). From then on requests are refused until the caches
/// have synced, and the clients return over many seconds.
const LIMIT: Duration = Duration::from_secs(12);

/// Opens when the caches have synced, at the latest 12 s after its creation. The default is open.
#[derive(Clone, Debug, Default)]
pub struct StartGate(Option<(CancellationToken, Instant)>);

impl StartGate {
    /// A gate that opens when `synced` is cancelled.
    pub fn new(synced: CancellationToken) -> Self {
        Self(Some((synced, Instant::now() + LIMIT)))
    }

    /// Waits until the gate is open. Cancel safe.
    pub(super) async fn opened(&self) {
        let Some((synced, limit)) = &self.0 else { return };
        tokio::select! {
            () = synced.cancelled() => {}
            () = sleep_until(*limit) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn gate_opens_once_the_caches_have_synced_and_not_much_later_without_them() {
        let synced = CancellationToken::new();
        let begun = Instant::now();
        StartGate::default().opened().await;
        let gate = StartGate::new(synced.clone());
        tokio::join!(gate.opened(), async { synced.cancel() });
        assert_eq!(begun.elapsed(), Duration::ZERO);
        let gate = StartGate::new(CancellationToken::new());
        let begun = Instant::now();
        gate.opened().await;
        assert_eq!(begun.elapsed(), LIMIT, "KCP does not answer");
        gate.opened().await;
        assert_eq!(begun.elapsed(), LIMIT, "the limit counts from the start, not from each connection");
    }
}
