use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::runtime::{
    reflector::{self, store::Writer},
    watcher::Event,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use tidewatch_api::{
    facts::ReducedManifest,
    names::{annotation, label},
};

use super::*;

/// A Manifest as the API server stores it: name, Kyma of the label, uid of the owner.
type Stored = (u8, Option<u8>, Option<u8>);

/// Form in which the cache has it, if it can be reduced.
fn cached(stored: Stored, is_reduced: bool) -> CachedManifest {
    let manifest = manifest(stored);
    if is_reduced && stored.1.is_some() { CachedManifest::reduced(&manifest) } else { manifest.into() }
}

fn manifest((name, label, owner): Stored) -> Manifest {
    let label = label.map(|kyma| json!({label::KYMA_NAME: format!("k{kyma}")}));
    let owner = owner.map(|uid| json!([{"apiVersion": "v1", "kind": "Kyma", "name": "k", "uid": format!("u{uid}")}]));
    serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
        "metadata": {"name": format!("m{name}"), "namespace": "ns", "labels": label, "ownerReferences": owner},
        "spec": {"remote": true, "install": {"name": "i", "source": {}}}}))
    .unwrap()
}

/// Cache, index and watch, in the order of `watch`: the cache first.
struct Watched {
    writer: Writer<CachedManifest>,
    manifests: Manifests,
}

impl Watched {
    fn new() -> Self {
        let (cache, mut writer) = reflector::store();
        writer.apply_watcher_event(&Event::Init);
        writer.apply_watcher_event(&Event::InitDone);
        Self { writer, manifests: cache.into() }
    }

    fn apply(&mut self, stored: Stored, is_reduced: bool) {
        let cached = cached(stored, is_reduced);
        self.writer.apply_watcher_event(&Event::Apply(cached.clone()));
        self.manifests.apply(&cached);
    }

    fn delete(&mut self, name: u8) {
        let key = ManifestKey::new("ns", format!("m{name}"));
        let Some(known) = self.manifests.find(&key) else { return };
        self.writer.apply_watcher_event(&Event::Delete(known.clone()));
        self.manifests.delete(&known);
    }

    fn list(&mut self, all: &[Stored], is_reduced: bool) {
        let before = self.manifests.cache.state();
        self.writer.apply_watcher_event(&Event::Init);
        for stored in all {
            self.writer.apply_watcher_event(&Event::InitApply(cached(*stored, is_reduced)));
        }
        self.writer.apply_watcher_event(&Event::InitDone);
        self.manifests.cache.state().iter().for_each(|manifest| drop(self.manifests.apply(manifest)));
        let gone = before.iter().filter(|manifest| self.manifests.cached(&manifest.key()).is_none());
        gone.for_each(|manifest| drop(self.manifests.delete(manifest)));
    }

    /// The scan of the whole cache.
    fn scan(&self, kyma: u8, uid: u8) -> BTreeSet<String> {
        let kyma = format!("k{kyma}");
        let uid = format!("u{uid}");
        let is_owned = |manifest: &CachedManifest| {
            manifest.facts().kyma == Some(&*kyma) || manifest.owner_uids().any(|owner| owner == uid)
        };
        self.manifests.cache.state_filter(is_owned).iter().map(|manifest| manifest.key().name.clone()).collect()
    }
}

#[derive(Clone, Debug)]
enum Change {
    Apply(Stored, bool),
    Delete(u8),
    List(Vec<Stored>, bool),
}

fn stored() -> impl Strategy<Value = Stored> {
    (0..6u8, proptest::option::of(0..3u8), proptest::option::of(0..3u8))
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => (stored(), any::<bool>()).prop_map(|(stored, is_reduced)| Change::Apply(stored, is_reduced)),
        3 => (0..6u8).prop_map(Change::Delete),
        1 => (proptest::collection::vec(stored(), 0..6), any::<bool>())
            .prop_map(|(all, is_reduced)| Change::List(all, is_reduced)),
    ]
}

proptest! {
    #[test]
    fn index_names_exactly_the_manifests_that_a_scan_finds(changes in proptest::collection::vec(change(), 0..40)) {
        let mut watched = Watched::new();
        for change in changes {
            match change {
                Change::Apply(stored, is_reduced) => watched.apply(stored, is_reduced),
                Change::Delete(name) => watched.delete(name),
                Change::List(all, is_reduced) => watched.list(&all, is_reduced),
            }
            for (kyma, uid) in (0..3).flat_map(|kyma| (0..3).map(move |uid| (kyma, uid))) {
                let key = KymaKey::new("ns", format!("k{kyma}"));
                let uid_text = format!("u{uid}");
                let named = watched.manifests.index.read().of(&wanted(&key, Some(&uid_text)));
                let named: BTreeSet<_> = named.iter().map(|manifest| manifest.name.clone()).collect();
                let expected = watched.scan(kyma, uid);
                prop_assert_eq!(&named, &expected, "no Manifest of another Kyma is read");
                let found = watched.manifests.find_of_kyma(&key, Some(&uid_text));
                let names: Vec<_> = found.iter().map(|manifest| manifest.key().name.clone()).collect();
                prop_assert_eq!(names, expected.into_iter().collect::<Vec<_>>());
                let is_whole = !found.iter().any(CachedManifest::is_reduced);
                let whole = watched.manifests.of_kyma(&key, Some(&uid_text));
                prop_assert_eq!(whole.map(|whole| whole.len()).ok(), is_whole.then_some(found.len()));
            }
        }
        watched.list(&[], false);
        let index = watched.manifests.index.read();
        prop_assert!(index.owners.is_empty() && index.manifests.is_empty(), "no entry is leaked");
    }
}

#[test]
fn relabelled_manifest_concerns_both_kymas_and_a_cache_ahead_of_the_index_yields_no_foreign_manifest() {
    let mut watched = Watched::new();
    let kyma = |n: u8| KymaKey::new("ns", format!("k{n}"));
    watched.apply((0, Some(1), None), false);
    let relabelled = cached((0, Some(2), None), false);
    watched.writer.apply_watcher_event(&Event::Apply(relabelled.clone()));
    assert!(watched.manifests.of_kyma(&kyma(1), None).unwrap().is_empty());
    assert_eq!(watched.manifests.apply(&relabelled), [kyma(1), kyma(2)].into());
    assert_eq!(watched.manifests.of_kyma(&kyma(2), None).unwrap().len(), 1);
    assert!(watched.manifests.of_kyma(&KymaKey::new("other", "k2"), None).unwrap().is_empty());
    watched.writer.apply_watcher_event(&Event::Delete(relabelled.clone()));
    assert_eq!(watched.manifests.delete(&relabelled), [kyma(2)].into());
}

#[test]
fn reader_of_a_body_is_never_told_that_a_reduced_manifest_does_not_exist() {
    let mut watched = Watched::new();
    let whole = (0, Some(1), None);
    let reduced = (1, Some(1), None);
    watched.apply(whole, false);
    watched.apply(reduced, true);
    let key = |name: u8| ManifestKey::new("ns", format!("m{name}"));
    assert!(watched.manifests.get(&key(0)).unwrap().is_some());
    assert_eq!(watched.manifests.get(&key(1)), Err(BodyMissingError { kind: "Manifest", key: key(1).to_string() }));
    assert_eq!(watched.manifests.get(&key(2)), Ok(None));
    let kyma = KymaKey::new("ns", "k1");
    assert_eq!(
        watched.manifests.of_kyma(&kyma, None),
        Err(BodyMissingError { kind: "Manifest", key: key(1).to_string() })
    );
    watched.apply(reduced, false);
    assert_eq!(watched.manifests.of_kyma(&kyma, None).unwrap().len(), 2);
}

#[test]
fn reduced_manifest_has_the_facts_of_the_whole_one() {
    let resource = json!({"group": "", "version": "v1", "kind": "ConfigMap", "name": "c", "namespace": "ns"});
    let full = json!({
        "metadata": {"name": "m", "namespace": "ns", "resourceVersion": "7", "deletionTimestamp": "2026-01-01T00:00:00Z",
            "labels": {label::KYMA_NAME: "k", label::MODULE_NAME: "keda", label::CHANNEL: "fast",
                label::MANDATORY_MODULE: "true", label::SKIP_RECONCILIATION: "true"},
            "annotations": {annotation::SYNC_OCI_REF: "sha256:1", annotation::UNMANAGED: "true", annotation::ROLLOUT: "r"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Kyma", "name": "k", "uid": "u"}]},
        "spec": {"remote": true, "version": "1.0.0", "install": {"name": "i", "source": {"ref": "sha256:1"}}},
        "status": {"state": "Warning", "synced": [resource], "lastOperation": {"operation": "waiting"}}});
    let without = |change: &dyn Fn(&mut Value)| {
        let mut manifest = full.clone();
        change(&mut manifest);
        manifest["apiVersion"] = json!("operator.kyma-project.io/v1beta2");
        manifest["kind"] = json!("Manifest");
        manifest
    };
    let mut seen = BTreeSet::new();
    for manifest in [
        without(&|_| ()),
        without(&|manifest| manifest["metadata"]["deletionTimestamp"] = Value::Null),
        without(&|manifest| manifest["metadata"]["annotations"] = Value::Null),
        without(&|manifest| manifest["metadata"]["labels"] = json!({label::KYMA_NAME: "k"})),
        without(&|manifest| manifest["metadata"]["ownerReferences"] = Value::Null),
        without(&|manifest| manifest["spec"] = json!({"remote": true, "install": {"name": "i", "source": {}}})),
        without(&|manifest| manifest["status"] = Value::Null),
    ] {
        let manifest: Manifest = serde_json::from_value(manifest).unwrap();
        let whole = CachedManifest::from(manifest.clone());
        let reduced = CachedManifest::reduced(&manifest);
        assert_eq!(reduced.facts(), whole.facts());
        let is_mandatory = whole.facts().flags.is_mandatory;
        assert_eq!((reduced.is_mandatory(), whole.is_mandatory()), (is_mandatory, is_mandatory));
        assert_eq!((reduced.key(), reduced.kyma(), reduced.owners()), (whole.key(), whole.kyma(), whole.owners()));
        assert_eq!(reduced.object_version(), Some("7"));
        seen.insert(format!("{:?}", reduced.facts()));
    }
    assert_eq!(seen.len(), 6, "all but the owner is a fact: {seen:?}");
}

#[test]
fn manifest_of_no_or_several_owners_is_not_reduced() {
    let reduce = |manifest: &Manifest| {
        ReducedManifest::of(ManifestKey::of(manifest), manifest, |text| text.to_owned().into()).is_some()
    };
    let mut manifest = manifest((0, Some(1), Some(1)));
    assert!(reduce(&manifest));
    let mut owners = manifest.metadata.owner_references.clone().unwrap();
    owners.push(owners[0].clone());
    manifest.metadata.owner_references = Some(owners.clone());
    assert!(reduce(&manifest), "the same one");
    owners[1].uid = "other".to_owned();
    manifest.metadata.owner_references = Some(owners);
    assert!(!reduce(&manifest));
    manifest.metadata.owner_references = None;
    manifest.metadata.labels = None;
    assert!(!reduce(&manifest));
}

/// A Manifest of the Kyma `k1` at a version.
fn version(uid: &str, version: u64) -> Manifest {
    let mut manifest = manifest((0, Some(1), None));
    manifest.metadata.uid = Some(uid.to_owned());
    manifest.metadata.resource_version = Some(version.to_string());
    manifest
}

impl Watched {
    /// uid and version that readers get, by name and by Kyma.
    fn read(&self) -> Option<(String, u64)> {
        let by_name = self.manifests.get(&ManifestKey::new("ns", "m0")).unwrap();
        let of_kyma = self.manifests.of_kyma(&KymaKey::new("ns", "k1"), None).unwrap();
        assert_eq!(by_name.clone().into_iter().collect::<Vec<_>>(), of_kyma);
        let version = |manifest: &Manifest| manifest.metadata.resource_version.clone().unwrap().parse().unwrap();
        by_name.map(|manifest| (manifest.metadata.uid.clone().unwrap(), version(&manifest)))
    }

    fn deliver(&mut self, manifest: Manifest) {
        self.writer.apply_watcher_event(&Event::Apply(manifest.clone().into()));
        self.manifests.apply(&manifest.into());
    }

    fn deliver_deletion(&mut self, manifest: Manifest) {
        self.writer.apply_watcher_event(&Event::Delete(manifest.clone().into()));
        self.manifests.delete(&manifest.into());
    }

    fn is_uncertain(&self) -> bool {
        !self.manifests.uncertain(&KymaKey::new("ns", "k1")).is_empty()
    }

    fn keeps_writes(&self) -> bool {
        !self.manifests.writes.read().is_empty()
    }
}

fn found(uid: &str, version: u64) -> Option<(String, u64)> {
    Some((uid.to_owned(), version))
}

#[test]
fn readers_get_our_last_write_until_the_cache_shows_it() {
    let mut watched = Watched::new();
    watched.deliver(version("u", 1));
    watched.manifests.wrote(&version("u", 3), ManifestWriter::Other);
    assert_eq!(watched.read(), found("u", 3));
    watched.manifests.wrote(&version("u", 5), ManifestWriter::Other);
    // The response to the first write is handled late.
    watched.manifests.wrote(&version("u", 3), ManifestWriter::Kyma);
    assert!(watched.manifests.is_outdated(&version("u", 4).into()));
    assert!(!watched.manifests.is_outdated(&version("u", 5).into()));
    for (delivered, expected, keeps) in [(3, 5, true), (4, 5, true), (5, 5, false), (7, 7, false)] {
        watched.deliver(version("u", delivered));
        assert_eq!((watched.read(), watched.keeps_writes()), (found("u", expected), keeps), "{delivered}");
    }
    // The watch was faster than the response.
    watched.manifests.wrote(&version("u", 6), ManifestWriter::Other);
    assert_eq!((watched.read(), watched.keeps_writes()), (found("u", 7), false));
    // A version that is not a number proves nothing.
    let mut opaque = version("u", 0);
    opaque.metadata.resource_version = Some("x".to_owned());
    watched.manifests.wrote(&opaque, ManifestWriter::Other);
    assert!(!watched.keeps_writes());
}

#[test]
fn created_manifest_is_found_at_once_and_read_from_kcp_until_the_cache_has_shown_it() {
    let mut watched = Watched::new();
    let key = ManifestKey::new("ns", "m0");
    let kyma = KymaKey::new("ns", "k1");
    watched.manifests.begin_write(key.clone(), &kyma);
    assert!(watched.is_uncertain() && watched.read().is_none(), "its result is unknown");
    watched.manifests.wrote(&version("u", 3), ManifestWriter::Kyma);
    assert!(watched.is_uncertain());
    assert_eq!(watched.read(), found("u", 3));
    watched.manifests.found(&key, Some(version("u", 4)));
    assert_eq!(watched.read(), found("u", 4));
    watched.deliver(version("u", 4));
    assert!(!watched.is_uncertain() && !watched.keeps_writes());

    // A write that failed leaves it uncertain, whatever the cache shows.
    watched.manifests.begin_write(key.clone(), &kyma);
    watched.manifests.wrote(&version("u", 6), ManifestWriter::Other);
    watched.deliver(version("u", 6));
    assert!(watched.is_uncertain());
    watched.manifests.forget_writes(&kyma);
    assert!(!watched.is_uncertain() && !watched.keeps_writes());
}

#[test]
fn deleted_manifest_is_gone_at_once_and_its_successor_is_another_one() {
    let mut watched = Watched::new();
    let key = ManifestKey::new("ns", "m0");
    let kyma = KymaKey::new("ns", "k1");
    watched.deliver(version("u", 1));
    watched.manifests.begin_write(key.clone(), &kyma);
    watched.manifests.wrote_gone(&key, Some("u".to_owned()), ManifestWriter::Kyma);
    assert!(watched.read().is_none() && !watched.is_uncertain());
    watched.manifests.wrote(&version("v", 4), ManifestWriter::Kyma);
    assert_eq!(watched.read(), found("v", 4), "the cache still has the first one");
    watched.deliver_deletion(version("u", 3));
    assert_eq!(watched.read(), found("v", 4));
    watched.deliver(version("v", 4));
    assert!(!watched.keeps_writes());

    let mut deleting = version("v", 5);
    deleting.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    watched.manifests.wrote(&deleting, ManifestWriter::Kyma);
    assert!(watched.is_uncertain(), "its deletion may have ended");
    watched.deliver(deleting);
    assert!(!watched.is_uncertain() && !watched.keeps_writes());

    // The watch has delivered both before the response is handled.
    watched.deliver_deletion(version("v", 6));
    watched.manifests.wrote(&version("v", 5), ManifestWriter::Kyma);
    assert!(watched.is_uncertain(), "a read finds out");
    watched.manifests.found(&key, None);
    assert!(watched.read().is_none() && !watched.keeps_writes());
}

/// After a list, the last known state is delivered as deleted.
#[test]
fn deletion_that_shows_an_older_version_than_our_write_ends_it() {
    let mut watched = Watched::new();
    watched.deliver(version("u", 1));
    watched.manifests.wrote(&version("u", 3), ManifestWriter::Other);
    assert_eq!(watched.read(), found("u", 3));
    watched.deliver_deletion(version("u", 1));
    assert!(watched.read().is_none() && !watched.keeps_writes());
}

#[test]
fn manifest_without_its_label_stays_uncertain_for_the_kyma_that_wrote_it() {
    let watched = Watched::new();
    let kyma = KymaKey::new("ns", "k1");
    watched.manifests.begin_write(ManifestKey::new("ns", "m0"), &kyma);
    let mut unlabelled = version("u", 3);
    unlabelled.metadata.labels = None;
    watched.manifests.wrote(&unlabelled, ManifestWriter::Kyma);
    assert!(watched.is_uncertain());
    watched.manifests.forget_writes(&kyma);
    assert!(!watched.keeps_writes());
}

#[test]
fn response_is_the_first_notice_of_a_change() {
    let watched = Watched::new();
    let noticed = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let notices = noticed.clone();
    let manifests = watched.manifests.clone();
    watched.manifests.on_notice(Box::new(move |notice| {
        let (manifest, by) = match notice {
            Notice::Written(manifest, by) => (manifest, Some(by)),
            Notice::Gone(manifest) => (manifest, None),
        };
        assert_eq!(manifests.find(&manifest.key()).is_some(), by.is_some(), "readers know it already");
        notices.lock().push((manifest.object_version().unwrap().to_owned(), by));
    }));
    watched.manifests.wrote(&version("u", 3), ManifestWriter::Kyma);
    watched.manifests.wrote(&version("u", 5), ManifestWriter::Other);
    // The watch has delivered creation and deletion before both responses.
    watched.manifests.found(&ManifestKey::new("ns", "m0"), None);
    let expected = [("3", Some(ManifestWriter::Kyma)), ("5", Some(ManifestWriter::Other)), ("5", None)];
    assert_eq!(*noticed.lock(), expected.map(|(version, by)| (version.to_owned(), by)));
}

#[tokio::test(start_paused = true)]
async fn list_ends_what_earlier_writes_tell_of_a_control_plane_that_was_restored() {
    let mut watched = Watched::new();
    watched.manifests.wrote(&version("u", 100), ManifestWriter::Other);
    tokio::time::advance(LIST_TIME / 2).await;
    watched.deliver(version("u", 50));
    watched.manifests.listed();
    assert_eq!(watched.read(), found("u", 100), "it may be newer than the list");
    tokio::time::advance(LIST_TIME).await;
    watched.manifests.listed();
    assert_eq!((watched.read(), watched.keeps_writes()), (found("u", 50), false));
}
