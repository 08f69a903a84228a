//! Parts of objects that many objects have in common.

use std::{
    borrow::Cow,
    fmt,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A part of an object: clones have one copy in memory until one of them is changed. In JSON and in the CRD it is the part
/// itself.
#[derive(Default, PartialEq, Eq, Hash)]
pub struct Shared<T>(Arc<T>);

impl<T> Shared<T> {
    /// True if no other clone has this copy.
    #[must_use]
    pub fn is_unique(this: &Self) -> bool {
        Arc::strong_count(&this.0) == 1
    }

    /// True if both have the same copy.
    #[must_use]
    pub fn is_same(this: &Self, other: &Self) -> bool {
        Arc::ptr_eq(&this.0, &other.0)
    }
}

// A derived one would require `T: Clone`.
impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> From<T> for Shared<T> {
    fn from(part: T) -> Self {
        Self(Arc::new(part))
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Clone> DerefMut for Shared<T> {
    fn deref_mut(&mut self) -> &mut T {
        Arc::make_mut(&mut self.0)
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: Serialize> Serialize for Shared<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Shared<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(deserializer).map(Self::from)
    }
}

impl<T: JsonSchema> JsonSchema for Shared<T> {
    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn schema_id() -> Cow<'static, str> {
        T::schema_id()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_clone_leaves_the_others_as_they_are() {
        let first = Shared::from(vec![1]);
        assert!(Shared::is_unique(&first));
        let mut second = first.clone();
        assert!(Shared::is_same(&first, &second) && !Shared::is_unique(&first));
        second.push(2);
        assert_eq!((&*first, &*second), (&vec![1], &vec![1, 2]));
        assert!(Shared::is_unique(&first) && !Shared::is_same(&first, &second));
    }

    #[test]
    fn json_is_that_of_the_part() {
        let part: Shared<Vec<u8>> = serde_json::from_str("[1,2]").expect("read");
        assert_eq!(part, vec![1, 2].into());
        assert_eq!(serde_json::to_string(&part).expect("written"), "[1,2]");
    }
}
