//! What the CRDs say of an object, without an API server: their schemas, as far as ours go.

use std::collections::{BTreeMap, BTreeSet};

use jiff::civil::Date;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use regex::{Regex, RegexBuilder};
use serde_json::Value;
use tidewatch_shared::api::crds;

use super::{
    document::{Content, Node, Step},
    finding::Code,
};
use crate::catalog::desired::Kind;

/// Something that a schema does not allow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fault<'a> {
    pub(super) path: Vec<Step<'a>>,
    pub(super) code: Code,
    pub(super) message: String,
    pub(super) suggestion: Option<String>,
}

/// The schemas of the catalog's two kinds.
pub(super) struct Schemas {
    template: JSONSchemaProps,
    release_meta: JSONSchemaProps,
    patterns: BTreeMap<String, Regex>,
}

impl Schemas {
    /// Those of our own CRDs.
    pub(super) fn new() -> Self {
        let (template, release_meta) = (of(Kind::Template), of(Kind::ReleaseMeta));
        let mut texts = BTreeSet::new();
        collect(&template, &mut texts);
        collect(&release_meta, &mut texts);
        let patterns = texts.into_iter().filter_map(|text| {
            // As the API server's: classes are ASCII. A test compiles each of them.
            let pattern = RegexBuilder::new(&text).unicode(false).build().ok()?;
            Some((text, pattern))
        });
        Self { patterns: patterns.collect(), template, release_meta }
    }

    fn of(&self, kind: Kind) -> &JSONSchemaProps {
        match kind {
            Kind::Template => &self.template,
            Kind::ReleaseMeta => &self.release_meta,
        }
    }

    /// Makes of an object what an API server would store: with defaults, without nulls and unknown fields, and with numbers as it
    /// writes them. Only then it can be compared with one that it returned.
    pub(super) fn store(&self, kind: Kind, object: &mut Value) {
        store(object, self.of(kind));
        whole_numbers(object);
    }

    /// All that is wrong with an object.
    pub(super) fn check<'a>(&'a self, kind: Kind, object: &'a Node) -> Vec<Fault<'a>> {
        let schema = self.of(kind);
        let mut check = Check { patterns: &self.patterns, path: Vec::new(), faults: Vec::new() };
        check.node(object, schema);
        if object.get("spec").is_none_or(|spec| spec.content == Content::Null) {
            check.fault(Code::Required, "the object has no spec".to_owned());
        }
        check.faults
    }
}

fn of(kind: Kind) -> JSONSchemaProps {
    let crd = crds::crds().into_iter().find(|crd| crd.spec.names.plural == kind.resource());
    let version = crd.and_then(|crd| crd.spec.versions.into_iter().next());
    version
        .and_then(|version| version.schema?.open_api_v3_schema)
        .expect("each of our CRDs has a version with a schema")
}

/// The schemas within a schema.
fn within(schema: &JSONSchemaProps) -> Vec<&JSONSchemaProps> {
    let mut within: Vec<_> = schema.properties.iter().flat_map(BTreeMap::values).collect();
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
        within.push(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &schema.additional_properties {
        within.push(values);
    }
    within
}

fn collect(schema: &JSONSchemaProps, patterns: &mut BTreeSet<String>) {
    patterns.extend(schema.pattern.clone());
    for schema in within(schema) {
        collect(schema, patterns);
    }
}

fn store(value: &mut Value, schema: &JSONSchemaProps) {
    match (value, &schema.properties, &schema.additional_properties, &schema.items) {
        (Value::Object(members), Some(properties), _, _) => {
            let is_open = schema.x_kubernetes_preserve_unknown_fields == Some(true);
            members.retain(|name, value| match properties.get(name) {
                Some(known) => !value.is_null() || known.nullable == Some(true),
                None => is_open,
            });
            for (name, known) in properties {
                match (members.get_mut(name), &known.default) {
                    (Some(value), _) => store(value, known),
                    (None, Some(default)) => drop(members.insert(name.clone(), default.0.clone())),
                    (None, None) => {}
                }
            }
        }
        (Value::Object(members), None, Some(JSONSchemaPropsOrBool::Schema(values)), _) => {
            members.values_mut().for_each(|value| store(value, values));
        }
        (Value::Array(values), _, _, Some(JSONSchemaPropsOrArray::Schema(items))) => {
            values.iter_mut().for_each(|value| store(value, items));
        }
        _ => {}
    }
}

/// `1.0` comes back as `1`.
fn whole_numbers(value: &mut Value) {
    /// Up to here a floating-point number can be any whole one (2^53).
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) if number.is_f64() => {
            if let Some(whole) = number.as_f64().filter(|value| value.fract() == 0.0 && value.abs() < EXACT) {
                *value = (whole as i64).into();
            }
        }
        Value::Array(values) => values.iter_mut().for_each(whole_numbers),
        Value::Object(members) => members.values_mut().for_each(whole_numbers),
        _ => {}
    }
}

struct Check<'a> {
    patterns: &'a BTreeMap<String, Regex>,
    path: Vec<Step<'a>>,
    faults: Vec<Fault<'a>>,
}

impl<'a> Check<'a> {
    fn fault(&mut self, code: Code, message: String) {
        self.faults.push(Fault { path: self.path.clone(), code, message, suggestion: None });
    }

    fn suggest(&mut self, suggestion: impl Into<String>) {
        if let Some(fault) = self.faults.last_mut() {
            fault.suggestion = Some(suggestion.into());
        }
    }

    fn node(&mut self, node: &'a Node, schema: &'a JSONSchemaProps) {
        match (schema.type_.as_deref(), &node.content) {
            (Some("object"), Content::Object(members)) => self.object(node, members, schema),
            (Some("array"), Content::List(items)) => self.list(items, schema),
            (Some("string"), Content::Text(text)) => self.text(text, schema),
            (Some("integer"), Content::Number(number)) if number.is_i64() || number.is_u64() => {}
            (Some("number"), Content::Number(_)) | (Some("boolean"), Content::Bool(_)) | (None, _) => {}
            (Some(wanted), found) => {
                let wanted = match wanted {
                    "object" => "an object",
                    "array" => "a list",
                    "string" => "a string",
                    "integer" => "a whole number",
                    "boolean" => "a boolean",
                    other => other,
                };
                self.fault(Code::Type, format!("must be {wanted}, and is {}", found.kind()));
                if wanted == "a string" && matches!(found, Content::Number(_) | Content::Bool(_)) {
                    self.suggest("put it in quotes");
                }
            }
        }
    }

    fn object(&mut self, node: &'a Node, members: &'a [(String, Node)], schema: &'a JSONSchemaProps) {
        let empty = BTreeMap::new();
        let properties = schema.properties.as_ref().unwrap_or(&empty);
        for name in schema.required.iter().flatten() {
            if node.get(name).is_none_or(|node| node.content == Content::Null) {
                self.fault(Code::Required, format!("the field {name} is required"));
            }
        }
        if schema.x_kubernetes_embedded_resource == Some(true) {
            for name in ["apiVersion", "kind"] {
                if node.text(name).is_none_or(str::is_empty) {
                    self.fault(Code::Required, format!("the field {name} is required of an object"));
                }
            }
        }
        for (name, node) in members {
            self.path.push(Step::Key(name));
            // The API server drops nulls of optional fields.
            if node.content != Content::Null {
                match (schema.properties.as_ref().and_then(|known| known.get(name)), &schema.additional_properties) {
                    (Some(known), _) => self.node(node, known),
                    (None, Some(JSONSchemaPropsOrBool::Schema(values))) => self.node(node, values),
                    (None, Some(JSONSchemaPropsOrBool::Bool(true))) => {}
                    // `metadata` has no properties in a CRD; the API server knows them.
                    (None, _) if schema.x_kubernetes_preserve_unknown_fields == Some(true) || properties.is_empty() => {
                    }
                    (None, _) => self.unknown(name, properties),
                }
            }
            self.path.pop();
        }
    }

    fn unknown(&mut self, name: &str, properties: &BTreeMap<String, JSONSchemaProps>) {
        self.fault(Code::UnknownField, "there is no such field".to_owned());
        let near = properties.keys().map(|known| (distance(name, known), known)).min();
        if let Some((0..=2, known)) = near {
            self.suggest(format!("perhaps {known} is meant"));
        }
    }

    fn list(&mut self, items: &'a [Node], schema: &'a JSONSchemaProps) {
        let length = i64::try_from(items.len()).unwrap_or(i64::MAX);
        if schema.max_items.is_some_and(|max| length > max) || schema.min_items.is_some_and(|min| length < min) {
            self.fault(Code::Bounds, format!("has {length} entries"));
        }
        let Some(JSONSchemaPropsOrArray::Schema(of_items)) = &schema.items else { return };
        let keys = schema.x_kubernetes_list_map_keys.as_deref().unwrap_or_default();
        let mut seen = BTreeSet::new();
        for (index, item) in items.iter().enumerate() {
            self.path.push(Step::Index(index));
            self.node(item, of_items);
            let key: Vec<_> = keys.iter().map(|key| item.get(key).map(|node| node.to_value().to_string())).collect();
            if !keys.is_empty() && !seen.insert(key) {
                self.fault(Code::DuplicateEntry, format!("another entry has the same {}", keys.join(" and ")));
                self.suggest("remove one of them");
            }
            self.path.pop();
        }
    }

    fn text(&mut self, text: &str, schema: &'a JSONSchemaProps) {
        let length = i64::try_from(text.chars().count()).unwrap_or(i64::MAX);
        if let Some(max) = schema.max_length.filter(|max| length > *max) {
            self.fault(Code::Bounds, format!("has {length} characters, more than {max}"));
        }
        if let Some(min) = schema.min_length.filter(|min| length < *min) {
            self.fault(Code::Bounds, format!("has {length} characters, fewer than {min}"));
        }
        if let Some(pattern) = &schema.pattern
            && self.patterns.get(pattern).is_some_and(|regex| !regex.is_match(text))
        {
            self.fault(Code::Pattern, format!("{text:?} does not match {pattern}"));
            if text.strip_prefix(['v', 'V']).is_some_and(|rest| rest.starts_with(|char: char| char.is_ascii_digit())) {
                self.suggest("leave out the v");
            }
        }
        if let Some(values) = &schema.enum_
            && !values.iter().any(|value| value.0 == *text)
        {
            let values: Vec<_> = values.iter().map(|value| value.0.to_string()).collect();
            self.fault(Code::Enum, format!("{text:?} is none of {}", values.join(", ")));
        }
        match schema.format.as_deref() {
            Some("date") if date(text).is_none() => {
                self.fault(Code::Format, format!("{text:?} is no date"));
                self.suggest("write YYYY-MM-DD");
            }
            Some("uri") if !is_uri(text) => self.fault(Code::Format, format!("{text:?} is no URI")),
            _ => {}
        }
    }
}

/// A day as RFC 3339 has it (`full-date`).
pub(super) fn date(text: &str) -> Option<Date> {
    text.parse().ok().filter(|date: &Date| date.to_string() == text)
}

fn is_uri(text: &str) -> bool {
    let scheme = text.split_once(':').map(|(scheme, _)| scheme);
    let has_scheme = scheme.is_some_and(|scheme| {
        scheme.starts_with(|char: char| char.is_ascii_alphabetic())
            && scheme.chars().all(|char| char.is_ascii_alphanumeric() || "+-.".contains(char))
    });
    (has_scheme || text.starts_with('/')) && !text.contains(|char: char| char.is_control() || char == ' ')
}

/// How many characters differ, with letter case counted for nothing (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.to_ascii_lowercase(), b.to_ascii_lowercase());
    let b: Vec<char> = b.chars().collect();
    // A misspelt name is short; what is longer is no misspelling.
    if a.len() > 64 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let (mut corner, mut left) = (i, i + 1);
        row[0] = left;
        for (j, y) in b.iter().enumerate() {
            let above = row[j + 1];
            left = (corner + usize::from(x != *y)).min(above + 1).min(left + 1);
            corner = above;
            row[j + 1] = left;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_stored_has_defaults_and_nothing_unknown() {
        let mut meta = json!({"apiVersion": "x", "metadata": {"name": "a", "labels": null}, "status": {}, "spec": {
            "moduleName": "a", "ocmComponentName": null, "channel": [], "internal": true,
            "channels": [{"channel": "fast", "version": "1.0.0", "more": 1}]}});
        Schemas::new().store(Kind::ReleaseMeta, &mut meta);
        let stored = json!({"apiVersion": "x", "metadata": {"name": "a", "labels": null}, "spec": {
            "moduleName": "a", "beta": false, "internal": true, "channels": [{"channel": "fast", "version": "1.0.0"}]}});
        assert_eq!(meta, stored);
        let mut template = json!({"spec": {"descriptor": {"any": {"a": 1.0, "b": 1.5, "c": null}}}});
        Schemas::new().store(Kind::Template, &mut template);
        assert_eq!(template, json!({"spec": {"descriptor": {"any": {"a": 1, "b": 1.5, "c": null}}}}));
    }

    #[test]
    fn nothing_that_our_crds_say_is_overlooked() {
        let schemas = Schemas::new();
        let mut patterns = BTreeSet::new();
        for schema in [&schemas.template, &schemas.release_meta] {
            collect(schema, &mut patterns);
            known(schema);
        }
        assert!(patterns.len() >= 4 && patterns.iter().all(|pattern| schemas.patterns.contains_key(pattern)));
        let rules = serde_json::to_string(&[&schemas.template, &schemas.release_meta]).unwrap();
        // That of `mandatory` and `channels`, which the rules of a release meta check.
        assert_eq!(rules.matches("\"rule\":").count(), 1, "{rules}");
    }

    fn known(schema: &JSONSchemaProps) {
        const KNOWN: [&str; 20] = [
            "additionalProperties",
            "default",
            "description",
            "enum",
            "format",
            "items",
            "maxItems",
            "maxLength",
            "minItems",
            "minLength",
            "pattern",
            "properties",
            "required",
            "type",
            "x-kubernetes-embedded-resource",
            "x-kubernetes-list-map-keys",
            "x-kubernetes-list-type",
            "x-kubernetes-map-type",
            "x-kubernetes-preserve-unknown-fields",
            "x-kubernetes-validations",
        ];
        let Value::Object(members) = serde_json::to_value(schema).unwrap() else { panic!() };
        for (key, value) in &members {
            assert!(KNOWN.contains(&key.as_str()), "{key}: {value}");
        }
        if let Some(format) = &schema.format {
            assert!(["date", "uri"].contains(&format.as_str()), "{format}");
        }
        within(schema).into_iter().for_each(known);
    }

    #[test]
    fn misspelt_names_are_near() {
        assert_eq!(distance("chanels", "channels"), 1);
        assert_eq!(distance("modulename", "moduleName"), 0);
        assert_eq!(distance("abc", ""), 3);
        assert!(distance("descriptor", "data") > 2);
    }

    #[test]
    fn dates_and_uris() {
        assert!(date("2026-02-28").is_some());
        for text in ["2026-02-30", "2026-2-3", "20260203", "2026-02-03T00:00:00Z", ""] {
            assert!(date(text).is_none(), "{text}");
        }
        assert!(is_uri("https://example.com/x") && is_uri("/x") && is_uri("mailto:a@b"));
        assert!(!is_uri("example.com") && !is_uri("https://a b") && !is_uri(""));
    }
}
