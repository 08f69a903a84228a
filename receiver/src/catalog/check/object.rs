//! The objects of texts, and where each stands.

use std::sync::Arc;

use serde_json::Value;
use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    names::{GROUP, VERSION},
};

use super::{
    Source, Unreadable,
    document::{self, Content, Node, Step},
    finding::{Code, Finding},
    schema::Schemas,
};
use crate::catalog::desired::Kind;

/// A template or release meta of a text.
pub(super) struct Object {
    pub(super) file: Arc<str>,
    pub(super) kind: Kind,
    /// Empty if it has none.
    pub(super) name: String,
    pub(super) node: Node,
    pub(super) typed: Typed,
}

/// The object as the receiver takes it.
pub(super) enum Typed {
    Template(Arc<ModuleTemplate>),
    ReleaseMeta(Arc<ModuleReleaseMeta>),
    /// It cannot be taken; why.
    Broken(String),
}

impl Typed {
    fn of(kind: Kind, value: Value) -> Self {
        let typed = match kind {
            Kind::Template => serde_json::from_value(value).map(|object| Self::Template(Arc::new(object))),
            Kind::ReleaseMeta => serde_json::from_value(value).map(|object| Self::ReleaseMeta(Arc::new(object))),
        };
        typed.unwrap_or_else(|error| Self::Broken(error.to_string()))
    }
}

impl Object {
    fn new(file: &Arc<str>, kind: Kind, node: Node) -> Self {
        let typed = Typed::of(kind, node.to_value());
        let name = node.get("metadata").and_then(|metadata| metadata.text("name")).unwrap_or_default().to_owned();
        Self { file: Arc::clone(file), kind, name, node, typed }
    }

    /// As an API server would store it.
    pub(super) fn stored(&self, schemas: &Schemas) -> Typed {
        let mut value = self.node.to_value();
        schemas.store(self.kind, &mut value);
        Typed::of(self.kind, value)
    }

    pub(super) fn template(&self) -> Option<&Arc<ModuleTemplate>> {
        if let Typed::Template(template) = &self.typed { Some(template) } else { None }
    }

    pub(super) fn release_meta(&self) -> Option<&Arc<ModuleReleaseMeta>> {
        if let Typed::ReleaseMeta(meta) = &self.typed { Some(meta) } else { None }
    }

    /// Something that is wrong with the field at a path.
    pub(super) fn finding(&self, path: &[Step<'_>], code: Code, message: impl Into<String>) -> Finding {
        let name = if self.name.is_empty() { "?" } else { &self.name };
        finding(&self.file, &self.node, &format!("{}/{name}", self.kind.name()), path, code, message.into())
    }
}

fn finding(file: &Arc<str>, node: &Node, object: &str, path: &[Step<'_>], code: Code, message: String) -> Finding {
    let at = node.place(path);
    Finding {
        file: Arc::clone(file),
        line: at.line,
        column: at.column,
        object: object.to_owned(),
        path: document::path(path),
        severity: code.severity(),
        code,
        message,
        suggestion: None,
    }
}

impl Finding {
    pub(super) fn suggest(mut self, suggestion: impl Into<String>) -> Self {
        self.suggestion = Some(suggestion.into());
        self
    }
}

/// Reads texts: the templates and release metas, and what is to be said of everything else.
pub(super) fn objects(sources: &[Source], findings: &mut Vec<Finding>) -> Result<Vec<Object>, Unreadable> {
    let mut objects = Vec::new();
    for Source { name, text } in sources {
        let documents = document::read(text).map_err(|(at, why)| Unreadable {
            file: Arc::clone(name),
            line: at.line,
            column: at.column,
            why,
        })?;
        for node in documents.into_iter().flat_map(Node::into_objects) {
            match kind(&node) {
                Ok(kind) => objects.push(Object::new(name, kind, node)),
                Err((code, message)) => {
                    let label = node.text("kind").unwrap_or("?").to_owned();
                    findings.push(finding(name, &node, &label, &[], code, message));
                }
            }
        }
    }
    Ok(objects)
}

/// Of which kind of ours an object is.
fn kind(node: &Node) -> Result<Kind, (Code, String)> {
    if !matches!(node.content, Content::Object(_)) {
        return Err((Code::Type, format!("must be an object, and is {}", node.content.kind())));
    }
    let (Some(version), Some(kind)) = (node.text("apiVersion"), node.text("kind")) else {
        return Err((Code::Required, "an object must have an apiVersion and a kind".to_owned()));
    };
    let ours = Kind::ALL.into_iter().find(|ours| ours.name() == kind);
    match (ours, version.split_once('/')) {
        (Some(kind), Some((GROUP, VERSION))) => Ok(kind),
        (Some(_), Some((GROUP, other))) => {
            Err((Code::ApiVersion, format!("the version {other} is not served, {VERSION} is")))
        }
        _ => Err((Code::OtherKind, "neither a ModuleTemplate nor a ModuleReleaseMeta: not looked at".to_owned())),
    }
}
