//! Load of the replicas on KCP, by their own metrics and the audit log of its API server. The floor is one receiver without
//! a relay.

use std::time::Duration;

use anyhow::{Result, ensure};
use tidewatch_testing::{
    control_plane::audit::Write,
    landscape::Landscape,
    load::{SimulatedFleet, until_within},
    product::metric_sum,
    progress::Step,
};
use tokio::time::sleep;

use super::{
    super::{
        Figure,
        fleet_setup::{FleetSetup, WAIT_LIMIT, metric},
    },
    Settings, number,
    setup::ReplicaSetup,
    users::Users,
};

const REPLICAS: [&str; 3] = ["a", "b", "c"];
/// For a minute after its start a replica has the bodies of all objects; it fetches none before.
const REST: Duration = Duration::from_secs(100);
/// Time over which the writes of idle receivers are counted.
const IDLE: Duration = Duration::from_secs(60);

/// Load of all receivers together.
struct KcpLoad {
    watches: f64,
    /// Writes per second while nothing changes.
    idle_writes: f64,
    writes_per_change: f64,
}

pub(super) async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let (one, lists_of_one) = single(settings).await?;
    let mut setup = ReplicaSetup::start(&REPLICAS, settings.agents, settings).await?;
    setup.fleet.start();
    let unsettled = setup.unsettled(WAIT_LIMIT).await;
    ensure!(unsettled == 0, "{unsettled} events are not settled");
    let three = load(&setup.landscape, &setup.fleet, settings, async || pages(&setup).await).await?;
    let share = |of: f64| of / number(REPLICAS.len());
    emit(&Figure::new("replicas_kcp_runtimes", settings.agents.into(), "runtimes"));
    emit(&Figure::new("replicas_kcp_watches_of_each", share(three.watches), "watches").with_floor(one.watches));
    // Renewals of Leases; the one receiver has a Lease of another duration.
    emit(&Figure::new("replicas_kcp_idle_writes_of_each", share(three.idle_writes), "writes/s"));
    let writes = Figure::new("replicas_kcp_writes_per_change", three.writes_per_change, "writes");
    emit(&writes.with_floor(one.writes_per_change));

    let [_, _, last] = REPLICAS;
    let step = Step::begin("the loss of one of three replicas");
    let lost = setup.remove(last)?;
    let before: f64 = pages(&setup).await?.iter().map(|page| lists(page)).sum();
    lost.process.kill9();
    setup.share_equally().await?;
    serves_all(&setup, settings).await?;
    let after: f64 = pages(&setup).await?.iter().map(|page| lists(page)).sum();
    step.done();
    emit(&Figure::new("replicas_kcp_takeover_lists_of_each", (after - before) / number(setup.running.len()), "lists"));

    let step = Step::begin("the start of a third replica");
    setup.launch(last).await?;
    setup.are_ready().await?;
    setup.share_equally().await?;
    serves_all(&setup, settings).await?;
    let (_, page) = setup.running[last].process.get("/metrics").await?;
    step.done();
    emit(&Figure::new("replicas_kcp_start_lists", lists(&page), "lists").with_floor(lists_of_one));
    Ok(())
}

/// Load of one receiver without a relay, and its lists at its start.
async fn single(settings: &Settings) -> Result<(KcpLoad, f64)> {
    let mut setup = FleetSetup::start(settings.network, &[]).await?;
    let lists = lists(&setup.metrics().await?);
    setup.grow(usize::try_from(settings.agents)?).await?;
    let of_one = async || Ok(vec![setup.metrics().await?]);
    Ok((load(&setup.landscape, &setup.fleet, settings, of_one).await?, lists))
}

/// Load of the receivers that have these metrics pages.
async fn load(
    landscape: &Landscape,
    fleet: &SimulatedFleet,
    settings: &Settings,
    pages: impl AsyncFn() -> Result<Vec<String>>,
) -> Result<KcpLoad> {
    let kcp = landscape.kcp();
    let step = Step::begin("idle");
    sleep(REST).await;
    let mark = kcp.audit_mark()?;
    sleep(IDLE).await;
    let idle_writes = number(kcp.writes_since(mark)?.iter().filter(is_ours).count()) / IDLE.as_secs_f64();
    let watches = pages().await?.iter().map(|page| watches(page)).sum();
    step.done();

    let step = Step::begin(format!("{} changes a second", settings.rate));
    let mark = kcp.audit_mark()?;
    let users = Users::start(fleet, settings.rate)?;
    sleep(Duration::from_secs(settings.seconds.into())).await;
    let changes = users.end().await?;
    ensure!(changes.iter().all(|change| change.shown.is_some()), "a change was lost");
    until_within("the records and Events of all changes to be written", WAIT_LIMIT, async || {
        let of = |page: &String| {
            metric(page, "tidewatch_kyma_inputs_pending") + metric(page, "tidewatch_kubernetes_events_waiting")
        };
        let pending: f64 = pages().await?.iter().map(of).sum();
        ensure!(pending == 0.0, "{pending} are pending");
        Ok(Some(()))
    })
    .await?;
    // Leases are renewed regardless of changes.
    let of_changes = |write: &&Write| is_ours(write) && write.resource != "leases";
    let writes = kcp.writes_since(mark)?.iter().filter(of_changes).count();
    step.done();
    Ok(KcpLoad { watches, idle_writes, writes_per_change: number(writes) / number(changes.len()) })
}

/// Lets each user make a change and wait for it: the holder of each shard then has its objects.
async fn serves_all(setup: &ReplicaSetup, settings: &Settings) -> Result<()> {
    let users = Users::start(&setup.fleet, settings.rate)?;
    sleep(Duration::from_secs(settings.agents.into()) / settings.rate.max(1)).await;
    let changes = users.end().await?;
    ensure!(changes.iter().all(|change| change.shown.is_some()), "a change was lost");
    Ok(())
}

/// Metrics pages of all replicas.
async fn pages(setup: &ReplicaSetup) -> Result<Vec<String>> {
    let mut pages = Vec::new();
    for replica in setup.running.values() {
        pages.push(replica.process.get("/metrics").await?.1);
    }
    Ok(pages)
}

/// Lists that a receiver requested, without those of Leases; each page of a list counts.
fn lists(page: &str) -> f64 {
    metric_sum(page, "tidewatch_kcp_requests_total", |labels| labels.contains(r#"operation="list""#))
}

fn watches(page: &str) -> f64 {
    metric_sum(page, "tidewatch_kcp_watches_open", |_| true)
}

fn is_ours(write: &&Write) -> bool {
    write.user.ends_with(":tidewatch-receiver")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_all_kinds_count() {
        let page = r#"# TYPE tidewatch_kcp_requests_total counter
tidewatch_kcp_requests_total{kind="kymas",operation="list"} 2
tidewatch_kcp_requests_total{kind="kymas",operation="watch"} 8
tidewatch_kcp_requests_total{kind="secrets",operation="get"} 3
tidewatch_kcp_watches_open{kind="kymas"} 1
tidewatch_kcp_watches_open{kind="secrets"} 1
"#;
        assert_eq!((lists(page), watches(page)), (2.0, 2.0));
    }
}
