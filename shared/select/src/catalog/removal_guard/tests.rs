use serde_json::json;
use tidewatch_api::names::label;

use super::*;
use crate::catalog::target::{ChannelTarget, VersionSource, VisibilityLabels};

type Labels = BTreeMap<String, String>;

fn target(version: &str, beta: bool) -> ChannelTarget {
    let labels = VisibilityLabels { beta, internal: false };
    ChannelTarget { version: version.to_owned(), labels, since: None, from: None }
}

fn state(audience: Audience, channels: &[(&str, ChannelTarget)]) -> ModuleState {
    let channels: BTreeMap<_, _> = channels.iter().map(|(name, to)| ((*name).to_owned(), to.clone())).collect();
    let versions = channels.values().map(|to| (to.version.clone(), to.labels)).collect();
    ModuleState {
        audience,
        component: Some("example.com/module".to_owned()),
        channels,
        versions,
        ..ModuleState::default()
    }
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

/// Decides with a limit of five per cent, at the time 100.
fn decide(before: Option<&Releases>, now: Releases, kymas: &[Labels], confirmed: &[&str]) -> GuardDecision {
    let confirmed = confirmed.iter().map(|change| (*change).to_owned()).collect();
    evaluate(before, now, kymas, RemovalPolicy { percent: 5, confirmed: &confirmed, now: 100 })
}

/// Held parts, each as module, part and number of runtimes.
fn parts(held: &HeldRemovals) -> Vec<(&str, Part, usize)> {
    held.removals.iter().map(|held| (held.module.as_str(), held.part.clone(), held.runtimes)).collect()
}

fn channel(name: &str) -> Part {
    Part::Channel(name.to_owned())
}

fn version(name: &str) -> Part {
    Part::Version(name.to_owned())
}

#[test]
fn removal_above_the_limit_is_held_until_it_is_confirmed() {
    let before = releases(&[
        ("a", module(&[("fast", target("2", false)), ("regular", target("1", false))])),
        ("b", module(&[("regular", target("1", true))])),
    ]);
    let gone = |name: &str| -> Releases { before.clone().into_iter().filter(|(module, _)| module != name).collect() };
    let many = kymas(100, 5);
    let few = kymas(3, 0);
    let decide =
        |now: &Releases, kymas: &[Labels], confirmed: &[&str]| decide(Some(&before), now.clone(), kymas, confirmed);

    let decision = decide(&gone("a"), &many, &[]);
    assert_eq!(decision.accepted, before);
    assert_eq!(parts(&decision.held), [("a", Part::Module, 100)]);
    assert_eq!((decision.held.runtimes, decision.held.of), (100, 100));
    let change = decision.held.removals[0].change.clone();
    assert!(!decide(&gone("a"), &many, &["another"]).held.is_empty());
    let confirmed = decide(&gone("a"), &many, &["another", &change]);
    assert!(confirmed.held.is_empty());
    assert_eq!((confirmed.accepted, confirmed.used), (gone("a"), BTreeSet::from([change.clone()])));

    assert!(decide(&gone("a"), &few, &[]).held.is_empty(), "three runtimes are never guarded");
    assert!(decide(&gone("b"), &many, &[]).held.is_empty(), "five of a hundred Kymas see it");
    assert_eq!(parts(&decide(&gone("b"), &kymas(100, 6), &[]).held), [("b", Part::Module, 6)]);
    let mut less = before.clone();
    less.get_mut("a").unwrap().channels.remove("fast");
    assert_eq!(parts(&decide(&less, &many, &[]).held), [("a", channel("fast"), 100)]);
    let mut beta = before.clone();
    beta.get_mut("a").unwrap().channels.get_mut("regular").unwrap().labels.beta = true;
    assert_eq!(parts(&decide(&beta, &many, &[]).held), [("a", channel("regular"), 95)]);
    let restricted = releases(&[("a", state(Audience::Excluded, &[])), ("b", before["b"].clone())]);
    assert_eq!(parts(&decide(&restricted, &many, &[]).held), [("a", Part::Module, 100)]);
    assert!(super::tests::decide(None, Releases::new(), &many, &[]).held.is_empty(), "there was no accepted state");
}

#[test]
fn later_removals_leave_an_earlier_hold_and_its_confirmation_as_they_are() {
    let [one, two] = ["1", "2"].map(|version| target(version, false));
    let both = [("fast", two.clone()), ("regular", one.clone())];
    let before =
        releases(&[("a", module(&both)), ("b", module(&both)), ("c", module(&[("regular", target("1", true))]))]);
    let many = kymas(100, 5);
    let mut now = before.clone();
    now.get_mut("a").unwrap().channels.remove("fast");
    let first = decide(Some(&before), now.clone(), &many, &[]);
    let change = first.held.removals[0].change.clone();

    // Another module is removed, a few runtimes lose a third one, and the other channel of the first one moves.
    now.remove("b");
    now.remove("c");
    let state = now.get_mut("a").unwrap();
    state.channels.insert("regular".to_owned(), two.clone());
    let second = decide(Some(&first.accepted), now.clone(), &many, &[]);
    assert_eq!(parts(&second.held), [("a", channel("fast"), 100), ("b", Part::Module, 100)]);
    assert_eq!(second.held.removals[0].change, change);
    assert!(!second.accepted.contains_key("c"), "five of a hundred runtimes lose it");
    let channels = &second.accepted["a"].channels;
    assert_eq!((channels["regular"].since, &*channels["regular"].version), (Some(100), "2"), "it is not frozen");
    assert_eq!(channels["fast"], two);

    let confirmed = decide(Some(&second.accepted), now.clone(), &many, &[&change]);
    assert_eq!(parts(&confirmed.held), [("b", Part::Module, 100)]);
    assert_eq!(confirmed.used, BTreeSet::from([change]));
    assert!(!confirmed.accepted["a"].channels.contains_key("fast"));
    // The removal of the channel is taken back, but not that of the module.
    let back = decide(Some(&second.accepted), Releases::from([("a".to_owned(), before["a"].clone())]), &many, &[]);
    assert_eq!(parts(&back.held), [("b", Part::Module, 100)]);
}

#[test]
fn confirmed_part_of_a_held_module_waits_with_it() {
    let selecting = |team: &str, channels: &[(&str, ChannelTarget)]| {
        let selector = serde_json::from_value(json!({"matchLabels": {"team": team}})).unwrap();
        releases(&[("a", state(Audience::Selected(selector), channels))])
    };
    let both = [("fast", target("2", false)), ("regular", target("1", false))];
    let everyone = releases(&[("a", module(&both))]);
    let team = |n: usize| Labels::from([("team".to_owned(), if n < 50 { "x" } else { "y" }.to_owned())]);
    let kymas: Vec<_> = (0..100).map(team).collect();
    let now = selecting("x", &both[1..]);
    let decision = decide(Some(&everyone), now.clone(), &kymas, &[]);
    assert_eq!(parts(&decision.held), [("a", Part::Module, 50), ("a", channel("fast"), 50)]);
    let [module, fast] = [0, 1].map(|at| decision.held.removals[at].change.as_str());
    let decision = decide(Some(&everyone), now.clone(), &kymas, &[fast]);
    assert_eq!((decision.held.removals.len(), decision.used.len(), &decision.accepted), (2, 0, &everyone));
    let decision = decide(Some(&everyone), now.clone(), &kymas, &[module]);
    assert_eq!(parts(&decision.held), [("a", channel("fast"), 50)]);
    assert_eq!(decide(Some(&everyone), now.clone(), &kymas, &[module, fast]).accepted, now);
}

#[test]
fn small_removals_that_many_runtimes_notice_together_are_held_one_by_one() {
    let team = |of: usize| {
        let selector = serde_json::from_value(json!({"matchLabels": {"team": of.to_string()}})).unwrap();
        state(Audience::Selected(selector), &[("regular", target("1", false))])
    };
    let kymas: Vec<_> = (0..100).map(|n| Labels::from([("team".to_owned(), (n / 4).to_string())])).collect();
    let all: Releases = (0..25).map(|of| (format!("m{of}"), team(of))).collect();
    let one: Releases = all.clone().into_iter().filter(|(module, _)| module != "m1").collect();
    assert!(decide(Some(&all), one, &kymas, &[]).held.is_empty());
    let decision = decide(Some(&all), Releases::new(), &kymas, &[]);
    assert_eq!((decision.held.removals.len(), decision.held.runtimes, &decision.accepted), (25, 100, &all));
    let changes: Vec<_> = decision.held.removals.iter().map(|held| &*held.change).collect();
    let some = decide(Some(&all), Releases::new(), &kymas, &changes[..3]);
    assert_eq!((some.held.removals.len(), some.held.runtimes, some.used.len()), (22, 88, 3));
    assert!(decide(Some(&all), Releases::new(), &kymas, &changes).held.is_empty());
}

#[test]
fn version_of_a_lost_channel_is_part_of_its_removal() {
    let both = [("fast", target("2", false)), ("regular", target("1", false))];
    let before = releases(&[("a", module(&both))]);
    let many = kymas(100, 0);
    // Both the entry and the template are gone.
    let now = releases(&[("a", module(&both[1..]))]);
    let decision = decide(Some(&before), now.clone(), &many, &[]);
    assert_eq!((parts(&decision.held), &decision.accepted), (vec![("a", channel("fast"), 100)], &before));
    let change = decision.held.removals[0].change.clone();
    assert_eq!(decide(Some(&before), now.clone(), &many, &[&change]).accepted, now);
    // The channel moves, and its former version is gone.
    let moved = releases(&[("a", module(&[("fast", target("3", false)), ("regular", target("1", false))]))]);
    let decision = decide(Some(&before), moved, &many, &[]);
    assert_eq!(parts(&decision.held), [("a", version("2"), 100)]);
    let state = &decision.accepted["a"];
    assert_eq!((&*state.channels["fast"].version, state.versions.len()), ("3", 3));
}

#[test]
fn held_version_keeps_the_labels_that_it_had() {
    let both = [("fast", target("2", false)), ("regular", target("1", false))];
    let before = releases(&[("a", module(&both))]);
    let now = releases(&[("a", module(&[("fast", target("2", true)), ("regular", target("1", false))]))]);
    let decision = decide(Some(&before), now, &kymas(100, 10), &[]);
    assert_eq!((parts(&decision.held), decision.accepted), (vec![("a", channel("fast"), 90)], before));
}

#[test]
fn removing_a_version_without_a_channel_counts_as_a_loss() {
    let with = |versions: &[(&str, VisibilityLabels)]| {
        let mut state = module(&[("regular", target("2", false))]);
        state.versions.extend(versions.iter().map(|(version, labels)| ((*version).to_owned(), *labels)));
        releases(&[("a", state)])
    };
    let plain = VisibilityLabels::default();
    let beta = VisibilityLabels { beta: true, internal: false };
    let lost = |before: &Releases, now: &Releases| decide(Some(before), now.clone(), &kymas(100, 10), &[]).held;
    let held = lost(&with(&[("1", plain)]), &with(&[]));
    assert_eq!(parts(&held), [("a", version("1"), 100)]);
    assert!(held.to_string().contains("a removal of the version 1 of a from 100 of 100 runtimes"), "{held}");
    assert_eq!(lost(&with(&[("1", beta)]), &with(&[])).runtimes, 10);
    assert_eq!(lost(&with(&[("1", plain)]), &with(&[("1", beta)])).runtimes, 90);
    assert!(lost(&with(&[("1", beta)]), &with(&[("1", plain)])).is_empty());
    // No Kyma sees the versions of a module without a channel.
    let mut unseen = with(&[("1", plain)]);
    unseen.get_mut("a").unwrap().channels.clear();
    assert!(lost(&unseen, &releases(&[("a", module(&[]))])).is_empty());
}

#[test]
fn state_without_versions_from_an_older_receiver_loses_nothing() {
    let text = r#"{"a": {"whom": "everyone", "channels": {"regular": {"version": "1", "since": 7}}}}"#;
    let before: Releases = serde_json::from_str(text).unwrap();
    let mut now = releases(&[("a", module(&[("regular", target("1", false))]))]);
    now.get_mut("a").unwrap().versions.insert("0".to_owned(), VisibilityLabels::default());
    let GuardDecision { accepted, held, .. } = decide(Some(&before), now, &kymas(100, 0), &[]);
    assert_eq!((held.removals.len(), accepted["a"].versions.len()), (0, 2));
    assert_eq!(accepted["a"].channels["regular"].since, Some(7));
    let less = releases(&[("a", module(&[("regular", target("1", false))]))]);
    assert!(!decide(Some(&accepted), less, &kymas(100, 0), &[]).held.is_empty());
}

#[test]
fn another_component_counts_as_a_loss() {
    let with = |component: Option<&str>| {
        let state = module(&[("regular", target("1", true))]);
        releases(&[("a", ModuleState { component: component.map(str::to_owned), ..state })])
    };
    let held = |before: Option<&str>, now: Option<&str>| {
        let held = decide(Some(&with(before)), with(now), &kymas(100, 10), &[]).held;
        assert!(held.removals.iter().all(|held| held.part == Part::Component));
        (!held.is_empty()).then_some(held.runtimes)
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
        let held = decide(Some(&before), next, &kymas(100, 10), &[]).held;
        (!held.is_empty()).then_some((held.runtimes, held.modules.len()))
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
    let none = decide(Some(&Releases::new()), before.clone(), &kymas(100, 0), &[]);
    assert_eq!((none.held.is_empty(), none.accepted["a"].mandatory.as_ref().unwrap().since), (true, Some(100)));
    let text = serde_json::to_string(&before).unwrap();
    assert_eq!(serde_json::from_str::<Releases>(&text).unwrap(), before);
}

#[test]
fn mandatory_version_records_when_it_moved() {
    let mut before = releases(&[("a", mandatory("1"))]);
    before.get_mut("a").unwrap().mandatory.as_mut().unwrap().since = Some(7);
    let since = |version: &str| {
        let next = releases(&[("a", mandatory(version))]);
        let decision = decide(Some(&before), next, &kymas(100, 0), &[]);
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
            (0..20).map(|minor| (format!("1.{minor}.{n}-rc.1"), VisibilityLabels { beta: n > 50, internal: false })),
        );
        state.contents = state.versions.keys().map(|version| (version.clone(), "0123456789".to_owned())).collect();
        state.edited = state.versions.keys().map(|version| (version.clone(), 1_764_000_000)).collect();
        (format!("module-with-a-name-{n}"), state)
    };
    let all: Releases = (0..100).map(module).collect();
    let text = serde_json::to_string(&all).unwrap();
    assert!(text.len() < 256 << 10, "{} of 1 MiB", text.len());
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
    let decision = decide(Some(&before), now, &kymas(10, 0), &[]);
    assert_eq!(decision.accepted["a"], before["a"]);
    let since = |channel: &str| decision.accepted["b"].channels[channel].since;
    assert_eq!((since("regular"), since("same"), since("new")), (Some(100), Some(7), Some(100)));
    assert_eq!(decision.held.modules, BTreeSet::from(["a".into()]));
}

#[test]
fn edit_of_a_template_records_the_time() {
    let with = |contents: &[(&str, &str)]| {
        let contents = contents.iter().map(|(version, id)| ((*version).to_owned(), (*id).to_owned())).collect();
        let state = module(&[("regular", target("1", false)), ("fast", target("2", false))]);
        releases(&[("a", ModuleState { contents, ..state })])
    };
    let pass = |before: &Releases, now: Releases| decide(Some(before), now, &kymas(100, 0), &[]).accepted;
    let edited = |accepted: &Releases| accepted["a"].edited.clone();
    let of = |times: &[(&str, i64)]| times.iter().map(|(version, at)| ((*version).to_owned(), *at)).collect();
    let before = with(&[("1", "x"), ("2", "x")]);
    assert_eq!(edited(&pass(&before, before.clone())), BTreeMap::new());
    let mut later = pass(&before, with(&[("1", "x"), ("2", "y")]));
    assert_eq!(edited(&later), of(&[("2", 100)]));
    later.get_mut("a").unwrap().edited = of(&[("2", 7)]);
    assert_eq!(edited(&pass(&later, with(&[("1", "x"), ("2", "y")]))), of(&[("2", 7)]));
    // A template that is deleted and created with another content, while its removal is held or not.
    assert_eq!(edited(&pass(&with(&[("1", "x")]), before.clone())), of(&[("2", 100)]));
    let mut gone = with(&[("1", "x")]);
    let state = gone.get_mut("a").unwrap();
    state.channels.remove("fast");
    state.versions.remove("2");
    let held = pass(&later, gone);
    assert_eq!((&held["a"].contents["2"], edited(&held)), (&"y".to_owned(), of(&[("2", 7)])));
    assert_eq!(edited(&pass(&held, with(&[("1", "x"), ("2", "z")]))), of(&[("2", 100)]));
    assert_eq!(edited(&pass(&with(&[]), before)), BTreeMap::new(), "an older receiver recorded none");
}

#[test]
fn channel_moves_once_its_template_exists() {
    let at = |version| releases(&[("a", module(&[("fast", target("1", false)), ("regular", target(version, false))]))]);
    let before = at("1");
    let mut nowhere = before.clone();
    nowhere.get_mut("a").unwrap().channels.remove("regular");
    // Few enough Kymas for the change to be unguarded.
    let passed = |before: &Releases, now: Releases| {
        let decision = decide(Some(before), now, &kymas(2, 0), &[]);
        assert!(decision.held.is_empty());
        decision.accepted
    };
    let accepted = passed(&passed(&before, nowhere), at("2"));
    assert_eq!(accepted["a"].channels["regular"].since, Some(100));
    assert_eq!(accepted["a"].channels["fast"].since, None, "it was not observed to move");
    // A release meta is deleted and recreated.
    let again = passed(&Releases::new(), at("2"));
    assert!(again["a"].channels.values().all(|target| target.since == Some(100)), "{again:?}");
    assert_eq!(decide(None, at("2"), &kymas(2, 0), &[]).accepted, at("2"), "there was no accepted state");
}

#[test]
fn kymas_that_a_selector_drops_lose_the_module() {
    let audience =
        |team: &str| Audience::Selected(serde_json::from_value(json!({"matchLabels": {"team": team}})).unwrap());
    let with = |team| releases(&[("a", state(audience(team), &[("regular", target("1", false))]))]);
    let team = |of: &str| Labels::from([("team".to_owned(), of.to_owned())]);
    let kymas: Vec<_> = (0..10).map(|n| team(if n < 4 { "x" } else { "y" })).collect();
    let held = decide(Some(&with("x")), with("y"), &kymas, &[]).held;
    assert_eq!((held.runtimes, held.of), (4, 10));
    let text = serde_json::to_string(&with("x")).unwrap();
    assert_eq!(serde_json::from_str::<Releases>(&text).unwrap(), with("x"));
}
