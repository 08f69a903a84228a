use kube::runtime::{
    reflector::{self, store::Writer},
    watcher::Event,
};
use proptest::prelude::*;
use serde_json::json;

use super::*;

/// A Manifest as the API server stores it: name, Kyma of the label, uid of the owner.
type Stored = (u8, Option<u8>, Option<u8>);

fn manifest((name, label, owner): Stored) -> Manifest {
    let label = label.map(|kyma| json!({label::KYMA_NAME: format!("k{kyma}")}));
    let owner = owner.map(|uid| json!([{"apiVersion": "v1", "kind": "Kyma", "name": "k", "uid": format!("u{uid}")}]));
    serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
        "metadata": {"name": format!("m{name}"), "namespace": "ns", "labels": label, "ownerReferences": owner},
        "spec": {"remote": true, "install": {"name": "i", "source": {}}}}))
    .unwrap()
}

/// Cache, index and watch, in the order of `kube::watch`: the cache first.
struct Watched {
    writer: Writer<Manifest>,
    manifests: Manifests,
}

impl Watched {
    fn new() -> Self {
        let (cache, mut writer) = reflector::store();
        writer.apply_watcher_event(&Event::Init);
        writer.apply_watcher_event(&Event::InitDone);
        Self { writer, manifests: cache.into() }
    }

    fn apply(&mut self, stored: Stored) {
        self.writer.apply_watcher_event(&Event::Apply(manifest(stored)));
        self.manifests.apply(&manifest(stored));
    }

    fn delete(&mut self, name: u8) {
        let Some(known) = self.manifests.get(&KymaKey::new("ns", format!("m{name}"))) else { return };
        self.writer.apply_watcher_event(&Event::Delete((*known).clone()));
        self.manifests.delete(&known);
    }

    fn list(&mut self, all: &[Stored]) {
        let before = self.manifests.cache.state();
        self.writer.apply_watcher_event(&Event::Init);
        all.iter().for_each(|stored| self.writer.apply_watcher_event(&Event::InitApply(manifest(*stored))));
        self.writer.apply_watcher_event(&Event::InitDone);
        self.manifests.cache.state().iter().for_each(|manifest| drop(self.manifests.apply(manifest)));
        let gone = before.iter().filter(|manifest| self.manifests.get(&KymaKey::of(manifest.as_ref())).is_none());
        gone.for_each(|manifest| drop(self.manifests.delete(manifest)));
    }

    /// The scan of the whole cache.
    fn scan(&self, kyma: u8, uid: u8) -> BTreeSet<String> {
        let (kyma, uid) = (format!("k{kyma}"), format!("u{uid}"));
        let is_owned = |manifest: &Manifest| {
            manifest.labels().get(label::KYMA_NAME) == Some(&kyma)
                || manifest.owner_references().iter().any(|owner| owner.uid == uid)
        };
        self.manifests.cache.state_filter(is_owned).iter().map(|manifest| manifest.name_any()).collect()
    }
}

#[derive(Clone, Debug)]
enum Change {
    Apply(Stored),
    Delete(u8),
    List(Vec<Stored>),
}

fn stored() -> impl Strategy<Value = Stored> {
    (0..6u8, proptest::option::of(0..3u8), proptest::option::of(0..3u8))
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => stored().prop_map(Change::Apply),
        3 => (0..6u8).prop_map(Change::Delete),
        1 => proptest::collection::vec(stored(), 0..6).prop_map(Change::List),
    ]
}

proptest! {
    #[test]
    fn index_names_exactly_the_manifests_that_a_scan_finds(changes in proptest::collection::vec(change(), 0..40)) {
        let mut watched = Watched::new();
        for change in changes {
            match change {
                Change::Apply(stored) => watched.apply(stored),
                Change::Delete(name) => watched.delete(name),
                Change::List(all) => watched.list(&all),
            }
            for (kyma, uid) in (0..3).flat_map(|kyma| (0..3).map(move |uid| (kyma, uid))) {
                let (key, uid_text) = (KymaKey::new("ns", format!("k{kyma}")), format!("u{uid}"));
                let named = watched.manifests.read().of(&wanted(&key, Some(&uid_text)));
                let named: BTreeSet<_> = named.iter().map(|manifest| manifest.name.clone()).collect();
                let expected = watched.scan(kyma, uid);
                prop_assert_eq!(&named, &expected, "no Manifest of another Kyma is read");
                let found = watched.manifests.of_kyma(&key, Some(&uid_text));
                let found: Vec<_> = found.iter().map(|manifest| manifest.name_any()).collect();
                prop_assert_eq!(found, expected.into_iter().collect::<Vec<_>>());
            }
        }
        watched.list(&[]);
        let index = watched.manifests.read();
        prop_assert!(index.owners.is_empty() && index.manifests.is_empty(), "no entry is leaked");
    }
}

#[test]
fn relabelled_manifest_concerns_both_kymas_and_a_cache_ahead_of_the_index_yields_no_foreign_manifest() {
    let mut watched = Watched::new();
    let kyma = |n: u8| KymaKey::new("ns", format!("k{n}"));
    watched.apply((0, Some(1), None));
    watched.writer.apply_watcher_event(&Event::Apply(manifest((0, Some(2), None))));
    assert!(watched.manifests.of_kyma(&kyma(1), None).is_empty());
    assert_eq!(watched.manifests.apply(&manifest((0, Some(2), None))), [kyma(1), kyma(2)].into());
    assert_eq!(watched.manifests.of_kyma(&kyma(2), None).len(), 1);
    assert!(watched.manifests.of_kyma(&KymaKey::new("other", "k2"), None).is_empty());
    assert_eq!(watched.manifests.delete(&manifest((0, Some(2), None))), [kyma(2)].into());
}
