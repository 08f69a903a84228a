//! Waits until the CRDs of a module are established, and applies objects meanwhile.

use std::time::Duration;

use futures::{StreamExt as _, future::join, stream};
use tokio::time::{Instant, sleep};

use super::{
    apply::is_established,
    execution::{CONCURRENCY, Execution},
    failure::Failure,
    inventory::ObjectKey,
    remote::Remote,
    render::RenderedObject,
};

/// Deadline of the CRDs of a module to be established, and the first and the longest interval of the reads; it doubles.
const DEADLINE: Duration = Duration::from_secs(10);
const INTERVAL: Duration = Duration::from_millis(20);
const MAX_INTERVAL: Duration = Duration::from_millis(500);

/// CRDs as they were read.
#[derive(Default)]
struct Observed {
    established: Vec<ObjectKey>,
    /// Names of those that were not established until the deadline.
    unestablished: Vec<String>,
    failure: Option<Failure>,
}

impl<'a> Execution<'a> {
    /// Waits until CRDs are established, for a while. Objects that do not need them are applied meanwhile: as many as the
    /// reads of the CRDs leave requests for. The others are left to the next action.
    pub(super) async fn await_definitions(
        &mut self,
        definitions: &[&RenderedObject],
        mut meanwhile: Vec<&'a RenderedObject>,
    ) {
        // The response to an apply may have shown that a CRD is established.
        let is_unknown = |object: &&RenderedObject| !self.established.contains(&object.key);
        let unknown: Vec<_> = definitions.iter().copied().filter(is_unknown).collect();
        meanwhile.truncate(CONCURRENCY.saturating_sub(unknown.len()));
        let this = &*self;
        let (observed, results) = join(this.observe_definitions(&unknown), this.send(&meanwhile)).await;
        let Observed { established, unestablished, failure } = observed;
        self.facts.established = Some(unestablished.is_empty() && failure.is_none());
        self.established.extend(established);
        self.results.unestablished = unestablished;
        self.results.failures.extend(failure);
        self.settle(meanwhile, results).await;
    }

    /// Reads CRDs until they are established, until the deadline, or until a read fails.
    async fn observe_definitions(&self, definitions: &[&RenderedObject]) -> Observed {
        let deadline = Instant::now() + DEADLINE;
        let mut interval = INTERVAL;
        let mut observed = Observed::default();
        let remotes = definitions.iter().filter_map(|object| self.remote(&object.key, &object.version));
        let mut waiting: Vec<_> = remotes.collect();
        while !waiting.is_empty() && Instant::now() < deadline {
            let reads: Vec<_> = waiting.iter().map(read).collect();
            let results: Vec<_> = stream::iter(reads).buffered(CONCURRENCY).collect().await;
            let mut still = Vec::new();
            for (remote, result) in waiting.into_iter().zip(results) {
                match result {
                    Ok(true) => observed.established.push(remote.key.clone()),
                    Ok(false) => still.push(remote),
                    Err(failure) => observed.failure = observed.failure.or(Some(failure)),
                }
            }
            if observed.failure.is_some() {
                return observed;
            }
            waiting = still;
            if !waiting.is_empty() {
                sleep(interval).await;
                interval = (interval * 2).min(MAX_INTERVAL);
            }
        }
        observed.unestablished = waiting.iter().map(|remote| remote.key.name.clone()).collect();
        observed
    }
}

/// Reads whether a CRD is established. Nothing else of it stays: CRDs are large.
async fn read(remote: &Remote<'_>) -> Result<bool, Failure> {
    let found = remote.api.get(&remote.key.name).await;
    found.map(|found| is_established(&found)).map_err(Failure::during(format!("read {}", remote.key)))
}
