//! YAML and JSON as text has them: each value with the place where it stands.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Number, Value};
use serde_saphyr::{Location, Options, Spanned, budget, options};

/// Depth of a value, at most.
const MAX_DEPTH: usize = 256;
/// Documents of one text, at most.
const MAX_DOCUMENTS: usize = 20_000;
/// Values of one text, at most.
const MAX_NODES: usize = 4_000_000;

/// A place in a text; both count from 1, columns in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct At {
    pub(super) line: u64,
    pub(super) column: u64,
}

impl At {
    pub(super) fn of(location: Location) -> Self {
        Self { line: location.line(), column: location.column() }
    }
}

/// A value, and where it stands: a member of an object where its key does.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Node {
    pub(super) at: At,
    pub(super) content: Content,
}

/// What a value is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Content {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Node>),
    Object(Vec<(String, Node)>),
}

/// A step from a value to one within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step<'a> {
    Key(&'a str),
    Index(usize),
}

/// A path as people write it.
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

/// Reads every document of a text; empty ones are none.
///
/// # Errors
/// Where and why it is not YAML, or is more than [`MAX_DEPTH`], [`MAX_DOCUMENTS`] and [`MAX_NODES`] let be.
pub(super) fn read(text: &str) -> Result<Vec<Node>, (At, String)> {
    let documents = serde_saphyr::from_multiple_with_options::<Node>(text, rules());
    documents.map_err(|error| (error.location().map(At::of).unwrap_or_default(), error.to_string()))
}

/// YAML as kubectl reads it: `0644` is an octal number, `yes` is a boolean.
fn rules() -> Options {
    options! {
        budget: budget! {
            max_depth: MAX_DEPTH, max_documents: MAX_DOCUMENTS, max_nodes: MAX_NODES, max_events: 4 * MAX_NODES,
        },
        legacy_octal_numbers: true,
        with_snippet: false,
    }
}

impl Node {
    /// A member of an object.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let Content::Object(members) = &self.content else { return None };
        members.iter().find(|(name, _)| name == key).map(|(_, node)| node)
    }

    /// What a member of an object says, if it is a text.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        match &self.get(key)?.content {
            Content::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Where the value at a path stands, or the last one on the way to it that is there.
    pub(super) fn place(&self, steps: &[Step<'_>]) -> At {
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

    /// The same without places. Of members with the same key the last one counts, but the reader refuses such objects.
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

    /// The objects of a document: those of a `List`, or itself.
    pub(super) fn into_objects(self) -> Vec<Self> {
        let is_list = self.text("kind").is_some_and(|kind| kind.ends_with("List"))
            && self.get("items").is_some_and(|items| matches!(items.content, Content::List(_)));
        match self.content {
            Content::Object(members) if is_list => {
                let items = members.into_iter().find(|(key, _)| key == "items").map(|(_, node)| node.content);
                if let Some(Content::List(items)) = items { items } else { Vec::new() }
            }
            content => vec![Self { at: self.at, content }],
        }
    }
}

impl Content {
    /// What it is, in one word.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, .. } = Spanned::<Content>::deserialize(deserializer)?;
        Ok(Self { at: At::of(referenced), content: value })
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

    fn visit_none<E>(self) -> Result<Content, E> {
        Ok(Content::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Content, D::Error> {
        Content::deserialize(deserializer)
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

    fn visit_string<E>(self, value: String) -> Result<Content, E> {
        Ok(Content::Text(value))
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
            node.at = At::of(key.referenced);
            members.push((key.value, node));
        }
        Ok(Content::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(line: u64, column: u64) -> At {
        At { line, column }
    }

    #[test]
    fn every_value_knows_where_it_stands() {
        let text = "# head\na: 1\nb:\n  - c: x\n    d: [true, null]\n---\n---\n{\"e\": {\"f\": 1.5}}\n";
        let documents = read(text).unwrap();
        assert_eq!(documents.len(), 2);
        assert_eq!(documents[0].to_value(), json!({"a": 1, "b": [{"c": "x", "d": [true, null]}]}));
        assert_eq!(documents[1].to_value(), json!({"e": {"f": 1.5}}));
        let first = [Step::Key("b"), Step::Index(0), Step::Key("d"), Step::Index(1)];
        assert_eq!(documents[0].place(&first[..1]), at(3, 1));
        assert_eq!(documents[0].place(&first[..2]), at(4, 5));
        assert_eq!(documents[0].place(&first[..3]), at(5, 5));
        assert_eq!(documents[0].place(&first), at(5, 15));
        assert_eq!(documents[0].place(&[Step::Key("b"), Step::Index(0), Step::Key("no")]), at(4, 5));
        assert_eq!(documents[1].place(&[Step::Key("e"), Step::Key("f")]), at(8, 8));
        assert_eq!(path(&first), "b[0].d[1]");
        assert_eq!(path(&[Step::Key("metadata"), Step::Key("x.y/z")]), "metadata[\"x.y/z\"]");
    }

    #[test]
    fn values_are_those_that_kubectl_sends() {
        let value = read("mode: 0644\nflag: yes\nversion: 1.0\ntext: '1.0'\nmore: \"yes\"\n").unwrap()[0].to_value();
        assert_eq!(value, json!({"mode": 420, "flag": true, "version": 1.0, "text": "1.0", "more": "yes"}));
    }

    #[test]
    fn what_is_not_yaml_says_where() {
        for (text, line) in [("a: 1\nb: [1,\n", 3), ("a: 1\na: 2\n", 2), ("a: \"x\n\n", 3)] {
            let (at, why) = read(text).unwrap_err();
            assert!((1..=line).contains(&at.line) && !why.is_empty(), "{text:?}: {at:?} {why}");
        }
        let deep = format!("{}1{}", "[".repeat(300), "]".repeat(300));
        assert!(read(&deep).is_err());
    }

    #[test]
    fn a_list_is_its_items() {
        let objects = |text: &str| read(text).unwrap().into_iter().flat_map(Node::into_objects).collect::<Vec<_>>();
        assert_eq!(objects("kind: List\nitems:\n- a: 1\n- a: 2\n").len(), 2);
        assert_eq!(objects("kind: ModuleTemplateList\nitems: []\n").len(), 0);
        assert_eq!(objects("kind: ModuleTemplate\nitems: [1]\n").len(), 1);
    }
}
