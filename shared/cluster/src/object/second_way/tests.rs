use serde_json::json;

use super::*;

const MANAGER: &str = "m";

fn object(content: &Value, managed: &Value) -> DynamicObject {
    let mut object = content.clone();
    object["metadata"]["managedFields"] = managed.clone();
    serde_json::from_value(object).unwrap()
}

fn entry(manager: &str, operation: &str, set: &Value) -> Value {
    json!({"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": set})
}

/// A refusal with causes of a reason, a field and a message.
fn refusal(causes: &[(&str, &str, &str)]) -> Status {
    let causes: Vec<_> = causes
        .iter()
        .map(|(reason, field, message)| json!({"reason": reason, "field": field, "message": message}))
        .collect();
    let status = json!({"message": "invalid", "reason": "Invalid", "code": 422, "details": {"causes": causes}});
    serde_json::from_value(status).unwrap()
}

/// Selects among all ways; an object may be recreated if it has no finalizer.
fn choose(refusal: &Status, desired: &Value, live: &DynamicObject) -> Option<SecondWay> {
    let metrics = FallbackMetrics::default();
    let may = |live: &DynamicObject| live.metadata.finalizers.is_none();
    let ways = SecondWays {
        metrics: &metrics,
        is_own_service: &|namespace, name| (namespace, name) == ("ns", "own"),
        recreates: Some(&may),
        takes_over: false,
    };
    assert_eq!(select(None, MANAGER, refusal, desired, live), None, "only modules' objects");
    assert!(may_exist(Some(&ways), refusal) && !may_exist(None, refusal));
    select(Some(&ways), MANAGER, refusal, desired, live)
}

/// Set of our fields after the answer.
fn taken(way: Option<SecondWay>, expected: Fallback) -> Value {
    let Some(SecondWay::Correct(fallback, correction)) = way else { panic!("no correction: {way:?}") };
    assert_eq!(fallback, expected);
    let operations = json!(correction.operations());
    let entries = operations[0]["value"].as_array().unwrap();
    entries.iter().find(|entry| entry["manager"] == MANAGER && entry["operation"] == "Apply").unwrap()["fieldsV1"]
        .clone()
}

const FORBIDDEN: &str = "FieldValueForbidden";
const INVALID: &str = "FieldValueInvalid";

#[test]
fn default_that_excludes_a_desired_field_becomes_ours() {
    let desired = json!({"spec": {"strategy": {"type": "Recreate"}}});
    let live =
        json!({"spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}, "paused": true}});
    let managed = json!([entry(MANAGER, "Apply", &json!({"f:spec": {"f:strategy": {"f:type": {}}}}))]);
    let field = "spec.strategy.rollingUpdate";
    let refused = refusal(&[(FORBIDDEN, field, "may not be specified when strategy `type` is 'Recreate'")]);
    let found = choose(&refused, &desired, &object(&live, &managed));
    let strategy = json!({"f:rollingUpdate": {}, "f:type": {}});
    assert_eq!(taken(found, Fallback::Union), json!({"f:spec": {"f:strategy": strategy}}));

    // A user set it, or the module still does.
    let theirs =
        entry("kubectl-edit", "Update", &json!({"f:spec": {"f:strategy": {"f:rollingUpdate": {"f:maxSurge": {}}}}}));
    let managed = json!([managed[0], theirs]);
    assert_eq!(choose(&refused, &desired, &object(&live, &managed)), None);
    let mut both = desired.clone();
    both["spec"]["strategy"]["rollingUpdate"] = json!({"maxSurge": 1});
    assert_eq!(choose(&refused, &both, &object(&live, &json!([]))), None);
    // The field is not there.
    assert_eq!(choose(&refused, &desired, &object(&json!({"spec": {"strategy": {}}}), &json!([]))), None);
    let leaving = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": live["spec"]});
    assert_eq!(choose(&refused, &desired, &object(&leaving, &json!([]))), None);
}

#[test]
fn default_of_an_element_is_found_whichever_field_is_named() {
    let desired =
        json!({"spec": {"volumes": [{"name": "new", "secret": {}}, {"name": "x", "configMap": {"name": "c"}}]}});
    let live = json!({"spec": {"volumes": [{"name": "x", "emptyDir": {}}, {"name": "theirs", "emptyDir": {}}]}});
    let ours = json!({"f:spec": {"f:volumes": {"k:{\"name\":\"x\"}": {".": {}, "f:name": {}}}}});
    let managed = json!([entry(MANAGER, "Apply", &ours)]);
    for (index, field) in [(0, "emptyDir"), (1, "configMap"), (7, "configMap")] {
        let field = format!("spec.volumes[{index}].{field}");
        let refused = refusal(&[(FORBIDDEN, &field, "may not specify more than 1 volume type")]);
        let found = choose(&refused, &desired, &object(&live, &managed));
        let element = json!({".": {}, "f:name": {}, "f:emptyDir": {}});
        let expected = json!({"f:spec": {"f:volumes": {"k:{\"name\":\"x\"}": element}}});
        assert_eq!(taken(found, Fallback::Union), expected, "{field}");
    }
    // The fields of a list that is no map are replaced together.
    let atomic = json!([entry(MANAGER, "Apply", &json!({"f:spec": {"f:volumes": {}}}))]);
    let refused = refusal(&[(FORBIDDEN, "spec.volumes[0].emptyDir", "")]);
    assert_eq!(choose(&refused, &desired, &object(&live, &atomic)), None);
}

#[test]
fn members_of_a_refused_object_are_looked_at_and_its_neighbours_only_if_it_is_forbidden() {
    let desired = json!({"spec": {"source": {"url": "u"}, "a": 1}});
    let live = json!({"spec": {"source": {"service": {"port": 443}}, "default": 1}});
    for (reason, expected) in [
        (INVALID, json!({"f:spec": {"f:source": {"f:service": {}}}})),
        (FORBIDDEN, json!({"f:spec": {"f:source": {"f:service": {}}, "f:default": {}}})),
    ] {
        let found = choose(&refusal(&[(reason, "spec.source", "exactly one")]), &desired, &object(&live, &json!([])));
        assert_eq!(taken(found, Fallback::Union), expected);
    }
    for field in ["", "metadata.labels", "status.phase", "spec.a.b.c", "spec[a", "[0].a"] {
        assert_eq!(choose(&refusal(&[(INVALID, field, "")]), &desired, &object(&live, &json!([]))), None, "{field}");
    }
}

#[test]
fn rest_of_a_dropped_conversion_becomes_ours_if_it_was() {
    let desired =
        json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "spec": {"group": "g"}});
    let causes = [
        ("FieldValueRequired", "spec.conversion.strategy", "Required value"),
        (FORBIDDEN, "spec.conversion.webhookClientConfig", "should not be set when strategy is not set to Webhook"),
    ];
    let live = |service: &str| {
        let client = json!({"caBundle": "Cg==", "service": {"namespace": "ns", "name": service}});
        json!({"spec": {"group": "g", "conversion": {"strategy": "Webhook", "webhook": {"clientConfig": client}}}})
    };
    let injected = json!({"f:spec": {"f:conversion": {"f:webhook": {"f:clientConfig": {"f:caBundle": {}}}}}});
    let injector = entry("cainjector", "Update", &injected);
    let before = entry(MANAGER, "Apply", &json!({"f:spec": {"f:group": {}, "f:conversion": {"f:strategy": {}}}}));
    let now = entry(MANAGER, "Apply", &json!({"f:spec": {"f:group": {}}}));
    for (entry, service, is_ours) in [(&before, "theirs", true), (&now, "own", true), (&now, "theirs", false)] {
        let found = choose(&refusal(&causes), &desired, &object(&live(service), &json!([entry, injector])));
        if !is_ours {
            assert_eq!(found, None);
            continue;
        }
        let Some(SecondWay::Correct(_, correction)) = &found else { panic!("{found:?}") };
        let operations = json!(correction.operations());
        assert_eq!(operations[0]["value"].as_array().unwrap().len(), 1, "the entry of the injector had nothing else");
        let expected = json!({"f:spec": {"f:group": {}, "f:conversion": {}}});
        assert_eq!(taken(found, Fallback::Conversion), expected);
    }
    let mut kept = desired.clone();
    kept["spec"]["conversion"] = json!({"strategy": "Webhook"});
    assert_eq!(choose(&refusal(&causes), &kept, &object(&live("own"), &json!([before, injector]))), None);
}

#[test]
fn immutable_field_leads_to_a_recreation_where_that_is_permitted() {
    let desired = json!({"spec": {"a": 1}});
    let live = json!({"spec": {"a": 2, "default": 1}});
    for (field, message) in [
        ("spec.selector", "Invalid value: …: field is immutable"),
        ("spec.clusterIPs[0]", "Invalid value: [\"None\"]: may not change once set"),
        ("spec.clusterIPs[0]", "Invalid value: \"None\": may not be set to 'None' for LoadBalancer services"),
        ("spec", "Forbidden: updates to statefulset spec for fields other than 'replicas' are forbidden"),
        ("parameters", "Forbidden: updates to parameters are forbidden."),
        ("value", "Forbidden: may not be changed in an update."),
        ("roleRef", "Invalid value: …: cannot change roleRef"),
        ("data", "Forbidden: field is immutable when `immutable` is set"),
    ] {
        let refused = refusal(&[(FORBIDDEN, field, message)]);
        assert_eq!(choose(&refused, &desired, &object(&live, &json!([]))), Some(SecondWay::Recreate), "{message}");
        let mut kept = live.clone();
        kept["metadata"] = json!({"finalizers": ["f"]});
        assert_eq!(choose(&refused, &desired, &object(&kept, &json!([]))), None, "{message}");
    }
}

#[test]
fn entries_of_a_version_that_cannot_be_converted_are_moved_for_every_writer() {
    let desired = json!({"apiVersion": "x.test/v2", "kind": "Sample", "spec": {"a": 1}});
    let live = json!({"spec": {"a": 1}});
    let mut old = entry(MANAGER, "Apply", &json!({"f:spec": {"f:a": {}}}));
    old["apiVersion"] = "x.test/v1".into();
    let mut theirs = entry("operator", "Update", &json!({"f:status": {"f:b": {}}}));
    theirs["apiVersion"] = "x.test/v1".into();
    theirs["subresource"] = "status".into();
    let live = object(&live, &json!([old, theirs]));
    let status = |code: u16, message: &str| Status::failure(message, "").with_code(code);
    for message in
        [".spec.b: field not declared in schema", "request to convert CR to an invalid group/version: x.test/v1"]
    {
        let refused = status(500, message);
        let found = select(None, MANAGER, &refused, &desired, &live);
        let Some(SecondWay::Correct(Fallback::FieldVersion, correction)) = found else { panic!("{found:?}") };
        let entries = json!(correction.operations())[0]["value"].clone();
        let versions: Vec<_> = entries.as_array().unwrap().iter().map(|entry| &entry["apiVersion"]).collect();
        assert_eq!(versions, ["x.test/v2", "x.test/v2"]);
        assert_eq!(entries[1]["subresource"], "status");
    }
    let body =
        "failed to create typed patch object (ns/n; x.test/v2, Kind=Sample): .spec.c: field not declared in schema";
    for refused in
        [status(500, body), status(500, "etcdserver: no leader"), status(422, "field not declared in schema")]
    {
        assert!(!may_exist(None, &refused));
        assert_eq!(select(None, MANAGER, &refused, &desired, &live), None);
    }
    let typed = json!({"apiVersion": "apps/v1", "kind": "Deployment"});
    assert_eq!(select(None, MANAGER, &status(500, ".spec.b: field not declared in schema"), &typed, &live), None);
}
