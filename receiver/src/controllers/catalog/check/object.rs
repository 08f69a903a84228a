//! The objects of texts, and where each stands.

use std::sync::Arc;

use serde_json::Value;
use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    names::{GROUP, VERSION},
};

use super::{
    Source, Unreadable, advice,
    document::{self, Content, Node, Step},
    finding::{Code, Finding},
    schema::Schemas,
};
use crate::controllers::catalog::{desired::Kind, visibility::template_name};

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
    pub(super) fn finding(&self, path: &[Step<'_>], code: Code, message: impl Into<String>) -> Unadvised {
        let name = if self.name.is_empty() { "?" } else { &self.name };
        finding(&self.file, &self.node, &format!("{}/{name}", self.kind.name()), path, code, message.into())
    }

    /// What it should be called, by what it says of itself.
    pub(super) fn proper_name(&self) -> Option<String> {
        let spec = self.node.get("spec")?;
        let said = |field| spec.text(field).filter(|text| !text.is_empty());
        match self.kind {
            Kind::Template => Some(template_name(said("moduleName")?, said("version")?)),
            Kind::ReleaseMeta => said("moduleName").map(str::to_owned),
        }
    }
}

fn finding(file: &Arc<str>, node: &Node, object: &str, path: &[Step<'_>], code: Code, message: String) -> Unadvised {
    let at = node.place(path);
    Unadvised(Finding {
        file: Arc::clone(file),
        line: at.line,
        column: at.column,
        object: object.to_owned(),
        path: document::path(path),
        severity: code.severity(),
        code,
        message,
        suggestion: String::new(),
    })
}

/// A finding that does not say yet what to do.
#[must_use]
pub(super) struct Unadvised(Finding);

impl Unadvised {
    pub(super) fn suggest(self, suggestion: impl Into<String>) -> Finding {
        Finding { suggestion: suggestion.into(), ..self.0 }
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
                Err(Foreign { code, message, suggestion }) => {
                    let label = node.text("kind").unwrap_or("?").to_owned();
                    findings.push(finding(name, &node, &label, &[], code, message).suggest(suggestion));
                }
            }
        }
    }
    Ok(objects)
}

/// An object that is none of ours.
struct Foreign {
    code: Code,
    message: String,
    suggestion: String,
}

/// Of which kind of ours an object is.
fn kind(node: &Node) -> Result<Kind, Foreign> {
    let foreign =
        |code, message: &str, suggestion: String| Err(Foreign { code, message: message.to_owned(), suggestion });
    let written = || format!("write apiVersion: {GROUP}/{VERSION}");
    if !matches!(node.content, Content::Object(_)) {
        let message = format!("must be an object, and is {}", node.content.kind());
        return foreign(Code::Type, &message, "write each object after a line with ---".to_owned());
    }
    let named = |kind: &str| Kind::ALL.into_iter().find(|ours| ours.name() == kind);
    let (version, kind) = match (node.text("apiVersion"), node.text("kind")) {
        (Some(version), Some(kind)) => (version, kind),
        (version, kind) => {
            let suggestion = match (version, kind.and_then(named)) {
                (None, Some(_)) => written(),
                (Some(_), _) => "add the kind, ModuleTemplate or ModuleReleaseMeta".to_owned(),
                (None, None) => format!("add apiVersion: {GROUP}/{VERSION} and the kind"),
            };
            return foreign(Code::Required, "an object must have an apiVersion and a kind", suggestion);
        }
    };
    match (named(kind), version.split_once('/')) {
        (Some(kind), Some((GROUP, VERSION))) => Ok(kind),
        (Some(_), Some((GROUP, other))) => {
            foreign(Code::ApiVersion, &format!("the version {other} is not served, {VERSION} is"), written())
        }
        (ours, _) => {
            let suggestion = match (ours, advice::near(kind, Kind::ALL.map(Kind::name))) {
                (Some(_), _) => written(),
                (None, Some(near)) => format!("write kind: {near}, if it shall be one"),
                (None, None) => "leave it out here".to_owned(),
            };
            foreign(Code::OtherKind, "neither a ModuleTemplate nor a ModuleReleaseMeta: not looked at", suggestion)
        }
    }
}
