//! Handler of Manifests: a change enqueues the reconcile of the Manifest and updates the status of its Kyma, a deletion
//! reconciles the Kyma.

use std::{collections::HashSet, sync::Arc};

use parking_lot::Mutex;
use tidewatch_api::{
    Resource, State,
    facts::ManifestFacts,
    key::{KymaKey, ManifestKey, OfManifest},
    plan::Work,
};
use tidewatch_fleet::{
    manifest_queue::ManifestQueue,
    queue::{Priority, WorkSet},
    stores::manifests::{CachedManifest, ManifestWriter, Manifests, Notice},
    table::RuntimeTable,
    watch::Change,
};
use tidewatch_modules::manifest::Memories;

use super::{
    fingerprint::{FingerprintChange, Fingerprints, Hash, KymaFingerprint, ManifestFingerprint},
    placer::KymaPlacer,
};

/// Keeps the index and the queue current. A change is noticed by the response to our own write, or else by the watch.
///
/// A reduced Manifest is one of another replica's runtime. Its fingerprint is forgotten, so that the first change after it has
/// a body again counts.
pub(super) fn handler(
    manifests: Manifests,
    fleet: RuntimeTable,
    queue: ManifestQueue,
    memories: Memories,
    placer: KymaPlacer,
) -> impl FnMut(Change<'_, CachedManifest>) + Send + 'static {
    let handler = Arc::new(Handler { manifests, fleet, queue, memories, placer, fingerprints: Mutex::default() });
    let noticing = Arc::downgrade(&handler);
    handler.manifests.on_notice(Box::new(move |notice| {
        let Some(handler) = noticing.upgrade() else { return };
        match notice {
            Notice::Written(written, by) => handler.applied(written, Some(by)),
            Notice::Gone(gone) => handler.deleted(gone),
        }
    }));
    move |change| handler.changed(change)
}

struct Handler {
    manifests: Manifests,
    fleet: RuntimeTable,
    queue: ManifestQueue,
    memories: Memories,
    placer: KymaPlacer,
    fingerprints: Mutex<Fingerprints<ManifestFingerprint, OfManifest>>,
}

impl Handler {
    /// Handles a change that the watch delivers.
    fn changed(&self, change: Change<'_, CachedManifest>) {
        match change {
            Change::Initial(cached @ CachedManifest::Whole(manifest)) => {
                let key = cached.key();
                self.manifests.apply(cached);
                self.fingerprints.lock().apply(key.clone(), ManifestFingerprint::of(manifest));
                self.place(&key, cached);
                if is_unfinished(cached) {
                    self.queue.enqueue(&key, Priority::Catalog, false);
                }
            }
            Change::Applied(cached @ CachedManifest::Whole(_)) => {
                self.applied(cached, None);
            }
            Change::Initial(cached) | Change::Applied(cached) => self.reduced(cached),
            Change::Deleted(cached) => self.deleted(cached),
            Change::Listed => {
                self.manifests.listed();
                self.placer.place_all();
            }
        }
    }

    /// Handles a new or changed Manifest. `by` is the reconcile whose write made the change; `None` if the watch delivers it.
    fn applied(&self, cached: &CachedManifest, by: Option<ManifestWriter>) {
        let CachedManifest::Whole(manifest) = cached else { return };
        let key = cached.key();
        let now = ManifestFingerprint::of(manifest);
        // Responses and the watch are concurrent: the last fingerprint is that of the newest version.
        let mut fingerprints = self.fingerprints.lock();
        if self.manifests.is_outdated(cached) {
            return;
        }
        let affected = self.manifests.apply(cached);
        let Some(change) = fingerprints.apply(key.clone(), now.clone()) else { return };
        let differs = |part: fn(&ManifestFingerprint) -> &Hash| match &change {
            FingerprintChange::New => true,
            FingerprintChange::Changed(old) => part(&now) != part(old),
        };
        let is_desired_changed = differs(|of| &of.desired);
        if is_desired_changed {
            self.place(&key, cached);
            self.queue.enqueue(&key, Priority::User, false);
        }
        // A deletion takes the Manifest out of the queue under the same lock.
        drop(fingerprints);
        if is_desired_changed && cached.facts().flags.is_deleting {
            enqueue_heirs(&self.queue, &self.manifests, cached);
        }
        let is_shown_changed = differs(|of| &of.shown);
        let is_message_changed = differs(|of| &of.message);
        for kyma in affected {
            if is_shown_changed || is_message_changed || differs(|of| &of.inventory) {
                // It may wait for objects of other kinds than before, and its inventory may have other kinds.
                self.placer.replan_runtime(&kyma);
            }
            // The reconcile of the Kyma that wrote it shows the result.
            let is_shown = by == Some(ManifestWriter::Kyma);
            if is_shown_changed && !is_shown {
                self.fleet.enqueue(&kyma, WorkSet::STATUS, Priority::User);
            } else if is_message_changed && !is_shown {
                self.fleet.show_message(&kyma);
            }
        }
    }

    /// Handles a Manifest of another replica's runtime.
    fn reduced(&self, cached: &CachedManifest) {
        let key = cached.key();
        self.fingerprints.lock().delete(&key);
        self.place(&key, cached);
        // It may have been one of a runtime of this replica.
        for kyma in self.manifests.apply(cached).into_iter().filter(|kyma| !self.fleet.is_elsewhere(kyma)) {
            self.placer.replan_runtime(&kyma);
            self.fleet.enqueue(&kyma, WorkSet::STATUS, Priority::User);
        }
    }

    fn deleted(&self, cached: &CachedManifest) {
        let key = cached.key();
        let mut fingerprints = self.fingerprints.lock();
        fingerprints.delete(&key);
        let affected = self.manifests.delete(cached);
        self.queue.remove(&key);
        self.memories.forget(&key);
        drop(fingerprints);
        enqueue_heirs(&self.queue, &self.manifests, cached);
        for kyma in affected {
            // A module that is selected again needs a new Manifest.
            self.placer.replan_runtime(&kyma);
            self.fleet.enqueue(&kyma, WorkSet::of(&[Work::Kyma]), Priority::User);
        }
        // Its successor of the same name may have been written already.
        if let Some(later) = self.manifests.find(&key) {
            self.applied(&later, None);
        }
    }

    /// Registers a Manifest in the queue as one of the Kyma that its label names. Without the label it belongs to no runtime.
    /// Those of another replica's shards are not registered.
    fn place(&self, key: &ManifestKey, manifest: &CachedManifest) {
        place(|kyma| self.fleet.is_elsewhere(kyma), &self.queue, key, manifest);
    }
}

/// Enqueues the Manifests of a Kyma that is new or selected again, or that no label holds any longer. Another controller
/// may have changed the modules of a Kyma that was not selected.
pub(super) fn enqueue_released(
    queue: &ManifestQueue,
    kyma: &KymaKey,
    now: &KymaFingerprint,
    change: &FingerprintChange<KymaFingerprint>,
) {
    let is_new = *change == FingerprintChange::New;
    if is_new || matches!(change, FingerprintChange::Changed(old) if old.is_held && !now.is_held) {
        queue.enqueue_kyma(kyma, Priority::User, is_new);
    }
}

/// Enqueues verifications of the Manifests that share objects with one that leaves, and become their owners, and of the other
/// Manifests of its module: the component of the module was renamed, and the one that leaves may have written the objects of
/// the others. Those that are being deleted are left out.
fn enqueue_heirs(queue: &ManifestQueue, manifests: &Manifests, leaving: &CachedManifest) {
    let Some(kyma) = leaving.kyma() else { return };
    let ManifestFacts { module, synced, .. } = leaving.facts();
    let objects: HashSet<_> = synced.iter().map(identity).collect();
    for other in manifests.find_of_kyma(&kyma, None) {
        let key = other.key();
        let facts = other.facts();
        if key == leaving.key() || facts.flags.is_deleting {
            continue;
        }
        let is_of_module = module.is_some_and(|module| other.is_of_module(module));
        if is_of_module || facts.synced.iter().any(|object| objects.contains(&identity(object))) {
            queue.enqueue(&key, Priority::Catalog, true);
        }
    }
}

/// Group, kind, namespace and name of an object.
fn identity(object: &Resource) -> [&str; 4] {
    [&object.group, &object.kind, &object.namespace, &object.name]
}

/// Enqueues the Manifests of a Kyma on which the holder of its shard before left the work unfinished.
pub(super) fn enqueue_unfinished(queue: &ManifestQueue, manifests: &Manifests, kyma: &KymaKey) {
    for manifest in manifests.find_of_kyma(kyma, None).iter().filter(|manifest| is_unfinished(manifest)) {
        queue.enqueue(&manifest.key(), Priority::Catalog, false);
    }
}

/// Registers a Manifest in the queue as one of the Kyma that its label names. Without the label it belongs to no runtime.
/// Those of another replica's shards, as `is_elsewhere` reports, are not registered.
fn place(is_elsewhere: impl Fn(&KymaKey) -> bool, queue: &ManifestQueue, key: &ManifestKey, manifest: &CachedManifest) {
    let own_kyma = || manifest.kyma().filter(|kyma| !is_elsewhere(kyma));
    if let Some(kyma) = own_kyma() {
        queue.insert(key.clone(), kyma);
        return;
    }
    queue.remove(key);
    // Its shard may have been acquired, and the Manifest registered, between the two.
    if let Some(kyma) = own_kyma() {
        queue.insert(key.clone(), kyma);
        queue.enqueue(key, Priority::Catalog, false);
    }
}

/// Returns true if the previous process left the work on a Manifest unfinished. All others are up to date as far as KCP
/// shows, and are verified together with their Kymas, spread over time.
fn is_unfinished(manifest: &CachedManifest) -> bool {
    let flags = manifest.facts().flags;
    flags.is_deleting || flags.state != Some(State::Ready) || !flags.is_synced
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering::Relaxed},
        },
        time::Duration,
    };

    use futures::FutureExt as _;
    use kube::runtime::{reflector, watcher};
    use serde_json::{Value, json};
    use tidewatch_api::{
        names::{annotation, label},
        plan::{Plan, PlannedWatch},
    };
    use tidewatch_fleet::{
        Tenure, manifest_queue,
        plans::Plans,
        queue::{Drift, ReconcileOutcome},
        stores::kymas::CachedKyma,
        table,
        takeover::Takeover,
    };
    use tidewatch_kit::metrics::Registry;

    use super::*;

    fn manifest(version: u32, change: impl FnOnce(&mut Value)) -> CachedManifest {
        let mut manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "namespace": "ns", "uid": "u", "resourceVersion": version.to_string(),
                "generation": 1, "labels": {"operator.kyma-project.io/kyma-name": "a"}},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}}, "status": {"state": "Processing"}});
        change(&mut manifest);
        serde_json::from_value(manifest).unwrap()
    }

    struct Fixture {
        fleet: RuntimeTable,
        queue: ManifestQueue,
        manifests: Manifests,
        plans: Plans,
        kymas: (reflector::Store<CachedKyma>, reflector::store::Writer<CachedKyma>),
    }

    impl Fixture {
        fn new() -> Self {
            let metrics = table::Metrics::register(&mut Registry::default());
            let fleet = RuntimeTable::alone(1, table::Settings::default(), metrics);
            for kyma in ["a", "b"] {
                let plan = Arc::new(Plan::new("r".into(), Vec::new()).unwrap());
                fleet.place(KymaKey::new("ns", kyma), "", Some(kyma.parse().unwrap()), plan);
            }
            fleet.set_synced();
            let metrics = manifest_queue::Metrics::register(&mut Registry::default());
            let queue = ManifestQueue::new(manifest_queue::Settings::default(), metrics, Box::new(|_| Tenure::open()));
            let plans = Plans::fixed(Plan::new("r".into(), Vec::new()).unwrap());
            let manifests = reflector::store().0.into();
            Self { fleet, queue, manifests, plans, kymas: reflector::store() }
        }

        fn handler(&self) -> impl FnMut(Change<'_, CachedManifest>) + Send + 'static {
            let memories = Memories::default();
            let placer = KymaPlacer::new(self.fleet.clone(), self.plans.clone(), self.kymas.0.clone());
            let manifests = self.manifests.clone();
            let fleet = self.fleet.clone();
            let queue = self.queue.clone();
            handler(manifests, fleet, queue, memories, placer)
        }

        /// Priority of the Manifest's job and its Kyma, if it is enqueued.
        fn job(&self) -> Option<(Priority, String)> {
            let job = self.queue.next().now_or_never()?;
            let work = job.queued.work;
            let found = (job.queued.priority, job.kyma.name.clone());
            self.queue.done(job, ReconcileOutcome::ended(work));
            Some(found)
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
    async fn response_to_a_write_enqueues_the_next_step_before_the_watch_and_its_echo_nothing() {
        let fixture = Fixture::new();
        let mut handle = fixture.handler();
        let wrote = |written: &CachedManifest, by: ManifestWriter| {
            let CachedManifest::Whole(written) = written else { panic!("it is whole") };
            fixture.manifests.wrote(written, by);
        };
        let created = manifest(2, |_| ());
        let user = Some((Priority::User, "a".to_owned()));
        wrote(&created, ManifestWriter::Kyma);
        assert_eq!((fixture.job(), fixture.enqueued()), (user.clone(), vec![]));
        let ready = manifest(3, |manifest| manifest["status"]["state"] = json!("Ready"));
        wrote(&ready, ManifestWriter::Other);
        assert_eq!((fixture.job(), fixture.enqueued()), (None, vec![("a".to_owned(), WorkSet::STATUS)]));
        for delivered in [&created, &ready] {
            handle(Change::Applied(delivered));
            assert_eq!((fixture.job(), fixture.enqueued()), (None, vec![]));
        }
        // Another writer.
        handle(Change::Applied(&manifest(4, |manifest| manifest["metadata"]["generation"] = json!(2))));
        assert_eq!((fixture.job(), fixture.enqueued()), (user.clone(), vec![("a".to_owned(), WorkSet::STATUS)]));

        // A successor of the same name is written before the watch delivers the deletion.
        let successor = manifest(6, |manifest| manifest["metadata"]["uid"] = json!("v"));
        wrote(&successor, ManifestWriter::Kyma);
        assert_eq!(fixture.job(), user);
        handle(Change::Deleted(&manifest(5, |_| ())));
        assert_eq!(fixture.job(), user, "it is registered again");
    }

    #[tokio::test(start_paused = true)]
    async fn manifest_whose_shard_is_acquired_while_it_is_removed_stays_registered() {
        let fixture = Fixture::new();
        let manifest = manifest(1, |_| ());
        let was_asked = Cell::new(false);
        let is_elsewhere = |kyma: &KymaKey| {
            // The shard is acquired right after the first answer.
            if !was_asked.replace(true) {
                fixture.queue.insert(manifest.key(), kyma.clone());
                fixture.queue.enqueue(&manifest.key(), Priority::Catalog, false);
                return true;
            }
            false
        };
        place(is_elsewhere, &fixture.queue, &manifest.key(), &manifest);
        assert_eq!(fixture.job(), Some((Priority::Catalog, "a".to_owned())));
    }

    #[tokio::test(start_paused = true)]
    async fn change_of_a_manifest_enqueues_the_status_and_its_deletion_a_reconcile() {
        let fixture = Fixture::new();
        let mut handle = fixture.handler();
        let mut check = |change: Change<'_, CachedManifest>, expected: &[(&str, WorkSet)]| {
            handle(change);
            let expected: Vec<_> = expected.iter().map(|(kyma, work)| ((*kyma).to_owned(), *work)).collect();
            assert_eq!(fixture.enqueued(), expected);
        };
        fixture.enqueued();
        let status = WorkSet::STATUS;
        let kyma = WorkSet::of(&[Work::Kyma]);
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
        check(Change::Applied(&manifest(3, noise)), &[]);
        check(Change::Applied(&manifest(4, timed)), &[]);
        for message in ["one", "two"] {
            let told = manifest(4, |manifest| {
                noise(manifest);
                manifest["status"]["lastOperation"]["operation"] = json!(message);
            });
            check(Change::Applied(&told), &[]);
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(fixture.enqueued(), [("a".to_owned(), status)], "both messages at once");
        let grown = manifest(4, |manifest| {
            noise(manifest);
            let map = json!({"group": "", "version": "v1", "kind": "ConfigMap", "namespace": "ns", "name": "a"});
            manifest["status"] = json!({"state": "Ready", "lastOperation": {"operation": "two"}, "synced": [map]});
        });
        check(Change::Applied(&grown), &[]);

        let written = manifest(5, |manifest| manifest["metadata"]["generation"] = json!(2));
        let CachedManifest::Whole(object) = &written else { panic!("it is whole") };
        fixture.manifests.wrote(object, ManifestWriter::Kyma);
        assert_eq!(fixture.enqueued(), [], "the reconcile that wrote it shows the result");
        check(Change::Applied(&written), &[]);
        let relabelled = manifest(6, |manifest| {
            manifest["metadata"]["labels"]["operator.kyma-project.io/kyma-name"] = json!("b");
        });
        check(Change::Applied(&relabelled), &[("a", status), ("b", status)]);
        check(Change::Deleted(&relabelled), &[("b", kyma)]);
    }

    /// The message tells what a removal waits for, and the agent watches those objects.
    #[tokio::test(start_paused = true)]
    async fn message_that_changes_alone_changes_the_plan() {
        let is_blocked = Arc::new(AtomicBool::new(false));
        let key = KymaKey::new("ns", "a");
        let blocked = is_blocked.clone();
        let watch = json!({"name": "blocking", "version": "v1", "resource": "things", "field": "spec", "manager": "m",
            "work": ["manifest"]});
        let watch: PlannedWatch = serde_json::from_value(watch).unwrap();
        let additional = move |_: &KymaKey| Vec::from_iter(blocked.load(Relaxed).then(|| watch.clone()));
        let plans = Plans::new(Plan::new("r".into(), Vec::new()).unwrap(), Box::new(additional), |_, more| {
            Plan::new("blocked".into(), more).unwrap()
        });
        let mut fixture = Fixture { plans, ..Fixture::new() };
        let kyma: CachedKyma = serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2",
            "kind": "Kyma", "metadata": {"name": "a", "namespace": "ns"}, "spec": {"channel": "regular"}}))
        .unwrap();
        fixture.kymas.1.apply_watcher_event(&watcher::Event::Apply(kyma));
        let mut handle = fixture.handler();
        handle(Change::Applied(&manifest(1, |_| ())));
        for blocked in [true, false] {
            is_blocked.store(blocked, Relaxed);
            handle(Change::Applied(&manifest(2, |manifest| {
                manifest["status"]["lastOperation"] = json!({"operation": format!("blocked: {blocked}")});
            })));
            assert_eq!(fixture.fleet.has_plan(&key, &fixture.plans.of(&key)), Some(true), "{blocked}");
        }
    }

    /// Sets the annotation of the applied layer, and the layer.
    fn applied(manifest: &mut Value, applied: &str, wanted: &str) {
        manifest["metadata"]["annotations"][annotation::SYNC_OCI_REF] = json!(applied);
        manifest["spec"]["install"]["source"]["ref"] = json!(wanted);
        manifest["status"]["state"] = json!("Ready");
    }

    #[tokio::test(start_paused = true)]
    async fn changed_manifest_is_enqueued_and_its_own_status_is_not() {
        let fixture = Fixture::new();
        let mut handle = fixture.handler();
        let mut check = |version: u32, change: &dyn Fn(&mut Value), kyma: Option<&str>| {
            handle(Change::Applied(&manifest(version, change)));
            assert_eq!(fixture.job(), kyma.map(|kyma| (Priority::User, kyma.to_owned())), "version {version}");
        };
        check(1, &|_| (), Some("a"));
        check(2, &|manifest| manifest["status"]["state"] = json!("Ready"), None);
        check(3, &|manifest| manifest["status"] = json!({"state": "Error", "synced": []}), None);
        check(4, &|manifest| manifest["metadata"]["generation"] = json!(2), Some("a"));
        check(5, &|manifest| manifest["metadata"]["finalizers"] = json!(["f"]), Some("a"));
        check(6, &|manifest| manifest["metadata"]["annotations"] = json!({"a": "b"}), Some("a"));
        check(7, &|manifest| manifest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"), Some("a"));
        check(8, &|manifest| manifest["metadata"]["uid"] = json!("other"), Some("a"));
        check(9, &|manifest| manifest["metadata"]["labels"][label::KYMA_NAME] = json!("b"), Some("b"));
        check(10, &|manifest| manifest["metadata"]["labels"] = json!({}), None);
    }

    #[tokio::test(start_paused = true)]
    async fn first_list_enqueues_unfinished_manifests_and_registers_the_others() {
        for (change, is_unfinished) in [
            (&(|manifest: &mut Value| applied(manifest, "sha256:1", "sha256:1")) as &dyn Fn(&mut Value), false),
            (&|manifest: &mut Value| applied(manifest, "sha256:1", "sha256:2"), true),
            (
                &|manifest: &mut Value| {
                    applied(manifest, "sha256:1", "sha256:1");
                    manifest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                },
                true,
            ),
            (
                &|manifest: &mut Value| {
                    applied(manifest, "sha256:1", "sha256:1");
                    manifest["status"]["state"] = json!("Warning");
                },
                true,
            ),
            (
                &|manifest: &mut Value| {
                    applied(manifest, "sha256:1", "sha256:1");
                    manifest["status"] = Value::Null;
                },
                true,
            ),
            (&|manifest: &mut Value| manifest["status"]["state"] = json!("Ready"), true),
        ] {
            let fixture = Fixture::new();
            let mut handle = fixture.handler();
            let manifest = manifest(1, change);
            handle(Change::Initial(&manifest));
            let expected = is_unfinished.then(|| (Priority::Catalog, "a".to_owned()));
            assert_eq!(fixture.job(), expected, "{manifest:?}");
            fixture.queue.enqueue_kyma(&KymaKey::new("ns", "a"), Priority::Verification, true);
            assert_eq!(fixture.job(), Some((Priority::Verification, "a".to_owned())), "it is registered");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn end_of_a_pause_or_skip_of_a_kyma_enqueues_its_manifests() {
        let fixture = Fixture::new();
        let mut handle = fixture.handler();
        handle(Change::Initial(&manifest(1, |manifest| applied(manifest, "sha256:1", "sha256:1"))));
        let key = KymaKey::new("ns", "a");
        let takeover = Takeover::default();
        let mut fingerprints = Fingerprints::new();
        let skipped = json!({label::SKIP_RECONCILIATION: "true"});
        for (labels, deleted, is_enqueued) in [
            (json!({label::PAUSE: "true"}), None, true),
            (json!({label::PAUSE: "true", "a": "b"}), None, false),
            (json!({}), None, true),
            (json!({"a": "b"}), None, false),
            (skipped.clone(), None, false),
            (skipped, Some("2026-01-01T00:00:00Z"), true),
            (json!({label::HAND_BACK: "true"}), None, false),
            (json!({}), None, true),
        ] {
            let kyma: CachedKyma = serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2",
                "kind": "Kyma", "metadata": {"name": "a", "labels": labels, "deletionTimestamp": deleted},
                "spec": {"channel": "regular"}}))
            .unwrap();
            let now = KymaFingerprint::of(&kyma, &takeover);
            let change = fingerprints.apply(key.clone(), now.clone()).unwrap();
            enqueue_released(&fixture.queue, &key, &now, &change);
            assert_eq!(fixture.job().is_some(), is_enqueued, "{labels}");
        }
    }

    /// A change while it was reduced was seen by another replica alone, even if a later one reverts it.
    #[tokio::test(start_paused = true)]
    async fn first_change_after_a_reduced_form_counts() {
        let fixture = Fixture::new();
        let mut handle = fixture.handler();
        let ready = manifest(1, |manifest| applied(manifest, "sha256:1", "sha256:1"));
        handle(Change::Initial(&ready));
        fixture.enqueued();
        assert_eq!(fixture.job(), None);
        handle(Change::Applied(&ready));
        assert_eq!((fixture.job(), fixture.enqueued()), (None, Vec::new()), "unchanged");
        let CachedManifest::Whole(object) = &ready else { panic!("it is whole") };
        handle(Change::Applied(&CachedManifest::reduced(object)));
        fixture.enqueued();
        assert_eq!(fixture.job(), None);
        handle(Change::Applied(&ready));
        assert_eq!(fixture.job(), Some((Priority::User, "a".to_owned())));
        assert_eq!(fixture.enqueued(), [("a".to_owned(), WorkSet::STATUS)]);
    }

    #[tokio::test(start_paused = true)]
    async fn other_manifest_of_a_module_is_verified_when_one_leaves_and_when_it_has_left() {
        let (store, mut cache) = reflector::store();
        let fixture = Fixture { manifests: store.into(), ..Fixture::new() };
        let mut handle = fixture.handler();
        let of_module = |name: &str, module: &str, deleted: Option<&str>| {
            manifest(1, |manifest| {
                manifest["metadata"]["name"] = json!(name);
                manifest["metadata"]["labels"][label::MODULE_NAME] = json!(module);
                manifest["metadata"]["deletionTimestamp"] = json!(deleted);
            })
        };
        // Names of the enqueued Manifests, and whether all of their objects are compared.
        let enqueued = || {
            let mut enqueued = Vec::new();
            while let Some(job) = fixture.queue.next().now_or_never() {
                enqueued.push((job.key.name.clone(), job.queued.drift == Drift::All));
                let work = job.queued.work;
                fixture.queue.done(job, ReconcileOutcome::ended(work));
            }
            enqueued.sort();
            enqueued
        };
        let mut apply = |manifest: &CachedManifest| {
            cache.apply_watcher_event(&watcher::Event::Apply(manifest.clone()));
            handle(Change::Applied(manifest));
        };
        for (name, module) in [("old", "x"), ("new", "x"), ("other", "y")] {
            apply(&of_module(name, module, None));
        }
        assert_eq!(enqueued().len(), 3);
        // Manifests of other modules that have an object of it.
        let with = |module: &str, object: &str, deleted: Option<&str>| {
            let CachedManifest::Whole(manifest) = of_module(module, module, deleted) else { panic!("it is whole") };
            let mut manifest = json!(manifest.as_ref());
            manifest["status"]["synced"] =
                json!([{"group": "", "version": "v1", "kind": "ConfigMap", "namespace": "ns", "name": object}]);
            serde_json::from_value::<CachedManifest>(manifest).unwrap()
        };
        for (module, object) in [("a", "shared"), ("b", "shared"), ("c", "own")] {
            apply(&with(module, object, None));
        }
        enqueued();
        apply(&with("a", "shared", Some("2026-01-01T00:00:00Z")));
        assert_eq!(enqueued(), [("a".to_owned(), false), ("b".to_owned(), true)]);

        let leaving = of_module("new", "x", Some("2026-01-01T00:00:00Z"));
        apply(&leaving);
        assert_eq!(enqueued(), [("new".to_owned(), false), ("old".to_owned(), true)]);
        cache.apply_watcher_event(&watcher::Event::Delete(leaving.clone()));
        handle(Change::Deleted(&leaving));
        assert_eq!(enqueued(), [("old".to_owned(), true)]);
    }

    #[tokio::test(start_paused = true)]
    async fn deleted_manifest_is_removed_from_the_queue() {
        let fixture = Fixture::new();
        let mut handle = fixture.handler();
        handle(Change::Applied(&manifest(1, |_| ())));
        let job = fixture.queue.next().await;
        handle(Change::Deleted(&manifest(2, |_| ())));
        assert!(job.cancellation.is_cancelled());
        drop(job);
        fixture.queue.enqueue(&ManifestKey::new("ns", "m"), Priority::User, false);
        assert_eq!(fixture.job(), None);
    }
}
