//! What decides on who sees which module, small enough to be written down: so that a change can be compared with what was before,
//! even by a process that did not see it happen. Pure.
//!
//! Two questions are answered by it: how many runtimes would lose something (the guard against mass removal), and since when a
//! channel points to its version (the roll-out).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use aws_lc_rs::digest;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::{Deserialize, Serialize};
use tidewatch_shared::{
    api::{Channel, ModuleReleaseMeta, ModuleTemplate},
    hex,
    names::{RELEASES, annotation, label},
};

use super::{selector::Selector, visibility::Admission};
use crate::base::labels::is_true;

/// A removal from so few runtimes is never held.
pub const FLOOR: usize = 3;

/// Facts by module.
pub type Releases = BTreeMap<String, Facts>;

/// What decides on who sees a module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// Whom its release meta admits.
    pub whom: Whom,
    /// Its channels that have a template.
    pub channels: BTreeMap<String, Pointer>,
    /// Its versions that have a template: those that can be installed, with a channel or without. None where they were written down
    /// by a receiver that knew of channels alone.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub versions: BTreeMap<String, Marks>,
}

/// What limits who sees a version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marks {
    /// Only beta Kymas see it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beta: bool,
    /// Only internal Kymas see it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub internal: bool,
}

/// Whom a release meta admits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Whom {
    /// Every Kyma.
    Everyone,
    /// Those whose labels match.
    Selected(LabelSelector),
    /// Nobody.
    Nobody,
}

/// Where a channel points, and who may see that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pointer {
    /// The version.
    pub version: String,
    /// Only beta Kymas see it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beta: bool,
    /// Only internal Kymas see it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub internal: bool,
    /// Since when the channel points there, in unix seconds; absent where nobody saw it point elsewhere or nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<i64>,
}

impl Facts {
    /// Of a release meta, and of the well-formed templates of its module, each with its version.
    pub(super) fn of<'a>(
        meta: &ModuleReleaseMeta,
        admission: &Admission,
        templates: impl Iterator<Item = (&'a str, &'a ModuleTemplate)>,
    ) -> Self {
        let whom = match (admission, &meta.spec.kyma_selector) {
            (Admission::Everyone, _) => Whom::Everyone,
            (Admission::Selected(_), Some(selector)) => Whom::Selected(selector.clone()),
            (Admission::Selected(_), None) | (Admission::Nobody(_), _) => Whom::Nobody,
        };
        let optional = templates.filter(|(_, template)| !template.spec.is_mandatory());
        let versions: BTreeMap<_, _> =
            optional.map(|(version, template)| (version.to_owned(), Marks::of(template))).collect();
        let pointer = |entry: &Channel| {
            let Marks { beta, internal } = *versions.get(&entry.version)?;
            Some((entry.channel.clone(), Pointer { version: entry.version.clone(), beta, internal, since: None }))
        };
        Self { whom, channels: meta.spec.channels().iter().filter_map(pointer).collect(), versions }
    }

    /// The channels that an admitted Kyma sees, and where it sees one, the versions.
    fn seen(&self, kyma: Marks) -> (BTreeSet<&str>, BTreeSet<&str>) {
        let channels = self.channels.iter().filter(|(_, to)| kyma.sees(Marks { beta: to.beta, internal: to.internal }));
        let channels: BTreeSet<_> = channels.map(|(channel, _)| channel.as_str()).collect();
        let versions = self.versions.iter().filter(|(_, marks)| !channels.is_empty() && kyma.sees(**marks));
        let versions = versions.map(|(version, _)| version.as_str()).collect();
        (channels, versions)
    }

    /// Takes over since when its channels point where they do; one that points elsewhere now does so since `now`. So does one that is new,
    /// or that had no template or no release meta for a while: whoever follows it already has what it pointed to before. Who has nothing
    /// of it yet waits for no turn.
    fn continue_from(&mut self, before: Option<&Self>, now: i64) {
        for (channel, pointer) in &mut self.channels {
            let before = before.and_then(|before| before.channels.get(channel));
            let same = before.filter(|before| before.version == pointer.version);
            pointer.since = same.map_or(Some(now), |before| before.since);
        }
    }

    fn without_times(&self) -> Self {
        let mut facts = self.clone();
        facts.channels.values_mut().for_each(|pointer| pointer.since = None);
        facts
    }
}

impl Marks {
    fn of(template: &ModuleTemplate) -> Self {
        Self::read(template.metadata.labels.as_ref())
    }

    fn read(labels: Option<&BTreeMap<String, String>>) -> Self {
        Self { beta: is_true(labels, label::BETA), internal: is_true(labels, label::INTERNAL) }
    }

    /// Whether a Kyma that is marked so sees what is marked so.
    const fn sees(self, what: Self) -> bool {
        (self.beta || !what.beta) && (self.internal || !what.internal)
    }

    /// All that can be, each at its [`Marks::index`].
    const ALL: [Self; 4] = [
        Self { beta: false, internal: false },
        Self { beta: true, internal: false },
        Self { beta: false, internal: true },
        Self { beta: true, internal: true },
    ];

    const fn index(self) -> usize {
        self.beta as usize + 2 * self.internal as usize
    }
}

impl Whom {
    /// Whether a Kyma with these labels is admitted; the selector is read once.
    fn admits(&self) -> impl Fn(&BTreeMap<String, String>) -> bool + use<> {
        let (everyone, selector) = match self {
            Self::Everyone => (true, None),
            Self::Nobody => (false, None),
            Self::Selected(selector) => (false, Selector::parse(selector).ok()),
        };
        move |labels| everyone || selector.as_ref().is_some_and(|selector| selector.matches(labels))
    }
}

/// Who loses something of one module by a change: judged once for all marks that a Kyma can have, since there are thousands of them.
fn losers(before: &Facts, now: &Facts) -> impl Fn(&BTreeMap<String, String>) -> bool + use<> {
    let (admitted, admits) = (before.whom.admits(), now.whom.admits());
    let less = Marks::ALL.map(|marks| {
        let ((channels, versions), later) = (before.seen(marks), now.seen(marks));
        // What who is not admitted any more loses, and what who still is.
        (!channels.is_empty(), !channels.is_subset(&later.0) || !versions.is_subset(&later.1))
    });
    move |labels| {
        let (all, some) = less[Marks::read(Some(labels)).index()];
        all && admitted(labels) && (some || !admits(labels))
    }
}

/// A removal that waits for a confirmation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Names the change: the same for the same change, and another one for any other.
    pub change: String,
    /// The modules that would be removed, or channels or versions of which would be.
    pub modules: BTreeSet<String>,
    /// Runtimes that would lose something.
    pub runtimes: usize,
    /// All runtimes.
    pub of: usize,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { change, modules, runtimes, of } = self;
        let modules = modules.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        write!(
            f,
            "a removal of {modules}, or of some of its channels or versions, from {runtimes} of {of} runtimes waits until the \
             annotation {} of the ConfigMap {RELEASES} says {change}",
            annotation::CONFIRM
        )
    }
}

/// What may be, of a change.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ruling {
    /// What holds from now on: for modules that are held, what was before.
    pub accepted: Releases,
    /// What is held, if something is.
    pub held: Option<Held>,
    /// Whether it was the confirmation that let something through.
    pub spent: bool,
}

/// Whether the change from what was `accepted` to what is `now` may be: not if more runtimes than `percent` of all, and more
/// than [`FLOOR`], would lose a module, a channel or a version, unless `confirmed` names this change. Without `accepted` nothing was
/// before. `kymas` are the labels of all Kymas.
#[must_use]
pub fn rule<'a>(
    accepted: Option<&Releases>,
    now: Releases,
    kymas: impl IntoIterator<Item = &'a BTreeMap<String, String>> + Clone,
    terms: Terms<'_>,
) -> Ruling {
    let Some(before) = accepted else { return Ruling { accepted: now, held: None, spent: false } };
    let mut next = now;
    for (module, facts) in &mut next {
        facts.continue_from(before.get(module), terms.now);
    }
    let nothing = Facts { whom: Whom::Nobody, channels: BTreeMap::new(), versions: BTreeMap::new() };
    let is_moved = |(module, facts): &(&String, &Facts)| {
        next.get(*module).is_none_or(|next| next.without_times() != facts.without_times())
    };
    let moved = before.iter().filter(is_moved);
    let moved: Vec<_> =
        moved.map(|(module, facts)| (module, losers(facts, next.get(module).unwrap_or(&nothing)))).collect();
    let (mut runtimes, mut of, mut modules) = (0, 0, BTreeSet::new());
    for labels in kymas {
        of += 1;
        let lost: Vec<_> = moved.iter().filter(|(_, loses)| loses(labels)).map(|(module, _)| *module).collect();
        runtimes += usize::from(!lost.is_empty());
        modules.extend(lost.into_iter().cloned());
    }
    let held = Held { change: change(before, &next, &modules), modules, runtimes, of };
    let is_few = runtimes <= limit(of, terms.percent);
    if is_few || terms.confirmed == Some(held.change.as_str()) {
        return Ruling { accepted: next, held: None, spent: !is_few };
    }
    for module in &held.modules {
        match before.get(module) {
            Some(facts) => drop(next.insert(module.clone(), facts.clone())),
            None => drop(next.remove(module)),
        }
    }
    Ruling { accepted: next, held: Some(held), spent: false }
}

/// By what a change is judged.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// More of a hundred runtimes than this may not lose something at once.
    pub percent: u8,
    /// The change that somebody has confirmed.
    pub confirmed: Option<&'a str>,
    /// Now, in unix seconds.
    pub now: i64,
}

fn limit(of: usize, percent: u8) -> usize {
    (of.saturating_mul(percent.into()) / 100).max(FLOOR)
}

fn change(before: &Releases, now: &Releases, modules: &BTreeSet<String>) -> String {
    let of = |releases: &Releases, module: &str| releases.get(module).map(Facts::without_times);
    let moved: Vec<_> = modules.iter().map(|module| (module, of(before, module), of(now, module))).collect();
    let text = serde_json::to_vec(&moved).expect("facts are plain data with string keys");
    hex::encode(&digest::digest(&digest::SHA256, &text).as_ref()[..5])
}

/// When the roll-out of a version reaches a Kyma, counted from when the channel moved: anywhere within `window`, and always the
/// same for the same Kyma, module and version, so that nothing needs to be remembered for each of them.
#[must_use]
pub fn delay(kyma_uid: &str, module: &str, version: &str, window: Duration) -> Duration {
    let text = format!("{kyma_uid}\n{module}\n{version}");
    let hash = digest::digest(&digest::SHA256, text.as_bytes());
    let mut drawn = [0; 8];
    drawn.copy_from_slice(&hash.as_ref()[..8]);
    let millis = u64::try_from(window.as_millis()).unwrap_or(u64::MAX).max(1);
    Duration::from_millis(u64::from_be_bytes(drawn) % millis)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    type Labels = BTreeMap<String, String>;

    fn pointer(version: &str, beta: bool) -> Pointer {
        Pointer { version: version.to_owned(), beta, internal: false, since: None }
    }

    fn facts(whom: Whom, channels: &[(&str, Pointer)]) -> Facts {
        let channels: BTreeMap<_, _> = channels.iter().map(|(name, to)| ((*name).to_owned(), to.clone())).collect();
        let marks = |to: &Pointer| Marks { beta: to.beta, internal: to.internal };
        let versions = channels.values().map(|to| (to.version.clone(), marks(to))).collect();
        Facts { whom, channels, versions }
    }

    fn releases(modules: &[(&str, Facts)]) -> Releases {
        modules.iter().map(|(module, facts)| ((*module).to_owned(), facts.clone())).collect()
    }

    fn everyone(channels: &[(&str, Pointer)]) -> Facts {
        facts(Whom::Everyone, channels)
    }

    /// So many Kymas, of which the first few are beta.
    fn kymas(all: usize, beta: usize) -> Vec<Labels> {
        let labels =
            |at| if at < beta { Labels::from([(label::BETA.to_owned(), "true".to_owned())]) } else { Labels::new() };
        (0..all).map(labels).collect()
    }

    fn terms(confirmed: Option<&str>) -> Terms<'_> {
        Terms { percent: 5, confirmed, now: 100 }
    }

    #[test]
    fn a_removal_from_too_many_is_held_until_it_is_named() {
        let before = releases(&[
            ("a", everyone(&[("fast", pointer("2", false)), ("regular", pointer("1", false))])),
            ("b", everyone(&[("regular", pointer("1", true))])),
        ]);
        let gone =
            |name: &str| -> Releases { before.clone().into_iter().filter(|(module, _)| module != name).collect() };
        let (many, few) = (kymas(100, 5), kymas(3, 0));
        let judge =
            |now: &Releases, kymas: &[Labels], confirmed| rule(Some(&before), now.clone(), kymas, terms(confirmed));

        let held = judge(&gone("a"), &many, None);
        assert_eq!(held.accepted, before);
        let said = held.held.unwrap();
        assert_eq!((said.runtimes, said.of, said.modules.len()), (100, 100, 1));
        assert!(judge(&gone("a"), &many, Some("another")).held.is_some());
        let confirmed = judge(&gone("a"), &many, Some(&said.change));
        assert_eq!((confirmed.accepted, confirmed.held, confirmed.spent), (gone("a"), None, true));
        assert_eq!(
            judge(&Releases::new(), &many, Some(&said.change)).held.unwrap().runtimes,
            100,
            "more than was named"
        );

        assert_eq!(judge(&gone("a"), &few, None).held, None, "three are never too many");
        assert_eq!(judge(&gone("b"), &many, None).held, None, "five of a hundred see it");
        assert!(judge(&gone("b"), &kymas(100, 6), None).held.is_some());
        let mut less = before.clone();
        less.get_mut("a").unwrap().channels.remove("fast");
        assert!(judge(&less, &many, None).held.is_some(), "a channel is something to lose");
        let mut beta = before.clone();
        beta.get_mut("a").unwrap().channels.get_mut("regular").unwrap().beta = true;
        assert_eq!(judge(&beta, &many, None).held.unwrap().runtimes, 95);
        let restricted = releases(&[("a", facts(Whom::Nobody, &[])), ("b", before["b"].clone())]);
        assert!(judge(&restricted, &many, None).held.is_some());
        assert_eq!(rule(None, Releases::new(), &many, terms(None)).held, None, "nothing was before");
    }

    #[test]
    fn a_version_that_no_channel_names_is_something_to_lose() {
        let with = |versions: &[(&str, Marks)]| {
            let mut facts = everyone(&[("regular", pointer("2", false))]);
            facts.versions.extend(versions.iter().map(|(version, marks)| ((*version).to_owned(), *marks)));
            releases(&[("a", facts)])
        };
        let (plain, beta) = (Marks::default(), Marks { beta: true, internal: false });
        let lost =
            |before: &Releases, now: &Releases| rule(Some(before), now.clone(), &kymas(100, 10), terms(None)).held;
        let held = lost(&with(&[("1", plain)]), &with(&[])).unwrap();
        assert_eq!((held.runtimes, held.modules.len()), (100, 1));
        assert!(held.to_string().contains("or versions, from 100 of 100 runtimes"), "{held}");
        assert_eq!(lost(&with(&[("1", beta)]), &with(&[])).unwrap().runtimes, 10);
        assert_eq!(lost(&with(&[("1", plain)]), &with(&[("1", beta)])).unwrap().runtimes, 90);
        assert_eq!(lost(&with(&[("1", beta)]), &with(&[("1", plain)])), None);
        // Nobody sees the versions of a module without a channel.
        let mut unseen = with(&[("1", plain)]);
        unseen.get_mut("a").unwrap().channels.clear();
        assert_eq!(lost(&unseen, &releases(&[("a", everyone(&[]))])), None);
    }

    #[test]
    fn what_a_receiver_wrote_that_knew_of_channels_alone_loses_nothing_by_it() {
        let text = r#"{"a": {"whom": "everyone", "channels": {"regular": {"version": "1", "since": 7}}}}"#;
        let before: Releases = serde_json::from_str(text).unwrap();
        let mut now = releases(&[("a", everyone(&[("regular", pointer("1", false))]))]);
        now.get_mut("a").unwrap().versions.insert("0".to_owned(), Marks::default());
        let Ruling { accepted, held, .. } = rule(Some(&before), now, &kymas(100, 0), terms(None));
        assert_eq!((held, accepted["a"].versions.len()), (None, 2));
        assert_eq!(accepted["a"].channels["regular"].since, Some(7));
        let less = releases(&[("a", everyone(&[("regular", pointer("1", false))]))]);
        assert!(rule(Some(&accepted), less, &kymas(100, 0), terms(None)).held.is_some());
    }

    #[test]
    fn a_large_catalog_fits_where_it_is_written_down() {
        let module = |n: usize| {
            let to = |minor: usize| Pointer { since: Some(1_764_000_000), ..pointer(&format!("1.{minor}.{n}"), false) };
            let mut facts = everyone(&[("regular", to(18)), ("fast", to(19)), ("experimental", to(20))]);
            facts
                .versions
                .extend((0..20).map(|minor| (format!("1.{minor}.{n}-rc.1"), Marks { beta: n > 50, internal: false })));
            (format!("module-with-a-name-{n}"), facts)
        };
        let all: Releases = (0..100).map(module).collect();
        let text = serde_json::to_string(&all).unwrap();
        assert!(text.len() < 100 << 10, "{} of 1 MiB", text.len());
        assert_eq!(serde_json::from_str::<Releases>(&text).unwrap(), all);
    }

    #[test]
    fn what_is_not_held_goes_on_and_moved_channels_know_since_when() {
        let before = releases(&[
            ("a", everyone(&[("regular", pointer("1", false))])),
            (
                "b",
                everyone(&[
                    ("regular", pointer("1", false)),
                    ("same", Pointer { since: Some(7), ..pointer("1", false) }),
                ]),
            ),
        ]);
        let now = releases(&[(
            "b",
            everyone(&[("regular", pointer("2", false)), ("same", pointer("1", false)), ("new", pointer("1", false))]),
        )]);
        let ruling = rule(Some(&before), now, &kymas(10, 0), terms(None));
        assert_eq!(ruling.accepted["a"], before["a"]);
        let since = |channel: &str| ruling.accepted["b"].channels[channel].since;
        assert_eq!((since("regular"), since("same"), since("new")), (Some(100), Some(7), Some(100)));
        assert_eq!(ruling.held.unwrap().modules, BTreeSet::from(["a".into()]));
    }

    #[test]
    fn a_channel_whose_template_comes_later_moves_when_it_comes() {
        let at = |version| {
            releases(&[("a", everyone(&[("fast", pointer("1", false)), ("regular", pointer(version, false))]))])
        };
        let before = at("1");
        let mut nowhere = before.clone();
        nowhere.get_mut("a").unwrap().channels.remove("regular");
        // So few that nothing is held.
        let passed = |before: &Releases, now: Releases| {
            let ruling = rule(Some(before), now, &kymas(2, 0), terms(None));
            assert_eq!(ruling.held, None);
            ruling.accepted
        };
        let accepted = passed(&passed(&before, nowhere), at("2"));
        assert_eq!(accepted["a"].channels["regular"].since, Some(100));
        assert_eq!(accepted["a"].channels["fast"].since, None, "nobody saw it point elsewhere");
        // A release meta that was deleted, and is made again.
        let again = passed(&Releases::new(), at("2"));
        assert!(again["a"].channels.values().all(|pointer| pointer.since == Some(100)), "{again:?}");
        assert_eq!(rule(None, at("2"), &kymas(2, 0), terms(None)).accepted, at("2"), "nobody was there before");
    }

    #[test]
    fn those_whom_a_selector_leaves_lose_the_module() {
        let whom = |team: &str| Whom::Selected(serde_json::from_value(json!({"matchLabels": {"team": team}})).unwrap());
        let with = |team| releases(&[("a", facts(whom(team), &[("regular", pointer("1", false))]))]);
        let team = |of: &str| Labels::from([("team".to_owned(), of.to_owned())]);
        let kymas: Vec<_> = (0..10).map(|n| team(if n < 4 { "x" } else { "y" })).collect();
        let held = rule(Some(&with("x")), with("y"), &kymas, terms(None)).held.unwrap();
        assert_eq!((held.runtimes, held.of), (4, 10));
        let text = serde_json::to_string(&with("x")).unwrap();
        assert_eq!(serde_json::from_str::<Releases>(&text).unwrap(), with("x"));
    }

    #[test]
    fn the_delay_of_a_roll_out_is_spread_and_always_the_same() {
        let window = Duration::from_secs(300);
        let delays: Vec<_> = (0..1_000).map(|n| delay(&format!("uid-{n}"), "keda", "1.0.0", window)).collect();
        assert!(delays.iter().all(|delay| *delay < window));
        for part in 0..10 {
            let inside = |delay: &&Duration| (window / 10 * part..window / 10 * (part + 1)).contains(*delay);
            assert!((50..200).contains(&delays.iter().filter(inside).count()), "{part}");
        }
        assert_eq!(delay("uid-1", "keda", "1.0.0", window), delays[1]);
        assert_ne!(delay("uid-1", "keda", "1.0.1", window), delays[1]);
        assert_eq!(delay("uid-1", "keda", "1.0.0", Duration::ZERO), Duration::ZERO);
    }
}
