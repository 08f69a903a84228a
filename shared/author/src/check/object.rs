//! Objects of the texts, with their positions.

use std::sync::Arc;

use serde_json::Value;
use tidewatch_api::{ModuleReleaseMeta, ModuleTemplate};
use tidewatch_select::catalog::{desired::Kind, visibility::template_name};

use super::{
    advice,
    document::{self, Content, Node, Step},
    finding::{Code, Finding},
};

/// A template or release meta in a text.
pub(super) struct Object {
    pub(super) file: Arc<str>,
    pub(super) kind: Kind,
    /// Name of the object; empty if missing.
    pub(super) name: String,
    pub(super) node: Node,
    pub(super) typed: Typed,
}

/// The deserialized object.
pub(super) enum Typed {
    Template(Arc<ModuleTemplate>),
    ReleaseMeta(Arc<ModuleReleaseMeta>),
    /// The object does not deserialize, with the error.
    Invalid(String),
}

impl Typed {
    pub(super) fn of(kind: Kind, value: Value) -> Self {
        let typed = match kind {
            Kind::Template => serde_json::from_value(value).map(|object| Self::Template(Arc::new(object))),
            Kind::ReleaseMeta => serde_json::from_value(value).map(|object| Self::ReleaseMeta(Arc::new(object))),
        };
        typed.unwrap_or_else(|error| Self::Invalid(error.to_string()))
    }
}

impl Object {
    pub(super) fn new(file: &Arc<str>, kind: Kind, node: Node) -> Self {
        let typed = Typed::of(kind, node.to_value());
        let name = node.get("metadata").and_then(|metadata| metadata.text("name")).unwrap_or_default().to_owned();
        Self { file: Arc::clone(file), kind, name, node, typed }
    }

    pub(super) fn template(&self) -> Option<&ModuleTemplate> {
        if let Typed::Template(template) = &self.typed { Some(template) } else { None }
    }

    pub(super) fn release_meta(&self) -> Option<&ModuleReleaseMeta> {
        if let Typed::ReleaseMeta(meta) = &self.typed { Some(meta) } else { None }
    }

    /// Creates a finding at the field of this path.
    pub(super) fn finding(&self, path: &[Step<'_>], code: Code, message: impl Into<String>) -> FindingDraft {
        let name = if self.name.is_empty() { "?" } else { &self.name };
        finding(&self.file, &self.node, &format!("{}/{name}", self.kind.name()), path, code, message.into())
    }

    /// Creates a finding on a value of the wrong type at the field of this path.
    pub(super) fn type_finding(&self, path: &[Step<'_>], expected: &str, found: &Content) -> Finding {
        let message = format!("must be {expected}, and is {found}");
        self.finding(path, Code::Type, message).suggest(advice::type_advice(expected, found))
    }

    /// Name derived from the spec; `None` if the spec lacks a part of it.
    pub(super) fn proper_name(&self) -> Option<String> {
        let spec = self.node.get("spec")?;
        let non_empty = |field| spec.text(field).filter(|text| !text.is_empty());
        match self.kind {
            Kind::Template => Some(template_name(non_empty("moduleName")?, non_empty("version")?)),
            Kind::ReleaseMeta => non_empty("moduleName").map(str::to_owned),
        }
    }
}

pub(super) fn finding(
    file: &Arc<str>,
    node: &Node,
    object: &str,
    path: &[Step<'_>],
    code: Code,
    message: String,
) -> FindingDraft {
    let at = node.location_of(path);
    FindingDraft(Finding {
        file: file.to_string(),
        line: at.line(),
        column: at.column(),
        object: object.to_owned(),
        path: document::path(path),
        severity: code.severity(),
        code,
        message,
        suggestion: String::new(),
    })
}

/// A finding without its suggestion.
#[must_use]
pub(super) struct FindingDraft(Finding);

impl FindingDraft {
    pub(super) fn suggest(self, suggestion: impl Into<String>) -> Finding {
        Finding { suggestion: suggestion.into(), ..self.0 }
    }
}
