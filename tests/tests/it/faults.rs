//! Processes that die: a change still arrives (`acceptance.md` C4).

use std::time::SystemTime;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tidewatch_shared::names::{AGENT_OBJECT, PLAN_KEY, SKR_NAMESPACE};
use tidewatch_tests::{control_plane::Person, demo::stamps, landscape::until, proxy::Proxy};

use crate::support::{One, Tested, module};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

#[tokio::test]
async fn a_receiver_killed_between_accepted_and_settled_loses_nothing() -> Tested {
    let one = One::start("receiver-killed", &[KEDA]).await?;
    let cluster = one.runtime.cluster();
    // The receiver reaches the runtime through a proxy, the agent does not: so an event can be accepted and not worked on.
    let proxy = Proxy::start(cluster.server().address()).await?;
    let through =
        cluster.kubeconfig_at(&format!("https://{}", proxy.address()), cluster.credentials().token(Person::Other));
    one.runtime.write_access(&through).await?;
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;

    proxy.black_hole();
    let begun = SystemTime::now();
    one.runtime.select(&[]).await?;
    let file = one.landscape.stamp_file();
    until("the event to be accepted", async || stamps::first(&file, one.runtime.id(), "kyma", begun)).await?;
    assert_eq!(one.manifests().await?.len(), 1, "nothing was worked on");
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    proxy.resume();
    one.landscape.start_receiver().await?;
    one.skr_status("the change", |status| status.modules().is_empty()).await?;
    assert!(one.manifests().await?.is_empty());
    // The agent holds nothing back once the new receiver has settled it.
    let unsettled = |page: &str| {
        let value = page
            .lines()
            .find(|line| line.starts_with("tidewatch_agent_events_unsettled"))?
            .rsplit(' ')
            .next()?
            .parse::<f64>();
        (value.ok()? == 0.0).then_some(())
    };
    one.runtime
        .with_agent(async |agent| agent.metrics_until(tidewatch_tests::landscape::DEADLINE, unsettled).await)
        .await??;
    Ok(())
}

#[tokio::test]
async fn an_agent_killed_before_it_sent_loses_nothing() -> Tested {
    let one = One::start("agent-killed", &[KEDA]).await?;
    one.quiet().await?;
    one.runtime.with_agent(async |agent| agent.sigstop()).await??;
    one.runtime.select(&["keda"]).await?;
    one.runtime.with_agent(async |agent| agent.kill9()).await?;
    assert!(one.manifests().await?.is_empty(), "nobody was told");
    one.runtime.start_agent().await?;
    one.skr_status("the change", |status| module(status, "keda").is_some()).await?;
    Ok(())
}

#[tokio::test]
async fn both_killed_at_once_lose_nothing() -> Tested {
    let one = One::start("both-killed", &[KEDA]).await?;
    one.quiet().await?;
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    one.runtime.select(&["keda"]).await?;
    one.runtime.with_agent(async |agent| agent.kill9()).await?;
    one.landscape.start_receiver().await?;
    one.runtime.start_agent().await?;
    one.skr_status("the change", |status| module(status, "keda").is_some()).await?;
    Ok(())
}

#[tokio::test]
async fn a_malformed_plan_is_refused_whole_and_the_last_good_one_stays() -> Tested {
    let one = One::start("bad-plan", &[KEDA]).await?;
    one.quiet().await?;
    let plans = Api::<ConfigMap>::namespaced(one.runtime.cluster().client().await?, SKR_NAMESPACE);
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
    one.runtime
        .with_agent(async |agent| agent.metrics_until(tidewatch_tests::landscape::DEADLINE, refused).await)
        .await??;
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the change", |status| module(status, "keda").is_some()).await?;
    Ok(())
}

#[tokio::test]
async fn both_end_in_order_when_they_are_told_to() -> Tested {
    let one = One::start("orderly", &[KEDA]).await?;
    one.quiet().await?;
    let deadline = tidewatch_tests::landscape::DEADLINE;
    let agent = one.runtime.with_agent(async |agent| agent.sigterm(deadline).await).await??;
    let receiver = one.landscape.with_receiver(async |receiver| receiver.sigterm(deadline).await).await??;
    assert!(agent.success() && receiver.success(), "{agent} {receiver}");
    Ok(())
}
