//! Parses texts into objects.

use std::sync::Arc;

use tidewatch_api::names::{GROUP, VERSION};
use tidewatch_select::catalog::desired::Kind;

use super::{
    ParseError, Source, advice,
    document::{self, Content, Node},
    finding::{Code, Finding},
    object::{Object, finding},
    rules::PinnedUsers,
};

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
