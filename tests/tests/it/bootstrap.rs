//! Bootstrap: registration is the only step that a new runtime needs.

use std::time::Instant;

use anyhow::Context as _;
use futures::future::join_all;
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Secret},
};
use kube::Api;
use tidewatch_api::names::{
    AGENT_CONTAINER, AGENT_DEPLOYMENT, AGENT_OBJECT, CHAIN_KEY, IDENTITY_SECRET, PRIVATE_KEY_KEY, RUNTIME_ID_KEY,
    SKR_NAMESPACE, TRUST_BUNDLE_KEY,
};
use tidewatch_testing::{landscape::AGENT_IMAGE, progress::print_line};

use crate::support::{Fleet, TestResult, quick_options};

#[tokio::test]
async fn three_registered_runtimes_are_proven_without_a_further_step() -> TestResult {
    let (mut fleet, clusters) = Fleet::prepare("bootstrap", 3, quick_options()).await?;
    let began = Instant::now();
    fleet.register(clusters).await?;
    for proven in join_all(fleet.members.iter().map(|member| member.path_proven())).await {
        proven?;
    }
    print_line(&format!("three runtimes from registration to a proven path: {:.1} s", began.elapsed().as_secs_f64()));
    let mut keys = Vec::new();
    for member in &fleet.members {
        let client = member.runtime.cluster().client().await?;
        let deployment = Api::<Deployment>::namespaced(client.clone(), SKR_NAMESPACE).get(AGENT_DEPLOYMENT).await?;
        let pod = deployment.spec.context("a spec")?.template.spec.context("a pod")?;
        assert_eq!(
            (pod.containers[0].name.as_str(), pod.containers[0].image.as_deref()),
            (AGENT_CONTAINER, Some(AGENT_IMAGE))
        );
        let agent = member.agent(None).await?;
        assert_eq!(agent.restarts, 0, "no process failed before");
        let map = Api::<ConfigMap>::namespaced(client.clone(), SKR_NAMESPACE).get(AGENT_OBJECT).await?;
        let map = map.data.context("data")?;
        assert_eq!(map.get(RUNTIME_ID_KEY).map(String::as_str), Some(member.runtime.id().as_str()));
        let roots = map.get(TRUST_BUNDLE_KEY).context("roots")?;
        assert!(!roots.contains(&fleet.landscape.ca().trust_bundle().to_pem()), "the receiver created its own CA");
        let secret =
            Api::<Secret>::namespaced(client, SKR_NAMESPACE).get(IDENTITY_SECRET).await?.data.context("data")?;
        assert!(secret.get(CHAIN_KEY).is_some_and(|chain| !chain.0.is_empty()));
        keys.push(secret.get(PRIVATE_KEY_KEY).context("a key")?.0.clone());
        member.delivers(&["keda"]).await?;
    }
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 3, "each runtime has its own key");
    Ok(())
}
