use serde_json::json;
use tidewatch_shared::names::label;

use super::*;
use crate::controllers::catalog::rollout::VersionSource;

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
    let gone = |name: &str| -> Releases { before.clone().into_iter().filter(|(module, _)| module != name).collect() };
    let (many, few) = (kymas(100, 5), kymas(3, 0));
    let decide =
        |now: &Releases, kymas: &[Labels], confirmed| evaluate(Some(&before), now.clone(), kymas, policy(confirmed));

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
            (0..20).map(|minor| (format!("1.{minor}.{n}-rc.1"), VisibilityLabels { beta: n > 50, internal: false })),
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
    let at = |version| releases(&[("a", module(&[("fast", target("1", false)), ("regular", target(version, false))]))]);
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
    assert_eq!(evaluate(None, at("2"), &kymas(2, 0), policy(None)).accepted, at("2"), "there was no accepted state");
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
