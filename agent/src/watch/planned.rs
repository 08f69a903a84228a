//! A watch of the plan: metadata only, into the core.

use std::sync::Arc;

use tidewatch_shared::{names::AGENT_OBJECT, plan::PlannedWatch};
use tokio::time::Instant;

use super::{Sink, Target, discovery::discover, object::Object};
use crate::{
    core::{Core, Started, WatchId},
    kubernetes::{Call, Lane},
    telemetry::chain,
};

/// See the module.
pub(crate) struct Planned {
    id: WatchId,
    planned: Arc<PlannedWatch>,
    core: Core,
    /// Our own Lease, if this watch would see it: its renewals are news to nobody.
    own: Option<Box<str>>,
    /// The failure that was logged last: a kind that is never served is logged once, not at each try.
    logged: Option<String>,
}

impl Planned {
    /// `namespace` is that of the agent's own objects.
    pub(crate) fn new(started: Started, namespace: &str, core: Core) -> Self {
        let Started { id, planned } = started;
        let leases = planned.group == "coordination.k8s.io" && planned.resource == "leases";
        let own = leases.then(|| format!("{namespace}/{AGENT_OBJECT}").into());
        Self { id, planned, core, own, logged: None }
    }

    fn is_own(&self, key: &str) -> bool {
        self.own.as_deref() == Some(key)
    }
}

impl Sink for Planned {
    type Item = Object;

    async fn target(&mut self, lane: &Lane) -> Result<Target, Call> {
        let PlannedWatch { group, version, resource, namespace, label_selector, field_selector, .. } = &*self.planned;
        let served = discover(lane, group, version, resource).await?;
        self.core.described(self.id, &served.version, &served.kind, !served.has_status);
        let target = Target::collection(group, &served.version, namespace.as_deref(), resource);
        Ok(target.select(label_selector, field_selector))
    }

    fn begin(&mut self) {
        self.core.list_begun(self.id);
    }

    fn page(&mut self, items: Vec<Object>) -> bool {
        let objects = items.into_iter().map(Object::into_seen).filter(|(key, _)| !self.is_own(key)).collect();
        self.core.listed(self.id, objects, Instant::now())
    }

    fn complete(&mut self, _version: &str) {
        self.core.list_complete(self.id, Instant::now());
    }

    fn present(&mut self, item: Object) {
        let (key, seen) = item.into_seen();
        if self.is_own(&key) {
            return self.core.alive(self.id, Instant::now());
        }
        self.core.present(self.id, &key, seen, Instant::now());
    }

    fn gone(&mut self, item: Object) {
        let (key, seen) = item.into_seen();
        if self.is_own(&key) {
            return self.core.alive(self.id, Instant::now());
        }
        self.core.gone(self.id, &key, seen, Instant::now());
    }

    fn bookmark(&mut self, _version: &str) {
        self.core.alive(self.id, Instant::now());
    }

    fn failed(&mut self, why: &Call) {
        let text = why.to_string();
        if self.logged.as_ref() != Some(&text) {
            tracing::warn!(watch = %self.planned.name, error = chain(why), "A watch does not work");
        }
        self.logged = Some(text.clone());
        self.core.troubled(self.id, Some(text));
    }

    fn opened(&mut self) {
        self.logged = None;
        self.core.troubled(self.id, None);
    }
}
