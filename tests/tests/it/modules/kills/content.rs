//! The modules of the test: an upgrade of each takes every second way of a write, with an object for each way. They differ by
//! their names alone.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use k8s_openapi::api::batch::v1::Job;
use tidewatch_api::names::field_manager;
use tidewatch_testing::control_plane::credentials;

use super::{
    super::writing::{SECOND, Writers, config_map, deployment, object, version, with},
    *,
};

/// The module that is upgraded without a kill, in whose name the objects are written down.
pub(super) const CONTROL: &str = "killsa";
/// The module that owns an object of each of them.
pub(super) const NEIGHBOUR: &str = "neighbour";
/// Resources of a user for each module, which are stored in a version that goes.
const RESOURCES: usize = 3;

/// A value of another module.
pub(super) fn of(module: &str, value: &Value) -> Result<Value> {
    Ok(serde_json::from_str(&value.to_string().replace(CONTROL, module))?)
}

/// Objects of a version of a module.
pub(super) fn objects(module: &str, version: &str) -> Result<Vec<Value>> {
    let all = [union(version), definitions(version), resources(version), guarded(version), recreated(version)];
    let all = all.into_iter().flatten().chain(brought(version));
    all.map(|object| of(module, &object)).collect()
}

/// The objects of the neighbour that the next versions of these modules have, too.
pub(super) fn shared(modules: &[String]) -> Result<Vec<Value>> {
    modules.iter().map(|module| of(module, &config_map("killsa-shared", json!({"theirs": "1"})))).collect()
}

/// A workload whose strategy and volume exclude defaults of their former ones, and one that an autoscaler scales.
fn union(version: &str) -> Vec<Value> {
    let mut manager = deployment("killsa-union", "union:1", &json!({}));
    manager["spec"]["template"]["spec"]["volumes"] = json!([{"name": "data"}]);
    let scaled = deployment("killsa-scaled", &format!("scaled:{version}"), &json!({"replicas": 1}));
    if version == SECOND {
        manager["spec"]["strategy"] = json!({"type": "Recreate"});
        manager["spec"]["template"]["spec"]["volumes"][0]["configMap"] = json!({"name": "data"});
    }
    vec![manager, scaled]
}

fn definition(plural: &str, kind: &str, versions: Value, conversion: Option<Value>) -> Value {
    let mut spec = json!({"group": "killsa.test", "scope": "Namespaced", "names": {"kind": kind, "plural": plural},
        "versions": versions});
    spec.as_object_mut().unwrap().extend(conversion.map(|conversion| ("conversion".to_owned(), conversion)));
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.killsa.test")}, "spec": spec})
}

/// A CRD that drops its conversion webhook, one that drops a version of our own resources, and one that drops the version in
/// which those of a user are stored.
fn definitions(version_of_module: &str) -> Vec<Value> {
    let is_first = version_of_module != SECOND;
    let webhook = json!({"conversionReviewVersions": ["v1"],
        "clientConfig": {"service": {"name": "killsa-hooks", "namespace": SKR_NAMESPACE, "path": "/convert"}}});
    let conversion = is_first.then(|| json!({"strategy": "Webhook", "webhook": webhook}));
    let text = json!({"type": "string"});
    let former = |storage| version("v1", storage, json!({"kept": text, "dropped": text}));
    // A defaulted field prevents the conversion of managed fields.
    let mode = json!({"type": "string", "default": "auto"});
    let moved = version("v2", true, json!({"kept": text, "dropped": text, "mode": mode}));
    let stored = |storage| version("v2", storage, json!({"kept": text, "dropped": text}));
    let moveds = if is_first { json!([former(false), moved]) } else { json!([moved]) };
    let storeds = if is_first { json!([former(true), stored(false)]) } else { json!([stored(true)]) };
    vec![
        definition("converteds", "Converted", json!([version("v1", true, json!({}))]), conversion),
        definition("moveds", "Moved", moveds, None),
        definition("storeds", "Stored", storeds, None),
    ]
}

/// Custom resources: our entry in the managed fields of the one is of a version that goes, and that of another applier in
/// those of the other.
fn resources(version: &str) -> Vec<Value> {
    let of = |name: &str, version: &str, spec: Value| {
        with(object(&format!("killsa.test/{version}"), "Moved", name), "spec", spec)
    };
    if version == SECOND {
        let spec = json!({"kept": "2"});
        return vec![of("killsa-own", "v2", spec.clone()), of("killsa-noted", "v2", spec)];
    }
    let dropped = json!({"kept": "1", "dropped": "1"});
    vec![of("killsa-own", "v1", dropped.clone()), of("killsa-noted", "v2", dropped)]
}

/// ConfigMaps that webhooks of the module guard, which never answer: of the one, the next version changes the configuration;
/// of the other, it has none.
fn guarded(version: &str) -> Vec<Value> {
    let labelled = |name: &str| {
        let mut map = config_map(name, json!({"version": version}));
        map["metadata"]["labels"] = json!({"kills.test/guarded": name});
        map
    };
    let configuration = |name: &str, guarded: &str, policy: &str| {
        let webhook = json!({"name": format!("{name}.kills.test"), "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "timeoutSeconds": 1, "failurePolicy": policy,
            "objectSelector": {"matchLabels": {"kills.test/guarded": guarded}},
            "clientConfig": {"service": {"name": "killsa-hooks", "namespace": SKR_NAMESPACE}},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"],
                       "resources": ["configmaps"]}]});
        json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": name}, "webhooks": [webhook]})
    };
    let service = with(
        object("v1", "Service", "killsa-hooks"),
        "spec",
        json!({"selector": {"app": "killsa-union"}, "ports": [{"port": 443}]}),
    );
    let mut all = vec![labelled("killsa-guarded"), labelled("killsa-hooked"), service];
    if version == SECOND {
        all.push(configuration("killsa-changed", "killsa-guarded", "Ignore"));
    } else {
        all.push(configuration("killsa-changed", "killsa-guarded", "Fail"));
        all.push(configuration("killsa-dropped", "killsa-hooked", "Fail"));
    }
    all
}

/// Immutable ConfigMaps that may be recreated, and a Job.
fn recreated(version: &str) -> Vec<Value> {
    let frozen = |name: &str| {
        let mut map = with(config_map(name, json!({"version": version})), "immutable", json!(true));
        map["metadata"]["annotations"] = json!({annotation::RECREATE: "true"});
        map
    };
    let container = json!({"name": "job", "image": format!("example.test/job:{version}")});
    let pod = json!({"spec": {"restartPolicy": "Never", "containers": [container]}});
    let job = with(object("batch/v1", "Job", "killsa-job"), "spec", json!({"template": pod}));
    vec![frozen("killsa-frozen"), frozen("killsa-held"), job]
}

/// Objects that the next version brings and others have made before, and objects that it drops.
fn brought(version: &str) -> Vec<Value> {
    if version != SECOND {
        return vec![config_map("killsa-gone", json!({"version": version}))];
    }
    let secret = with(object("v1", "Secret", "killsa-secret"), "stringData", json!({"kept": "2"}));
    vec![
        config_map("killsa-helm", json!({"ours": "2"})),
        deployment("killsa-kubectl", "kubectl:2", &json!({})),
        config_map("killsa-early", json!({"ours": "2"})),
        secret,
        config_map("killsa-shared", json!({"ours": "2"})),
    ]
}

/// What users, their tools, other controllers, and lifecycle-manager write between the versions.
pub(super) async fn others_write(writers: &Writers, modules: &[String]) -> Result<()> {
    let (ca, ..) = credentials::certificates("kills")?;
    let bundle = BASE64_STANDARD.encode(ca);
    let Writers { foreign, setup, .. } = writers;
    let documents = |objects: &[Value]| {
        let all = modules.iter().flat_map(|module| objects.iter().map(move |object| of(module, object)));
        anyhow::Ok(all.map(|object| Ok(object?.to_string())).collect::<Result<Vec<_>>>()?.join("\n---\n"))
    };
    let noted = ["own", "noted"].map(|name| {
        let mut noted = object("killsa.test/v1", "Moved", &format!("killsa-{name}"));
        noted["metadata"]["annotations"] = json!({"kills.test/note": "1"});
        noted
    });
    let of_user = (1..=RESOURCES).map(|number| {
        let resource = object("killsa.test/v1", "Stored", &format!("killsa-user-{number}"));
        with(resource, "spec", json!({"kept": "1", "dropped": "1"}))
    });
    let applied: Vec<_> = noted.into_iter().chain(of_user).collect();
    foreign.kubectl(&["apply", "--server-side", "-f", "-"], &documents(&applied)?).await?;
    let mut by_hand = deployment("killsa-kubectl", "kubectl:1", &json!({}));
    by_hand["spec"]["template"]["spec"]["containers"][0]["args"] = json!(["--old"]);
    foreign.kubectl(&["apply", "-f", "-"], &documents(&[by_hand])?).await?;
    let manager = format!("--field-manager={}", field_manager::MODULE);
    let early = config_map("killsa-early", json!({"ours": "1", "old": "1"}));
    foreign.kubectl(&["create", &manager, "-f", "-"], &documents(&[early])?).await?;
    let secret = with(object("v1", "Secret", "killsa-secret"), "stringData", json!({"kept": "1", "old": "1"}));
    foreign.kubectl(&["apply", "--server-side", &manager, "-f", "-"], &documents(&[secret])?).await?;
    let jobs = Api::<Job>::namespaced(setup.runtime.cluster().client().await?, SKR_NAMESPACE);
    let suspended = json!({"status": {"conditions": [{"type": "Suspended", "status": "True"}]}});
    for module in modules {
        let named = |name: &str| format!("{module}-{name}");
        foreign.inject_ca(&format!("converteds.{module}.test"), &bundle).await?;
        foreign.helm_install(&config_map(&named("helm"), json!({"ours": "1", "old": "1"}))).await?;
        foreign.autoscale(SKR_NAMESPACE, &named("scaled"), 4).await?;
        let held = json!({"metadata": {"finalizers": ["kills.test/held"]}});
        foreign.update("user", &object("v1", "ConfigMap", &named("held")), &held).await?;
        jobs.patch_status(&named("job"), &PatchParams::default(), &Patch::Merge(&suspended)).await?;
    }
    Ok(())
}

/// Asserts that an upgraded module has its new content, and others what they wrote.
pub(super) fn is_upgraded(ends: &BTreeMap<String, Value>) {
    let of = |kind: &str, name: &str| {
        ends.get(&format!("{kind} {name}")).unwrap_or_else(|| panic!("{kind} {name} of {:?}", ends.keys()))
    };
    let data = |name: &str| &of("ConfigMap", &format!("killsa-{name}"))["data"];
    for name in ["frozen", "held", "guarded", "hooked"] {
        assert_eq!(*data(name), json!({"version": SECOND}), "{name}");
    }
    assert_eq!((data("helm"), data("early")), (&json!({"ours": "2"}), &json!({"ours": "2"})));
    assert_eq!(*data("shared"), json!({"ours": "2", "theirs": "1"}));
    assert_eq!(of("Secret", "killsa-secret")["data"], json!({"kept": "Mg=="}));
    let workload = |name: &str| &of("Deployment", &format!("killsa-{name}"))["spec"];
    let container = |name: &str| &workload(name)["template"]["spec"]["containers"][0];
    assert_eq!(workload("union")["strategy"], json!({"type": "Recreate"}));
    assert_eq!(workload("union")["template"]["spec"]["volumes"][0]["emptyDir"], Value::Null);
    assert_eq!(container("kubectl")["args"], Value::Null);
    assert_eq!(container("scaled")["image"], format!("example.test/scaled:{SECOND}"));
    assert_eq!(workload("scaled")["replicas"], 4, "the autoscaler's");
    let job = &of("Job", "killsa-job")["spec"]["template"]["spec"]["containers"][0]["image"];
    assert_eq!(*job, format!("example.test/job:{SECOND}"));
    let definition = |plural: &str| of("CustomResourceDefinition", &format!("{plural}.killsa.test"));
    assert_eq!(definition("converteds")["spec"]["conversion"], json!({"strategy": "None"}));
    assert_eq!(definition("storeds")["status"], json!({"storedVersions": ["v2"]}));
    for name in ["own", "noted"] {
        let resource = of("Moved", &format!("killsa-{name}"));
        assert_eq!(resource["spec"], json!({"kept": "2", "mode": "auto"}), "{name}");
        assert_eq!(resource["metadata"]["annotations"]["kills.test/note"], "1", "{name}");
    }
    for number in 1..=RESOURCES {
        let resource = of("Stored", &format!("killsa-user-{number}"));
        assert_eq!(resource["spec"], json!({"kept": "1", "dropped": "1"}), "the user's");
    }
    for gone in ["ConfigMap killsa-gone", "ValidatingWebhookConfiguration killsa-dropped"] {
        assert!(!ends.contains_key(gone), "{gone}");
    }
}
