//! Changes of CRDs, announced to the watches of the kinds that they define.
//!
//! The watch of the plan on CRDs is one source. It selects some CRDs only, so while a watch on a group is planned,
//! [`AllDefinitions`] watches all of them. Aggregated APIs have none, so each watch of a kind that is not served, and each
//! watch on a group, also looks it up periodically.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use tidewatch_api::plan::{ALL_RESOURCES, PlannedWatch};
use tokio::sync::watch;

use super::{Named, Sink, Target};
use crate::{
    kubernetes::{ApiClient, ApiError},
    telemetry::error_chain,
};

/// Subscriptions to CRDs by their name, `<plural>.<group>`, and to those of groups, `*.<group>`; clones share them.
#[derive(Clone, Default)]
pub(super) struct Definitions(Arc<Mutex<BTreeMap<Box<str>, watch::Sender<()>>>>);

impl Definitions {
    /// Subscribes to the CRD of a watch's kind, whether or not it exists, or to those of its group. Subscriptions are bounded by the running
    /// watches: those that were dropped are removed.
    pub(super) fn subscribe(&self, planned: &PlannedWatch) -> watch::Receiver<()> {
        let mut subscriptions = self.0.lock();
        subscriptions.retain(|_, subscribed| subscribed.receiver_count() > 0);
        let name = format!("{}.{}", planned.resource, planned.group);
        subscriptions.entry(name.into()).or_default().subscribe()
    }

    /// Announces a created, changed or deleted CRD.
    pub(super) fn changed(&self, name: &str) {
        let of_group = name.split_once('.').map(|(_, group)| format!("{ALL_RESOURCES}.{group}"));
        let subscriptions = self.0.lock();
        for subscribed in
            [Some(name), of_group.as_deref()].into_iter().flatten().filter_map(|name| subscriptions.get(name))
        {
            subscribed.send_replace(());
        }
    }
}

/// Watch on all CRDs, which announces each. It reports nothing to the receiver; without it, for example for lack of the
/// right, groups are looked up periodically.
pub(super) struct AllDefinitions {
    definitions: Definitions,
    /// Last failure logged.
    logged: Option<String>,
}

impl AllDefinitions {
    pub(super) const fn new(definitions: Definitions) -> Self {
        Self { definitions, logged: None }
    }
}

impl Sink for AllDefinitions {
    type Item = Named;

    async fn target(&mut self, _client: &ApiClient) -> Result<Target, ApiError> {
        Ok(Target::collection("apiextensions.k8s.io", "v1", None, "customresourcedefinitions"))
    }

    fn present(&mut self, item: Named) {
        self.definitions.changed(&item.metadata.name);
    }

    fn gone(&mut self, item: Named) {
        self.present(item);
    }

    fn failed(&mut self, error: &ApiError) {
        let text = error.to_string();
        if self.logged.as_ref() != Some(&text) {
            tracing::warn!(error = error_chain(error), "Watch on all CRDs failed");
        }
        self.logged = Some(text);
    }

    fn opened(&mut self) {
        self.logged = None;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn planned(resource: &str) -> PlannedWatch {
        let planned = json!({"name": resource, "group": "g", "version": "*", "resource": resource, "field": "spec",
            "manager": "m", "work": ["kyma"]});
        serde_json::from_value(planned).unwrap()
    }

    #[test]
    fn change_reaches_every_watch_of_its_kind_and_no_other() {
        let definitions = Definitions::default();
        let [one, another, other] = ["things", "things", "others"].map(|name| definitions.subscribe(&planned(name)));
        definitions.changed("things.g");
        definitions.changed("unknown.g");
        assert_eq!([one, another, other].map(|subscribed| subscribed.has_changed().unwrap()), [true, true, false]);
    }

    #[test]
    fn change_reaches_the_watches_on_its_group() {
        let definitions = Definitions::default();
        let [group, thing] = ["*", "things"].map(|name| definitions.subscribe(&planned(name)));
        definitions.changed("things.other.g");
        assert_eq!([&group, &thing].map(|subscribed| subscribed.has_changed().unwrap()), [false, false]);
        definitions.changed("others.g");
        assert_eq!([&group, &thing].map(|subscribed| subscribed.has_changed().unwrap()), [true, false]);
    }

    #[test]
    fn subscriptions_do_not_outlive_their_watches() {
        let definitions = Definitions::default();
        let kept = definitions.subscribe(&planned("kept"));
        drop(definitions.subscribe(&planned("dropped")));
        let _another = definitions.subscribe(&planned("another"));
        let names: Vec<_> = definitions.0.lock().keys().cloned().collect();
        assert_eq!(names, ["another.g".into(), "kept.g".into()] as [Box<str>; 2]);
        drop(kept);
    }
}
