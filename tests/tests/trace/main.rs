//! Tests of traces across a landscape, in builds with the feature `otlp`.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result};
use tidewatch_testing::{
    bed,
    collector::{Collector, Span},
    landscape::{Landscape, Options, until},
    load::queue,
    product::metric_sum,
};

/// Service and name of each span on the path from a change to the reconcile of its Kyma.
const SPAN_PATH: [(&str, &str); 4] = [
    ("tidewatch-agent", "wait to be sent"),
    ("tidewatch-receiver", "receive events"),
    ("tidewatch-receiver", "wait for a reconcile"),
    ("tidewatch-receiver", "reconcile"),
];

/// Returns the ancestors of a span from the root down, followed by the span itself.
fn path_to<'a>(spans: &'a [Span], last: &'a Span) -> Vec<&'a Span> {
    let mut path = vec![last];
    while let Some(parent) = path.last().and_then(|child| spans.iter().find(|span| span.id == child.parent)) {
        path.push(parent);
    }
    path.reverse();
    path
}

/// Returns the sum of a metric over all labels.
fn sum(page: &str, name: &str) -> f64 {
    metric_sum(page, name, |_| true)
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_covers_change_gateway_queue_and_reconcile() -> Result<()> {
    tidewatch_testing::install_crypto();
    let collector = Collector::start().await?;
    let bed = bed::shared().await?;
    let (kcp, cluster) = tokio::try_join!(bed.kcp(), bed.runtime("trace"))?;
    let traced = vec!["--otlp-endpoint".to_owned(), collector.endpoint()];
    let options = Options { heartbeat_seconds: 1, receiver: traced.clone(), agent: traced, ..Options::default() };
    let landscape = Arc::new(Landscape::start(kcp, "trace", options).await?);
    landscape.write_module("keda", "1.0.0", "1.1.0").await?;
    let runtime = landscape.register(cluster).await?;
    runtime.start_agent().await?;
    until("the Kyma in the runtime", async || runtime.skr_kyma().await).await?;
    // Waits for an empty queue: an event that joins a queued reconcile is only linked to the trace of the first one.
    until("all events of the start to be settled", async || {
        let (_, agent) = runtime.with_agent(async |agent| agent.get("/metrics").await).await??;
        let (_, receiver) = landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        let open = ["tidewatch_agent_events_waiting", "tidewatch_agent_events_unsettled"].map(|name| sum(&agent, name));
        let is_done = open == [0.0; 2] && sum(&agent, "tidewatch_agent_events_total") > 0.0 && queue(&receiver) == 0.0;
        Ok(is_done.then_some(()))
    })
    .await?;

    // The agent's clock has a resolution of milliseconds.
    let before = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())? * 1_000_000;
    runtime.select(&["keda"]).await?;
    until("the module in the runtime's Kyma", async || {
        let status = runtime.skr_kyma().await?.and_then(|kyma| kyma.status);
        Ok(status.filter(|status| status.modules().iter().any(|module| module.name == "keda")).map(drop))
    })
    .await?;
    until("the trace of the change", async || {
        let spans = collector.spans();
        let reconciles = spans.iter().filter(|span| span.name == "reconcile");
        let path = reconciles
            .map(|reconcile| path_to(&spans, reconcile))
            .find(|path| path.first().is_some_and(|first| first.name == "wait to be sent" && first.begun >= before))
            .with_context(|| format!("{spans:#?}"))?;
        let made: Vec<_> = path.iter().map(|span| (&*span.service, &*span.name)).collect();
        assert_eq!(made, SPAN_PATH);
        assert!(path.iter().all(|span| span.trace == path[0].trace && span.begun <= span.ended), "{path:#?}");
        assert!(path.is_sorted_by_key(|span| span.begun), "{path:#?}");
        Ok(Some(()))
    })
    .await?;
    // Heartbeats create no spans, although one is sent every second.
    let names: BTreeSet<_> = collector.spans().into_iter().map(|span| (span.service, span.name)).collect();
    assert_eq!(names, SPAN_PATH.map(|(service, name)| (service.to_owned(), name.to_owned())).into());
    Ok(())
}
