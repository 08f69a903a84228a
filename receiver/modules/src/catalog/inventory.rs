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
use thiserror::Error;
use tidewatch_kit::{
    foreign_text::{MAX_IDENTIFIER_BYTES, MAX_NAME_BYTES, identifier},
    short_map::ShortMap,
};
use tidewatch_select::catalog::desired::{ContentHash, ObjectId};

/// Maximum number of objects of one inventory. The entries are kept for as long as the runtime is served; a catalog of
/// 4,096 objects has 200 modules with 20 versions each.
pub(super) const MAX_OBJECTS: usize = 4_096;
/// Maximum bytes of the stored form. API servers accept 1 MiB of data per ConfigMap.
const MAX_BYTES: usize = 1 << 20;
/// Maximum bytes of an object's identifier: the longer plural, a slash and a name.
const MAX_ID_BYTES: usize = "modulereleasemetas/".len() + MAX_NAME_BYTES;
/// Maximum bytes of a fingerprint: SHA-256 in hex digits.
const MAX_FINGERPRINT_BYTES: usize = 64;

/// Key of the fingerprint of the class's desired catalog.
const CLASS: &str = "class";
/// Key of the objects, one line each: `<plural>/<name> <hash> <uid> <generation>`.
const OBJECTS: &str = "objects";
/// Placeholder of an unknown value.
const UNKNOWN: &str = "-";

/// Reason to ignore a stored inventory, and to rebuild it from the runtime's objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub enum InventoryError {
    /// A key is missing, or a line has another form.
    #[error("it is malformed")]
    Malformed,
    /// More than 1 MiB.
    #[error("it has more than {MAX_BYTES} bytes")]
    TooLarge,
    /// More than [`MAX_OBJECTS`].
    #[error("it has more than {MAX_OBJECTS} objects")]
    TooManyObjects,
    /// A name, uid or fingerprint is longer than any of an API server, or of catalog sync.
    #[error("it has a name, uid or fingerprint that is too long")]
    TooLong,
}

/// State of a managed object after the last write or read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InventoryEntry {
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
    pub(super) fn new(hash: ContentHash, object: &DynamicObject) -> Self {
        Self {
            hash,
            uid: identifier(object.metadata.uid.as_deref()).into(),
            generation: object.metadata.generation.unwrap_or_default(),
            resource_version: identifier(object.metadata.resource_version.as_deref()).into(),
        }
    }
}

/// Managed objects of one runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Inventory {
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
    /// Parses the stored form.
    ///
    /// # Errors
    /// [`InventoryError`] if any part of it is malformed or exceeds a limit; the inventory is then rebuilt from the
    /// runtime's objects and overwrites the stored form.
    pub(super) fn read(map: &ConfigMap) -> Result<Self, InventoryError> {
        let data = map.data.as_ref().ok_or(InventoryError::Malformed)?;
        let value = |key| data.get(key).map(String::as_str).ok_or(InventoryError::Malformed);
        let class = value(CLASS)?;
        let objects = value(OBJECTS)?;
        if objects.len() > MAX_BYTES {
            return Err(InventoryError::TooLarge);
        }
        if class.len() > MAX_FINGERPRINT_BYTES {
            return Err(InventoryError::TooLong);
        }
        let mut lines = objects.lines().map(StoredObject::parse);
        let objects: Vec<_> = lines.by_ref().take(MAX_OBJECTS).collect::<Result<_, _>>()?;
        if lines.next().is_some() {
            return Err(InventoryError::TooManyObjects);
        }
        let mut inventory = Self { fingerprint: (class != UNKNOWN).then(|| class.into()), ..Self::default() };
        let unverified = objects.iter().filter(|object| !object.is_verified);
        inventory.unverified = unverified.map(|object| object.id.clone()).collect();
        let recorded = objects.into_iter().filter_map(|object| Some((object.id, object.entry?)));
        inventory.entries = recorded.collect();
        inventory.mark_stored(version_of(map), data);
        Ok(inventory)
    }

    /// Records that the runtime holds a stored form with other contents, or none. The next write replaces it.
    pub(super) fn mark_foreign(&mut self, map: Option<&ConfigMap>) {
        self.stored = map.map(|map| Stored { version: version_of(map), hash: None });
    }

    /// Records that a write failed but may have been persisted, so that the next sync writes again. A process that
    /// trusted the stored form until then would miss objects deleted since.
    pub(super) fn mark_unconfirmed(&mut self) {
        self.fingerprint = None;
        if let Some(stored) = &mut self.stored {
            stored.hash = None;
        }
    }

    /// Returns whether the last complete sync reached this fingerprint and no object is unverified.
    pub(super) fn is_current(&self, content: &str) -> bool {
        self.fingerprint.as_deref() == Some(content) && self.unverified.is_empty()
    }

    /// Adds objects that are about to be created. Returns whether any was new.
    pub(super) fn add_unverified<'a>(&mut self, ids: impl IntoIterator<Item = &'a ObjectId>) -> bool {
        let new: Vec<_> = ids.into_iter().filter(|id| !self.entries.contains_key(*id)).cloned().collect();
        let grows = !new.is_empty();
        self.unverified.extend(new);
        grows
    }

    /// Returns whether the inventory has more objects than [`MAX_OBJECTS`], and must not be kept.
    pub(super) fn is_too_large(&self) -> bool {
        let unrecorded = self.unverified.iter().filter(|id| !self.entries.contains_key(*id));
        self.entries.len() + unrecorded.count() > MAX_OBJECTS
    }

    /// Data of the stored form.
    pub(super) fn data(&self) -> BTreeMap<String, String> {
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
    pub(super) fn is_stored_as(&self, data: &BTreeMap<String, String>) -> bool {
        self.stored.as_ref().is_some_and(|stored| stored.hash == Some(hash(data)))
    }

    /// Records the data and resourceVersion of the stored form after a read or write.
    pub(super) fn mark_stored(&mut self, version: String, data: &BTreeMap<String, String>) {
        self.stored = Some(Stored { version, hash: Some(hash(data)) });
    }

    /// resourceVersion of the stored form; `None` if there is none.
    pub(super) fn version(&self) -> Option<&str> {
        self.stored.as_ref().map(|stored| stored.version.as_str())
    }
}

/// A line of the stored form.
struct StoredObject {
    id: ObjectId,
    is_verified: bool,
    /// `None` if the object was about to be created.
    entry: Option<InventoryEntry>,
}

impl StoredObject {
    fn parse(line: &str) -> Result<Self, InventoryError> {
        let words: Vec<_> = line.splitn(5, ' ').collect();
        let [id, hash, uid, generation] = words[..] else { return Err(InventoryError::Malformed) };
        if id.len() > MAX_ID_BYTES || uid.len() > MAX_IDENTIFIER_BYTES {
            return Err(InventoryError::TooLong);
        }
        let is_verified = hash != UNKNOWN;
        let hash = if is_verified { ContentHash::parse(hash) } else { Some(ContentHash::UNKNOWN) };
        let (Some(id), Some(hash), Ok(generation)) = (ObjectId::parse(id), hash, generation.parse()) else {
            return Err(InventoryError::Malformed);
        };
        // A resourceVersion is not stored: any write of another controller, such as to a status, changes it.
        let entry = || InventoryEntry { hash, uid: uid.into(), generation, resource_version: "".into() };
        Ok(Self { id, is_verified, entry: (uid != UNKNOWN).then(entry) })
    }
}

fn version_of(map: &ConfigMap) -> String {
    identifier(map.metadata.resource_version.as_deref()).to_owned()
}

fn hash(data: &BTreeMap<String, String>) -> ContentHash {
    ContentHash::of(&data.iter().map(|(key, value)| (key.clone(), value.clone())).collect())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use serde_json::json;
    use tidewatch_select::catalog::desired::Kind;

    use super::*;

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
            assert_eq!(Inventory::read(&map(data)), Err(InventoryError::Malformed), "{objects:?}");
        }
        let mut without = data;
        without.remove(CLASS);
        assert_eq!(Inventory::read(&map(without)), Err(InventoryError::Malformed));
        assert_eq!(Inventory::read(&ConfigMap::default()), Err(InventoryError::Malformed));
    }

    fn read(class: &str, objects: String) -> Result<Inventory, InventoryError> {
        Inventory::read(&map(BTreeMap::from([(CLASS.to_owned(), class.to_owned()), (OBJECTS.to_owned(), objects)])))
    }

    #[test]
    fn stored_form_beyond_a_limit_is_rejected() {
        use InventoryError::{TooLarge, TooLong, TooManyObjects};
        let lines = |count: usize| (0..count).map(|n| format!("moduletemplates/m-{n} - u-{n} 1\n")).collect::<String>();
        let name = |length: usize| format!("modulereleasemetas/{} - u 1", "n".repeat(length));
        let uid = |length: usize| format!("moduletemplates/m - {} 1", "u".repeat(length));
        assert_eq!(read("c", lines(MAX_OBJECTS)).unwrap().entries.len(), MAX_OBJECTS);
        assert_eq!(read("c", lines(MAX_OBJECTS + 1)), Err(TooManyObjects));
        assert!(read("c", name(253)).is_ok());
        assert_eq!(read("c", name(254)), Err(TooLong));
        assert!(read("c", uid(MAX_IDENTIFIER_BYTES)).is_ok());
        assert_eq!(read("c", uid(MAX_IDENTIFIER_BYTES + 1)), Err(TooLong));
        assert!(read(&"c".repeat(64), lines(1)).is_ok());
        assert_eq!(read(&"c".repeat(65), lines(1)), Err(TooLong));
        assert_eq!(read("c", "\n".repeat(MAX_BYTES + 1)), Err(TooLarge));
    }

    #[test]
    fn identifiers_of_any_length_are_not_kept() {
        let long = "9".repeat(MAX_IDENTIFIER_BYTES + 1);
        let metadata = ObjectMeta { resource_version: Some(long.clone()), uid: Some(long), ..ObjectMeta::default() };
        let mut object = DynamicObject::new("t", &Kind::Template.api_resource());
        object.metadata = metadata.clone();
        let entry = InventoryEntry::new(ContentHash::UNKNOWN, &object);
        assert_eq!((&*entry.uid, &*entry.resource_version), ("", ""));
        let stored = ConfigMap { metadata, data: Some(inventory().data()), ..ConfigMap::default() };
        assert_eq!(Inventory::read(&stored).unwrap().version(), Some(""));
        let mut foreign = inventory();
        foreign.mark_foreign(Some(&stored));
        assert_eq!(foreign.version(), Some(""));
    }

    #[test]
    fn objects_to_create_count_for_the_size() {
        let mut inventory = inventory();
        inventory.unverified.extend((1..MAX_OBJECTS).map(|n| id(&format!("b-{n}"))));
        inventory.unverified.insert(id("a-1.0.0"));
        assert!(!inventory.is_too_large());
        inventory.unverified.insert(id("c-1.0.0"));
        assert!(inventory.is_too_large());
    }

    #[test]
    fn only_new_objects_are_added_as_unverified() {
        let mut inventory = inventory();
        assert!(!inventory.add_unverified([&id("a-1.0.0")]));
        assert!(inventory.add_unverified([&id("a-1.0.0"), &id("b-1.0.0")]));
        assert!(inventory.data()[OBJECTS].contains("moduletemplates/b-1.0.0 - - 0\n"));
    }
}
