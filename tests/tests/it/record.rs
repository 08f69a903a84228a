//! What operators read besides statuses: Kubernetes Events, the gauges of states, and a page that describes every metric there is.

use anyhow::{Context as _, Result};
use k8s_openapi::api::events::v1::Event;
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;
use tidewatch_shared::metrics::Described;
use tidewatch_tests::landscape::{DEADLINE, until};

use crate::support::{One, Tested};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

impl One {
    /// Waits until an Event about the Kyma has this reason.
    async fn told(&self, reason: &str) -> Result<Event> {
        let events: Api<Event> = Api::namespaced(self.landscape.kcp().client().await?, self.landscape.namespace());
        until(&format!("the Event {reason}"), async || {
            let events = events.list(&ListParams::default()).await?;
            Ok(events.items.into_iter().find(|event| event.reason.as_deref() == Some(reason)))
        })
        .await
    }
}

/// Samples of a page that are not as they were described.
fn undescribed(page: &str, described: &[Described]) -> Vec<String> {
    let is_known = |sample: &&str| {
        let (name, rest) = sample.split_once(['{', ' ']).unwrap_or((sample, ""));
        let labels = rest.rsplit_once('}').map_or("", |(labels, _)| labels);
        // Every other piece is a value.
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

#[tokio::test]
async fn operators_are_told_what_becomes_of_a_kyma_and_every_sample_is_described() -> Tested {
    let one = One::start("record", &[KEDA]).await?;
    one.runtime.select(&["no-such-module"]).await?;
    let event = one.told("ModuleError").await?;
    assert!(event.note.as_deref().is_some_and(|note| note.contains("no-such-module")), "{event:?}");
    assert_eq!(
        (event.type_.as_deref(), event.reporting_controller.as_deref()),
        (Some("Warning"), Some("lifecycle-manager"))
    );
    let kyma = one.runtime.kcp_kyma().await?.context("the Kyma")?;
    assert_eq!(event.regarding.context("whom it is about")?.uid, kyma.metadata.uid);
    one.told("EventPathProven").await?;
    one.told("MetricsError").await?;

    let marks = json!({"metadata": {"annotations": {"skr-domain": "shoot-1.kyma.example"},
                                    "labels": {"kyma-project.io/instance-id": "instance-1"}}});
    one.kcp_kymas().await?.patch(one.runtime.name(), &PatchParams::default(), &Patch::Merge(&marks)).await?;
    let name = one.runtime.name();
    let sample = format!(
        r#"lifecycle_mgr_kyma_state{{kyma_name="{name}",state="Error",shoot="shoot-1",instance_id="instance-1"}} 1"#
    );
    let shown = |page: &str| page.lines().any(|line| line == sample).then(|| page.to_owned());
    let page = one.landscape.with_receiver(async |receiver| receiver.metrics_until(DEADLINE, shown).await).await??;
    assert_eq!(undescribed(&page, &tidewatch_receiver::app::metrics()), Vec::<String>::new());
    let page = one.agent_page().await?;
    assert_eq!(undescribed(&page, &tidewatch_agent::telemetry::Metrics::described()), Vec::<String>::new());
    Ok(())
}
