//! Lookup of the resources of a group, for a watch of the plan on all of them.

use std::{collections::BTreeSet, sync::Arc};

use tidewatch_api::plan::PlannedWatch;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, sleep_until},
};

use super::{BACKOFF, BACKOFF_CAP, MIN_WAIT, WatchContext, absence::Absence, retry_after};
use crate::{
    backoff::Backoff,
    core::{Core, StartedWatch, WatchId},
    kubernetes::{ApiClient, ApiError},
    random,
    telemetry::error_chain,
};

/// Result of a lookup.
#[derive(Debug)]
pub(super) struct Expansion {
    /// The watch on the group.
    pub(super) id: WatchId,
    /// Its resources.
    pub(super) served: BTreeSet<String>,
}

/// Looks up the resources of one group again and again: soon after a CRD of the group changed, and at growing intervals
/// otherwise.
struct GroupLookup {
    id: WatchId,
    planned: Arc<PlannedWatch>,
    client: ApiClient,
    shared: WatchContext,
    core: Core,
    /// Changes of the CRDs of the group.
    definition: watch::Receiver<()>,
    /// Times of the lookups: frequent after a change, because discovery follows CRDs with a delay.
    pace: Absence,
    backoff: Backoff,
    /// Last failure logged.
    logged: Option<String>,
}

/// Looks up until cancelled; each successful lookup is sent. After a failure, what was sent last holds.
pub(super) async fn look_up(
    started: StartedWatch,
    client: ApiClient,
    shared: WatchContext,
    core: Core,
    expansions: mpsc::Sender<Expansion>,
) {
    let StartedWatch { id, planned, .. } = started;
    let definition = shared.discovery.definitions.subscribe(&planned);
    let pace = Absence::default();
    let backoff = Backoff::default();
    let mut lookup = GroupLookup { id, planned, client, shared, core, definition, pace, backoff, logged: None };
    loop {
        lookup.shared.rebuild.mark_unchanged();
        // A change from here on may come after the answer.
        lookup.definition.mark_unchanged();
        match lookup.shared.discovery.expand(&lookup.client, &lookup.planned).await {
            Ok(served) => {
                if expansions.send(Expansion { id, served }).await.is_err() {
                    // The supervisor has ended.
                    return;
                }
                lookup.wait().await;
            }
            Err(error) => lookup.wait_after(&error).await,
        }
    }
}

impl GroupLookup {
    /// Waits for the next regular lookup, until a CRD of the group changes, or until a relist is ordered.
    async fn wait(&mut self) {
        self.backoff.reset();
        self.logged = None;
        self.pace.observe();
        let end = Instant::now() + self.pace.delay();
        // Limits the rate of lookups when a CRD changes constantly.
        sleep(random::up_to(BACKOFF).max(MIN_WAIT)).await;
        tokio::select! {
            () = sleep_until(end) => {}
            Ok(()) = self.definition.changed() => self.pace.redefined(),
            Ok(()) = self.shared.rebuild.changed() => {}
        }
    }

    async fn wait_after(&mut self, error: &ApiError) {
        let text = error.to_string();
        if self.logged.as_ref() != Some(&text) {
            tracing::warn!(watch = %self.planned.name, error = error_chain(error), "Lookup of a group failed");
        }
        self.logged = Some(text.clone());
        self.core.set_error(self.id, Some(text));
        self.shared.metrics.watch_failed(error.kind());
        let delay = retry_after(error).unwrap_or_else(|| self.backoff.fail(BACKOFF, BACKOFF_CAP).max(MIN_WAIT));
        sleep(delay).await;
    }
}
