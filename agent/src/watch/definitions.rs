//! Changes of CRDs, announced to the watches of the kinds that they define.
//!
//! The watch of the plan on CRDs is the source. It selects some CRDs only, and aggregated APIs have none, so each watch
//! of a kind that is not served also looks it up periodically.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use tidewatch_shared::plan::PlannedWatch;
use tokio::sync::watch;

/// Subscriptions to CRDs by their name, `<plural>.<group>`; clones share them.
#[derive(Clone, Default)]
pub(super) struct Definitions(Arc<Mutex<BTreeMap<Box<str>, watch::Sender<()>>>>);

impl Definitions {
    /// Subscribes to the CRD of a watch's kind, whether or not it exists. Subscriptions are bounded by the running
    /// watches: those that were dropped are removed.
    pub(super) fn subscribe(&self, planned: &PlannedWatch) -> watch::Receiver<()> {
        let mut subscriptions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        subscriptions.retain(|_, subscribed| subscribed.receiver_count() > 0);
        let name = format!("{}.{}", planned.resource, planned.group);
        subscriptions.entry(name.into()).or_default().subscribe()
    }

    /// Announces a created, changed or deleted CRD.
    pub(super) fn changed(&self, name: &str) {
        let subscriptions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(subscribed) = subscriptions.get(name) {
            subscribed.send_replace(());
        }
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
    fn subscriptions_do_not_outlive_their_watches() {
        let definitions = Definitions::default();
        let kept = definitions.subscribe(&planned("kept"));
        drop(definitions.subscribe(&planned("dropped")));
        let _another = definitions.subscribe(&planned("another"));
        let names: Vec<_> = definitions.0.lock().unwrap().keys().cloned().collect();
        assert_eq!(names, ["another.g".into(), "kept.g".into()] as [Box<str>; 2]);
        drop(kept);
    }
}
