use serde_json::json;

use super::*;

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
fn mistakes_are_refused_with_their_place() {
    let once = json!({"begin": "2026-11-28T20:00:00Z", "end": "2026-11-29T00:00:00Z"});
    let weekly = |days: Value, begin: &str, end: &str| json!({"default": {"days": days, "begin": begin, "end": end}});
    let rule = |rule: Value| json!({"rules": [{}, rule]});
    let plan = |expression: Value| rule(json!({"match": {"plan": expression}, "windows": [once]}));
    let of_day = " is not a time such as 20:00:00Z or 20:00:00+02:00, which a window with days needs";
    let timestamp = " is not a time such as 2026-11-28T20:00:00Z, which a window without days needs";
    for (policy, message) in [
        (json!([]), "the policy is not an object"),
        (json!({"rule": []}), "the policy has the unknown member \"rule\""),
        (json!({"rules": [], "Rules": []}), "the policy has the member \"rules\" twice"),
        (json!({"rules": {}}), "rules is not a list"),
        (json!({"rules": ["x"]}), "rules[0] is not an object"),
        (json!({"rules": vec![json!({}); 501]}), "rules has more than 500 entries"),
        (rule(json!({"matches": {}})), "rules[1] has the unknown member \"matches\""),
        (rule(json!({"match": []})), "rules[1].match is not an object"),
        (rule(json!({"match": {"regoin": "eu"}})), "rules[1].match has the unknown member \"regoin\""),
        (rule(json!({"windows": once})), "rules[1].windows is not a list"),
        (rule(json!({"windows": vec![once.clone(); 101]})), "rules[1].windows has more than 100 entries"),
        (rule(json!({"windows": [once, {"end": "20:00:00Z"}]})), "rules[1].windows[1].begin is not a string"),
        (plan(json!(1)), "rules[1].match.plan is not a string"),
        (plan(json!("trial|(free")), "rules[1].match.plan is not a usable regular expression: regex parse error"),
        (plan(json!("(?=free)")), "rules[1].match.plan is not a usable regular expression: regex parse error"),
        (
            plan(json!("(a{1000}){1000}")),
            "rules[1].match.plan is not a usable regular expression: Compiled regex exceeds",
        ),
        (plan(json!("(".repeat(40) + &")".repeat(40))), "rules[1].match.plan is not a usable regular expression"),
        (plan(json!("a".repeat(16_385))), "rules[1].match.plan has more than 16384 bytes"),
        (json!({"default": [once]}), "default is not an object"),
        (json!({"default": {}}), "default.begin is not a string"),
        (json!({"default": {"timeBegin": "20:00:00Z"}}), "default has the unknown member \"timeBegin\""),
        (json!({"default": {"days": "Sat", "begin": "", "end": ""}}), "default.days is not a list"),
        (json!({"default": {"begin": "20:00:00Z", "end": "21:00:00Z"}}), &format!("default.begin{timestamp}")),
        (
            json!({"default": {"begin": "2026-11-28T20:00:00Z", "end": "2026-11-31T20:00:00Z"}}),
            &format!("default.end{timestamp}"),
        ),
        (
            json!({"default": {"begin": "2026-11-28T20:00:00", "end": "2026-11-28T21:00:00Z"}}),
            &format!("default.begin{timestamp}"),
        ),
        (weekly(json!(["Sat", "saturday"]), "20:00:00Z", "21:00:00Z"), "default.days[1] is not one of Mon, Tue"),
        (weekly(json!([6]), "20:00:00Z", "21:00:00Z"), "default.days[0] is not a string"),
        (weekly(json!(vec!["Sat"; 8]), "20:00:00Z", "21:00:00Z"), "default.days has more than 7 entries"),
        (weekly(json!(["Sat"]), "2026-11-28T20:00:00Z", "21:00:00Z"), &format!("default.begin{of_day}")),
        (weekly(json!(["Sat"]), "20:00:00", "21:00:00Z"), &format!("default.begin{of_day}")),
        (weekly(json!(["Sat"]), "20:00:00 Europe/Berlin", "21:00:00Z"), &format!("default.begin{of_day}")),
        (weekly(json!(["Sat"]), "20:00:00Z", "24:00:00Z"), &format!("default.end{of_day}")),
        (weekly(json!(["Sat"]), "20:00:00Z", "20:60:00Z"), &format!("default.end{of_day}")),
        (weekly(json!(["Sat"]), "20:00:00Z", "20:00:60Z"), &format!("default.end{of_day}")),
        (weekly(json!(["Sat"]), "20:00:00Z", "8:00:00ZZ"), &format!("default.end{of_day}")),
        (weekly(json!(["Sat"]), "20:00:00Z", "20:00:00+2:00"), &format!("default.end{of_day}")),
        (weekly(json!(["Sat"]), "20:00:00Z", "20:00:00+02"), &format!("default.end{of_day}")),
        (weekly(json!(["Sat"]), "20:00:00Z", "20:00:00é"), &format!("default.end{of_day}")),
        (weekly(json!(["Sat"]), "20:00:0é", "20:00:00Z"), &format!("default.begin{of_day}")),
    ] {
        let error = read(&policy).err().unwrap_or_default();
        assert!(error.starts_with(message), "{policy}: {error:?} is not {message:?}");
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
