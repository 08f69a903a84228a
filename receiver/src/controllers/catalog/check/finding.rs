//! Findings of a check.

use std::{fmt, sync::Arc};

use serde::{Serialize, Serializer};
use tidewatch_shared::table;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The object is refused, left out of every catalog, or unavailable to all Kymas.
    Error,
    /// The object works, but probably not as intended.
    Warning,
}

/// Kind of a finding: a closed set with stable names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// The object is of another kind and not checked.
    OtherKind,
    /// The selector has no requirement.
    SelectsNobody,
    /// The release meta has a selector although the module is not restricted.
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
    /// The field has no effect.
    NoEffect,
    /// The value of a visibility label counts as false.
    LabelValue,
    /// The channel of the earlier state is removed.
    ChannelRemoved,
    /// The release meta of the earlier state is removed.
    ModuleRemoved,
}

impl Code {
    /// All codes, errors first.
    pub const ALL: [Self; 33] = [
        Self::ApiVersion,
        Self::Type,
        Self::Required,
        Self::UnknownField,
        Self::Pattern,
        Self::Bounds,
        Self::Enum,
        Self::Format,
        Self::DuplicateEntry,
        Self::Metadata,
        Self::Name,
        Self::Nameless,
        Self::DuplicateObject,
        Self::UnknownVersion,
        Self::MandatoryAndChannels,
        Self::MandatoryTemplate,
        Self::Selector,
        Self::NoComponent,
        Self::ReservedChannel,
        Self::Downgrade,
        Self::TooLarge,
        Self::OtherKind,
        Self::SelectsNobody,
        Self::NotRestricted,
        Self::NoChannel,
        Self::UnreachedTemplate,
        Self::NoReleaseMeta,
        Self::PastDeprecation,
        Self::DeprecationWithoutTemplate,
        Self::NoEffect,
        Self::LabelValue,
        Self::ChannelRemoved,
        Self::ModuleRemoved,
    ];

    /// Stable name of the code.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ApiVersion => "api-version",
            Self::Type => "type",
            Self::Required => "required",
            Self::UnknownField => "unknown-field",
            Self::Pattern => "pattern",
            Self::Bounds => "bounds",
            Self::Enum => "enum",
            Self::Format => "format",
            Self::DuplicateEntry => "duplicate-entry",
            Self::Metadata => "metadata",
            Self::Name => "name",
            Self::Nameless => "nameless",
            Self::DuplicateObject => "duplicate-object",
            Self::UnknownVersion => "unknown-version",
            Self::MandatoryAndChannels => "mandatory-and-channels",
            Self::MandatoryTemplate => "mandatory-template",
            Self::Selector => "selector",
            Self::NoComponent => "no-component",
            Self::ReservedChannel => "reserved-channel",
            Self::Downgrade => "downgrade",
            Self::TooLarge => "too-large",
            Self::OtherKind => "other-kind",
            Self::SelectsNobody => "selects-nobody",
            Self::NotRestricted => "not-restricted",
            Self::NoChannel => "no-channel",
            Self::UnreachedTemplate => "unreached-template",
            Self::NoReleaseMeta => "no-release-meta",
            Self::PastDeprecation => "past-deprecation",
            Self::DeprecationWithoutTemplate => "deprecation-without-template",
            Self::NoEffect => "no-effect",
            Self::LabelValue => "label-value",
            Self::ChannelRemoved => "channel-removed",
            Self::ModuleRemoved => "module-removed",
        }
    }

    /// Severity of the code.
    #[must_use]
    pub const fn severity(self) -> Severity {
        match self {
            Self::OtherKind
            | Self::SelectsNobody
            | Self::NotRestricted
            | Self::NoChannel
            | Self::UnreachedTemplate
            | Self::NoReleaseMeta
            | Self::PastDeprecation
            | Self::DeprecationWithoutTemplate
            | Self::NoEffect
            | Self::LabelValue
            | Self::ChannelRemoved
            | Self::ModuleRemoved => Severity::Warning,
            _ => Severity::Error,
        }
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// A mistake and its position.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// Name of the text as given; `-` is the standard input.
    #[serde(serialize_with = "text")]
    pub file: Arc<str>,
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

fn text<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, column, object, path, severity, code, message, suggestion } = self;
        let severity = match severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        let mut text = format!("{file}:{line}:{column}: {severity}[{}] {object}", code.as_str());
        if !path.is_empty() {
            text.push_str(&format!(" {path}"));
        }
        text.push_str(&format!(": {message}; {suggestion}"));
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

    /// Returns whether there are no errors, and with `deny_warnings` no warnings either.
    #[must_use]
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

    use super::*;

    #[test]
    fn code_names_are_unique() {
        let names: BTreeSet<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
        assert_eq!(names.len(), Code::ALL.len());
        assert!(names.iter().all(|name| name.chars().all(|char| char.is_ascii_lowercase() || char == '-')));
        assert!(Code::ALL.is_sorted_by_key(|code| code.severity()), "errors come first");
    }
}
