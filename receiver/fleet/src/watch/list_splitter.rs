//! Splits the JSON text of a list into its objects while it arrives, so that a list of any length needs the memory of one object.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use serde::{Deserialize, de::IgnoredAny};
use thiserror::Error;

/// Longest object in bytes: five times the longest that etcd stores by default.
const MAX_OBJECT: usize = 8 << 20;
/// Bytes of a list at most beside those of its objects.
const MAX_REST: usize = 64 << 10;
/// Depth of the list's members, and that of the elements of `items`.
const MEMBERS: usize = 1;
const ITEMS: usize = 2;

/// Reason for which a list is refused.
#[derive(Debug, Error)]
pub(super) enum SplitListError {
    #[error("an object of the list has more than {MAX_OBJECT} bytes")]
    Object,
    #[error("the list has more than {MAX_REST} bytes beside its objects")]
    Rest,
    #[error("an item of the list is no object")]
    Item,
    #[error("the list is no valid JSON")]
    Parse(#[from] serde_json::Error),
    #[error("the list has no resourceVersion")]
    NoResourceVersion,
    #[error("the list is incomplete")]
    Continued,
}

/// State between two parts of the text. It follows brackets and strings alone, so each object is parsed when it is complete,
/// and the rest by [`ListSplitter::finish`].
#[derive(Default)]
pub(super) struct ListSplitter {
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
    is_in_items: bool,
    /// Begin of an object whose end has not arrived.
    object: Vec<u8>,
    /// The list without its objects.
    rest: Vec<u8>,
}

/// The list without its objects.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListHead {
    pub(super) api_version: String,
    pub(super) kind: String,
    metadata: ListMeta,
}

impl ListHead {
    /// The version of the list as a whole.
    pub(super) fn resource_version(&self) -> &str {
        self.metadata.resource_version.as_deref().unwrap_or_default()
    }
}

impl ListSplitter {
    /// Reads the next part of the text, and passes on each object that ends in it.
    ///
    /// # Errors
    /// The list is refused; no more of it may be read.
    pub(super) fn push(&mut self, part: &[u8], mut found: impl FnMut(&[u8])) -> Result<(), SplitListError> {
        let mut from = 0;
        for (at, byte) in part.iter().enumerate() {
            if self.is_in_string {
                self.is_in_string = self.is_escaped || *byte != b'"';
                self.is_escaped = *byte == b'\\' && !self.is_escaped;
                continue;
            }
            let is_between_items = self.is_between_items();
            match byte {
                b'{' if is_between_items => {
                    // Only separators of objects come before it.
                    from = at;
                    self.depth += 1;
                }
                b']' if is_between_items => {
                    (self.is_in_items, self.depth) = (false, MEMBERS);
                    from = at;
                }
                b',' | b' ' | b'\t' | b'\r' | b'\n' if is_between_items => {}
                _ if is_between_items => return Err(SplitListError::Item),
                b'}' | b']' if self.is_in_items && self.depth == ITEMS + 1 => {
                    self.depth -= 1;
                    self.keep(&part[from..=at])?;
                    let _: IgnoredAny = serde_json::from_slice(&self.object)?;
                    found(&self.object);
                    self.object.clear();
                    from = at + 1;
                }
                b'[' if self.depth == MEMBERS => {
                    self.keep(&part[from..=at])?;
                    from = at + 1;
                    self.is_in_items = is_items(&self.rest);
                    self.depth += 1;
                }
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                b'"' => self.is_in_string = true,
                _ => {}
            }
        }
        if self.is_between_items() { Ok(()) } else { self.keep(&part[from..]) }
    }

    /// Returns true where only an object, a separator or the end of the items is valid.
    fn is_between_items(&self) -> bool {
        self.is_in_items && self.depth == ITEMS
    }

    /// Appends a part of an object, or of the rest.
    fn keep(&mut self, part: &[u8]) -> Result<(), SplitListError> {
        let (kept, limit, refusal) = if self.is_in_items {
            (&mut self.object, MAX_OBJECT, SplitListError::Object)
        } else {
            (&mut self.rest, MAX_REST, SplitListError::Rest)
        };
        if kept.len() + part.len() > limit {
            return Err(refusal);
        }
        kept.extend_from_slice(part);
        Ok(())
    }

    /// Returns the rest of the list once its text has ended.
    ///
    /// # Errors
    /// The text is no list, has ended early, or continues on another page.
    pub(super) fn finish(&self) -> Result<ListHead, SplitListError> {
        let head: ListHead = serde_json::from_slice(&self.rest)?;
        if head.metadata.continue_.as_deref().is_some_and(|token| !token.is_empty()) {
            return Err(SplitListError::Continued);
        }
        if head.resource_version().is_empty() {
            return Err(SplitListError::NoResourceVersion);
        }
        Ok(head)
    }
}

/// Returns true if the text of the list's members ends with the begin of its items.
fn is_items(rest: &[u8]) -> bool {
    let before = rest.strip_suffix(b"[").map(<[u8]>::trim_ascii_end).and_then(|rest| rest.strip_suffix(b":"));
    before.is_some_and(|before| before.trim_ascii_end().ends_with(br#""items""#))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn split(text: &[u8], length: usize) -> Result<(Vec<Value>, ListHead), SplitListError> {
        let mut splitter = ListSplitter::default();
        let mut objects = Vec::new();
        for part in text.chunks(length) {
            splitter.push(part, |object| objects.push(object.to_vec()))?;
        }
        let objects = objects.iter().map(|object| serde_json::from_slice(object).unwrap()).collect();
        Ok((objects, splitter.finish()?))
    }

    fn items() -> [Value; 4] {
        [
            json!({}),
            json!({"items": [{"items": []}], "text": "a \"quoted\" ] } \\"}),
            json!({"metadata": {"name": "ä{[", "labels": {"\\\"": "\\"}}}),
            json!({"spec": [[{"a": [1, 2, null]}], "items"]}),
        ]
    }

    #[test]
    fn a_list_is_split_at_every_length_of_its_parts() {
        let members = [
            // The order of Go types, and that of custom resources.
            format!(
                r#"{{"kind":"KymaList","apiVersion":"v1","metadata":{{"resourceVersion":"7"}},"items":{}}}"#,
                json!(items())
            ),
            serde_json::to_string(&json!({"apiVersion": "v1", "items": items(), "kind": "KymaList",
                "metadata": {"continue": "", "resourceVersion": "7"}}))
            .unwrap(),
            serde_json::to_string_pretty(
                &json!({"apiVersion": "v1", "items": items(), "kind": "KymaList", "other": [{"a": "items"}],
                "metadata": {"resourceVersion": "7"}}),
            )
            .unwrap(),
        ];
        for text in members {
            for length in 1..=text.len() {
                let (objects, head) = split(text.as_bytes(), length).unwrap();
                assert_eq!(objects, items(), "{length} of {text}");
                assert_eq!((&*head.api_version, &*head.kind, head.resource_version()), ("v1", "KymaList", "7"));
            }
        }
    }

    #[test]
    fn a_list_without_objects_is_complete() {
        for items in ["[]", "[ ]", "null"] {
            let text = format!(
                r#"{{"apiVersion":"v1","items":{items},"kind":"KymaList","metadata":{{"resourceVersion":"7"}}}}"#
            );
            assert!(split(text.as_bytes(), 3).unwrap().0.is_empty());
        }
    }

    #[test]
    fn text_that_ends_early_or_is_no_list_is_refused() {
        let text =
            json!({"apiVersion": "v1", "items": items(), "kind": "KymaList", "metadata": {"resourceVersion": "7"}})
                .to_string();
        for length in 0..text.len() {
            assert!(split(&text.as_bytes()[..length], 5).is_err(), "{length}");
        }
        for (text, expected) in [
            (text.clone() + "}", "the list is no valid JSON"),
            (text.replace("\"7\"", "\"\""), "the list has no resourceVersion"),
            (text.replace("{\"resourceVersion\"", "{\"continue\":\"x\",\"resourceVersion\""), "the list is incomplete"),
            (text.replace("[{}", "[{},null"), "an item of the list is no object"),
            (text.replace("[{}", "[[{}]"), "an item of the list is no object"),
            (text.replace("[{}", "[\"{}\""), "an item of the list is no object"),
            (text.replace("\"kind\"", "\"king\""), "the list is no valid JSON"),
            (text.replace("[{}", "[{},{]"), "the list is no valid JSON"),
            (text.replace("[{}", "[{},{]},{}"), "the list is no valid JSON"),
            (text.replace("[{}", "[{},{x}"), "the list is no valid JSON"),
        ] {
            assert_eq!(split(text.as_bytes(), 7).unwrap_err().to_string(), expected, "{text}");
        }
    }

    #[test]
    fn a_long_object_and_a_long_rest_are_refused() {
        let list = |object: usize, rest: usize| {
            let object = "x".repeat(object);
            let rest = "x".repeat(rest);
            let head = json!({"apiVersion": "v1", "kind": rest, "metadata": {"resourceVersion": "7"}}).to_string();
            let text = head.replacen('{', &format!(r#"{{"items":[{{"a":"{object}"}}],"#), 1);
            split(text.as_bytes(), 16 << 10).map(|(objects, _)| objects.len())
        };
        assert_eq!(list(MAX_OBJECT - 8, MAX_REST - 100).unwrap(), 1);
        assert!(matches!(list(MAX_OBJECT - 7, 0), Err(SplitListError::Object)));
        assert!(matches!(list(0, MAX_REST), Err(SplitListError::Rest)));
    }

    #[test]
    fn many_objects_are_no_rest() {
        let items = vec![json!({}); MAX_REST];
        let text =
            json!({"apiVersion": "v1", "items": items, "kind": "L", "metadata": {"resourceVersion": "7"}}).to_string();
        assert_eq!(split(text.as_bytes(), 1_000).unwrap().0.len(), MAX_REST);
    }

    proptest! {
        #[test]
        fn no_text_is_split_with_a_panic(text in r#"[\[\]{}",:\\a \n]{0,60}"#, length in 1_usize..9) {
            let inside = format!(r#"{{"items":[{text}"#);
            let _ = (split(text.as_bytes(), length), split(inside.as_bytes(), length));
        }
    }
}
