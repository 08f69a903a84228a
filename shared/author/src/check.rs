//! Offline check of templates and release metas in files, before they are applied. Pure.
//!
//! `document` parses text with positions, `schema` checks objects against the CRDs, `rules` checks the rest: the
//! relations between the objects of a catalog, and the change from an earlier state.

mod advice;
mod document;
mod finding;
mod object;
mod parse;
mod rules;
mod schema;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, sync::Arc};

use jiff::civil::Date;
use thiserror::Error;
use tidewatch_api::{ModuleReleaseMeta, ModuleTemplate};
use tidewatch_select::catalog::desired::Kind;

pub use finding::{Code, Finding, Report, Severity, Summary};

use self::{object::Typed, schema::Schemas};

/// Advice for an object that fails to deserialize without any other finding: only fields maintained by the API server
/// can be the cause.
const METADATA_ADVICE: &str = "keep of metadata its name, namespace, labels and annotations, and remove status";

/// A text with YAML or JSON documents.
#[derive(Clone, Debug)]
pub struct Source {
    /// Name of the text in findings.
    pub name: Arc<str>,
    /// Content of the text.
    pub text: String,
}

/// Options of a check.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// Modules of `--restricted-default-modules`; `None` if unknown.
    pub restricted: Option<BTreeSet<String>>,
    /// Current day; deprecation dates before it are past.
    pub today: Date,
    /// The texts are the whole catalog, so objects that only the earlier state has are removed. Implied if there is no
    /// earlier state.
    pub whole: bool,
}

/// Error of a text that is not valid YAML.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{file}:{line}:{column}: {reason}")]
pub struct ParseError {
    /// Name of the text.
    pub file: Arc<str>,
    /// Line from 1; 0 if unknown.
    pub line: u64,
    /// Column from 1, in characters; 0 if unknown.
    pub column: u64,
    /// Message of the parser.
    pub reason: String,
}

/// Error of texts that cannot be read as a catalog.
#[derive(Clone, Debug, Error)]
pub enum ReadError {
    /// A text is not valid YAML.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// An object has no name, or does not deserialize.
    #[error("{0}")]
    Object(Box<Finding>),
}

/// Objects of the texts.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    /// ModuleTemplates.
    pub templates: Vec<Arc<ModuleTemplate>>,
    /// ModuleReleaseMetas.
    pub release_metas: Vec<Arc<ModuleReleaseMeta>>,
}

/// Checks texts, and the change to them from an earlier state, if given. The earlier state itself is not checked. Kymas in
/// either are users of the versions that they pin.
///
/// # Errors
/// [`ParseError`], also of the earlier state.
pub fn check(files: &[Source], against: Option<&[Source]>, options: &CheckOptions) -> Result<Report, ParseError> {
    let mut findings = Vec::new();
    let mut users = rules::PinnedUsers::default();
    let objects = parse::objects(files, &mut findings, &mut users)?;
    let before = against.map(|before| parse::objects(before, &mut Vec::new(), &mut users)).transpose()?;
    let schemas = Schemas::new();
    for object in &objects {
        let mut found = schemas.check(object);
        rules::metadata(object, &mut found);
        let has_error = found.iter().any(|finding| finding.severity == Severity::Error);
        if let (Typed::Invalid(error), false) = (&object.typed, has_error) {
            found.push(object.finding(&[], Code::Type, error.clone()).suggest(METADATA_ADVICE));
        }
        findings.extend(found);
    }
    findings.extend(rules::check(&objects, before.as_deref(), &users, options));
    let count = |kind| objects.iter().filter(|object| object.kind == kind).count();
    let templates = count(Kind::Template);
    let release_metas = count(Kind::ReleaseMeta);
    Ok(Report::new(findings, Summary { files: files.len(), templates, release_metas, ..Summary::default() }))
}

/// Reads the templates and release metas of texts as an API server would store them; other objects are ignored.
///
/// # Errors
/// [`ReadError`].
pub fn read(files: &[Source]) -> Result<Objects, ReadError> {
    let mut read = Objects::default();
    let schemas = Schemas::new();
    for object in parse::objects(files, &mut Vec::new(), &mut rules::PinnedUsers::default())? {
        match schemas.stored(&object) {
            _ if object.name.is_empty() => {
                let finding = object.finding(&[], Code::Metadata, "it has no name");
                return Err(ReadError::Object(Box::new(finding.suggest(rules::name_advice(&object)))));
            }
            Typed::Template(template) => read.templates.push(template),
            Typed::ReleaseMeta(meta) => read.release_metas.push(meta),
            Typed::Invalid(error) => {
                let finding = object.finding(&[], Code::Type, error).suggest("catalog check says what to write");
                return Err(ReadError::Object(Box::new(finding)));
            }
        }
    }
    Ok(read)
}
