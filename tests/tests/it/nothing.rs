//! From nothing: whoever registers a runtime does nothing else.

use std::time::Instant;

use anyhow::Context as _;
use futures::future::join_all;
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Secret},
};
use kube::Api;
use tidewatch_shared::names::{
    AGENT_CONTAINER, AGENT_DEPLOYMENT, AGENT_OBJECT, CHAIN_KEY, IDENTITY_SECRET, PRIVATE_KEY_KEY, RUNTIME_ID_KEY,
    SKR_NAMESPACE, TRUST_BUNDLE_KEY,
};
use tidewatch_tests::{landscape::AGENT_IMAGE, progress::say};

use crate::support::{Nothing, Tested, quick};

#[tokio::test]
async fn three_runtimes_are_proven_without_another_step() -> Tested {
    let (mut nothing, clusters) = Nothing::prepare("nothing", 3, quick()).await?;
    let began = Instant::now();
    nothing.register(clusters).await?;
    for proven in join_all(nothing.members.iter().map(|member| member.proven())).await {
        proven?;
    }
    say(&format!("three runtimes from nothing to proven: {:.1} s", began.elapsed().as_secs_f64()));
    let mut keys = Vec::new();
    for member in &nothing.members {
        let client = member.runtime.cluster().client().await?;
        let deployment = Api::<Deployment>::namespaced(client.clone(), SKR_NAMESPACE).get(AGENT_DEPLOYMENT).await?;
        let pod = deployment.spec.context("a spec")?.template.spec.context("a pod")?;
        assert_eq!(
            (pod.containers[0].name.as_str(), pod.containers[0].image.as_deref()),
            (AGENT_CONTAINER, Some(AGENT_IMAGE))
        );
        let agent = member.agent(None).await?;
        assert_eq!(agent.restarts, 0, "nothing had to fail first");
        let map = Api::<ConfigMap>::namespaced(client.clone(), SKR_NAMESPACE).get(AGENT_OBJECT).await?;
        let map = map.data.context("data")?;
        assert_eq!(map.get(RUNTIME_ID_KEY).map(String::as_str), Some(member.runtime.id().as_str()));
        let roots = map.get(TRUST_BUNDLE_KEY).context("roots")?;
        assert!(!roots.contains(&nothing.landscape.ca().trust_bundle().to_pem()), "the receiver made its own");
        let secret =
            Api::<Secret>::namespaced(client, SKR_NAMESPACE).get(IDENTITY_SECRET).await?.data.context("data")?;
        assert!(secret.get(CHAIN_KEY).is_some_and(|chain| !chain.0.is_empty()));
        keys.push(secret.get(PRIVATE_KEY_KEY).context("a key")?.0.clone());
        member.delivers(&["keda"]).await?;
    }
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 3, "each was born where it is used");
    Ok(())
}
