use std::sync::Arc;

use tidewatch_api::key::KymaKey;
use tidewatch_cluster::kinds::KindCache;

use super::*;

fn manifest(change: impl FnOnce(&mut Value)) -> Manifest {
    let mut manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
        "metadata": {"name": "m", "namespace": "kcp-system"},
        "spec": {"remote": true, "install": {"name": "i", "source": {}}}});
    change(&mut manifest);
    serde_json::from_value(manifest).unwrap()
}

/// The kinds of Kubernetes itself.
fn kinds() -> Kinds {
    KindCache::default().of(&KymaKey::new("", ""), 0)
}

fn rendered(objects: &[Value], manifest: &Manifest, pull_secret: Option<&str>) -> Vec<RenderedObject> {
    let secrets = SecretData::new();
    let content = json!({"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": "eHh4"}});
    let pull_secret = pull_secret.map(|name| PullSecret { name: name.to_owned(), content: Some(Arc::new(content)) });
    let pull_secret = pull_secret.as_ref();
    render(objects, &RenderSettings { manifest, pull_secret, secrets: &secrets, kinds: &kinds() }).unwrap()
}

fn only(object: Value) -> RenderedObject {
    let mut all = rendered(&[object], &manifest(|_| ()), None);
    assert_eq!(all.len(), 1);
    all.remove(0)
}

fn workload(kind: &str, name: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": "kyma-system"},
        "spec": {"template": {"spec": {
            "initContainers": [{"name": "i", "image": "registry.test/tools:1.0"}],
            "containers": [{"name": "c", "image": "registry.test/manager:1.0", "env": [{"name": "A", "value": "b"}]}]}}}})
}

#[test]
fn object_names_its_owner_and_has_no_state_of_a_server() {
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {
        "name": "c", "namespace": "ns", "uid": "u", "resourceVersion": "1", "generation": 2, "managedFields": [],
        "ownerReferences": [], "creationTimestamp": null, "labels": {"theirs": "x"}, "annotations": {"theirs": "y"}},
        "data": {"a": "b"}, "status": {"x": 1}});
    let body = only(object).body;
    let expected = json!({
        "name": "c", "namespace": "ns",
        "labels": {"theirs": "x", "operator.kyma-project.io/managed-by": "kyma", "app.kubernetes.io/component": "m",
                   "app.kubernetes.io/part-of": "Kyma"},
        "annotations": {"theirs": "y", annotation::OWNED_BY: "kcp-system/m",
                        annotation::DISCLAIMER: annotation::DISCLAIMER_TEXT},
    });
    assert_eq!(body["metadata"], expected);
    assert_eq!((&body["data"], body.get("status")), (&json!({"a": "b"}), None));
}

#[test]
fn namespace_follows_the_scope_of_the_kind() {
    let namespace = |api_version: &str, kind: &str, namespace: Option<&str>| {
        let object =
            json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": "n", "namespace": namespace}});
        let RenderedObject { key, body, served, .. } = only(object);
        assert_eq!(body["metadata"]["namespace"].as_str().unwrap_or_default(), key.namespace);
        (key.namespace, served)
    };
    assert_eq!(namespace("v1", "ConfigMap", Some("ns")), ("ns".into(), true));
    assert_eq!(namespace("v1", "ConfigMap", None), ("default".into(), true));
    assert_eq!(namespace("rbac.authorization.k8s.io/v1", "ClusterRole", Some("ns")), (String::new(), true));
    assert_eq!(namespace("missing.test/v1", "Thing", None), (String::new(), false));
}

#[test]
fn keys_are_those_of_the_rendered_objects() {
    let object = |api_version: &str, kind: &str, metadata: Value| json!({"apiVersion": api_version, "kind": kind, "metadata": metadata});
    let objects = [
        object("v1", "ConfigMap", json!({"name": "a", "namespace": "ns"})),
        object("v1", "ConfigMap", json!({"name": "a"})),
        object("v1", "Namespace", json!({"name": "n", "namespace": "ns"})),
        object("missing.test/v2", "Thing", json!({"name": "t"})),
        object("batch/v1", "Job", json!({"name": "j", "annotations": {"helm.sh/hook": "pre-delete"}})),
        workload("Deployment", "d"),
    ];
    let all = rendered(&objects, &manifest(|_| ()), None);
    let sorted = |mut keys: Vec<(ObjectKey, String)>| {
        keys.sort();
        keys
    };
    let early = keys(&objects, &kinds()).into_iter().map(|(key, version)| (key, version.to_owned()));
    let rendered = all.into_iter().map(|object| (object.key, object.version));
    assert_eq!(sorted(early.collect()), sorted(rendered.collect()));
}

#[test]
fn namespace_of_all_modules_belongs_to_none() {
    let body = only(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kyma-system"}})).body;
    assert_eq!((&body["metadata"]["labels"], &body["metadata"]["annotations"]), (&json!({}), &json!({})));
    let own = only(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "own"}})).body;
    assert_eq!(own["metadata"]["annotations"][annotation::OWNED_BY], "kcp-system/m");
}

#[test]
fn objects_are_ordered_by_stage_and_the_first_of_equal_ones_is_kept() {
    let map = |version: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m", "namespace": "ns"}, "data": {"v": version}});
    let crd = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "samples.example.test"}, "spec": {"group": "example.test", "names": {"kind": "Sample"}}});
    let sample = json!({"apiVersion": "example.test/v1", "kind": "Sample", "metadata": {"name": "s"}});
    let objects = [sample, workload("Deployment", "d"), map("1"), map("2"), crd];
    let all = rendered(&objects, &manifest(|_| ()), None);
    let kinds: Vec<_> = all.iter().map(|object| &*object.key.kind).collect();
    assert_eq!(kinds, ["CustomResourceDefinition", "ConfigMap", "Deployment", "Sample"]);
    assert_eq!(all[1].body["data"]["v"], "1");
}

/// `acceptance.md` C1 31.
#[test]
fn images_of_all_containers_are_localised() {
    let localised = manifest(|manifest| manifest["spec"]["localizedImages"] = json!(["mirror.test/x/manager:1.0"]));
    let body = &rendered(&[workload("DaemonSet", "d")], &localised, None)[0].body;
    let pod = &body["spec"]["template"]["spec"];
    assert_eq!(pod["containers"][0]["image"], "mirror.test/x/manager:1.0");
    assert_eq!(pod["initContainers"][0]["image"], "registry.test/tools:1.0");
}

/// `acceptance.md` C1 32.
#[test]
fn pull_secret_is_added_to_all_pods_and_named_to_the_manager() {
    let manager = json!({"group": "apps", "version": "v1", "kind": "Deployment", "name": "d"});
    let with_manager = manifest(|manifest| manifest["spec"]["manager"] = manager);
    let objects = [workload("Deployment", "d"), workload("StatefulSet", "s"), workload("DaemonSet", "n")];
    let check = |manifest: &Manifest| {
        let all = rendered(&objects, manifest, Some("pull"));
        let result = |object: &RenderedObject| {
            let pod = &object.body["spec"]["template"]["spec"];
            let variables = pod["containers"][0]["env"].as_array().unwrap();
            let is_named = variables.contains(&json!({"name": PULL_SECRET_VARIABLE, "value": "pull"}));
            (pod["imagePullSecrets"] == json!([{"name": "pull"}]), is_named)
        };
        all.iter().map(result).collect::<Vec<_>>()
    };
    assert_eq!(check(&with_manager), [(true, true), (true, false), (true, false)]);
    assert_eq!(check(&manifest(|_| ())), [(true, true), (true, true), (true, false)]);
    let mut known = workload("Deployment", "d");
    known["spec"]["template"]["spec"]["imagePullSecrets"] = json!([{"name": "pull"}, {"name": "own"}]);
    let body = &rendered(&[known], &manifest(|_| ()), Some("pull"))[0].body;
    assert_eq!(body["spec"]["template"]["spec"]["imagePullSecrets"].as_array().unwrap().len(), 2, "once");

    let pod = json!({"containers": [{"name": "c", "image": "i:1"}]});
    for (api_version, kind, pointer) in [
        ("apps/v1", "ReplicaSet", "/spec/template/spec"),
        ("batch/v1", "Job", "/spec/template/spec"),
        ("batch/v1", "CronJob", "/spec/jobTemplate/spec/template/spec"),
        ("v1", "ReplicationController", "/spec/template/spec"),
        ("v1", "Pod", "/spec"),
    ] {
        let mut object = json!({"apiVersion": api_version, "kind": kind,
            "metadata": {"name": "w", "namespace": "kyma-system"}, "spec": {}});
        let path: Vec<_> = pointer.split('/').skip(1).collect();
        let spec = path.iter().fold(&mut object, |value, member| &mut value[*member]);
        *spec = pod.clone();
        let object = rendered(&[object], &manifest(|_| ()), Some("pull")).remove(0);
        let secrets = object.body.pointer(&format!("{pointer}/imagePullSecrets"));
        assert_eq!(secrets, Some(&json!([{"name": "pull"}])), "{kind}");
        assert!(names_pull_secret(&object.body, &object.key, "pull"));
        let without = without_pull_secret(&object.body, &object.key, "pull");
        assert_eq!(without.pointer(pointer), Some(&pod), "{kind}");
    }
}

#[test]
fn pull_secret_is_copied_to_the_other_namespaces_of_workloads() {
    let in_namespace = |kind: &str, name: &str, namespace: &str| {
        let mut workload = workload(kind, name);
        workload["metadata"]["namespace"] = namespace.into();
        workload
    };
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m", "namespace": "maps"}});
    let objects = [
        in_namespace("Deployment", "a", "own"),
        in_namespace("DaemonSet", "b", "own"),
        in_namespace("StatefulSet", "c", "other"),
        workload("Deployment", "d"),
        map,
    ];
    let copies = |objects: &[Value]| -> Vec<RenderedObject> {
        let all = rendered(objects, &manifest(|_| ()), Some("pull"));
        all.into_iter().filter(|object| object.key.is_secret()).collect()
    };
    let found = copies(&objects);
    let keys: Vec<_> = found.iter().map(|object| (object.key.to_string(), object.stage)).collect();
    let expected = ["Secret other/pull", "Secret own/pull"].map(|key| (key.to_owned(), Stage::Configuration));
    assert_eq!(keys, expected);
    assert_eq!(found[0].body["data"], json!({".dockerconfigjson": "eHh4"}));
    assert_eq!(found[0].body["metadata"]["annotations"][annotation::OWNED_BY], "kcp-system/m");
    let own =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "pull", "namespace": "own"}, "data": {}});
    let with_own = [objects[0].clone(), own];
    assert_eq!(copies(&with_own)[0].body["data"], json!({}), "that of the module stays");
}

#[test]
fn service_accounts_are_first_in_their_stage_and_tokens_come_after_it() {
    let object = |kind: &str, name: &str| json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "ns"}});
    let mut token = object("Secret", "token");
    token["type"] = "kubernetes.io/service-account-token".into();
    let objects = [token, object("ConfigMap", "m"), object("Secret", "s"), object("ServiceAccount", "a")];
    let all = rendered(&objects, &manifest(|_| ()), None);
    let names: Vec<_> = all.iter().map(|object| (&*object.key.name, object.stage)).collect();
    let expected = [
        ("a", Stage::Configuration),
        ("m", Stage::Configuration),
        ("s", Stage::Configuration),
        ("token", Stage::Workloads),
    ];
    assert_eq!(names, expected);
}

#[test]
fn hooks_placeholders_and_texts_of_secrets_are_rendered_as_they_are_meant() {
    let hook = |name: &str, hook: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "ns", "annotations": {"helm.sh/hook": hook}}})
    };
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "ns"},
        "stringData": {"a": "b"}});
    let service = json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": "x"},
        "spec": {"group": "x.test", "caBundle": "Cg=="}});
    let objects = [hook("kept", "pre-install"), hook("gone", "pre-delete"), secret, service];
    let all = rendered(&objects, &manifest(|_| ()), None);
    let names: Vec<_> = all.iter().map(|object| &*object.key.name).collect();
    assert_eq!(names, ["kept", "s", "x"]);
    assert_eq!((&all[1].body["data"], all[1].body.get("stringData")), (&json!({"a": "Yg=="}), None));
    assert_eq!(all[2].body["spec"], json!({"group": "x.test"}));
}

#[test]
fn job_names_its_content_whatever_registry_and_pull_secret_it_gets() {
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j", "namespace": "kyma-system"},
        "spec": {"template": {"spec": {"containers": [{"name": "c", "image": "registry.test/manager:1.0"}]}}}});
    let localised = manifest(|manifest| manifest["spec"]["localizedImages"] = json!(["mirror.test/x/manager:1.0"]));
    let content = |manifest: &Manifest, pull_secret: Option<&str>| {
        let body = rendered(std::slice::from_ref(&job), manifest, pull_secret).remove(0).body;
        body["metadata"]["annotations"][annotation::JOB].as_str().unwrap().to_owned()
    };
    let plain = content(&manifest(|_| ()), None);
    assert_eq!(plain.len(), 16);
    assert_eq!(content(&localised, Some("pull")), plain);
}

#[test]
fn malformed_objects_are_refused_with_their_name() {
    let check = |object: &Value| {
        let manifest = manifest(|_| ());
        let secrets = SecretData::new();
        let pull_secret = PullSecret { name: "pull".to_owned(), content: None };
        let pull_secret = Some(&pull_secret);
        let settings = RenderSettings { manifest: &manifest, pull_secret, secrets: &secrets, kinds: &kinds() };
        render(std::slice::from_ref(object), &settings).unwrap_err().to_string()
    };
    let map = |metadata: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata});
    assert_eq!(check(&map(json!("text"))), "ConfigMap : metadata.name is malformed");
    let labels = map(json!({"name": "m", "namespace": "ns", "labels": {"a": 1}}));
    assert_eq!(check(&labels), "ConfigMap ns/m: metadata.labels is malformed");
    let annotations = map(json!({"name": "m", "namespace": "ns", "annotations": ["a"]}));
    assert_eq!(check(&annotations), "ConfigMap ns/m: metadata.annotations is malformed");
    let mut taken = workload("Deployment", "d");
    taken["spec"]["template"]["spec"]["containers"][0]["env"] = json!([{"name": PULL_SECRET_VARIABLE, "value": "x"}]);
    let expected = "Deployment kyma-system/d: the container c already has the variable SKR_IMG_PULL_SECRET";
    assert_eq!(check(&taken), expected);
}
