//! Watch defined by the plan: metadata only, its changes go to the core.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use tidewatch_api::{names::AGENT_OBJECT, plan::PlannedWatch};
use tokio::{sync::watch, time::Instant};

use super::{Discovery, Sink, Target, built_in, object::Object};
use crate::{
    core::{Core, StartedWatch, WatchId},
    kubernetes::{ApiClient, ApiError},
    telemetry::error_chain,
};

/// Wait before the first list of a watch that went coarse; it doubles with each list that finds too many objects.
const COARSE_LIST: Duration = Duration::from_secs(10 * 60);
/// Upper bound of that wait.
const COARSE_LIST_CAP: Duration = Duration::from_secs(6 * 3_600);

/// Sink of one watch of the plan.
pub(crate) struct PlannedSink {
    id: WatchId,
    /// Name in logs.
    name: Arc<str>,
    planned: Arc<PlannedWatch>,
    core: Core,
    /// Key of the agent's own Lease if this watch selects it: its renewals are not reported.
    own: Option<Box<str>>,
    /// Last failure logged, so that a permanent failure (e.g. a missing right) is logged once and not at each
    /// retry.
    logged: Option<String>,
    /// The last list found nothing at the path of the kind: a lookup tells whether it is served.
    is_missing: bool,
    discovery: Discovery,
    /// Changes of the CRD of the watched kind.
    definition: watch::Receiver<()>,
    /// The watch is on CRDs.
    defines: bool,
    /// Lists of a coarse watch, which may find few enough objects to track.
    coarse_lists: CoarseLists,
}

/// Times of the lists of a coarse watch, with doubling waits: they cost as much as the objects are many.
#[derive(Debug, Default)]
struct CoarseLists {
    due: Option<Instant>,
    fruitless: u32,
}

impl CoarseLists {
    /// Notes a complete list.
    fn listed(&mut self, is_coarse: bool, now: Instant) {
        self.fruitless = if is_coarse { self.fruitless.saturating_add(1) } else { 0 };
        self.due = is_coarse.then(|| now + self.wait());
    }

    /// True if a list is due; the first call since the watch went coarse begins its wait.
    fn is_due(&mut self, is_coarse: bool, now: Instant) -> bool {
        if !is_coarse {
            *self = Self::default();
            return false;
        }
        let wait = self.wait();
        *self.due.get_or_insert(now + wait) <= now
    }

    fn wait(&self) -> Duration {
        COARSE_LIST.saturating_mul(1 << self.fruitless.min(16)).min(COARSE_LIST_CAP)
    }
}

impl PlannedSink {
    /// `namespace` is that of the agent's own objects.
    pub(crate) fn new(started: StartedWatch, namespace: &str, core: Core, discovery: Discovery) -> Self {
        let StartedWatch { id, name, planned } = started;
        let leases = planned.group == "coordination.k8s.io" && planned.resource == "leases";
        let own = leases.then(|| format!("{namespace}/{AGENT_OBJECT}").into());
        let definition = discovery.definitions.subscribe(&planned);
        let defines = planned.group == "apiextensions.k8s.io" && planned.resource == "customresourcedefinitions";
        let coarse_lists = CoarseLists::default();
        Self {
            id,
            name,
            planned,
            core,
            own,
            logged: None,
            is_missing: false,
            discovery,
            definition,
            defines,
            coarse_lists,
        }
    }

    /// Tells the discovery of a changed CRD, if this is the watch on CRDs.
    fn announce(&self, key: &str) {
        if self.defines {
            self.discovery.definitions.changed(key.trim_start_matches('/'));
        }
    }

    fn is_own(&self, key: &str) -> bool {
        self.own.as_deref() == Some(key)
    }
}

impl Sink for PlannedSink {
    type Item = Object;

    async fn target(&mut self, client: &ApiClient) -> Result<Target, ApiError> {
        let PlannedWatch { group, version, resource, namespace, label_selector, field_selector, .. } = &*self.planned;
        // A change from here on may come after the answer.
        self.definition.mark_unchanged();
        let built_in = if self.is_missing { None } else { built_in::find(group, version, resource) };
        let served = match built_in {
            Some(served) => served,
            None => self.discovery.resolve(client, &self.planned).await?,
        };
        self.core.described(self.id, &served.version, &served.kind, !served.has_status);
        let target = Target::collection(group, &served.version, namespace.as_deref(), resource);
        Ok(target.select(label_selector, field_selector))
    }

    fn begin(&mut self) {
        self.core.list_begun(self.id);
    }

    fn page(&mut self, items: Vec<Object>) -> bool {
        let objects = items.into_iter().map(Object::into_state).filter(|(key, _)| !self.is_own(key));
        let objects = objects.inspect(|(key, _)| self.announce(key)).collect();
        self.core.listed(self.id, objects, Instant::now())
    }

    fn complete(&mut self, _version: &str) {
        let now = Instant::now();
        self.core.list_complete(self.id, now);
        self.coarse_lists.listed(self.core.is_coarse(self.id), now);
    }

    fn present(&mut self, item: Object) {
        let (key, seen) = item.into_state();
        if self.is_own(&key) {
            return self.core.alive(self.id, Instant::now());
        }
        self.announce(&key);
        self.core.present(self.id, &key, seen, Instant::now());
    }

    fn gone(&mut self, item: Object) {
        let (key, seen) = item.into_state();
        if self.is_own(&key) {
            return self.core.alive(self.id, Instant::now());
        }
        self.announce(&key);
        self.core.gone(self.id, &key, seen, Instant::now());
    }

    fn bookmark(&mut self, _version: &str) {
        self.core.alive(self.id, Instant::now());
    }

    fn failed(&mut self, why: &ApiError) {
        self.is_missing = why.status() == Some(StatusCode::NOT_FOUND);
        let text = why.to_string();
        if self.logged.as_ref() != Some(&text) {
            tracing::warn!(watch = %self.name, error = error_chain(why), "Watch failed");
        }
        self.logged = Some(text.clone());
        self.core.set_error(self.id, Some(text));
    }

    fn not_served(&mut self, is_confirmed: bool) {
        if self.core.not_served(self.id, is_confirmed, Instant::now()) {
            tracing::info!(watch = %self.name, "Kind is not served");
        }
    }

    async fn redefined(&mut self) {
        if self.definition.changed().await.is_err() {
            // The sender is kept as long as there are receivers.
            std::future::pending().await
        }
    }

    fn opened(&mut self) {
        self.logged = None;
        self.core.set_error(self.id, None);
    }

    fn needs_list(&mut self) -> bool {
        self.coarse_lists.is_due(self.core.is_coarse(self.id), Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coarse_watch_is_listed_with_growing_waits_until_it_is_not() {
        let mut lists = CoarseLists::default();
        let begun = Instant::now();
        let mut now = begun;
        assert!(!lists.is_due(false, now) && !lists.is_due(true, now));
        for wait in [COARSE_LIST, COARSE_LIST * 2, COARSE_LIST * 4] {
            assert!(!lists.is_due(true, now + wait - Duration::from_secs(1)));
            now += wait;
            assert!(lists.is_due(true, now));
            lists.listed(true, now);
        }
        for _ in 0..100 {
            lists.listed(true, now);
        }
        assert!(lists.is_due(true, now + COARSE_LIST_CAP));
        lists.listed(false, now);
        assert!(!lists.is_due(true, now + COARSE_LIST_CAP), "a new wait begins");
    }
}
