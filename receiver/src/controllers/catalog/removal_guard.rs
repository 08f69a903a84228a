//! Guard against mass removal. Pure.
//!
//! It compares the state of all modules, reduced to the facts that decide on visibility and small enough to persist,
//! with the last accepted state, which may come from an earlier process. A change that takes something from too many
//! runtimes is held until it is confirmed. The state also records since when a channel points to its version, which is
//! the start of its roll-out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use aws_lc_rs::digest;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::{Deserialize, Serialize};
use tidewatch_shared::{
    api::{Channel, ModuleReleaseMeta, ModuleTemplate},
    hex,
    names::{RELEASES, annotation, label},
};

use super::{rollout::VersionSource, selector::Selector, visibility::Admission};
use crate::base::labels::is_true;

/// Maximum number of runtimes that may lose something without the percentage limit.
pub const MAX_UNGUARDED_RUNTIMES: usize = 3;

/// State of each module, by name.
pub type Releases = BTreeMap<String, ModuleState>;

/// Facts that decide on the visibility of a module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleState {
    /// Kymas that its release meta admits.
    #[serde(rename = "whom")]
    pub audience: Audience,
    /// OCM component of the module. With another one every Manifest of the module is replaced. Absent in a state
    /// persisted by a receiver that did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<String>,
    /// Version that every runtime gets, if the module is mandatory and its release meta is not being deleted. A missing
    /// template is no loss: the installed version stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mandatory: Option<ChannelTarget>,
    /// Channels with an existing template, by name.
    pub channels: BTreeMap<String, ChannelTarget>,
    /// Installable versions: those with a template, whether a channel points to them or not. Empty in a state persisted
    /// by a receiver that recorded channels only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub versions: BTreeMap<String, VisibilityLabels>,
}

/// Labels that limit the visibility of a version, or the ones of a Kyma that lift this limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VisibilityLabels {
    /// Visible to beta Kymas only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beta: bool,
    /// Visible to internal Kymas only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub internal: bool,
}

/// Kymas that a release meta admits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Audience {
    /// Every Kyma.
    #[serde(rename = "everyone")]
    All,
    /// Kymas with matching labels.
    #[serde(rename = "selected")]
    Selected(LabelSelector),
    /// No Kyma.
    #[serde(rename = "nobody")]
    Excluded,
}

/// Version that a channel or the field `mandatory` points to, and its visibility.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelTarget {
    /// Target version.
    pub version: String,
    /// Labels that limit its visibility.
    #[serde(flatten)]
    pub labels: VisibilityLabels,
    /// Time of the move to this version, in Unix seconds; absent if no move was observed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<i64>,
}

impl ModuleState {
    /// Derives the state from a release meta and the well-formed templates of its module, each with its version.
    pub(super) fn of<'a>(
        meta: &ModuleReleaseMeta,
        admission: &Admission,
        templates: impl Iterator<Item = (&'a str, &'a ModuleTemplate)>,
    ) -> Self {
        let audience = match (admission, &meta.spec.kyma_selector) {
            (Admission::All, _) => Audience::All,
            (Admission::Selected(_), Some(selector)) => Audience::Selected(selector.clone()),
            (Admission::Selected(_), None) | (Admission::Excluded(_), _) => Audience::Excluded,
        };
        let optional = templates.filter(|(_, template)| !template.spec.is_mandatory());
        let versions: BTreeMap<_, _> = optional
            .map(|(version, template)| (version.to_owned(), VisibilityLabels::of(template.metadata.labels.as_ref())))
            .collect();
        let target = |entry: &Channel| {
            let labels = *versions.get(&entry.version)?;
            Some((entry.channel.clone(), ChannelTarget { version: entry.version.clone(), labels, since: None }))
        };
        let channels = meta.spec.channels().iter().filter_map(target).collect();
        let mandatory = meta.spec.mandatory.as_ref().filter(|_| meta.metadata.deletion_timestamp.is_none());
        let mandatory = mandatory.map(|mandatory| ChannelTarget {
            version: mandatory.version.clone(),
            labels: VisibilityLabels::default(),
            since: None,
        });
        Self { audience, component: meta.spec.ocm_component_name.clone(), mandatory, channels, versions }
    }

    /// Version that a field of the release meta points to.
    pub(super) fn target(&self, source: VersionSource<'_>) -> Option<&ChannelTarget> {
        match source {
            VersionSource::Channel(channel) => self.channels.get(channel),
            VersionSource::Mandatory => self.mandatory.as_ref(),
        }
    }

    /// Channels that an admitted Kyma with these labels sees, and its visible versions, which require a visible
    /// channel.
    fn visible_to(&self, kyma: VisibilityLabels) -> (BTreeSet<&str>, BTreeSet<&str>) {
        let channels = self.channels.iter().filter(|(_, to)| kyma.sees(to.labels));
        let channels: BTreeSet<_> = channels.map(|(channel, _)| channel.as_str()).collect();
        let versions = self.versions.iter().filter(|(_, labels)| !channels.is_empty() && kyma.sees(**labels));
        let versions = versions.map(|(version, _)| version.as_str()).collect();
        (channels, versions)
    }

    /// Carries over the times of unchanged channels and sets that of moved ones to `now`. A channel counts as moved too
    /// if it is new, or had no template or no release meta for a while: its followers still run the version it pointed
    /// to before. A Kyma without an installed version does not wait for its roll-out slot.
    fn carry_over_times(&mut self, before: Option<&Self>, now: i64) {
        let channels = self.channels.iter_mut().map(|(channel, target)| (VersionSource::Channel(channel), target));
        for (source, target) in channels.chain(self.mandatory.iter_mut().map(|to| (VersionSource::Mandatory, to))) {
            let before = before.and_then(|before| before.target(source));
            let same = before.filter(|before| before.version == target.version);
            target.since = same.map_or(Some(now), |before| before.since);
        }
    }

    fn without_times(&self) -> Self {
        let mut state = self.clone();
        state.channels.values_mut().chain(&mut state.mandatory).for_each(|target| target.since = None);
        state
    }
}

impl VisibilityLabels {
    fn of(labels: Option<&BTreeMap<String, String>>) -> Self {
        Self { beta: is_true(labels, label::BETA), internal: is_true(labels, label::INTERNAL) }
    }

    /// Returns whether a Kyma with these labels sees an object with those.
    const fn sees(self, object: Self) -> bool {
        (self.beta || !object.beta) && (self.internal || !object.internal)
    }
}

impl Audience {
    /// Returns a predicate on a Kyma's labels; the selector is parsed once.
    fn admits(&self) -> impl Fn(&BTreeMap<String, String>) -> bool + use<> {
        let (all, selector) = match self {
            Self::All => (true, None),
            Self::Excluded => (false, None),
            Self::Selected(selector) => (false, Selector::parse(selector).ok()),
        };
        move |labels| all || selector.as_ref().is_some_and(|selector| selector.matches(labels))
    }
}

/// Returns a predicate on a Kyma's labels: whether the change takes a channel or version of the module from it, or
/// uninstalls a mandatory module, or replaces its component. The comparison is done once per combination of visibility
/// labels, since there are thousands of Kymas.
fn loses_access(before: &ModuleState, now: &ModuleState) -> impl Fn(&BTreeMap<String, String>) -> bool + use<> {
    let (admitted, admits) = (before.audience.admits(), now.audience.admits());
    let is_replaced = before.component.is_some() && before.component != now.component;
    // Every Kyma has a mandatory module.
    let everywhere = before.mandatory.is_some() && (now.mandatory.is_none() || is_replaced);
    let loss = |labels| {
        let ((channels, versions), later) = (before.visible_to(labels), now.visible_to(labels));
        // The loss of a Kyma that is no longer admitted, and of one that still is.
        let some = is_replaced || !channels.is_subset(&later.0) || !versions.is_subset(&later.1);
        (!channels.is_empty(), some)
    };
    // Indexed by the labels `beta` and `internal`.
    let losses = [false, true].map(|beta| [false, true].map(|internal| loss(VisibilityLabels { beta, internal })));
    move |labels| {
        let VisibilityLabels { beta, internal } = VisibilityLabels::of(Some(labels));
        let (all, some) = losses[usize::from(beta)][usize::from(internal)];
        everywhere || (all && admitted(labels) && (some || !admits(labels)))
    }
}

/// Removal that waits for a confirmation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldRemoval {
    /// Identifier of the change, derived from its content; a confirmation names it.
    pub change: String,
    /// Modules that would be removed, or would lose channels or versions.
    pub modules: BTreeSet<String>,
    /// Number of runtimes that would lose something.
    pub runtimes: usize,
    /// Number of all runtimes.
    pub of: usize,
}

impl fmt::Display for HeldRemoval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { change, modules, runtimes, of } = self;
        let modules = modules.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        write!(
            f,
            "a removal of {modules}, of some of its channels or versions, or of its component, from {runtimes} of {of} runtimes waits until the \
             annotation {} of the ConfigMap {RELEASES} says {change}",
            annotation::CONFIRM
        )
    }
}

/// Hold of every removal, because it is lost which state was accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostReleases {
    /// Identifier of the current state of all modules; a confirmation that names it accepts that state.
    pub change: String,
    /// Cause of the loss.
    pub cause: LossCause,
}

/// Cause of the loss of the accepted state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum LossCause {
    /// The ConfigMap does not exist, or lacks the state.
    Missing,
    /// The state cannot be parsed.
    Unreadable,
}

impl LostReleases {
    /// Decides without knowledge of the accepted state: `next` is accepted if a confirmation names it. All of its channels
    /// count as moved then, since it is not known since when they point to their versions.
    ///
    /// # Errors
    /// The hold, if there is no such confirmation.
    pub fn decide(mut next: Releases, cause: LossCause, policy: RemovalPolicy<'_>) -> Result<Releases, Self> {
        let states: BTreeMap<_, _> = next.iter().map(|(module, state)| (module, state.without_times())).collect();
        let change = identifier(&states);
        if policy.confirmed != Some(change.as_str()) {
            return Err(Self { change, cause });
        }
        next.values_mut().for_each(|state| state.carry_over_times(None, policy.now));
        Ok(next)
    }
}

impl fmt::Display for LostReleases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { change, cause } = self;
        write!(
            f,
            "the accepted releases in the ConfigMap {RELEASES} are {cause}: every removal waits until they are restored, or until \
             the annotation {} says {change}, which accepts the catalog as it is",
            annotation::CONFIRM
        )
    }
}

/// Decision on a change of the releases.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GuardDecision {
    /// New accepted state; held modules keep their previous state.
    pub accepted: Releases,
    /// Held removal, if any.
    pub held: Option<HeldRemoval>,
    /// The change exceeded the limit and was let through by its confirmation.
    pub confirmation_used: bool,
}

/// Decides on the change from the `accepted` state to the `next`. It holds the modules concerned if more than `percent`
/// of all runtimes, and more than [`MAX_UNGUARDED_RUNTIMES`], would lose a module, a channel or a version, unless
/// `confirmed` names this change. Without an accepted state everything is accepted. `kymas` are the labels of all
/// Kymas.
#[must_use]
pub fn evaluate<'a>(
    accepted: Option<&Releases>,
    mut next: Releases,
    kymas: impl IntoIterator<Item = &'a BTreeMap<String, String>>,
    policy: RemovalPolicy<'_>,
) -> GuardDecision {
    let Some(before) = accepted else { return GuardDecision { accepted: next, held: None, confirmation_used: false } };
    for (module, state) in &mut next {
        state.carry_over_times(before.get(module), policy.now);
    }
    let (mandatory, channels, versions) = Default::default();
    let removed = ModuleState { audience: Audience::Excluded, component: None, mandatory, channels, versions };
    let is_changed = |(module, state): &(&String, &ModuleState)| {
        next.get(*module).is_none_or(|next| next.without_times() != state.without_times())
    };
    let changed = before.iter().filter(is_changed);
    let changed: Vec<_> =
        changed.map(|(module, state)| (module, loses_access(state, next.get(module).unwrap_or(&removed)))).collect();
    let (mut runtimes, mut of, mut modules) = (0, 0, BTreeSet::new());
    for labels in kymas {
        of += 1;
        let lost: Vec<_> = changed.iter().filter(|(_, loses)| loses(labels)).map(|(module, _)| *module).collect();
        runtimes += usize::from(!lost.is_empty());
        modules.extend(lost.into_iter().cloned());
    }
    let held = HeldRemoval { change: change_id(before, &next, &modules), modules, runtimes, of };
    let limit = (of.saturating_mul(policy.percent.into()) / 100).max(MAX_UNGUARDED_RUNTIMES);
    let is_few = runtimes <= limit;
    if is_few || policy.confirmed == Some(held.change.as_str()) {
        return GuardDecision { accepted: next, held: None, confirmation_used: !is_few };
    }
    let kept = before.iter().filter(|(module, _)| held.modules.contains(*module));
    next.extend(kept.map(|(module, state)| (module.clone(), state.clone())));
    GuardDecision { accepted: next, held: Some(held), confirmation_used: false }
}

/// Limits and time by which a change is decided.
#[derive(Clone, Copy, Debug)]
pub struct RemovalPolicy<'a> {
    /// Percentage of runtimes that may lose something by one change.
    pub percent: u8,
    /// Identifier of the confirmed change.
    pub confirmed: Option<&'a str>,
    /// Current time in Unix seconds.
    pub now: i64,
}

fn change_id(before: &Releases, now: &Releases, modules: &BTreeSet<String>) -> String {
    let of = |releases: &Releases, module: &str| releases.get(module).map(ModuleState::without_times);
    let changes: Vec<_> = modules.iter().map(|module| (module, of(before, module), of(now, module))).collect();
    identifier(&changes)
}

/// First five bytes of the SHA-256 in hex.
fn identifier(content: &impl Serialize) -> String {
    let text = serde_json::to_vec(content).expect("module states are plain data with string keys");
    hex::encode(&digest::digest(&digest::SHA256, &text).as_ref()[..5])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    type Labels = BTreeMap<String, String>;

    fn target(version: &str, beta: bool) -> ChannelTarget {
        let labels = VisibilityLabels { beta, internal: false };
        ChannelTarget { version: version.to_owned(), labels, since: None }
    }

    fn state(audience: Audience, channels: &[(&str, ChannelTarget)]) -> ModuleState {
        let channels: BTreeMap<_, _> = channels.iter().map(|(name, to)| ((*name).to_owned(), to.clone())).collect();
        let versions = channels.values().map(|to| (to.version.clone(), to.labels)).collect();
        ModuleState { audience, component: Some("example.com/module".to_owned()), mandatory: None, channels, versions }
    }

    fn mandatory(version: &str) -> ModuleState {
        ModuleState { mandatory: Some(target(version, false)), ..state(Audience::Excluded, &[]) }
    }

    fn releases(modules: &[(&str, ModuleState)]) -> Releases {
        modules.iter().map(|(module, state)| ((*module).to_owned(), state.clone())).collect()
    }

    fn module(channels: &[(&str, ChannelTarget)]) -> ModuleState {
        state(Audience::All, channels)
    }

    /// Labels of `all` Kymas, of which the first `beta` are beta.
    fn kymas(all: usize, beta: usize) -> Vec<Labels> {
        let labels =
            |at| if at < beta { Labels::from([(label::BETA.to_owned(), "true".to_owned())]) } else { Labels::new() };
        (0..all).map(labels).collect()
    }

    fn policy(confirmed: Option<&str>) -> RemovalPolicy<'_> {
        RemovalPolicy { percent: 5, confirmed, now: 100 }
    }

    #[test]
    fn removal_above_the_limit_is_held_until_it_is_confirmed() {
        let before = releases(&[
            ("a", module(&[("fast", target("2", false)), ("regular", target("1", false))])),
            ("b", module(&[("regular", target("1", true))])),
        ]);
        let gone =
            |name: &str| -> Releases { before.clone().into_iter().filter(|(module, _)| module != name).collect() };
        let (many, few) = (kymas(100, 5), kymas(3, 0));
        let decide = |now: &Releases, kymas: &[Labels], confirmed| {
            evaluate(Some(&before), now.clone(), kymas, policy(confirmed))
        };

        let held = decide(&gone("a"), &many, None);
        assert_eq!(held.accepted, before);
        let removal = held.held.unwrap();
        assert_eq!((removal.runtimes, removal.of, removal.modules.len()), (100, 100, 1));
        assert!(decide(&gone("a"), &many, Some("another")).held.is_some());
        let confirmed = decide(&gone("a"), &many, Some(&removal.change));
        assert_eq!((confirmed.accepted, confirmed.held, confirmed.confirmation_used), (gone("a"), None, true));
        assert_eq!(
            decide(&Releases::new(), &many, Some(&removal.change)).held.unwrap().runtimes,
            100,
            "more than the confirmed change"
        );

        assert_eq!(decide(&gone("a"), &few, None).held, None, "three runtimes are never guarded");
        assert_eq!(decide(&gone("b"), &many, None).held, None, "five of a hundred Kymas see it");
        assert!(decide(&gone("b"), &kymas(100, 6), None).held.is_some());
        let mut less = before.clone();
        less.get_mut("a").unwrap().channels.remove("fast");
        assert!(decide(&less, &many, None).held.is_some(), "a removed channel is a loss");
        let mut beta = before.clone();
        beta.get_mut("a").unwrap().channels.get_mut("regular").unwrap().labels.beta = true;
        assert_eq!(decide(&beta, &many, None).held.unwrap().runtimes, 95);
        let restricted = releases(&[("a", state(Audience::Excluded, &[])), ("b", before["b"].clone())]);
        assert!(decide(&restricted, &many, None).held.is_some());
        assert_eq!(evaluate(None, Releases::new(), &many, policy(None)).held, None, "there was no accepted state");
    }

    #[test]
    fn removing_a_version_without_a_channel_counts_as_a_loss() {
        let with = |versions: &[(&str, VisibilityLabels)]| {
            let mut state = module(&[("regular", target("2", false))]);
            state.versions.extend(versions.iter().map(|(version, labels)| ((*version).to_owned(), *labels)));
            releases(&[("a", state)])
        };
        let (plain, beta) = (VisibilityLabels::default(), VisibilityLabels { beta: true, internal: false });
        let lost =
            |before: &Releases, now: &Releases| evaluate(Some(before), now.clone(), &kymas(100, 10), policy(None)).held;
        let held = lost(&with(&[("1", plain)]), &with(&[])).unwrap();
        assert_eq!((held.runtimes, held.modules.len()), (100, 1));
        assert!(held.to_string().contains("or versions, or of its component, from 100 of 100 runtimes"), "{held}");
        assert_eq!(lost(&with(&[("1", beta)]), &with(&[])).unwrap().runtimes, 10);
        assert_eq!(lost(&with(&[("1", plain)]), &with(&[("1", beta)])).unwrap().runtimes, 90);
        assert_eq!(lost(&with(&[("1", beta)]), &with(&[("1", plain)])), None);
        // No Kyma sees the versions of a module without a channel.
        let mut unseen = with(&[("1", plain)]);
        unseen.get_mut("a").unwrap().channels.clear();
        assert_eq!(lost(&unseen, &releases(&[("a", module(&[]))])), None);
    }

    #[test]
    fn state_without_versions_from_an_older_receiver_loses_nothing() {
        let text = r#"{"a": {"whom": "everyone", "channels": {"regular": {"version": "1", "since": 7}}}}"#;
        let before: Releases = serde_json::from_str(text).unwrap();
        let mut now = releases(&[("a", module(&[("regular", target("1", false))]))]);
        now.get_mut("a").unwrap().versions.insert("0".to_owned(), VisibilityLabels::default());
        let GuardDecision { accepted, held, .. } = evaluate(Some(&before), now, &kymas(100, 0), policy(None));
        assert_eq!((held, accepted["a"].versions.len()), (None, 2));
        assert_eq!(accepted["a"].channels["regular"].since, Some(7));
        let less = releases(&[("a", module(&[("regular", target("1", false))]))]);
        assert!(evaluate(Some(&accepted), less, &kymas(100, 0), policy(None)).held.is_some());
    }

    #[test]
    fn another_component_counts_as_a_loss() {
        let with = |component: Option<&str>| {
            let state = module(&[("regular", target("1", true))]);
            releases(&[("a", ModuleState { component: component.map(str::to_owned), ..state })])
        };
        let held = |before: Option<&str>, now: Option<&str>| {
            let decision = evaluate(Some(&with(before)), with(now), &kymas(100, 10), policy(None));
            decision.held.map(|held| held.runtimes)
        };
        assert_eq!(held(Some("example.com/a"), Some("example.com/b")), Some(10), "ten Kymas see the module");
        assert_eq!(held(Some("example.com/a"), None), Some(10));
        assert_eq!(held(Some("example.com/a"), Some("example.com/a")), None);
        assert_eq!(held(None, Some("example.com/a")), None, "an older receiver recorded no component");
        assert_eq!(held(None, None), None);
    }

    #[test]
    fn removal_of_a_mandatory_module_concerns_every_kyma_and_its_upgrade_none() {
        let with = |state: ModuleState| releases(&[("a", state)]);
        let before = with(mandatory("1"));
        let held = |next: Releases| {
            let decision = evaluate(Some(&before), next, &kymas(100, 10), policy(None));
            decision.held.map(|held| (held.runtimes, held.modules.len()))
        };
        let component = |name: &str| ModuleState { component: Some(name.to_owned()), ..mandatory("1") };
        for (next, expected) in [
            (Releases::new(), Some((100, 1))),
            (with(state(Audience::Excluded, &[])), Some((100, 1))),
            (with(module(&[("regular", target("1", false))])), Some((100, 1))),
            (with(component("example.com/other")), Some((100, 1))),
            (before.clone(), None),
            (with(mandatory("2")), None),
            (with(mandatory("0")), None),
        ] {
            assert_eq!(held(next.clone()), expected, "{next:?}");
        }
        let none = evaluate(Some(&Releases::new()), before.clone(), &kymas(100, 0), policy(None));
        assert_eq!((none.held, none.accepted["a"].mandatory.as_ref().unwrap().since), (None, Some(100)));
        let text = serde_json::to_string(&before).unwrap();
        assert_eq!(serde_json::from_str::<Releases>(&text).unwrap(), before);
    }

    #[test]
    fn mandatory_version_records_when_it_moved() {
        let mut before = releases(&[("a", mandatory("1"))]);
        before.get_mut("a").unwrap().mandatory.as_mut().unwrap().since = Some(7);
        let since = |version: &str| {
            let next = releases(&[("a", mandatory(version))]);
            let decision = evaluate(Some(&before), next, &kymas(100, 0), policy(None));
            decision.accepted["a"].target(VersionSource::Mandatory).unwrap().since
        };
        assert_eq!((since("1"), since("2")), (Some(7), Some(100)));
    }

    #[test]
    fn large_catalog_fits_into_a_config_map() {
        let module = |n: usize| {
            let to =
                |minor: usize| ChannelTarget { since: Some(1_764_000_000), ..target(&format!("1.{minor}.{n}"), false) };
            let mut state = module(&[("regular", to(18)), ("fast", to(19)), ("experimental", to(20))]);
            state.versions.extend(
                (0..20)
                    .map(|minor| (format!("1.{minor}.{n}-rc.1"), VisibilityLabels { beta: n > 50, internal: false })),
            );
            (format!("module-with-a-name-{n}"), state)
        };
        let all: Releases = (0..100).map(module).collect();
        let text = serde_json::to_string(&all).unwrap();
        assert!(text.len() < 100 << 10, "{} of 1 MiB", text.len());
        assert_eq!(serde_json::from_str::<Releases>(&text).unwrap(), all);
    }

    #[test]
    fn unheld_changes_are_accepted_and_moved_channels_record_the_time() {
        let before = releases(&[
            ("a", module(&[("regular", target("1", false))])),
            (
                "b",
                module(&[
                    ("regular", target("1", false)),
                    ("same", ChannelTarget { since: Some(7), ..target("1", false) }),
                ]),
            ),
        ]);
        let now = releases(&[(
            "b",
            module(&[("regular", target("2", false)), ("same", target("1", false)), ("new", target("1", false))]),
        )]);
        let decision = evaluate(Some(&before), now, &kymas(10, 0), policy(None));
        assert_eq!(decision.accepted["a"], before["a"]);
        let since = |channel: &str| decision.accepted["b"].channels[channel].since;
        assert_eq!((since("regular"), since("same"), since("new")), (Some(100), Some(7), Some(100)));
        assert_eq!(decision.held.unwrap().modules, BTreeSet::from(["a".into()]));
    }

    #[test]
    fn channel_moves_once_its_template_exists() {
        let at =
            |version| releases(&[("a", module(&[("fast", target("1", false)), ("regular", target(version, false))]))]);
        let before = at("1");
        let mut nowhere = before.clone();
        nowhere.get_mut("a").unwrap().channels.remove("regular");
        // Few enough Kymas for the change to be unguarded.
        let passed = |before: &Releases, now: Releases| {
            let decision = evaluate(Some(before), now, &kymas(2, 0), policy(None));
            assert_eq!(decision.held, None);
            decision.accepted
        };
        let accepted = passed(&passed(&before, nowhere), at("2"));
        assert_eq!(accepted["a"].channels["regular"].since, Some(100));
        assert_eq!(accepted["a"].channels["fast"].since, None, "it was not observed to move");
        // A release meta is deleted and recreated.
        let again = passed(&Releases::new(), at("2"));
        assert!(again["a"].channels.values().all(|target| target.since == Some(100)), "{again:?}");
        assert_eq!(
            evaluate(None, at("2"), &kymas(2, 0), policy(None)).accepted,
            at("2"),
            "there was no accepted state"
        );
    }

    #[test]
    fn kymas_that_a_selector_drops_lose_the_module() {
        let audience =
            |team: &str| Audience::Selected(serde_json::from_value(json!({"matchLabels": {"team": team}})).unwrap());
        let with = |team| releases(&[("a", state(audience(team), &[("regular", target("1", false))]))]);
        let team = |of: &str| Labels::from([("team".to_owned(), of.to_owned())]);
        let kymas: Vec<_> = (0..10).map(|n| team(if n < 4 { "x" } else { "y" })).collect();
        let held = evaluate(Some(&with("x")), with("y"), &kymas, policy(None)).held.unwrap();
        assert_eq!((held.runtimes, held.of), (4, 10));
        let text = serde_json::to_string(&with("x")).unwrap();
        assert_eq!(serde_json::from_str::<Releases>(&text).unwrap(), with("x"));
    }
}
