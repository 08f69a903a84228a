//! From a wanted module to the template that is to be installed: release meta → channel → version → template.
//!
//! What follows a channel stays at the version that is installed until it is this Kyma's turn to have the one to which the channel moved,
//! whatever else a pass was made for.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kube::ResourceExt;
use semver::Version;
use thiserror::Error;
use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    names::label,
};

use super::validate::{Follow, InvalidModule, WantedModule};
use crate::{
    base::labels::is_true,
    controllers::catalog::{
        Turn,
        visibility::{Admission, Exclusion, template_name},
    },
};

/// Why a module has no template that may be installed. The messages are the incumbent's.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum LookupError {
    /// The entry in the spec cannot be.
    #[error(transparent)]
    Invalid(#[from] InvalidModule),
    /// No release meta of the module's name.
    #[error("no ModuleReleaseMeta found for module {module:?} in namespace {namespace:?}")]
    NoReleaseMeta {
        /// The module.
        module: String,
        /// KCP's namespace.
        namespace: String,
    },
    /// A release meta without any channel.
    #[error("no channels found for module: {0}")]
    NoChannels(String),
    /// The module is not in this channel.
    #[error("no versions found for channel: {channel} in module {module}")]
    NoSuchChannel {
        /// The channel.
        channel: String,
        /// The module.
        module: String,
    },
    /// Without it no component can be named.
    #[error("failed to create OCM Component Identity: the ModuleReleaseMeta of {0} names no component or no version")]
    NoIdentity(String),
    /// The channel points to a template that does not exist.
    #[error("failed to get module template: ModuleTemplate.operator.kyma-project.io {0:?} not found")]
    NoTemplate(String),
    /// This Kyma may not have it: what is installed goes.
    #[error("module template not allowed{}", .0.suffix())]
    NotAllowed(NotAllowed),
    /// Mandatory modules cannot be selected.
    #[error("no templates were found: for module {template} in channel {channel}")]
    Mandatory {
        /// The template.
        template: String,
        /// The channel.
        channel: String,
    },
    /// A lower version than the installed one.
    #[error(
        "module template update not allowed: ignore channel skew (from {from} to {to}), as a higher version ({installed}) of the \
         module was previously installed"
    )]
    Downgrade {
        /// Channel of what is installed.
        from: String,
        /// Wanted channel, or version.
        to: String,
        /// Installed version.
        installed: String,
    },
    /// A version that is no semantic version, so that nobody can tell whether this is a downgrade.
    #[error("module template update not allowed: could not handle channel skew as {0} contains invalid version")]
    UnknownVersion(&'static str),
}

/// Why a Kyma may not have a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotAllowed {
    /// Only internal Kymas.
    Internal,
    /// Only beta Kymas.
    Beta,
    /// A selector on a module that is not restricted.
    NotRestricted,
    /// A restricted module that selects nobody.
    SelectsNobody,
    /// A restricted module that does not select this Kyma.
    NotSelected,
    /// A selector that cannot be read.
    Malformed,
}

impl NotAllowed {
    const fn suffix(self) -> &'static str {
        match self {
            Self::Internal => ": internal module",
            Self::Beta => ": beta module",
            Self::NotRestricted => ": module has kymaSelector but is not in restricted modules list",
            Self::SelectsNobody => "",
            Self::NotSelected => ": restricted module not allowed for this Kyma",
            Self::Malformed => ": the kymaSelector is not valid",
        }
    }
}

/// What a module resolved to.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    /// The template to install.
    pub(crate) template: Arc<ModuleTemplate>,
    /// The channel that led to it; `None` for a version that the user has fixed.
    pub(crate) channel: Option<String>,
    /// The version that the channel names, or the user.
    pub(crate) version: String,
    /// What is said of the module's versions.
    pub(crate) meta: Arc<ModuleReleaseMeta>,
    /// The OCM component.
    pub(crate) component: String,
}

/// What of the module is installed, as its Manifest tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Installed {
    /// Channel it came from.
    pub(crate) channel: String,
    /// Its version.
    pub(crate) version: String,
}

/// What a lookup reads.
pub(crate) struct Sources<'a> {
    /// KCP's namespace.
    pub(crate) namespace: &'a str,
    /// Labels of the KCP Kyma: they decide what it may have.
    pub(crate) kyma_labels: &'a BTreeMap<String, String>,
    /// Modules of `--restricted-default-modules`.
    pub(crate) restricted: &'a BTreeSet<String>,
    /// A release meta by name.
    pub(crate) release_meta: &'a (dyn Fn(&str) -> Option<Arc<ModuleReleaseMeta>> + Sync),
    /// A template by name.
    pub(crate) template: &'a (dyn Fn(&str) -> Option<Arc<ModuleTemplate>> + Sync),
    /// Whether the removal of a module waits for a confirmation.
    pub(crate) held: &'a (dyn Fn(&str) -> bool + Sync),
    /// When this Kyma may have the version to which a channel of a module points: module, channel, version.
    pub(crate) turn: &'a (dyn Fn(&str, &str, &str) -> Turn + Sync),
}

/// What stays installed of a module because the channel that it follows has moved and this Kyma's turn has not come; with when it comes.
/// `None` where there is nothing to wait with: the user has changed what the module follows, or what is installed may be had no more.
pub(crate) fn not_yet(
    sources: &Sources<'_>,
    module: &WantedModule,
    installed: Option<&Installed>,
) -> Option<(Resolved, Turn)> {
    let (Ok(follows @ Follow::Channel(channel)), Some(installed)) = (&module.follows, installed) else { return None };
    let meta = (sources.release_meta)(&module.name)?;
    let target = version_of(&meta, &module.name, channel).ok()?;
    if installed.channel != *channel || installed.version == target {
        return None;
    }
    let turn = (sources.turn)(&module.name, channel, &target);
    if turn == Turn::Now {
        return None;
    }
    let found = at_version(sources, &module.name, meta, follows, installed.version.clone()).ok()?;
    Some((found, turn))
}

/// Resolves one module.
pub(crate) fn resolve(
    sources: &Sources<'_>,
    module: &WantedModule,
    installed: Option<&Installed>,
) -> Result<Resolved, LookupError> {
    let follows = module.follows.as_ref().map_err(Clone::clone)?;
    let meta = (sources.release_meta)(&module.name).ok_or_else(|| LookupError::NoReleaseMeta {
        module: module.name.clone(),
        namespace: sources.namespace.to_owned(),
    })?;
    let version = match follows {
        Follow::Channel(channel) => version_of(&meta, &module.name, channel)?,
        Follow::Version(version) => version.clone(),
    };
    let found = at_version(sources, &module.name, meta, follows, version)?;
    if let Some(installed) = installed {
        not_a_downgrade(installed, follows.as_str(), &found.version)?;
    }
    Ok(found)
}

fn at_version(
    sources: &Sources<'_>,
    module: &str,
    meta: Arc<ModuleReleaseMeta>,
    follows: &Follow,
    version: String,
) -> Result<Resolved, LookupError> {
    let component = meta.spec.ocm_component_name.clone().unwrap_or_default();
    if component.is_empty() || version.is_empty() {
        return Err(LookupError::NoIdentity(module.to_owned()));
    }
    let name = template_name(module, &version);
    let template = (sources.template)(&name).ok_or(LookupError::NoTemplate(name))?;
    allowed(sources, &meta, &template, follows.as_str())?;
    let channel = match follows {
        Follow::Channel(channel) => Some(channel.clone()),
        Follow::Version(_) => None,
    };
    Ok(Resolved { template, channel, version, component, meta })
}

fn version_of(meta: &ModuleReleaseMeta, module: &str, channel: &str) -> Result<String, LookupError> {
    if let Some(mandatory) = &meta.spec.mandatory {
        return Ok(mandatory.version.clone());
    }
    let mut channels = meta.spec.channels.iter().flatten().peekable();
    if channels.peek().is_none() {
        return Err(LookupError::NoChannels(module.to_owned()));
    }
    let found = channels.find(|entry| entry.channel == channel).map(|entry| entry.version.clone());
    found.ok_or_else(|| LookupError::NoSuchChannel { channel: channel.to_owned(), module: module.to_owned() })
}

fn allowed(
    sources: &Sources<'_>,
    meta: &ModuleReleaseMeta,
    template: &ModuleTemplate,
    channel: &str,
) -> Result<(), LookupError> {
    let refused = |why| Err(LookupError::NotAllowed(why));
    let only_for = |key| is_true(Some(template.labels()), key) && !is_true(Some(sources.kyma_labels), key);
    if only_for(label::INTERNAL) {
        return refused(NotAllowed::Internal);
    }
    if only_for(label::BETA) {
        return refused(NotAllowed::Beta);
    }
    let mandatory = || Err(LookupError::Mandatory { template: template.name_any(), channel: channel.to_owned() });
    if template.spec.is_mandatory() {
        return mandatory();
    }
    match Admission::of(meta, sources.restricted) {
        Admission::Everyone => Ok(()),
        Admission::Selected(selector) if selector.matches(sources.kyma_labels) => Ok(()),
        Admission::Selected(_) => refused(NotAllowed::NotSelected),
        Admission::Nobody(Exclusion::Mandatory) => mandatory(),
        Admission::Nobody(Exclusion::SelectsNobody) => refused(NotAllowed::SelectsNobody),
        Admission::Nobody(Exclusion::Malformed(_)) => refused(NotAllowed::Malformed),
        Admission::Nobody(Exclusion::NotRestricted) => refused(NotAllowed::NotRestricted),
    }
}

/// Major, minor and patch decide; what follows them does not.
fn not_a_downgrade(installed: &Installed, to: &str, version: &str) -> Result<(), LookupError> {
    let core = |text: &str| Version::parse(text).ok().map(|version| (version.major, version.minor, version.patch));
    let new = core(version).ok_or(LookupError::UnknownVersion("descriptor from template"))?;
    let old = core(&installed.version).ok_or(LookupError::UnknownVersion("Modules"))?;
    if new >= old {
        return Ok(());
    }
    let (from, to, installed) = (installed.channel.clone(), to.to_owned(), installed.version.clone());
    Err(LookupError::Downgrade { from, to, installed })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidewatch_shared::api::CustomResourcePolicy as Policy;

    use super::*;

    fn meta(spec: Value) -> ModuleReleaseMeta {
        let mut whole =
            json!({"moduleName": "template-operator", "ocmComponentName": "kyma-project.io/module/template-operator"});
        for (key, value) in spec.as_object().unwrap() {
            whole[key] = value.clone();
        }
        serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": "template-operator"}, "spec": whole
        }))
        .unwrap()
    }

    fn template(labels: Value, mandatory: bool) -> ModuleTemplate {
        serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": "template-operator-1.2.3", "labels": labels},
            "spec": {"moduleName": "template-operator", "version": "1.2.3", "mandatory": mandatory, "descriptor": {}}
        }))
        .unwrap()
    }

    fn regular() -> Value {
        json!({"channels": [{"channel": "regular", "version": "1.2.3"}]})
    }

    struct Case {
        meta: Option<Value>,
        template: Option<(Value, bool)>,
        labels: &'static [(&'static str, &'static str)],
        restricted: bool,
        installed: Option<&'static str>,
    }

    impl Default for Case {
        fn default() -> Self {
            Self {
                meta: Some(regular()),
                template: Some((json!({}), false)),
                labels: &[],
                restricted: false,
                installed: None,
            }
        }
    }

    fn check(case: Case) -> Result<String, String> {
        check_of(case, Follow::Channel("regular".into()))
    }

    fn check_of(case: Case, follows: Follow) -> Result<String, String> {
        let labels = case.labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let restricted = case.restricted.then(|| "template-operator".to_owned()).into_iter().collect();
        let meta = case.meta.map(|spec| Arc::new(meta(spec)));
        let template = case.template.map(|(labels, mandatory)| Arc::new(template(labels, mandatory)));
        let sources = Sources {
            namespace: "kcp-system",
            kyma_labels: &labels,
            restricted: &restricted,
            release_meta: &|_| meta.clone(),
            template: &|name| template.clone().filter(|template| template.name_any() == name),
            held: &|_| false,
            turn: &|_, _, _| Turn::Now,
        };
        let module = WantedModule {
            name: "template-operator".into(),
            follows: Ok(follows),
            managed: true,
            policy: Policy::CreateAndDelete,
        };
        let installed = case.installed.map(|version| Installed { channel: "fast".into(), version: version.into() });
        resolve(&sources, &module, installed.as_ref()).map(|found| found.version).map_err(|error| error.to_string())
    }

    #[test]
    fn a_module_resolves_through_its_channel() {
        assert_eq!(check(Case::default()).unwrap(), "1.2.3");
        assert_eq!(check(Case { installed: Some("1.2.3-rc"), ..Case::default() }).unwrap(), "1.2.3");
        let selector = json!({"channels": [{"channel": "regular", "version": "1.2.3"}], "kymaSelector": {"matchLabels": {"a": "b"}}});
        let selected = Case { meta: Some(selector), labels: &[("a", "b")], restricted: true, ..Case::default() };
        assert_eq!(check(selected).unwrap(), "1.2.3");
        let beta = Case {
            template: Some((json!({label::BETA: "TRUE"}), false)),
            labels: &[(label::BETA, "true")],
            ..Case::default()
        };
        assert_eq!(check(beta).unwrap(), "1.2.3");
    }

    #[test]
    fn a_fixed_version_resolves_by_itself_and_keeps_the_rules() {
        let fixed = |version: &str, case| check_of(case, Follow::Version(version.into()));
        let nowhere = || json!({"channels": [{"channel": "fast", "version": "9.9.9"}]});
        assert_eq!(fixed("1.2.3", Case { meta: Some(nowhere()), ..Case::default() }).unwrap(), "1.2.3");
        let error = fixed("1.2.4", Case::default()).unwrap_err();
        assert!(error.contains("\"template-operator-1.2.4\" not found"), "{error}");
        let beta = Case { template: Some((json!({label::BETA: "true"}), false)), ..Case::default() };
        assert_eq!(fixed("1.2.3", beta).unwrap_err(), "module template not allowed: beta module");
        let newer = Case { installed: Some("1.3.0"), ..Case::default() };
        assert!(fixed("1.2.3", newer).unwrap_err().contains("(from fast to 1.2.3)"));
    }

    #[test]
    fn what_does_not_exist_or_is_not_allowed_says_so_in_the_incumbents_words() {
        let selector = json!({"channels": [{"channel": "regular", "version": "1.2.3"}], "kymaSelector": {"matchLabels": {"a": "b"}}});
        let fast = json!({"channels": [{"channel": "fast", "version": "1.2.3"}]});
        let unnamed = json!({"channels": [{"channel": "regular", "version": "1.2.3"}], "ocmComponentName": null});
        for (case, message) in [
            (
                Case { meta: None, ..Case::default() },
                "no ModuleReleaseMeta found for module \"template-operator\" in namespace \"kcp-system\"",
            ),
            (
                Case { meta: Some(fast), ..Case::default() },
                "no versions found for channel: regular in module template-operator",
            ),
            (
                Case { meta: Some(json!({"channels": []})), ..Case::default() },
                "no channels found for module: template-operator",
            ),
            (Case { meta: Some(unnamed), ..Case::default() }, "failed to create OCM Component Identity: "),
            (Case { template: None, ..Case::default() }, "failed to get module template: "),
            (
                Case { template: Some((json!({label::BETA: "true"}), false)), ..Case::default() },
                "module template not allowed: beta module",
            ),
            (
                Case { template: Some((json!({label::INTERNAL: "True"}), false)), ..Case::default() },
                "module template not allowed: internal module",
            ),
            (
                Case { template: Some((json!({}), true)), ..Case::default() },
                "no templates were found: for module template-operator-1.2.3 in channel regular",
            ),
            (
                Case { meta: Some(json!({"mandatory": {"version": "1.2.3"}})), ..Case::default() },
                "no templates were found",
            ),
            (Case { restricted: true, ..Case::default() }, "module template not allowed"),
            (
                Case { meta: Some(selector.clone()), restricted: true, ..Case::default() },
                "module template not allowed: restricted module not allowed for this Kyma",
            ),
            (
                Case { meta: Some(selector), ..Case::default() },
                "module template not allowed: module has kymaSelector but is not in restricted modules list",
            ),
            (
                Case { installed: Some("1.3.0"), ..Case::default() },
                "module template update not allowed: ignore channel skew (from fast to regular), as a higher version (1.3.0) of the module was previously installed",
            ),
            (
                Case { installed: Some("latest"), ..Case::default() },
                "module template update not allowed: could not handle",
            ),
        ] {
            let said = check(case).unwrap_err();
            assert!(said.starts_with(message), "{said:?} is not {message:?}");
        }
    }

    #[test]
    fn what_follows_a_moved_channel_stays_until_its_turn_unless_there_is_nothing_to_wait_with() {
        let templates = |beta: &'static str| {
            move |name: &str| {
                let labels = if name == beta { json!({label::BETA: "true"}) } else { json!({}) };
                ["template-operator-1.2.3", "template-operator-1.2.2"].contains(&name).then(|| {
                    let mut found = template(labels, false);
                    found.metadata.name = Some(name.to_owned());
                    Arc::new(found)
                })
            }
        };
        let later = Turn::After(std::time::Duration::from_secs(7));
        let at = |follows: Follow, (channel, version): (&str, &str), turn: Turn, beta: &'static str| {
            let (labels, restricted, meta) = (BTreeMap::new(), BTreeSet::new(), Arc::new(meta(regular())));
            let asked = |module: &str, channel: &str, version: &str| {
                assert_eq!((module, channel, version), ("template-operator", "regular", "1.2.3"));
                turn
            };
            let sources = Sources {
                namespace: "kcp-system",
                kyma_labels: &labels,
                restricted: &restricted,
                release_meta: &|_| Some(Arc::clone(&meta)),
                template: &templates(beta),
                held: &|_| false,
                turn: &asked,
            };
            let (managed, policy) = (true, Policy::CreateAndDelete);
            let module = WantedModule { name: "template-operator".into(), follows: Ok(follows), managed, policy };
            let installed = Installed { channel: channel.into(), version: version.into() };
            not_yet(&sources, &module, Some(&installed)).map(|(found, turn)| (found.version, found.channel, turn))
        };
        let channel = || Follow::Channel("regular".into());
        let kept = |turn| Some(("1.2.2".to_owned(), Some("regular".to_owned()), turn));
        assert_eq!(at(channel(), ("regular", "1.2.2"), later, ""), kept(later));
        assert_eq!(at(channel(), ("regular", "1.2.2"), Turn::Undecided, ""), kept(Turn::Undecided));
        let new = "template-operator-1.2.3";
        assert_eq!(
            at(channel(), ("regular", "1.2.2"), later, new),
            kept(later),
            "what it may not have comes in time too"
        );
        assert_eq!(at(channel(), ("regular", "1.2.2"), Turn::Now, ""), None);
        assert_eq!(at(channel(), ("regular", "1.2.3"), later, ""), None, "it is there");
        assert_eq!(at(channel(), ("fast", "1.2.2"), later, ""), None, "the user has changed the channel");
        assert_eq!(at(channel(), ("", "1.2.2"), later, ""), None, "it had a version of its own");
        assert_eq!(at(Follow::Version("1.2.2".into()), ("regular", "1.2.2"), later, ""), None);
        assert_eq!(at(channel(), ("regular", "1.2.1"), later, ""), None, "there is no template of it any more");
        let old = "template-operator-1.2.2";
        assert_eq!(at(channel(), ("regular", "1.2.2"), later, old), None, "this Kyma may not have it any more");
    }
}
