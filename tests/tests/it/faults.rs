//! Crashes of the agent and the receiver: a change still arrives (`acceptance.md` C4).

use std::time::SystemTime;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tidewatch_api::names::{AGENT_OBJECT, PLAN_KEY, SKR_NAMESPACE};
use tidewatch_testing::{control_plane::ClusterUser, landscape::until, proxy::Proxy, stamps};

use crate::support::{SingleRuntime, TestResult, module};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

#[tokio::test]
async fn a_receiver_killed_between_accepted_and_settled_loses_no_event() -> TestResult {
    let setup = SingleRuntime::start("receiver-killed", &[KEDA]).await?;
    let cluster = setup.runtime.cluster();
    // Only the receiver reaches the runtime through a proxy, so an event can be accepted without being reconciled.
    let proxy = Proxy::start(cluster.server().address()).await?;
    let through =
        cluster.kubeconfig_at(&format!("https://{}", proxy.address()), cluster.credentials().token(ClusterUser::Other));
    setup.runtime.write_access(&through).await?;
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    setup.manifest().await?;

    proxy.black_hole();
    let begun = SystemTime::now();
    setup.runtime.select(&[]).await?;
    let file = setup.landscape.stamp_file();
    until("the event to be accepted", async || stamps::first(&file, setup.runtime.id(), "kyma", begun)).await?;
    assert_eq!(setup.manifests().await?.len(), 1, "the event was not reconciled");
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    proxy.resume();
    setup.landscape.start_receiver().await?;
    setup.skr_status("the change", |status| status.modules().is_empty()).await?;
    assert!(setup.manifests().await?.is_empty());
    // The agent releases the event once the new receiver has settled it.
    let unsettled = |page: &str| {
        let value = page
            .lines()
            .find(|line| line.starts_with("tidewatch_agent_events_unsettled"))?
            .rsplit(' ')
            .next()?
            .parse::<f64>();
        (value.ok()? == 0.0).then_some(())
    };
    setup
        .runtime
        .with_agent(async |agent| agent.metrics_until(tidewatch_testing::landscape::DEADLINE, unsettled).await)
        .await??;
    Ok(())
}

#[tokio::test]
async fn an_agent_killed_before_sending_loses_no_event() -> TestResult {
    let setup = SingleRuntime::start("agent-killed", &[KEDA]).await?;
    setup.becomes_idle().await?;
    setup.runtime.with_agent(async |agent| agent.sigstop()).await??;
    setup.runtime.select(&["keda"]).await?;
    setup.runtime.with_agent(async |agent| agent.kill9()).await?;
    assert!(setup.manifests().await?.is_empty(), "no event was sent");
    setup.runtime.start_agent().await?;
    setup.skr_status("the change", |status| module(status, "keda").is_some()).await?;
    Ok(())
}

#[tokio::test]
async fn agent_and_receiver_killed_together_lose_no_event() -> TestResult {
    let setup = SingleRuntime::start("both-killed", &[KEDA]).await?;
    setup.becomes_idle().await?;
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    setup.runtime.select(&["keda"]).await?;
    setup.runtime.with_agent(async |agent| agent.kill9()).await?;
    setup.landscape.start_receiver().await?;
    setup.runtime.start_agent().await?;
    setup.skr_status("the change", |status| module(status, "keda").is_some()).await?;
    Ok(())
}

#[tokio::test]
async fn a_malformed_plan_is_refused_and_the_last_valid_one_stays() -> TestResult {
    let setup = SingleRuntime::start("bad-plan", &[KEDA]).await?;
    setup.becomes_idle().await?;
    let plans = Api::<ConfigMap>::namespaced(setup.runtime.cluster().client().await?, SKR_NAMESPACE);
    let garbage =
        Patch::Merge(json!({"data": {PLAN_KEY: "{\"revision\": \"x\", \"watches\": [{\"name\": \"secrets\"}]}"}}));
    plans.patch(AGENT_OBJECT, &PatchParams::default(), &garbage).await?;
    let refused = |page: &str| {
        let value = page
            .lines()
            .find(|line| line.starts_with("tidewatch_agent_plans_refused_total"))?
            .rsplit(' ')
            .next()?
            .parse::<f64>();
        (value.ok()? >= 1.0).then_some(())
    };
    setup
        .runtime
        .with_agent(async |agent| agent.metrics_until(tidewatch_testing::landscape::DEADLINE, refused).await)
        .await??;
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the change", |status| module(status, "keda").is_some()).await?;
    Ok(())
}

#[tokio::test]
async fn agent_and_receiver_exit_cleanly_on_sigterm() -> TestResult {
    let setup = SingleRuntime::start("orderly", &[KEDA]).await?;
    setup.becomes_idle().await?;
    let deadline = tidewatch_testing::landscape::DEADLINE;
    let agent = setup.runtime.with_agent(async |agent| agent.sigterm(deadline).await).await??;
    let receiver = setup.landscape.with_receiver(async |receiver| receiver.sigterm(deadline).await).await??;
    assert!(agent.success() && receiver.success(), "{agent} {receiver}");
    Ok(())
}
