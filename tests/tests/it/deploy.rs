//! The manifests in `deploy/`: an API server accepts them, they grant the rights that the code names, and their
//! admission policies refuse catalogs that no runtime could have.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{Read as _, Seek as _, SeekFrom},
    path::Path,
    process::Command,
};

use anyhow::Result;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, Patch, PatchParams, PostParams, ValidationDirective},
    client::Body,
    core::{ApiResource, GroupVersionKind, Request},
};
use serde_json::{Value, json};
use tidewatch_api::{
    crds,
    names::{KCP_NAMESPACE, annotation, label},
};
use tidewatch_receiver::rights;
use tidewatch_select::catalog::desired::Kind;
use tidewatch_testing::{
    bed,
    control_plane::{Cluster, Tool},
    landscape::until,
};

use crate::support::TestResult;

/// The objects of a kustomization as `kubectl kustomize` renders them.
pub(crate) async fn render(folder: &str) -> Vec<DynamicObject> {
    let kubectl = bed::shared().await.unwrap().binaries().get(Tool::Kubectl).await.unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("deploy").join(folder);
    let output = Command::new(kubectl).arg("kustomize").arg(&path).args(["-o", "/dev/stdout"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.split("\n---\n").map(|object| serde_saphyr::from_str(object).unwrap()).collect()
}

pub(crate) fn kind(object: &DynamicObject) -> &str {
    &object.types.as_ref().unwrap().kind
}

/// Returns true for kinds whose CRDs come with an operator: monitors with Prometheus', certificates with cert-manager.
pub(crate) fn needs_operator(object: &DynamicObject) -> bool {
    ["PodMonitor", "PrometheusRule", "Certificate"].contains(&kind(object))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_accepts_all_manifests() {
    let kcp = bed::shared().await.unwrap().kcp().await.unwrap();
    // A dry run creates no namespace.
    for namespace in [KCP_NAMESPACE, "tidewatch-ca"] {
        kcp.ensure_namespace(namespace).await.unwrap();
    }
    let client = kcp.client().await.unwrap();
    const INSTALLED: [&str; 9] = [
        "Deployment",
        "PodDisruptionBudget",
        "Lease",
        "Service",
        "Role",
        "NetworkPolicy",
        "PodMonitor",
        "PrometheusRule",
        "CustomResourceDefinition",
    ];
    const REFUSING: [&str; 2] = ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"];
    for (folder, wanted) in [
        ("base", &INSTALLED[..]),
        ("overlays/ca-namespace", &INSTALLED),
        ("overlays/cert-manager", &INSTALLED),
        ("overlays/istio", &INSTALLED),
        ("admission", &REFUSING),
    ] {
        let objects = render(folder).await;
        let kinds: BTreeSet<_> = objects.iter().map(kind).collect();
        for wanted in wanted {
            assert!(kinds.contains(wanted), "{folder} has no {wanted}");
        }
        for object in objects.iter().filter(|object| !needs_operator(object)) {
            let types = object.types.clone().unwrap();
            let resource = ApiResource::from_gvk(&GroupVersionKind::try_from(&types).unwrap());
            let api: Api<DynamicObject> = match object.namespace() {
                Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
                None => Api::all_with(client.clone(), &resource),
            };
            let mut params = PatchParams::apply("test").force().dry_run();
            params.field_validation = Some(ValidationDirective::Strict);
            let taken = api.patch(&object.name_any(), &params, &Patch::Apply(object)).await;
            taken.unwrap_or_else(|error| panic!("{folder}: {} {}: {error}", kind(object), object.name_any()));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_overlay_adds_the_issuer_and_its_rights() {
    let objects = render("overlays/cert-manager").await;
    let settings = objects.iter().find(|object| kind(object) == "ConfigMap").unwrap();
    assert_eq!(settings.data["data"]["TIDEWATCH_ISSUER"], "cert-manager:Issuer/tidewatch");
    assert!(settings.data["data"]["TIDEWATCH_RECEIVER_URL"].is_string(), "the settings of the base stay");
    let granted: Vec<_> =
        objects.iter().filter(|object| kind(object) == "Role").map(|role| role.data["rules"].clone()).collect();
    for rules in [rights::rules(), rights::cert_manager_rules()] {
        assert!(granted.contains(&serde_json::to_value(&rules).unwrap()), "{rules:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_overlay_of_the_mesh_adds_metadata_of_the_pod_alone() {
    let [mut base, mut meshed] = [render("base").await, render("overlays/istio").await];
    let metadata = |objects: &mut [DynamicObject]| {
        let deployment = objects.iter_mut().find(|object| kind(object) == "Deployment").unwrap();
        deployment.data["spec"]["template"]["metadata"].take()
    };
    let before = metadata(&mut base);
    let now = metadata(&mut meshed);
    assert_eq!(meshed, base);
    for (label, value) in before["labels"].as_object().unwrap() {
        assert_eq!(now["labels"][label], *value, "the selector still finds the pod");
    }
    assert_eq!(now["labels"]["sidecar.istio.io/inject"], "true");
    assert_eq!(now["annotations"]["traffic.sidecar.istio.io/includeInboundPorts"], "");
}

/// The namespace in which the admission policies apply here; the namespaces of landscapes stay unaffected.
const REFUSING: &str = "admission";

async fn apply(client: &Client, object: &DynamicObject) -> kube::Result<DynamicObject> {
    let types = object.types.clone().unwrap();
    let api = Api::all_with(client.clone(), &ApiResource::from_gvk(&GroupVersionKind::try_from(&types).unwrap()));
    api.patch(&object.name_any(), &PatchParams::apply("test").force(), &Patch::Apply(object)).await
}

/// Creates a catalog object in KCP as a dry run; returns the message of a refusal as error.
async fn create_dry_run(client: &Client, kind: Kind, name: &str, spec: &Value) -> std::result::Result<(), String> {
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), REFUSING, &kind.api_resource());
    let object = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind.name(),
        "metadata": {"name": name, "namespace": REFUSING}, "spec": spec});
    let params = PostParams { dry_run: true, ..PostParams::default() };
    let taken = api.create(&params, &serde_json::from_value(object).unwrap()).await;
    taken.map(drop).map_err(|error| error.to_string())
}

/// Returns a client of KCP after installing the CRDs and the namespace.
async fn with_crds(kcp: &Cluster) -> Result<Client> {
    kcp.ensure_namespace(REFUSING).await?;
    let client = kcp.client().await?;
    for crd in crds::crds() {
        apply(&client, &serde_json::from_value(serde_json::to_value(crd)?)?).await?;
    }
    Ok(client)
}

/// Applies the policies with matching names, limited to [`REFUSING`]; returns the number of objects.
async fn enforce(client: &Client, which: impl Fn(&str) -> bool) -> Result<usize> {
    let objects = render("admission").await.into_iter().filter(|object| which(&object.name_any()));
    let mut count = 0;
    for mut object in objects {
        assert_eq!(object.namespace(), None);
        if let Some(selector) = object.data.pointer_mut("/spec/matchResources/namespaceSelector/matchLabels") {
            *selector = json!({"kubernetes.io/metadata.name": REFUSING});
        }
        apply(client, &object).await?;
        count += 1;
    }
    Ok(count)
}

fn release(change: Value) -> Value {
    let mut spec = json!({"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda",
        "channels": [{"channel": "regular", "version": "1.0.0"}, {"channel": "fast", "version": "1.1.0-rc-1"}],
        "versions": [{"version": "1.0.0", "deprecationDate": "2027-01-31"}],
        "kymaSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a"]}, {"key": "x", "operator": "Exists"}]}});
    json_patch(&mut spec, change);
    spec
}

/// Merges the members of `change` into a spec: null removes a member, any other value replaces it whole.
fn json_patch(spec: &mut Value, change: Value) {
    for (key, value) in change.as_object().unwrap() {
        match value {
            Value::Null => drop(spec.as_object_mut().unwrap().remove(key)),
            value => spec[key] = value.clone(),
        }
    }
}

fn channels(entries: &[(&str, &str)]) -> Value {
    let entry = |(channel, version): &(&str, &str)| json!({"channel": channel, "version": version});
    json!({"channels": entries.iter().map(entry).collect::<Vec<_>>()})
}

#[tokio::test(flavor = "multi_thread")]
async fn the_admission_policies_refuse_invalid_catalogs() -> TestResult {
    let kcp = bed::shared().await?.kcp().await?;
    let client = with_crds(&kcp).await?;
    let old = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": Kind::Template.name(),
        "metadata": {"name": "keda-fast", "namespace": REFUSING}, "spec": {"channel": "fast", "descriptor": {}}});
    let old: DynamicObject = serde_json::from_value(old)?;
    let templates: Api<DynamicObject> = Api::namespaced_with(client.clone(), REFUSING, &Kind::Template.api_resource());
    let old = until("the CRDs to be served", async || Ok(Some(templates.create(&PostParams::default(), &old).await?)))
        .await?;
    let enforced = enforce(&client, |_| true).await?;
    assert_eq!(enforced, 12, "six policies and their bindings");
    let template = |module: &str, version: &str| json!({"moduleName": module, "version": version, "descriptor": {}});
    let mt = Kind::Template;
    let mrm = Kind::ReleaseMeta;
    until("the policies to take effect", async || {
        let template = create_dry_run(&client, mt, "keda", &template("keda", "1.0.0")).await.is_err();
        Ok((template && create_dry_run(&client, mrm, "kedas", &release(json!({}))).await.is_err()).then_some(()))
    })
    .await?;
    create_dry_run(&client, mt, "keda-1.0.0", &template("keda", "1.0.0")).await.unwrap();
    create_dry_run(&client, mrm, "keda", &release(json!({}))).await.unwrap();
    let mandatory =
        json!({"channels": null, "mandatory": {"version": "1.0.0"}, "kymaSelector": null, "versions": null});
    create_dry_run(&client, mrm, "keda", &release(mandatory)).await.unwrap();

    let selector = |operator: &str, values: &[&str]| json!({"kymaSelector": {"matchExpressions": [{"key": "a", "operator": operator, "values": values}]}});
    let nameable = "must be usable in the name of a template";
    let operator = "an operator of spec.kymaSelector";
    for (kind, name, spec, words) in [
        (mt, "keda-1.0.0", json!({"descriptor": {}}), "spec.moduleName and spec.version must be set"),
        (mt, "keda-1.0.0", template("keda", ""), "spec.moduleName and spec.version must be set"),
        (mt, "keda-1.1.0", template("keda", "1.0.0"), "the name must be <spec.moduleName>-<spec.version>"),
        (mrm, "other", release(json!({})), "the name must be spec.moduleName"),
        (mrm, "keda", release(json!({"ocmComponentName": null})), "spec.ocmComponentName must be set"),
        (mrm, "keda", release(channels(&[("regular", "")])), nameable),
        (mrm, "keda", release(channels(&[("regular", "1.0.0-RC")])), nameable),
        (mrm, "keda", release(json!({"channels": null, "mandatory": {"version": "1.0.0-rc.1"}})), nameable),
        (mrm, "keda", release(json!({"channels": null, "mandatory": {"version": "1.0.0+1"}})), nameable),
        (mrm, "keda", release(channels(&[("none", "1.0.0")])), "no channel may have the name none"),
        (
            mrm,
            "keda",
            release(json!({"versions": [{"version": ""}]})),
            "every entry of spec.versions must name its version",
        ),
        (mrm, "keda", release(selector("Like", &["a"])), operator),
        (mrm, "keda", release(selector("In", &[])), operator),
        (mrm, "keda", release(selector("Exists", &["a"])), operator),
        // Refusals by the CRDs themselves.
        (mrm, "keda", release(channels(&[("regular", "1.0.0"), ("regular", "1.1.0")])), "Duplicate value"),
        (mrm, "keda", release(channels(&[("regular", "v1.0.0")])), "spec.channels[0].version"),
        (mrm, "keda", release(json!({"mandatory": {"version": "1.0.0"}})), "exactly one of 'mandatory' or 'channels'"),
        (
            mrm,
            "keda",
            release(json!({"versions": [{"version": "1.0.0", "deprecationDate": "31.1.2027"}]})),
            "deprecationDate",
        ),
        (
            mrm,
            "keda",
            release(json!({"versions": [{"version": "1.0.0", "withdrawal": {"date": "31.1.2027"}}]})),
            "withdrawal.date",
        ),
    ] {
        let refused = create_dry_run(&client, kind, name, &spec).await.expect_err(&format!("{name} {spec}"));
        assert!(refused.contains(words), "{name} {spec}: {refused}");
    }
    // An object older than the policies may be labelled and deleted, but not changed into another invalid one.
    let labelled = Patch::Merge(json!({"metadata": {"labels": {label::BETA: "true"}}}));
    templates.patch(&old.name_any(), &PatchParams::default(), &labelled).await?;
    let otherwise = Patch::Merge(json!({"spec": {"channel": "regular"}}));
    let refused = templates.patch(&old.name_any(), &PatchParams::default(), &otherwise).await.unwrap_err().to_string();
    assert!(refused.contains("must be set"), "{refused}");
    templates.delete(&old.name_any(), &Default::default()).await?;
    templates_are_created_once(&templates).await
}

/// Checks that a template is not edited, but for its metadata and what informs users, unless the edit is allowed.
async fn templates_are_created_once(templates: &Api<DynamicObject>) -> TestResult {
    let object = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": Kind::Template.name(),
        "metadata": {"name": "once-1.0.0", "namespace": REFUSING},
        "spec": {"moduleName": "once", "version": "1.0.0", "descriptor": {}}});
    templates.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    let edit = async |change: Value| {
        let edited = templates.patch("once-1.0.0", &PatchParams::default(), &Patch::Merge(change)).await;
        edited.map_err(|error| error.to_string())
    };
    let data =
        |replicas: u8| json!({"spec": {"data": {"apiVersion": "a/v1", "kind": "A", "spec": {"replicas": replicas}}}});
    // The other policies are in effect, and this one soon.
    let refused = until("the policy of edits to take effect", async || {
        // One of them is a change.
        Ok(edit(data(1)).await.err().or(edit(data(2)).await.err()))
    });
    let refused = refused.await?;
    assert!(refused.contains("publish another version instead of changing spec.data"), "{refused}");
    let associated = json!([{"group": "apps", "version": "v1", "kind": "Deployment"}]);
    let several = json!({"spec": {"associatedResources": associated, "descriptor": {"x": 1}, "channel": "fast"}});
    assert!(edit(several).await.unwrap_err().contains("changing spec.associatedResources and spec.descriptor"));
    for same in [
        json!({"spec": {"channel": "regular"}}),
        json!({"spec": {"customStateCheck": [{"jsonPath": "status.x", "value": "y", "mappedState": "Ready"}]}}),
        json!({"metadata": {"labels": {label::BETA: "true"}, "annotations": {"a": "b"}}}),
        json!({"spec": {"info": {"repository": "https://r", "documentation": "https://d"},
            "resources": [{"name": "raw", "link": "https://l"}]}}),
    ] {
        edit(same).await.unwrap();
    }
    manager_may_be_repaired(templates).await?;
    let generation = templates.get("once-1.0.0").await?.metadata.generation.unwrap_or_default();
    edit(json!({"metadata": {"annotations": {annotation::ALLOW_EDIT: generation.to_string()}}})).await.unwrap();
    edit(data(7)).await.unwrap();
    assert!(edit(data(8)).await.is_err(), "one edit was allowed");
    templates.delete("once-1.0.0", &Default::default()).await?;
    Ok(())
}

/// Checks that the manager of a template may change, with a warning that nothing else causes.
async fn manager_may_be_repaired(templates: &Api<DynamicObject>) -> TestResult {
    let client = templates.clone().into_client();
    let change = async |spec: Value| -> Result<String> {
        let request = Request::new(templates.resource_url());
        let request = request.patch("once-1.0.0", &PatchParams::default(), &Patch::Merge(json!({ "spec": spec })))?;
        let response = client.send(request.map(Body::from)).await?;
        assert!(response.status().is_success(), "{spec}: {}", response.status());
        let warnings = response.headers().get_all("warning").iter().map(|header| header.to_str());
        Ok(warnings.collect::<Result<Vec<_>, _>>()?.join("\n"))
    };
    let manager = |namespace: &str| json!({"manager": {"group": "apps", "version": "v1", "kind": "Deployment", "name": "m", "namespace": namespace}});
    until("the policy of repairs to take effect", async || {
        // One of them is a change.
        let warnings = change(manager("a")).await? + &change(manager("b")).await?;
        Ok(warnings.contains("spec.manager changes").then_some(()))
    })
    .await?;
    let warning = change(manager("kyma-system")).await?;
    assert!(warning.contains("every runtime with this version looks for its manager anew"), "{warning}");
    assert_eq!(change(json!({"channel": "fast"})).await?, "");
    Ok(())
}

/// Sets the channels of a release meta, and returns the warnings of the response.
async fn set_channels(client: &Client, name: &str, to: &[(&str, &str)]) -> Result<String> {
    change_spec(client, name, &channels(to)).await
}

/// Sets members of a release meta's spec, and returns the warnings of the response.
async fn change_spec(client: &Client, name: &str, members: &Value) -> Result<String> {
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), REFUSING, &Kind::ReleaseMeta.api_resource());
    let change = Patch::Merge(json!({"spec": members}));
    let request = Request::new(api.resource_url()).patch(name, &PatchParams::default(), &change)?;
    let response = client.send(request.map(Body::from)).await?;
    assert!(response.status().is_success(), "{members}: {}", response.status());
    let stored = api.get(name).await?.data;
    for (member, value) in members.as_object().into_iter().flatten() {
        assert_eq!(stored["spec"][member], *value, "the change is accepted");
    }
    let warnings: Vec<_> =
        response.headers().get_all("warning").iter().map(|header| header.to_str()).collect::<Result<_, _>>()?;
    Ok(warnings.join("\n"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_downgrade_is_accepted_with_a_warning() -> TestResult {
    const NAME: &str = "rollback";
    let kcp = bed::shared().await?.kcp().await?;
    let client = with_crds(&kcp).await?;
    let metas: Api<DynamicObject> = Api::namespaced_with(client.clone(), REFUSING, &Kind::ReleaseMeta.api_resource());
    let meta = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": Kind::ReleaseMeta.name(),
        "metadata": {"name": NAME, "namespace": REFUSING}, "spec": release(json!({"moduleName": NAME}))});
    let meta: DynamicObject = serde_json::from_value(meta)?;
    until("the CRDs to be served", async || Ok(Some(metas.create(&PostParams::default(), &meta).await?))).await?;
    assert_eq!(enforce(&client, |name| name == "tidewatch-channel-moves").await?, 2);
    until("the policy to take effect", async || {
        set_channels(&client, NAME, &[("regular", "2.0.0")]).await?;
        let warned = set_channels(&client, NAME, &[("regular", "1.0.0")]).await?;
        Ok((!warned.is_empty()).then_some(()))
    })
    .await?;
    let huge = "99999999999999999999.0.0";
    for (from, to, words) in [
        ("1.0.0", "1.0.1", None),
        ("1.9.0", "1.10.0", None),
        ("1.10.0", "1.9.0", Some("regular moves down to 1.9.0")),
        ("1.0.2", "1.0.1", Some("regular moves down to 1.0.1")),
        ("2.0.0", "1.9.9", Some("regular moves down to 1.9.9")),
        ("1.0.0-rc", "1.0.0-alpha", None),
        ("1.0.1-rc", "1.0.0", Some("regular moves down to 1.0.0")),
        (huge, "1.0.0", None),
    ] {
        set_channels(&client, NAME, &[("fast", "3.0.0"), ("regular", from)]).await?;
        // A second channel that moves up.
        let warned = set_channels(&client, NAME, &[("regular", to), ("fast", "3.1.0")]).await?;
        let expected = words.map(|words| format!("runtimes with a higher version reject it: {words}"));
        assert_eq!(warned.is_empty(), expected.is_none(), "{from} to {to}: {warned}");
        assert!(
            warned.contains(expected.as_deref().unwrap_or_default()) && !warned.contains("fast"),
            "{from} to {to}: {warned}"
        );
    }
    assert_eq!(set_channels(&client, NAME, &[("regular", "1.0.0")]).await?, "", "removing a channel yields no warning");

    assert_eq!(enforce(&client, |name| name == "tidewatch-component-changes").await?, 2);
    let component = |name: &str| json!({"ocmComponentName": format!("kyma-project.io/module/{name}")});
    until("the policy of components to take effect", async || {
        let warned = change_spec(&client, NAME, &component("other")).await?;
        let back = change_spec(&client, NAME, &component("keda")).await?;
        Ok((warned.contains("the component of the module changes") && back.contains("changes")).then_some(()))
    })
    .await?;
    assert_eq!(change_spec(&client, NAME, &component("keda")).await?, "", "the same component yields no warning");

    let log = kcp.dir().join("audit.log");
    let end = fs::metadata(&log)?.len();
    set_channels(&client, NAME, &[("regular", "0.1.0")]).await?;
    let mut file = File::open(&log)?;
    let mut audited = String::new();
    file.seek(SeekFrom::Start(end))?;
    file.read_to_string(&mut audited)?;
    let audited = audited.lines().find(|line| line.contains("validation_failure"));
    assert!(audited.is_some_and(|line| line.contains("regular moves down to 0.1.0")), "{audited:?}");
    Ok(())
}
