//! Seeds of the bytes that an agent reads from a receiver and an API server.

use serde_json::{Value, json};
use tidewatch_api::names::{
    AGENT_OBJECT, ENROLMENT_URL_KEY, PLAN_KEY, RECEIVER_URL_KEY, RUNTIME_ID_KEY, TRUST_BUNDLE_KEY,
};
use tidewatch_contract::{
    certificate::trust_revision,
    problem::{Kind, Problem},
};
use tidewatch_kit::tls;

use super::{EPOCH, IDENTITY, RuntimeIdentity, plan};

/// Valid inputs of a target; none for a name that is not one of the agent's targets.
pub(super) fn texts(target: &str) -> Vec<String> {
    match target {
        "refusal" => refusals(),
        "answers" => responses(),
        "certificate_answer" | "trust_answer" => {
            let RuntimeIdentity { chain, roots: bundle, .. } = &*IDENTITY;
            let roots = tls::certificates(bundle.as_bytes()).expect("these are certificates");
            let answer = json!({"chain": chain, "trustBundle": bundle, "trustRevision": trust_revision(&roots)});
            vec![answer.to_string()]
        }
        "watch" => watches(),
        "agent_config" => configs(),
        "discovery" => vec![
            r#"{"kind":"APIGroup","name":"operator.kyma-project.io","preferredVersion":{"groupVersion":"operator.kyma-project.io/v1beta2","version":"v1beta2"}}"#.to_owned(),
            r#"{"kind":"APIResourceList","resources":[{"name":"kymas","kind":"Kyma","verbs":["list"]},{"name":"kymas/status","kind":"Kyma"},{"name":"others"}]}"#.to_owned(),
            format!(r#"{{"resources":[{{"name":"kymas","kind":"{}"}}]}}"#, "K".repeat(254)),
        ],
        _ => Vec::new(),
    }
}

fn lines(lines: &[Value]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn problem(kind: Kind, status: u16) -> Value {
    serde_json::to_value(Problem::new(kind, "title", status, "detail")).expect("a problem is JSON")
}

fn refusals() -> Vec<String> {
    let mut too_large = problem(Kind::Other, 413);
    too_large["maxBytes"] = json!(10_000);
    too_large["maxEvents"] = json!(7);
    vec![
        format!("401\nDate: Fri, 15 Jan 2027 08:05:00 GMT\n\n{}", problem(Kind::Clock, 401)),
        format!("401\ncontent-type: application/problem+json\n\n{}", problem(Kind::Replay, 401)),
        format!("401\n\n{}", problem(Kind::Certificate, 401)),
        format!("413\n\n{too_large}"),
        format!("429\nRetry-After: 7\n\n{}", problem(Kind::Other, 429)),
        "503\nRetry-After: Fri, 15 Jan 2027 08:05:00 GMT\n\n".to_owned(),
        "503\nRetry-After: 0\n\n".to_owned(),
        "400\n\n".to_owned(),
    ]
}

fn responses() -> Vec<String> {
    let taken = |instance: &str, accepted: u64, settled: Value, refused: Value| {
        json!({"instance": instance, "accepted": accepted, "since": 1, "settled": settled, "refused": refused,
               "heartbeatSeconds": 30})
    };
    let beat = |instance: &str, since: Option<u64>, settled: Value| {
        json!({"instance": instance, "settled": settled, "since": since, "heartbeatSeconds": 30, "planRevision": "1",
               "trustRevision": "0000000000000001", "serverTime": "2027-01-15T08:00:00Z", "resend": ["w", "f"], "renew": true})
    };
    let [one, other] = ["000000000000000a", "000000000000000b"];
    let refused = |sequence: u64, reason: &str| json!([{"id": format!("{EPOCH}-{sequence}"), "reason": reason}]);
    vec![
        format!(
            "202 {}\n200 {}\n202 {}\n",
            taken(one, 8, json!({}), json!([])),
            beat(one, Some(1), json!({"w": 4, "f": 8})),
            taken(one, 12, json!({"f": 12}), json!([])),
        ),
        format!(
            "202 {}\n202 {}\n202 {}\n200 {}\n",
            taken(one, 8, json!({}), refused(2, "malformed")),
            taken(one, 8, json!({}), refused(1, "unknown-watch")),
            taken(other, 9, json!({}), refused(9, "too-large")),
            beat(other, Some(100), json!({})),
        ),
        format!("400\n400\n400\n400\n413 {}\n413\n", json!({"maxBytes": 900, "maxEvents": 2})),
        format!("401 {}\n503\n401 {}\n", problem(Kind::Signature, 401), problem(Kind::Certificate, 401)),
    ]
}

fn watches() -> Vec<String> {
    let metadata = |name: &str, version: u32, generation: u32| {
        json!({"namespace": "kyma-system", "name": name, "uid": "0a1b2c3d-0000-4000-8000-00000000000f", "generation": generation,
               "resourceVersion": version.to_string(), "labels": {"a": "b"}, "annotations": null, "finalizers": ["f"],
               "ownerReferences": [{"apiVersion": "v1", "kind": "K", "name": "n", "uid": "o", "controller": true}],
               "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {}}}]})
    };
    let item = |name: &str, version: u32, generation: u32| json!({"kind": "PartialObjectMetadata", "metadata": metadata(name, version, generation)});
    let page = |version: u32, token: &str, items: &[Value]| {
        json!({"kind": "PartialObjectMetadataList", "metadata": {"resourceVersion": version.to_string(), "continue": token},
               "items": items})
    };
    let line = |kind: &str, object: Value| json!({"type": kind, "object": object});
    let gone = json!({"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410});
    let busy = json!({"kind": "Status", "status": "Failure", "reason": "TooManyRequests", "code": 429});
    let bookmark = |version: &str| line("BOOKMARK", json!({"metadata": {"resourceVersion": version}}));
    vec![
        lines(&[
            page(7, "x", &[item("a", 3, 1), item("b", 4, 1)]),
            page(7, "", &[item("c", 5, 1)]),
            line("MODIFIED", item("a", 8, 2)),
            line("DELETED", item("b", 9, 1)),
            bookmark("12"),
            line("ERROR", gone),
            page(13, "", &[item("a", 8, 2)]),
        ]),
        format!(
            "{}\n{}\n{}",
            lines(&[page(7, "", &[item("a", 3, 1)]), line("ADDED", item("b", 8, 1))]),
            lines(&[line("MODIFIED", item("a", 9, 1)), line("ERROR", busy), line("ADDED", item("d", 10, 1))]),
            lines(&[bookmark("11"), line("ADDED", item("e", 6, 1))]),
        ),
        // Two objects that every receiver refuses, with a valid one in between.
        lines(&[
            page(1, "", &[]),
            line("ADDED", item("", 2, 1)),
            line("ADDED", json!({"metadata": {"name": "a", "resourceVersion": "3"}})),
            line("ADDED", json!({"metadata": {"resourceVersion": "4"}})),
        ]),
        lines(&(0..9_u32).fold(
            vec![json!({"metadata": {"resourceVersion": "1"}, "items": null})],
            |mut all, number| {
                all.push(line("ADDED", item(&format!("o{number}"), 2 + number, 1)));
                all
            },
        )),
    ]
}

fn configs() -> Vec<String> {
    let config = |version: u32, receiver: &str, bundle: &str, plan: &Value| {
        json!({"metadata": {"name": AGENT_OBJECT, "namespace": "kyma-system", "resourceVersion": version.to_string()},
               "data": {PLAN_KEY: plan.to_string(), RECEIVER_URL_KEY: receiver, ENROLMENT_URL_KEY: "https://kcp.test:8444",
                        RUNTIME_ID_KEY: "r-1", TRUST_BUNDLE_KEY: bundle}})
    };
    let good = |version| config(version, "https://kcp.test:8443", &IDENTITY.roots, &plan());
    let line = |kind: &str, object: Value| json!({"type": kind, "object": object});
    vec![
        lines(&[json!({"metadata": {"resourceVersion": "3"}, "items": [good(2)]})]),
        lines(&[
            json!({"metadata": {"resourceVersion": "3"}, "items": []}),
            line("ADDED", good(4)),
            line("MODIFIED", config(5, "http://kcp.test", &IDENTITY.roots, &plan())),
            line("MODIFIED", config(6, "https://kcp.test:8445", "", &json!({"revision": "2", "watches": []}))),
            line("DELETED", config(7, "", "", &json!({}))),
        ]),
    ]
}
