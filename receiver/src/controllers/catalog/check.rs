//! Whether templates and release metas are what they should be, before anybody has them: offline, from files.
//!
//! `document` reads text with places, `schema` says what the CRDs say, `rules` what they cannot: how objects fit each other, and what
//! differs from a state before. All of it is pure.

mod advice;
mod document;
mod finding;
mod object;
mod rules;
mod schema;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, sync::Arc};

use jiff::civil::Date;
use thiserror::Error;
use tidewatch_shared::api::{ModuleReleaseMeta, ModuleTemplate};

pub use finding::{Code, Finding, Report, Severity, Summary};

use self::{object::Typed, schema::Schemas};
use super::desired::Kind;

/// What helps where only the types of what the API server itself writes can be wrong.
const PLAIN: &str = "keep of metadata its name, namespace, labels and annotations, and remove status";

/// A text with documents in YAML or JSON.
#[derive(Clone, Debug)]
pub struct Source {
    /// How findings call it.
    pub name: Arc<str>,
    /// What stands in it.
    pub text: String,
}

/// By what is judged.
#[derive(Clone, Debug)]
pub struct Terms {
    /// The modules of `--restricted-default-modules`, where they are known.
    pub restricted: Option<BTreeSet<String>>,
    /// The day on which a deprecation is a past one.
    pub today: Date,
    /// The texts are the whole catalog, so that what only the state before has is removed. Without a state before they always are.
    pub whole: bool,
}

/// A text that is not YAML.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{file}:{line}:{column}: {why}")]
pub struct Unreadable {
    /// The text.
    pub file: Arc<str>,
    /// Where, from 1; 0 where nobody can say.
    pub line: u64,
    /// Where, from 1; 0 where nobody can say.
    pub column: u64,
    /// What the parser says.
    pub why: String,
}

/// Why texts are no catalog.
#[derive(Clone, Debug, Error)]
pub enum NoCatalog {
    /// One is not YAML.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    /// An object in one cannot be taken.
    #[error("{0}")]
    Object(Box<Finding>),
}

/// The objects of texts.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    /// ModuleTemplates.
    pub templates: Vec<Arc<ModuleTemplate>>,
    /// ModuleReleaseMetas.
    pub release_metas: Vec<Arc<ModuleReleaseMeta>>,
}

/// Checks texts, and the way to them from a state before, if one is given. Of that only what differs is judged.
///
/// # Errors
/// [`Unreadable`], for the state before too.
pub fn check(files: &[Source], against: Option<&[Source]>, terms: &Terms) -> Result<Report, Unreadable> {
    let mut findings = Vec::new();
    let objects = object::objects(files, &mut findings)?;
    let before = against.map(|before| object::objects(before, &mut Vec::new())).transpose()?;
    let schemas = Schemas::new();
    for object in &objects {
        let faults = schemas.check(object.kind, &object.node);
        let found = faults
            .into_iter()
            .map(|fault| object.finding(&fault.path, fault.code, fault.message).suggest(fault.suggestion));
        let known = findings.len();
        findings.extend(found);
        rules::metadata(object, &mut findings);
        let is_told = findings[known..].iter().any(|finding| finding.severity == Severity::Error);
        if let (Typed::Broken(why), false) = (&object.typed, is_told) {
            findings.push(object.finding(&[], Code::Type, why.clone()).suggest(PLAIN));
        }
    }
    findings.extend(rules::check(&objects, before.as_deref(), terms));
    let count = |kind| objects.iter().filter(|object| object.kind == kind).count();
    let (templates, release_metas) = (count(Kind::Template), count(Kind::ReleaseMeta));
    Ok(Report::new(findings, Summary { files: files.len(), templates, release_metas, ..Summary::default() }))
}

/// The templates and release metas of texts, whatever else is in them, as an API server would store them.
///
/// # Errors
/// [`NoCatalog`].
pub fn read(files: &[Source]) -> Result<Objects, NoCatalog> {
    let mut read = Objects::default();
    let schemas = Schemas::new();
    for object in object::objects(files, &mut Vec::new())? {
        match object.stored(&schemas) {
            _ if object.name.is_empty() => {
                let finding = object.finding(&[], Code::Metadata, "it has no name");
                return Err(NoCatalog::Object(Box::new(finding.suggest(rules::name_advice(&object)))));
            }
            Typed::Template(template) => read.templates.push(template),
            Typed::ReleaseMeta(meta) => read.release_metas.push(meta),
            Typed::Broken(why) => {
                let finding = object.finding(&[], Code::Type, why).suggest("catalog check says what to write");
                return Err(NoCatalog::Object(Box::new(finding)));
            }
        }
    }
    Ok(read)
}
