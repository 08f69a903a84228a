//! Objects of the texts, with their positions.

use std::sync::Arc;

use serde_json::Value;
use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    names::{GROUP, VERSION},
};

use super::{
    ParseError, Source, advice,
    document::{self, Content, Node, Step},
    finding::{Code, Finding},
    rules::PinnedUsers,
    schema::Schemas,
};
use crate::controllers::catalog::{desired::Kind, visibility::template_name};

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
    fn of(kind: Kind, value: Value) -> Self {
        let typed = match kind {
            Kind::Template => serde_json::from_value(value).map(|object| Self::Template(Arc::new(object))),
            Kind::ReleaseMeta => serde_json::from_value(value).map(|object| Self::ReleaseMeta(Arc::new(object))),
        };
        typed.unwrap_or_else(|error| Self::Invalid(error.to_string()))
    }
}

impl Object {
    fn new(file: &Arc<str>, kind: Kind, node: Node) -> Self {
        let typed = Typed::of(kind, node.to_value());
        let name = node.get("metadata").and_then(|metadata| metadata.text("name")).unwrap_or_default().to_owned();
        Self { file: Arc::clone(file), kind, name, node, typed }
    }

    /// The object as an API server would store it.
    pub(super) fn stored(&self, schemas: &Schemas) -> Typed {
        let mut value = self.node.to_value();
        schemas.store(self.kind, &mut value);
        Typed::of(self.kind, value)
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

fn finding(file: &Arc<str>, node: &Node, object: &str, path: &[Step<'_>], code: Code, message: String) -> FindingDraft {
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

/// Parses texts into templates and release metas, adds the Kymas to the users, and findings on all other objects.
pub(super) fn objects(
    sources: &[Source],
    findings: &mut Vec<Finding>,
    users: &mut PinnedUsers,
) -> Result<Vec<Object>, ParseError> {
    let mut objects = Vec::new();
    for Source { name, text } in sources {
        let documents = document::read(text).map_err(|(at, reason)| ParseError {
            file: Arc::clone(name),
            line: at.line(),
            column: at.column(),
            reason,
        })?;
        for node in documents.into_iter().flat_map(Node::into_objects) {
            if is_kyma(&node) {
                users.add(&node);
            } else if let Some(kind) = kind(name, &node, findings) {
                objects.push(Object::new(name, kind, node));
            }
        }
    }
    Ok(objects)
}

fn is_kyma(node: &Node) -> bool {
    let group = node.text("apiVersion").and_then(|version| Some(version.split_once('/')?.0));
    group == Some(GROUP) && node.text("kind") == Some("Kyma")
}

/// Kind of an object. Adds a finding on an object of neither kind.
fn kind(file: &Arc<str>, node: &Node, findings: &mut Vec<Finding>) -> Option<Kind> {
    let mut foreign = |code, message: &str, suggestion: String| {
        let label = node.text("kind").unwrap_or("?");
        findings.push(finding(file, node, label, &[], code, message.to_owned()).suggest(suggestion));
        None
    };
    let api_version = || format!("write apiVersion: {GROUP}/{VERSION}");
    if !matches!(node.content, Content::Object(_)) {
        let message = format!("must be an object, and is {}", node.content);
        return foreign(Code::Type, &message, "write each object after a line with ---".to_owned());
    }
    let kind_named = |kind: &str| Kind::ALL.into_iter().find(|known| known.name() == kind);
    let (version, kind) = match (node.text("apiVersion"), node.text("kind")) {
        (Some(version), Some(kind)) => (version, kind),
        (version, kind) => {
            let suggestion = match (version, kind.and_then(kind_named)) {
                (None, Some(_)) => api_version(),
                (Some(_), _) => "add the kind, ModuleTemplate or ModuleReleaseMeta".to_owned(),
                (None, None) => format!("add apiVersion: {GROUP}/{VERSION} and the kind"),
            };
            return foreign(Code::Required, "an object must have an apiVersion and a kind", suggestion);
        }
    };
    match (kind_named(kind), version.split_once('/')) {
        (Some(kind), Some((GROUP, VERSION))) => Some(kind),
        (Some(_), Some((GROUP, other))) => {
            foreign(Code::ApiVersion, &format!("the version {other} is not served, {VERSION} is"), api_version())
        }
        (known, _) => {
            let suggestion = match (known, advice::closest(kind, Kind::ALL.map(Kind::name))) {
                (Some(_), _) => api_version(),
                (None, Some(closest)) => format!("write kind: {closest}, if it shall be one"),
                (None, None) => "leave it out here".to_owned(),
            };
            foreign(Code::OtherKind, "neither a ModuleTemplate nor a ModuleReleaseMeta: not looked at", suggestion)
        }
    }
}
