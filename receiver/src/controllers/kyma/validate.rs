//! What the user wants: the runtime's spec where it speaks, KCP's for the rest.

use std::collections::BTreeMap;

use thiserror::Error;
use tidewatch_shared::api::{CustomResourcePolicy, KymaSpec};

/// The channel that is followed when neither the module nor the Kyma names one.
const DEFAULT_CHANNEL: &str = "regular";
/// The CRD admits this channel, nobody may use it.
const NO_CHANNEL: &str = "none";
/// Modules of one Kyma, at most: a runtime's spec must not be able to fill KCP's status.
const MAX_MODULES: usize = 500;

/// Characters of a module's name or of a channel, at most. The CRD bounds channels; what a runtime's API server answers need not
/// keep to it.
const MAX_NAME: usize = 253;

/// Why nothing of a spec can be acted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum InvalidKyma {
    /// Channel `none`.
    #[error("invalid Kyma: the value \"none\" is not allowed for the channel")]
    NoChannel,
    /// More than [`MAX_MODULES`].
    #[error("invalid Kyma: more than {MAX_MODULES} modules")]
    TooMany,
    /// A name, a channel or a version of more than [`MAX_NAME`].
    #[error("invalid Kyma: a module's name, channel or version has more than {MAX_NAME} characters")]
    TooLong,
}

/// Why one module's entry cannot be acted on.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum InvalidModule {
    /// Channel `none`.
    #[error("invalid module in spec: the value \"none\" is not allowed for the channel")]
    NoChannel,
    /// Both say what to install.
    #[error("invalid module in spec: version and channel are mutually exclusive")]
    VersionAndChannel,
}

/// What decides on a module's version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Follow {
    /// Where this channel points.
    Channel(String),
    /// Nothing: it stays at this version.
    Version(String),
}

impl Follow {
    /// As messages name it.
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Self::Channel(text) | Self::Version(text) => text,
        }
    }
}

/// One module that the user wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedModule {
    /// Its name, which is that of its release meta.
    pub(crate) name: String,
    /// What it follows.
    pub(crate) follows: Result<Follow, InvalidModule>,
    /// Whether we look after it.
    pub(crate) managed: bool,
    /// Whether the default module CR is ours to create and delete.
    pub(crate) policy: CustomResourcePolicy,
}

/// A spec that can be acted on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Validated {
    /// The Kyma's own channel.
    pub(crate) channel: String,
    /// Its modules, each name once, in order of their names.
    pub(crate) modules: Vec<WantedModule>,
}

/// Judges the spec of a runtime's Kyma. Of two entries of one name the first counts; the API server admits only one.
pub(crate) fn validate(spec: &KymaSpec) -> Result<Validated, InvalidKyma> {
    if spec.channel == NO_CHANNEL {
        return Err(InvalidKyma::NoChannel);
    }
    let entries = spec.modules();
    if entries.len() > MAX_MODULES {
        return Err(InvalidKyma::TooMany);
    }
    let names = entries.iter();
    let names = names.flat_map(|entry| [Some(&entry.name), entry.channel.as_ref(), entry.version.as_ref()]).flatten();
    if names.chain([&spec.channel]).any(|name| name.len() > MAX_NAME) {
        return Err(InvalidKyma::TooLong);
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

fn follows(own: Option<&str>, version: Option<&str>, kymas: &str) -> Result<Follow, InvalidModule> {
    match (own, version) {
        (Some(NO_CHANNEL), _) => Err(InvalidModule::NoChannel),
        (Some(_), Some(_)) => Err(InvalidModule::VersionAndChannel),
        (None, Some(version)) => Ok(Follow::Version(version.to_owned())),
        (Some(channel), None) => Ok(Follow::Channel(channel.to_owned())),
        (None, None) if kymas.is_empty() => Ok(Follow::Channel(DEFAULT_CHANNEL.to_owned())),
        (None, None) => Ok(Follow::Channel(kymas.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    use CustomResourcePolicy as Policy;

    fn check(spec: Value) -> Result<Validated, InvalidKyma> {
        validate(&serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn a_modules_own_channel_or_version_wins_over_the_kymas() {
        for (kyma, module, expected) in [
            ("fast", json!({"name": "a"}), Ok(Follow::Channel("fast".to_owned()))),
            ("fast", json!({"name": "a", "channel": "regular"}), Ok(Follow::Channel("regular".to_owned()))),
            ("", json!({"name": "a"}), Ok(Follow::Channel("regular".to_owned()))),
            ("fast", json!({"name": "a", "channel": "none"}), Err(InvalidModule::NoChannel)),
            ("fast", json!({"name": "a", "version": "1.0.0"}), Ok(Follow::Version("1.0.0".into()))),
            (
                "fast",
                json!({"name": "a", "version": "1.0.0", "channel": "fast"}),
                Err(InvalidModule::VersionAndChannel),
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
    fn a_kyma_without_a_usable_channel_or_with_too_many_modules_is_refused_whole() {
        assert_eq!(check(json!({"channel": "none"})), Err(InvalidKyma::NoChannel));
        let many: Vec<Value> = (0..=MAX_MODULES).map(|n| json!({"name": format!("m{n}")})).collect();
        assert_eq!(check(json!({"channel": "fast", "modules": many})), Err(InvalidKyma::TooMany));
        let long = "m".repeat(MAX_NAME + 1);
        assert_eq!(check(json!({"channel": "fast", "modules": [{"name": long}]})), Err(InvalidKyma::TooLong));
    }
}
