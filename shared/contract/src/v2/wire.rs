//! JSON read as Go's decoder reads it into a struct: members in their order, repeated ones included.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

/// A JSON value, as far as an event needs it.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum Wire {
    /// Leaves a field as it is.
    Null,
    Text(String),
    Object(Members),
    /// A number, a boolean or an array.
    Other(IgnoredAny),
}

/// Members of an object in the order of the text; a later one of the same name overwrites an earlier one.
#[derive(Debug, PartialEq)]
pub(super) struct Members(pub(super) Vec<(String, Wire)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Members, A::Error> {
        let mut read = Vec::new();
        while let Some(member) = members.next_entry()? {
            read.push(member);
        }
        Ok(Members(read))
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
        let other = || Wire::Other(IgnoredAny);
        let members = [("b", Wire::Text("1".into())), ("a", Wire::Null), ("b", other()), ("d", other())];
        assert_eq!(read, Wire::Object(Members(members.map(|(name, value)| (name.to_owned(), value)).into())));
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
