//! JSON read as Go's decoder reads it into a struct: members in their order, repeated ones included.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};

/// A JSON value, as far as an event needs it. Read by a visitor: an untagged enum would copy the subtree of each level, and a
/// body of 16 KiB has up to 127 levels.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wire {
    /// Leaves a field as it is.
    Null,
    Text(String),
    /// Members in the order of the text; a later one of the same name overwrites an earlier one.
    Object(Vec<(String, Self)>),
    /// A number, a boolean or an array.
    Other,
}

impl<'de> Deserialize<'de> for Wire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Values)
    }
}

struct Values;

impl<'de> Visitor<'de> for Values {
    type Value = Wire;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Wire, E> {
        Ok(Wire::Null)
    }

    fn visit_str<E>(self, text: &str) -> Result<Wire, E> {
        Ok(Wire::Text(text.to_owned()))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Wire, E> {
        Ok(Wire::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Wire, E> {
        Ok(Wire::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Wire, E> {
        Ok(Wire::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Wire, E> {
        Ok(Wire::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Wire, A::Error> {
        while elements.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Wire::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Wire, A::Error> {
        let mut read = Vec::new();
        while let Some(member) = members.next_entry()? {
            read.push(member);
        }
        Ok(Wire::Object(read))
    }
}

/// True if Go's decoder takes `key` for the field of this name in lower case: it compares with Unicode's simple case
/// folding, in which two characters beyond ASCII equal letters.
pub(super) fn is_field(key: &str, field: &str) -> bool {
    let folded = key.chars().map(|char| match char {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        char => char.to_ascii_lowercase(),
    });
    folded.eq(field.chars())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_keep_their_order_and_repetitions() {
        let read: Wire = serde_json::from_str(r#"{"b": "1", "a": null, "b": [1, {"c": 2}], "d": -1.5}"#).unwrap();
        let members = [("b", Wire::Text("1".into())), ("a", Wire::Null), ("b", Wire::Other), ("d", Wire::Other)];
        assert_eq!(read, Wire::Object(members.map(|(name, value)| (name.to_owned(), value)).into()));
        assert!(serde_json::from_str::<Wire>(r#"{"a": tru}"#).is_err());
    }

    #[test]
    fn names_are_compared_by_simple_case_folding() {
        for (key, expected) in
            [("kind", true), ("KIND", true), ("\u{212a}ind", true), ("kınd", false), ("kinds", false), ("", false)]
        {
            assert_eq!(is_field(key, "kind"), expected, "{key}");
        }
        assert!(is_field("Ver\u{17f}ion", "version"));
    }
}
