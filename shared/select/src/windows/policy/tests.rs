use serde_json::{Value, json};

use super::{super::parse, *};

/// 20 minutes, the default.
const MIN_LEFT: i64 = 1_200;

fn policy(policy: &Value) -> Policy {
    parse::policy(policy.to_string().as_bytes()).unwrap()
}

fn at(policy: &Policy, labels: &[(&str, &str)], now: &str) -> String {
    let labels = labels.iter().map(|(name, value)| (format!("kyma-project.io/{name}"), (*value).to_owned())).collect();
    policy.state(&labels, MIN_LEFT, now.parse().unwrap()).to_string()
}

fn default(days: &[&str], begin: &str, end: &str) -> Policy {
    policy(&json!({"default": {"days": days, "begin": begin, "end": end}}))
}

const NONE: &str = "matches and defaults also failed to provide a window";

#[test]
fn weekly_windows_open_at_their_offset_over_midnight_week_and_year() {
    // 2026-11-28 and 2027-01-02 are Saturdays, 2026-12-31 is a Thursday, 2028-02-29 a Tuesday.
    let all = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
    for (days, begin, end, now, state) in [
        // In UTC, within one day.
        (&["Sat"][..], "20:00:00Z", "23:00:00Z", "2026-11-28T19:59:59.999Z", "2026-11-28T20:00:00Z"),
        (&["Sat"], "20:00:00Z", "23:00:00Z", "2026-11-28T20:00:00Z", "open"),
        (&["Sat"], "20:00:00Z", "23:00:00Z", "2026-11-28T22:39:59.999Z", "open"),
        (&["Sat"], "20:00:00Z", "23:00:00Z", "2026-11-28T22:40:00Z", "2026-12-05T20:00:00Z"),
        (&["Sat"], "20:00:00Z", "23:00:00Z", "2026-11-28T23:00:00Z", "2026-12-05T20:00:00Z"),
        // The next one is the earliest of the week, and at most a week ahead.
        (&["Sat", "Tue"], "20:00:00Z", "23:00:00Z", "2026-11-28T23:00:00Z", "2026-12-01T20:00:00Z"),
        (&["Fri", "Sat"], "20:00:00Z", "23:00:00Z", "2026-11-29T00:00:00Z", "2026-12-04T20:00:00Z"),
        // Over midnight: the day is that of the begin.
        (&["Sat"], "20:00:00Z", "04:00:00Z", "2026-11-29T00:00:00Z", "open"),
        (&["Sat"], "20:00:00Z", "04:00:00Z", "2026-11-29T03:39:59Z", "open"),
        (&["Sat"], "20:00:00Z", "04:00:00Z", "2026-11-29T03:40:00Z", "2026-12-05T20:00:00Z"),
        (&["Sat"], "20:00:00Z", "04:00:00Z", "2026-11-28T03:00:00Z", "2026-11-28T20:00:00Z"),
        (&["Sun"], "20:00:00Z", "04:00:00Z", "2026-11-30T02:00:00Z", "open"),
        // The weekday is that of the offset.
        (&["Sat"], "01:00:00+02:00", "05:00:00+02:00", "2026-11-27T22:59:00Z", "2026-11-27T23:00:00Z"),
        (&["Sat"], "01:00:00+02:00", "05:00:00+02:00", "2026-11-27T23:00:00Z", "open"),
        (&["Sat"], "01:00:00+02:00", "05:00:00+02:00", "2026-11-28T23:00:00Z", "2026-12-04T23:00:00Z"),
        (&["Sat"], "22:00:00-08:00", "23:00:00-08:00", "2026-11-29T06:00:00Z", "open"),
        (&["Sat"], "22:00:00-08:00", "23:00:00-08:00", "2026-11-28T06:00:00Z", "2026-11-29T06:00:00Z"),
        (&["Mon"], "00:30:00+14:00", "01:30:00+14:00", "2026-11-29T10:30:00Z", "open"),
        (&["Mon"], "23:00:00-12:00", "23:30:00-12:00", "2026-12-01T11:00:00Z", "open"),
        // Year and leap day.
        (&["Thu"], "22:00:00Z", "02:00:00Z", "2027-01-01T01:00:00Z", "open"),
        (&["Sat"], "20:00:00Z", "23:00:00Z", "2026-12-28T00:00:00Z", "2027-01-02T20:00:00Z"),
        (&["Tue"], "20:00:00Z", "23:00:00Z", "2028-02-29T21:00:00Z", "open"),
        (&["Wed"], "00:00:00Z", "01:00:00Z", "2028-02-29T23:00:00Z", "2028-03-01T00:00:00Z"),
        // Windows without a gap between them are one.
        (&all, "01:00:00Z", "01:00:00Z", "2026-11-28T00:59:59Z", "open"),
        (&["Sat", "Sun"], "12:00:00Z", "12:00:00Z", "2026-11-29T11:50:00Z", "open"),
        (&["Sat", "Sun"], "12:00:00Z", "12:00:00Z", "2026-11-30T11:50:00Z", "2026-12-05T12:00:00Z"),
        // One that is too short never opens.
        (&["Sat"], "20:00:00Z", "20:20:00Z", "2026-11-28T20:00:00Z", NONE),
        (&["Sat"], "20:00:00Z", "20:20:01Z", "2026-11-28T20:00:00.5Z", "open"),
    ] {
        assert_eq!(at(&default(days, begin, end), &[], now), state, "{days:?} {begin} to {end} at {now}");
    }
}

#[test]
fn windows_of_a_date_open_once() {
    let once = |begin: &str, end: &str| json!({"begin": begin, "end": end});
    let windows = policy(&json!({"rules": [{"match": {"plan": "free"}, "windows": [
        once("2026-12-20T04:00:00Z", "2026-12-20T08:00:00Z"),
        once("2026-11-28T22:00:00+02:00", "2026-11-29T00:00:00Z"),
        once("2026-12-01T04:00:00Z", "2026-11-01T08:00:00Z"),
        once("2026-12-02T04:00:00Z", "2026-12-02T04:20:00Z"),
    ]}], "default": once("2027-03-01T00:00:00Z", "2027-03-02T00:00:00Z")}));
    for (now, state) in [
        ("2026-11-01T00:00:00Z", "2026-11-28T20:00:00Z"),
        ("2026-11-28T20:00:00Z", "open"),
        ("2026-11-28T23:40:00Z", "2026-12-20T04:00:00Z"),
        ("2026-12-02T04:00:00Z", "2026-12-20T04:00:00Z"),
        // The default follows the last one of the rule.
        ("2026-12-20T08:00:00Z", "2027-03-01T00:00:00Z"),
        ("2027-03-01T12:00:00Z", "open"),
        ("2027-03-02T00:00:00Z", NONE),
    ] {
        assert_eq!(at(&windows, &[("broker-plan-name", "free")], now), state, "{now}");
    }
}

#[test]
fn first_rule_with_any_match_decides() {
    let daily = |hour: u8| {
        let days = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
        json!({"days": days, "begin": format!("{hour:02}:00:00Z"), "end": format!("{:02}:00:00Z", hour + 1)})
    };
    let windows = policy(&json!({"rules": [
        {"match": {"plan": "trial|free"}, "windows": [daily(1)]},
        {"match": {"region": "(?i)europe|^eu-\\d"}, "windows": [daily(2)]},
        {"match": {"globalAccountID": "^ab$", "platformRegion": "cf-"}, "windows": [daily(3)]},
        {"match": {"plan": "", "region": null}, "windows": [daily(4)]},
        {"windows": [daily(5)]},
        {"match": {"region": "ap-"}},
        {"match": {"plan": "azure", "region": "ap-"}, "windows": [daily(6)]},
    ], "default": daily(9)}));
    for (labels, hour) in [
        (&[("broker-plan-name", "free")][..], 1),
        (&[("broker-plan-name", "free"), ("region", "eu-1")], 1),
        (&[("broker-plan-name", "aws"), ("region", "eu-1")], 2),
        (&[("region", "x-eu-1")], 9),
        (&[("region", "eu-x")], 9),
        (&[("region", "WestEurope")], 2),
        (&[("global-account-id", "ab")], 3),
        (&[("global-account-id", "abc"), ("platform-region", "cf-us10")], 3),
        (&[("global-account-id", "abc")], 9),
        (&[("region", "")], 9),
        (&[], 9),
        // The first rule that matches has no window: the default is tried, and no further rule.
        (&[("broker-plan-name", "azure"), ("region", "ap-1")], 9),
        (&[("broker-plan-name", "azure")], 6),
    ] {
        let opens = format!("2026-11-28T{hour:02}:00:00Z");
        assert_eq!(at(&windows, labels, "2026-11-28T00:00:00Z"), opens, "{labels:?}");
    }
    let without_default = policy(&json!({"rules": [{"match": {"plan": "free"}, "windows": []}]}));
    assert_eq!(at(&without_default, &[("broker-plan-name", "free")], "2026-11-28T00:00:00Z"), NONE);
}

/// Files of the shapes that lifecycle-manager's scripts, configuration and tests have.
#[test]
fn files_of_lifecycle_manager_are_policies() {
    let once = |begin: &str, end: &str| json!({"begin": begin, "end": end});
    let daily = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
    let saturday = "2026-11-28T12:00:00Z";

    // A script: regions with one window each, and an empty default.
    let script = policy(&json!({"rules": [
        {"match": {"region": "japan"}, "windows": [once("2026-11-28T11:30:00Z", "2026-11-28T13:30:00Z")]},
        {"match": {"region": "brazil"}, "windows": [once("2026-11-29T12:00:00Z", "2026-11-29T14:00:00Z")]},
    ], "default": {}}));
    assert_eq!(at(&script, &[("region", "japaneast")], saturday), "open");
    assert_eq!(at(&script, &[("region", "brazilsouth")], saturday), "2026-11-29T12:00:00Z");
    assert_eq!(at(&script, &[("region", "westus")], saturday), NONE);

    // A default alone, with its days behind its times.
    let alone: Policy =
        parse::policy(br#"{"default": {"begin": "13:00:00Z", "end": "17:00:00Z", "days": ["Tue", "Sat"]}}"#).unwrap();
    assert_eq!(at(&alone, &[], saturday), "2026-11-28T13:00:00Z");

    // Offsets as numbers, windows that are over, an end before its begin, and members of an older format.
    let rules = json!({"rules": [
        {"match": {"plan": "trial|free"}, "windows": [{"days": daily, "begin": "02:00:00+00:00", "end": "02:00:00+00:00"}]},
        {"match": {"region": "europe|eu-|norway"}, "windows": [once("2024-10-10T20:00:00Z", "2024-10-11T00:00:00Z")]},
        {"match": {"globalAccountId": "an-account", "platformRegion": "cf-br"}, "windows": [
            once("2026-12-20T04:00:00Z", "2026-12-13T08:00:00Z"), once("2026-12-21T04:00:00Z", "2026-12-21T08:00:00Z"),
        ]},
        {"match": {"region": "\u{2502}|sa-"}, "windows": [once("2026-12-22T04:00:00Z", "2026-12-22T08:00:00Z")]},
        {"match": {"region": "[\u{2502}x]y"}, "windows": [once("2026-12-23T04:00:00Z", "2026-12-23T08:00:00Z")]},
    ], "default": {"days": ["Sat"], "timeBegin": "20:00:00Z", "timeEnd": "00:00:00Z"}});
    let rules = policy(&rules);
    assert_eq!(at(&rules, &[("broker-plan-name", "free")], saturday), "open");
    assert_eq!(at(&rules, &[("global-account-id", "an-account")], saturday), "2026-12-21T04:00:00Z");
    assert_eq!(at(&rules, &[("region", "sa-1")], saturday), "2026-12-22T04:00:00Z");
    assert_eq!(at(&rules, &[("region", "xy")], saturday), "2026-12-23T04:00:00Z");
    // The times of the default have unknown names: it does not open from midnight on instead.
    assert_eq!(at(&rules, &[("region", "norwayeast")], saturday), NONE);
}

#[test]
fn next_start_is_the_same_until_it_comes() {
    let windows = policy(&json!({"rules": [{"match": {"plan": "."}, "windows": [
        {"days": ["Mon", "Thu"], "begin": "22:00:00+05:30", "end": "01:00:00+05:30"},
        {"days": ["Tue"], "begin": "19:00:00Z", "end": "03:00:00-03:00"},
        {"begin": "2026-11-28T20:00:00Z", "end": "2026-11-28T20:30:00Z"},
        {"days": ["Wed"], "begin": "00:00:00Z", "end": "00:15:00Z"},
    ]}]}));
    let labels = [(label::BROKER_PLAN_NAME.to_owned(), "aws".to_owned())].into();
    let start: Timestamp = "2026-11-20T00:00:00Z".parse().unwrap();
    let mut announced = None;
    let mut opened = 0;
    for minute in 0..21 * 24 * 60 {
        let now = Timestamp::from_second(start.as_second() + minute * 60).unwrap();
        let state = windows.state(&labels, MIN_LEFT, now);
        match (announced, state) {
            (Some(opens), WindowState::Open) => {
                assert_eq!(opens, now, "it opens when it was announced");
                opened += 1;
            }
            (Some(opens), state) => assert_eq!(state, WindowState::Opens(opens), "at {now}"),
            (None, _) => {}
        }
        announced = if let WindowState::Opens(opens) = state { Some(opens) } else { None };
    }
    assert!(opened >= 9, "{opened}");
}

#[test]
fn delay_ends_with_the_start_and_is_bounded() {
    let now: Timestamp = "2026-11-28T19:59:59.5Z".parse().unwrap();
    let opens = |text: &str| WindowState::Opens(text.parse().unwrap());
    assert_eq!(opens("2026-11-28T20:00:00Z").delay(now), Some(Duration::from_millis(500)));
    assert_eq!(opens("2026-11-28T19:00:00Z").delay(now), Some(Duration::ZERO), "the clock was set forward");
    assert_eq!(opens("9000-01-01T00:00:00Z").delay(now), Some(LONGEST_DELAY));
    assert_eq!(WindowState::Open.delay(now), Some(Duration::ZERO));
    assert_eq!(WindowState::Unknown(NoWindowError::NoPolicy).delay(now), None);
}
