//! YAML and JSON documents with the position of each value.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Number, Value};
use serde_saphyr::{Location, Options, Spanned, budget, options};
use strum::Display;

/// Maximum nesting depth of a value.
const MAX_DEPTH: usize = 256;
/// Maximum number of documents per text.
const MAX_DOCUMENTS: usize = 20_000;
/// Maximum number of values per text.
const MAX_NODES: usize = 4_000_000;

/// A value with its position; for a member of an object, the position of its key.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Node {
    pub(super) at: Location,
    pub(super) content: Content,
}

/// Content of a value. It is displayed as its type.
#[derive(Clone, Debug, Display, PartialEq)]
pub(super) enum Content {
    #[strum(to_string = "null")]
    Null,
    #[strum(to_string = "a boolean")]
    Bool(bool),
    #[strum(to_string = "a number")]
    Number(Number),
    #[strum(to_string = "a string")]
    Text(String),
    #[strum(to_string = "a list")]
    List(Vec<Node>),
    #[strum(to_string = "an object")]
    Object(Vec<(String, Node)>),
}

/// Step of a path: a member of an object or an item of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step<'a> {
    Key(&'a str),
    Index(usize),
}

/// Formats a path, as in `spec.channels[0].version`.
pub(super) fn path(steps: &[Step<'_>]) -> String {
    let mut path = String::new();
    for step in steps {
        match step {
            Step::Index(index) => path.push_str(&format!("[{index}]")),
            Step::Key(key) if key.contains(['.', '/', '[']) => path.push_str(&format!("[{key:?}]")),
            Step::Key(key) if path.is_empty() => path.push_str(key),
            Step::Key(key) => path.push_str(&format!(".{key}")),
        }
    }
    path
}

/// Parses every document of a text; empty documents are skipped.
///
/// # Errors
/// Location, counted from 1 in characters, and message, if the text is not valid YAML, or exceeds [`MAX_DEPTH`], [`MAX_DOCUMENTS`] or [`MAX_NODES`].
pub(super) fn read(text: &str) -> Result<Vec<Node>, (Location, String)> {
    let documents = serde_saphyr::from_multiple_with_options::<Node>(text, yaml_options());
    documents.map_err(|error| (error.location().unwrap_or(Location::UNKNOWN), error.to_string()))
}

/// Parser options equal to kubectl's: `0644` is an octal number, `yes` is a boolean.
fn yaml_options() -> Options {
    options! {
        budget: budget! {
            max_depth: MAX_DEPTH, max_documents: MAX_DOCUMENTS, max_nodes: MAX_NODES, max_events: 4 * MAX_NODES,
        },
        legacy_octal_numbers: true,
        with_snippet: false,
    }
}

impl Node {
    /// Member of an object.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let Content::Object(members) = &self.content else { return None };
        members.iter().find(|(name, _)| name == key).map(|(_, node)| node)
    }

    /// Member of an object, if it is a string.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        let Content::Text(text) = &self.get(key)?.content else { return None };
        Some(text)
    }

    /// Location of the value at a path, or of the last existing value on the way to it.
    pub(super) fn location_of(&self, steps: &[Step<'_>]) -> Location {
        let mut node = self;
        for step in steps {
            let next = match (step, &node.content) {
                (Step::Key(key), _) => node.get(key),
                (Step::Index(index), Content::List(items)) => items.get(*index),
                (Step::Index(_), _) => None,
            };
            let Some(next) = next else { break };
            node = next;
        }
        node.at
    }

    /// The value without positions. The last of several equal keys would win, but the parser rejects those.
    pub(super) fn to_value(&self) -> Value {
        match &self.content {
            Content::Null => Value::Null,
            Content::Bool(value) => Value::Bool(*value),
            Content::Number(number) => Value::Number(number.clone()),
            Content::Text(text) => Value::String(text.clone()),
            Content::List(items) => Value::Array(items.iter().map(Self::to_value).collect()),
            Content::Object(members) => {
                Value::Object(members.iter().map(|(key, node)| (key.clone(), node.to_value())).collect::<Map<_, _>>())
            }
        }
    }

    /// Objects of a document: the items of a `List`, or the document itself.
    pub(super) fn into_objects(self) -> Vec<Self> {
        let is_list = self.text("kind").is_some_and(|kind| kind.ends_with("List"));
        match self.get("items").map(|items| &items.content) {
            Some(Content::List(items)) if is_list => items.clone(),
            _ => vec![self],
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, .. } = Spanned::<Content>::deserialize(deserializer)?;
        Ok(Self { at: referenced, content: value })
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Any)
    }
}

struct Any;

impl<'de> Visitor<'de> for Any {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Content, E> {
        Ok(Content::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Content, E> {
        Ok(Content::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Content, E> {
        Ok(Content::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Content, E> {
        Ok(Content::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Content, E> {
        Number::from_f64(value).map(Content::Number).ok_or_else(|| E::custom("JSON has no such number"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Content, E> {
        Ok(Content::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Content, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element::<Node>()? {
            items.push(item);
        }
        Ok(Content::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Content, A::Error> {
        let mut members: Vec<(String, Node)> = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let mut node: Node = map.next_value()?;
            if key.referenced.line() == 0 {
                return Err(A::Error::custom(format!("the key {:?} has no place", key.value)));
            }
            node.at = key.referenced;
            members.push((key.value, node));
        }
        Ok(Content::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(node: &Node, path: &[Step<'_>]) -> (u64, u64) {
        let location = node.location_of(path);
        (location.line(), location.column())
    }

    #[test]
    fn every_value_has_its_position() {
        let text = "# head\na: 1\nb:\n  - c: x\n    d: [true, null]\n---\n---\n{\"e\": {\"f\": 1.5}}\n";
        let documents = read(text).unwrap();
        assert_eq!(documents.len(), 2);
        assert_eq!(documents[0].to_value(), json!({"a": 1, "b": [{"c": "x", "d": [true, null]}]}));
        assert_eq!(documents[1].to_value(), json!({"e": {"f": 1.5}}));
        let first = [Step::Key("b"), Step::Index(0), Step::Key("d"), Step::Index(1)];
        assert_eq!(at(&documents[0], &first[..1]), (3, 1));
        assert_eq!(at(&documents[0], &first[..2]), (4, 5));
        assert_eq!(at(&documents[0], &first[..3]), (5, 5));
        assert_eq!(at(&documents[0], &first), (5, 15));
        assert_eq!(at(&documents[0], &[Step::Key("b"), Step::Index(0), Step::Key("no")]), (4, 5));
        assert_eq!(at(&documents[1], &[Step::Key("e"), Step::Key("f")]), (8, 8));
        assert_eq!(path(&first), "b[0].d[1]");
        assert_eq!(path(&[Step::Key("metadata"), Step::Key("x.y/z")]), "metadata[\"x.y/z\"]");
    }

    #[test]
    fn values_match_those_of_kubectl() {
        let value = read("mode: 0644\nflag: yes\nversion: 1.0\ntext: '1.0'\nmore: \"yes\"\n").unwrap()[0].to_value();
        assert_eq!(value, json!({"mode": 420, "flag": true, "version": 1.0, "text": "1.0", "more": "yes"}));
    }

    #[test]
    fn yaml_errors_have_a_position() {
        for (text, line) in [("a: 1\nb: [1,\n", 3), ("a: 1\na: 2\n", 2), ("a: \"x\n\n", 3)] {
            let (at, reason) = read(text).unwrap_err();
            assert!((1..=line).contains(&at.line()) && !reason.is_empty(), "{text:?}: {at:?} {reason}");
        }
        let deep = format!("{}1{}", "[".repeat(300), "]".repeat(300));
        assert!(read(&deep).is_err());
    }

    #[test]
    fn list_is_expanded_to_its_items() {
        let objects = |text: &str| read(text).unwrap().into_iter().flat_map(Node::into_objects).collect::<Vec<_>>();
        assert_eq!(objects("kind: List\nitems:\n- a: 1\n- a: 2\n").len(), 2);
        assert_eq!(objects("kind: ModuleTemplateList\nitems: []\n").len(), 0);
        assert_eq!(objects("kind: ModuleTemplate\nitems: [1]\n").len(), 1);
    }
}
