//! Names and versions of components of the Open Component Model (OCM), and where a registry keeps them.

use std::{fmt, str::FromStr, sync::Arc};

use thiserror::Error;

use super::{digest::Digest, excerpt::Excerpt};

/// Maximum length of a component's name, in characters.
const MAX_NAME: usize = 255;
/// Maximum length of a tag, in characters (OCI distribution specification, *Pulling manifests*).
const MAX_TAG: usize = 128;
/// Path of component descriptors below a registry (OCM specification, *OCI registries*).
pub const DESCRIPTORS: &str = "component-descriptors";

/// Name of a component: a domain and at least one further segment, as in `kyma-project.io/module/keda`, in lower case
/// and at most 255 characters long (OCM specification, *Component identity*).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComponentName(Arc<str>);

/// A text that is not the name of a component.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("not a component name: a lower-case domain and at least one segment, as in example.org/module, are required")]
pub struct ComponentNameError;

/// Version of a component, in its original spelling. It maps to a tag of a registry.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(Arc<str>);

/// A text that is not the version of a component.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("not a component version: it has to map to a tag of at most 128 letters, digits, dots, dashes and underscores")]
pub struct VersionError;

/// Key of a component descriptor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComponentVersion {
    /// Name of the component.
    pub name: ComponentName,
    /// Version of the component.
    pub version: Version,
}

/// Name and version that do not identify a component descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ComponentError {
    /// The name is invalid.
    #[error("{0} is {1}")]
    Name(Excerpt, ComponentNameError),
    /// The version is invalid.
    #[error("{0} is {1}")]
    Version(Excerpt, VersionError),
}

/// Mapping of a component's name to a repository (OCM specification, *OCI registries*, *Component name mapping*).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mapping {
    /// `component-descriptors/<name>`.
    #[default]
    UrlPath,
    /// The SHA-256 digest of the name, in hexadecimal digits. Legacy: it is read, never written.
    Sha256Digest,
}

/// Repository of a component below a registry and its optional path.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Repository {
    folder: &'static str,
    name: String,
}

impl ComponentVersion {
    /// Parses name and version.
    ///
    /// # Errors
    /// When one of them is invalid.
    pub fn new(name: &str, version: &str) -> Result<Self, ComponentError> {
        Ok(Self {
            name: name.parse().map_err(|error| ComponentError::Name(Excerpt::of(name), error))?,
            version: version.parse().map_err(|error| ComponentError::Version(Excerpt::of(version), error))?,
        })
    }

    /// Repository of the component descriptor, below the registry and its optional path.
    #[must_use]
    pub fn repository(&self) -> String {
        Mapping::UrlPath.repository(&self.name).to_string()
    }

    /// Tag of the component descriptor.
    #[must_use]
    pub fn tag(&self) -> String {
        self.version.tag()
    }
}

impl fmt::Display for ComponentVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.version)
    }
}

impl Version {
    /// The tag: `+`, which tags must not contain, becomes `.build-`.
    #[must_use]
    pub fn tag(&self) -> String {
        tag(&self.0)
    }
}

impl Mapping {
    /// Repository of a component.
    #[must_use]
    pub fn repository(self, name: &ComponentName) -> Repository {
        match self {
            Self::UrlPath => Repository { folder: DESCRIPTORS, name: name.to_string() },
            Self::Sha256Digest => Repository { folder: "", name: Digest::of(name.as_ref().as_bytes()).hex() },
        }
    }
}

impl Repository {
    /// The common folder of all components, which is empty for [`Mapping::Sha256Digest`], and the path below it.
    #[must_use]
    pub fn split(&self) -> (&str, &str) {
        (self.folder, &self.name)
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.folder.is_empty() { f.write_str(&self.name) } else { write!(f, "{}/{}", self.folder, self.name) }
    }
}

impl FromStr for ComponentName {
    type Err = ComponentNameError;

    fn from_str(text: &str) -> Result<Self, ComponentNameError> {
        let (domain, path) = text.split_once('/').ok_or(ComponentNameError)?;
        let valid = text.len() <= MAX_NAME && is_domain(domain) && path.split('/').all(is_segment);
        if valid { Ok(Self(text.into())) } else { Err(ComponentNameError) }
    }
}

impl FromStr for Version {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        let tag = tag(text);
        let starts = tag.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_');
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
        let valid = starts && tag.len() <= MAX_TAG && tag.bytes().all(allowed);
        if valid { Ok(Self(text.into())) } else { Err(VersionError) }
    }
}

impl TryFrom<&str> for ComponentName {
    type Error = ComponentNameError;

    fn try_from(text: &str) -> Result<Self, ComponentNameError> {
        text.parse()
    }
}

impl TryFrom<&str> for Version {
    type Error = VersionError;

    fn try_from(text: &str) -> Result<Self, VersionError> {
        text.parse()
    }
}

impl AsRef<str> for ComponentName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Version {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ComponentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn tag(version: &str) -> String {
    version.replace('+', ".build-")
}

/// At least two labels, the last one of two or more letters.
fn is_domain(text: &str) -> bool {
    let Some((labels, top)) = text.rsplit_once('.') else { return false };
    let is_top = top.len() >= 2 && top.bytes().all(|byte| byte.is_ascii_lowercase());
    is_top && labels.split('.').all(|label| is_label(label, b"-"))
}

fn is_segment(text: &str) -> bool {
    text.split('.').all(|label| is_label(label, b"-_"))
}

/// A lower-case letter, then lower-case letters, digits and the given characters.
fn is_label(text: &str, inside: &[u8]) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || inside.contains(&byte);
    text.starts_with(|first: char| first.is_ascii_lowercase()) && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn component_names_have_a_domain_and_a_path() {
        let longest = format!("example.org/{}", "a".repeat(MAX_NAME - 12));
        for name in ["kyma-project.io/module/keda", "a.bc/d", "a1.b-c.io/x_y.z-/w", &longest] {
            assert_eq!(name.parse::<ComponentName>().map(|name| name.to_string()).as_deref(), Ok(name));
        }
        let too_long = format!("{longest}a");
        let hostile = ["", "/", "keda", "kyma-project.io", "kyma-project.io/", "kyma-project.io//x", "x.i/a", "io/a"];
        let spelled =
            ["Kyma.io/a", "kyma.io/A", "kyma.i0/a", "1a.io/a", "kyma.io/1", "kyma..io/a", "-a.io/a", "é.io/a"];
        let escaping = ["kyma.io/../b", "kyma.io/a/..", "kyma.io/a b", "kyma.io/a%2f", "kyma.io/a:1", "kyma.io/a@b"];
        for name in [&hostile[..], &spelled, &escaping, &[&too_long]].concat() {
            assert_eq!(name.parse::<ComponentName>(), Err(ComponentNameError), "{name}");
        }
    }

    #[test]
    fn version_maps_to_a_tag() {
        let longest = "1".repeat(MAX_TAG);
        for (version, tag) in
            [("1.2.3", "1.2.3"), ("v1", "v1"), ("1.0.0-rc.1+x.y", "1.0.0-rc.1.build-x.y"), (&longest, &longest)]
        {
            let key = ComponentVersion::new("a.bc/d", version).unwrap();
            assert_eq!((key.tag(), key.version.to_string()), (tag.to_owned(), version.to_owned()));
        }
        let grown = format!("{}+", "1".repeat(MAX_TAG - 6));
        for version in ["", ".1", "-1", "+1", "1/2", "1 2", "1:2", "1@2", "é", "..", "1\n", &"1".repeat(129), &grown] {
            assert_eq!(version.parse::<Version>(), Err(VersionError), "{version:?}");
        }
    }

    #[test]
    fn repository_follows_the_mapping() {
        let key = ComponentVersion::new("kyma-project.io/module/keda", "1.2.3").unwrap();
        assert_eq!(key.repository(), "component-descriptors/kyma-project.io/module/keda");
        assert_eq!(key.to_string(), "kyma-project.io/module/keda:1.2.3");
        let place = Mapping::UrlPath.repository(&key.name);
        assert_eq!(place.split(), ("component-descriptors", "kyma-project.io/module/keda"));
        let name: ComponentName = "example.org/module/tide".parse().unwrap();
        let hashed = Mapping::Sha256Digest.repository(&name);
        assert_eq!(hashed.split(), ("", "76a9e952d43d71fd23f27950d99ed9af6cb4bfee03d4c1862a49358dc57f9491"));
        assert_eq!(hashed.to_string(), "76a9e952d43d71fd23f27950d99ed9af6cb4bfee03d4c1862a49358dc57f9491");
    }

    #[test]
    fn errors_name_the_text() {
        let refused = |name, version| ComponentVersion::new(name, version).unwrap_err().to_string();
        assert!(refused("Keda", "1").starts_with("\"Keda\" is not a component name"));
        assert!(refused("a.bc/d", "1/2").starts_with("\"1/2\" is not a component version"));
    }
}
