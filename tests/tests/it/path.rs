//! Whether the event path of a runtime is proven: the condition that says so, the polls of those that are not, the verification of
//! those that are, and the pause.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tidewatch_shared::{
    api::{Condition, KymaStatus, State},
    names::{annotation, label},
};
use tidewatch_tests::landscape::{DEADLINE, Options, until, watchers::watcher};

use crate::support::{One, Tested, module, quick};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

/// What is usual here, with further arguments of the receiver.
fn with(arguments: &[&str]) -> Options {
    Options { receiver: arguments.iter().map(|argument| (*argument).to_owned()).collect(), ..quick() }
}

/// Waits until a condition has this status and reason, and returns it.
async fn said(one: &One, kind: &str, status: &str, reason: &str) -> Result<Condition> {
    let holds = |condition: &&Condition| condition.status.as_str() == status && condition.reason == reason;
    let found = |seen: &KymaStatus| seen.condition(kind).filter(holds).is_some();
    let seen = one.kcp_status(&format!("{kind} to be {status} ({reason})"), found).await?;
    seen.condition(kind).cloned().context("the condition")
}

/// Waits until a metric of the receiver has reached a value.
async fn counted(one: &One, sample: &str, least: f64) -> Result<f64> {
    let value = |page: &str| {
        let line = page.lines().find_map(|line| line.strip_prefix(sample)?.trim().parse::<f64>().ok());
        line.filter(|value| *value >= least)
    };
    Ok(one.landscape.with_receiver(async |receiver| receiver.metrics_until(DEADLINE, value).await).await??)
}

#[tokio::test]
async fn a_path_is_proven_then_lost_and_proven_again_and_a_restart_writes_nothing() -> Tested {
    // An agent waits up to fifteen seconds before it tries a receiver again that was not there: three intervals must be longer.
    let options = Options { heartbeat_seconds: 6, ..with(&["--restart-spread-seconds", "1"]) };
    let one = One::with("path", &[KEDA], options).await?;
    one.runtime.start_agent().await?;
    let proven = said(&one, "EventPath", "True", "Proven").await?;
    assert!(!proven.message.is_empty());
    one.kcp_status("readiness", |status| status.state() == State::Ready).await?;

    one.runtime.with_agent(async |agent| agent.kill9()).await?;
    said(&one, "EventPath", "False", "NoHeartbeat").await?;
    let status = one.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status).context("a status")?;
    assert_eq!(status.state(), State::Ready, "the path never counts");
    let shown = one.runtime.skr_kyma().await?.and_then(|kyma| kyma.status).context("a status")?;
    assert!(shown.condition("EventPath").is_none(), "it is KCP's business alone");

    one.runtime.start_agent().await?;
    said(&one, "EventPath", "True", "Proven").await?;
    let before = until("the inputs", async || {
        Ok(one
            .runtime
            .kcp_kyma()
            .await?
            .filter(|kyma| kyma.annotations().get(annotation::INPUTS).is_some_and(|inputs| !inputs.contains('-'))))
    })
    .await?;
    counted(&one, "tidewatch_fleet_paths{state=\"Proven\"} ", 1.0).await?;

    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    one.landscape.start_receiver().await?;
    // It has looked at everything, and it has seen what it would write.
    counted(&one, "tidewatch_queue_passes_total{result=\"ended\"} ", 1.0).await?;
    counted(&one, "tidewatch_path_transitions_total{state=\"Proven\"} ", 1.0).await?;
    let mark = one.runtime.cluster().audit_mark()?;
    one.after_canaries(mark, 3).await?;
    let after = one.runtime.kcp_kyma().await?.context("the Kyma")?;
    assert_eq!(after.resource_version(), before.resource_version());
    Ok(())
}

#[tokio::test]
async fn a_watch_that_fails_is_named() -> Tested {
    let one = One::start("failing", &[KEDA]).await?;
    said(&one, "EventPath", "True", "Proven").await?;
    one.landscape.write_watcher(&watcher("secretive", ("apps", "v1", "deployments"), "spec")).await?;
    let failing = said(&one, "EventPath", "False", "FailingWatch").await?;
    assert!(failing.message.contains(&one.landscape.watch_of("secretive")), "{}", failing.message);
    one.runtime.grant_agent("apps", "deployments").await?;
    said(&one, "EventPath", "True", "Proven").await?;
    Ok(())
}

#[tokio::test]
async fn who_is_paused_is_left_alone_until_the_pause_ends() -> Tested {
    let one = One::start("path-pause", &[KEDA]).await?;
    one.skr_status("readiness", |status| status.state() == State::Ready).await?;
    let kymas = one.kcp_kymas().await?;
    let labelled = |value: serde_json::Value| json!({"metadata": {"labels": {label::PAUSE: value}}});
    kymas.patch(one.runtime.name(), &PatchParams::default(), &Patch::Merge(labelled(json!("true")))).await?;
    said(&one, "Paused", "True", "Label").await?;
    // The label's own pass, and then that of the event, which is accepted.
    let paused = counted(&one, "tidewatch_queue_passes_total{result=\"paused\"} ", 1.0).await?;
    one.runtime.select(&["keda"]).await?;
    counted(&one, "tidewatch_queue_passes_total{result=\"paused\"} ", paused + 1.0).await?;
    assert!(one.manifests().await?.is_empty());
    kymas.patch(one.runtime.name(), &PatchParams::default(), &Patch::Merge(labelled(json!(null)))).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    one.kcp_status("no pause", |status| status.condition("Paused").is_none()).await?;

    let maps = Api::<ConfigMap>::namespaced(one.landscape.kcp().client().await?, one.landscape.namespace());
    let map: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "tidewatch"}, "data": {"pause": "true"}}))?;
    maps.create(&PostParams::default(), &map).await?;
    said(&one, "Paused", "True", "ConfigMap").await?;
    let paused = counted(&one, "tidewatch_queue_passes_total{result=\"paused\"} ", 2.0).await?;
    one.runtime.select(&[]).await?;
    counted(&one, "tidewatch_queue_passes_total{result=\"paused\"} ", paused + 1.0).await?;
    assert_eq!(one.manifests().await?.len(), 1);
    maps.delete("tidewatch", &DeleteParams::default()).await?;
    one.skr_status("the module to go", |status| module(status, "keda").is_none()).await?;
    one.kcp_status("no pause", |status| status.condition("Paused").is_none()).await?;
    Ok(())
}

#[tokio::test]
async fn a_poll_finds_what_no_agent_tells() -> Tested {
    let one = One::with("poll", &[KEDA], with(&["--fallback-poll-seconds", "1"])).await?;
    one.skr_status("readiness", |status| status.state() == State::Ready).await?;
    said(&one, "EventPath", "False", "NoHeartbeat").await?;
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    counted(&one, "tidewatch_path_polls_total{reason=\"fallback\"} ", 1.0).await?;
    Ok(())
}

#[tokio::test]
async fn a_verification_heals_what_no_watch_shows() -> Tested {
    let one = One::with("verify", &[KEDA], with(&["--verification-seconds", "2"])).await?;
    one.runtime.start_agent().await?;
    said(&one, "EventPath", "True", "Proven").await?;
    let api = Api::<Namespace>::all(one.runtime.cluster().client().await?);
    let none: BTreeMap<_, _> = [(label::ISTIO_INJECTION, None::<String>)].into();
    let patch = Patch::Merge(json!({"metadata": {"labels": none}}));
    let drifted = api.patch("kyma-system", &PatchParams::default(), &patch).await?;
    assert!(!drifted.labels().contains_key(label::ISTIO_INJECTION));
    until("the label to come back", async || {
        Ok(api.get("kyma-system").await?.labels().contains_key(label::ISTIO_INJECTION).then_some(()))
    })
    .await?;
    counted(&one, "tidewatch_path_polls_total{reason=\"verification\"} ", 1.0).await?;
    Ok(())
}
