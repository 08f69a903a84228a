//! Whatever a user breaks of the installation comes back, and what silences the agent itself does too.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use k8s_openapi::{
    ByteString,
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Pod, ResourceQuota, Secret},
        networking::v1::NetworkPolicy,
    },
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tidewatch_shared::{
    api::Kyma,
    names::{
        AGENT_DEPLOYMENT, AGENT_OBJECT, CHAIN_KEY, IDENTITY_SECRET, RECEIVER_URL_KEY, RUNTIME_ID_KEY, SKR_NAMESPACE,
        label,
    },
};
use tidewatch_tests::{
    control_plane::Person,
    landscape::{Options, until},
    progress::say,
};
use tokio::time::sleep;

use crate::{
    installer::{OBJECTS, Object},
    support::{Member, Nothing, Tested, quick},
    sync::sum,
};

/// The objects of a kind in the agent's namespace, as the runtime's user sees them.
async fn objects<K>(member: &Member) -> Result<Api<K>>
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
{
    Ok(Api::namespaced(member.runtime.cluster().client_as(Person::User).await?, SKR_NAMESPACE))
}

/// Heartbeats so rare that nobody is missed by them: who is silent has lost his connection before.
fn rare() -> Options {
    Options { heartbeat_seconds: 30, ..quick() }
}

/// How often an agent was missed, in a receiver that never missed a heartbeat.
async fn missed_by_connection(nothing: &Nothing) -> Result<u64> {
    let page = nothing.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??.1;
    assert_eq!(sum(&page, "tidewatch_path_transitions_total", &["state=\"NoHeartbeat\""]), 0, "{page}");
    Ok(sum(&page, "tidewatch_path_mended_total", &[]))
}

async fn chain(secrets: &Api<Secret>) -> Result<Option<ByteString>> {
    let secret = secrets.get_opt(IDENTITY_SECRET).await?;
    let chain = secret.and_then(|secret| secret.data?.remove(CHAIN_KEY));
    Ok(chain.filter(|chain| !chain.0.is_empty()))
}

#[tokio::test]
async fn an_agent_that_is_gone_comes_back() -> Tested {
    let nothing = Nothing::one("gone", rare()).await?;
    let member = nothing.only();
    let (deployments, secrets) = (objects::<Deployment>(member).await?, objects::<Secret>(member).await?);
    let born = chain(&secrets).await?.context("an identity")?;

    // Deleted.
    let first = member.agent(None).await?.pid();
    deployments.delete(AGENT_DEPLOYMENT, &DeleteParams::default()).await?;
    let second = member.agent(first).await?;
    member.proven().await?;
    member.delivers(&["keda"]).await?;

    // Scaled to zero, again and again: the receiver may be faster than the controllers, which then see nothing of it.
    let (scale, pods) = (Patch::Merge(json!({"spec": {"replicas": 0}})), objects::<Pod>(member).await?);
    until("the pod to be scaled away", async || {
        deployments.patch(AGENT_DEPLOYMENT, &PatchParams::default(), &scale).await?;
        sleep(Duration::from_millis(500)).await;
        let pod = pods.get_opt(&second.name).await?;
        Ok(pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some()).then_some(()))
    })
    .await?;
    let third = member.agent(second.pid()).await?;
    member.proven().await?;
    member.delivers(&[]).await?;

    // Killed: nobody but the kubelet has anything to do.
    assert!(member.kubelet.kill(&third.name));
    let fourth = member.agent(third.pid()).await?;
    assert_eq!((fourth.name, fourth.restarts), (third.name, 1));
    member.proven().await?;
    member.delivers(&["keda"]).await?;
    assert_eq!(chain(&secrets).await?, Some(born), "its identity survives");
    missed_by_connection(&nothing).await?;
    Ok(())
}

#[tokio::test]
async fn an_agent_with_a_wrong_address_finds_back() -> Tested {
    let nothing = Nothing::one("address", rare()).await?;
    let member = nothing.only();
    let maps = objects::<ConfigMap>(member).await?;
    let agent = member.agent(None).await?;
    let wrong = Patch::Merge(json!({"data": {RECEIVER_URL_KEY: "https://127.0.0.1:1"}}));
    let broken = maps.patch(AGENT_OBJECT, &PatchParams::default(), &wrong).await?;
    let wanted = format!("https://{}", nothing.landscape.agents_authority());
    until("the address to come back", async || {
        let map = maps.get(AGENT_OBJECT).await?;
        let repaired = map.data.as_ref().and_then(|data| data.get(RECEIVER_URL_KEY)) == Some(&wanted);
        Ok((repaired && map.resource_version() != broken.resource_version()).then_some(()))
    })
    .await?;
    member.delivers(&["keda"]).await?;
    member.proven().await?;
    assert_eq!(member.agent(None).await?.pid(), agent.pid(), "it follows its ConfigMap without a restart");
    missed_by_connection(&nothing).await?;
    Ok(())
}

/// Nobody can tell the receiver: the agent is frozen before it is deleted.
#[tokio::test]
async fn an_agent_that_goes_in_silence_is_missed() -> Tested {
    let nothing = Nothing::one("silence", rare()).await?;
    let member = nothing.only();
    let (deployments, pods) = (objects::<Deployment>(member).await?, objects::<Pod>(member).await?);
    let agent = member.agent(None).await?;
    member.kubelet.freeze(&agent)?;
    deployments.delete(AGENT_DEPLOYMENT, &DeleteParams::default()).await?;
    let force = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    pods.delete(&agent.name, &force).await?;
    let began = Instant::now();
    member.agent(agent.pid()).await?;
    member.proven().await?;
    member.delivers(&["keda"]).await?;
    say(&format!("an agent that went in silence: heard again after {:.1} s", began.elapsed().as_secs_f64()));
    assert!(missed_by_connection(&nothing).await? > 0, "nobody missed it");
    Ok(())
}

/// What the agent would say goes nowhere, before the policies silence it.
#[tokio::test]
async fn an_agent_whose_way_is_denied_is_let_out_again() -> Tested {
    let nothing = Nothing::one("deny", Options { proxied: true, ..quick() }).await?;
    let member = nothing.only();
    let policies = objects::<NetworkPolicy>(member).await?;
    let installed = policies.list(&ListParams::default()).await?.items;
    let out = installed.into_iter().filter(|policy| {
        policy.spec.as_ref().is_some_and(|spec| spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()))
    });
    nothing.landscape.front().context("a proxy")?.forget();
    for policy in out {
        // What is left denies everything.
        policies.delete(&policy.name_any(), &DeleteParams::default()).await?;
    }
    let silenced = async |wanted| {
        let is = || member.kubelet.pods().iter().any(|pod| pod.silenced == wanted && pod.process.is_some());
        until("the policies to be heeded", async || Ok(is().then_some(()))).await
    };
    silenced(true).await?;
    let began = Instant::now();
    silenced(false).await?;
    let let_out = began.elapsed().as_secs_f64();
    // Only what the agent says from now on counts.
    member.delivers(&["keda"]).await?;
    member.proven().await?;
    let proven = began.elapsed().as_secs_f64();
    say(&format!("an agent without a way out: let out after {let_out:.1} s, proven after {proven:.1} s"));
    Ok(())
}

/// What the runtime's own rules refuse is said, and gone when they no longer do.
#[tokio::test]
async fn an_agent_that_finds_no_room_is_said_so() -> Tested {
    let nothing = Nothing::one("room", quick()).await?;
    let member = nothing.only();
    member.said("SKRWebhook", "True", "Ready").await?;
    let (quotas, pods) = (objects::<ResourceQuota>(member).await?, objects::<Pod>(member).await?);
    let none = json!({"pods": "0"});
    let quota = serde_json::from_value(json!({"metadata": {"name": "none"}, "spec": {"hard": none}}))?;
    quotas.create(&PostParams::default(), &quota).await?;
    // No controller counts here.
    let counted = Patch::Merge(json!({"status": {"hard": none, "used": none}}));
    quotas.patch_status("none", &PatchParams::default(), &counted).await?;
    let probe = json!({"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "probe", "image": "probe"}]}});
    let (probe, dry) = (serde_json::from_value(probe)?, PostParams { dry_run: true, ..PostParams::default() });
    until("the quota to hold", async || {
        let refused = pods.create(&dry, &probe).await.err();
        Ok(refused.filter(|error| error.to_string().contains("exceeded quota")).map(drop))
    })
    .await?;
    let agent = member.agent(None).await?;
    pods.delete(&agent.name, &DeleteParams::default()).await?;
    let words = member.said("SKRWebhook", "False", "Quota").await?;
    assert!(words.contains("exceeded quota: none"), "{words}");
    quotas.delete("none", &DeleteParams::default()).await?;
    member.said("SKRWebhook", "True", "Ready").await?;
    member.proven().await?;
    Ok(())
}

#[tokio::test]
async fn an_agent_that_cannot_run_is_said_so() -> Tested {
    // The second one is a program of ours that knows none of these flags.
    let images = [
        ("unpulled", "example.test/tidewatch-agent:does-not-exist", "ImagePull", "does-not-exist"),
        ("crashing", "example.test/tidewatch-receiver:dev", "CrashLoop", "--service-account-dir"),
    ];
    for (name, image, reason, part) in images {
        let options = Options { agent_image: image.to_owned(), ..quick() };
        let (mut nothing, clusters) = Nothing::prepare(name, 1, options).await?;
        nothing.register(clusters).await?;
        let words = nothing.only().said("SKRWebhook", "False", reason).await?;
        assert!(words.contains(part), "{words}");
    }
    Ok(())
}

#[tokio::test]
async fn a_deleted_identity_is_written_again() -> Tested {
    let nothing = Nothing::one("secret", quick()).await?;
    let member = nothing.only();
    let secrets = objects::<Secret>(member).await?;
    let agent = member.agent(None).await?;
    secrets.delete(IDENTITY_SECRET, &DeleteParams::default()).await?;
    until("the identity to be there again", async || chain(&secrets).await).await?;
    member.delivers(&["keda"]).await?;
    member.proven().await?;
    assert_eq!(member.agent(None).await?.pid(), agent.pid());
    Ok(())
}

#[tokio::test]
async fn a_kyma_that_is_made_again_gets_its_agent_again() -> Tested {
    let mut nothing = Nothing::one("again", quick()).await?;
    let member = nothing.only();
    let deployments = objects::<Deployment>(member).await?;
    let kymas = Api::<Kyma>::namespaced(nothing.landscape.kcp().client().await?, nothing.landscape.namespace());
    kymas.delete(member.runtime.name(), &DeleteParams::default()).await?;
    until("the Kyma to go", async || Ok(member.runtime.kcp_kyma().await?.is_none().then_some(()))).await?;
    until("the agent to go", async || {
        let deployment = deployments.get_opt(AGENT_DEPLOYMENT).await?;
        Ok((deployment.is_none() && member.kubelet.pods().is_empty()).then_some(()))
    })
    .await?;
    let client = member.runtime.cluster().client_as(Person::User).await?;
    for object in OBJECTS.map(|object| Object::new(&client, object)) {
        assert!(object.api.get_opt(object.name).await?.is_none(), "{}/{} is left", object.plural, object.name);
    }
    let old = nothing.members.remove(0);
    let cluster = old.runtime.cluster().clone();
    drop(old);
    nothing.register(vec![cluster]).await?;
    nothing.only().proven().await?;
    nothing.only().delivers(&["keda"]).await?;
    Ok(())
}

#[tokio::test]
async fn a_changed_runtime_id_becomes_a_new_identity() -> Tested {
    let nothing = Nothing::one("renamed", quick()).await?;
    let member = nothing.only();
    let (secrets, maps) = (objects::<Secret>(member).await?, objects::<ConfigMap>(member).await?);
    let before = chain(&secrets).await?.context("an identity")?;
    let kymas = Api::<Kyma>::namespaced(nothing.landscape.kcp().client().await?, nothing.landscape.namespace());
    let other = format!("{}.other", member.runtime.id());
    let renamed = Patch::Merge(json!({"metadata": {"labels": {label::RUNTIME_ID: other}}}));
    kymas.patch(member.runtime.name(), &PatchParams::default(), &renamed).await?;
    until("the new id to be told", async || {
        let data = maps.get(AGENT_OBJECT).await?.data;
        Ok(data.filter(|data| data.get(RUNTIME_ID_KEY) == Some(&other)).map(drop))
    })
    .await?;
    until("a new identity", async || Ok(chain(&secrets).await?.filter(|now| *now != before))).await?;
    member.delivers(&["keda"]).await?;
    member.proven().await?;
    Ok(())
}
