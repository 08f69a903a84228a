//! Rehearsal of `docs/install.md`: the rendered base is applied to a control plane, and the receiver runs with exactly the environment, account
//! and rights of its Deployment. Only names and addresses are those of this machine.

use std::{collections::BTreeMap, fs};

use anyhow::{Context as _, Result};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Container},
};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, Patch, PatchParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::{Value, json};
use tidewatch_testing::{
    bed,
    landscape::DEADLINE,
    ports,
    process::Program,
    product::{ProductProcess, build_binaries},
};

use crate::{deploy, support::TestResult};

/// The namespace of the installation here; other tests use the same control plane.
const NAMESPACE: &str = "install";
/// Name of all objects of the installation.
const RECEIVER: &str = "tidewatch-receiver";

/// Applies one rendered object to the namespace of this test.
async fn apply(client: &Client, mut object: DynamicObject) -> Result<()> {
    let types = object.types.clone().context("a kind")?;
    let resource = ApiResource::from_gvk(&GroupVersionKind::try_from(&types)?);
    let api: Api<DynamicObject> = match object.namespace() {
        Some(_) => {
            object.metadata.namespace = Some(NAMESPACE.to_owned());
            Api::namespaced_with(client.clone(), NAMESPACE, &resource)
        }
        None => Api::all_with(client.clone(), &resource),
    };
    if let Some(Value::Array(subjects)) = object.data.get_mut("subjects") {
        subjects.iter_mut().for_each(|subject| subject["namespace"] = json!(NAMESPACE));
    }
    let name = object.name_any();
    let params = PatchParams::apply("test").force();
    api.patch(&name, &params, &Patch::Apply(&object)).await.with_context(|| format!("apply {} {name}", types.kind))?;
    Ok(())
}

/// The environment that the kubelet would give to a container.
async fn environment(client: &Client, container: &Container) -> Result<BTreeMap<String, String>> {
    let mut environment = BTreeMap::new();
    for source in container.env_from.iter().flatten() {
        let name = &source.config_map_ref.as_ref().context("only ConfigMaps are used")?.name;
        let map = Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE).get(name).await?;
        environment.extend(map.data.unwrap_or_default());
    }
    for variable in container.env.iter().flatten() {
        let field =
            variable.value_from.as_ref().and_then(|source| Some(source.field_ref.as_ref()?.field_path.as_str()));
        let value = match (field, &variable.value) {
            (Some("metadata.namespace"), _) => NAMESPACE.to_owned(),
            (Some("metadata.uid"), _) => "pod-1".to_owned(),
            (Some("metadata.name"), _) => "tidewatch-receiver-1".to_owned(),
            (Some("status.podIP"), _) => "127.0.0.1".to_owned(),
            (None, Some(value)) => value.clone(),
            other => anyhow::bail!("{}: {other:?}", variable.name),
        };
        environment.insert(variable.name.clone(), value);
    }
    Ok(environment)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rendered_installation_becomes_ready() -> TestResult {
    let kcp = bed::shared().await?.kcp().await?;
    kcp.ensure_namespace(NAMESPACE).await?;
    let client = kcp.client().await?;
    let objects = deploy::render("base").await;
    for mut object in objects.into_iter().filter(|object| !deploy::needs_operator(object)) {
        if deploy::kind(&object) == "ConfigMap" {
            // The names that an operator edits.
            let settings = object.data["data"].as_object_mut().context("settings")?;
            for value in settings.values_mut() {
                *value = value.as_str().context("text")?.replace("tidewatch.example.com", "localhost").into();
            }
        }
        apply(&client, object).await?;
    }

    let deployment = Api::<Deployment>::namespaced(client.clone(), NAMESPACE).get(RECEIVER).await?;
    let pod = deployment.spec.context("a spec")?.template.spec.context("a pod")?;
    assert_eq!(pod.service_account_name.as_deref(), Some(RECEIVER));
    let container = &pod.containers[0];
    let probe = container.readiness_probe.as_ref().and_then(|probe| probe.http_get.as_ref()?.path.as_deref());
    assert_eq!(probe, Some("/readyz"), "the path that this test waits for");

    let dir = tempfile::tempdir()?;
    let kubeconfig = dir.path().join("kubeconfig");
    fs::write(&kubeconfig, kcp.kubeconfig_for_token(&kcp.service_account_token(NAMESPACE, RECEIVER).await?))?;
    let binaries = build_binaries().await?;
    let probes = ports::free()?;
    let admin = ports::free()?;
    let local = |port: u16| format!("127.0.0.1:{port}");
    let mut program = Program::new("receiver", binaries.receiver()?, dir.path().join("receiver.log"))
        .env("TIDEWATCH_KUBECONFIG", kubeconfig)
        .args(["--event-address", &local(ports::free()?), "--enrolment-address", &local(ports::free()?)])
        .args(["--metrics-address", &local(probes), "--admin-address", &local(admin)])
        .args(["--relay-address", &local(ports::free()?)]);
    for (name, value) in environment(&client, container).await? {
        program = program.env(name, value);
    }
    let receiver = ProductProcess::start(program, ([127, 0, 0, 1], probes).into())?;
    receiver.ready(DEADLINE).await?;
    // It serves all shards by the Leases and the Role of the installation, as a replica among others.
    let (_, page) = receiver.get("/metrics").await?;
    for sample in ["tidewatch_active 1", "tidewatch_shards 24"] {
        assert!(page.lines().any(|line| line == sample), "{sample}: {page}");
    }
    let held = ["tidewatch_shards_held 24", "tidewatch_fleet_role_held 1"];
    let all_held = |page: &str| held.iter().all(|held| page.lines().any(|line| line == *held)).then_some(());
    receiver.metrics_until(DEADLINE, all_held).await?;

    let fleet = tokio::process::Command::new(binaries.cli()?)
        .args(["fleet", "--json", "--admin-url", &format!("http://{}", local(admin))])
        .output()
        .await?;
    assert!(fleet.status.success(), "{}", String::from_utf8_lossy(&fleet.stderr));
    let fleet: Value = serde_json::from_slice(&fleet.stdout)?;
    assert_eq!(fleet["runtimes"], json!([]));
    Ok(())
}
