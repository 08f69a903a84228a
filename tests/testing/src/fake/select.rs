//! Label and field selectors, as far as the product uses them: equality, inequality, sets and existence.

use serde_json::Value;

/// A label selector and a field selector.
#[derive(Clone, Debug, Default)]
pub(super) struct Selection {
    labels: Vec<(String, Test)>,
    fields: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
enum Test {
    Is(String),
    IsNot(String),
    In(Vec<String>),
    Exists,
}

impl Selection {
    /// Parses both selectors; `None` if one uses an unsupported operator or field.
    pub(super) fn parse(labels: &str, fields: &str) -> Option<Self> {
        let parts = |text: &str| -> Vec<String> {
            let mut in_set = false;
            let ends = |of: char| {
                in_set = of == '(' || in_set && of != ')';
                of == ',' && !in_set
            };
            text.split(ends).map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
        };
        let labels = parts(labels).iter().map(|part| label(part)).collect::<Option<_>>()?;
        let field = |part: &String| {
            let (key, value) = part.split_once('=')?;
            matches!(key, "metadata.name" | "metadata.namespace")
                .then(|| (key.trim_start_matches("metadata.").to_owned(), value.trim_start_matches('=').to_owned()))
        };
        Some(Self { labels, fields: parts(fields).iter().map(field).collect::<Option<_>>()? })
    }

    /// Returns true if an object with this metadata, in JSON, matches.
    pub(super) fn selects(&self, metadata: &str) -> bool {
        if self.labels.is_empty() && self.fields.is_empty() {
            return true;
        }
        let metadata: Value = serde_json::from_str(metadata).unwrap_or_default();
        let has = |(key, test): &(String, Test)| match (test, metadata["labels"][key].as_str()) {
            (Test::Is(value), Some(is)) => value == is,
            (Test::IsNot(value), is) => is != Some(value),
            (Test::In(values), Some(is)) => values.iter().any(|value| value == is),
            (Test::Exists, is) => is.is_some(),
            (Test::Is(_) | Test::In(_), None) => false,
        };
        self.labels.iter().all(has) && self.fields.iter().all(|(key, value)| metadata[key] == value.as_str())
    }
}

fn label(part: &str) -> Option<(String, Test)> {
    if let Some((key, value)) = part.split_once("!=") {
        return Some((key.to_owned(), Test::IsNot(value.to_owned())));
    }
    if let Some((key, value)) = part.split_once('=') {
        return Some((key.to_owned(), Test::Is(value.trim_start_matches('=').to_owned())));
    }
    if let Some((key, values)) = part.strip_suffix(')').and_then(|part| part.split_once(" in (")) {
        return Some((key.to_owned(), Test::In(values.split(',').map(|value| value.trim().to_owned()).collect())));
    }
    let plain = !part.contains([' ', '(', ')', '!']);
    plain.then(|| (part.to_owned(), Test::Exists))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_select() {
        let metadata = r#"{"name":"a","labels":{"x":"1","y":"2"}}"#;
        for (labels, fields, selects) in [
            ("", "", true),
            ("x=1,y==2", "metadata.name=a", true),
            ("x=2", "", false),
            ("x!=2,y", "", true),
            ("z", "", false),
            ("x in (0,1),y in (2)", "", true),
            ("x in (0)", "", false),
            ("z in (1)", "", false),
            ("", "metadata.name=b", false),
        ] {
            let selection = Selection::parse(labels, fields).expect("readable");
            assert_eq!(selection.selects(metadata), selects, "{labels} {fields}");
        }
        assert!(Selection::parse("x notin (1,2)", "").is_none());
        assert!(Selection::parse("", "spec.x=1").is_none());
    }
}
