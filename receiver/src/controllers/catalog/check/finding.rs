//! What a check says.

use std::{fmt, sync::Arc};

use serde::{Serialize, Serializer};
use tidewatch_shared::table;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It is refused, left out of every catalog, or nobody can have it.
    Error,
    /// It works, but hardly as it is meant.
    Warning,
}

/// What is wrong: a closed set, whose words do not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Code {
    /// An object of the group, but of a version that is not served.
    ApiVersion,
    /// A value of another type than the field's.
    Type,
    /// A field that must be there is not.
    Required,
    /// A field that the CRD does not have.
    UnknownField,
    /// A text that the field's pattern does not match.
    Pattern,
    /// A text or list that is too long or too short, or a number out of bounds.
    Bounds,
    /// A value that is none of those that the field may have.
    Enum,
    /// A text that is not of the field's format.
    Format,
    /// An entry of a list whose key another entry has.
    DuplicateEntry,
    /// A name, label or annotation that the API server refuses.
    Metadata,
    /// The name is not what the module, and for a template the version, make it.
    Name,
    /// It does not say of which module, or for a template of which version it is.
    Nameless,
    /// Another object has the same kind and name.
    DuplicateObject,
    /// A version without a template.
    UnknownVersion,
    /// Both `mandatory` and `channels`, or neither.
    MandatoryAndChannels,
    /// A channel points to a mandatory template, which nobody may select.
    MandatoryTemplate,
    /// A selector that cannot be read.
    Selector,
    /// Without the name of its component nothing can be installed.
    NoComponent,
    /// A channel by a name that nobody can choose.
    ReservedChannel,
    /// A channel moves to a lower version, which runtimes refuse.
    Downgrade,
    /// More bytes than go into a runtime.
    TooLarge,
    /// Another kind: not looked at.
    OtherKind,
    /// A selector without a requirement.
    SelectsNobody,
    /// A selector although the module is not restricted.
    NotRestricted,
    /// A release meta without a channel.
    NoChannel,
    /// A template that no channel points to.
    UnreachedTemplate,
    /// A template of a module without a release meta.
    NoReleaseMeta,
    /// A deprecation whose day has come.
    PastDeprecation,
    /// A deprecation of a version without a template.
    DeprecationWithoutTemplate,
    /// A field that does nothing.
    NoEffect,
    /// A label of ours with a value that counts as absent.
    LabelValue,
    /// A channel that was there before.
    ChannelRemoved,
    /// A release meta that was there before.
    ModuleRemoved,
}

impl Code {
    /// All of them; errors first.
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

    /// Its word.
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

    /// Always the same for the same code.
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

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// The file, as it was named; `-` is the standard input.
    #[serde(serialize_with = "text")]
    pub file: Arc<str>,
    /// From 1.
    pub line: u64,
    /// From 1, in characters.
    pub column: u64,
    /// Kind and name.
    pub object: String,
    /// The field; empty for the whole object.
    pub path: String,
    /// How bad it is.
    pub severity: Severity,
    /// What it is.
    pub code: Code,
    /// The same for people.
    pub message: String,
    /// What to do, or to write instead.
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

/// What a check came to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// By file, line and column.
    pub findings: Vec<Finding>,
    /// Figures.
    pub summary: Summary,
}

/// The figures of a [`Report`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Texts that were read.
    pub files: usize,
    /// ModuleTemplates in them.
    pub templates: usize,
    /// ModuleReleaseMetas in them.
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

    /// Whether nothing is wrong, or only what warnings are about unless those count.
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
    fn codes_have_words_of_their_own() {
        let words: BTreeSet<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
        assert_eq!(words.len(), Code::ALL.len());
        assert!(words.iter().all(|word| word.chars().all(|char| char.is_ascii_lowercase() || char == '-')));
        assert!(Code::ALL.is_sorted_by_key(|code| code.severity()), "errors come first");
    }
}
