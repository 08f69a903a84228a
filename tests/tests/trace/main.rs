//! Traces of whole landscapes, in builds with the feature `otlp`.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result};
use tidewatch_tests::{
    bed,
    collector::{Collector, Span},
    landscape::{Landscape, Options, until},
    load::queue,
};

/// The spans from a change to the pass over its Kyma, each with the program that makes it.
const WAY: [(&str, &str); 4] = [
    ("tidewatch-agent", "wait to be sent"),
    ("tidewatch-receiver", "receive events"),
    ("tidewatch-receiver", "wait for a pass"),
    ("tidewatch-receiver", "reconcile"),
];

/// The spans that lead to this one, itself the last.
fn way<'a>(spans: &'a [Span], last: &'a Span) -> Vec<&'a Span> {
    let mut way = vec![last];
    while let Some(parent) = way.last().and_then(|of| spans.iter().find(|span| span.id == of.parent)) {
        way.push(parent);
    }
    way.reverse();
    way
}

/// The sum of a metric over all its labels.
fn sum(page: &str, name: &str) -> f64 {
    let lines = page.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_goes_from_a_change_in_a_runtime_through_gateway_and_queue_to_the_reconcile() -> Result<()> {
    tidewatch_tests::install_crypto();
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
    // What joins others in the queue is only linked to the trace of the first.
    until("all that came with the start to be settled", async || {
        let (_, agent) = runtime.with_agent(async |agent| agent.get("/metrics").await).await??;
        let (_, receiver) = landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        let open = ["tidewatch_agent_events_waiting", "tidewatch_agent_events_unsettled"].map(|name| sum(&agent, name));
        let is_done = open == [0.0; 2] && sum(&agent, "tidewatch_agent_events_total") > 0.0 && queue(&receiver) == 0.0;
        Ok(is_done.then_some(()))
    })
    .await?;

    // The agent's clock has milliseconds.
    let before = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())? * 1_000_000;
    runtime.select(&["keda"]).await?;
    until("the module in the runtime's Kyma", async || {
        let status = runtime.skr_kyma().await?.and_then(|kyma| kyma.status);
        Ok(status.filter(|status| status.modules().iter().any(|module| module.name == "keda")).map(drop))
    })
    .await?;
    until("the trace of the change", async || {
        let spans = collector.spans();
        let passes = spans.iter().filter(|span| span.name == "reconcile");
        let way = passes
            .map(|pass| way(&spans, pass))
            .find(|way| way.first().is_some_and(|first| first.name == "wait to be sent" && first.begun >= before))
            .with_context(|| format!("{spans:#?}"))?;
        let made: Vec<_> = way.iter().map(|span| (&*span.service, &*span.name)).collect();
        assert_eq!(made, WAY);
        assert!(way.iter().all(|span| span.trace == way[0].trace && span.begun <= span.ended), "{way:#?}");
        assert!(way.is_sorted_by_key(|span| span.begun), "{way:#?}");
        Ok(Some(()))
    })
    .await?;
    // Heartbeats, which come every second, make none.
    let names: BTreeSet<_> = collector.spans().into_iter().map(|span| (span.service, span.name)).collect();
    assert_eq!(names, WAY.map(|(service, name)| (service.to_owned(), name.to_owned())).into());
    Ok(())
}
