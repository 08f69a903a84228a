//! Place of an object in a layer, for errors.

use std::fmt;

use serde_json::Value;

use crate::excerpt::Excerpt;

/// Place of a document or of an item in it, with kind and name as far as the object has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the document, counted from 1; empty ones do not count.
    pub(super) document: usize,
    /// First line of the document, counted from 1.
    pub(super) line: usize,
    /// Number of the item in the list, counted from 1, and of the items in it; empty for the document itself.
    pub(super) items: Vec<usize>,
    kind: Option<Excerpt>,
    name: Option<Name>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Name {
    Given(Excerpt),
    /// `metadata.generateName`.
    Generated(Excerpt),
}

impl Place {
    /// The place of an object.
    pub(super) fn of(document: usize, line: usize, items: &[usize], object: &Value) -> Self {
        let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(Excerpt::of);
        let metadata = &object["metadata"];
        let name = text(&metadata["name"]).map(Name::Given);
        let name = name.or_else(|| text(&metadata["generateName"]).map(Name::Generated));
        Self { document, line, items: items.to_vec(), kind: text(&object["kind"]), name }
    }
}

/// For example: document 2 from line 6 on, item 3, kind "ConfigMap", generateName "tide-".
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { document, line, items, kind, name } = self;
        write!(f, "document {document} from line {line} on")?;
        if !items.is_empty() {
            let numbers: Vec<_> = items.iter().map(usize::to_string).collect();
            write!(f, ", item {}", numbers.join("."))?;
        }
        if let Some(kind) = kind {
            write!(f, ", kind {kind}")?;
        }
        match name {
            Some(Name::Given(name)) => write!(f, ", name {name}"),
            Some(Name::Generated(name)) => write!(f, ", generateName {name}"),
            None => Ok(()),
        }
    }
}
