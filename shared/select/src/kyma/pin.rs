//! The pinned version of one module: checks the text of an annotation. Pure.

use std::fmt;

use semver::Version;
use thiserror::Error;
use tidewatch_api::{
    labels::is_dns_subdomain,
    selection::pins::{self, MAX_VERSION},
};

/// Kyma that has an annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinnedIn {
    /// The Kyma in the runtime cluster.
    Runtime,
    /// The Kyma in KCP.
    ControlPlane,
}

/// A valid pin. It displays as the notice in the status of the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Pinned version.
    pub version: String,
    /// Channel that the module would follow without the pin.
    pub channel: String,
    /// Annotation, with the Kyma that has it unless that is the runtime's own.
    annotation: String,
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "version {} is pinned by the annotation {}", self.version, self.annotation)
    }
}

/// The error of an annotation that pins no version.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("invalid annotation {annotation}: {problem}")]
pub struct InvalidPinError {
    annotation: String,
    problem: String,
    /// Channel that the module would follow without the annotation.
    pub channel: String,
}

impl Pin {
    /// Checks the text of an annotation; `channel` is the one that the module would follow without it.
    pub fn parse(module: &str, text: &str, pinned_in: PinnedIn, channel: String) -> Result<Self, InvalidPinError> {
        let place = match pinned_in {
            PinnedIn::Runtime => "",
            PinnedIn::ControlPlane => " of the Kyma in the control plane",
        };
        let annotation = format!("{}{place}", pins::annotation_of(module));
        let problem = if !is_dns_subdomain(module) {
            format!("no module can have the name {module:?}")
        } else if text.chars().nth(MAX_VERSION).is_some() {
            format!("the version has more than {MAX_VERSION} characters")
        } else if Version::parse(text).is_err() {
            format!("{text:?} is not a semantic version")
        } else {
            return Ok(Self { version: text.to_owned(), channel, annotation });
        };
        Err(InvalidPinError { annotation, problem, channel })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Pin {
        /// Pin of `template-operator` in the runtime cluster, which would follow `regular` without it.
        pub(crate) fn at(version: &str) -> Self {
            Self::parse("template-operator", version, PinnedIn::Runtime, "regular".to_owned()).unwrap()
        }
    }

    #[test]
    fn pin_is_a_semantic_version_of_a_possible_module() {
        let parse = |module: &str, text: &str, pinned_in| {
            let pin = Pin::parse(module, text, pinned_in, "fast".to_owned());
            pin.map(|pin| (pin.to_string(), pin.channel)).map_err(|error| (error.to_string(), error.channel))
        };
        let fast = || "fast".to_owned();
        let of_keda = "annotation version.operator.kyma-project.io/keda";
        for version in ["1.2.3", "0.0.0", "1.2.3-rc.1", "1.2.3+build", "1.2.3-abcdefghijklmnopqrstuvwxyz"] {
            let notice = format!("version {version} is pinned by the {of_keda}");
            assert_eq!(parse("keda", version, PinnedIn::Runtime), Ok((notice, fast())));
        }
        let in_kcp = format!("version 1.2.3 is pinned by the {of_keda} of the Kyma in the control plane");
        assert_eq!(parse("keda", "1.2.3", PinnedIn::ControlPlane), Ok((in_kcp, fast())));
        for text in ["", "1", "1.2", "v1.2.3", "1.2.3.4", "01.2.3", "latest", " 1.2.3", "1.2.3\n", "\u{1b}[0m"] {
            let error = format!("invalid {of_keda}: {text:?} is not a semantic version");
            assert_eq!(parse("keda", text, PinnedIn::Runtime), Err((error, fast())));
        }
        let long = format!("1.2.3-{}", "a".repeat(27));
        let error = format!("invalid {of_keda}: the version has more than 32 characters");
        assert_eq!(parse("keda", &long, PinnedIn::Runtime), Err((error, fast())));
        for name in ["Keda", "ke_da", "keda.", "a..b", "a.-b"] {
            let error = parse(name, "1.2.3", PinnedIn::Runtime).unwrap_err().0;
            assert!(error.ends_with(&format!("{name}: no module can have the name {name:?}")), "{error}");
        }
        for name in ["keda", "a.b", "btp-operator", "0"] {
            assert!(parse(name, "1.2.3", PinnedIn::Runtime).is_ok(), "{name}");
        }
    }
}
