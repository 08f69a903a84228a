//! Inventory of one runtime's catalog, and its stored form: the ConfigMap `kyma-system/tidewatch-catalog`. Pure.
//!
//! It records the last written or read state of each managed object, and the fingerprint of the desired catalog that
//! the runtime was last fully synced to. An object is added before it is created and removed after it is deleted, so a
//! crash never loses track of one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::DynamicObject;

use super::desired::{ContentHash, ObjectId};
use crate::base::short_map::ShortMap;

/// Key of the fingerprint of the class's desired catalog.
const CLASS: &str = "class";
/// Key of the objects, one line each: `<plural>/<name> <hash> <uid> <generation>`.
const OBJECTS: &str = "objects";
/// Placeholder of an unknown value.
const UNKNOWN: &str = "-";

/// State of a managed object after the last write or read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InventoryEntry {
    /// Hash of the desired content that the object had.
    pub hash: ContentHash,
    /// UID of the object.
    pub uid: Box<str>,
    /// Generation of the object; zero if the kind has none.
    pub generation: i64,
    /// resourceVersion of the object; empty if the entry was loaded from the runtime.
    pub resource_version: Box<str>,
}

impl InventoryEntry {
    /// Records an object with content of this hash.
    #[must_use]
    pub fn new(hash: ContentHash, object: &DynamicObject) -> Self {
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        Self {
            hash,
            uid: text(&object.metadata.uid),
            generation: object.metadata.generation.unwrap_or_default(),
            resource_version: text(&object.metadata.resource_version),
        }
    }
}

/// Managed objects of one runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Managed objects as last written or read.
    pub entries: ShortMap<ObjectId, InventoryEntry>,
    /// Objects with a failed call or an unconfirmed creation. The next sync reads them first.
    pub unverified: BTreeSet<ObjectId>,
    /// Fingerprint of the desired catalog that the last complete sync reached; `None` while an object is missing.
    pub fingerprint: Option<Box<str>>,
    stored: Option<Stored>,
}

/// State of the stored form in the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stored {
    version: String,
    /// Hash of the data; `None` if the stored data differs from this inventory's.
    hash: Option<ContentHash>,
}

impl Inventory {
    /// Parses the stored form. Returns `None` if any part of it is malformed; the inventory is then rebuilt from the
    /// runtime's objects and overwrites the stored form.
    #[must_use]
    pub fn read(map: &ConfigMap) -> Option<Self> {
        let data = map.data.as_ref()?;
        let class = data.get(CLASS)?.as_str();
        let mut inventory = Self { fingerprint: (class != UNKNOWN).then(|| class.into()), ..Self::default() };
        for line in data.get(OBJECTS)?.lines() {
            let words: Vec<_> = line.splitn(5, ' ').collect();
            let [id, hash, uid, generation] = words[..] else { return None };
            let id = ObjectId::parse(id)?;
            let generation = generation.parse().ok()?;
            let hash = if hash == UNKNOWN {
                inventory.unverified.insert(id.clone());
                ContentHash::UNKNOWN
            } else {
                ContentHash::parse(hash)?
            };
            if uid != UNKNOWN {
                // A resourceVersion is not stored: any write of another controller, such as to a status, changes it.
                let entry = InventoryEntry { hash, uid: uid.into(), generation, resource_version: "".into() };
                inventory.entries.insert(id, entry);
            }
        }
        inventory.mark_stored(map.metadata.resource_version.clone().unwrap_or_default(), data);
        Some(inventory)
    }

    /// Records that the runtime holds a stored form with other contents, or none. The next write replaces it.
    pub fn mark_foreign(&mut self, map: Option<&ConfigMap>) {
        let version = |map: &ConfigMap| map.metadata.resource_version.clone().unwrap_or_default();
        self.stored = map.map(|map| Stored { version: version(map), hash: None });
    }

    /// Records that a write failed but may have been persisted, so that the next sync writes again. A process that
    /// trusted the stored form until then would miss objects deleted since.
    pub fn mark_unconfirmed(&mut self) {
        self.fingerprint = None;
        if let Some(stored) = &mut self.stored {
            stored.hash = None;
        }
    }

    /// Returns whether the last complete sync reached this fingerprint and no object is unverified.
    #[must_use]
    pub fn is_current(&self, content: &str) -> bool {
        self.fingerprint.as_deref() == Some(content) && self.unverified.is_empty()
    }

    /// Adds objects that are about to be created. Returns whether any was new.
    pub fn add_unverified<'a>(&mut self, ids: impl IntoIterator<Item = &'a ObjectId>) -> bool {
        let new: Vec<_> = ids.into_iter().filter(|id| !self.entries.contains_key(*id)).cloned().collect();
        let grows = !new.is_empty();
        self.unverified.extend(new);
        grows
    }

    /// Data of the stored form.
    #[must_use]
    pub fn data(&self) -> BTreeMap<String, String> {
        let mut objects = String::new();
        let ids: BTreeSet<_> = self.entries.keys().chain(&self.unverified).collect();
        for id in ids {
            let entry = self.entries.get(id);
            let hash = entry.filter(|entry| entry.hash != ContentHash::UNKNOWN && !self.unverified.contains(id));
            let hash = hash.map_or_else(|| UNKNOWN.to_owned(), |entry| entry.hash.to_string());
            let uid = entry.map(|entry| &*entry.uid).filter(|uid| !uid.is_empty()).unwrap_or(UNKNOWN);
            let generation = entry.map_or(0, |entry| entry.generation);
            // Writing to a `String` cannot fail.
            let _ = writeln!(objects, "{id} {hash} {uid} {generation}");
        }
        let class = self.fingerprint.as_deref().unwrap_or(UNKNOWN).to_owned();
        BTreeMap::from([(CLASS.to_owned(), class), (OBJECTS.to_owned(), objects)])
    }

    /// Returns whether the stored form is known to hold exactly this data.
    #[must_use]
    pub fn is_stored_as(&self, data: &BTreeMap<String, String>) -> bool {
        self.stored.as_ref().is_some_and(|stored| stored.hash == Some(hash(data)))
    }

    /// Records the data and resourceVersion of the stored form after a read or write.
    pub fn mark_stored(&mut self, version: String, data: &BTreeMap<String, String>) {
        self.stored = Some(Stored { version, hash: Some(hash(data)) });
    }

    /// resourceVersion of the stored form; `None` if there is none.
    #[must_use]
    pub fn version(&self) -> Option<&str> {
        self.stored.as_ref().map(|stored| stored.version.as_str())
    }
}

fn hash(data: &BTreeMap<String, String>) -> ContentHash {
    ContentHash::of(&data.iter().map(|(key, value)| (key.clone(), value.clone())).collect())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use serde_json::json;

    use super::*;
    use crate::controllers::catalog::desired::Kind;

    fn id(name: &str) -> ObjectId {
        ObjectId::new(Kind::Template, name)
    }

    fn inventory() -> Inventory {
        let entry = InventoryEntry {
            hash: ContentHash::of(&json!(1)),
            uid: "u-1".into(),
            generation: 3,
            resource_version: "".into(),
        };
        Inventory {
            entries: [(id("a-1.0.0"), entry)].into_iter().collect(),
            fingerprint: Some("c1".into()),
            ..Inventory::default()
        }
    }

    fn map(data: BTreeMap<String, String>) -> ConfigMap {
        let metadata = ObjectMeta { resource_version: Some("5".to_owned()), ..ObjectMeta::default() };
        ConfigMap { metadata, data: Some(data), ..ConfigMap::default() }
    }

    #[test]
    fn stored_form_round_trips() {
        let mut written = inventory();
        written.unverified.insert(id("b-1.0.0"));
        written.mark_stored("5".to_owned(), &written.data());
        let read = Inventory::read(&map(written.data())).unwrap();
        assert_eq!(read, written);
        assert!(read.is_stored_as(&written.data()) && read.version() == Some("5"));
        assert!(!read.is_current("c1"), "an object is unverified");
        assert!(inventory().is_current("c1") && !inventory().is_current("c2"));
        let empty = Inventory::default();
        assert_eq!(Inventory::read(&map(empty.data())).unwrap().fingerprint, None);
    }

    #[test]
    fn failed_object_keeps_its_uid_and_is_unverified() {
        let mut failed = inventory();
        failed.unverified.insert(id("a-1.0.0"));
        let read = Inventory::read(&map(failed.data())).unwrap();
        let entry = read.entries.get(&id("a-1.0.0")).unwrap();
        assert_eq!((&*entry.uid, entry.hash), ("u-1", ContentHash::UNKNOWN));
        assert!(read.unverified.contains(&id("a-1.0.0")));
    }

    #[test]
    fn tampered_inventory_is_rejected() {
        let data = inventory().data();
        for objects in [
            "moduletemplates/a",
            "moduletemplates/a xx u 1",
            "secrets/a - u 1",
            "moduletemplates/a - u one",
            "moduletemplates/a - u 1 1",
            "\n",
        ] {
            let mut data = data.clone();
            data.insert(OBJECTS.to_owned(), objects.to_owned());
            assert_eq!(Inventory::read(&map(data)), None, "{objects:?}");
        }
        let mut without = data;
        without.remove(CLASS);
        assert_eq!(Inventory::read(&map(without)), None);
        assert_eq!(Inventory::read(&ConfigMap::default()), None);
    }

    #[test]
    fn only_new_objects_are_added_as_unverified() {
        let mut inventory = inventory();
        assert!(!inventory.add_unverified([&id("a-1.0.0")]));
        assert!(inventory.add_unverified([&id("a-1.0.0"), &id("b-1.0.0")]));
        assert!(inventory.data()[OBJECTS].contains("moduletemplates/b-1.0.0 - - 0\n"));
    }
}
