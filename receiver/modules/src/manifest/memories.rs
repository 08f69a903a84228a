//! Results of earlier reconciles of each Manifest: those of the engine, and the reports that its writes cause.

use tidewatch_api::key::{KymaKey, ManifestKey};
use tidewatch_contract::event::{Change, Object};
use tidewatch_engine::PodSelection;

use super::drift::reported_key;

/// Results of earlier reconciles; bounded by the number of Manifests. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Memories {
    /// Results that the engine needs.
    pub(crate) engine: tidewatch_engine::Memories,
}

impl Memories {
    /// Drops all that is known of a Manifest that is gone.
    pub fn forget(&self, key: &ManifestKey) {
        self.engine.forget(key);
    }

    /// Returns true once if a report is that of our own write, after which no other writer has written.
    pub(super) fn is_echo(&self, key: &ManifestKey, object: &Object) -> bool {
        let is_written = self.engine.is_echo(key, &reported_key(object), &object.resource_version);
        // The agent may name the last version that it saw of an object that is gone.
        is_written && object.change != Change::Deleted
    }

    /// Pods of a Manifest's manager that the agent is to watch.
    pub(super) fn pods(&self, key: &ManifestKey) -> Option<PodSelection> {
        self.engine.pods(key)
    }

    /// Waits for the next Kyma with other pods to watch: its runtime needs another plan.
    pub async fn next_replanned(&self) -> KymaKey {
        self.engine.next_replanned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(change: Change) -> Object {
        Object {
            subject: "/v1/configmaps/kyma-system/a".parse().unwrap(),
            kind: "ConfigMap".to_owned(),
            uid: String::new(),
            resource_version: "7".to_owned(),
            generation: None,
            change,
        }
    }

    #[test]
    fn report_of_a_deletion_is_no_echo_of_our_last_write() {
        let memories = Memories::default();
        let key = ManifestKey::new("ns", "m");
        for (change, is_echo) in [(Change::Spec, true), (Change::Deleted, false)] {
            let report = report(change);
            memories.engine.put_write(&key, &reported_key(&report), "7");
            assert_eq!(memories.is_echo(&key, &report), is_echo);
        }
    }
}
