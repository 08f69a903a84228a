//! Splits a text into documents as the decoder of kubectl does (`YAMLOrJSONDecoder` of `k8s.io/apimachinery`).

use serde::de::IgnoredAny;

use super::YamlError;

/// Begins a line that separates two documents.
const SEPARATOR: &str = "---";

/// Text of one document; it may be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// A JSON object.
    Json {
        /// Line of its first byte, counted from 1.
        line: usize,
        /// The object.
        text: &'a str,
    },
    /// YAML. Of several documents in it, only the first is read.
    Yaml {
        /// Line of its first byte, counted from 1.
        line: usize,
        /// Lines between two separators.
        text: &'a str,
    },
}

/// Calls `visit` with the parts of a text in their order. A text that begins with a brace is a sequence of JSON objects. The
/// rest from the first or second one on that is not JSON is YAML.
///
/// # Errors
/// Those of `visit`, and [`YamlError::Syntax`] for a malformed separator, and for a third object that is not JSON.
pub(super) fn each<'a>(
    text: &'a str,
    mut visit: impl FnMut(Part<'a>) -> Result<(), YamlError>,
) -> Result<(), YamlError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut rest = Rest { text, line: 1 };
    if text.trim_start().starts_with('{') {
        json(&mut rest, &mut visit)?;
    }
    yaml(rest, &mut visit)
}

/// What is left of a text.
struct Rest<'a> {
    text: &'a str,
    /// Line of its first byte, counted from 1.
    line: usize,
}

impl<'a> Rest<'a> {
    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, left) = self.text.split_at(bytes);
        self.line += taken.matches('\n').count();
        self.text = left;
        taken
    }
}

/// Visits JSON objects until the rest is empty, or is to be read as YAML.
fn json<'a>(rest: &mut Rest<'a>, visit: &mut impl FnMut(Part<'a>) -> Result<(), YamlError>) -> Result<(), YamlError> {
    for index in 0.. {
        let blanks = rest.text.len() - rest.text.trim_start().len();
        let next = &rest.text[blanks..];
        if next.is_empty() {
            rest.take(blanks);
            return Ok(());
        }
        let mut objects = serde_json::Deserializer::from_str(next).into_iter::<IgnoredAny>();
        match objects.next() {
            Some(Ok(_)) => {
                let length = objects.byte_offset();
                rest.take(blanks);
                let line = rest.line;
                visit(Part::Json { line, text: rest.take(length) })?;
            }
            // One object does not yet tell JSON from YAML.
            Some(Err(_)) | None if index < 2 => {
                // YAML begins at the end of the line, if nothing else follows there.
                let newline = rest.text[..blanks].find('\n').map_or(blanks, |at| at + 1);
                rest.take(newline);
                return Ok(());
            }
            Some(Err(error)) => {
                rest.take(blanks);
                let line = rest.line + error.line() - 1;
                return Err(YamlError::Syntax { line, column: error.column(), reason: format!("not JSON: {error}") });
            }
            None => return Ok(()),
        }
    }
    Ok(())
}

/// Visits the parts between separators.
fn yaml<'a>(rest: Rest<'a>, visit: &mut impl FnMut(Part<'a>) -> Result<(), YamlError>) -> Result<(), YamlError> {
    let mut start = 0;
    let mut start_line = rest.line;
    let mut end = 0;
    for (line, text) in (rest.line..).zip(rest.text.split_inclusive('\n')) {
        let begin = end;
        end += text.len();
        let Some(after) = text.strip_prefix(SEPARATOR) else { continue };
        let after = after.trim();
        if !after.is_empty() && !after.starts_with('#') {
            let reason = "only a comment may follow --- on its line; write the document below it".to_owned();
            return Err(YamlError::Syntax { line, column: SEPARATOR.len() + 1, reason });
        }
        if begin > start {
            visit(Part::Yaml { line: start_line, text: &rest.text[start..begin] })?;
        }
        start = end;
        start_line = line + 1;
    }
    if end > start { visit(Part::Yaml { line: start_line, text: &rest.text[start..end] }) } else { Ok(()) }
}
