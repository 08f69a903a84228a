//! Validates the user's selection: spec of the runtime cluster's Kyma, with KCP's for absent fields.

use std::collections::BTreeMap;

use thiserror::Error;
use tidewatch_shared::api::{CustomResourcePolicy, KymaSpec};

/// Channel if neither module nor Kyma names one.
const DEFAULT_CHANNEL: &str = "regular";
/// Channel that the CRD admits but that is reserved.
const NO_CHANNEL: &str = "none";
/// Maximal number of modules of one Kyma: a runtime cluster's spec must not fill the status in KCP.
const MAX_MODULES: usize = 500;

/// Maximal length of a module's name or a channel, in characters. The CRD limits channels, but the response of a
/// runtime cluster's API server may violate the CRD.
const MAX_NAME: usize = 253;

/// Maximal length of all modules' names, channels and versions together, in bytes: they are written to KCP several times
/// with each change.
const MAX_NAMES: usize = 32 << 10;

/// The reason to reject a whole spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum InvalidKymaError {
    /// Channel `none`.
    #[error("invalid Kyma: the value \"none\" is not allowed for the channel")]
    NoChannel,
    /// More than [`MAX_MODULES`] modules.
    #[error("invalid Kyma: more than {MAX_MODULES} modules")]
    TooMany,
    /// A name, channel or version longer than [`MAX_NAME`].
    #[error("invalid Kyma: a module's name, channel or version has more than {MAX_NAME} characters")]
    TooLong,
    /// More than [`MAX_NAMES`] bytes of names, channels and versions.
    #[error("invalid Kyma: the names, channels and versions of the modules have more than {MAX_NAMES} bytes")]
    TooLarge,
}

/// The reason to reject one module's entry.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum InvalidModuleError {
    /// Channel `none`.
    #[error("invalid module in spec: the value \"none\" is not allowed for the channel")]
    NoChannel,
    /// Version and channel exclude each other.
    #[error("invalid module in spec: version and channel are mutually exclusive")]
    VersionAndChannel,
}

/// The source of a module's version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Follow {
    /// The version that this channel names.
    Channel(String),
    /// This fixed version.
    Version(String),
    /// The version that the release meta makes mandatory; users cannot select it.
    Mandatory,
}

impl Follow {
    /// Channel or version as messages name it.
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Self::Channel(text) | Self::Version(text) => text,
            Self::Mandatory => "mandatory",
        }
    }
}

/// One selected module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedModule {
    /// Name of the module and of its release meta.
    pub(crate) name: String,
    /// Source of its version.
    pub(crate) follows: Result<Follow, InvalidModuleError>,
    /// False for an unmanaged module.
    pub(crate) managed: bool,
    /// Whether the default module CR is created.
    pub(crate) policy: CustomResourcePolicy,
}

/// A valid spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Validated {
    /// Channel of the Kyma.
    pub(crate) channel: String,
    /// Selected modules, unique by name and sorted.
    pub(crate) modules: Vec<WantedModule>,
}

/// Validates the spec of a runtime cluster's Kyma. Of duplicate names the first entry counts; the API server rejects
/// duplicates.
pub(crate) fn validate(spec: &KymaSpec) -> Result<Validated, InvalidKymaError> {
    if spec.channel == NO_CHANNEL {
        return Err(InvalidKymaError::NoChannel);
    }
    let entries = spec.modules();
    if entries.len() > MAX_MODULES {
        return Err(InvalidKymaError::TooMany);
    }
    let names = entries.iter();
    let names = names.flat_map(|entry| [Some(&entry.name), entry.channel.as_ref(), entry.version.as_ref()]).flatten();
    if names.clone().chain([&spec.channel]).any(|name| name.len() > MAX_NAME) {
        return Err(InvalidKymaError::TooLong);
    }
    if names.map(String::len).sum::<usize>() > MAX_NAMES {
        return Err(InvalidKymaError::TooLarge);
    }
    let mut modules = BTreeMap::new();
    for entry in entries {
        modules.entry(entry.name.clone()).or_insert_with(|| WantedModule {
            name: entry.name.clone(),
            follows: follows(given(&entry.channel), given(&entry.version), &spec.channel),
            managed: entry.managed,
            policy: entry.policy(),
        });
    }
    Ok(Validated { channel: spec.channel.clone(), modules: modules.into_values().collect() })
}

fn given(text: &Option<String>) -> Option<&str> {
    text.as_deref().filter(|text| !text.is_empty())
}

fn follows(own: Option<&str>, version: Option<&str>, kymas: &str) -> Result<Follow, InvalidModuleError> {
    match (own, version) {
        (Some(NO_CHANNEL), _) => Err(InvalidModuleError::NoChannel),
        (Some(_), Some(_)) => Err(InvalidModuleError::VersionAndChannel),
        (None, Some(version)) => Ok(Follow::Version(version.to_owned())),
        (Some(channel), None) => Ok(Follow::Channel(channel.to_owned())),
        (None, None) if kymas.is_empty() => Ok(Follow::Channel(DEFAULT_CHANNEL.to_owned())),
        (None, None) => Ok(Follow::Channel(kymas.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use regex::Regex;
    use serde_json::{Value, json};
    use tidewatch_shared::api::crds;

    use super::*;

    use CustomResourcePolicy as Policy;

    fn check(spec: Value) -> Result<Validated, InvalidKymaError> {
        validate(&serde_json::from_value(spec).unwrap())
    }

    /// `acceptance.md` C2 41 and 45: the CRD rejects malformed channels and versions, of a module and of the Kyma. The
    /// channel `none` passes it, and is rejected here.
    #[test]
    fn crd_rejects_malformed_channels_and_versions() {
        let crd = crds::crds().into_iter().find(|crd| crd.spec.names.kind == "Kyma").unwrap();
        let crd = serde_json::to_value(crd).unwrap();
        let spec = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
        let of_module = &spec["modules"]["items"]["properties"];
        let accepts = |schema: &Value, text: &str| {
            let bound = |name: &str| schema[name].as_u64().and_then(|bound| usize::try_from(bound).ok());
            let is_long_enough = bound("minLength").is_none_or(|least| text.len() >= least);
            let is_short_enough = bound("maxLength").is_none_or(|most| text.len() <= most);
            is_long_enough && is_short_enough && Regex::new(schema["pattern"].as_str().unwrap()).unwrap().is_match(text)
        };
        for channel in [&spec["channel"], &of_module["channel"]] {
            for (text, accepted) in [
                ("regular", true),
                ("fast", true),
                ("none", true),
                ("abc", true),
                ("ab", false),
                ("", false),
                ("Fast", false),
                ("fast1", false),
                ("my-channel", false),
                (&"a".repeat(32), true),
                (&"a".repeat(33), false),
            ] {
                assert_eq!(accepts(channel, text), accepted, "{text:?}");
            }
        }
        for (text, accepted) in [
            ("1.2.3", true),
            ("1.2.3-rc1", true),
            ("0.0.0", true),
            ("v1.2.3", false),
            ("1.2", false),
            ("1.2.3.4", false),
            ("01.2.3", false),
            ("1.2.3-1", false),
            ("1.2.3-rc.1", false),
            ("1.2.3+build", false),
            ("latest", false),
            (&format!("1.2.3-{}", "a".repeat(27)), false),
        ] {
            assert_eq!(accepts(&of_module["version"], text), accepted, "{text:?}");
        }
        assert_eq!(check(json!({"channel": "none"})), Err(InvalidKymaError::NoChannel));
    }

    #[test]
    fn a_modules_own_channel_or_version_wins_over_the_kymas() {
        for (kyma, module, expected) in [
            ("fast", json!({"name": "a"}), Ok(Follow::Channel("fast".to_owned()))),
            ("fast", json!({"name": "a", "channel": "regular"}), Ok(Follow::Channel("regular".to_owned()))),
            ("", json!({"name": "a"}), Ok(Follow::Channel("regular".to_owned()))),
            ("fast", json!({"name": "a", "channel": "none"}), Err(InvalidModuleError::NoChannel)),
            ("fast", json!({"name": "a", "version": "1.0.0"}), Ok(Follow::Version("1.0.0".into()))),
            (
                "fast",
                json!({"name": "a", "version": "1.0.0", "channel": "fast"}),
                Err(InvalidModuleError::VersionAndChannel),
            ),
        ] {
            let validated = check(json!({"channel": kyma, "modules": [module]})).unwrap();
            assert_eq!(validated.modules[0].follows, expected, "{module}");
        }
    }

    #[test]
    fn modules_come_once_and_in_order() {
        let spec = json!({"channel": "fast", "modules": [
            {"name": "b", "managed": false, "customResourcePolicy": "Ignore"}, {"name": "a"}, {"name": "b"}
        ]});
        let modules = check(spec).unwrap().modules;
        assert_eq!(modules.iter().map(|module| module.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((modules[0].managed, modules[0].policy), (true, Policy::CreateAndDelete));
        assert_eq!((modules[1].managed, modules[1].policy), (false, Policy::Ignore));
    }

    #[test]
    fn invalid_channel_or_too_many_modules_reject_the_whole_kyma() {
        assert_eq!(check(json!({"channel": "none"})), Err(InvalidKymaError::NoChannel));
        let many: Vec<Value> = (0..=MAX_MODULES).map(|n| json!({"name": format!("m{n}")})).collect();
        assert_eq!(check(json!({"channel": "fast", "modules": many})), Err(InvalidKymaError::TooMany));
        let long = "m".repeat(MAX_NAME + 1);
        assert_eq!(check(json!({"channel": "fast", "modules": [{"name": long}]})), Err(InvalidKymaError::TooLong));
        let long: Vec<Value> = (0..430).map(|n| json!({"name": format!("{n:0100}")})).collect();
        assert_eq!(check(json!({"channel": "fast", "modules": long})), Err(InvalidKymaError::TooLarge));
    }
}
