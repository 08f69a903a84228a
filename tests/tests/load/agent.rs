//! Load tests of the agent process: many events of a bounded set of objects.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tidewatch_api::{
    identity::{RuntimeId, TrustDomain},
    names::{AGENT_OBJECT, OWN_MANAGER, PLAN_KEY},
};
use tidewatch_testing::{
    fake::{FakeApiServer, FakeCluster},
    landscape::{
        now,
        watchers::{WATCHED, watcher},
    },
    load::{SimulatedFleet, until_within},
    ports,
    process::Program,
    product::metric_sum,
    product::{ProductProcess, build_binaries},
};
use tidewatch_trust::{Ca, RUNTIME_VALIDITY};

use crate::{ExclusiveLandscape, assert_flat, exclusive};

const DEADLINE: Duration = Duration::from_secs(240);
const OBJECTS: u32 = 200;
const EVENTS: u32 = 100_000;
/// Events before the first memory measurement.
const WARMUP_EVENTS: u32 = 20_000;
/// Events between two waits for the agent, few enough that its watch never falls behind the history of the fake API
/// server.
const EVENTS_IN_FLIGHT: u32 = 1_000;

/// Starts an agent process and waits until it holds all objects. Readiness is no criterion: without a receiver it never
/// becomes ready.
async fn start(
    dir: &Path,
    (ca, domain): (&Ca, &TrustDomain),
    id: &RuntimeId,
    kubeconfig: &str,
    receiver: &str,
) -> Result<ProductProcess> {
    let pair = ca.make_runtime(id, domain, now(), RUNTIME_VALIDITY)?;
    let trust = ca.trust_bundle().to_pem();
    for (file, text) in
        [("tls.key", &*pair.key), ("tls.crt", &*pair.chain), ("ca.crt", &*trust), ("kubeconfig", kubeconfig)]
    {
        fs::write(dir.join(file), text).with_context(|| format!("write {file}"))?;
    }
    let probes = ports::free()?;
    let admin = ports::free()?;
    let path = |file: &str| dir.join(file).into_os_string();
    let program = Program::new("agent", build_binaries().await?.agent()?, dir.join("agent.log"))
        .env("TIDEWATCH_LOG", "error")
        .args(["--kubeconfig".into(), path("kubeconfig"), "--identity-dir".into(), dir.as_os_str().to_owned()])
        .args(["--receiver-url".to_owned(), format!("https://{receiver}")])
        .args(["--trust-domain".to_owned(), domain.to_string()])
        .args(["--metrics-address".to_owned(), format!("127.0.0.1:{probes}")])
        .args(["--admin-address".to_owned(), format!("127.0.0.1:{admin}")])
        .args(["--heartbeat-seconds", "5"]);
    let process = ProductProcess::start(program, ([127, 0, 0, 1], probes).into())?;
    let holds_objects = |page: &str| (sum(page, "tidewatch_agent_objects") >= f64::from(OBJECTS)).then_some(());
    process.metrics_until(DEADLINE, holds_objects).await?;
    Ok(process)
}

fn write_objects(runtime: &FakeCluster) {
    for number in 0..OBJECTS {
        runtime.edit(&key(number), |object| {
            *object = json!({"metadata": {"name": format!("object-{number}"), "labels": {WATCHED: "load"}}});
        });
    }
}

fn key(number: u32) -> String {
    format!("/configmaps/default/object-{number}")
}

/// Changes the objects round robin, as fast as the agent reads.
async fn change(runtime: &FakeCluster, events: std::ops::Range<u32>) -> Result<()> {
    for event in events {
        let version =
            runtime.edit(&key(event % OBJECTS), |object| object["data"] = json!({"event": event.to_string()}));
        if (event + 1).is_multiple_of(EVENTS_IN_FLIGHT) {
            until_within("the agent to read the changes", DEADLINE, async || {
                Ok(runtime.delivered_version().is_some_and(|seen| seen >= version).then_some(()))
            })
            .await?;
        }
    }
    Ok(())
}

/// Returns the sum of a metric over all labels.
fn sum(page: &str, name: &str) -> f64 {
    metric_sum(page, name, |_| true)
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_is_flat_while_receiver_is_unreachable() -> Result<()> {
    let _guard = exclusive().await;
    let fake = FakeApiServer::start().await?;
    let runtime = fake.cluster("away");
    let plan = json!({"revision": "one", "watches": [{
        "name": "load", "group": "", "version": "v1", "resource": "configmaps",
        "labelSelector": format!("{WATCHED}=load"), "field": "spec", "manager": OWN_MANAGER, "work": ["kyma"],
    }]});
    let replace_with = |more: Value| move |object: &mut Value| *object = more;
    let data = json!({PLAN_KEY: plan.to_string()});
    runtime.edit(
        &format!("/configmaps/kyma-system/{AGENT_OBJECT}"),
        replace_with(json!({"metadata": {"name": AGENT_OBJECT}, "data": data})),
    );
    runtime.edit(
        &format!("coordination.k8s.io/leases/kyma-system/{AGENT_OBJECT}"),
        replace_with(json!({"metadata": {"name": AGENT_OBJECT}})),
    );
    write_objects(&runtime);
    let dir = tempfile::tempdir()?;
    let ca = Ca::generate("test", now(), Duration::from_secs(86_400))?;
    let domain = "kyma.local".parse()?;
    let closed = format!("127.0.0.1:{}", ports::free()?);
    let agent = start(dir.path(), (&ca, &domain), &"away".parse()?, &fake.kubeconfig("away"), &closed).await?;

    change(&runtime, 0..WARMUP_EVENTS).await?;
    let before = agent.memory()?.pss_kib;
    change(&runtime, WARMUP_EVENTS..EVENTS).await?;
    let after = agent.memory()?.pss_kib;
    let (_, page) = agent.get("/metrics").await?;
    let waiting = sum(&page, "tidewatch_agent_events_waiting");
    assert!(waiting >= 1.0 && waiting <= f64::from(OBJECTS + 1), "at most one waiting event per object: {waiting}");
    assert_flat("the agent", before, after);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_is_flat_while_receiver_accepts_events() -> Result<()> {
    let setup = ExclusiveLandscape::start("agent-memory", 5).await?;
    let landscape = &setup.landscape;
    landscape.write_watcher(&watcher("load", ("", "v1", "configmaps"), "spec")).await?;
    let mut fleet = SimulatedFleet::new(landscape.clone()).await?;
    fleet.grow(1).await?;
    let member = fleet.members().first().context("a member")?;
    let runtime = member.cluster();
    let watch = landscape.watch_of("load");
    until_within("the plan in the runtime", DEADLINE, async || {
        let plan = runtime.object(&format!("/configmaps/kyma-system/{AGENT_OBJECT}"));
        Ok(plan.filter(|plan| plan.to_string().contains(&watch)).map(drop))
    })
    .await?;
    write_objects(runtime);
    let dir = tempfile::tempdir()?;
    let trust = (landscape.ca(), landscape.trust_domain());
    let kubeconfig = fleet.fake().kubeconfig(member.name());
    let agent = start(dir.path(), trust, member.id(), &kubeconfig, &landscape.authority()).await?;

    change(runtime, 0..WARMUP_EVENTS).await?;
    let before = agent.memory()?.pss_kib;
    change(runtime, WARMUP_EVENTS..EVENTS).await?;
    let after = agent.memory()?.pss_kib;
    let settled = |page: &str| {
        let open = sum(page, "tidewatch_agent_events_waiting") + sum(page, "tidewatch_agent_events_unsettled");
        (open == 0.0).then(|| sum(page, "tidewatch_agent_events_total"))
    };
    let sent = agent.metrics_until(DEADLINE, settled).await?;
    assert!(sent >= f64::from(OBJECTS), "too few events were sent: {sent}");
    assert_flat("the agent", before, after);
    Ok(())
}
