//! The state of a runtime's event path: its condition, polls of unproven paths, verification of proven ones, and the
//! pause.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tidewatch_api::{
    Condition, KymaStatus, State,
    names::{annotation, label},
};
use tidewatch_kit::variant::VariantName as _;
use tidewatch_testing::landscape::{DEADLINE, Options, until, watchers::watcher};

use crate::support::{SingleRuntime, TestResult, module, quick_options};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

/// The usual options with further arguments of the receiver.
fn options_with(arguments: &[&str]) -> Options {
    Options { receiver: arguments.iter().map(|argument| (*argument).to_owned()).collect(), ..quick_options() }
}

/// Waits until a condition has this status and reason, and returns it.
async fn condition_becomes(setup: &SingleRuntime, kind: &str, status: &str, reason: &str) -> Result<Condition> {
    let holds = |condition: &&Condition| condition.status.as_str() == status && condition.reason == reason;
    let found = |seen: &KymaStatus| seen.condition(kind).filter(holds).is_some();
    let seen = setup.kcp_status(&format!("{kind} to be {status} ({reason})"), found).await?;
    seen.condition(kind).cloned().context("the condition")
}

/// Waits until a metric of the receiver reaches a value.
async fn metric_reaches(setup: &SingleRuntime, sample: &str, least: f64) -> Result<f64> {
    let value = |page: &str| {
        let line = page.lines().find_map(|line| line.strip_prefix(sample)?.trim().parse::<f64>().ok());
        line.filter(|value| *value >= least)
    };
    Ok(setup.landscape.with_receiver(async |receiver| receiver.metrics_until(DEADLINE, value).await).await??)
}

#[tokio::test]
async fn a_path_is_proven_lost_and_proven_again_and_a_restart_writes_nothing() -> TestResult {
    // An agent backs off for up to fifteen seconds before it reconnects to a restarted receiver: three intervals must
    // be longer.
    let options = Options { heartbeat_seconds: 6, ..options_with(&["--restart-spread-seconds", "1"]) };
    let setup = SingleRuntime::with_options("path", &[KEDA], options).await?;
    setup.runtime.start_agent().await?;
    let proven = condition_becomes(&setup, "EventPath", "True", "Proven").await?;
    assert!(!proven.message.is_empty());
    setup.kcp_status("readiness", |status| status.state() == State::Ready).await?;

    setup.runtime.with_agent(async |agent| agent.kill9()).await?;
    condition_becomes(&setup, "EventPath", "False", "NoHeartbeat").await?;
    let status = setup.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status).context("a status")?;
    assert_eq!(status.state(), State::Ready, "the path does not affect the state");
    let shown = setup.runtime.skr_kyma().await?.and_then(|kyma| kyma.status).context("a status")?;
    assert!(shown.condition("EventPath").is_none(), "only KCP has the condition");

    setup.runtime.start_agent().await?;
    condition_becomes(&setup, "EventPath", "True", "Proven").await?;
    let before = until("the inputs", async || {
        Ok(setup
            .runtime
            .kcp_kyma()
            .await?
            .filter(|kyma| kyma.annotations().get(annotation::INPUTS).is_some_and(|inputs| !inputs.contains('-'))))
    })
    .await?;
    metric_reaches(&setup, "tidewatch_fleet_paths{state=\"Proven\"} ", 1.0).await?;

    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    setup.landscape.start_receiver().await?;
    // The new process has reconciled and has determined the state that it would write.
    metric_reaches(&setup, "tidewatch_queue_passes_total{result=\"ended\"} ", 1.0).await?;
    metric_reaches(&setup, "tidewatch_path_transitions_total{state=\"Proven\"} ", 1.0).await?;
    let mark = setup.runtime.cluster().audit_mark()?;
    setup.after_canaries(mark, 3).await?;
    let after = setup.runtime.kcp_kyma().await?.context("the Kyma")?;
    assert_eq!(after.resource_version(), before.resource_version());
    Ok(())
}

#[tokio::test]
async fn a_failing_watch_is_named() -> TestResult {
    let setup = SingleRuntime::start("failing", &[KEDA]).await?;
    condition_becomes(&setup, "EventPath", "True", "Proven").await?;
    setup.landscape.write_watcher(&watcher("secretive", ("apps", "v1", "deployments"), "spec")).await?;
    let failing = condition_becomes(&setup, "EventPath", "False", "FailingWatch").await?;
    assert!(failing.message.contains(&setup.landscape.watch_of("secretive")), "{}", failing.message);
    setup.runtime.grant_agent("apps", "deployments").await?;
    condition_becomes(&setup, "EventPath", "True", "Proven").await?;
    Ok(())
}

#[tokio::test]
async fn a_paused_runtime_is_not_reconciled_until_the_pause_ends() -> TestResult {
    let setup = SingleRuntime::start("path-pause", &[KEDA]).await?;
    setup.skr_status("readiness", |status| status.state() == State::Ready).await?;
    let kymas = setup.kcp_kymas().await?;
    let labelled = |value: serde_json::Value| json!({"metadata": {"labels": {label::PAUSE: value}}});
    kymas.patch(setup.runtime.name(), &PatchParams::default(), &Patch::Merge(labelled(json!("true")))).await?;
    condition_becomes(&setup, "Paused", "True", "Label").await?;
    // The label causes the first paused reconcile, the accepted event the second.
    let paused = metric_reaches(&setup, "tidewatch_queue_passes_total{result=\"paused\"} ", 1.0).await?;
    setup.runtime.select(&["keda"]).await?;
    metric_reaches(&setup, "tidewatch_queue_passes_total{result=\"paused\"} ", paused + 1.0).await?;
    assert!(setup.manifests().await?.is_empty());
    kymas.patch(setup.runtime.name(), &PatchParams::default(), &Patch::Merge(labelled(json!(null)))).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    setup.manifest().await?;
    setup.kcp_status("no pause", |status| status.condition("Paused").is_none()).await?;

    let maps = Api::<ConfigMap>::namespaced(setup.landscape.kcp().client().await?, setup.landscape.namespace());
    let map: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "tidewatch"}, "data": {"pause": "true"}}))?;
    maps.create(&PostParams::default(), &map).await?;
    condition_becomes(&setup, "Paused", "True", "ConfigMap").await?;
    let paused = metric_reaches(&setup, "tidewatch_queue_passes_total{result=\"paused\"} ", 2.0).await?;
    setup.runtime.select(&[]).await?;
    metric_reaches(&setup, "tidewatch_queue_passes_total{result=\"paused\"} ", paused + 1.0).await?;
    assert_eq!(setup.manifests().await?.len(), 1);
    maps.delete("tidewatch", &DeleteParams::default()).await?;
    setup.skr_status("the module to go", |status| module(status, "keda").is_none()).await?;
    setup.kcp_status("no pause", |status| status.condition("Paused").is_none()).await?;
    Ok(())
}

#[tokio::test]
async fn a_poll_finds_changes_without_an_agent() -> TestResult {
    let setup = SingleRuntime::with_options("poll", &[KEDA], options_with(&["--fallback-poll-seconds", "1"])).await?;
    setup.skr_status("readiness", |status| status.state() == State::Ready).await?;
    condition_becomes(&setup, "EventPath", "False", "NoHeartbeat").await?;
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    metric_reaches(&setup, "tidewatch_path_polls_total{reason=\"fallback\"} ", 1.0).await?;
    Ok(())
}

#[tokio::test]
async fn a_verification_repairs_drift_that_no_watch_shows() -> TestResult {
    let setup = SingleRuntime::with_options("verify", &[KEDA], options_with(&["--verification-seconds", "2"])).await?;
    setup.runtime.start_agent().await?;
    condition_becomes(&setup, "EventPath", "True", "Proven").await?;
    let api = Api::<Namespace>::all(setup.runtime.cluster().client().await?);
    let none: BTreeMap<_, _> = [(label::ISTIO_INJECTION, None::<String>)].into();
    let patch = Patch::Merge(json!({"metadata": {"labels": none}}));
    let drifted = api.patch("kyma-system", &PatchParams::default(), &patch).await?;
    assert!(!drifted.labels().contains_key(label::ISTIO_INJECTION));
    until("the label to come back", async || {
        Ok(api.get("kyma-system").await?.labels().contains_key(label::ISTIO_INJECTION).then_some(()))
    })
    .await?;
    metric_reaches(&setup, "tidewatch_path_polls_total{reason=\"verification\"} ", 1.0).await?;
    Ok(())
}
