//! Check against the schemas of the CRDs, without an API server, limited to the keywords that these CRDs use.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use regex::{Regex, RegexBuilder};
use serde_json::Value;
use tidewatch_api::crds;
use tidewatch_kit::{json, variant::VariantName as _};
use tidewatch_select::catalog::{desired::Kind, retirement::parse_date};

use super::{
    advice,
    document::{Content, Node, Step},
    finding::{Code, Finding},
    object::{Object, Typed},
};

/// Schemas of the catalog's two kinds.
pub(super) struct Schemas {
    template: JSONSchemaProps,
    release_meta: JSONSchemaProps,
    /// Compiled patterns; `None` for one that does not compile.
    patterns: RefCell<BTreeMap<String, Option<Regex>>>,
}

impl Schemas {
    /// An object as an API server would store it.
    pub(super) fn stored(&self, object: &Object) -> Typed {
        let mut value = object.node.to_value();
        self.store(object.kind, &mut value);
        Typed::of(object.kind, value)
    }

    /// Loads the schemas of the bundled CRDs.
    pub(super) fn new() -> Self {
        let patterns = RefCell::default();
        Self { template: schema_of(Kind::Template), release_meta: schema_of(Kind::ReleaseMeta), patterns }
    }

    fn of(&self, kind: Kind) -> &JSONSchemaProps {
        match kind {
            Kind::Template => &self.template,
            Kind::ReleaseMeta => &self.release_meta,
        }
    }

    /// Converts an object to the form that an API server stores: with defaults, without nulls and unknown fields, and
    /// with normalized numbers. Only then it compares equal to an object returned by one.
    pub(super) fn store(&self, kind: Kind, object: &mut Value) {
        store(object, self.of(kind));
        json::normalize_numbers(object);
    }

    /// Findings on all violations of an object.
    pub(super) fn check(&self, object: &Object) -> Vec<Finding> {
        let mut check = Check { schemas: self, object, path: Vec::new(), findings: Vec::new() };
        check.node(&object.node, self.of(object.kind));
        if object.node.get("spec").is_none_or(|spec| spec.content == Content::Null) {
            let fields = match object.kind {
                Kind::Template => "moduleName, version and descriptor",
                Kind::ReleaseMeta => "moduleName, ocmComponentName and channels",
            };
            check.violation(Code::Required, "the object has no spec".to_owned(), format!("add spec with {fields}"));
        }
        check.findings
    }

    fn matches(&self, text: &str, pattern: &str) -> bool {
        let mut patterns = self.patterns.borrow_mut();
        let regex = patterns.entry(pattern.to_owned()).or_insert_with(|| compiled(pattern));
        regex.as_ref().is_none_or(|regex| regex.is_match(text))
    }

    /// Returns whether a text meets all restrictions of a field.
    fn fits(&self, text: &str, schema: &JSONSchemaProps) -> bool {
        let length = length(text.chars());
        schema.max_length.is_none_or(|max| length <= max)
            && schema.min_length.is_none_or(|min| length >= min)
            && schema.pattern.as_deref().is_none_or(|pattern| self.matches(text, pattern))
            && schema.format.as_deref().is_none_or(|format| format_mismatch(text, format).is_none())
    }
}

fn schema_of(kind: Kind) -> JSONSchemaProps {
    let crd = crds::crds().into_iter().find(|crd| crd.spec.names.plural == kind.as_str());
    let version = crd.and_then(|crd| crd.spec.versions.into_iter().next());
    let schema = version.and_then(|version| version.schema?.open_api_v3_schema);
    schema.expect("each of our CRDs has a version with a schema")
}

/// Character classes are ASCII, as in the API server. A test compiles every pattern.
fn compiled(pattern: &str) -> Option<Regex> {
    RegexBuilder::new(pattern).unicode(false).build().ok()
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

struct Check<'a> {
    schemas: &'a Schemas,
    object: &'a Object,
    path: Vec<Step<'a>>,
    findings: Vec<Finding>,
}

impl<'a> Check<'a> {
    fn violation(&mut self, code: Code, message: String, suggestion: impl Into<String>) {
        self.findings.push(self.object.finding(&self.path, code, message).suggest(suggestion));
    }

    fn node(&mut self, node: &'a Node, schema: &'a JSONSchemaProps) {
        match (schema.type_.as_deref(), &node.content) {
            (Some("object"), Content::Object(members)) => self.object(node, members, schema),
            (Some("array"), Content::List(items)) => self.list(items, schema),
            (Some("string"), Content::Text(text)) => self.text(text, schema),
            (Some("integer"), Content::Number(number)) if number.is_i64() || number.is_u64() => {}
            (Some("number"), Content::Number(_)) | (Some("boolean"), Content::Bool(_)) | (None, _) => {}
            (Some(expected), found) => {
                self.findings.push(self.object.type_finding(&self.path, type_name(expected), found));
            }
        }
    }

    fn object(&mut self, node: &'a Node, members: &'a [(String, Node)], schema: &'a JSONSchemaProps) {
        let empty = BTreeMap::new();
        let properties = schema.properties.as_ref().unwrap_or(&empty);
        for name in schema.required.iter().flatten() {
            if node.get(name).is_none_or(|node| node.content == Content::Null) {
                let suggestion = self.field_advice(name, properties.get(name));
                self.violation(Code::Required, format!("the field {name} is required"), suggestion);
            }
        }
        if schema.x_kubernetes_embedded_resource == Some(true) {
            for name in ["apiVersion", "kind"] {
                if node.text(name).is_none_or(str::is_empty) {
                    let message = format!("the field {name} is required of an object");
                    self.violation(Code::Required, message, format!("add the {name} of the object that stands here"));
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
                    // The CRD has no properties for `metadata`; the API server validates it.
                    (None, _) if schema.x_kubernetes_preserve_unknown_fields == Some(true) || properties.is_empty() => {
                    }
                    (None, _) => self.unknown(name, properties),
                }
            }
            self.path.pop();
        }
    }

    /// Suggestion for a missing field.
    fn field_advice(&self, name: &str, schema: Option<&JSONSchemaProps>) -> String {
        let Some(schema) = schema else { return format!("add {name}") };
        let own = Some(&self.object.name)
            .filter(|own| name == "moduleName" && !own.is_empty() && self.schemas.fits(own, schema));
        let is_restricted = schema.pattern.is_some() || schema.format.is_some();
        let form = advice::field_format(name).filter(|_| is_restricted);
        let values = schema.enum_.as_deref().map(|values| format!("one of {}", joined(values)));
        let kind = schema.type_.as_deref().map(|kind| type_name(kind).to_owned());
        match own.cloned().or(form).or(values).or(kind) {
            Some(value) => format!("add {name}: {value}"),
            None => format!("add {name}"),
        }
    }

    fn unknown(&mut self, name: &str, properties: &BTreeMap<String, JSONSchemaProps>) {
        let known = || properties.keys().map(String::as_str);
        let suggestion = match advice::closest(name, known()) {
            Some(known) => format!("perhaps {known} is meant"),
            None => format!("remove it; the fields are {}", known().collect::<Vec<_>>().join(", ")),
        };
        self.violation(Code::UnknownField, "there is no such field".to_owned(), suggestion);
    }

    fn list(&mut self, items: &'a [Node], schema: &'a JSONSchemaProps) {
        let length = length(items.iter());
        if let Some(max) = schema.max_items.filter(|max| length > *max) {
            let message = format!("has {length} entries, more than {max}");
            self.violation(Code::Bounds, message, format!("keep {max} of them"));
        }
        if let Some(min) = schema.min_items.filter(|min| length < *min) {
            let suggestion = format!("add {} more", min - length);
            self.violation(Code::Bounds, format!("has {length} entries, fewer than {min}"), suggestion);
        }
        let Some(JSONSchemaPropsOrArray::Schema(of_items)) = &schema.items else { return };
        let keys = schema.x_kubernetes_list_map_keys.as_deref().unwrap_or_default();
        let mut seen = BTreeSet::new();
        for (index, item) in items.iter().enumerate() {
            self.path.push(Step::Index(index));
            self.node(item, of_items);
            let key: Vec<_> = keys.iter().map(|key| item.get(key).map(|node| node.to_value().to_string())).collect();
            if !keys.is_empty() && !seen.insert(key) {
                let message = format!("another entry has the same {}", keys.join(" and "));
                self.violation(Code::DuplicateEntry, message, "remove one of them");
            }
            self.path.pop();
        }
    }

    fn text(&mut self, text: &str, schema: &'a JSONSchemaProps) {
        let length = length(text.chars());
        if let Some(max) = schema.max_length.filter(|max| length > *max) {
            let message = format!("has {length} characters, more than {max}");
            self.violation(Code::Bounds, message, format!("shorten it to {max} characters"));
        }
        if let Some(min) = schema.min_length.filter(|min| length < *min) {
            let message = format!("has {length} characters, fewer than {min}");
            self.violation(Code::Bounds, message, format!("write {min} characters or more"));
        }
        if let Some(pattern) = schema.pattern.as_deref().filter(|pattern| !self.schemas.matches(text, pattern)) {
            self.violation(Code::Pattern, format!("{text:?} does not match {pattern}"), self.text_advice(text, schema));
        }
        if let Some(values) = schema.enum_.as_deref().filter(|values| !values.iter().any(|value| value.0 == *text)) {
            let known = values.iter().filter_map(|value| value.0.as_str()).filter(|value| !value.is_empty());
            let suggestion = match advice::closest(text, known) {
                Some(closest) => format!("write {closest:?}"),
                None => "write one of them".to_owned(),
            };
            self.violation(Code::Enum, format!("{text:?} is none of {}", joined(values)), suggestion);
        }
        if let Some(kind) = schema.format.as_deref().and_then(|format| format_mismatch(text, format)) {
            self.violation(Code::Format, format!("{text:?} is no {kind}"), self.text_advice(text, schema));
        }
    }

    /// Suggestion for a text that does not meet the restrictions of its field.
    fn text_advice(&self, text: &str, schema: &JSONSchemaProps) -> String {
        let field = self.path.iter().rev().find_map(|step| if let Step::Key(key) = step { Some(*key) } else { None });
        match (advice::repair(text, |other| self.schemas.fits(other, schema)), field.and_then(advice::field_format)) {
            (Some(other), _) => format!("write {other:?}"),
            (None, Some(form)) => format!("write {form}"),
            (None, None) => "write a text that does".to_owned(),
        }
    }
}

/// Schema type in a message.
fn type_name(kind: &str) -> &str {
    match kind {
        "object" => "an object",
        "array" => "a list",
        "string" => "a string",
        "integer" => "a whole number",
        "number" => "a number",
        "boolean" => "a boolean",
        other => other,
    }
}

fn joined(values: &[JSON]) -> String {
    values.iter().map(|value| value.0.to_string()).collect::<Vec<_>>().join(", ")
}

/// Number of items, in the type of a schema's bounds.
fn length(items: impl Iterator) -> i64 {
    i64::try_from(items.count()).unwrap_or(i64::MAX)
}

/// Name of the format that a text does not have; `None` if it does.
fn format_mismatch(text: &str, format: &str) -> Option<&'static str> {
    match format {
        "date" if parse_date(text).is_none() => Some("date"),
        "uri" if !is_uri(text) => Some("URI"),
        _ => None,
    }
}

fn is_uri(text: &str) -> bool {
    let scheme = text.split_once(':').map(|(scheme, _)| scheme);
    let has_scheme = scheme.is_some_and(|scheme| {
        scheme.starts_with(|char: char| char.is_ascii_alphabetic())
            && scheme.chars().all(|char| char.is_ascii_alphanumeric() || "+-.".contains(char))
    });
    (has_scheme || text.starts_with('/')) && !text.contains(|char: char| char.is_control() || char == ' ')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn stored_object_has_defaults_and_no_unknown_fields() {
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
    fn every_keyword_of_the_crds_is_supported() {
        let schemas = Schemas::new();
        let mut patterns = BTreeSet::new();
        for schema in [&schemas.template, &schemas.release_meta] {
            collect_patterns(schema, &mut patterns);
            assert_supported(schema);
        }
        assert!(patterns.len() >= 4 && patterns.iter().all(|pattern| compiled(pattern).is_some()));
        let rules = serde_json::to_string(&[&schemas.template, &schemas.release_meta]).unwrap();
        // The one rule, on `mandatory` and `channels`, is checked with the release metas.
        assert_eq!(rules.matches("\"rule\":").count(), 1, "{rules}");
    }

    /// Direct subschemas of a schema.
    fn subschemas(schema: &JSONSchemaProps) -> Vec<&JSONSchemaProps> {
        let mut subschemas: Vec<_> = schema.properties.iter().flat_map(BTreeMap::values).collect();
        if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
            subschemas.push(items);
        }
        if let Some(JSONSchemaPropsOrBool::Schema(values)) = &schema.additional_properties {
            subschemas.push(values);
        }
        subschemas
    }

    fn collect_patterns(schema: &JSONSchemaProps, patterns: &mut BTreeSet<String>) {
        patterns.extend(schema.pattern.clone());
        subschemas(schema).into_iter().for_each(|schema| collect_patterns(schema, patterns));
    }

    fn assert_supported(schema: &JSONSchemaProps) {
        const SUPPORTED: [&str; 20] = [
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
            assert!(SUPPORTED.contains(&key.as_str()), "{key}: {value}");
        }
        if let Some(format) = &schema.format {
            assert!(["date", "uri"].contains(&format.as_str()), "{format}");
        }
        subschemas(schema).into_iter().for_each(assert_supported);
    }

    /// Fields with a pattern or format.
    fn restricted(schema: &JSONSchemaProps, fields: &mut Vec<(String, JSONSchemaProps)>) {
        for (name, field) in schema.properties.iter().flatten() {
            if field.pattern.is_some() || field.format.is_some() {
                fields.push((name.clone(), field.clone()));
            }
        }
        subschemas(schema).into_iter().for_each(|schema| restricted(schema, fields));
    }

    #[test]
    fn every_restricted_field_has_a_format() {
        let schemas = Schemas::new();
        let mut fields = Vec::new();
        restricted(&schemas.template, &mut fields);
        restricted(&schemas.release_meta, &mut fields);
        for (name, schema) in &fields {
            let (.., example) = advice::FIELD_FORMATS.iter().find(|(field, ..)| field == name).unwrap();
            assert!(schemas.fits(example, schema), "{name}: {example}");
        }
        let names: BTreeSet<_> = fields.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, advice::FIELD_FORMATS.iter().map(|(field, ..)| *field).collect());
    }

    #[test]
    fn dates_and_uris_are_recognised() {
        assert!(parse_date("2026-02-28").is_some());
        for text in ["2026-02-30", "2026-2-3", "20260203", "2026-02-03T00:00:00Z", ""] {
            assert!(parse_date(text).is_none(), "{text}");
        }
        assert!(is_uri("https://example.com/x") && is_uri("/x") && is_uri("mailto:a@b"));
        assert!(!is_uri("example.com") && !is_uri("https://a b") && !is_uri(""));
    }
}
