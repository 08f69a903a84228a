//! The kubelet of the test bed: it runs exactly the pods of Deployments, as their specs state.

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Pod, Secret},
    networking::v1::NetworkPolicy,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tidewatch_testing::{
    bed,
    control_plane::Cluster,
    kubelet::{Kubelet, NODE, Options, PodState},
    landscape::until,
};

use crate::support::{Isolation, SingleRuntime, TestResult, quick_options};

const AGENT: &str = "tidewatch-agent";
const ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// A Deployment of one pod with one container.
fn deployment(name: &str, pod: &Value) -> Value {
    let app = json!({"app": name});
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {"strategy": {"type": "Recreate"}, "selector": {"matchLabels": app},
            "template": {"metadata": {"labels": app}, "spec": pod}},
    })
}

/// The pod of an agent with its identity in the Secret `identity` and the receiver's address in the ConfigMap
/// `settings`.
fn agent() -> Value {
    let probe = |path: &str| json!({"httpGet": {"path": path, "port": "metrics"}, "periodSeconds": 2});
    json!({
        "serviceAccountName": AGENT, "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 20,
        "containers": [{
            "name": "server", "image": "example.test/kyma/tidewatch-agent:dev",
            "args": ["--identity-dir=/etc/identity", format!("--service-account-dir={ACCOUNT_DIR}"),
                "--metrics-address=0.0.0.0:2112", "--heartbeat-seconds=$(SECONDS)"],
            "env": [
                {"name": "SECONDS", "value": "1"},
                {"name": "TIDEWATCH_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
                {"name": "TIDEWATCH_RECEIVER_URL", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "receiver-url"}}},
            ],
            "ports": [{"name": "metrics", "containerPort": 2112}],
            "readinessProbe": probe("/readyz"), "livenessProbe": probe("/healthz"),
            "volumeMounts": [
                {"name": "identity", "mountPath": "/etc/identity", "readOnly": true},
                {"name": "account", "mountPath": ACCOUNT_DIR, "readOnly": true},
            ],
        }],
        "volumes": [
            {"name": "identity", "secret": {"secretName": "identity", "defaultMode": 0o400}},
            {"name": "account", "projected": {"sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
            ]}},
        ],
    })
}

async fn apply<K>(client: &Client, namespace: &str, object: &Value) -> Result<K>
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + Serialize
        + DeserializeOwned
        + std::fmt::Debug,
{
    let mut object = object.clone();
    (object["apiVersion"], object["kind"]) = (json!(K::api_version(&())), json!(K::kind(&())));
    let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let params = PatchParams::apply("test").force();
    Ok(Api::<K>::namespaced(client.clone(), namespace).patch(&name, &params, &Patch::Apply(&object)).await?)
}

/// Waits until the single pod of a Deployment meets a condition.
async fn pod(client: &Client, namespace: &str, app: &str, description: &str, is: impl Fn(&Pod) -> bool) -> Result<Pod> {
    let api = Api::<Pod>::namespaced(client.clone(), namespace);
    until(&format!("the pod of {app}: {description}"), async || {
        let pods = api.list(&ListParams::default().labels(&format!("app={app}"))).await?.items;
        Ok(pods.into_iter().find(&is))
    })
    .await
}

/// Reason and message of a container that is in state `waiting`.
fn waiting_reason(pod: &Pod) -> Option<(String, String)> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let waiting = statuses.first()?.state.as_ref()?.waiting.as_ref()?;
    Some((waiting.reason.clone()?, waiting.message.clone().unwrap_or_default()))
}

fn is_waiting_for(reason: &'static str, part: &'static str) -> impl Fn(&Pod) -> bool {
    move |pod| waiting_reason(pod).is_some_and(|(waiting, message)| waiting == reason && message.contains(part))
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Waits until a pod's program runs as a process other than `before`.
async fn process_runs(kubelet: &Kubelet, pod: &str, before: Option<u32>) -> Result<PodState> {
    until(&format!("the process of {pod} to run"), async || {
        Ok(kubelet.pod(pod).filter(|running| running.pid().is_some() && running.pid() != before && running.ready))
    })
    .await
}

/// The letter of a process's state, see proc(5).
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

async fn process_ends(pid: u32) -> Result<()> {
    until("the process to end", async || Ok(matches!(state(pid), None | Some('Z')).then_some(()))).await
}

async fn file_changes(file: &Path, from: &str) -> Result<String> {
    until(&format!("{} to change", file.display()), async || {
        Ok(Some(fs::read_to_string(file)?).filter(|now| now != from))
    })
    .await
}

/// Waits until a pod's files are those of its new identity, then checks that the token of the service account is
/// replaced when it is due.
async fn volumes_follow_secret(
    kubelet: &Kubelet,
    running: &PodState,
    chain_before: &str,
    now: &BTreeMap<&'static str, String>,
) -> Result<()> {
    let folder = running.volumes.get("identity").context("the volume")?;
    let seen = file_changes(&folder.join("tls.crt"), chain_before).await?;
    assert_eq!((&seen, &fs::read_to_string(folder.join("tls.key"))?), (&now["tls.crt"], &now["tls.key"]));
    let account = running.volumes.get("account").context("the volume")?;
    assert_eq!(fs::read_to_string(account.join("namespace"))?, "kyma-system");
    let token = fs::read_to_string(account.join("token"))?;
    kubelet.renew_tokens();
    file_changes(&account.join("token"), &token).await?;
    Ok(())
}

#[tokio::test]
async fn an_agent_runs_as_its_deployment_specifies() -> TestResult {
    let setup = SingleRuntime::isolated_without_agent(
        Isolation::Kubelet,
        "kubelet",
        &[("keda", "1.0.0", "1.1.0")],
        quick_options(),
    )
    .await?;
    let kubelet = Kubelet::start(setup.runtime.cluster(), Options::default()).await?;
    setup.runtime.make_account().await?;
    let client = setup.runtime.cluster().client().await?;
    let namespace = "kyma-system";
    let identity = |files| json!({"metadata": {"name": "identity"}, "stringData": files});
    let first = setup.runtime.make_identity()?;
    apply::<Secret>(&client, namespace, &identity(json!(first))).await?;
    let url = format!("https://{}", setup.landscape.agents_authority());
    let settings = json!({"metadata": {"name": "settings"}, "data": {"receiver-url": url}});
    apply::<ConfigMap>(&client, namespace, &settings).await?;
    apply::<Deployment>(&client, namespace, &deployment("agent", &agent())).await?;
    let ready = pod(&client, namespace, "agent", "ready", is_ready).await?;
    assert_eq!(ready.spec.as_ref().and_then(|spec| spec.node_name.as_deref()), Some(NODE));
    let proven = |status: &tidewatch_api::KymaStatus| {
        status.condition("EventPath").is_some_and(tidewatch_api::Condition::is_true)
    };
    setup.kcp_status("a proven path", proven).await?;
    let deployments = Api::<Deployment>::namespaced(client.clone(), namespace);
    until("an available Deployment", async || {
        let status = deployments.get("agent").await?.status.unwrap_or_default();
        Ok((status.available_replicas == Some(1)).then_some(()))
    })
    .await?;

    // The process has the environment of the pod, and none of the test's.
    let name = ready.name_any();
    let running = process_runs(&kubelet, &name, None).await?;
    let pid = running.pid().context("a pid")?;
    let environment = fs::read_to_string(format!("/proc/{pid}/environ"))?;
    let names: Vec<_> =
        environment.split('\0').filter_map(|entry| entry.split_once('=')).map(|(name, _)| name).collect();
    assert!(names.contains(&"TIDEWATCH_NAMESPACE") && !names.contains(&"CARGO"), "{names:?}");

    // A changed Secret replaces all files of its volume at once; the process keeps running.
    let second = setup.runtime.make_identity()?;
    apply::<Secret>(&client, namespace, &identity(json!(second))).await?;
    volumes_follow_secret(&kubelet, &running, &first["tls.crt"], &second).await?;
    assert_eq!(kubelet.pid_of(&name), Some(pid));

    // A killed container is restarted in the same pod.
    assert!(kubelet.kill(&name));
    let again = process_runs(&kubelet, &name, Some(pid)).await?;
    let counted = pod(&client, namespace, "agent", "ready again", |pod| is_ready(pod) && restarts(pod) == 1).await?;
    assert_eq!((again.restarts, counted.uid()), (1, ready.uid()));

    // With zero replicas the process ends.
    let scale = Patch::Merge(json!({"spec": {"replicas": 0}}));
    deployments.patch("agent", &PatchParams::default(), &scale).await?;
    process_ends(again.pid().context("a pid")?).await?;
    let pods = Api::<Pod>::namespaced(client, namespace);
    until("the pod to go", async || Ok(pods.get_opt(&name).await?.is_none().then_some(()))).await?;
    // The kubelet forgets a pod later than the API server does.
    until("the kubelet to forget the pod", async || Ok(kubelet.pods().is_empty().then_some(()))).await?;
    assert!(fs::read_to_string(&again.log)?.contains("Shutting down"), "the process got the time to exit gracefully");
    Ok(())
}

fn restarts(pod: &Pod) -> i32 {
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    statuses.and_then(|statuses| statuses.first()).map_or(0, |status| status.restart_count)
}

/// Starts a cluster with a kubelet and without a receiver.
async fn cluster_without_receiver(name: &str, options: Options) -> Result<(Arc<Cluster>, Kubelet, Client)> {
    tidewatch_testing::install_crypto();
    let cluster = bed::shared().await?.runtime_for_kubelet(name).await?;
    let kubelet = Kubelet::start(&cluster, options).await?;
    let client = cluster.client().await?;
    Ok((cluster, kubelet, client))
}

/// A pod without an identity: one container of the agent's image, with these fields added.
fn pod_of_agent_image(container: Value) -> Value {
    let mut whole =
        json!({"name": "server", "image": "tidewatch-agent", "terminationMessagePolicy": "FallbackToLogsOnError"});
    whole.as_object_mut().into_iter().zip(container.as_object()).for_each(|(whole, more)| whole.extend(more.clone()));
    json!({"automountServiceAccountToken": false, "terminationGracePeriodSeconds": 5, "containers": [whole]})
}

#[tokio::test]
async fn pods_that_cannot_run_report_the_reason() -> TestResult {
    let (_cluster, kubelet, client) = cluster_without_receiver("pods", Options::default()).await?;
    let namespace = "default";
    let missing = pod_of_agent_image(json!({"image": "example.test/tidewatch-agent:does-not-exist"}));
    apply::<Deployment>(&client, namespace, &deployment("missing", &missing)).await?;
    let loops = pod_of_agent_image(json!({"args": ["--no-such-flag"]}));
    apply::<Deployment>(&client, namespace, &deployment("loops", &loops)).await?;
    let several = {
        let mut several = pod_of_agent_image(json!({}));
        several["containers"] = json!([several["containers"][0], {"name": "sidecar", "image": "nginx"}]);
        several
    };
    apply::<Deployment>(&client, namespace, &deployment("several", &several)).await?;
    let mut waiting = pod_of_agent_image(
        json!({"volumeMounts": [{"name": "later", "mountPath": "/later"}], "args": ["--no-such-flag"]}),
    );
    waiting["volumes"] = json!([{"name": "later", "secret": {"secretName": "later"}}]);
    apply::<Deployment>(&client, namespace, &deployment("waiting", &waiting)).await?;
    let foreign = json!({"containers": [{"name": "main", "image": "nginx"}]});
    apply::<Deployment>(&client, namespace, &deployment("foreign", &foreign)).await?;

    pod(&client, namespace, "missing", "no image", is_waiting_for("ImagePullBackOff", "does-not-exist")).await?;
    let looping = is_waiting_for("CrashLoopBackOff", "back-off");
    let looping = pod(&client, namespace, "loops", "a crash loop", |pod| looping(pod) && restarts(pod) >= 2).await?;
    let last =
        looping.status.as_ref().and_then(|status| status.container_statuses.as_ref()?.first()?.last_state.clone());
    let last = last.and_then(|state| state.terminated).context("the last termination")?;
    assert_eq!(last.exit_code, 2);
    assert!(last.message.is_some_and(|message| message.contains("--no-such-flag")));
    pod(
        &client,
        namespace,
        "several",
        "an unsupported pod",
        is_waiting_for("CreateContainerConfigError", "several containers"),
    )
    .await?;
    pod(&client, namespace, "foreign", "a simulated pod", is_ready).await?;
    pod(&client, namespace, "waiting", "no Secret", is_waiting_for("ContainerCreating", "\"later\" not found")).await?;
    let later = json!({"metadata": {"name": "later"}, "stringData": {"a": "b"}});
    apply::<Secret>(&client, namespace, &later).await?;
    pod(&client, namespace, "waiting", "started", |pod| restarts(pod) >= 1).await?;
    assert!(kubelet.pod(&looping.name_any()).is_some());
    Ok(())
}

/// The pod of an agent that keeps running without a receiver.
fn agent_without_receiver() -> Value {
    let mut pod = agent();
    pod["serviceAccountName"] = json!("default");
    // The agent never becomes ready without a receiver.
    pod["containers"][0]["readinessProbe"] = Value::Null;
    pod
}

async fn start_agent_without_receiver(name: &str, options: Options) -> Result<(Kubelet, Client, PodState)> {
    let (_, kubelet, client) = cluster_without_receiver(name, options).await?;
    let files = json!({"metadata": {"name": "identity"}, "stringData": {"tls.crt": "", "tls.key": "", "ca.crt": ""}});
    apply::<Secret>(&client, "default", &files).await?;
    let settings = json!({"metadata": {"name": "settings"}, "data": {"receiver-url": "https://127.0.0.1:1"}});
    apply::<ConfigMap>(&client, "default", &settings).await?;
    apply::<Deployment>(&client, "default", &deployment("lonely", &agent_without_receiver())).await?;
    let ready = pod(&client, "default", "lonely", "running", is_ready).await?;
    let running = process_runs(&kubelet, &ready.name_any(), None).await?;
    Ok((kubelet, client, running))
}

#[tokio::test]
async fn a_force_deleted_pod_leaves_no_process_and_is_recreated() -> TestResult {
    let (kubelet, client, running) = start_agent_without_receiver("force", Options::default()).await?;
    let pids = running.pid().context("a pid")?;
    let force = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    Api::<Pod>::namespaced(client.clone(), "default").delete(&running.name, &force).await?;
    process_ends(pids).await?;
    let next =
        pod(&client, "default", "lonely", "recreated", |pod| is_ready(pod) && pod.name_any() != running.name).await?;
    let next = process_runs(&kubelet, &next.name_any(), Some(pids)).await?.pid().context("a pid")?;
    // Dropping the kubelet ends all of its processes.
    drop(kubelet);
    process_ends(next).await?;
    Ok(())
}

#[tokio::test]
async fn a_pod_without_allowed_egress_is_frozen_until_it_is_allowed() -> TestResult {
    let (_kubelet, client, running) =
        start_agent_without_receiver("denied", Options { policies: Some(vec![8443]), ..Options::default() }).await?;
    let pid = running.pid().context("a pid")?;
    let becomes = async |wanted: char| {
        until(&format!("the process to be {wanted}"), async || {
            Ok(state(pid).filter(|state| (*state == 'T') == (wanted == 'T')).map(drop))
        })
        .await
    };
    let policy = |name: &str, egress: Value| json!({"metadata": {"name": name}, "spec": {"podSelector": {}, "policyTypes": ["Egress"], "egress": egress}});
    apply::<NetworkPolicy>(&client, "default", &policy("deny", json!([]))).await?;
    becomes('T').await?;
    pod(&client, "default", "lonely", "unready", |pod| !is_ready(pod)).await?;
    let allowed = json!([{"ports": [{"port": 443}, {"port": 8443}]}]);
    apply::<NetworkPolicy>(&client, "default", &policy("allow", allowed)).await?;
    becomes('S').await?;
    pod(&client, "default", "lonely", "ready again", is_ready).await?;
    Ok(())
}
