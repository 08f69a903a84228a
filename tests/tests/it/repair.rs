//! Repair of the installation after any change by a runtime's user, including changes that silence the agent itself.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use k8s_openapi::{
    ByteString,
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Pod, Secret},
        networking::v1::NetworkPolicy,
    },
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tidewatch_api::{
    Kyma,
    names::{
        AGENT_DEPLOYMENT, AGENT_OBJECT, CHAIN_KEY, IDENTITY_SECRET, RECEIVER_URL_KEY, RUNTIME_ID_KEY, SKR_NAMESPACE,
        label,
    },
};
use tidewatch_testing::{
    control_plane::ClusterUser,
    landscape::{Options, until},
    progress::print_line,
};
use tokio::time::sleep;

use crate::{
    installer::{OBJECTS, Object},
    support::{Fleet, Member, QUOTA, TestResult, quick_options, refuse_pods},
    sync::sum,
};

/// Returns the API of a kind in the agent's namespace, as the runtime's user.
async fn objects<K>(member: &Member) -> Result<Api<K>>
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
{
    Ok(Api::namespaced(member.runtime.cluster().client_as(ClusterUser::User).await?, SKR_NAMESPACE))
}

/// Options with heartbeats so rare that a lost connection is noticed before a missing heartbeat.
fn rare_heartbeats() -> Options {
    Options { heartbeat_seconds: 30, ..quick_options() }
}

/// Number of agents that were missed because of their connection; checks that no heartbeat was ever missed.
async fn missed_by_connection(fleet: &Fleet) -> Result<u64> {
    let page = fleet.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??.1;
    assert_eq!(sum(&page, "tidewatch_path_transitions_total", &["state=\"NoHeartbeat\""]), 0, "{page}");
    Ok(sum(&page, "tidewatch_path_mended_total", &[]))
}

async fn chain(secrets: &Api<Secret>) -> Result<Option<ByteString>> {
    let secret = secrets.get_opt(IDENTITY_SECRET).await?;
    let chain = secret.and_then(|secret| secret.data?.remove(CHAIN_KEY));
    Ok(chain.filter(|chain| !chain.0.is_empty()))
}

#[tokio::test]
async fn a_deleted_scaled_or_killed_agent_is_restored() -> TestResult {
    let fleet = Fleet::with_one_runtime("gone", rare_heartbeats()).await?;
    let member = fleet.only();
    let deployments = objects::<Deployment>(member).await?;
    let secrets = objects::<Secret>(member).await?;
    let original = chain(&secrets).await?.context("an identity")?;

    // Delete the Deployment.
    let first = member.agent(None).await?.pid();
    deployments.delete(AGENT_DEPLOYMENT, &DeleteParams::default()).await?;
    let second = member.agent(first).await?;
    member.path_proven().await?;
    member.delivers(&["keda"]).await?;

    // Scale to zero repeatedly: the receiver may revert it before the controllers notice.
    let scale = Patch::Merge(json!({"spec": {"replicas": 0}}));
    let pods = objects::<Pod>(member).await?;
    until("the pod to be scaled away", async || {
        deployments.patch(AGENT_DEPLOYMENT, &PatchParams::default(), &scale).await?;
        sleep(Duration::from_millis(500)).await;
        let pod = pods.get_opt(&second.name).await?;
        Ok(pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some()).then_some(()))
    })
    .await?;
    let third = member.agent(second.pid()).await?;
    member.path_proven().await?;
    member.delivers(&[]).await?;

    // Kill the process: the kubelet alone restarts it.
    assert!(member.kubelet.kill(&third.name));
    let fourth = member.agent(third.pid()).await?;
    assert_eq!((fourth.name, fourth.restarts), (third.name, 1));
    member.path_proven().await?;
    member.delivers(&["keda"]).await?;
    assert_eq!(chain(&secrets).await?, Some(original), "its identity survives");
    missed_by_connection(&fleet).await?;
    Ok(())
}

#[tokio::test]
async fn an_agent_with_a_wrong_receiver_address_recovers() -> TestResult {
    let fleet = Fleet::with_one_runtime("address", rare_heartbeats()).await?;
    let member = fleet.only();
    let maps = objects::<ConfigMap>(member).await?;
    let agent = member.agent(None).await?;
    let wrong = Patch::Merge(json!({"data": {RECEIVER_URL_KEY: "https://127.0.0.1:1"}}));
    let broken = maps.patch(AGENT_OBJECT, &PatchParams::default(), &wrong).await?;
    let wanted = format!("https://{}", fleet.landscape.agents_authority());
    until("the address to be restored", async || {
        let map = maps.get(AGENT_OBJECT).await?;
        let repaired = map.data.as_ref().and_then(|data| data.get(RECEIVER_URL_KEY)) == Some(&wanted);
        Ok((repaired && map.resource_version() != broken.resource_version()).then_some(()))
    })
    .await?;
    member.delivers(&["keda"]).await?;
    member.path_proven().await?;
    assert_eq!(member.agent(None).await?.pid(), agent.pid(), "the agent follows its ConfigMap without a restart");
    missed_by_connection(&fleet).await?;
    Ok(())
}

/// The agent is frozen before it is deleted, so no event of the deletion reaches the receiver. A pass of the installation
/// that still was queued may restore the Deployment first; then its next agent disappears.
#[tokio::test]
async fn an_agent_that_disappears_without_an_event_is_missed() -> TestResult {
    const ROUNDS: usize = 5;
    let fleet = Fleet::with_one_runtime("silence", rare_heartbeats()).await?;
    let member = fleet.only();
    let deployments = objects::<Deployment>(member).await?;
    let pods = objects::<Pod>(member).await?;
    let mut agent = member.agent(None).await?;
    for _ in 0..ROUNDS {
        member.kubelet.freeze(&agent)?;
        deployments.delete(AGENT_DEPLOYMENT, &DeleteParams::default()).await?;
        let force = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        pods.delete(&agent.name, &force).await?;
        let began = Instant::now();
        agent = member.agent(agent.pid()).await?;
        member.path_proven().await?;
        print_line(&format!("an agent that disappeared: proven again after {:.1} s", began.elapsed().as_secs_f64()));
        if missed_by_connection(&fleet).await? > 0 {
            return Ok(member.delivers(&["keda"]).await?);
        }
    }
    panic!("none of {ROUNDS} agents was missed");
}

/// The agent's packets are dropped before the network policies are deleted, so no event of that reaches the receiver.
/// Heartbeats are rare, so the kubelet isolates the pod long before the receiver misses one.
#[tokio::test]
async fn an_agent_with_denied_egress_is_allowed_again() -> TestResult {
    let options = Options { proxied: true, heartbeat_seconds: 5, ..quick_options() };
    let fleet = Fleet::with_one_runtime("deny", options).await?;
    let member = fleet.only();
    let policies = objects::<NetworkPolicy>(member).await?;
    // A user denies all traffic in the namespace, as hardened clusters do; the agent's policies allow its own.
    let deny_all =
        json!({"metadata": {"name": "deny-all"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}});
    policies.create(&PostParams::default(), &serde_json::from_value(deny_all)?).await?;
    let proxy = fleet.landscape.agents_proxy().context("a proxy")?;
    proxy.drop_established();
    proxy.black_hole();
    let is_isolated = |wanted| member.kubelet.pods().iter().any(|pod| pod.isolated == wanted && pod.process.is_some());
    until("the agent to be isolated", async || {
        if is_isolated(true) {
            return Ok(Some(()));
        }
        // A reconcile that repeats its first one after a start may restore them before the kubelet has looked.
        for policy in policies.list(&ListParams::default()).await?.items.iter().filter(|policy| allows_egress(policy)) {
            // The policy of the user remains.
            match policies.delete(&policy.name_any(), &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                deleted => drop(deleted?),
            }
        }
        Ok(None)
    })
    .await?;
    proxy.resume();
    let began = Instant::now();
    until("the policies to be restored", async || Ok(is_isolated(false).then_some(()))).await?;
    let allowed = began.elapsed().as_secs_f64();
    // Only events from now on count.
    member.delivers(&["keda"]).await?;
    member.path_proven().await?;
    let proven = began.elapsed().as_secs_f64();
    print_line(&format!("an agent without egress: allowed after {allowed:.1} s, proven after {proven:.1} s"));
    Ok(())
}

fn allows_egress(policy: &NetworkPolicy) -> bool {
    policy.spec.as_ref().is_some_and(|spec| spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()))
}

/// A refusal by the runtime's own rules is reported in a condition, which recovers with the cause.
#[tokio::test]
async fn an_exceeded_quota_is_reported_in_a_condition() -> TestResult {
    let fleet = Fleet::with_one_runtime("room", quick_options()).await?;
    let member = fleet.only();
    member.condition_becomes("SKRWebhook", "True", "Ready").await?;
    let pods = objects::<Pod>(member).await?;
    let quotas = refuse_pods(&member.runtime.cluster().client().await?).await?;
    let agent = member.agent(None).await?;
    pods.delete(&agent.name, &DeleteParams::default()).await?;
    let words = member.condition_becomes("SKRWebhook", "False", "Quota").await?;
    assert!(words.contains("exceeded quota: none"), "{words}");
    quotas.delete(QUOTA, &DeleteParams::default()).await?;
    member.condition_becomes("SKRWebhook", "True", "Ready").await?;
    member.path_proven().await?;
    Ok(())
}

#[tokio::test]
async fn an_agent_that_cannot_start_is_reported_in_a_condition() -> TestResult {
    // The second image runs one of our programs that lacks these flags.
    let images = [
        ("unpulled", "example.test/tidewatch-agent:does-not-exist", "ImagePull", "does-not-exist"),
        ("crashing", "example.test/tidewatch-receiver:dev", "CrashLoop", "--service-account-dir"),
    ];
    for (name, image, reason, part) in images {
        let options = Options { agent_image: image.to_owned(), ..quick_options() };
        let (mut fleet, clusters) = Fleet::prepare(name, 1, options).await?;
        fleet.register(clusters).await?;
        let words = fleet.only().condition_becomes("SKRWebhook", "False", reason).await?;
        assert!(words.contains(part), "{words}");
    }
    Ok(())
}

#[tokio::test]
async fn a_deleted_identity_secret_is_restored() -> TestResult {
    let fleet = Fleet::with_one_runtime("secret", quick_options()).await?;
    let member = fleet.only();
    let secrets = objects::<Secret>(member).await?;
    let agent = member.agent(None).await?;
    secrets.delete(IDENTITY_SECRET, &DeleteParams::default()).await?;
    until("the identity to be restored", async || chain(&secrets).await).await?;
    member.delivers(&["keda"]).await?;
    member.path_proven().await?;
    assert_eq!(member.agent(None).await?.pid(), agent.pid());
    Ok(())
}

#[tokio::test]
async fn a_recreated_kyma_gets_its_agent_again() -> TestResult {
    let mut fleet = Fleet::with_one_runtime("again", quick_options()).await?;
    let member = fleet.only();
    let deployments = objects::<Deployment>(member).await?;
    let kymas = Api::<Kyma>::namespaced(fleet.landscape.kcp().client().await?, fleet.landscape.namespace());
    kymas.delete(member.runtime.name(), &DeleteParams::default()).await?;
    until("the Kyma to go", async || Ok(member.runtime.kcp_kyma().await?.is_none().then_some(()))).await?;
    until("the agent to go", async || {
        let deployment = deployments.get_opt(AGENT_DEPLOYMENT).await?;
        Ok((deployment.is_none() && member.kubelet.pods().is_empty()).then_some(()))
    })
    .await?;
    let client = member.runtime.cluster().client_as(ClusterUser::User).await?;
    for object in OBJECTS.map(|object| Object::new(&client, object)) {
        assert!(object.api.get_opt(object.name).await?.is_none(), "{}/{} is left", object.plural, object.name);
    }
    let old = fleet.members.remove(0);
    let cluster = old.runtime.cluster().clone();
    drop(old);
    fleet.register(vec![cluster]).await?;
    fleet.only().path_proven().await?;
    fleet.only().delivers(&["keda"]).await?;
    Ok(())
}

#[tokio::test]
async fn a_changed_runtime_id_leads_to_a_new_identity() -> TestResult {
    let fleet = Fleet::with_one_runtime("renamed", quick_options()).await?;
    let member = fleet.only();
    let secrets = objects::<Secret>(member).await?;
    let maps = objects::<ConfigMap>(member).await?;
    let before = chain(&secrets).await?.context("an identity")?;
    let kymas = Api::<Kyma>::namespaced(fleet.landscape.kcp().client().await?, fleet.landscape.namespace());
    let other = format!("{}.other", member.runtime.id());
    let renamed = Patch::Merge(json!({"metadata": {"labels": {label::RUNTIME_ID: other}}}));
    kymas.patch(member.runtime.name(), &PatchParams::default(), &renamed).await?;
    until("the new runtime id in the ConfigMap", async || {
        let data = maps.get(AGENT_OBJECT).await?.data;
        Ok(data.filter(|data| data.get(RUNTIME_ID_KEY) == Some(&other)).map(drop))
    })
    .await?;
    until("a new identity", async || Ok(chain(&secrets).await?.filter(|now| *now != before))).await?;
    member.delivers(&["keda"]).await?;
    member.path_proven().await?;
    Ok(())
}
