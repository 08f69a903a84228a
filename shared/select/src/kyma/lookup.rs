//! Resolves a selected module to the template to install: release meta → channel → version → template.
//!
//! A module that follows a channel, or is mandatory, keeps its installed version until the Kyma's rollout slot for the version that the
//! release meta now names, whatever else triggered the reconcile.

use std::{collections::BTreeMap, fmt, sync::Arc};

use jiff::{Timestamp, civil::Date};
use kube::ResourceExt;
use thiserror::Error;
use tidewatch_api::{ModuleReleaseMeta, ModuleTemplate, labels::is_true, names::label};

use super::validate::{Follow, InvalidModuleError, WantedModule};
use crate::{
    catalog::{
        RolloutBoard, RolloutMark, RolloutSlot, VersionSource,
        desired::Kind,
        retirement,
        snapshot::{OmissionReason, Snapshot},
        visibility::{Admission, HidingRule, template_name},
    },
    kyma::is_installable,
    versions::core_version,
    windows::{NoWindowError, UNKNOWN, WindowState},
};

/// An upgrade that waits for its window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Version to install.
    pub version: String,
    /// Start of the window.
    pub opens: Timestamp,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, opens } = self;
        write!(f, "waiting for next maintenance window to update module version to {version}: it starts at {opens}")
    }
}

/// The error of resolving a module. The messages are lifecycle-manager's.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LookupError {
    /// The entry in the spec is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidModuleError),
    /// No release meta has the module's name.
    #[error("no ModuleReleaseMeta found for module {module:?} in namespace {namespace:?}")]
    NoReleaseMeta {
        /// Name of the module.
        module: String,
        /// Namespace of the catalog in KCP.
        namespace: String,
    },
    /// The release meta has no channel.
    #[error("no channels found for module: {0}")]
    NoChannels(String),
    /// The module has no such channel.
    #[error("no versions found for channel: {channel} in module {module}")]
    NoSuchChannel {
        /// Name of the channel.
        channel: String,
        /// Name of the module.
        module: String,
    },
    /// The release meta names no OCM component.
    #[error("failed to create OCM Component Identity: the ModuleReleaseMeta of {0} names no component or no version")]
    NoIdentity(String),
    /// The template that the channel names does not exist.
    #[error("failed to get module template: ModuleTemplate.operator.kyma-project.io {0:?} not found")]
    NoTemplate(String),
    /// The Kyma is not allowed to use the module: an installed one is removed. The text names the rule, after a colon.
    #[error("module template not allowed{0}")]
    NotAllowed(&'static str),
    /// The catalog leaves the release meta or the template out because of a mistake in it.
    #[error("failed to get module template: {kind} {name:?}: {reason}")]
    LeftOut {
        /// Kind of the object.
        kind: &'static str,
        /// Name of the object.
        name: String,
        /// The mistake.
        reason: OmissionReason,
    },
    /// The component descriptor cannot be read, or names no layer.
    #[error("{0}")]
    Descriptor(String),
    /// The module is mandatory and cannot be selected.
    #[error("no templates were found: for module {template} in channel {channel}")]
    Mandatory {
        /// Name of the template.
        template: String,
        /// Name of the channel.
        channel: String,
    },
    /// The module of a mandatory Manifest is not mandatory any more, or its release meta is being deleted: an installed one
    /// is removed.
    #[error("the module {0} is not mandatory any more")]
    NotMandatory(String),
    /// The release meta of a mandatory module has no finalizer yet, without which it could be gone before its Manifests.
    #[error("the ModuleReleaseMeta of {0} has no finalizer yet")]
    NoFinalizer(String),
    /// The version is lower than the installed one.
    #[error(
        "module template update not allowed: ignore channel skew (from {from} to {to}), as a higher version ({installed}) of the \
         module was previously installed"
    )]
    Downgrade {
        /// Channel of the installed version.
        from: String,
        /// Selected channel or version.
        to: String,
        /// Installed version.
        installed: String,
    },
    /// The version is withdrawn, and the Kyma does not have the module. The notice of the withdrawal.
    #[error("module version not available: {0}")]
    Withdrawn(String),
    /// The version is withdrawn, and the Kyma has another one, which stays.
    #[error("module template update not allowed: {notice}; version {installed} stays installed")]
    WithdrawnUpdate {
        /// Notice of the withdrawal.
        notice: String,
        /// Installed version.
        installed: String,
    },
    /// A version is not a semantic version, so that a downgrade cannot be excluded.
    #[error("module template update not allowed: could not handle channel skew as {0} contains invalid version")]
    UnknownVersion(&'static str),
    /// The version requires a downtime, and is installed in a maintenance window.
    #[error("{0}")]
    Waiting(Waiting),
    /// The version requires a downtime, and no maintenance window can be determined.
    #[error("{UNKNOWN}: {0}")]
    UnknownWindow(NoWindowError),
}

impl LookupError {
    /// Returns true if an installed module is removed, unless the removal guard holds that.
    pub const fn ends_installation(&self) -> bool {
        matches!(self, Self::NotAllowed(_) | Self::NotMandatory(_))
    }
}

/// A resolved module.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// Template to install.
    pub template: Arc<ModuleTemplate>,
    /// Channel that named it; `None` for a pinned version.
    pub channel: Option<String>,
    /// Version that the channel or the pin names.
    pub version: String,
    /// Release meta of the module.
    pub meta: Arc<ModuleReleaseMeta>,
    /// OCM component.
    pub component: String,
}

/// The installed version of a module, from its Manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// Channel of the installed version.
    pub channel: String,
    /// Installed version.
    pub version: String,
    /// Ring rollout that brought it.
    pub mark: Option<RolloutMark>,
}

/// The inputs of a lookup.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    /// Namespace of the catalog in KCP.
    pub namespace: &'a str,
    /// Labels of the KCP Kyma, which decide on visibility.
    pub kyma_labels: &'a BTreeMap<String, String>,
    /// Valid templates and release metas.
    pub catalog: &'a Snapshot,
    /// Returns true if the removal of a module waits for a confirmation.
    pub held: &'a (dyn Fn(&str) -> bool + Sync),
    /// Current day, UTC.
    pub today: Date,
    /// Returns the Kyma's rollout slot for a module, the source of its version, and that version.
    pub turn: &'a (dyn Fn(&str, VersionSource<'_>, &str) -> RolloutSlot + Sync),
    /// Returns the maintenance window of the Kyma, which counts as waiting unless it is open.
    pub window: &'a (dyn Fn() -> WindowState + Sync),
    /// Returns the Kyma's rollout slot for the content of a module's installed version, whose template was edited.
    pub edited: &'a (dyn Fn(&str, &str) -> RolloutSlot + Sync),
    /// Ring rollouts.
    pub rollouts: &'a RolloutBoard,
}

/// Source of the version that an installed module follows; `None` if the user changed the selection, or the version
/// is pinned.
pub(crate) fn followed_source<'a>(module: &'a WantedModule, installed: &Installed) -> Option<VersionSource<'a>> {
    match module.follows.as_ref().ok()? {
        Follow::Channel(channel) if installed.channel == *channel => Some(VersionSource::Channel(channel)),
        Follow::Mandatory => Some(VersionSource::Mandatory),
        Follow::Channel(_) | Follow::Pin(_) => None,
    }
}

/// The installed version that stays because the rollout slot for the new version has not come, with the time
/// until then. `None` if the user changed the selection, or the installed version is no longer available.
pub(crate) fn not_yet(
    sources: &Sources<'_>,
    module: &WantedModule,
    installed: Option<&Installed>,
) -> Option<(Resolved, RolloutSlot)> {
    let (Ok(follows), Some(installed)) = (&module.follows, installed) else { return None };
    let source = followed_source(module, installed)?;
    let (meta, _) = sources.catalog.release_meta(&module.name)?;
    let target = target(meta, &module.name, follows).ok()?;
    if installed.version == target {
        return None;
    }
    let turn = (sources.turn)(&module.name, source, &target);
    if turn == RolloutSlot::Now {
        return None;
    }
    let found = at_version(sources, &module.name, follows, installed.version.clone()).ok()?;
    Some((found, turn))
}

/// Resolves one module.
pub fn resolve(
    sources: &Sources<'_>,
    module: &WantedModule,
    installed: Option<&Installed>,
) -> Result<Resolved, LookupError> {
    let follows = module.follows.as_ref().map_err(Clone::clone)?;
    let (meta, _) = release_meta(sources, &module.name)?;
    let version = target(meta, &module.name, follows)?;
    let found = at_version(sources, &module.name, follows, version)?;
    let is_reverted = |installed: &Installed| {
        let (Some(source), Some(mark)) = (followed_source(module, installed), &installed.mark) else { return false };
        sources.rollouts.reverts(&module.name, source, &found.version, mark)
    };
    if let Some(installed) = installed.filter(|it| *follows != Follow::Mandatory && !is_reverted(it)) {
        not_a_downgrade(installed, follows.as_str(), &found.version)?;
    }
    if module.managed {
        available(sources, &found, installed)?;
    }
    Ok(found)
}

/// The installed version with the channel that it came from; `None` if it is no longer available.
pub fn installed(sources: &Sources<'_>, module: &WantedModule, installed: &Installed) -> Option<Resolved> {
    let follows = module.follows.as_ref().ok()?;
    let found = at_version(sources, &module.name, follows, installed.version.clone()).ok()?;
    let channel = Some(installed.channel.clone()).filter(|channel| !channel.is_empty());
    Some(Resolved { channel, ..found })
}

/// A withdrawn version is available where it is installed only. An unmanaged module is out of our hands.
fn available(sources: &Sources<'_>, found: &Resolved, installed: Option<&Installed>) -> Result<(), LookupError> {
    let Some(notice) = retirement::withdrawn(&found.meta, &found.version, sources.today) else { return Ok(()) };
    match installed {
        None => Err(LookupError::Withdrawn(notice)),
        Some(installed) if installed.version == found.version => Ok(()),
        Some(installed) => Err(LookupError::WithdrawnUpdate { notice, installed: installed.version.clone() }),
    }
}

/// The release meta of a module, if its name and fields are valid.
fn release_meta<'a>(
    sources: &Sources<'a>,
    module: &str,
) -> Result<(&'a Arc<ModuleReleaseMeta>, &'a Admission), LookupError> {
    sources.catalog.release_meta(module).ok_or_else(|| {
        let missing = LookupError::NoReleaseMeta { module: module.to_owned(), namespace: sources.namespace.to_owned() };
        left_out(sources, Kind::ReleaseMeta, module).unwrap_or(missing)
    })
}

/// The mistake for which the catalog leaves an object out.
fn left_out(sources: &Sources<'_>, kind: Kind, name: &str) -> Option<LookupError> {
    let reason = sources.catalog.omission(kind, name)?.clone();
    Some(LookupError::LeftOut { kind: kind.name(), name: name.to_owned(), reason })
}

fn at_version(sources: &Sources<'_>, module: &str, follows: &Follow, version: String) -> Result<Resolved, LookupError> {
    let (meta, admission) = release_meta(sources, module)?;
    let component = meta.spec.ocm_component_name.clone().unwrap_or_default();
    if component.is_empty() || version.is_empty() {
        return Err(LookupError::NoIdentity(module.to_owned()));
    }
    let name = template_name(module, &version);
    let template = sources.catalog.template(&name);
    let template = template.ok_or_else(|| {
        left_out(sources, Kind::Template, &name).unwrap_or_else(|| LookupError::NoTemplate(name.clone()))
    })?;
    if *follows != Follow::Mandatory {
        allowed(sources.kyma_labels, meta, admission, template, follows.as_str())?;
    }
    let channel = match follows {
        Follow::Channel(channel) => Some(channel.clone()),
        Follow::Pin(_) | Follow::Mandatory => None,
    };
    let template = Arc::clone(template);
    let meta = Arc::clone(meta);
    Ok(Resolved { template, channel, version, component, meta })
}

/// Version that a module follows.
fn target(meta: &ModuleReleaseMeta, module: &str, follows: &Follow) -> Result<String, LookupError> {
    match (follows, &meta.spec.mandatory) {
        (Follow::Channel(channel), _) => version_of(meta, module, channel),
        (Follow::Pin(pin), _) => Ok(pin.version.clone()),
        (Follow::Mandatory, Some(mandatory)) if is_installable(meta) => Ok(mandatory.version.clone()),
        (Follow::Mandatory, Some(_)) if meta.metadata.deletion_timestamp.is_none() => {
            Err(LookupError::NoFinalizer(module.to_owned()))
        }
        (Follow::Mandatory, _) => Err(LookupError::NotMandatory(module.to_owned())),
    }
}

fn version_of(meta: &ModuleReleaseMeta, module: &str, channel: &str) -> Result<String, LookupError> {
    if let Some(mandatory) = &meta.spec.mandatory {
        return Ok(mandatory.version.clone());
    }
    if meta.spec.channels().is_empty() {
        return Err(LookupError::NoChannels(module.to_owned()));
    }
    let found = meta.spec.version_of(channel).map(str::to_owned);
    found.ok_or_else(|| LookupError::NoSuchChannel { channel: channel.to_owned(), module: module.to_owned() })
}

/// Text for a Kyma that a restricted module does not select.
const NOT_SELECTED: &str = ": restricted module not allowed for this Kyma";

fn allowed(
    kyma_labels: &BTreeMap<String, String>,
    meta: &ModuleReleaseMeta,
    admission: &Admission,
    template: &ModuleTemplate,
    channel: &str,
) -> Result<(), LookupError> {
    let refused = |why| Err(LookupError::NotAllowed(why));
    let only_for = |key| is_true(Some(template.labels()), key) && !is_true(Some(kyma_labels), key);
    if only_for(label::INTERNAL) {
        return refused(": internal module");
    }
    if only_for(label::BETA) {
        return refused(": beta module");
    }
    let mandatory = || Err(LookupError::Mandatory { template: template.name_any(), channel: channel.to_owned() });
    if template.spec.is_mandatory() {
        return mandatory();
    }
    match admission {
        Admission::All => Ok(()),
        Admission::Selected(selector) if selector.matches(kyma_labels) => Ok(()),
        Admission::Selected(_) => refused(NOT_SELECTED),
        Admission::Excluded(HidingRule::Mandatory) => mandatory(),
        Admission::Excluded(HidingRule::MalformedSelector(_)) => {
            refused(": failed to parse kymaSelector on ModuleReleaseMeta")
        }
        Admission::Excluded(HidingRule::SelectorWithoutRestriction) => {
            refused(": module has kymaSelector but is not in restricted modules list")
        }
        // An empty selector selects no Kyma.
        Admission::Excluded(_) if meta.spec.kyma_selector.is_some() => refused(NOT_SELECTED),
        // lifecycle-manager's text for an absent selector names no rule.
        Admission::Excluded(_) => refused(""),
    }
}

/// Compares major, minor and patch; pre-release and build are ignored.
fn not_a_downgrade(installed: &Installed, to: &str, version: &str) -> Result<(), LookupError> {
    let new = core_version(version).ok_or(LookupError::UnknownVersion("descriptor from template"))?;
    let old = core_version(&installed.version).ok_or(LookupError::UnknownVersion("Modules"))?;
    if new >= old {
        return Ok(());
    }
    let from = installed.channel.clone();
    let to = to.to_owned();
    let installed = installed.version.clone();
    Err(LookupError::Downgrade { from, to, installed })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};
    use tidewatch_api::CustomResourcePolicy as Policy;

    use super::*;
    use crate::kyma::pin::Pin;

    impl<'a> Sources<'a> {
        /// Sources in which every version has its slot and its window now, and nothing is held.
        pub fn at_once(
            catalog: &'a Snapshot,
            kyma_labels: &'a BTreeMap<String, String>,
            rollouts: &'a RolloutBoard,
        ) -> Self {
            Self {
                namespace: "kcp-system",
                kyma_labels,
                catalog,
                held: &|_| false,
                today: jiff::civil::date(2026, 6, 1),
                turn: &|_, _, _| RolloutSlot::Now,
                window: &|| WindowState::Open,
                edited: &|_, _| RolloutSlot::Now,
                rollouts,
            }
        }
    }

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
        let catalog = Snapshot::new(template, meta, &restricted, BTreeSet::new());
        let rollouts = RolloutBoard::default();
        let sources = Sources::at_once(&catalog, &labels, &rollouts);
        let module = WantedModule {
            name: "template-operator".into(),
            follows: Ok(follows),
            managed: true,
            policy: Policy::CreateAndDelete,
        };
        let installed =
            case.installed.map(|version| Installed { channel: "fast".into(), version: version.into(), mark: None });
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
    fn a_pinned_version_resolves_by_itself_and_keeps_the_rules() {
        let pinned = |version: &str, case| check_of(case, Follow::Pin(Pin::at(version)));
        let nowhere = || json!({"channels": [{"channel": "fast", "version": "9.9.9"}]});
        assert_eq!(pinned("1.2.3", Case { meta: Some(nowhere()), ..Case::default() }).unwrap(), "1.2.3");
        let error = pinned("1.2.4", Case::default()).unwrap_err();
        assert!(error.contains("\"template-operator-1.2.4\" not found"), "{error}");
        let beta = Case { template: Some((json!({label::BETA: "true"}), false)), ..Case::default() };
        assert_eq!(pinned("1.2.3", beta).unwrap_err(), "module template not allowed: beta module");
        let newer = Case { installed: Some("1.3.0"), ..Case::default() };
        assert!(pinned("1.2.3", newer).unwrap_err().contains("(from fast to 1.2.3)"));
    }

    const NOT_SELECTED_TEXT: &str = "module template not allowed: restricted module not allowed for this Kyma";

    fn with_selector(selector: Value) -> Value {
        json!({"channels": [{"channel": "regular", "version": "1.2.3"}], "kymaSelector": selector})
    }

    #[test]
    fn absent_selector_of_a_restricted_module_names_no_rule() {
        let refused = check(Case { restricted: true, ..Case::default() });
        assert_eq!(refused.unwrap_err(), "module template not allowed");
    }

    #[test]
    fn lookup_errors_have_lifecycle_managers_messages() {
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
            (Case { meta: Some(with_selector(json!({}))), restricted: true, ..Case::default() }, NOT_SELECTED_TEXT),
            (
                Case {
                    meta: Some(with_selector(json!({"matchExpressions": [{"key": "a", "operator": "Like"}]}))),
                    restricted: true,
                    ..Case::default()
                },
                "module template not allowed: failed to parse kymaSelector on ModuleReleaseMeta",
            ),
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
    fn withdrawn_version_is_available_where_it_is_installed() {
        let meta = |date: &str| {
            let mut meta = regular();
            meta["versions"] = json!([{"version": "1.2.3", "withdrawal": {"date": date, "replacement": "1.2.4"}}]);
            Some(meta)
        };
        let withdrawn = "version 1.2.3 of module template-operator is withdrawn as of 2026-06-01, use version 1.2.4";
        for follows in [Follow::Channel("regular".into()), Follow::Pin(Pin::at("1.2.3"))] {
            let check = |date: &str, installed: Option<&'static str>| {
                check_of(Case { meta: meta(date), installed, ..Case::default() }, follows.clone())
            };
            let new = format!("module version not available: {withdrawn}");
            assert_eq!(check("2026-06-01", None), Err(new), "{follows:?}");
            assert_eq!(check("2026-06-01", Some("1.2.3")).as_deref(), Ok("1.2.3"), "{follows:?}");
            let update = format!("module template update not allowed: {withdrawn}; version 1.2.2 stays installed");
            assert_eq!(check("2026-06-01", Some("1.2.2")), Err(update), "{follows:?}");
            assert_eq!(check("2026-06-02", None).as_deref(), Ok("1.2.3"), "{follows:?}: announced only");
        }
    }

    #[test]
    fn object_that_the_catalog_leaves_out_is_not_installed() {
        let labels = BTreeMap::new();
        let restricted = BTreeSet::new();
        let mut unfit = template(json!({}), false);
        unfit.spec.version = Some("9.9.9".into());
        let catalog = Snapshot::new([Arc::new(unfit)], [Arc::new(meta(regular()))], &restricted, BTreeSet::new());
        let rollouts = RolloutBoard::default();
        let sources = Sources::at_once(&catalog, &labels, &rollouts);
        let follows = Ok(Follow::Channel("regular".into()));
        let name = "template-operator".into();
        let managed = true;
        let policy = Policy::CreateAndDelete;
        let error = resolve(&sources, &WantedModule { name, follows, managed, policy }, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "failed to get module template: ModuleTemplate \"template-operator-1.2.3\": it is left out: its name should be \
             template-operator-9.9.9"
        );
    }

    #[test]
    fn moved_channel_takes_effect_in_the_rollout_slot() {
        let templates = |beta: &'static str| {
            ["1.2.3", "1.2.2"].map(|version| {
                let name = format!("template-operator-{version}");
                let labels = if name == beta { json!({label::BETA: "true"}) } else { json!({}) };
                let mut found = template(labels, false);
                (found.metadata.name, found.spec.version) = (Some(name), Some(version.to_owned()));
                Arc::new(found)
            })
        };
        let later = RolloutSlot::After(std::time::Duration::from_secs(7));
        let at = |follows: Follow, (channel, version): (&str, &str), turn: RolloutSlot, beta: &'static str| {
            let labels = BTreeMap::new();
            let meta = Arc::new(meta(regular()));
            let catalog = Snapshot::new(templates(beta), [meta], &BTreeSet::new(), BTreeSet::new());
            let asked = |module: &str, source: VersionSource<'_>, version: &str| {
                let expected = ("template-operator", VersionSource::Channel("regular"), "1.2.3");
                assert_eq!((module, source, version), expected);
                turn
            };
            let rollouts = RolloutBoard::default();
            let sources = Sources { turn: &asked, ..Sources::at_once(&catalog, &labels, &rollouts) };
            let managed = true;
            let policy = Policy::CreateAndDelete;
            let module = WantedModule { name: "template-operator".into(), follows: Ok(follows), managed, policy };
            let installed = Installed { channel: channel.into(), version: version.into(), mark: None };
            not_yet(&sources, &module, Some(&installed)).map(|(found, turn)| (found.version, found.channel, turn))
        };
        let channel = || Follow::Channel("regular".into());
        let kept = |turn| Some(("1.2.2".to_owned(), Some("regular".to_owned()), turn));
        assert_eq!(at(channel(), ("regular", "1.2.2"), later, ""), kept(later));
        assert_eq!(at(channel(), ("regular", "1.2.2"), RolloutSlot::Undecided, ""), kept(RolloutSlot::Undecided));
        let new = "template-operator-1.2.3";
        assert_eq!(
            at(channel(), ("regular", "1.2.2"), later, new),
            kept(later),
            "what it may not have comes in time too"
        );
        assert_eq!(at(channel(), ("regular", "1.2.2"), RolloutSlot::Now, ""), None);
        assert_eq!(at(channel(), ("regular", "1.2.3"), later, ""), None, "it is there");
        assert_eq!(at(channel(), ("fast", "1.2.2"), later, ""), None, "the user has changed the channel");
        assert_eq!(at(channel(), ("", "1.2.2"), later, ""), None, "it was pinned");
        assert_eq!(at(Follow::Pin(Pin::at("1.2.2")), ("regular", "1.2.2"), later, ""), None);
        assert_eq!(at(channel(), ("regular", "1.2.1"), later, ""), None, "there is no template of it any more");
        let old = "template-operator-1.2.2";
        assert_eq!(at(channel(), ("regular", "1.2.2"), later, old), None, "this Kyma may not have it any more");
    }

    #[test]
    fn move_back_permits_the_downgrade_of_modules_that_the_reverted_move_upgraded() {
        let rollout = |reverts: &[&str]| {
            serde_json::from_value(json!({
                "module": "template-operator", "channel": "regular", "version": "1.2.3", "moved": 7, "change": "c3",
                "reverts": reverts
            }))
            .unwrap()
        };
        let check = |reverts: &[&str], mark: Option<&str>, (channel, version): (&str, &str)| {
            let labels = BTreeMap::new();
            let rollouts = RolloutBoard::with(rollout(reverts));
            let templates = [Arc::new(template(json!({}), false))];
            let catalog = Snapshot::new(templates, [Arc::new(meta(regular()))], &BTreeSet::new(), BTreeSet::new());
            let sources = Sources::at_once(&catalog, &labels, &rollouts);
            let name = "template-operator".into();
            let follows = Ok(Follow::Channel("regular".into()));
            let module = WantedModule { name, follows, managed: true, policy: Policy::CreateAndDelete };
            let mark = mark.map(|change| RolloutMark { change: change.to_owned(), healthy: true });
            let installed = Installed { channel: channel.into(), version: version.into(), mark };
            resolve(&sources, &module, Some(&installed)).map(|found| found.version).map_err(|error| error.to_string())
        };
        let newer = ("regular", "1.3.0");
        assert_eq!(check(&["c2"], Some("c2"), newer).as_deref(), Ok("1.2.3"));
        for (reverts, mark, installed) in [
            (&["c2"][..], None, newer),
            (&["c2"], Some("c1"), newer),
            (&[], Some("c2"), newer),
            // The user changed the channel.
            (&["c2"], Some("c2"), ("fast", "1.3.0")),
        ] {
            let refused = check(reverts, mark, installed).unwrap_err();
            assert!(refused.starts_with("module template update not allowed: ignore channel skew"), "{refused}");
        }
    }
}
