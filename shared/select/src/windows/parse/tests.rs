use serde_json::json;

use super::*;
use crate::windows::policy::{NoWindowError, TimeOfDay, Window, WindowState};

/// Seconds of a day.
const DAY: i64 = 86_400;

fn read(policy: &Value) -> Result<Policy, String> {
    policy_of(policy.to_string().as_bytes())
}

fn policy_of(bytes: &[u8]) -> Result<Policy, String> {
    policy(bytes).map_err(|error| {
        let cause = std::error::Error::source(&error).map(|source| format!(": {source}"));
        format!("{error}{}", cause.unwrap_or_default())
    })
}

#[test]
fn files_that_are_no_policy_are_refused() {
    for (policy, message) in [
        (json!([]), "the policy is not an object"),
        (json!({"rules": [], "Rules": []}), "the policy has the member \"rules\" twice"),
        (json!({"rules": {}}), "rules is not a list"),
        (json!({"rules": vec![json!({}); 501]}), "rules has more than 500 entries"),
    ] {
        assert_eq!(read(&policy).err().as_deref(), Some(message), "{policy}");
    }
    for (bytes, message) in [
        (&b""[..], "the file is not JSON: EOF"),
        (b"rules: []", "the file is not JSON: expected value"),
        (b"{} {}", "the file is not JSON: trailing characters"),
        (b"\xff{}", "the file is not JSON: expected value"),
        (&[b'['; 200_000], "the file is not JSON: recursion limit exceeded"),
        (&[b' '; MAX_BYTES + 1], "the file has more than 262144 bytes"),
    ] {
        let error = policy_of(bytes).err().unwrap_or_default();
        assert!(error.starts_with(message), "{error:?} is not {message:?}");
    }
}

/// Each mistake stands next to a good rule, which keeps its window.
#[test]
fn mistake_affects_only_its_part_and_is_named() {
    let once = json!({"begin": "2026-11-28T20:00:00Z", "end": "2026-11-29T00:00:00Z"});
    let plan = |expression: Value| json!({"match": {"plan": expression, "region": "eu"}, "windows": [once]});
    // Expressions and windows of the rule with the mistake.
    for (rule, left, message) in [
        (json!("x"), None, "rules[1] is not an object"),
        (json!({"match": {}, "Match": {}}), None, "rules[1] has the member \"match\" twice"),
        (json!({"matches": {}}), Some((0, 0)), "rules[1] has the unknown member \"matches\""),
        (json!({"match": [], "windows": [once]}), Some((0, 1)), "rules[1].match is not an object"),
        (
            json!({"match": {"regoin": "eu", "plan": "free"}, "windows": [once]}),
            Some((1, 1)),
            "rules[1].match has the unknown member \"regoin\"",
        ),
        (json!({"match": {"plan": "free"}, "windows": once}), Some((1, 0)), "rules[1].windows is not a list"),
        (
            json!({"match": {"plan": "free"}, "windows": vec![once.clone(); 101]}),
            Some((1, 0)),
            "rules[1].windows has more than 100 entries",
        ),
        (
            json!({"match": {"plan": "free"}, "windows": [once, "x", once]}),
            Some((1, 2)),
            "rules[1].windows[1] is not an object",
        ),
        (plan(json!(1)), Some((1, 1)), "rules[1].match.plan is not a string"),
        (
            plan(json!("trial|(free")),
            Some((1, 1)),
            "rules[1].match.plan is not a usable regular expression: unclosed group",
        ),
        (
            plan(json!("(?=free)")),
            Some((1, 1)),
            "rules[1].match.plan is not a usable regular expression: look-around, including look-ahead and look-behind, \
             is not supported",
        ),
        (
            plan(json!("(a{1000}){1000}")),
            Some((1, 1)),
            "rules[1].match.plan is not a usable regular expression: Compiled regex exceeds size limit of 18304 bytes.",
        ),
        (
            plan(json!("(".repeat(40) + &")".repeat(40))),
            Some((1, 1)),
            "rules[1].match.plan is not a usable regular expression: exceed the maximum number of nested parentheses/\
             brackets (32)",
        ),
        (plan(json!("a".repeat(16_385))), Some((1, 1)), "rules[1].match.plan has more than 16384 bytes"),
    ] {
        let good = json!({"match": {"plan": "aws"}, "windows": [once]});
        let policy = read(&json!({"rules": [good, rule, good]})).unwrap();
        assert_eq!(policy.mistakes.to_string(), message, "{rule}");
        let parts = |rule: &Rule| (rule.expressions.len(), rule.windows.len());
        let found: Vec<_> = policy.rules.iter().map(parts).collect();
        let expected: Vec<_> = [Some((1, 1)), left, Some((1, 1))].into_iter().flatten().collect();
        assert_eq!(found, expected, "{rule}");
    }
}

#[test]
fn quoted_text_of_an_expression_is_literal() {
    for (text, expected) in [
        (r"^\Qa.b\E+$", r"^a\.b+$"),
        (r"\Q(", r"\("),
        (r"a\Q\Eb", "ab"),
        (r"\\Qa\d", r"\\Qa\d"),
        (r"\Qa\Q\Eb\Qc.", r"a\\Qbc\."),
        ("\\", "\\"),
        ("\\ü", "\\ü"),
    ] {
        assert_eq!(without_quotes(text), expected, "{text}");
    }
}

#[test]
fn window_that_cannot_be_read_never_opens() {
    let window = |days: Value, begin: &str, end: &str| json!({"days": days, "begin": begin, "end": end});
    let of_day = "is not a time such as 20:00:00Z or 20:00:00+02:00, which a window with days needs";
    let timestamp = "is not a time such as 2026-11-28T20:00:00Z, which a window without days needs";
    let needed = "is missing, which a window without days needs";
    for (default, message) in [
        (json!([{}]), "default is not an object".to_owned()),
        (json!({"days": [], "DAYS": []}), "default has the member \"days\" twice".to_owned()),
        (json!({"begin": "2026-11-28T20:00:00Z"}), format!("default.end {needed}")),
        (json!({"end": "2026-11-28T20:00:00Z", "days": []}), format!("default.begin {needed}")),
        (json!({"begin": 20, "end": "2026-11-28T20:00:00Z"}), "default.begin is not a string".to_owned()),
        (window(json!("Sat"), "20:00:00Z", "21:00:00Z"), "default.days is not a list".to_owned()),
        (window(json!(vec!["Sat"; 101]), "", ""), "default.days has more than 100 entries".to_owned()),
        (window(json!([]), "20:00:00Z", "21:00:00Z"), format!("default.begin {timestamp}; default.end {timestamp}")),
        (window(json!([]), "2026-11-28T20:00:00Z", "2026-11-31T20:00:00Z"), format!("default.end {timestamp}")),
        (window(json!([]), "2026-11-28T20:00:00", "2026-11-28T21:00:00Z"), format!("default.begin {timestamp}")),
        (window(json!(["Sat"]), "", "21:00:00Z"), format!("default.begin {of_day}")),
        (window(json!(["Sat"]), "20:00:00", "21:00:00Z"), format!("default.begin {of_day}")),
        (window(json!(["Sat"]), "20:00Z", "21:00:00Z"), format!("default.begin {of_day}")),
        (window(json!(["Sat"]), "20:00:00 Europe/Berlin", "21:00:00Z"), format!("default.begin {of_day}")),
        (window(json!(["Sat"]), "2026-11-31T20:00:00Z", "21:00:00Z"), format!("default.begin {of_day}")),
        (window(json!(["Sat"]), "20:00:00Z", "24:00:00Z"), format!("default.end {of_day}")),
        (window(json!(["Sat"]), "20:00:00Z", "20:60:00Z"), format!("default.end {of_day}")),
        (window(json!(["Sat"]), "20:00:00Z", "20:00:60Z"), format!("default.end {of_day}")),
        (window(json!(["Sat"]), "20:00:00Z", "20:00:00.Z"), format!("default.end {of_day}")),
        (window(json!(["Sat"]), "20:00:00Z", "8:00:00ZZ"), format!("default.end {of_day}")),
        (window(json!(["Sat"]), "20:00:00Z", "+8:00:00Z"), format!("default.end {of_day}")),
        (window(json!(["Sat"]), "20:00:00Z", "20:00:00+2:00"), format!("default.end {of_day}")),
        (window(json!(["Sat"]), "20:00:00Z", "20:00:00+02"), format!("default.end {of_day}")),
        (window(json!(["Sat"]), "20:00:00Z", "20:00:00+25:00"), format!("default.end {of_day}")),
        (window(json!(["Sat"]), "20:00:00Z", "20:00:00é"), format!("default.end {of_day}")),
        (window(json!(["Sat"]), "20:00:0éZ", "20:00:00Z"), format!("default.begin {of_day}")),
        // A misspelt time must not open the window from midnight on.
        (
            json!({"days": ["Sat"], "beginn": "20:00:00Z", "end": "23:00:00Z"}),
            "default has the unknown member \"beginn\"; default.begin is missing".to_owned(),
        ),
    ] {
        let policy = read(&json!({"default": default})).unwrap();
        assert_eq!((policy.default, policy.mistakes.to_string()), (None, message), "{default}");
    }
    let empty = read(&json!({"default": {"days": null}, "rules": [{"windows": [{}, {"begin": null}]}]})).unwrap();
    assert!(empty.default.is_none() && empty.rules[0].windows.is_empty() && empty.mistakes.is_empty());
}

#[test]
fn window_is_read_as_lifecycle_manager_reads_it() {
    let of = |days: [bool; 7], begin: i64, offset: i64, length: i64| {
        Some(Window::Weekly { days, begin: TimeOfDay { seconds: begin, offset }, length })
    };
    let saturday = [false, false, false, false, false, true, false];
    let hour = 3_600;
    for (default, window, message) in [
        (
            json!({"days": ["Sat", "saturday", "SAT", "Sat", 6], "begin": "20:00:00Z", "end": "21:00:00Z"}),
            of(saturday, 20 * hour, 0, hour),
            "default.days[1] is \"saturday\", not one of Mon, Tue, Wed, Thu, Fri, Sat, Sun; default.days[2] is \"SAT\", \
             not one of Mon, Tue, Wed, Thu, Fri, Sat, Sun; default.days[4] is not a string",
        ),
        (
            json!({"days": ["Saturday"], "begin": "20:00:00Z", "end": "21:00:00Z"}),
            of([false; 7], 20 * hour, 0, hour),
            "default.days[0] is \"Saturday\", not one of Mon, Tue, Wed, Thu, Fri, Sat, Sun",
        ),
        (
            json!({"days": ["Sat"], "begin": "2026-01-31T20:00:00+02:00", "end": "21:00:00+02:00"}),
            of(saturday, 20 * hour, 2 * hour, hour),
            "default.begin has a date, which has no effect in a window with days",
        ),
        (json!({"days": ["Sat"], "begin": "9:00:00.5Z", "end": "10:00:00Z"}), of(saturday, 9 * hour, 0, hour), ""),
        (
            json!({"days": ["Sat"], "begin": "20:00:00Z"}),
            of(saturday, 20 * hour, 0, 4 * hour),
            "default.end is missing, which means midnight in UTC",
        ),
        (
            json!({"days": ["Sat"]}),
            of(saturday, 0, 0, 24 * hour),
            "default.begin is missing, which means midnight in UTC; default.end is missing, which means midnight in UTC",
        ),
        (
            json!({"days": ["Sat"], "begin": "20:00:00Z", "end": "21:00:00Z", "comment": "quiet"}),
            of(saturday, 20 * hour, 0, hour),
            "default has the unknown member \"comment\"",
        ),
    ] {
        let policy = read(&json!({"default": default})).unwrap();
        assert_eq!((policy.default, policy.mistakes.to_string().as_str()), (window, message), "{default}");
    }
}

#[test]
fn many_mistakes_are_counted_and_the_first_ones_are_named() {
    let long = "x".repeat(1_000);
    let rules: Vec<_> = (0..100).map(|_| json!({long.as_str(): 1})).collect();
    let mistakes = read(&json!({"rules": rules})).unwrap().mistakes;
    let text = mistakes.to_string();
    assert_eq!(mistakes.count(), 100);
    assert!(text.ends_with("; and 80 more") && text.len() < 2_500, "{text}");
}

#[test]
fn absent_members_and_the_case_of_names_do_not_matter() {
    for empty in [json!({}), json!({"rules": null, "default": null}), json!({"rules": []})] {
        let policy = read(&empty).unwrap();
        assert!(policy.rules.is_empty() && policy.default.is_none());
    }
    let window = json!({"Days": null, "BEGIN": "2026-11-28T20:00:00Z", "end": "2026-11-28T21:00:00+01:00"});
    let policy =
        json!({"Rules": [{"Match": {"globalAccountId": "a", "PLAN": "", "region": null}, "windows": [window]}, {}]});
    let policy = read(&policy).unwrap();
    let rule = &policy.rules[0];
    let attributes: Vec<_> = rule.expressions.iter().map(|(attribute, _)| *attribute).collect();
    assert_eq!(attributes, [Attribute::GlobalAccountId]);
    assert_eq!(rule.windows, [Window::Once { begin: 1_795_896_000, end: 1_795_896_000 }]);
    assert!(policy.rules[1].expressions.is_empty() && policy.rules[1].windows.is_empty());
}

#[test]
fn end_of_a_weekly_window_is_the_first_such_time_after_its_begin() {
    for (begin, end, length) in [
        ("20:00:00Z", "20:00:01Z", 1),
        ("20:00:00Z", "23:30:00Z", 12_600),
        ("20:00:00Z", "00:00:00Z", 14_400),
        ("20:00:00Z", "20:00:00Z", DAY),
        ("20:00:00Z", "19:59:59Z", DAY - 1),
        ("20:00:00+02:00", "20:00:00Z", 7_200),
        ("23:00:00-12:00", "01:00:00+14:00", DAY),
        ("22:00:00-09:30", "22:00:00-10:30", 3_600),
    ] {
        let policy = read(&json!({"default": {"days": ["Sun", "Mon"], "begin": begin, "end": end}})).unwrap();
        let Some(Window::Weekly { days, length: found, .. }) = policy.default else { panic!("{begin}") };
        assert_eq!((found, days), (length, [true, false, false, false, false, false, true]), "{begin} to {end}");
    }
}

#[test]
fn a_list_of_many_accounts_fits() {
    let account = |n: usize| format!("{n:08}-1234-4321-abcd-0123456789ab");
    let accounts: Vec<_> = (0..400).map(account).collect();
    let policy =
        read(&json!({"rules": [{"match": {"globalAccountID": format!("^({})$", accounts.join("|"))}}]})).unwrap();
    let (_, expression) = &policy.rules[0].expressions[0];
    assert!(expression.is_match(accounts[399].as_bytes()) && !expression.is_match(account(400).as_bytes()));
}

#[test]
fn runtimes_of_a_rule_without_a_readable_window_do_not_get_the_default_one() {
    let window = |days: Value, begin: &str, end: &str| json!({"days": days, "begin": begin, "end": end});
    let default = window(json!(["Sat"]), "00:00:00Z", "23:00:00Z");
    let state = |windows: &Value| {
        let rule = json!({"match": {"plan": "prod"}, "windows": windows});
        let policy = read(&json!({"rules": [rule], "default": default})).unwrap();
        let labels = serde_json::from_value(json!({"kyma-project.io/broker-plan-name": "prod"})).unwrap();
        policy.state(&labels, 1_200, "2026-11-28T12:00:00Z".parse().unwrap())
    };
    let closed = WindowState::Unknown(NoWindowError::NoneFound);
    let broken = window(json!(["Sun"]), "22:00:00", "23:00:00Z");
    let later = window(json!(["Sun"]), "22:00:00Z", "23:00:00Z");
    for unreadable in [json!([broken]), json!("Sun"), json!(vec![&later; 101])] {
        assert_eq!(state(&unreadable), closed, "{unreadable}");
    }
    let opens = |state| matches!(state, WindowState::Opens(_));
    assert!(opens(state(&json!([broken, later]))), "one that can be read suffices");
    for none in [json!([]), json!([{}]), json!(null)] {
        assert_eq!(state(&none), WindowState::Open, "{none}");
    }
}

#[test]
fn example_of_the_documentation_is_a_policy() {
    let page = include_str!("../../../../../docs/operations/maintenance-windows.md");
    let example = page.split("```json\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let policy = policy_of(example.as_bytes()).unwrap();
    let at = |labels: Value, now: &str| {
        let labels = serde_json::from_value(labels).unwrap();
        policy.state(&labels, 1_200, now.parse().unwrap()).to_string()
    };
    let saturday = "2026-11-28T20:30:00Z";
    assert_eq!(at(json!({"kyma-project.io/broker-plan-name": "free"}), "2026-11-25T00:50:00Z"), "open");
    let account = json!({"kyma-project.io/global-account-id": "1a2b3c4d-0000"});
    assert_eq!(at(account, saturday), "2026-12-20T04:00:00Z");
    assert_eq!(at(json!({"kyma-project.io/region": "westeurope"}), saturday), "2026-11-28T21:00:00Z");
    assert_eq!(at(json!({"kyma-project.io/platform-region": "cf-eu20"}), "2026-11-30T02:00:00Z"), "open");
    assert_eq!(at(json!({}), saturday), "open");
}
