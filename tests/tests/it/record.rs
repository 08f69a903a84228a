//! Observability beyond statuses: Kubernetes Events, the gauges of states, and the documentation of every metric.

use anyhow::{Context as _, Result};
use k8s_openapi::api::events::v1::Event;
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;
use tidewatch_kit::metrics::MetricDescription;
use tidewatch_testing::landscape::{DEADLINE, until};

use crate::support::{SingleRuntime, TestResult};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

impl SingleRuntime {
    /// Waits for an Event with this reason about the Kyma.
    async fn event_arrives(&self, reason: &str) -> Result<Event> {
        let events: Api<Event> = Api::namespaced(self.landscape.kcp().client().await?, self.landscape.namespace());
        until(&format!("the Event {reason}"), async || {
            let events = events.list(&ListParams::default()).await?;
            Ok(events.items.into_iter().find(|event| event.reason.as_deref() == Some(reason)))
        })
        .await
    }
}

/// Returns the samples of a metrics page that their descriptions do not cover.
fn undescribed(page: &str, described: &[MetricDescription]) -> Vec<String> {
    let is_known = |sample: &&str| {
        let (name, rest) = sample.split_once(['{', ' ']).unwrap_or((sample, ""));
        let labels = rest.rsplit_once('}').map_or("", |(labels, _)| labels);
        // Every second piece is a value.
        let labels = labels.split('"').step_by(2).map(|label| label.trim_matches([',', '=']));
        let labels: Vec<_> = labels.filter(|label| !label.is_empty() && *label != "le").collect();
        described.iter().any(|metric| {
            let part = name.strip_prefix(metric.name.as_str());
            let is_it = match metric.kind {
                "histogram" => part.is_some_and(|part| ["_bucket", "_sum", "_count"].contains(&part)),
                _ => part == Some(""),
            };
            is_it && metric.labels == labels
        })
    };
    let samples = page.lines().filter(|line| !line.starts_with('#'));
    samples.filter(|sample| !is_known(sample)).map(str::to_owned).collect()
}

/// Returns the samples of a metrics page whose labels are not in the order of the Prometheus clients: alphabetical, `le` last.
fn unsorted(page: &str) -> Vec<String> {
    let is_sorted = |sample: &&str| {
        let labels = sample.split_once('{').and_then(|(_, rest)| Some(rest.rsplit_once('}')?.0)).unwrap_or_default();
        // Every second piece is a value.
        let labels: Vec<_> = labels.split('"').step_by(2).map(|label| label.trim_matches([',', '='])).collect();
        let (_, names) = labels.split_last().unwrap_or((&"", &[]));
        let names = names.strip_suffix(&["le"]).unwrap_or(names);
        names.is_sorted() && !names.contains(&"le")
    };
    let samples = page.lines().filter(|line| !line.starts_with('#'));
    samples.filter(|sample| !is_sorted(sample)).map(str::to_owned).collect()
}

#[tokio::test]
async fn events_report_the_fate_of_a_kyma_and_every_sample_is_documented() -> TestResult {
    let setup = SingleRuntime::start("record", &[KEDA]).await?;
    setup.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "channel": "nowhere"}]}})).await?;
    let event = setup.event_arrives("ModuleError").await?;
    assert!(event.note.as_deref().is_some_and(|note| note.contains("nowhere")), "{event:?}");
    assert_eq!(
        (event.type_.as_deref(), event.reporting_controller.as_deref()),
        (Some("Warning"), Some("lifecycle-manager"))
    );
    let kyma = setup.runtime.kcp_kyma().await?.context("the Kyma")?;
    assert_eq!(event.regarding.context("the Event's object")?.uid, kyma.metadata.uid);
    setup.event_arrives("EventPathProven").await?;
    setup.event_arrives("MetricsError").await?;

    let marks = json!({"metadata": {"annotations": {"skr-domain": "shoot-1.kyma.example"},
                                    "labels": {"kyma-project.io/instance-id": "instance-1"}}});
    setup.kcp_kymas().await?.patch(setup.runtime.name(), &PatchParams::default(), &Patch::Merge(&marks)).await?;
    let name = setup.runtime.name();
    let sample = format!(
        r#"lifecycle_mgr_kyma_state{{instance_id="instance-1",kyma_name="{name}",shoot="shoot-1",state="Error"}} 1"#
    );
    let shown = |page: &str| page.lines().any(|line| line == sample).then(|| page.to_owned());
    let page = setup.landscape.with_receiver(async |receiver| receiver.metrics_until(DEADLINE, shown).await).await??;
    assert_eq!(undescribed(&page, &tidewatch_receiver::app::metrics()), Vec::<String>::new());
    assert_eq!(unsorted(&page), Vec::<String>::new());
    let page = setup.agent_page().await?;
    assert_eq!(undescribed(&page, &tidewatch_agent::telemetry::Metrics::described()), Vec::<String>::new());
    assert_eq!(unsorted(&page), Vec::<String>::new());
    Ok(())
}
