//! Tests of the task with a runtime table, a fake control plane, and simulated reconciles.

use std::{collections::BTreeSet, time::Duration};

use kube::runtime::{
    reflector::{self, store::Writer},
    watcher::Event,
};
use serde_json::{Value, json};
use tidewatch_api::{
    identity::{Epoch, Instance, RuntimeId},
    names::{annotation, label},
    plan::Plan,
    shard::ShardCount,
};
use tidewatch_cluster::{leader::WriteFence, testing::FakeApiServer};
use tidewatch_fleet::{
    PathState, Verified,
    evidence::testing::FakePeers,
    pause::Pause,
    recorder::{self, EventRecorder},
    staged::IDLE_TICKS,
    stores::{Stores, kymas::CachedKyma},
    table,
    takeover::Takeover,
};
use tidewatch_rollout::rank;
use tokio::time;

use super::*;
use crate::upgrade::ImageDecision;

/// KCP with the upgrade's ConfigMap.
#[derive(Clone, Default)]
struct Kcp(FakeApiServer);

/// Id of the upgrade's ConfigMap.
const MAP: &str = "configmaps/tidewatch-agent-upgrade";

impl Kcp {
    fn map(&self) -> Option<ConfigMap> {
        Some(serde_json::from_value(self.0.object(MAP)?).unwrap())
    }

    fn data(&self, key: &str) -> Option<String> {
        self.map()?.data?.remove(key)
    }

    fn edit(&self, change: impl FnOnce(&mut Value)) {
        self.0.edit(MAP, change);
    }

    /// resourceVersion of the ConfigMap, which each write changes.
    fn version(&self) -> Option<String> {
        self.map()?.metadata.resource_version
    }
}

/// Runtimes with initially healthy agents.
struct Fixture {
    kcp: Kcp,
    fleet: RuntimeTable,
    stores: Stores,
    kymas: Writer<CachedKyma>,
    count: u32,
    /// Agents with this image send no heartbeats.
    bad: Option<&'static str>,
    /// Runtimes whose agents send no heartbeats with any image.
    silent: BTreeSet<u32>,
    /// Runtimes of which the Deployment records that the path was not proven before the upgrade.
    unproven_before: BTreeSet<u32>,
    counter: u64,
}

async fn evaluate(task: &mut StagedTask<Upgrade>) {
    task.subject.evaluate(&mut task.map, Instant::now()).await;
}

fn key(n: u32) -> KymaKey {
    KymaKey::new("kcp-system", format!("k{n}"))
}

fn id(n: u32) -> RuntimeId {
    format!("r-{n}").parse().unwrap()
}

fn kyma(n: u32, labels: Value) -> CachedKyma {
    serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
        "metadata": {"name": format!("k{n}"), "namespace": "kcp-system", "labels": labels}, "spec": {"channel": "regular"}}))
    .unwrap()
}

impl Fixture {
    fn new(count: u32) -> Self {
        let (kymas, writer) = reflector::store();
        let stores = Stores {
            kymas,
            templates: reflector::store().0,
            release_metas: reflector::store().0,
            manifests: reflector::store().0.into(),
            watchers: reflector::store().0,
        };
        let mut fixture = Self {
            kcp: Kcp::default(),
            fleet: Self::fleet(count),
            stores,
            kymas: writer,
            count,
            bad: None,
            silent: BTreeSet::new(),
            unproven_before: BTreeSet::new(),
            counter: 0,
        };
        (0..count).for_each(|n| fixture.kymas.apply_watcher_event(&Event::Apply(kyma(n, json!({})))));
        fixture
    }

    fn fleet(count: u32) -> RuntimeTable {
        Self::fleet_of(count, |_| true)
    }

    /// Table of a replica that holds some shards.
    fn fleet_of(count: u32, holds: impl Fn(u16) -> bool) -> RuntimeTable {
        let metrics = table::Metrics::register(&mut tidewatch_kit::metrics::Registry::default());
        let fleet = RuntimeTable::new(ShardCount::default(), table::Settings::default(), metrics);
        for shard in ShardCount::default().shards().filter(|shard| holds(shard.number())) {
            fleet.acquire(shard, Instance::new(1), &WriteFence::default(), Instant::now());
        }
        let plan = Arc::new(Plan::new("1".into(), Vec::new()).unwrap());
        (0..count).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan.clone()));
        fleet.set_synced();
        fleet
    }

    /// Starts a receiver that is configured with this image.
    async fn start_receiver(&mut self, image: &str) -> StagedTask<Upgrade> {
        self.fleet = Self::fleet(self.count);
        self.start(image, self.fleet.clone(), Replicas::alone()).await
    }

    async fn start(&self, image: &str, fleet: RuntimeTable, replicas: Replicas) -> StagedTask<Upgrade> {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            flags: Flags,
        }
        let services = Services {
            fleet,
            stores: self.stores.clone(),
            pause: Pause::default(),
            takeover: Takeover::default(),
            recorder: EventRecorder::new(recorder::Metrics::default()),
            replicas,
        };
        let metrics = Metrics::default();
        let args = ["x", "--agent-upgrade-stages", "1%,50%,100%", "--agent-upgrade-pause-seconds", "0"];
        let Cli { flags } = <Cli as clap::Parser>::parse_from(args);
        let opened = Upgrade::open(self.kcp.0.client(), "kcp-system", image, flags, services, metrics).await;
        opened.unwrap().0
    }

    /// Starts two replicas, of which the first has the fleet role and all shards with an even number.
    async fn start_replicas(&mut self, images: [&str; 2], peers: &Arc<FakePeers>) -> [StagedTask<Upgrade>; 2] {
        peers.replicas.lock().clear();
        let mut upgrades = Vec::new();
        for (at, image) in (0..).zip(images) {
            let replicas = Replicas::joining(peers);
            if at == 0 {
                replicas.role.acquire(WriteFence::default());
            }
            let fleet = Self::fleet_of(self.count, |shard| shard % 2 == at);
            upgrades.push(self.start(image, fleet, replicas).await);
        }
        upgrades.try_into().ok().unwrap()
    }

    /// Simulates 30 seconds: reconciles, heartbeats of agents that are well, and one tick.
    async fn advance(&mut self, upgrade: &mut StagedTask<Upgrade>, has: &mut [String]) {
        self.advance_all(std::slice::from_mut(upgrade), has).await;
    }

    async fn advance_all(&mut self, upgrades: &mut [StagedTask<Upgrade>], has: &mut [String]) {
        self.counter += 1;
        let holder = |upgrades: &[StagedTask<Upgrade>], n| {
            upgrades.iter().position(|upgrade| upgrade.subject.fleet.kyma_of(&id(n)).is_ok()).unwrap()
        };
        for (n, has) in (0..).zip(has.iter_mut()) {
            let upgrade = &upgrades[holder(upgrades, n)];
            let before = has.clone();
            match upgrade.subject.handle.image_for(&id(n)) {
                ImageDecision::Use(image) => *has = image.to_string(),
                ImageDecision::KeepOr(image) if has.is_empty() => *has = image.to_string(),
                ImageDecision::KeepOr(_) => {}
            }
            let path =
                upgrade.subject.fleet.runtime_reports().into_iter().find(|report| report.kyma == key(n)).unwrap().path;
            match path {
                PathState::Unproven(_) if before != *has => self.unproven_before.insert(n),
                PathState::Proven => self.unproven_before.remove(&n),
                _ => false,
            };
            let is_running = self.bad != Some(has.as_str());
            let unproven_before = self.unproven_before.contains(&n);
            upgrade.subject.handle.observe(&key(n), &has.as_str().into(), is_running, unproven_before);
        }
        time::advance(Duration::from_secs(1)).await;
        let is_well = |n: &u32, has: &str| !self.silent.contains(n) && self.bad != Some(has);
        let well = (0..).zip(has.iter()).filter(|(n, has)| is_well(n, has));
        for (n, _) in well {
            let heartbeat = json!({"epoch": "0000000000000001", "sequence": 0, "counter": self.counter, "waiting": 0, "parked": 0,
                "agentVersion": "1", "planRevision": "1", "certificate": {"notAfter": "", "fingerprint": ""},
                "canary": {"ageSeconds": 1}, "watches": []});
            let heartbeat = serde_json::from_value(heartbeat).unwrap();
            let heartbeat = Verified::unchecked(&id(n), Epoch::new(1), 1, heartbeat);
            upgrades[holder(upgrades, n)].subject.fleet.heartbeat(heartbeat, 1_700_000_000).unwrap();
        }
        for upgrade in &mut *upgrades {
            evaluate(upgrade).await;
        }
        for upgrade in upgrades {
            upgrade.observe(self.kcp.map().as_ref());
        }
        time::advance(Duration::from_secs(29)).await;
    }

    async fn run_to_end(&mut self, upgrade: &mut StagedTask<Upgrade>, has: &mut [String]) {
        for _ in 0..60 {
            self.advance(upgrade, has).await;
        }
    }
}

fn all_with(count: usize, image: &str) -> Vec<String> {
    vec![image.to_owned(); count]
}

fn count_with(has: &[String], image: &str) -> usize {
    has.iter().filter(|has| *has == image).count()
}

#[tokio::test(start_paused = true)]
async fn first_image_goes_to_all_runtimes_and_the_next_one_in_stages() {
    let mut fixture = Fixture::new(9);
    let mut has = all_with(9, "");
    let mut upgrade = fixture.start_receiver("x:a").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!((has.clone(), fixture.kcp.data("stage").as_deref()), (all_with(9, "x:a"), Some("done")));
    let version = fixture.kcp.version();
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!(fixture.kcp.version(), version, "an idle task writes nothing");

    let mut upgrade = fixture.start_receiver("x:b").await;
    let mut seen = vec![0];
    for _ in 0..60 {
        fixture.advance(&mut upgrade, &mut has).await;
        let upgraded = count_with(&has, "x:b");
        if seen.last() != Some(&upgraded) {
            seen.push(upgraded);
            // The successor of a killed receiver keeps the order.
            upgrade = fixture.start_receiver("x:b").await;
        }
    }
    assert_eq!(seen, [0, 1, 4, 9]);
    assert_eq!(fixture.kcp.data("stage").as_deref(), Some("done"));
}

#[tokio::test(start_paused = true)]
async fn bad_image_halts_and_reverts_without_stages() {
    let mut fixture = Fixture::new(9);
    fixture.bad = Some("x:b");
    let mut has = all_with(9, "x:a");
    let mut upgrade = fixture.start_receiver("x:a").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    for _ in 0..2 {
        let mut upgrade = fixture.start_receiver("x:b").await;
        fixture.run_to_end(&mut upgrade, &mut has).await;
        assert_eq!((count_with(&has, "x:b"), fixture.kcp.data("halted").is_some()), (1, true));
    }
    let mut upgrade = fixture.start_receiver("x:a").await;
    fixture.advance(&mut upgrade, &mut has).await;
    fixture.advance(&mut upgrade, &mut has).await;
    assert_eq!((has.clone(), fixture.kcp.data("halted")), (all_with(9, "x:a"), None));

    let mut upgrade = fixture.start_receiver("x:b").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    let confirm = |image: &str| {
        fixture.kcp.edit(|map| map["metadata"]["annotations"] = json!({annotation::CONFIRM_AGENT_IMAGE: image}));
    };
    confirm("another");
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!(count_with(&has, "x:b"), 1, "a confirmation applies to one image");
    let confirm = |image: &str| {
        fixture.kcp.edit(|map| map["metadata"]["annotations"] = json!({annotation::CONFIRM_AGENT_IMAGE: image}));
    };
    confirm("x:b");
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!(count_with(&has, "x:b"), 9);
}

#[tokio::test(start_paused = true)]
async fn paused_runtimes_are_excluded() {
    let mut fixture = Fixture::new(3);
    let mut has = all_with(3, "x:a");
    let mut upgrade = fixture.start_receiver("x:a").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    let paused = json!({label::PAUSE: "true"});
    (0..3).for_each(|n| fixture.kymas.apply_watcher_event(&Event::Apply(kyma(n, paused.clone()))));
    let mut upgrade = fixture.start_receiver("x:b").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!(fixture.kcp.data("stage").as_deref(), Some("0"), "no runtime counts");
    fixture.kymas.apply_watcher_event(&Event::Apply(kyma(1, json!({}))));
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!(fixture.kcp.data("stage").as_deref(), Some("done"));
}

#[tokio::test(start_paused = true)]
async fn runtimes_that_were_unwell_before_halt_no_upgrade_while_shards_move() {
    let mut fixture = Fixture::new(9);
    let mut has = all_with(9, "x:a");
    let mut upgrade = fixture.start_receiver("x:a").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    // They are the first in the order, so the first stage contains them and one that is well.
    let mut order: Vec<_> = (0..9).collect();
    order.sort_by_key(|n| rank("x:b", id(*n).as_str()));
    fixture.silent = order[..5].iter().copied().collect();
    fixture.run_to_end(&mut upgrade, &mut has).await;

    let mut upgrade = fixture.start_receiver("x:b").await;
    while count_with(&has, "x:b") < 6 {
        fixture.advance(&mut upgrade, &mut has).await;
        upgrade.subject.rules.pause = Duration::from_secs(86_400);
    }
    // Another replica acquires the shards, and holds them for longer than the deadline.
    let mut upgrade = fixture.start_receiver("x:b").await;
    upgrade.subject.rules.pause = Duration::from_secs(86_400);
    let since = Instant::now();
    while since.elapsed() < 2 * upgrade.subject.rules.deadline {
        fixture.advance(&mut upgrade, &mut has).await;
    }
    assert_eq!((count_with(&has, "x:b"), fixture.kcp.data("halted")), (6, None));
    upgrade.subject.rules.pause = Duration::ZERO;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!((count_with(&has, "x:b"), fixture.kcp.data("stage").as_deref()), (9, Some("done")));
}

#[tokio::test(start_paused = true)]
async fn deadline_restarts_after_a_pause() {
    let mut fixture = Fixture::new(9);
    let mut has = all_with(9, "x:a");
    let mut upgrade = fixture.start_receiver("x:a").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    let mut upgrade = fixture.start_receiver("x:b").await;
    fixture.bad = Some("x:b");
    while count_with(&has, "x:b") == 0 {
        fixture.advance(&mut upgrade, &mut has).await;
    }
    fixture.advance(&mut upgrade, &mut has).await;
    // The first runtime has had the image for a minute; the pause lasts longer than the deadline.
    (0..9).for_each(|n| fixture.kymas.apply_watcher_event(&Event::Apply(kyma(n, json!({label::PAUSE: "true"})))));
    let since = Instant::now();
    while since.elapsed() < 2 * upgrade.subject.rules.deadline {
        fixture.advance(&mut upgrade, &mut has).await;
    }
    assert_eq!(fixture.kcp.data("halted"), None);
    (0..9).for_each(|n| fixture.kymas.apply_watcher_event(&Event::Apply(kyma(n, json!({})))));
    fixture.advance(&mut upgrade, &mut has).await;
    assert_eq!((count_with(&has, "x:b"), fixture.kcp.data("halted")), (1, None), "it has its time anew");
    fixture.bad = None;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!((count_with(&has, "x:b"), fixture.kcp.data("stage").as_deref()), (9, Some("done")));
}

#[tokio::test(start_paused = true)]
async fn image_of_another_repository_reaches_no_runtime() {
    let mut fixture = Fixture::new(9);
    let mut has = all_with(9, "x:a");
    let mut upgrade = fixture.start_receiver("x:a").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    for data in [
        json!({"target": "evil:b", "stage": "done", "since": "2026-11-01T00:00:00Z"}),
        json!({"target": "x:a", "previous": "evil:b", "stage": "0", "since": "2026-11-01T00:00:00Z"}),
    ] {
        fixture.kcp.edit(|map| map["data"] = data);
        upgrade.observe(fixture.kcp.map().as_ref());
        for n in 0..9 {
            let image = match upgrade.subject.handle.image_for(&id(n)) {
                ImageDecision::Use(image) | ImageDecision::KeepOr(image) => image,
            };
            assert_eq!(&*image, "x:a");
        }
        fixture.run_to_end(&mut upgrade, &mut has).await;
        assert_eq!(
            (fixture.kcp.data("target").as_deref(), fixture.kcp.data("stage").as_deref()),
            (Some("x:a"), Some("done"))
        );
        assert_eq!(has, all_with(9, "x:a"));
    }
}

#[tokio::test(start_paused = true)]
async fn config_map_is_recreated_but_never_overwritten_blindly() {
    let mut fixture = Fixture::new(3);
    let mut has = all_with(3, "x:a");
    let mut upgrade = fixture.start_receiver("x:a").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    fixture.kcp.0.remove(MAP);
    upgrade.observe(None);
    fixture.advance(&mut upgrade, &mut has).await;
    assert_eq!(fixture.kcp.data("target").as_deref(), Some("x:a"));

    fixture.kcp.edit(|map| map["data"] = json!({"target": "x:b"}));
    let version = fixture.kcp.version();
    let mut upgrade = fixture.start_receiver("x:b").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!((fixture.kcp.version(), has.clone()), (version, all_with(3, "x:a")), "each runtime keeps its image");
    fixture.kcp.0.remove(MAP);
    upgrade.observe(None);
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!((has.clone(), fixture.kcp.data("stage").as_deref()), (all_with(3, "x:b"), Some("done")));

    // The ConfigMap changed after this receiver read it.
    let mut upgrade = fixture.start_receiver("x:c").await;
    fixture.kcp.edit(|map| map["metadata"]["labels"] = json!({"a": "b"}));
    let version = fixture.kcp.version();
    fixture.counter += 1;
    evaluate(&mut upgrade).await;
    assert_eq!((fixture.kcp.version(), fixture.kcp.data("target").as_deref()), (version, Some("x:b")));
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!(fixture.kcp.data("target").as_deref(), Some("x:c"));
}

/// Number of ticks until the next evaluation.
fn ticks(upgrade: &mut StagedTask<Upgrade>) -> Option<u32> {
    (1..=2 * IDLE_TICKS).find(|_| upgrade.is_due())
}

#[tokio::test(start_paused = true)]
async fn idle_task_ticks_seldom_until_the_config_map_changes() {
    let mut fixture = Fixture::new(3);
    fixture.bad = Some("x:b");
    let mut has = all_with(3, "x:a");
    let mut upgrade = fixture.start_receiver("x:a").await;
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert_eq!((ticks(&mut upgrade), ticks(&mut upgrade)), (Some(1), Some(IDLE_TICKS)), "it is over");

    let mut upgrade = fixture.start_receiver("x:b").await;
    assert_eq!((ticks(&mut upgrade), ticks(&mut upgrade)), (Some(1), Some(1)), "a new image");
    fixture.run_to_end(&mut upgrade, &mut has).await;
    assert!(fixture.kcp.data("halted").is_some());
    assert_eq!((ticks(&mut upgrade), ticks(&mut upgrade)), (Some(1), Some(IDLE_TICKS)), "it has halted");
    fixture.kcp.edit(|map| map["metadata"]["annotations"] = json!({annotation::CONFIRM_AGENT_IMAGE: "x:b"}));
    upgrade.observe(fixture.kcp.map().as_ref());
    assert_eq!(ticks(&mut upgrade), Some(1), "it is confirmed");

    fixture.kcp.edit(|map| map["data"] = json!({"target": "x:b"}));
    upgrade.observe(fixture.kcp.map().as_ref());
    assert_eq!((ticks(&mut upgrade), ticks(&mut upgrade)), (Some(1), Some(IDLE_TICKS)), "it cannot be read");
    upgrade.observe(None);
    assert_eq!((ticks(&mut upgrade), ticks(&mut upgrade)), (Some(1), Some(1)), "it is to be made");
}

#[tokio::test(start_paused = true)]
async fn deleted_runtimes_are_forgotten() {
    let mut fixture = Fixture::new(2);
    let mut upgrade = fixture.start_receiver("x:a").await;
    upgrade.subject.enqueued.extend([key(0), key(1)]);
    fixture.fleet.remove(&key(0));
    evaluate(&mut upgrade).await;
    assert_eq!(upgrade.subject.enqueued, HashSet::from([key(1)]), "should it come back, it is enqueued anew");
}

#[tokio::test(start_paused = true)]
async fn replicas_upgrade_the_fleet_in_the_stages_of_one() {
    let mut fixture = Fixture::new(9);
    let peers = Arc::new(FakePeers::default());
    let mut has = all_with(9, "");
    let mut upgrades = fixture.start_replicas(["x:a", "x:b"], &peers).await;
    for _ in 0..20 {
        fixture.advance_all(&mut upgrades, &mut has).await;
    }
    // The second replica is of a newer version, and waits for the role.
    assert_eq!((has.clone(), fixture.kcp.data("stage").as_deref()), (all_with(9, "x:a"), Some("done")));
    let asked = peers.asked();
    for _ in 0..20 {
        fixture.advance_all(&mut upgrades, &mut has).await;
    }
    assert_eq!(peers.asked(), asked, "no question without an upgrade");

    let [first, second] = &upgrades;
    first.subject.replicas.role.release().await;
    second.subject.replicas.role.acquire(WriteFence::default());
    let mut seen = vec![0];
    for _ in 0..60 {
        fixture.advance_all(&mut upgrades, &mut has).await;
        let upgraded = count_with(&has, "x:b");
        if seen.last() != Some(&upgraded) {
            seen.push(upgraded);
        }
    }
    assert_eq!(seen, [0, 1, 4, 9]);
    assert_eq!(fixture.kcp.data("stage").as_deref(), Some("done"));
}

#[tokio::test(start_paused = true)]
async fn stage_waits_for_the_answers_of_all_replicas_and_a_new_target_does_not() {
    let mut fixture = Fixture::new(9);
    let peers = Arc::new(FakePeers::default());
    let mut has = all_with(9, "x:a");
    let mut upgrades = fixture.start_replicas(["x:a", "x:a"], &peers).await;
    for _ in 0..20 {
        fixture.advance_all(&mut upgrades, &mut has).await;
    }
    peers.fail(Some(AskError::Incomplete));
    let mut upgrades = fixture.start_replicas(["x:b", "x:b"], &peers).await;
    for _ in 0..20 {
        fixture.advance_all(&mut upgrades, &mut has).await;
    }
    assert_eq!((fixture.kcp.data("target").as_deref(), fixture.kcp.data("stage").as_deref()), (Some("x:b"), Some("0")));
    assert_eq!(
        (
            count_with(&has, "x:b"),
            upgrades[0].subject.metrics.incomplete.get(),
            upgrades[1].subject.metrics.incomplete.get()
        ),
        (0, 20, 0)
    );
    peers.fail(None);
    // A shard that a replica has acquired, and whose Kymas it has not placed yet.
    let taken = ShardCount::default().shard(1).unwrap();
    upgrades[0].subject.fleet.acquire(taken, Instance::new(2), &WriteFence::default(), Instant::now());
    evaluate(&mut upgrades[0]).await;
    assert_eq!(fixture.kcp.data("stage").as_deref(), Some("0"));
    upgrades[0].subject.fleet.release(taken);
    fixture.advance_all(&mut upgrades, &mut has).await;
    assert_eq!(fixture.kcp.data("stage").as_deref(), Some("1"));
}

#[tokio::test(start_paused = true)]
async fn replica_without_the_role_writes_nothing_and_posts_no_event() {
    let mut fixture = Fixture::new(2);
    let peers = Arc::new(FakePeers::default());
    let [mut first, mut second] = fixture.start_replicas(["x:a", "x:a"], &peers).await;
    evaluate(&mut second).await;
    assert_eq!((fixture.kcp.map(), peers.asked()), (None, 0));
    evaluate(&mut first).await;
    let map = fixture.kcp.map();
    for upgrade in [&mut first, &mut second] {
        upgrade.observe(map.as_ref());
    }
    fixture.kcp.edit(|map| map["data"] = json!({"target": "x:a", "stage": "done", "since": "2026-11-01T00:00:00Z"}));
    for upgrade in [&mut first, &mut second] {
        upgrade.observe(fixture.kcp.map().as_ref());
    }
    assert_eq!([&first, &second].map(|upgrade| upgrade.recorder.pending_notes().len()), [1, 0]);
}
