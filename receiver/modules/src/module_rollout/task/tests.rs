//! Tests of the task with the catalog, a fake control plane, and simulated reconciles.

use std::time::Duration;

use futures::FutureExt as _;
use kube::{
    ResourceExt as _,
    runtime::{
        reflector::{self, store::Writer},
        watcher::Event,
    },
};
use serde_json::{Value, json};
use tidewatch_api::{
    Manifest, ModuleReleaseMeta, ModuleTemplate, State,
    facts::ManifestFacts,
    identity::{Instance, RuntimeId},
    key::ManifestKey,
    names::{RELEASES, finalizer, label},
    plan::Plan,
    shard::ShardCount,
};
use tidewatch_cluster::{
    WriteBudgets, leader::WriteFence, limits::REQUEST_DEADLINE, state_map::RETRY, testing::FakeApiServer,
};
use tidewatch_fleet::{
    evidence::{Replicas, testing::FakePeers},
    pause::Pause,
    peers::AskError,
    queue::ReconcileOutcome,
    recorder::{self, EventRecorder},
    staged::INTERVAL,
    stores::{Stores, manifests::CachedManifest},
    table::{self, RuntimeTable},
    takeover::Takeover,
};
use tidewatch_select::catalog::{RolloutMark, RolloutSlot, VersionSource, rollout::RolloutFlags};
use tokio::time;

use super::*;
use crate::{
    catalog::{self, Flags},
    windows,
};

/// Id of the ConfigMap with the rollouts.
const MAP: &str = "configmaps/tidewatch-rollouts";
const MODULE: &str = "keda";
const FAST: VersionSource<'_> = VersionSource::Channel("fast");
/// Number of runtimes. Rings of 10%, 50% and 100%, and a limit of 10%: two may fail.
const COUNT: usize = 20;
const LIMIT: usize = 2;

/// A control plane whose runtimes follow the channel `fast` of one module.
struct Fixture {
    kcp: FakeApiServer,
    stores: Stores,
    kymas: Writer<CachedKyma>,
    manifests: Writer<CachedManifest>,
    metas: Writer<ModuleReleaseMeta>,
    templates: Writer<ModuleTemplate>,
    flags: RolloutFlags,
    /// Time over which a moved channel is spread without rings.
    window: Duration,
    /// Version with which the module is in an error state.
    bad: Option<&'static str>,
}

/// A receiver with its queue and catalog.
struct Receiver {
    task: StagedTask<ModuleRollouts>,
    fleet: RuntimeTable,
    catalog: Catalog,
    recorder: EventRecorder,
    metrics: Metrics,
    /// ConfigMap that the watch returned last.
    seen: Option<ConfigMap>,
}

async fn evaluate(task: &mut StagedTask<ModuleRollouts>) {
    task.subject.evaluate(&mut task.map, Instant::now()).await;
}

fn key(n: usize) -> KymaKey {
    KymaKey::new("kcp-system", format!("k{n}"))
}

fn uid(n: usize) -> String {
    format!("uid-{n}")
}

fn read<T: serde::de::DeserializeOwned>(kind: &str, name: &str, metadata: &Value, rest: Value) -> T {
    let mut object = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind, "metadata": metadata});
    object["metadata"]["name"] = name.into();
    object["metadata"]["namespace"] = "kcp-system".into();
    object.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
    serde_json::from_value(object).unwrap()
}

/// A ready module, as an earlier version installed it.
fn manifest(n: usize, version: &str) -> Manifest {
    let labels = json!({label::KYMA_NAME: format!("k{n}"), label::MODULE_NAME: MODULE, label::CHANNEL: "fast"});
    let metadata = json!({"labels": labels, "annotations": {annotation::SYNC_OCI_REF: version}});
    let spec = json!({"remote": true, "version": version, "install": {"name": "raw", "source": {"ref": version}}});
    read("Manifest", &format!("m{n}"), &metadata, json!({"spec": spec, "status": {"state": "Ready"}}))
}

fn flags() -> RolloutFlags {
    RolloutFlags {
        module_rollout_rings: Some("10%,50%,100%".parse().unwrap()),
        module_rollout_pause: Duration::ZERO,
        module_rollout_max_failures: "10%".parse().unwrap(),
        ..RolloutFlags::default()
    }
}

impl Fixture {
    /// Creates runtimes with version 1.0.0, to which the channel points.
    fn new(flags: RolloutFlags) -> Self {
        let (kymas, kymas_writer) = reflector::store();
        let (manifests, manifests_writer) = reflector::store();
        let (release_metas, metas) = reflector::store();
        let (templates, templates_writer) = reflector::store();
        let watchers = reflector::store().0;
        let stores = Stores { kymas, templates, release_metas, manifests: manifests.into(), watchers };
        let kymas = kymas_writer;
        let manifests = manifests_writer;
        let templates = templates_writer;
        let kcp = FakeApiServer::default();
        let window = Duration::ZERO;
        let bad = None;
        let mut fixture = Self { kcp, stores, kymas, manifests, metas, templates, flags, window, bad };
        for n in 0..COUNT {
            let metadata = json!({"uid": uid(n), "annotations": {annotation::INPUTS: "-.-"}});
            let kyma = read("Kyma", &format!("k{n}"), &metadata, json!({"spec": {"channel": "fast"}}));
            fixture.kymas.apply_watcher_event(&Event::Apply(kyma));
            fixture.manifests.apply_watcher_event(&Event::Apply(manifest(n, "1.0.0").into()));
        }
        for version in ["1.0.0", "1.1.0", "1.2.0"] {
            let spec = json!({"moduleName": MODULE, "version": version, "descriptor": {}});
            let template = read("ModuleTemplate", &format!("keda-{version}"), &json!({}), json!({"spec": spec}));
            fixture.templates.apply_watcher_event(&Event::Apply(template));
        }
        fixture.point("1.0.0", &json!({}));
        let accepted = json!({MODULE: {"whom": "everyone", "channels": {"fast": {"version": "1.0.0"}},
            "component": "kyma-project.io/module/keda",
            "versions": {"1.0.0": {}, "1.1.0": {}, "1.2.0": {}}}});
        fixture.kcp.edit(&format!("configmaps/{RELEASES}"), |map| {
            *map = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"accepted": accepted.to_string()}});
        });
        fixture
    }

    /// Writes the release meta.
    fn point(&mut self, version: &str, annotations: &Value) {
        let spec = json!({"moduleName": MODULE, "ocmComponentName": "kyma-project.io/module/keda",
            "channels": [{"channel": "fast", "version": version}]});
        let meta = read("ModuleReleaseMeta", MODULE, &json!({"annotations": annotations}), json!({"spec": spec}));
        self.metas.apply_watcher_event(&Event::Apply(meta));
    }

    /// Starts a receiver, which continues with the state in the control plane.
    async fn start_receiver(&self) -> Receiver {
        self.start(Replicas::alone(), |_| true).await
    }

    /// The catalog of a replica that starts, which nothing has read yet.
    fn catalog(&self, replicas: &Replicas) -> Catalog {
        let flags =
            Flags { module_upgrade_rollout_max_delay: self.window, rollout: self.flags.clone(), ..Flags::default() };
        let settings = catalog::Settings { flags, ..catalog::Settings::default() };
        let metrics = catalog::Metrics::default();
        let budgets = WriteBudgets::default();
        let catalog = Catalog::new(settings, metrics, budgets, replicas.role.clone());
        let releases = self.kcp.object(&format!("configmaps/{RELEASES}"));
        let releases: Option<ConfigMap> = releases.map(|map| serde_json::from_value(map).unwrap());
        catalog.observe_releases(releases.as_ref());
        catalog
    }

    /// Starts a replica that holds some shards.
    async fn start(&self, replicas: Replicas, holds: impl Fn(u16) -> bool) -> Receiver {
        let catalog = self.catalog(&replicas);
        drop(catalog.refresh(&self.stores));
        let metrics = table::Metrics::register(&mut tidewatch_kit::metrics::Registry::default());
        let fleet = RuntimeTable::new(ShardCount::default(), table::Settings::default(), metrics);
        for shard in ShardCount::default().shards().filter(|shard| holds(shard.number())) {
            fleet.acquire(shard, Instance::new(1), &WriteFence::default(), Instant::now());
        }
        let plan = Arc::new(Plan::new("1".into(), Vec::new()).unwrap());
        for n in 0..COUNT {
            fleet.place(key(n), "", Some(format!("r-{n}").parse::<RuntimeId>().unwrap()), plan.clone());
        }
        fleet.set_synced();
        let recorder = EventRecorder::new(recorder::Metrics::default());
        let metrics = Metrics::default();
        let services = Services {
            fleet: fleet.clone(),
            stores: self.stores.clone(),
            pause: Pause::default(),
            takeover: Takeover::default(),
            recorder: recorder.clone(),
            replicas,
        };
        let dependencies = Dependencies {
            services,
            catalog: catalog.clone(),
            windows: MaintenanceWindows::new(Duration::ZERO, windows::Metrics::default()),
            metrics: metrics.clone(),
        };
        let task = ModuleRollouts::open(self.kcp.client(), "kcp-system", dependencies).await.unwrap();
        let receiver = Receiver { task, fleet, catalog, recorder, metrics, seen: self.map() };
        drop(receiver.take_enqueued());
        receiver
    }

    /// Moves the channel, and lets the receiver decide on it as after the event of the release meta.
    async fn move_to(&mut self, receiver: &Receiver, version: &str) {
        self.point(version, &json!({}));
        self.decide(receiver).await;
    }

    async fn decide(&self, receiver: &Receiver) {
        drop(receiver.catalog.refresh(&self.stores));
        assert!(receiver.catalog.persist_releases(&self.kcp.client(), "kcp-system").await);
    }

    fn map(&self) -> Option<ConfigMap> {
        Some(serde_json::from_value(self.kcp.object(MAP)?).unwrap())
    }

    fn rollout(&self) -> Option<Rollout> {
        Some(serde_json::from_str(self.map()?.data?.get("keda_fast")?).unwrap())
    }

    fn halted(&self) -> Option<String> {
        self.rollout()?.halted().map(str::to_owned)
    }

    fn confirm(&self, id: &str) {
        self.kcp.edit(MAP, |map| map["metadata"]["annotations"] = json!({annotation::CONFIRM: id, "theirs": "x"}));
    }

    fn manifest(&self, n: usize) -> Arc<Manifest> {
        self.stores.manifests.get(&ManifestKey::new("kcp-system", format!("m{n}"))).unwrap().unwrap()
    }

    fn with(&self, version: &str) -> BTreeSet<KymaKey> {
        let has = |n: &usize| self.manifest(*n).spec.version.as_deref() == Some(version);
        (0..COUNT).filter(has).map(key).collect()
    }

    /// Writes the Manifest of a runtime as a reconcile of its Kyma does, which may have any cause.
    fn reconcile(&mut self, receiver: &Receiver, n: usize) {
        let before = self.manifest(n);
        let meta = self.stores.release_metas.state();
        let version = meta[0].spec.version_of("fast").unwrap().to_owned();
        let installed = before.spec.version.clone().unwrap();
        if version == installed || receiver.catalog.rollout_slot(&uid(n), MODULE, FAST, &version) != RolloutSlot::Now {
            return;
        }
        let board = receiver.catalog.rollouts();
        let is_reverted = || {
            let mark = RolloutMark::parse(before.annotations());
            mark.is_some_and(|mark| board.reverts(MODULE, FAST, &version, &mark))
        };
        if version < installed && !is_reverted() {
            return;
        }
        let mut next = manifest(n, &version);
        // The layer is not applied yet.
        let annotations = next.annotations_mut();
        annotations.insert(annotation::SYNC_OCI_REF.to_owned(), installed);
        if let Some(change) = board.change(MODULE, FAST, &version) {
            let mark = RolloutMark { change, healthy: ManifestFacts::from(&*before).is_healthy() };
            annotations.insert(annotation::ROLLOUT.to_owned(), mark.to_text());
        }
        next.status = before.status.clone();
        self.manifests.apply_watcher_event(&Event::Apply(next.into()));
    }

    /// Applies the layers of all Manifests.
    fn settle(&mut self) {
        for n in 0..COUNT {
            let mut manifest = (*self.manifest(n)).clone();
            let version = manifest.spec.version.clone().unwrap();
            let state = if self.bad == Some(version.as_str()) { State::Error } else { State::Ready };
            manifest.annotations_mut().insert(annotation::SYNC_OCI_REF.to_owned(), version);
            manifest.status.as_mut().unwrap().state = state;
            self.manifests.apply_watcher_event(&Event::Apply(manifest.into()));
        }
    }

    /// Simulates a second: a tick, the watch, the reconciles of the enqueued Kymas, and the layers. Returns those Kymas.
    async fn advance(&mut self, receiver: &mut Receiver) -> BTreeSet<KymaKey> {
        receiver.tick(self).await;
        let enqueued = receiver.take_enqueued();
        for n in (0..COUNT).filter(|n| enqueued.contains(&key(*n))) {
            self.reconcile(receiver, n);
        }
        self.settle();
        time::advance(INTERVAL).await;
        enqueued
    }

    async fn run_to_end(&mut self, receiver: &mut Receiver) {
        for _ in 0..60 {
            self.advance(receiver).await;
        }
    }
}

impl Receiver {
    /// One tick, after which the watch returns the ConfigMap.
    async fn tick(&mut self, fixture: &Fixture) {
        evaluate(&mut self.task).await;
        self.watch(fixture);
    }

    /// The watch returns the ConfigMap if it has changed.
    fn watch(&mut self, fixture: &Fixture) {
        let map = fixture.map();
        if self.seen != map {
            self.task.observe(map.as_ref());
            self.seen = map;
        }
    }

    fn take_enqueued(&self) -> BTreeSet<KymaKey> {
        let mut taken = BTreeSet::new();
        while let Some(job) = self.fleet.next().now_or_never() {
            taken.insert(job.key.clone());
            let ended = ReconcileOutcome::ended(job.queued.work);
            self.fleet.done(job, ended);
        }
        taken
    }

    /// Kymas whose slot has come.
    fn admitted(&self, version: &str) -> usize {
        let is_now = |n: &usize| self.catalog.rollout_slot(&uid(*n), MODULE, FAST, version) == RolloutSlot::Now;
        (0..COUNT).filter(is_now).count()
    }

    /// Value of a series; zero if it is absent.
    fn metric(&self, series: &str) -> i64 {
        let mut registry = tidewatch_kit::metrics::Registry::default();
        self.metrics.register_in(&mut registry);
        let page = registry.encode().unwrap();
        let value = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_default()
    }
}

#[tokio::test(start_paused = true)]
async fn without_rings_each_kyma_has_its_jittered_slot() {
    let mut fixture = Fixture::new(RolloutFlags::default());
    fixture.window = Duration::from_secs(86_400);
    let mut receiver = fixture.start_receiver().await;
    fixture.move_to(&receiver, "1.1.0").await;
    fixture.run_to_end(&mut receiver).await;
    assert!(fixture.map().is_none() && receiver.task.subject.rests());
    let slot = |n| receiver.catalog.rollout_slot(&uid(n), MODULE, FAST, "1.1.0");
    assert!((0..COUNT).all(|n| matches!(slot(n), RolloutSlot::After(_))), "of a window of a day");
    assert!(receiver.catalog.rollout_delay(&uid(0), MODULE, FAST).is_some());
    assert_eq!(receiver.catalog.rollouts().halts().map(|halts| halts.len()), Some(0));
}

#[tokio::test(start_paused = true)]
async fn moved_channel_is_stored_before_it_reaches_the_rings() {
    let mut fixture = Fixture::new(flags());
    let mut receiver = fixture.start_receiver().await;
    fixture.run_to_end(&mut receiver).await;
    assert_eq!(fixture.map(), None, "no move was observed");

    fixture.move_to(&receiver, "1.1.0").await;
    assert_eq!(receiver.catalog.rollout_delay(&uid(0), MODULE, FAST), None);
    fixture.kcp.refuse("WRITE configmaps", 503);
    receiver.tick(&fixture).await;
    receiver.tick(&fixture).await;
    assert_eq!((receiver.admitted("1.1.0"), receiver.take_enqueued().len()), (0, 0), "it could not be stored");
    assert_eq!(receiver.metric(r#"module_rollout_writes_total{outcome="failed"}"#), 1, "it has a delay");
    fixture.kcp.refuse_nothing();
    time::advance(RETRY).await;
    evaluate(&mut receiver.task).await;
    assert_eq!(fixture.rollout().unwrap().ring(), Some(1));
    evaluate(&mut receiver.task).await;
    assert_eq!((receiver.admitted("1.1.0"), fixture.kcp.writes().len()), (0, 3), "the watch has not returned it");

    // In one ring after the other, the admitted ones alone are enqueued, once each.
    receiver.watch(&fixture);
    let mut enqueued = BTreeSet::new();
    let mut sizes = BTreeMap::new();
    for _ in 0..60 {
        let ring = fixture.rollout().unwrap().ring();
        receiver.tick(&fixture).await;
        let new = receiver.take_enqueued();
        assert!(new.len() <= LIMIT && enqueued.is_disjoint(&new), "{new:?}");
        enqueued.extend(new);
        // All reconciles, of any cause, upgrade the admitted ones alone.
        (0..COUNT).for_each(|n| fixture.reconcile(&receiver, n));
        assert_eq!(fixture.with("1.1.0"), enqueued);
        fixture.settle();
        sizes.insert(ring, enqueued.len());
        time::advance(INTERVAL).await;
    }
    assert_eq!(sizes, BTreeMap::from([(Some(1), 2), (Some(2), 10), (Some(3), COUNT), (None, COUNT)]));
    assert_eq!(fixture.rollout().unwrap().progress, None);
    let notes = receiver.recorder.pending_notes();
    assert_eq!(notes.last().unwrap(), "every runtime gets 1.1.0 of the channel fast");
    drop(fixture.kcp.calls());
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((fixture.kcp.calls(), receiver.task.subject.rests()), (vec![], true), "it is over");
}

/// Moves the channel to 1.1.0, which fails in every runtime, and runs until the halt.
async fn halted() -> (Fixture, Receiver) {
    let mut fixture = Fixture::new(flags());
    let mut receiver = fixture.start_receiver().await;
    fixture.bad = Some("1.1.0");
    fixture.move_to(&receiver, "1.1.0").await;
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((fixture.with("1.1.0").len(), fixture.halted().is_some()), (LIMIT, true));
    (fixture, receiver)
}

/// Nothing has read the catalog before the first evaluation of a receiver that starts.
#[tokio::test(start_paused = true)]
async fn start_keeps_a_halted_rollout() {
    let (fixture, _) = halted().await;
    let recorded = fixture.rollout();
    let mut next = fixture.start_receiver().await;
    next.task.subject.dependencies.catalog = fixture.catalog(&Replicas::alone());
    next.tick(&fixture).await;
    assert_eq!(fixture.rollout(), recorded);
}

#[tokio::test(start_paused = true)]
async fn failing_version_halts_until_it_is_confirmed() {
    let (mut fixture, mut receiver) = halted().await;
    let failing = fixture.with("1.1.0");
    let reason = fixture.halted().unwrap();
    assert!(reason.starts_with("2 of 2 upgraded runtimes are no longer healthy: kcp-system/k"), "{reason}");
    let confirmation = fixture.rollout().unwrap().confirmation().unwrap();
    let note = receiver.recorder.pending_notes().into_iter().find(|note| note.contains("has halted")).unwrap();
    assert!(note.contains(&reason) && note.contains(&confirmation), "{note}");
    let halts = receiver.catalog.rollouts().halts().unwrap();
    assert_eq!(halts.keys().cloned().collect::<BTreeSet<_>>(), failing);
    assert!(halts.values().all(|message| message.contains(&reason)));
    assert_eq!(receiver.admitted("1.1.0"), 0);
    assert_eq!(receiver.metric(r#"module_rollouts{state="halted"}"#), 1);
    assert_eq!(receiver.metric(r#"module_rollout_runtimes{standing="failing"}"#), 2);
    assert!(receiver.task.subject.rests());

    fixture.confirm("of-another-1");
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((fixture.with("1.1.0"), fixture.halted()), (failing.clone(), Some(reason)));
    fixture.confirm(&format!("of-another-1, {confirmation}"));
    receiver.tick(&fixture).await;
    receiver.tick(&fixture).await;
    let annotations = fixture.map().unwrap().metadata.annotations.unwrap();
    assert_eq!(annotations, BTreeMap::from([("theirs".to_owned(), "x".to_owned())]), "it was used");
    assert_eq!(fixture.halted(), None);
    fixture.run_to_end(&mut receiver).await;
    assert_eq!(fixture.with("1.1.0").len(), LIMIT + 1, "one more, in search of one that proves the version");
    let second = fixture.rollout().unwrap().confirmation().unwrap();
    assert!(second != confirmation && fixture.halted().is_some());
    fixture.confirm(&confirmation);
    fixture.run_to_end(&mut receiver).await;
    assert!(fixture.halted().is_some(), "the confirmation of the first halt is used");

    fixture.confirm(&second);
    fixture.bad = None;
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((fixture.with("1.1.0").len(), fixture.rollout().unwrap().progress), (COUNT, None));
    assert_eq!(receiver.catalog.rollouts().halts().unwrap().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn move_back_reverts_the_upgraded_kymas_alone() {
    let (mut fixture, mut receiver) = halted().await;
    let upgraded = fixture.with("1.1.0");
    let mark = |fixture: &Fixture, n| RolloutMark::parse(fixture.manifest(n).annotations());
    let reverts = |receiver: &Receiver, mark| receiver.catalog.rollouts().reverts(MODULE, FAST, "1.0.0", mark);
    let marks: Vec<_> = (0..COUNT).filter_map(|n| mark(&fixture, n)).collect();
    assert!(marks.len() == LIMIT && marks.iter().all(|mark| mark.healthy && !reverts(&receiver, mark)));
    fixture.move_to(&receiver, "1.0.0").await;
    let mut enqueued = BTreeSet::new();
    for _ in 0..10 {
        enqueued.extend(fixture.advance(&mut receiver).await);
    }
    assert_eq!(enqueued, upgraded);
    assert_eq!((fixture.with("1.0.0").len(), fixture.rollout().unwrap().progress), (COUNT, None));
    assert!((0..COUNT).all(|n| mark(&fixture, n).is_none()), "a later downgrade is not permitted by them");
    assert!(reverts(&receiver, &marks[0]) && !reverts(&receiver, &RolloutMark { change: "x".into(), healthy: true }));
    assert_eq!(receiver.catalog.rollouts().halts().unwrap().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn next_process_continues_and_exceeds_no_limit() {
    for bad in [None, Some("1.1.0")] {
        let mut fixture = Fixture::new(flags());
        fixture.bad = bad;
        let mut receiver = fixture.start_receiver().await;
        fixture.move_to(&receiver, "1.1.0").await;
        for round in 0..120 {
            let before = fixture.with("1.1.0").len();
            receiver.tick(&fixture).await;
            receiver.tick(&fixture).await;
            let enqueued = receiver.take_enqueued();
            for n in (0..COUNT).filter(|n| enqueued.contains(&key(*n))).take(round % 2 + 1) {
                fixture.reconcile(&receiver, n);
            }
            assert!(fixture.with("1.1.0").len() <= before + LIMIT);
            // Killed before the layers are applied, or afterwards.
            if round % 3 > 0 {
                fixture.settle();
            }
            receiver = fixture.start_receiver().await;
        }
        fixture.settle();
        fixture.run_to_end(&mut receiver).await;
        let expected = if bad.is_some() { (LIMIT, true) } else { (COUNT, false) };
        assert_eq!((fixture.with("1.1.0").len(), fixture.halted().is_some()), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn write_of_another_receiver_is_not_overwritten() {
    let (mut fixture, mut receiver) = halted().await;
    fixture.confirm(&fixture.rollout().unwrap().confirmation().unwrap());
    receiver.watch(&fixture);
    fixture.kcp.edit(MAP, |map| map["metadata"]["labels"] = json!({"a": "b"}));
    let stored = fixture.map();
    evaluate(&mut receiver.task).await;
    evaluate(&mut receiver.task).await;
    assert_eq!(fixture.map(), stored);
    assert_eq!(receiver.metric(r#"module_rollout_writes_total{outcome="conflict"}"#), 1, "it waits for the watch");
    fixture.run_to_end(&mut receiver).await;
    assert_eq!(fixture.with("1.1.0").len(), LIMIT + 1);
    assert_eq!(fixture.map().unwrap().metadata.labels, Some(BTreeMap::from([("a".to_owned(), "b".to_owned())])));
}

#[tokio::test(start_paused = true)]
async fn deleted_config_map_is_created_again() {
    let (mut fixture, mut receiver) = halted().await;
    let rollout = fixture.rollout();
    fixture.kcp.remove(MAP);
    receiver.watch(&fixture);
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((fixture.rollout(), fixture.with("1.1.0").len()), (rollout, LIMIT));
}

#[tokio::test(start_paused = true)]
async fn lost_state_of_a_rollout_in_progress_begins_it_again() {
    let (mut fixture, _) = halted().await;
    // No process remembers it.
    fixture.kcp.remove(MAP);
    let mut receiver = fixture.start_receiver().await;
    fixture.run_to_end(&mut receiver).await;
    let admitted = receiver.admitted("1.1.0");
    assert_eq!((fixture.with("1.1.0").len(), fixture.halted().is_some(), admitted), (LIMIT, true, 0));
}

#[tokio::test(start_paused = true)]
async fn version_that_every_kyma_had_before_the_rings_is_complete() {
    let mut fixture = Fixture::new(RolloutFlags::default());
    let receiver = fixture.start_receiver().await;
    fixture.move_to(&receiver, "1.1.0").await;
    (0..COUNT).for_each(|n| fixture.reconcile(&receiver, n));
    fixture.settle();
    assert_eq!(fixture.with("1.1.0").len(), COUNT);
    fixture.flags = flags();
    let mut receiver = fixture.start_receiver().await;
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((fixture.rollout().unwrap().progress, receiver.admitted("1.1.0")), (None, COUNT));
}

#[tokio::test(start_paused = true)]
async fn rings_that_are_switched_off_release_the_other_kymas() {
    let (mut fixture, mut receiver) = halted().await;
    fixture.point("1.1.0", &json!({annotation::ROLLOUT_RINGS: "off"}));
    fixture.decide(&receiver).await;
    let mut enqueued = BTreeSet::new();
    for _ in 0..10 {
        enqueued.extend(fixture.advance(&mut receiver).await);
    }
    assert_eq!(enqueued.len(), COUNT - LIMIT, "each gets the slot of its delay");
    assert_eq!((fixture.rollout(), receiver.catalog.rollouts().halts().unwrap().len()), (None, 0));
}

#[tokio::test(start_paused = true)]
async fn kyma_that_was_reconciled_while_nothing_was_admitted_is_enqueued_again() {
    let mut fixture = Fixture::new(flags());
    let mut receiver = fixture.start_receiver().await;
    fixture.move_to(&receiver, "1.1.0").await;
    let mut enqueued = BTreeSet::new();
    while enqueued.is_empty() {
        receiver.tick(&fixture).await;
        enqueued = receiver.take_enqueued();
    }
    // The reconciles come too late, and change nothing.
    fixture.point("1.1.0", &json!({annotation::ROLLOUT_RINGS: "10%"}));
    fixture.decide(&receiver).await;
    receiver.tick(&fixture).await;
    (0..COUNT).for_each(|n| fixture.reconcile(&receiver, n));
    assert_eq!(fixture.with("1.1.0"), BTreeSet::new());
    fixture.point("1.1.0", &json!({}));
    fixture.decide(&receiver).await;
    assert_eq!(fixture.advance(&mut receiver).await, enqueued);
    fixture.run_to_end(&mut receiver).await;
    assert_eq!(fixture.with("1.1.0").len(), COUNT);
}

#[tokio::test(start_paused = true)]
async fn invalid_state_is_kept_and_keeps_the_versions() {
    let mut fixture = Fixture::new(flags());
    fixture.kcp.edit(MAP, |map| *map = json!({"data": {"keda_fast": "{", "nats_fast": "]"}}));
    let mut receiver = fixture.start_receiver().await;
    fixture.move_to(&receiver, "1.1.0").await;
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((receiver.admitted("1.1.0"), fixture.with("1.1.0").len()), (0, 0));
    assert_eq!(receiver.metric(r#"module_rollouts{state="invalid"}"#), 2);
    assert_eq!(fixture.map().unwrap().data.unwrap()["keda_fast"], "{");
    // Once it is deleted, the rollout begins; the other value stays.
    fixture.kcp.edit(MAP, |map| map["data"] = json!({"nats_fast": "]"}));
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((fixture.with("1.1.0").len(), receiver.metric(r#"module_rollouts{state="invalid"}"#)), (COUNT, 1));
    assert_eq!(fixture.map().unwrap().data.unwrap()["nats_fast"], "]");
}

#[tokio::test(start_paused = true)]
async fn invalid_annotation_admits_nobody_until_it_is_corrected() {
    let mut fixture = Fixture::new(flags());
    let mut receiver = fixture.start_receiver().await;
    fixture.move_to(&receiver, "1.1.0").await;
    while fixture.with("1.1.0").is_empty() {
        fixture.advance(&mut receiver).await;
    }
    let stored = fixture.rollout();
    let upgraded = fixture.with("1.1.0");
    fixture.point("1.1.0", &json!({annotation::ROLLOUT_RINGS: "10%"}));
    fixture.decide(&receiver).await;
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((fixture.rollout(), fixture.with("1.1.0"), receiver.admitted("1.1.0")), (stored, upgraded, 0));
    assert_eq!(receiver.metric(r#"module_rollouts{state="invalid"}"#), 1);
    fixture.point("1.1.0", &json!({}));
    fixture.decide(&receiver).await;
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((fixture.with("1.1.0").len(), receiver.metric(r#"module_rollouts{state="invalid"}"#)), (COUNT, 0));
}

#[tokio::test(start_paused = true)]
async fn lost_releases_change_nothing() {
    let (mut fixture, _) = halted().await;
    fixture.kcp.remove(&format!("configmaps/{RELEASES}"));
    let mut receiver = fixture.start_receiver().await;
    assert!(receiver.catalog.lost().is_some());
    let stored = fixture.map();
    fixture.confirm(&fixture.rollout().unwrap().confirmation().unwrap());
    let confirmed = fixture.map();
    assert_ne!(stored, confirmed);
    fixture.run_to_end(&mut receiver).await;
    assert_eq!((fixture.map(), fixture.with("1.1.0").len(), receiver.admitted("1.1.0")), (confirmed, LIMIT, 0));
    assert_eq!(receiver.catalog.rollouts().halts(), None, "the conditions stay");
}

/// The replica with the role assesses the runtimes of the whole fleet, most of them by facts.
#[tokio::test(start_paused = true)]
async fn reduced_kymas_are_followers_with_their_blocks() {
    let mut fixture = Fixture::new(flags());
    let condition = json!({"type": "RuntimeAccess", "status": "False", "reason": "r", "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    for n in 0..COUNT {
        let (labels, status, deleted) = match n {
            0 => (json!({label::PAUSE: "true"}), json!({}), Value::Null),
            1 => (json!({}), json!({"conditions": [condition]}), Value::Null),
            2 => (json!({}), json!({}), json!("2026-01-01T00:00:00Z")),
            _ => (json!({}), json!({}), Value::Null),
        };
        let metadata = json!({"uid": uid(n), "labels": labels, "deletionTimestamp": deleted});
        let rest = json!({"spec": {"channel": "fast"}, "status": status});
        let kyma: CachedKyma = read("Kyma", &format!("k{n}"), &metadata, rest);
        fixture.kymas.apply_watcher_event(&Event::Apply(CachedKyma::reduced(kyma.whole().unwrap())));
    }
    let receiver = fixture.start_receiver().await;
    let key = RolloutKey { module: MODULE.to_owned(), channel: Some("fast".to_owned()) };
    let members: BTreeSet<_> = receiver.task.subject.followers(&key).map(|(kyma, _)| kyma.key()).collect();
    assert_eq!(members, (0..COUNT).filter(|n| *n != 2).map(self::key).collect());
    let block = |n: usize| {
        let kyma = fixture.stores.kymas.state().into_iter().find(|kyma| kyma.key() == self::key(n)).unwrap();
        receiver.task.subject.block(&self::key(n), kyma.facts(), false)
    };
    assert_eq!([0, 1, 3].map(block), [Some(Block::Paused), Some(Block::Access), None]);
}

/// This replica does not learn at once that the holder of the shard has taken a Kyma over.
#[tokio::test(start_paused = true)]
async fn pending_takeover_blocks_kymas_of_held_shards_alone() {
    let fixture = Fixture::new(flags());
    let mut receiver = fixture.start(Replicas::alone(), |shard| shard % 2 == 0).await;
    let takeover = Takeover::new("", Duration::from_secs(60));
    receiver.task.subject.dependencies.services.takeover = takeover.clone();
    let mut found = BTreeSet::new();
    for n in 0..COUNT {
        let metadata = json!({"uid": uid(n), "finalizers": [finalizer::KYMA]});
        let kyma: CachedKyma = read("Kyma", &format!("k{n}"), &metadata, json!({"spec": {"channel": "fast"}}));
        takeover.selected(&key(n), &kyma, false, Instant::now());
        assert!(takeover.is_pending(&key(n)));
        let is_elsewhere = receiver.fleet.is_elsewhere(&key(n));
        found.insert((is_elsewhere, receiver.task.subject.block(&key(n), kyma.facts(), false)));
    }
    assert_eq!(found, BTreeSet::from([(false, Some(Block::Paused)), (true, None)]));
}

/// All but two of the followers are in the shards of another replica, and the rings are those of the fleet.
#[tokio::test(start_paused = true)]
async fn rings_are_the_same_with_reduced_kymas() {
    let mut fixture = Fixture::new(flags());
    for kyma in fixture.stores.kymas.state().iter().skip(2) {
        fixture.kymas.apply_watcher_event(&Event::Apply(CachedKyma::reduced(kyma.whole().unwrap())));
    }
    let mut receiver = fixture.start_receiver().await;
    fixture.move_to(&receiver, "1.1.0").await;
    fixture.run_to_end(&mut receiver).await;
    assert_eq!(fixture.with("1.1.0").len(), COUNT);
}

/// Two replicas with every second shard each, of which the first has the fleet role, and a moved channel.
async fn replicas(fixture: &mut Fixture) -> (Arc<FakePeers>, [Receiver; 2]) {
    let peers = Arc::new(FakePeers::default());
    let [one, two] = [0, 1].map(|_| Replicas::joining(&peers));
    one.role.acquire(WriteFence::default());
    let receivers =
        [fixture.start(one, |shard| shard % 2 == 0).await, fixture.start(two, |shard| shard % 2 == 1).await];
    // Reconciles since the acquisition of a shard are repeated once.
    time::advance(2 * REQUEST_DEADLINE).await;
    receivers.iter().for_each(|receiver| drop(receiver.take_enqueued()));
    fixture.point("1.1.0", &json!({}));
    fixture.decide(&receivers[0]).await;
    follow_releases(fixture, &receivers[1]);
    (peers, receivers)
}

/// The watch returns the decision on the moved channel.
fn follow_releases(fixture: &Fixture, receiver: &Receiver) {
    let releases: ConfigMap =
        serde_json::from_value(fixture.kcp.object(&format!("configmaps/{RELEASES}")).unwrap()).unwrap();
    assert!(receiver.catalog.observe_releases(Some(&releases)));
    drop(receiver.catalog.refresh(&fixture.stores));
}

/// Simulates a second of all replicas; returns the Kymas that each has enqueued.
async fn advance_all(fixture: &mut Fixture, receivers: &mut [Receiver; 2]) -> [BTreeSet<KymaKey>; 2] {
    for receiver in &mut *receivers {
        evaluate(&mut receiver.task).await;
    }
    let mut enqueued = [BTreeSet::new(), BTreeSet::new()];
    for (receiver, enqueued) in receivers.iter_mut().zip(&mut enqueued) {
        receiver.watch(fixture);
        *enqueued = receiver.take_enqueued();
        for n in (0..COUNT).filter(|n| enqueued.contains(&key(*n))) {
            fixture.reconcile(receiver, n);
        }
    }
    fixture.settle();
    time::advance(INTERVAL).await;
    enqueued
}

#[tokio::test(start_paused = true)]
async fn replicas_admit_what_the_one_with_the_role_grants_within_the_limit_of_the_fleet() {
    let mut fixture = Fixture::new(flags());
    let (_, mut receivers) = replicas(&mut fixture).await;
    let mut by_each = [BTreeSet::new(), BTreeSet::new()];
    let mut sizes = BTreeMap::new();
    for _ in 0..60 {
        let ring = fixture.rollout().and_then(|rollout| rollout.ring());
        let enqueued = advance_all(&mut fixture, &mut receivers).await;
        let new = enqueued.iter().map(BTreeSet::len).sum::<usize>();
        assert!(new <= LIMIT, "{enqueued:?}");
        by_each.iter_mut().zip(enqueued).for_each(|(all, new)| all.extend(new));
        sizes.insert(ring, fixture.with("1.1.0").len());
    }
    assert_eq!(sizes, BTreeMap::from([(Some(1), 2), (Some(2), 10), (Some(3), COUNT), (None, COUNT)]));
    let [one, two] = by_each;
    assert!(one.is_disjoint(&two) && !one.is_empty() && !two.is_empty());
    assert_eq!(one.len() + two.len(), COUNT, "once each");
    assert_eq!(receivers.each_ref().map(|receiver| receiver.recorder.pending_notes().is_empty()), [false, true]);
    assert_eq!(receivers.each_ref().map(|receiver| receiver.metric("module_rollout_incomplete_total")), [0, 0]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_admitted_without_a_grant_or_after_its_end() {
    let mut fixture = Fixture::new(flags());
    let (peers, mut receivers) = replicas(&mut fixture).await;
    peers.fail(Some(AskError::Incomplete));
    for _ in 0..20 {
        let [_, two] = advance_all(&mut fixture, &mut receivers).await;
        assert_eq!((two, receivers[1].admitted("1.1.0")), (BTreeSet::new(), 0));
    }
    assert_ne!(receivers[0].metric("module_rollout_incomplete_total"), 0);
    let fleet = &receivers[0].fleet;
    assert!(
        fixture.with("1.1.0").iter().all(|key| !fleet.is_elsewhere(key)),
        "those of the other replica keep their places"
    );
    // A grant reaches the replica, and the one with the role ends.
    peers.fail(None);
    evaluate(&mut receivers[0].task).await;
    evaluate(&mut receivers[1].task).await;
    let granted = receivers[1].admitted("1.1.0");
    assert_ne!(granted, 0);
    time::advance(Duration::from_secs(31)).await;
    evaluate(&mut receivers[1].task).await;
    assert_eq!(receivers[1].admitted("1.1.0"), 0);
}

#[tokio::test(start_paused = true)]
async fn rollout_continues_where_the_role_moves_to_with_the_places_that_are_taken() {
    let mut fixture = Fixture::new(flags());
    let (_, mut receivers) = replicas(&mut fixture).await;
    // Both are admitted, and none is upgraded yet.
    for _ in 0..4 {
        receivers[0].tick(&fixture).await;
        receivers[1].tick(&fixture).await;
    }
    let admitted = |receiver: &Receiver| {
        let is_now = |n: &usize| receiver.catalog.rollout_slot(&uid(*n), MODULE, FAST, "1.1.0") == RolloutSlot::Now;
        (0..COUNT).filter(is_now).collect::<BTreeSet<_>>()
    };
    let before = admitted(&receivers[0]);
    assert_eq!((before.len(), admitted(&receivers[1])), (LIMIT, before.clone()));
    receivers[0].task.subject.dependencies.services.replicas.role.release().await;
    receivers[1].task.subject.dependencies.services.replicas.role.acquire(WriteFence::default());
    for _ in 0..4 {
        receivers[1].tick(&fixture).await;
        receivers[0].tick(&fixture).await;
        assert_eq!(receivers.each_ref().map(admitted), [before.clone(), before.clone()]);
    }
    for _ in 0..60 {
        advance_all(&mut fixture, &mut receivers).await;
    }
    assert_eq!(fixture.with("1.1.0").len(), COUNT);
}
