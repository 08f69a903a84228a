//! Maps and lists of metadata, decoded with bounded memory: a user may create labels by the hundred thousand, of which each
//! needs twenty times its bytes.

use std::{collections::BTreeMap, fmt, marker::PhantomData};

use aws_lc_rs::digest::{Context, SHA256};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};

/// Number of entries of a map or list that are kept. Of the others only a hash is, in the order of the response, which API
/// servers sort.
pub(super) const KEPT: usize = 1_000;

/// A value that is part of the hash of an object's metadata.
pub(super) trait Hashed {
    /// Adds the value to a hash.
    fn add_to(&self, context: &mut Context);
}

impl Hashed for String {
    fn add_to(&self, context: &mut Context) {
        field(context, self);
    }
}

/// Adds a number to a hash.
pub(super) fn number(context: &mut Context, number: usize) {
    context.update(&(number as u64).to_be_bytes());
}

/// Adds a text to a hash.
pub(super) fn field(context: &mut Context, text: &str) {
    number(context, text.len());
    context.update(text.as_bytes());
}

/// Number and hash of the entries that are not kept.
#[derive(Default)]
struct Rest {
    entries: usize,
    hash: Option<Context>,
}

impl Rest {
    fn add(&mut self, work: impl FnOnce(&mut Context)) {
        self.entries += 1;
        work(self.hash.get_or_insert_with(|| Context::new(&SHA256)));
    }

    fn add_to(self, context: &mut Context) {
        if let Some(hash) = self.hash {
            context.update(hash.finish().as_ref());
        }
    }
}

/// Labels or annotations.
#[derive(Default)]
pub(super) struct Map {
    kept: BTreeMap<String, String>,
    rest: Rest,
}

impl Map {
    /// Adds the number of entries, and key and value of each in ascending order, to a hash.
    pub(super) fn add_to(self, context: &mut Context) {
        number(context, self.kept.len() + self.rest.entries);
        self.kept.iter().for_each(|(key, value)| [key, value].into_iter().for_each(|text| field(context, text)));
        self.rest.add_to(context);
    }
}

impl<'de> Deserialize<'de> for Map {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Map;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a map of strings")
            }

            fn visit_unit<E>(self) -> Result<Map, E> {
                Ok(Map::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Map, A::Error> {
                let mut map = Map::default();
                while let Some((key, value)) = entries.next_entry::<String, String>()? {
                    if map.kept.len() < KEPT || map.kept.contains_key(&key) {
                        map.kept.insert(key, value);
                    } else {
                        map.rest.add(|context| [key, value].iter().for_each(|text| field(context, text)));
                    }
                }
                Ok(map)
            }
        }
        deserializer.deserialize_any(Entries)
    }
}

/// Finalizers or owner references.
pub(super) struct List<T> {
    kept: Vec<T>,
    rest: Rest,
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self { kept: Vec::new(), rest: Rest::default() }
    }
}

impl<T: Hashed> List<T> {
    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.kept.len() + self.rest.entries
    }

    /// Adds each entry to a hash.
    pub(super) fn add_to(self, context: &mut Context) {
        self.kept.iter().for_each(|entry| entry.add_to(context));
        self.rest.add_to(context);
    }
}

impl<'de, T: Deserialize<'de> + Hashed> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de> + Hashed> Visitor<'de> for Entries<T> {
            type Value = List<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list")
            }

            fn visit_unit<E>(self) -> Result<List<T>, E> {
                Ok(List::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<List<T>, A::Error> {
                let mut list = List::default();
                while let Some(entry) = entries.next_element::<T>()? {
                    if list.kept.len() < KEPT {
                        list.kept.push(entry);
                    } else {
                        list.rest.add(|context| entry.add_to(context));
                    }
                }
                Ok(list)
            }
        }
        deserializer.deserialize_any(Entries(PhantomData))
    }
}
