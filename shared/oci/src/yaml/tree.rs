//! Builds the value of one document. Nesting takes no stack.

use std::collections::HashMap;

use granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, options};
use serde_json::{Map, Value};

use super::{
    Budget, Document, MAX_DEPTH, YamlError,
    scalar::{self, Tag},
};
use crate::excerpt;

/// Namespace of YAML's own tags.
const YAML_TAGS: &str = "tag:yaml.org,2002:";

/// Characters that end a line in YAML 1.1, which kubectl reads, and not in YAML 1.2: a comment that contains one hides less
/// than it seems to.
const OLD_LINE_BREAKS: [char; 3] = ['\u{85}', '\u{2028}', '\u{2029}'];

/// Reads the first YAML document of a text that begins in a line; `None` if it is empty.
///
/// # Errors
/// [`YamlError`].
pub(super) fn of_yaml(text: &str, line: usize, budget: &mut Budget) -> Result<Option<Document>, YamlError> {
    let mut options = options! { disallow_directives: true, simple_key_max_lookahead: 1024 };
    options.set_emit_comments(false);
    let mut tree = Tree { budget, offset: line - 1, open: Vec::new(), anchors: HashMap::new(), root: None };
    let mut ended = false;
    // Texts that were joined keep their byte order marks.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut breaks = text.match_indices(OLD_LINE_BREAKS).map(|(at, _)| at).peekable();
    for event in Parser::new_from_str_with_options(text, options) {
        let (event, span) = event.map_err(|error| tree.syntax(&error))?;
        if let Event::Scalar(_, ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted, ..) = event
            && let Some(quoted) = span.byte_range()
        {
            if let Some(at) = breaks.next_if(|at| *at < quoted.start) {
                return Err(tree.old_line_break(text, at));
            }
            while breaks.next_if(|at| *at < quoted.end).is_some() {}
        }
        match event {
            // kubectl reads nothing beyond the end marker.
            Event::DocumentEnd if span.slice(text).is_some_and(|marker| marker.starts_with("...")) => {
                let end = span.byte_range().map_or(text.len(), |range| range.start);
                if let Some(at) = breaks.next_if(|at| *at < end) {
                    return Err(tree.old_line_break(text, at));
                }
                return Ok(tree.into_document());
            }
            Event::DocumentStart(..) if ended => {
                let reason = "the document ends before this line, perhaps because of its indentation".to_owned();
                return Err(tree.invalid(span, reason));
            }
            Event::DocumentEnd => ended = true,
            _ => tree.add(event, span)?,
        }
    }
    if let Some(at) = breaks.next() {
        return Err(tree.old_line_break(text, at));
    }
    Ok(tree.into_document())
}

/// Reads a JSON object that begins in a line.
///
/// # Errors
/// [`YamlError`].
pub(super) fn of_json(text: &str, line: usize, budget: &mut Budget) -> Result<Option<Document>, YamlError> {
    budget.spend_values(count_json(text), line)?;
    let mut value: Value = serde_json::from_str(text).map_err(|error| YamlError::Syntax {
        line: line + error.line().saturating_sub(1),
        column: error.column(),
        reason: excerpt::message(&error),
    })?;
    normalize(&mut value);
    Ok(Some(Document { line, value }))
}

/// Upper bound of the number of values and keys in a JSON text.
fn count_json(text: &str) -> usize {
    let mut in_string = false;
    let mut escaped = false;
    let mut count = 1;
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            b'{' | b'[' | b',' | b':' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

/// Turns all numbers into those that an API server reads.
fn normalize(value: &mut Value) {
    match value {
        Value::Number(number) if !number.is_i64() => {
            if let Some(float) = number.as_f64() {
                *value = scalar::number(float);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(normalize),
        Value::Object(members) => members.values_mut().for_each(normalize),
        _ => {}
    }
}

/// A list or an object that is not complete.
struct Open {
    /// Identifier of its anchor; 0 if it has none.
    anchor: usize,
    content: Content,
}

enum Content {
    List(Vec<Value>),
    Object {
        members: Map<String, Value>,
        /// Key whose value follows.
        key: Option<Key>,
    },
}

enum Key {
    Member(String),
    /// `<<`: the members of its value, or of each value of a list, are added.
    Merge,
}

/// A value with an anchor, and what its repetition costs.
struct Anchored {
    value: Value,
    cost: Cost,
}

#[derive(Clone, Copy, Default)]
struct Cost {
    values: usize,
    bytes: usize,
    depth: usize,
}

impl Cost {
    fn of(value: &Value) -> Self {
        let text = |text: &str| Self { values: 1, bytes: text.len(), depth: 0 };
        match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => text(""),
            Value::String(value) => text(value),
            Value::Array(items) => Self::around(items.iter().map(Self::of)),
            Value::Object(members) => Self::around(members.iter().map(|(key, value)| {
                let cost = Self::of(value);
                Self { values: cost.values + 1, bytes: cost.bytes + key.len(), ..cost }
            })),
        }
    }

    fn around(parts: impl Iterator<Item = Self>) -> Self {
        parts.fold(Self { values: 1, bytes: 0, depth: 1 }, |sum, part| Self {
            values: sum.values + part.values,
            bytes: sum.bytes + part.bytes,
            depth: sum.depth.max(part.depth + 1),
        })
    }
}

struct Tree<'a> {
    budget: &'a mut Budget,
    /// Lines before the text.
    offset: usize,
    open: Vec<Open>,
    anchors: HashMap<usize, Anchored>,
    root: Option<Document>,
}

impl Tree<'_> {
    fn add(&mut self, event: Event<'_>, span: Span) -> Result<(), YamlError> {
        let line = self.offset + span.start.line();
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.budget.spend_values(1, line)?;
                let suffix = tag.as_ref().and_then(|tag| tag.suffix_in_namespace(YAML_TAGS));
                let tag = match &tag {
                    Some(tag) if tag.suffix().is_empty() && tag.handle() == "!" => Tag::Implicit,
                    Some(_) => suffix.as_deref().map_or(Tag::Other, Tag::Yaml),
                    None if style == ScalarStyle::Plain => Tag::Implicit,
                    None => Tag::Text,
                };
                if text == "<<" && matches!(tag, Tag::Implicit | Tag::Yaml("merge")) && self.awaits_key() {
                    self.set_key(Key::Merge);
                    return Ok(());
                }
                let value = if self.awaits_key() { scalar::key(&text, tag) } else { scalar::value(&text, tag) };
                let value = value.map_err(|reason| self.invalid(span, reason))?;
                self.anchor(anchor, &value, line)?;
                self.complete(value, span)
            }
            Event::SequenceStart(_, anchor, _) => self.start(anchor, Content::List(Vec::new()), span),
            Event::MappingStart(_, anchor, _) => {
                self.start(anchor, Content::Object { members: Map::new(), key: None }, span)
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(Open { anchor, content }) = self.open.pop() else { return Ok(()) };
                let value = match content {
                    Content::List(items) => Value::Array(items),
                    Content::Object { members, .. } => Value::Object(members),
                };
                self.anchor(anchor, &value, line)?;
                self.complete(value, span)
            }
            Event::Alias(anchor) => {
                let Some(Anchored { value, cost }) = self.anchors.get(&anchor) else {
                    return Err(self.invalid(span, "the alias names a value that contains it".to_owned()));
                };
                self.budget.spend_values(cost.values, line)?;
                self.budget.spend_repeated_bytes(cost.bytes, line)?;
                if self.open.len() + cost.depth > MAX_DEPTH {
                    return Err(YamlError::TooDeep { line });
                }
                let value = value.clone();
                self.complete(value, span)
            }
            _ => Ok(()),
        }
    }

    fn start(&mut self, anchor: usize, content: Content, span: Span) -> Result<(), YamlError> {
        let line = self.offset + span.start.line();
        self.budget.spend_values(1, line)?;
        if self.open.len() >= MAX_DEPTH {
            return Err(YamlError::TooDeep { line });
        }
        if self.awaits_key() {
            return Err(self.invalid(span, "a list or an object cannot be a key".to_owned()));
        }
        if self.open.is_empty() {
            self.root = Some(Document { line, value: Value::Null });
        }
        self.open.push(Open { anchor, content });
        Ok(())
    }

    /// Keeps a copy of a value with an anchor.
    fn anchor(&mut self, anchor: usize, value: &Value, line: usize) -> Result<(), YamlError> {
        if anchor != 0 {
            let cost = Cost::of(value);
            self.budget.spend_values(cost.values, line)?;
            self.budget.spend_repeated_bytes(cost.bytes, line)?;
            self.anchors.insert(anchor, Anchored { value: value.clone(), cost });
        }
        Ok(())
    }

    /// Returns whether the next value is a key.
    fn awaits_key(&self) -> bool {
        matches!(self.open.last(), Some(Open { content: Content::Object { key: None, .. }, .. }))
    }

    fn set_key(&mut self, next: Key) {
        if let Some(Open { content: Content::Object { key, .. }, .. }) = self.open.last_mut() {
            *key = Some(next);
        }
    }

    /// Adds a complete value to the list or object around it.
    fn complete(&mut self, value: Value, span: Span) -> Result<(), YamlError> {
        let Some(Open { content, .. }) = self.open.last_mut() else {
            let line = self.root.as_ref().map_or(self.offset + span.start.line(), |document| document.line);
            self.root = Some(Document { line, value });
            return Ok(());
        };
        let done = match content {
            Content::List(items) => {
                items.push(value);
                Ok(())
            }
            Content::Object { members, key } => match key.take() {
                None => scalar::key_text(&value).map(|name| *key = Some(Key::Member(name))),
                Some(Key::Member(name)) => {
                    members.insert(name, value);
                    Ok(())
                }
                Some(Key::Merge) => merge(members, value),
            },
        };
        done.map_err(|reason| self.invalid(span, reason))
    }

    fn invalid(&self, span: Span, reason: String) -> YamlError {
        let line = self.offset + span.start.line();
        YamlError::Syntax { line, column: span.start.col() + 1, reason }
    }

    /// Error for one of [`OLD_LINE_BREAKS`] outside quotes, at this byte of the text.
    fn old_line_break(&self, text: &str, at: usize) -> YamlError {
        let before = &text[..at];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let code = text[at..].chars().next().map_or(0, u32::from);
        YamlError::Syntax {
            line: self.offset + 1 + before.matches('\n').count(),
            column: before[line_start..].chars().count() + 1,
            reason: format!("the character U+{code:04X} ends the line for kubectl; remove it, or write it in quotes"),
        }
    }

    /// The document; `None` if it is empty.
    fn into_document(self) -> Option<Document> {
        self.root.filter(|document| !document.value.is_null())
    }

    fn syntax(&self, error: &ScanError) -> YamlError {
        let at = error.marker();
        YamlError::Syntax {
            line: self.offset + at.line(),
            column: at.col() + 1,
            reason: excerpt::message(&error.info()),
        }
    }
}

/// Adds the members of an object, or of each object in a list, to those before. Go's parser of YAML 1.1 replaces equal ones,
/// whether they stand before or after; of a list, the first object with a key decides.
fn merge(members: &mut Map<String, Value>, value: Value) -> Result<(), String> {
    let sources = match value {
        Value::Array(items) => items,
        other => vec![other],
    };
    for source in sources.into_iter().rev() {
        let Value::Object(source) = source else { return Err("<< needs an object, or a list of objects".to_owned()) };
        members.extend(source);
    }
    Ok(())
}
