//! Findings of a check.

use std::fmt;

use serde::Serialize;
use strum::{Display, IntoStaticStr, VariantArray};
use tidewatch_kit::table;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Severity {
    /// The object is refused, left out of every catalog, or unavailable to all Kymas.
    Error,
    /// The object works, but probably not as intended.
    Warning,
}

/// Kind of a finding: a closed set with stable names. The errors come first, the warnings begin with
/// [`Code::OtherKind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Display, IntoStaticStr, VariantArray)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Code {
    /// The version of the object's API group is not served.
    ApiVersion,
    /// The value has a type other than the field's.
    Type,
    /// A required field is missing.
    Required,
    /// The CRD has no such field.
    UnknownField,
    /// The text does not match the field's pattern.
    Pattern,
    /// The text or list is too long or too short.
    Bounds,
    /// The value is not one of the allowed values.
    Enum,
    /// The text does not have the field's format.
    Format,
    /// Two entries of a list have the same key.
    DuplicateEntry,
    /// The API server refuses the name, label or annotation.
    Metadata,
    /// The name is not the one derived from the module, and for a template from the version.
    Name,
    /// The module name, or for a template the version, is missing.
    Nameless,
    /// Another object has the same kind and name.
    DuplicateObject,
    /// The version has no template.
    UnknownVersion,
    /// The release meta has both `mandatory` and `channels`, or neither.
    MandatoryAndChannels,
    /// The channel points to a mandatory template, which no Kyma may select.
    MandatoryTemplate,
    /// The selector is malformed.
    Selector,
    /// The component name is missing, so nothing can be installed.
    NoComponent,
    /// The channel has a reserved name.
    ReservedChannel,
    /// The channel moves to a lower version, which runtimes refuse.
    Downgrade,
    /// The object is too large for a runtime.
    TooLarge,
    /// A field of a template changes that never does.
    TemplateEdited,
    /// The template of the earlier state is removed although its version is in use.
    VersionInUse,
    /// The component is another one than in the earlier state.
    ComponentChanged,
    /// The component descriptor of a template is of another component than the release meta names.
    ComponentMismatch,
    /// The object is of another kind and not checked.
    OtherKind,
    /// The selector has no requirement, or a restricted module has none.
    SelectsNobody,
    /// The release meta has a selector although the module is not restricted, or is mandatory.
    NotRestricted,
    /// The release meta has no channel.
    NoChannel,
    /// No channel points to the template.
    UnreachedTemplate,
    /// The module of the template has no release meta.
    NoReleaseMeta,
    /// The deprecation date has passed.
    PastDeprecation,
    /// The deprecated version has no template.
    DeprecationWithoutTemplate,
    /// A channel or `mandatory` points to a withdrawn version, which is installed nowhere any more.
    WithdrawnVersion,
    /// The replacement of a withdrawn version has no template.
    UnknownReplacement,
    /// The replacement of a withdrawn version is withdrawn, too.
    WithdrawnReplacement,
    /// The field has no effect.
    NoEffect,
    /// The manager of a template changes.
    ManagerEdited,
    /// The value of a visibility label counts as false.
    LabelValue,
    /// The label of a template does not name its module.
    ModuleLabel,
    /// Two modules have an object with other values of one field.
    SharedObject,
    /// The channel of the earlier state is removed.
    ChannelRemoved,
    /// The release meta of the earlier state is removed.
    ModuleRemoved,
}

impl Code {
    /// Severity of the code.
    pub fn severity(self) -> Severity {
        if self < Self::OtherKind { Severity::Error } else { Severity::Warning }
    }
}

/// A mistake and its position.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// Name of the text as given; `-` is the standard input.
    pub file: String,
    /// Line, from 1.
    pub line: u64,
    /// Column, from 1, in characters.
    pub column: u64,
    /// Kind and name of the object.
    pub object: String,
    /// Path of the field; empty for the whole object.
    pub path: String,
    /// Severity of the finding.
    pub severity: Severity,
    /// Code of the finding.
    pub code: Code,
    /// Explanation of the mistake.
    pub message: String,
    /// Suggested repair.
    pub suggestion: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, column, object, path, severity, code, message, suggestion } = self;
        let field = if path.is_empty() { String::new() } else { format!(" {path}") };
        let text = format!("{file}:{line}:{column}: {severity}[{code}] {object}{field}: {message}; {suggestion}");
        f.write_str(&table::sanitize(&text))
    }
}

/// Result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Findings, sorted by file, line and column.
    pub findings: Vec<Finding>,
    /// Summary of the check.
    pub summary: Summary,
}

/// Numbers of a [`Report`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Texts read.
    pub files: usize,
    /// ModuleTemplates found.
    pub templates: usize,
    /// ModuleReleaseMetas found.
    pub release_metas: usize,
    /// Findings that are errors.
    pub errors: usize,
    /// Findings that are warnings.
    pub warnings: usize,
}

impl Report {
    pub(super) fn new(mut findings: Vec<Finding>, mut summary: Summary) -> Self {
        findings.sort_unstable();
        findings.dedup();
        let of = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
        (summary.errors, summary.warnings) = (of(Severity::Error), of(Severity::Warning));
        Self { findings, summary }
    }

    /// Adds findings of checks beyond the templates and release metas.
    #[must_use]
    pub fn with(self, findings: impl IntoIterator<Item = Finding>) -> Self {
        Self::new(self.findings.into_iter().chain(findings).collect(), self.summary)
    }

    /// Returns whether there are no errors, and with `deny_warnings` no warnings either.
    pub const fn is_clean(&self, deny_warnings: bool) -> bool {
        self.summary.errors == 0 && (!deny_warnings || self.summary.warnings == 0)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        let Summary { files, templates, release_metas, errors, warnings } = self.summary;
        writeln!(
            f,
            "{templates} templates and {release_metas} release metas in {files} files: {errors} errors, {warnings} warnings"
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tidewatch_kit::variant::VariantName as _;

    use super::*;

    #[test]
    fn code_names_are_unique() {
        let names: BTreeSet<_> = Code::VARIANTS.iter().map(|code| code.as_str()).collect();
        assert_eq!(names.len(), Code::VARIANTS.len());
        assert!(names.iter().all(|name| name.chars().all(|char| char.is_ascii_lowercase() || char == '-')));
        assert!(Code::VARIANTS.is_sorted_by_key(|code| code.severity()), "errors come first");
    }
}
