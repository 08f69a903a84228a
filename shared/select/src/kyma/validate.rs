//! Validates the user's selection: spec and pins of the runtime cluster's Kyma, with the pins of KCP's.

use std::collections::BTreeMap;

use thiserror::Error;
use tidewatch_api::{
    CustomResourcePolicy,
    selection::{UserSelection, pins::pinned},
};

use super::pin::{InvalidPinError, Pin, PinnedIn};

/// Channel if neither module nor Kyma names one.
const DEFAULT_CHANNEL: &str = "regular";
/// Channel that the CRD admits but that is reserved.
const NO_CHANNEL: &str = "none";
/// Maximal number of modules of one Kyma: a runtime cluster's spec must not fill the status in KCP.
const MAX_MODULES: usize = 500;

/// Maximal length of a module's name or a channel, in characters. The CRD limits channels, but the response of a
/// runtime cluster's API server may violate the CRD.
const MAX_NAME: usize = 253;

/// Maximal length of all modules' names and channels together, in bytes: they are written to KCP several times with each
/// change.
const MAX_NAMES: usize = 32 << 10;

/// The reason to reject a whole spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum InvalidKymaError {
    /// Channel `none`.
    #[error("invalid Kyma: the value \"none\" is not allowed for the channel")]
    NoChannel,
    /// More than [`MAX_MODULES`] modules.
    #[error("invalid Kyma: more than {MAX_MODULES} modules")]
    TooMany,
    /// A name or channel longer than [`MAX_NAME`].
    #[error("invalid Kyma: a module's name or channel has more than {MAX_NAME} characters")]
    TooLong,
    /// More than [`MAX_NAMES`] bytes of names and channels.
    #[error("invalid Kyma: the names and channels of the modules have more than {MAX_NAMES} bytes")]
    TooLarge,
}

/// The reason to reject one module's entry.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidModuleError {
    /// Channel `none`.
    #[error("invalid module in spec: the value \"none\" is not allowed for the channel")]
    NoChannel,
    /// The annotation that pins the version of the module is invalid.
    #[error(transparent)]
    Pin(#[from] InvalidPinError),
}

/// The source of a module's version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Follow {
    /// The version that this channel names.
    Channel(String),
    /// The version that an annotation pins.
    Pin(Pin),
    /// The version that the release meta makes mandatory; users cannot select it.
    Mandatory,
}

impl Follow {
    /// Channel or version as messages name it.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Channel(channel) => channel,
            Self::Pin(pin) => &pin.version,
            Self::Mandatory => "mandatory",
        }
    }
}

/// One selected module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedModule {
    /// Name of the module and of its release meta.
    pub name: String,
    /// Source of its version.
    pub follows: Result<Follow, InvalidModuleError>,
    /// False for an unmanaged module.
    pub managed: bool,
    /// Whether the default module CR is created.
    pub policy: CustomResourcePolicy,
}

impl WantedModule {
    /// Channel that the module follows, or would follow without its pin; `None` for a mandatory module, and for the channel
    /// `none`.
    pub fn channel(&self) -> Option<&str> {
        match &self.follows {
            Ok(Follow::Channel(channel)) => Some(channel),
            Ok(Follow::Pin(pin)) => Some(&pin.channel),
            Err(InvalidModuleError::Pin(invalid)) => Some(&invalid.channel),
            Ok(Follow::Mandatory) | Err(InvalidModuleError::NoChannel) => None,
        }
    }

    /// Pin of the module, if it has a valid one.
    pub const fn pin(&self) -> Option<&Pin> {
        match &self.follows {
            Ok(Follow::Pin(pin)) => Some(pin),
            _ => None,
        }
    }
}

/// A valid spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Validated {
    /// Channel of the Kyma.
    pub channel: String,
    /// Selected modules, unique by name and sorted.
    pub modules: Vec<WantedModule>,
}

/// Validates the selection of a runtime cluster's Kyma. `kcp` are the annotations of the Kyma in KCP, whose pins hold for
/// modules without a pin in the runtime cluster. Of duplicate names the first entry counts; the API server rejects duplicates.
pub fn validate(selection: &UserSelection, kcp: &BTreeMap<String, String>) -> Result<Validated, InvalidKymaError> {
    let UserSelection { spec, pins } = selection;
    if spec.channel == NO_CHANNEL {
        return Err(InvalidKymaError::NoChannel);
    }
    let entries = spec.modules();
    if entries.len() > MAX_MODULES {
        return Err(InvalidKymaError::TooMany);
    }
    let names = entries.iter().flat_map(|entry| [Some(&entry.name), entry.channel.as_ref()]).flatten();
    if names.clone().chain([&spec.channel]).any(|name| name.len() > MAX_NAME) {
        return Err(InvalidKymaError::TooLong);
    }
    if names.map(String::len).sum::<usize>() > MAX_NAMES {
        return Err(InvalidKymaError::TooLarge);
    }
    let pin_of = |module: &str| {
        let own = pins.of_module(module).map(|text| (text, PinnedIn::Runtime));
        own.or_else(|| pinned(kcp, module).map(|text| (text, PinnedIn::ControlPlane)))
    };
    let mut modules = BTreeMap::new();
    for entry in entries {
        modules.entry(entry.name.clone()).or_insert_with(|| WantedModule {
            name: entry.name.clone(),
            follows: follows(&entry.name, given(&entry.channel), &spec.channel, pin_of(&entry.name)),
            managed: entry.managed,
            policy: entry.policy(),
        });
    }
    Ok(Validated { channel: spec.channel.clone(), modules: modules.into_values().collect() })
}

fn given(text: &Option<String>) -> Option<&str> {
    text.as_deref().filter(|text| !text.is_empty())
}

/// Source of a module's version. A pin wins over the module's own channel, which wins over the Kyma's.
fn follows(
    module: &str,
    own: Option<&str>,
    kymas: &str,
    pin: Option<(&str, PinnedIn)>,
) -> Result<Follow, InvalidModuleError> {
    let channel = match own {
        Some(NO_CHANNEL) => return Err(InvalidModuleError::NoChannel),
        Some(channel) => channel,
        None if kymas.is_empty() => DEFAULT_CHANNEL,
        None => kymas,
    };
    match pin {
        Some((text, pinned_in)) => Ok(Follow::Pin(Pin::parse(module, text, pinned_in, channel.to_owned())?)),
        None => Ok(Follow::Channel(channel.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use CustomResourcePolicy as Policy;
    use regex::Regex;
    use serde_json::{Value, json};
    use tidewatch_api::{
        crds,
        selection::{Pins, pins::annotation_of},
    };

    use super::*;

    fn check(spec: Value) -> Result<Validated, InvalidKymaError> {
        let selection = UserSelection { spec: serde_json::from_value(spec).unwrap(), ..UserSelection::default() };
        validate(&selection, &BTreeMap::new())
    }

    /// `acceptance.md` C2 41: the CRD rejects malformed channels, of a module and of the Kyma. The channel `none` passes it, and
    /// is rejected here. The CRD has no version of a module.
    #[test]
    fn crd_rejects_malformed_channels() {
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
        assert_eq!(of_module["version"], Value::Null);
        assert_eq!(check(json!({"channel": "none"})), Err(InvalidKymaError::NoChannel));
    }

    #[test]
    fn a_modules_own_channel_wins_over_the_kymas() {
        for (kyma, module, expected) in [
            ("fast", json!({"name": "a"}), Ok(Follow::Channel("fast".to_owned()))),
            ("fast", json!({"name": "a", "channel": "regular"}), Ok(Follow::Channel("regular".to_owned()))),
            ("", json!({"name": "a"}), Ok(Follow::Channel("regular".to_owned()))),
            ("fast", json!({"name": "a", "channel": "none"}), Err(InvalidModuleError::NoChannel)),
            // A version that an API server did not prune.
            ("fast", json!({"name": "a", "version": "1.0.0"}), Ok(Follow::Channel("fast".to_owned()))),
        ] {
            let validated = check(json!({"channel": kyma, "modules": [module]})).unwrap();
            assert_eq!(validated.modules[0].follows, expected, "{module}");
        }
    }

    #[test]
    fn a_pin_wins_over_channels_and_the_runtimes_over_that_of_kcp() {
        let check = |module: Value, runtime: Option<&str>, kcp: Option<&str>| {
            let spec = serde_json::from_value(json!({"channel": "regular", "modules": [module]})).unwrap();
            let pins = Pins::new(runtime.map(|text| ("keda".to_owned(), text.to_owned())));
            let kcp = kcp.map(|text| (annotation_of("keda"), text.to_owned())).into_iter().collect();
            let module = validate(&UserSelection { spec, pins }, &kcp).unwrap().modules.remove(0);
            let follows = module.follows.as_ref().map(|it| it.as_str().to_owned()).map_err(ToString::to_string);
            (follows, module.channel().map(str::to_owned), module.pin().map(ToString::to_string))
        };
        let some = |text: &str| Some(text.to_owned());
        let notice = |version: &str, rest: &str| {
            Some(format!("version {version} is pinned by the annotation version.operator.kyma-project.io/keda{rest}"))
        };
        let fast = json!({"name": "keda", "channel": "fast"});
        let in_kcp = " of the Kyma in the control plane";
        assert_eq!(check(fast.clone(), None, None), (Ok("fast".to_owned()), some("fast"), None));
        for (runtime, kcp, version, rest) in [
            (Some("1.0.0"), None, "1.0.0", ""),
            (None, Some("1.1.0"), "1.1.0", in_kcp),
            (Some("1.0.0"), Some("1.1.0"), "1.0.0", ""),
            (Some("1.0.0"), Some("latest"), "1.0.0", ""),
        ] {
            let expected = (Ok(version.to_owned()), some("fast"), notice(version, rest));
            assert_eq!(check(fast.clone(), runtime, kcp), expected);
        }
        let by_kyma = (Ok("1.0.0".to_owned()), some("regular"), notice("1.0.0", ""));
        assert_eq!(check(json!({"name": "keda"}), Some("1.0.0"), None), by_kyma);
        let refused = check(fast, Some("latest"), Some("1.0.0"));
        assert!(refused.0.unwrap_err().contains("version.operator.kyma-project.io/keda: \"latest\""));
        assert_eq!((refused.1, refused.2), (some("fast"), None), "an invalid one lets no other pin through");
        // The reserved channel is a mistake whatever is pinned, and a pin of another module is of no concern.
        let none = check(json!({"name": "keda", "channel": "none"}), Some("1.0.0"), None);
        assert_eq!((none.0.is_err(), none.1, none.2), (true, None, None));
        assert_eq!(check(json!({"name": "warden"}), Some("1.0.0"), Some("1.0.0")).2, None);
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
