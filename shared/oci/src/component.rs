//! Names and versions of components of the Open Component Model (OCM), and where a registry keeps them.

use std::{fmt, sync::Arc};

use thiserror::Error;

use super::{digest::Digest, excerpt::Excerpt};

/// Maximum length of a component's name, in characters.
const MAX_NAME: usize = 255;
/// Maximum length of a tag, in characters (OCI distribution specification, *Pulling manifests*).
const MAX_TAG: usize = 128;
/// Path of component descriptors below a registry (OCM specification, *OCI registries*).
pub const DESCRIPTORS: &str = "component-descriptors";

/// Key of a component descriptor: name and version of a component.
///
/// The name is a domain and at least one further segment, as in `kyma-project.io/module/keda`, in lower case and at most
/// 255 characters long (OCM specification, *Component identity*). The version maps to a tag of a registry, and is kept in
/// its original spelling.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComponentVersion {
    name: Arc<str>,
    version: Arc<str>,
}

/// Name and version that do not identify a component descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ComponentError {
    /// The name is invalid.
    #[error(
        "{0} is not a component name: a lower-case domain and at least one segment, as in example.org/module, are required"
    )]
    Name(Excerpt),
    /// The version is invalid.
    #[error(
        "{0} is not a component version: it has to map to a tag of at most 128 letters, digits, dots, dashes and underscores"
    )]
    Version(Excerpt),
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
        if !is_name(name) {
            return Err(ComponentError::Name(Excerpt::of(name)));
        }
        let component = Self { name: name.into(), version: version.into() };
        if !is_tag(&component.tag()) {
            return Err(ComponentError::Version(Excerpt::of(version)));
        }
        Ok(component)
    }

    /// Name of the component.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Version of the component.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Repository of the component descriptor, below the registry and its optional path.
    pub fn repository(&self) -> String {
        Mapping::UrlPath.repository(self).to_string()
    }

    /// Tag of the component descriptor: `+`, which tags must not contain, becomes `.build-`.
    pub fn tag(&self) -> String {
        self.version.replace('+', ".build-")
    }
}

impl fmt::Display for ComponentVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.version)
    }
}

impl Mapping {
    /// Repository of a component.
    pub fn repository(self, component: &ComponentVersion) -> Repository {
        match self {
            Self::UrlPath => Repository { folder: DESCRIPTORS, name: component.name.to_string() },
            Self::Sha256Digest => Repository { folder: "", name: Digest::of(component.name.as_bytes()).hex() },
        }
    }
}

impl Repository {
    /// The common folder of all components, which is empty for [`Mapping::Sha256Digest`], and the path below it.
    pub fn split(&self) -> (&str, &str) {
        (self.folder, &self.name)
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.folder.is_empty() { f.write_str(&self.name) } else { write!(f, "{}/{}", self.folder, self.name) }
    }
}

/// Returns whether a text is a tag.
pub fn is_tag(text: &str) -> bool {
    let starts = text.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_');
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    starts && text.len() <= MAX_TAG && text.bytes().all(allowed)
}

fn is_name(text: &str) -> bool {
    let Some((domain, path)) = text.split_once('/') else { return false };
    text.len() <= MAX_NAME && is_domain(domain) && path.split('/').all(is_segment)
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
            assert_eq!(ComponentVersion::new(name, "1").unwrap().name(), name);
        }
        let too_long = format!("{longest}a");
        let hostile = ["", "/", "keda", "kyma-project.io", "kyma-project.io/", "kyma-project.io//x", "x.i/a", "io/a"];
        let spelled =
            ["Kyma.io/a", "kyma.io/A", "kyma.i0/a", "1a.io/a", "kyma.io/1", "kyma..io/a", "-a.io/a", "é.io/a"];
        let escaping = ["kyma.io/../b", "kyma.io/a/..", "kyma.io/a b", "kyma.io/a%2f", "kyma.io/a:1", "kyma.io/a@b"];
        for name in [&hostile[..], &spelled, &escaping, &[&too_long]].concat() {
            assert_eq!(ComponentVersion::new(name, "1"), Err(ComponentError::Name(Excerpt::of(name))));
        }
    }

    #[test]
    fn version_maps_to_a_tag() {
        let longest = "1".repeat(MAX_TAG);
        for (version, tag) in
            [("1.2.3", "1.2.3"), ("v1", "v1"), ("1.0.0-rc.1+x.y", "1.0.0-rc.1.build-x.y"), (&longest, &longest)]
        {
            let key = ComponentVersion::new("a.bc/d", version).unwrap();
            assert_eq!((&*key.tag(), key.version()), (tag, version));
        }
        let grown = format!("{}+", "1".repeat(MAX_TAG - 6));
        for version in ["", ".1", "-1", "+1", "1/2", "1 2", "1:2", "1@2", "é", "..", "1\n", &"1".repeat(129), &grown] {
            let refused = Err(ComponentError::Version(Excerpt::of(version)));
            assert_eq!(ComponentVersion::new("a.bc/d", version), refused);
        }
    }

    #[test]
    fn repository_follows_the_mapping() {
        let key = ComponentVersion::new("kyma-project.io/module/keda", "1.2.3").unwrap();
        assert_eq!(key.repository(), "component-descriptors/kyma-project.io/module/keda");
        assert_eq!(key.to_string(), "kyma-project.io/module/keda:1.2.3");
        let place = Mapping::UrlPath.repository(&key);
        assert_eq!(place.split(), ("component-descriptors", "kyma-project.io/module/keda"));
        let tide = ComponentVersion::new("example.org/module/tide", "1.2.3").unwrap();
        let hashed = Mapping::Sha256Digest.repository(&tide);
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
