//! Handler of Manifests: a change updates the status of the Kyma, a deletion reconciles it.

use tidewatch_shared::{api::Manifest, plan::Work};

use super::fingerprint::{Fingerprints, ManifestFingerprint};
use crate::{
    base::{key::KymaKey, manifests::Manifests},
    controllers::kyma::PendingWrites,
    fleet::{
        queue::{Priority, WorkSet},
        table::RuntimeTable,
    },
    kube::watch::Change,
};

/// Keeps the index current. The echo of our own write enqueues nothing: the reconcile that wrote shows the result.
pub(super) fn handler(
    manifests: Manifests,
    fleet: RuntimeTable,
    writes: PendingWrites,
) -> impl FnMut(Change<'_, Manifest>) + Send + 'static {
    let mut fingerprints = Fingerprints::new();
    move |change| match change {
        Change::Initial(manifest) => {
            manifests.apply(manifest);
            fingerprints.apply(KymaKey::of(manifest), ManifestFingerprint::of(manifest));
        }
        Change::Applied(manifest) => {
            let affected = manifests.apply(manifest);
            let is_same = fingerprints.apply(KymaKey::of(manifest), ManifestFingerprint::of(manifest)).is_none();
            for kyma in affected {
                let is_echo = writes.is_echo(&kyma, manifest);
                if !is_same && !is_echo {
                    fleet.enqueue(&kyma, WorkSet::STATUS, Priority::User);
                }
            }
        }
        Change::Deleted(manifest) => {
            fingerprints.delete(&KymaKey::of(manifest));
            for kyma in manifests.delete(manifest) {
                // A module that is selected again needs a new Manifest.
                fleet.enqueue(&kyma, WorkSet::of(&[Work::Kyma]), Priority::User);
            }
        }
        Change::Listed => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt as _;
    use kube::runtime::reflector;
    use serde_json::{Value, json};
    use tidewatch_shared::{identity::Instance, metrics::Registry, plan::Plan};
    use tokio::time::Instant;

    use super::*;
    use crate::fleet::{queue::ReconcileOutcome, table};

    fn manifest(version: u32, change: impl FnOnce(&mut Value)) -> Manifest {
        let mut manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "namespace": "ns", "uid": "u", "resourceVersion": version.to_string(),
                "generation": 1, "labels": {"operator.kyma-project.io/kyma-name": "a"}},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}}, "status": {"state": "Processing"}});
        change(&mut manifest);
        serde_json::from_value(manifest).unwrap()
    }

    struct Fixture {
        fleet: RuntimeTable,
        manifests: Manifests,
        writes: PendingWrites,
    }

    impl Fixture {
        fn new() -> Self {
            let metrics = table::Metrics::register(&mut Registry::default());
            let fleet = RuntimeTable::new(Instance::new(1), table::Settings::default(), metrics, Instant::now());
            for kyma in ["a", "b"] {
                let plan = Arc::new(Plan::new("r".into(), Vec::new()).unwrap());
                fleet.place(KymaKey::new("ns", kyma), Some(kyma.parse().unwrap()), plan);
            }
            fleet.set_synced();
            Self { fleet, manifests: reflector::store().0.into(), writes: PendingWrites::default() }
        }

        /// Names of the enqueued Kymas with their work.
        fn enqueued(&self) -> Vec<(String, WorkSet)> {
            let mut enqueued = Vec::new();
            while let Some(job) = self.fleet.next().now_or_never() {
                enqueued.push((job.key.name.clone(), job.queued.work));
                let work = job.queued.work;
                self.fleet.done(job, ReconcileOutcome::ended(work));
            }
            enqueued.sort_by(|a, b| a.0.cmp(&b.0));
            enqueued
        }
    }

    #[tokio::test(start_paused = true)]
    async fn change_of_a_manifest_enqueues_the_status_and_its_deletion_a_reconcile() {
        let fixture = Fixture::new();
        let mut handle = handler(fixture.manifests.clone(), fixture.fleet.clone(), fixture.writes.clone());
        let mut check = |change: Change<'_, Manifest>, expected: &[(&str, WorkSet)]| {
            handle(change);
            let expected: Vec<_> = expected.iter().map(|(kyma, work)| ((*kyma).to_owned(), *work)).collect();
            assert_eq!(fixture.enqueued(), expected);
        };
        fixture.enqueued();
        let (status, kyma) = (WorkSet::STATUS, WorkSet::of(&[Work::Kyma]));
        check(Change::Initial(&manifest(1, |_| ())), &[]);
        check(Change::Applied(&manifest(1, |_| ())), &[]);
        check(Change::Applied(&manifest(2, |manifest| manifest["status"]["state"] = json!("Ready"))), &[("a", status)]);
        let noise = |manifest: &mut Value| {
            manifest["status"] = json!({"state": "Ready", "lastOperation": {"operation": ""}});
            manifest["metadata"]["finalizers"] = json!(["f"]);
        };
        let timed = |manifest: &mut Value| {
            noise(manifest);
            manifest["status"]["lastOperation"]["lastUpdateTime"] = json!("2026-01-01T00:00:00Z");
        };
        check(Change::Applied(&manifest(3, noise)), &[("a", status)]);
        check(Change::Applied(&manifest(4, timed)), &[]);

        let written = manifest(5, |manifest| manifest["metadata"]["generation"] = json!(2));
        fixture.writes.is(&KymaKey::new("ns", "a"), &written);
        check(Change::Applied(&written), &[]);
        let relabelled = manifest(6, |manifest| {
            manifest["metadata"]["labels"]["operator.kyma-project.io/kyma-name"] = json!("b");
        });
        check(Change::Applied(&relabelled), &[("a", status), ("b", status)]);
        check(Change::Deleted(&relabelled), &[("b", kyma)]);
    }
}
