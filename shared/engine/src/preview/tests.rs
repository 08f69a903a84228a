use serde_json::json;

use super::*;

fn object(api_version: &str, kind: &str, namespace: Option<&str>, name: &str) -> Value {
    json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": namespace}})
}

fn with(mut object: Value, member: &str, value: Value) -> Value {
    object[member] = value;
    object
}

fn deployment(image: &str) -> Value {
    let spec = json!({"selector": {"matchLabels": {"a": "b"}}, "template": {"spec": {"containers": [{"name": "manager", "image": image}]}}});
    with(object("apps/v1", "Deployment", Some("kyma-system"), "manager"), "spec", spec)
}

fn definition(scope: &str, versions: Value) -> Value {
    let spec = json!({"group": "example.test", "names": {"kind": "Sample", "plural": "samples"}, "scope": scope, "versions": versions});
    with(object("apiextensions.k8s.io/v1", "CustomResourceDefinition", None, "samples.example.test"), "spec", spec)
}

fn version(name: &str, properties: Value) -> Value {
    json!({"name": name, "served": true, "storage": true,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}}})
}

fn content(objects: impl Into<Vec<Value>>) -> VersionContent {
    VersionContent { objects: objects.into(), ..VersionContent::default() }
}

fn upgrade(from: impl Into<Vec<Value>>, to: impl Into<Vec<Value>>) -> Upgrade {
    Upgrade::between(&content(from), &content(to)).unwrap()
}

fn names(objects: &[ObjectIdentity]) -> Vec<String> {
    objects.iter().map(ObjectIdentity::to_string).collect()
}

#[test]
fn applied_objects_have_what_the_module_decides() {
    let secret = object("v1", "Secret", None, "s");
    let foreign = object("monitoring.test/v1", "Monitor", None, "m");
    let role = object("rbac.authorization.k8s.io/v1", "ClusterRole", Some("ns"), "r");
    let sample = object("example.test/v1", "Sample", Some("ns"), "c");
    let crd = definition("Cluster", json!([version("v1", json!({}))]));
    let status = with(deployment("origin.test/manager:1"), "status", json!({"replicas": 1}));
    let images = vec!["mirror.test/x/manager:1".to_owned()];
    let version = VersionContent { images, ..content([sample, status, foreign, role, secret, crd]) };
    let applied = version.applied().unwrap();
    let bodies: Vec<_> = applied.bodies().collect();
    let places: Vec<_> = bodies.iter().map(|body| (&body["kind"], body["metadata"].get("namespace"))).collect();
    assert_eq!(
        places,
        [
            (&json!("CustomResourceDefinition"), None),
            (&json!("Monitor"), Some(&Value::Null)),
            (&json!("ClusterRole"), None),
            (&json!("Secret"), Some(&json!("default"))),
            (&json!("Deployment"), Some(&json!("kyma-system"))),
            (&json!("Sample"), None),
        ]
    );
    let manager = bodies[4];
    assert_eq!(manager["spec"]["template"]["spec"]["containers"][0]["image"], "mirror.test/x/manager:1");
    assert_eq!(manager.get("status"), None);
    let metadata = &bodies[3]["metadata"];
    assert_eq!(
        (&metadata["labels"], &metadata["annotations"]),
        (
            &json!({label::MANAGED_BY: "kyma", label::PART_OF: "Kyma"}),
            &json!({annotation::DISCLAIMER: annotation::DISCLAIMER_TEXT})
        ),
        "the owner is left out"
    );
    assert_eq!(Vec::from_iter(&applied.undecided), ["Monitor.monitoring.test"]);
    assert_eq!(applied.manager.as_ref().unwrap().to_string(), "Deployment kyma-system/manager");
}

#[test]
fn object_occurs_once_whatever_its_api_version_and_spelling_of_the_namespace() {
    let older = with(object("autoscaling/v1", "HorizontalPodAutoscaler", Some("ns"), "h"), "spec", json!({"a": 1}));
    let newer = object("autoscaling/v2", "HorizontalPodAutoscaler", Some("ns"), "h");
    let map = object("v1", "ConfigMap", None, "m");
    let same = object("v1", "ConfigMap", Some("default"), "m");
    let version = content([older.clone(), newer, map, same]);
    assert_eq!(version.packed().count(), 3, "an absent namespace is one of its own in the artefact");
    let applied = version.applied().unwrap();
    assert_eq!(applied.bodies().count(), 2);
    assert_eq!(applied.bodies().next().unwrap()["spec"], older["spec"], "the first one counts");
}

#[test]
fn upgrade_lists_each_object_once() {
    let map = |value: &str| with(object("v1", "ConfigMap", Some("ns"), "m"), "data", json!({"k": value}));
    let kept = object("v1", "ServiceAccount", Some("ns"), "kept");
    let old = object("v1", "Secret", Some("ns"), "old");
    let new = object("v1", "Secret", Some("ns"), "new");
    let found = upgrade([map("1"), kept.clone(), old, deployment("r/m:1")], [kept, map("2"), new, deployment("r/m:2")]);
    assert_eq!(
        (names(&found.added), names(&found.removed)),
        (vec!["Secret ns/new".into()], vec!["Secret ns/old".into()])
    );
    let changed: Vec<_> =
        found.changed.iter().map(|it| (it.object.to_string(), it.fields[0].path.as_str(), it.fields.len())).collect();
    assert_eq!(
        changed,
        [
            ("ConfigMap ns/m".to_owned(), "data.k", 1),
            ("Deployment kyma-system/manager".to_owned(), "spec.template.spec.containers[manager].image", 1),
        ]
    );
    assert_eq!((found.unchanged, found.risks.len(), found.is_change()), (1, 0, true));
    // Another API version is a change of the object; an explicit default namespace none.
    let found = upgrade(
        [object("autoscaling/v1", "HorizontalPodAutoscaler", None, "h")],
        [object("autoscaling/v2", "HorizontalPodAutoscaler", Some("default"), "h")],
    );
    assert_eq!((found.changed.len(), &*found.changed[0].fields[0].path), (1, "apiVersion"));
    let same = upgrade([object("v1", "ConfigMap", None, "h")], [object("v1", "ConfigMap", Some("default"), "h")]);
    assert!(!same.is_change() && same.unchanged == 1, "{same:?}");
}

#[test]
fn image_that_only_the_component_descriptor_changes_is_a_change() {
    let at = |registry: &str| VersionContent {
        images: vec![format!("{registry}/manager:1")],
        ..content([deployment("origin.test/manager:1")])
    };
    let found = Upgrade::between(&at("a.test"), &at("b.test")).unwrap();
    let field = &found.changed[0].fields[0];
    assert_eq!(
        (field.before.as_ref(), field.after.as_ref()),
        (Some(&json!("a.test/manager:1")), Some(&json!("b.test/manager:1")))
    );
}

#[test]
fn default_cr_and_manager_are_compared() {
    let at = |replicas: u8, manager: &str| {
        let manager = json!({"group": "apps", "version": "v1", "kind": "Deployment", "name": manager});
        let default_cr = Some(json!({"kind": "Sample", "spec": {"replicas": replicas}}));
        let objects = vec![deployment("r/m:1")];
        VersionContent {
            objects,
            images: Vec::new(),
            default_cr,
            manager: Some(serde_json::from_value(manager).unwrap()),
        }
    };
    assert!(!Upgrade::between(&at(1, "manager"), &at(1, "manager")).unwrap().is_change());
    let found = Upgrade::between(&at(1, "manager"), &at(2, "other")).unwrap();
    assert_eq!(found.default_cr[0].path, "spec.replicas");
    let ManagerChange { before, after } = found.manager.as_ref().unwrap();
    let texts = [before, after].map(|it| it.as_ref().unwrap().to_string());
    assert_eq!(texts, ["Deployment kyma-system/manager", "Deployment kyma-system/other"]);
    assert!(found.is_change() && found.changed.is_empty());
    let found = Upgrade::between(&at(1, "manager"), &content([deployment("r/m:1")])).unwrap();
    assert_eq!(found.default_cr.iter().map(|field| &*field.path).collect::<Vec<_>>(), ["kind", "spec"]);
}

#[test]
fn risks_of_definitions_are_named() {
    use RiskCode::*;

    let one = |properties: Value| json!([version("v1", properties)]);
    let spec = |properties: Value| json!({"spec": {"type": "object", "properties": properties}});
    let mut unserved = version("v1", json!({}));
    unserved["served"] = json!(false);
    let mut open = version("v1", json!({}));
    open["schema"]["openAPIV3Schema"]["x-kubernetes-preserve-unknown-fields"] = json!(true);
    let required = |names: Value, default: bool| {
        let mut a = json!({"type": "string"});
        if default {
            a["default"] = json!("x");
        }
        json!([version("v1", json!({"spec": {"type": "object", "required": names, "properties": {"a": a}}}))])
    };
    let list =
        |item: &str| one(spec(json!({"l": {"type": "array", "items": {"type": "object", "properties": {item: {}}}}})));
    for (before, after, expected) in [
        (
            json!([version("v1", json!({})), version("v2", json!({}))]),
            json!([version("v2", json!({}))]),
            vec![(VersionRemoved, "the version v1 is removed")],
        ),
        (
            one(json!({})),
            json!([unserved, version("v2", json!({}))]),
            vec![(VersionNotServed, "the version v1 is no longer served")],
        ),
        (
            one(spec(json!({"a": {"type": "string"}, "b": {"type": "string"}}))),
            one(spec(json!({"b": {"type": "integer"}, "c": {}}))),
            vec![
                (FieldRemoved, "v1: the field spec.a is removed"),
                (FieldType, "v1: the field spec.b changes from string to integer"),
            ],
        ),
        (list("a"), list("b"), vec![(FieldRemoved, "v1: the field spec.l[].a is removed")]),
        (one(spec(json!({}))), json!([open]), vec![]),
        (
            required(json!([]), false),
            required(json!(["a"]), false),
            vec![(FieldRequired, "v1: the field spec.a becomes required")],
        ),
        (required(json!([]), true), required(json!(["a"]), true), vec![]),
        (one(json!({"a": {}})), one(json!({"a": {}, "b": {}})), vec![]),
    ] {
        let found = upgrade([definition("Namespaced", before)], [definition("Namespaced", after)]);
        let found: Vec<_> = found.risks.iter().map(|risk| (risk.code, &*risk.message)).collect();
        assert_eq!(found, expected);
    }
    let v1 = || one(json!({}));
    let found = upgrade([definition("Namespaced", v1())], [definition("Cluster", v1())]);
    assert_eq!(
        (found.risks[0].code, &*found.risks[0].message),
        (ScopeChanged, "the scope changes from Namespaced to Cluster")
    );
    let claim = object("v1", "PersistentVolumeClaim", Some("ns"), "data");
    let found = upgrade([definition("Namespaced", v1()), claim, object("v1", "Secret", None, "s")], []);
    let codes: Vec<_> = found.risks.iter().map(|risk| (risk.code, risk.object.kind.as_str())).collect();
    assert_eq!(codes, [(DataRemoved, "PersistentVolumeClaim"), (DefinitionRemoved, "CustomResourceDefinition")]);
}

#[test]
fn immutable_field_is_a_risk_and_its_neighbour_none() {
    let changed = |pointer: &str, value: Value| {
        let mut after = deployment("r/m:1");
        *after.pointer_mut(pointer).unwrap() = value;
        upgrade([deployment("r/m:1")], [after]).risks
    };
    let risks = changed("/spec/selector/matchLabels/a", json!("c"));
    assert_eq!((risks[0].code, &*risks[0].message), (RiskCode::ImmutableField, "spec.selector cannot be changed"));
    assert_eq!(changed("/spec/template/spec/containers/0/image", json!("r/m:2")), []);
    let code = serde_json::to_value(&risks[0]).unwrap();
    assert_eq!((&code["code"], &code["name"]), (&json!("immutable-field"), &json!("manager")), "{code}");
}

/// Risks of a changed member of an object.
fn of_change(api_version: &str, kind: &str, before: Value, after: Value) -> Vec<(RiskCode, String)> {
    let of = |body: Value| {
        let mut object = object(api_version, kind, Some("ns"), "n");
        object.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        object
    };
    let found = upgrade([of(before)], [of(after)]);
    found.risks.into_iter().map(|risk| (risk.code, risk.message)).collect()
}

#[test]
fn fields_that_api_servers_do_not_let_change_are_named_for_each_kind() {
    let spec = |member: &str, value: &str| json!({"spec": {member: value}});
    for (api_version, kind, before, after, expected) in [
        ("v1", "Service", spec("clusterIP", "None"), json!({"spec": {}}), &["spec.clusterIP"][..]),
        (
            "v1",
            "PersistentVolumeClaim",
            spec("storageClassName", "a"),
            spec("storageClassName", "b"),
            &["spec.storageClassName"],
        ),
        ("v1", "Secret", json!({"type": "Opaque"}), json!({"type": "kubernetes.io/tls"}), &["type"]),
        (
            "v1",
            "ConfigMap",
            json!({"immutable": true, "data": {"a": "1"}}),
            json!({"immutable": true, "data": {"a": "2"}}),
            &["data"],
        ),
        ("v1", "ConfigMap", json!({"data": {"a": "1"}}), json!({"immutable": true, "data": {"a": "2"}}), &[]),
        ("batch/v1", "Job", spec("template", "a"), spec("template", "b"), &["spec.template"]),
        ("apps/v1", "StatefulSet", spec("serviceName", "a"), spec("serviceName", "b"), &["spec.serviceName"]),
        ("scheduling.k8s.io/v1", "PriorityClass", json!({"value": 1}), json!({"value": 2}), &["value"]),
        ("v1", "Service", spec("type", "a"), spec("type", "b"), &[]),
    ] {
        let found = of_change(api_version, kind, before, after);
        let expected: Vec<_> =
            expected.iter().map(|path| (RiskCode::ImmutableField, format!("{path} cannot be changed"))).collect();
        assert_eq!(found, expected, "{kind}");
    }
    let permitted = json!({"annotations": {annotation::RECREATE: "true"}, "name": "n", "namespace": "ns"});
    let of = |template: &str| json!({"metadata": permitted, "spec": {"template": template}});
    let found = of_change("batch/v1", "Job", of("a"), of("b"));
    assert_eq!(found[0].1, "spec.template cannot be changed: the object is deleted and created again");
}

#[test]
fn change_that_a_default_or_an_injected_field_excludes_is_named() {
    let strategy = |name: &str, kind: &str| json!({"spec": {name: {"type": kind}}});
    let none = || json!({"spec": {"a": 1}});
    for (kind, before, after, expected) in [
        ("Deployment", none(), strategy("strategy", "Recreate"), Some("spec.strategy becomes Recreate")),
        ("StatefulSet", none(), strategy("updateStrategy", "OnDelete"), Some("spec.updateStrategy becomes OnDelete")),
        ("Deployment", strategy("strategy", "Recreate"), none(), None),
        (
            "Deployment",
            json!({"spec": {"strategy": {"rollingUpdate": {"maxSurge": 1}}}}),
            strategy("strategy", "Recreate"),
            None,
        ),
    ] {
        let found = of_change("apps/v1", kind, before, after);
        assert_eq!(
            found.iter().map(|(code, _)| *code).collect::<Vec<_>>(),
            expected.map(|_| RiskCode::DefaultExcluded).into_iter().collect::<Vec<_>>()
        );
        assert!(expected.is_none_or(|begin| found[0].1.starts_with(begin)), "{found:?}");
    }
    let mut converting = definition("Namespaced", json!([version("v1", json!({}))]));
    let plain = converting.clone();
    converting["spec"]["conversion"] = json!({"strategy": "Webhook"});
    let codes = |risks: Vec<Risk>| risks.into_iter().map(|risk| risk.code).collect::<Vec<_>>();
    assert_eq!(codes(upgrade([converting.clone()], [plain.clone()]).risks), [RiskCode::ConversionRemoved]);
    assert_eq!(codes(upgrade([plain], [converting]).risks), []);
}

#[test]
fn malformed_object_is_an_error_that_names_it() {
    let mut labelled = object("v1", "ConfigMap", Some("ns"), "m");
    labelled["metadata"]["labels"] = json!({"a": 1});
    let error = content([labelled]).applied().unwrap_err();
    assert_eq!(error.to_string(), "ConfigMap ns/m: metadata.labels is malformed");
}
