//! What we remember of a runtime's catalog, and its written form: the ConfigMap `kyma-system/tidewatch-catalog`.
//!
//! It says of each object that is ours what it was when we last wrote or read it, and for which content of the class all of it was
//! whole. It grows before an object is made and shrinks after one is deleted, so that a crash never loses track. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use k8s_openapi::api::core::v1::ConfigMap;

use super::{
    desired::{ContentHash, ObjectId},
    diff::Known,
};
use crate::base::short_map::ShortMap;

/// The content of the class.
const CLASS: &str = "class";
/// One line per object: `<plural>/<name> <hash> <uid> <generation>`.
const OBJECTS: &str = "objects";
/// Stands for what is not known.
const NOTHING: &str = "-";

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Objects that were as they shall be when we last wrote or read them.
    pub known: ShortMap<ObjectId, Known>,
    /// Objects that something failed with, or that may have been made: the next pass reads them before anything else.
    pub unsure: BTreeSet<ObjectId>,
    /// The content of the class that all of it was brought to; `None` while something is missing.
    pub class: Option<Box<str>>,
    stored: Option<Stored>,
}

/// What stands in the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stored {
    version: String,
    /// Of the data; `None` when what stands there is not what we wrote.
    hash: Option<ContentHash>,
}

impl Inventory {
    /// Of these objects, with nothing written down.
    #[must_use]
    pub fn of(known: ShortMap<ObjectId, Known>) -> Self {
        Self { known, ..Self::default() }
    }

    /// Reads the written form; `None` if it cannot be read, in part or as a whole. Then it is made anew of what is there, in the
    /// place of what stands there.
    #[must_use]
    pub fn read(map: &ConfigMap) -> Option<Self> {
        let data = map.data.as_ref()?;
        let class = data.get(CLASS)?.as_str();
        let mut inventory = Self { class: (class != NOTHING).then(|| class.into()), ..Self::default() };
        for line in data.get(OBJECTS)?.lines() {
            let mut words = line.split(' ');
            let id = ObjectId::parse(words.next()?)?;
            let (hash, uid) = (words.next()?, words.next()?);
            let generation = words.next()?.parse().ok()?;
            if words.next().is_some() {
                return None;
            }
            let known = match hash {
                NOTHING => ContentHash::UNKNOWN,
                hash => ContentHash::parse(hash)?,
            };
            if hash == NOTHING {
                inventory.unsure.insert(id.clone());
            }
            if uid != NOTHING {
                // Versions move with what others note on an object: they are for this process alone.
                let known = Known { hash: known, uid: uid.into(), generation, resource_version: "".into() };
                inventory.known.insert(id, known);
            }
        }
        inventory.stored_as(map.metadata.resource_version.clone().unwrap_or_default(), data);
        Some(inventory)
    }

    /// Takes note of the version of a written form that says something else than this.
    pub fn replaces(&mut self, map: &ConfigMap) {
        self.stored = Some(Stored { version: map.metadata.resource_version.clone().unwrap_or_default(), hash: None });
    }

    /// Takes note that no written form is there.
    pub fn is_lost(&mut self) {
        self.stored = None;
    }

    /// Takes note that a write of it failed, and may have landed all the same: the next pass writes again. A process that believed
    /// what stands there until then would miss what went since.
    pub fn is_in_doubt(&mut self) {
        self.class = None;
        if let Some(stored) = &mut self.stored {
            stored.hash = None;
        }
    }

    /// Whether everything was brought to this content, and nothing happened since.
    #[must_use]
    pub fn is_of(&self, content: &str) -> bool {
        self.class.as_deref() == Some(content) && self.unsure.is_empty()
    }

    /// Adds what is about to be made. Whether something was added.
    pub fn grow<'a>(&mut self, ids: impl IntoIterator<Item = &'a ObjectId>) -> bool {
        let new: Vec<_> = ids.into_iter().filter(|id| !self.known.contains_key(*id)).cloned().collect();
        let grows = !new.is_empty();
        self.unsure.extend(new);
        grows
    }

    /// The written form.
    #[must_use]
    pub fn data(&self) -> BTreeMap<String, String> {
        let mut objects = String::new();
        let ids: BTreeSet<_> = self.known.keys().chain(&self.unsure).collect();
        for id in ids {
            let known = self.known.get(id);
            let hash = known.filter(|known| known.hash != ContentHash::UNKNOWN && !self.unsure.contains(id));
            let hash = hash.map_or_else(|| NOTHING.to_owned(), |known| known.hash.to_string());
            let word = |text: Option<&str>| text.filter(|text| !text.is_empty()).unwrap_or(NOTHING).to_owned();
            let uid = word(known.map(|known| &*known.uid));
            let generation = known.map_or(0, |known| known.generation);
            // Writing to a String does not fail.
            let _ = writeln!(objects, "{id} {hash} {uid} {generation}");
        }
        let class = self.class.as_deref().unwrap_or(NOTHING).to_owned();
        BTreeMap::from([(CLASS.to_owned(), class), (OBJECTS.to_owned(), objects)])
    }

    /// Whether exactly this stands in the runtime already, as far as we know.
    #[must_use]
    pub fn is_stored_as(&self, data: &BTreeMap<String, String>) -> bool {
        self.stored.as_ref().is_some_and(|stored| stored.hash == Some(hash(data)))
    }

    /// Takes note of what was written or read.
    pub fn stored_as(&mut self, version: String, data: &BTreeMap<String, String>) {
        self.stored = Some(Stored { version, hash: Some(hash(data)) });
    }

    /// The version of what stands in the runtime; `None` if nothing does.
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
        let known =
            Known { hash: ContentHash::of(&json!(1)), uid: "u-1".into(), generation: 3, resource_version: "".into() };
        Inventory {
            known: [(id("a-1.0.0"), known)].into_iter().collect(),
            class: Some("c1".into()),
            ..Inventory::default()
        }
    }

    fn map(data: BTreeMap<String, String>) -> ConfigMap {
        let metadata = ObjectMeta { resource_version: Some("5".to_owned()), ..ObjectMeta::default() };
        ConfigMap { metadata, data: Some(data), ..ConfigMap::default() }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let mut written = inventory();
        written.unsure.insert(id("b-1.0.0"));
        written.stored_as("5".to_owned(), &written.data());
        let read = Inventory::read(&map(written.data())).unwrap();
        assert_eq!(read, written);
        assert!(read.is_stored_as(&written.data()) && read.version() == Some("5"));
        assert!(!read.is_of("c1"), "something is not known to be well");
        assert!(inventory().is_of("c1") && !inventory().is_of("c2"));
        let empty = Inventory::default();
        assert_eq!(Inventory::read(&map(empty.data())).unwrap().class, None);
    }

    #[test]
    fn what_failed_keeps_its_uid_and_is_read_first() {
        let mut failed = inventory();
        failed.unsure.insert(id("a-1.0.0"));
        let read = Inventory::read(&map(failed.data())).unwrap();
        let known = read.known.get(&id("a-1.0.0")).unwrap();
        assert_eq!((&*known.uid, known.hash), ("u-1", ContentHash::UNKNOWN));
        assert!(read.unsure.contains(&id("a-1.0.0")));
    }

    #[test]
    fn what_was_tampered_with_is_no_inventory() {
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
    fn it_grows_by_what_is_new_alone() {
        let mut inventory = inventory();
        assert!(!inventory.grow([&id("a-1.0.0")]));
        assert!(inventory.grow([&id("a-1.0.0"), &id("b-1.0.0")]));
        assert!(inventory.data()[OBJECTS].contains("moduletemplates/b-1.0.0 - - 0\n"));
    }
}
