//! Objects of modules that other writers wrote before, or write too: upgrades that a plain server-side apply cannot do, the
//! adoption of what kubectl and Helm applied, and fields that are left to others. One landscape without pods serves all.

use std::{fs, time::Instant};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use tidewatch_testing::{
    control_plane::{audit::Write, credentials},
    foreign_writer::ForeignWriter,
    landscape::AGENT_IMAGE,
    progress::print_line,
};

use super::*;
use crate::sync::sum;

pub(super) const FIRST: &str = "1.0.0";
pub(super) const SECOND: &str = "2.0.0";
const THIRD: &str = "3.0.0";

/// Objects of a version of a module.
type Objects = fn(&str) -> Vec<Value>;

/// A landscape of which the runtime has no controllers.
pub(super) struct Writers {
    pub(super) setup: SingleRuntime,
    registry: Registry,
    pub(super) foreign: ForeignWriter,
}

impl Writers {
    pub(super) async fn start(name: &str, options: Options) -> Result<Self> {
        tidewatch_testing::install_crypto();
        let access = registry::Options { transport: Transport::Plain, access: Access::Anonymous };
        let registry = Registry::start(bed::shared().await?, name, access).await?;
        let options = Options { registry: Some(registry.host()), ..options };
        let setup = SingleRuntime::isolated(Isolation::Shared, name, &[], options).await?;
        let foreign = ForeignWriter::new(setup.runtime.cluster()).await?;
        Ok(Self { setup, registry, foreign })
    }

    /// Publishes a version of a module with these objects, and points its channel to it.
    async fn publish(&self, module: &str, version: &str, objects: &[Value]) -> Result<()> {
        self.push(module, version, objects).await?;
        self.setup.landscape.write_channels(module, &[("regular", version)]).await
    }

    /// Publishes a version of a module with these objects.
    pub(super) async fn push(&self, module: &str, version: &str, objects: &[Value]) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let description = json!({"component": format!("kyma-project.io/module/{module}"), "version": version});
        fs::write(folder.path().join("module.yaml"), description.to_string())?;
        let manifest: Vec<_> = objects.iter().map(Value::to_string).collect();
        fs::write(folder.path().join("manifest.yaml"), manifest.join("\n---\n"))?;
        publish(&self.setup.landscape, &self.registry, folder.path()).await
    }

    pub(super) async fn manifest(&self, module: &str) -> Result<Option<Manifest>> {
        let found = self.setup.manifests().await?;
        let is_of = |it: &Manifest| it.labels().get(label::MODULE_NAME).is_some_and(|name| name == module);
        Ok(found.into_iter().find(is_of))
    }

    /// Waits until a version of a module is applied completely.
    pub(super) async fn is_applied(&self, module: &str, version: &str) -> Result<()> {
        let mut last = None;
        let applied = until(&format!("{module} {version} to be applied"), async || {
            let Some(manifest) = self.manifest(module).await? else { return Ok(None) };
            last = manifest.status.as_ref().and_then(|status| status.last_operation.clone());
            let reference = &manifest.spec.install.source["ref"];
            let is_applied = manifest.annotations().get(annotation::SYNC_OCI_REF).is_some_and(|it| reference == it);
            Ok((is_applied && manifest.spec.version.as_deref() == Some(version)).then_some(()))
        })
        .await;
        applied.with_context(|| format!("its last operation: {last:?}"))
    }

    async fn says(&self, module: &str, words: &str) -> Result<()> {
        until(&format!("{module} to say {words}"), async || {
            let operation = self.manifest(module).await?.and_then(|it| it.status).and_then(|it| it.last_operation);
            Ok(operation.filter(|it| it.operation.contains(words)).map(drop))
        })
        .await
    }

    pub(super) async fn get(&self, api_version: &str, kind: &str, name: &str) -> Result<Option<DynamicObject>> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let client = self.setup.runtime.cluster().client().await?;
        let api: Api<DynamicObject> = if kind == "CustomResourceDefinition" {
            Api::all_with(client, &resource)
        } else {
            Api::namespaced_with(client, SKR_NAMESPACE, &resource)
        };
        Ok(api.get_opt(name).await?)
    }

    pub(super) async fn live(&self, api_version: &str, kind: &str, name: &str) -> Result<DynamicObject> {
        self.get(api_version, kind, name).await?.with_context(|| format!("{kind} {name}"))
    }

    pub(super) async fn metric(&self, name: &str, labels: &[&str]) -> Result<u64> {
        let page = self.setup.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??.1;
        Ok(sum(&page, name, labels))
    }

    pub(super) async fn fallbacks(&self, reason: &str) -> Result<u64> {
        self.metric("tidewatch_object_fallbacks_total", &[&format!("reason=\"{reason}\"")]).await
    }
}

pub(super) fn object(api_version: &str, kind: &str, name: &str) -> Value {
    json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": SKR_NAMESPACE}})
}

pub(super) fn with(mut object: Value, member: &str, value: Value) -> Value {
    object[member] = value;
    object
}

pub(super) fn deployment(name: &str, image: &str, more: &Value) -> Value {
    let mut spec = json!({"selector": {"matchLabels": {"app": name}}, "template": {"metadata": {"labels": {"app": name}},
        "spec": {"containers": [{"name": "manager", "image": format!("example.test/{image}")}]}}});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    with(object("apps/v1", "Deployment", name), "spec", spec)
}

pub(super) fn config_map(name: &str, data: Value) -> Value {
    with(object("v1", "ConfigMap", name), "data", data)
}

fn definition(plural: &str, kind: &str, versions: Value, more: &Value) -> Value {
    let mut spec = json!({"group": "writing.test", "scope": "Namespaced", "names": {"kind": kind, "plural": plural},
        "versions": versions});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.writing.test")}, "spec": spec})
}

pub(super) fn version(name: &str, storage: bool, properties: Value) -> Value {
    let spec = json!({"type": "object", "properties": properties});
    json!({"name": name, "served": true, "storage": storage,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}})
}

/// A Deployment whose strategy excludes the defaults of its former one, and a volume with another source than the default.
fn union(version: &str) -> Vec<Value> {
    let mut plain = deployment("union", "union:1", &json!({}));
    plain["spec"]["template"]["spec"]["volumes"] = json!([{"name": "data"}]);
    if version == SECOND {
        plain["spec"]["strategy"] = json!({"type": "Recreate"});
        plain["spec"]["template"]["spec"]["volumes"][0]["configMap"] = json!({"name": "data"});
    }
    vec![plain]
}

/// A CRD that drops its conversion webhook.
fn conversion(version_of_module: &str) -> Vec<Value> {
    let webhook = json!({"conversionReviewVersions": ["v1"],
        "clientConfig": {"service": {"name": "conversion", "namespace": SKR_NAMESPACE, "path": "/convert"}}});
    let more = match version_of_module {
        FIRST => json!({"conversion": {"strategy": "Webhook", "webhook": webhook}}),
        _ => json!({}),
    };
    vec![definition("converted", "Converted", json!([version("v1", true, json!({}))]), &more)]
}

/// A custom resource that moves to an API version with a defaulted field, while its CRD drops the former version.
fn versions(version_of_module: &str) -> Vec<Value> {
    let text = json!({"type": "string"});
    let former = version("v1", false, json!({"kept": text, "dropped": text}));
    let next =
        version("v2", true, json!({"kept": text, "dropped": text, "mode": {"type": "string", "default": "auto"}}));
    let own =
        |version: &str, spec: Value| with(object(&format!("writing.test/{version}"), "Moved", "own"), "spec", spec);
    match version_of_module {
        FIRST => vec![
            definition("moveds", "Moved", json!([former, next]), &json!({})),
            own("v1", json!({"kept": "1", "dropped": "1"})),
        ],
        _ => vec![definition("moveds", "Moved", json!([next]), &json!({})), own("v2", json!({"kept": "1"}))],
    }
}

/// A CRD that drops the version in which the resources of a user are stored.
fn stored(version_of_module: &str) -> Vec<Value> {
    let text = json!({"type": "string"});
    let of = |name: &str, storage: bool| version(name, storage, json!({"kept": text, "dropped": text}));
    let versions = match version_of_module {
        FIRST => json!([of("v1", true), of("v2", false)]),
        _ => json!([of("v2", true)]),
    };
    vec![definition("storeds", "Stored", versions, &json!({}))]
}

/// A resource that a user applies.
fn of_user(version: &str, spec: Value) -> String {
    with(object(&format!("writing.test/{version}"), "Stored", "user"), "spec", spec).to_string()
}

/// A ConfigMap that the module's own webhook guards, which never answers, and the Deployment that would serve it.
fn guarded(version: &str) -> Vec<Value> {
    let mut map = config_map("guarded", json!({"version": version}));
    map["metadata"]["labels"] = json!({"writing.test/guarded": "true"});
    let service = with(
        object("v1", "Service", "guarded"),
        "spec",
        json!({"selector": {"app": "guarded"}, "ports": [{"port": 443}]}),
    );
    let webhook = json!({"name": "guarded.writing.test", "sideEffects": "None", "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1, "failurePolicy": if version == THIRD { "Ignore" } else { "Fail" },
        "objectSelector": {"matchLabels": {"writing.test/guarded": "true"}},
        "clientConfig": {"service": {"name": "guarded", "namespace": SKR_NAMESPACE}},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["configmaps"]}]});
    let configuration = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "guarded"}, "webhooks": [webhook]});
    vec![map, service, deployment("guarded", &format!("guarded:{version}"), &json!({})), configuration]
}

/// An immutable ConfigMap that may be recreated.
fn frozen(version: &str) -> Vec<Value> {
    let mut map = with(config_map("frozen", json!({"version": version})), "immutable", json!(true));
    map["metadata"]["annotations"] = json!({annotation::RECREATE: "true"});
    vec![map]
}

/// Objects that API servers store otherwise than they are written.
fn forms() -> Vec<Value> {
    let mut workload = deployment("forms", "forms:1", &json!({}));
    let pod = &mut workload["spec"]["template"]["spec"];
    pod["hostNetwork"] = json!(false);
    pod["tolerations"] = json!([{"key": "k", "operator": "Exists", "value": ""}]);
    pod["containers"][0]["env"] = json!([{"name": "EMPTY", "value": ""}]);
    pod["containers"][0]["resources"] = json!({"limits": {"cpu": "1000m", "memory": "1024Mi"}, "requests": {"cpu": 1}});
    let class = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "forms"},
        "value": 5, "globalDefault": false});
    let mut binding = object("rbac.authorization.k8s.io/v1", "RoleBinding", "forms");
    binding["roleRef"] = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "forms"});
    binding["subjects"] =
        json!([{"apiGroup": "", "kind": "ServiceAccount", "name": "forms", "namespace": SKR_NAMESPACE}]);
    let crd =
        definition("forms", "Form", json!([version("v1", true, json!({}))]), &json!({"preserveUnknownFields": false}));
    vec![workload, class, binding, crd]
}

/// Two Deployments with replicas.
fn scaled() -> Vec<Value> {
    ["scaled", "steady"].map(|name| deployment(name, "scaled:1", &json!({"replicas": 1}))).to_vec()
}

/// What a user installed by hand before it became a module: a sidecar, arguments and variables that the module lacks.
fn adopted() -> Vec<Value> {
    let mut manager = deployment("adopted", "adopted:1", &json!({}));
    manager["metadata"]["labels"] = json!({"app.kubernetes.io/version": FIRST});
    vec![manager, config_map("adopted", json!({"ours": "new"}))]
}

async fn install_by_hand(foreign: &ForeignWriter) -> Result<()> {
    let mut manager = deployment("adopted", "adopted:0", &json!({}));
    manager["metadata"]["labels"] = json!({"app.kubernetes.io/version": "0.9.0"});
    let containers = manager["spec"]["template"]["spec"]["containers"].as_array_mut().unwrap();
    containers[0]["args"] = json!(["--old"]);
    containers[0]["env"] = json!([{"name": "OLD", "value": "1"}]);
    containers.push(json!({"name": "sidecar", "image": "example.test/sidecar:0"}));
    foreign.kubectl(&["apply", "-f", "-"], &manager.to_string()).await?;
    let patch = json!({"spec": {"paused": true}}).to_string();
    foreign.kubectl(&["-n", SKR_NAMESPACE, "patch", "deployment", "adopted", "-p", &patch], "").await?;
    foreign.helm_install(&config_map("adopted", json!({"ours": "old", "theirs": "1"}))).await
}

#[tokio::test]
async fn objects_of_modules_are_written_beside_other_writers() -> TestResult {
    let writers = Writers::start("writing", quick_options()).await?;
    let began = Instant::now();
    let upgraded = [
        ("union", union as Objects),
        ("conversion", conversion),
        ("versions", versions),
        ("stored", stored),
        ("guarded", guarded),
        ("frozen", frozen),
    ];
    for (module, objects) in upgraded {
        writers.publish(module, FIRST, &objects(FIRST)).await?;
    }
    for (module, objects) in [("forms", forms()), ("scaled", scaled()), ("adopted", adopted())] {
        writers.publish(module, FIRST, &objects).await?;
    }
    install_by_hand(&writers.foreign).await?;
    let modules = ["union", "conversion", "versions", "stored", "guarded", "frozen", "forms", "scaled", "adopted"];
    writers.setup.runtime.select(&modules).await?;
    for module in modules {
        writers.is_applied(module, FIRST).await?;
    }
    print_line(&format!("all modules are applied after {:.1} s", began.elapsed().as_secs_f64()));

    adopted_objects_lose_what_their_tools_applied(&writers).await?;
    replicas_are_left_to_an_autoscaler_alone(&writers).await?;
    upgrades_take_their_second_ways(&writers, &upgraded).await?;
    print_line(&format!("all modules are upgraded after {:.1} s", began.elapsed().as_secs_f64()));
    restart_writes_nothing(&writers, &modules).await?;
    print_line(&format!("the restart is over after {:.1} s", began.elapsed().as_secs_f64()));
    Ok(())
}

async fn adopted_objects_lose_what_their_tools_applied(writers: &Writers) -> Result<()> {
    let manager = writers.live("apps/v1", "Deployment", "adopted").await?;
    let containers = manager.data["spec"]["template"]["spec"]["containers"].as_array().unwrap();
    let names: Vec<_> = containers.iter().map(|container| &container["name"]).collect();
    assert_eq!(names, ["manager"]);
    let container = &containers[0];
    assert_eq!(
        (&container["image"], &container["args"], &container["env"]),
        (&json!("example.test/adopted:1"), &Value::Null, &Value::Null)
    );
    assert_eq!(manager.data["spec"]["paused"], true, "the user patched it later");
    assert!(!manager.annotations().contains_key("kubectl.kubernetes.io/last-applied-configuration"));
    let map = writers.live("v1", "ConfigMap", "adopted").await?;
    assert_eq!(map.data["data"], json!({"ours": "new"}));
    assert!(!map.annotations().contains_key("meta.helm.sh/release-name"));
    assert_eq!(writers.fallbacks("adopted").await?, 2);
    Ok(())
}

async fn replicas_are_left_to_an_autoscaler_alone(writers: &Writers) -> Result<()> {
    writers.foreign.autoscale(SKR_NAMESPACE, "scaled", 4).await?;
    let scale = ["-n", SKR_NAMESPACE, "scale", "deployment", "--replicas", "4"];
    let replicas = async |name: &str| {
        anyhow::Ok(writers.live("apps/v1", "Deployment", name).await?.data["spec"]["replicas"].as_i64())
    };
    writers.foreign.kubectl(&[&scale[..], &["steady"]].concat(), "").await?;
    until("the user's scale to be set back", async || Ok((replicas("steady").await? == Some(1)).then_some(()))).await?;
    // It was reported before the other.
    assert_eq!(replicas("scaled").await?, Some(4));
    Ok(())
}

async fn upgrades_take_their_second_ways(writers: &Writers, modules: &[(&str, Objects)]) -> Result<()> {
    let (ca, ..) = credentials::certificates("writing")?;
    writers.foreign.inject_ca("converted.writing.test", &BASE64_STANDARD.encode(ca)).await?;
    // Another applier has an entry in the former version, too. The next one has a default, so that neither can be converted.
    let mut noted = object("writing.test/v1", "Moved", "own");
    noted["metadata"]["annotations"] = json!({"writing.test/note": "1"});
    let apply = ["apply", "--server-side", "-f", "-"];
    writers.foreign.kubectl(&apply, &noted.to_string()).await?;
    writers.foreign.kubectl(&apply, &of_user("v1", json!({"kept": "1", "dropped": "1"}))).await?;
    let frozen = writers.live("v1", "ConfigMap", "frozen").await?.uid();
    for (module, objects) in modules {
        writers.publish(module, SECOND, &objects(SECOND)).await?;
    }
    for (module, _) in modules.iter().filter(|(module, _)| *module != "guarded") {
        writers.is_applied(module, SECOND).await?;
    }
    let union = writers.live("apps/v1", "Deployment", "union").await?;
    assert_eq!(union.data["spec"]["strategy"], json!({"type": "Recreate"}));
    let volume = &union.data["spec"]["template"]["spec"]["volumes"][0];
    assert_eq!((&volume["configMap"]["name"], &volume["emptyDir"]), (&json!("data"), &Value::Null));
    let crd = writers.live("apiextensions.k8s.io/v1", "CustomResourceDefinition", "converted.writing.test").await?;
    assert_eq!(crd.data["spec"]["conversion"], json!({"strategy": "None"}));
    let own = writers.live("writing.test/v2", "Moved", "own").await?;
    assert_eq!(own.data["spec"], json!({"kept": "1", "mode": "auto"}), "the field that the version drops is gone");
    assert_eq!(own.annotations()["writing.test/note"], "1");
    let crd = writers.live("apiextensions.k8s.io/v1", "CustomResourceDefinition", "storeds.writing.test").await?;
    assert_eq!(crd.data["status"]["storedVersions"], json!(["v2"]));
    // What the user applied in the version that is gone still belongs to the user.
    writers.foreign.kubectl(&apply, &of_user("v2", json!({"kept": "1"}))).await?;
    assert_eq!(writers.live("writing.test/v2", "Stored", "user").await?.data["spec"], json!({"kept": "1"}));
    let map = writers.live("v1", "ConfigMap", "frozen").await?;
    assert_eq!(map.data["data"]["version"], SECOND);
    assert_ne!(map.uid(), frozen);
    for reason in ["union", "conversion", "field-version", "recreated"] {
        assert_eq!(writers.fallbacks(reason).await?, 1, "{reason}");
    }

    // Its workload is upgraded although its webhook keeps its ConfigMap.
    until("the workload of the guarded module", async || {
        let workload = writers.live("apps/v1", "Deployment", "guarded").await?;
        let image = &workload.data["spec"]["template"]["spec"]["containers"][0]["image"];
        Ok((*image == format!("example.test/guarded:{SECOND}")).then_some(()))
    })
    .await?;
    writers.says("guarded", "the module's own webhook does not answer, its other objects are applied").await?;
    assert_eq!(writers.live("v1", "ConfigMap", "guarded").await?.data["data"]["version"], FIRST);
    // So is what mends it.
    writers.publish("guarded", THIRD, &guarded(THIRD)).await?;
    writers.is_applied("guarded", THIRD).await?;
    assert_eq!(writers.live("v1", "ConfigMap", "guarded").await?.data["data"]["version"], THIRD);
    Ok(())
}

async fn restart_writes_nothing(writers: &Writers, modules: &[&str]) -> Result<()> {
    let Writers { setup, .. } = writers;
    setup.becomes_idle().await?;
    let mark = setup.runtime.cluster().audit_mark()?;
    setup.landscape.restart_receiver(AGENT_IMAGE, &[]).await?;
    let wanted = u64::try_from(modules.len())?;
    until("a reconcile of each Manifest", async || {
        let ended = writers.metric("tidewatch_manifest_passes_total", &["outcome=\"ended\""]).await?;
        Ok((ended >= wanted).then_some(()))
    })
    .await?;
    setup.becomes_idle().await?;
    let names = ["adopted", "forms", "forms.writing.test", "frozen", "guarded", "own", "scaled", "steady", "union"];
    let is_of_modules = |write: &&Write| names.contains(&&*write.name) && !write.is_kubernetes_own();
    let writes = setup.runtime.cluster().writes_since(mark)?;
    let writes: Vec<_> = writes.iter().filter(is_of_modules).collect();
    assert!(writes.is_empty(), "{writes:#?}");
    Ok(())
}
