use std::collections::BTreeMap;

use tidewatch_api::{
    identity::{Epoch, Instance, RuntimeId},
    key::KymaKey,
    shard::{ShardCount, ShardId},
};
use tidewatch_cluster::leader::WriteFence;
use tidewatch_contract::{
    admin::rotation::{PhaseName, StragglerReason},
    heartbeat::{CertificateState, Heartbeat},
};
use tidewatch_fleet::{Verified, evidence::testing::FakePeers, table};
use tidewatch_kit::metrics::Registry;
use tidewatch_trust::{
    CertificateReloader, FollowState, Setup, TlsFlags, open,
    testing::{FakeKcp, flags},
};

use super::*;

/// A receiver with its CA and two runtimes.
struct World {
    kcp: FakeKcp,
    tls_state: TlsState,
    reloader: CertificateReloader,
    fleet: RuntimeTable,
    rotation: CaRotation,
    rotation_handle: RotationHandle,
    counter: u64,
}

impl World {
    async fn new(kcp: FakeKcp) -> Self {
        Self::open(kcp, Replicas::alone(), |_| true).await
    }

    /// A replica that holds some shards.
    async fn open(kcp: FakeKcp, replicas: Replicas, holds: impl Fn(ShardId) -> bool) -> Self {
        let flags = flags();
        let domain = "kyma.local".parse().unwrap();
        let tls = TlsFlags { tls_cert: None, tls_key: None, client_ca: None, proxy_ca: None, proxy_identity: None };
        let names = vec!["localhost".try_into().unwrap()];
        let setup = Setup { flags: &flags, tls: &tls, names, domain: &domain, namespace: "kcp-system" };
        let metrics = Metrics::default();
        let (tls_state, reloader) = open(setup, kcp.client(), metrics.clone()).await.unwrap();
        let mut registry = Registry::default();
        let hub_metrics = table::Metrics::register(&mut registry);
        let fleet = RuntimeTable::new(ShardCount::default(), table::Settings::default(), hub_metrics);
        acquire(&fleet, holds);
        let (rotation, rotation_handle) =
            CaRotation::new(tls_state.clone(), kcp.client(), "kcp-system", &flags, fleet.clone(), replicas, metrics);
        Self { kcp, tls_state, reloader, fleet, rotation, rotation_handle, counter: 0 }
    }

    /// Kills the receiver and starts another one on the same Secret.
    async fn restart(self) -> Self {
        let counter = self.counter;
        Self { counter, ..Self::new(self.kcp).await }
    }

    /// Heartbeat of an agent that follows all announcements at once; returns whether it is requested to renew.
    fn beat(&mut self, runtime: &str) -> bool {
        let trust = self.tls_state.trust().borrow().clone();
        let revision = trust.agents.revision().to_owned();
        self.beat_with(runtime, &revision, trust.issuer.as_ref())
    }

    fn beat_with(
        &mut self,
        runtime: &str,
        revision: &str,
        authority: Option<&tidewatch_contract::certificate::KeyId>,
    ) -> bool {
        self.counter += 1;
        let heartbeat = Heartbeat {
            epoch: Epoch::new(1),
            sequence: 0,
            counter: self.counter,
            waiting: 0,
            parked: 0,
            plan_revision: None,
            plan_error: None,
            agent_version: "test".to_owned(),
            trust_revision: Some(revision.to_owned()),
            canary: None,
            watches: Vec::new(),
            certificate: serde_json::from_value::<CertificateState>(
                serde_json::json!({"notAfter": "2030-01-01T00:00:00Z", "fingerprint": "00"}),
            )
            .unwrap(),
            ..empty()
        };
        let runtime: RuntimeId = runtime.parse().unwrap();
        let now = unix();
        let heartbeat = Verified::unchecked(&runtime, Epoch::new(1), now, heartbeat).with_authority(authority.cloned());
        self.fleet.heartbeat(heartbeat, now).unwrap().renew
    }

    /// Reconciles once, and returns the written Secret through the watch.
    async fn reconcile(&mut self) -> PhaseName {
        self.rotation.reconcile().await;
        self.watch();
        self.kcp.ca_state().name()
    }

    fn watch(&mut self) {
        self.reloader.apply_secret(self.kcp.secret().as_ref(), unix());
    }

    async fn request(&mut self, force_after_seconds: Option<u32>) -> Result<RotationResponse, RotationError> {
        let requested = self.rotation.request(RotationRequest { force_after_seconds, compromised: false }).await;
        self.watch();
        requested
    }
}

/// Acquires some shards, and places the runtimes.
fn acquire(fleet: &RuntimeTable, holds: impl Fn(ShardId) -> bool) {
    for shard in ShardCount::default().shards().filter(|shard| holds(*shard)) {
        fleet.acquire(shard, Instance::new(1), &WriteFence::default(), Instant::now());
    }
    let plan = Arc::new(tidewatch_installer::watcher::plan::<Arc<tidewatch_api::Watcher>>(Vec::new(), &[]).0);
    for name in ["r-1", "r-2"] {
        fleet.place(KymaKey::new("kcp-system", name), "", Some(name.parse().unwrap()), plan.clone());
    }
    fleet.set_synced();
}

/// Heartbeat with the members that other versions may have.
fn empty() -> Heartbeat {
    serde_json::from_value(serde_json::json!({
        "epoch": "0000000000000001", "sequence": 0, "counter": 0, "waiting": 0, "parked": 0, "agentVersion": "",
        "certificate": {"notAfter": "", "fingerprint": ""}, "watches": [],
    }))
    .unwrap()
}

#[tokio::test]
async fn rotation_advances_as_agents_follow_despite_a_restart_in_each_phase() {
    let mut world = World::new(FakeKcp::default()).await;
    let old = world.kcp.ca_state().target().id.clone();
    assert_eq!(world.reconcile().await, PhaseName::Steady);
    let target = world.request(None).await.unwrap().target;
    assert_ne!(target, old);
    for (phase, next) in [
        (PhaseName::Spread, PhaseName::Reissue),
        (PhaseName::Reissue, PhaseName::Retire),
        (PhaseName::Retire, PhaseName::Steady),
    ] {
        assert_eq!(world.reconcile().await, phase, "no agent has followed");
        world.beat("r-1");
        assert_eq!(world.reconcile().await, phase, "one has not followed");
        let progress = world.rotation_handle.progress.borrow().clone().unwrap();
        assert_eq!((progress.phase, progress.waiting_for, progress.runtimes), (phase, 1, 2));
        assert_eq!(progress.stragglers[0].kyma, "kcp-system/r-2");
        world = world.restart().await;
        assert_eq!(world.reconcile().await, phase, "a new receiver has no heartbeat yet");
        assert_eq!(world.rotation_handle.progress.borrow().clone().unwrap().stragglers.len(), 2);
        assert_eq!(world.request(None).await.unwrap().target, target, "it is under way");
        for runtime in ["r-1", "r-2"] {
            world.beat(runtime);
        }
        assert_eq!(world.reconcile().await, next);
    }
    assert_eq!(world.kcp.ca_state().target().id, target);
    assert_eq!(world.tls_state.trust().borrow().clients.roots().len(), 1);
}

#[tokio::test]
async fn agents_with_old_leaves_are_requested_to_renew() {
    let mut world = World::new(FakeKcp::default()).await;
    let old = world.kcp.ca_state().target().id.clone();
    assert!(!world.beat("r-1"));
    world.request(None).await.unwrap();
    let revision = |world: &World| world.tls_state.trust().borrow().agents.revision().to_owned();
    for phase in [PhaseName::Spread, PhaseName::Reissue] {
        world.rotation.announce_trust(&world.tls_state.trust().borrow().clone());
        let bundle = revision(&world);
        let is_requested = ["r-1", "r-2"].map(|runtime| world.beat_with(runtime, &bundle, Some(&old)));
        assert_eq!(is_requested, [phase == PhaseName::Reissue; 2], "{phase}");
        world.reconcile().await;
    }
    assert_eq!(world.kcp.ca_state().name(), PhaseName::Reissue, "both still have their old certificates");
    assert_eq!(
        world.rotation_handle.progress.borrow().clone().unwrap().stragglers[0].behind,
        StragglerReason::Certificate
    );
}

#[tokio::test]
async fn trust_that_changes_before_the_caches_are_synced_is_announced() {
    let mut world = World::new(FakeKcp::default()).await;
    let client = world.kcp.client();
    let fleet = world.fleet.clone();
    let (rotation, _handle) = CaRotation::new(
        world.tls_state.clone(),
        client,
        "kcp-system",
        &flags(),
        fleet,
        Replicas::alone(),
        Metrics::default(),
    );
    let old = world.kcp.ca_state().target().id.clone();
    let other = CaState::steady(Root::generate(tidewatch_trust::CA_VALIDITY, unix()).unwrap(), unix());
    world.kcp.edit(|secret| secret.data = Some(other.write()));
    world.watch();
    let synced = CancellationToken::new();
    synced.cancel();
    let run = tokio::spawn(rotation.run(synced));
    let revision = world.tls_state.trust().borrow().agents.revision().to_owned();
    let mut is_requested = false;
    for _ in 0..100 {
        tokio::task::yield_now().await;
        is_requested |= world.beat_with("r-1", &revision, Some(&old));
    }
    assert!(is_requested, "its certificate is of the former issuer");
    run.abort();
}

#[tokio::test]
async fn failed_write_changes_nothing_and_is_retried() {
    let mut world = World::new(FakeKcp::default()).await;
    world.kcp.refuse(true);
    assert_eq!(world.request(None).await, Err(RotationError::Write));
    assert_eq!(world.kcp.ca_state().name(), PhaseName::Steady);
    assert_eq!(world.tls_state.trust().borrow().agents.roots().len(), 1);
    world.kcp.refuse(false);
    world.request(None).await.unwrap();
    assert_eq!(world.kcp.ca_state().name(), PhaseName::Spread);
    // Another writer changes the Secret between the read and the write.
    for runtime in ["r-1", "r-2"] {
        world.beat(runtime);
    }
    world.kcp.edit(|secret| secret.metadata.annotations = Some(BTreeMap::new()));
    world.rotation.not_before = Instant::now();
    world.rotation.reconcile().await;
    assert_eq!(world.kcp.ca_state().name(), PhaseName::Spread, "a conflict writes nothing");
    world.watch();
    assert_eq!(world.reconcile().await, PhaseName::Reissue);
}

#[tokio::test]
async fn no_second_write_before_the_watch_returns_the_first() {
    let mut world = World::new(FakeKcp::default()).await;
    world.rotation.request(RotationRequest::default()).await.unwrap();
    for runtime in ["r-1", "r-2"] {
        world.beat(runtime);
    }
    world.kcp.calls();
    for _ in 0..3 {
        world.rotation.reconcile().await;
    }
    assert!(world.kcp.calls().is_empty());
    world.watch();
    assert_eq!(world.kcp.ca_state().name(), PhaseName::Spread);
}

#[tokio::test]
async fn force_after_can_be_set_on_a_running_rotation() {
    let mut world = World::new(FakeKcp::default()).await;
    world.request(None).await.unwrap();
    assert_eq!(world.reconcile().await, PhaseName::Spread);
    world.request(Some(0)).await.unwrap();
    for phase in [PhaseName::Reissue, PhaseName::Retire, PhaseName::Steady] {
        assert_eq!(world.reconcile().await, phase);
    }
}

#[tokio::test(start_paused = true)]
async fn runtimes_of_an_acquired_shard_get_the_roots_of_a_rotation_under_way() {
    let mut world = World::new(FakeKcp::default()).await;
    world.request(None).await.unwrap();
    assert_eq!(world.reconcile().await, PhaseName::Spread);
    let next = World::open(world.kcp, Replicas::alone(), |_| false).await;
    let synced = CancellationToken::new();
    synced.cancel();
    let running = tokio::spawn(next.rotation.run(synced));
    assert!(time::timeout(RECONCILE_INTERVAL * 3, next.fleet.next()).await.is_err(), "no shard is held");
    acquire(&next.fleet, |_| true);
    let job = time::timeout(RECONCILE_INTERVAL * 3, next.fleet.next()).await.expect("a runtime is enqueued");
    assert_eq!(job.queued.work, WorkSet::INSTALLER);
    running.abort();
}

#[tokio::test]
async fn compromised_roots_are_replaced_at_once_in_each_phase() {
    let mut world = World::new(FakeKcp::default()).await;
    for is_rotating in [false, true] {
        if is_rotating {
            world.request(None).await.unwrap();
            assert_eq!(world.reconcile().await, PhaseName::Spread);
        }
        let known = world.tls_state.trust().borrow().clients.clone();
        let request = RotationRequest { force_after_seconds: None, compromised: true };
        let target = world.rotation.request(request).await.unwrap().target;
        world.watch();
        let state = world.kcp.ca_state();
        assert_eq!((state.name(), &state.target().id), (PhaseName::Steady, &target));
        let trust = world.tls_state.trust().borrow().clone();
        assert!(trust.accepts(Some(&target)) && trust.clients.roots().iter().all(|root| !known.roots().contains(root)));
    }
}

#[tokio::test(start_paused = true)]
async fn lost_secret_is_recreated_and_a_refused_one_never() {
    let mut world = World::new(FakeKcp::default()).await;
    let first = world.kcp.ca_state().target().id.clone();
    world.kcp.set("state.json", b"no");
    world.watch();
    world.kcp.calls();
    world.rotation.reconcile().await;
    tokio::time::advance(RECREATE_DELAY * 2).await;
    world.rotation.reconcile().await;
    assert!(world.kcp.calls().is_empty());
    assert_eq!(world.request(None).await, Err(RotationError::Secret));

    world.kcp.remove();
    world.watch();
    world.rotation.reconcile().await;
    assert!(world.kcp.secret().is_none(), "an operator may be about to restore it");
    tokio::time::advance(RECREATE_DELAY).await;
    world.rotation.reconcile().await;
    let second = world.kcp.ca_state().target().id.clone();
    assert_ne!(second, first);
    assert_eq!(
        world.tls_state.trust().borrow().issuer.as_ref(),
        Some(&first),
        "the stored state takes effect through the watch"
    );
    world.watch();
    assert_eq!(world.tls_state.trust().borrow().issuer.as_ref(), Some(&second));
}

#[tokio::test(start_paused = true)]
async fn overdue_stragglers_are_reported_until_they_follow() {
    let mut world = World::new(FakeKcp::default()).await;
    let key = |name: &str| KymaKey::new("kcp-system", name);
    let follow_states = |world: &World| {
        world
            .rotation_handle
            .stragglers
            .borrow()
            .as_ref()
            .map(|stragglers| ["r-1", "r-2"].map(|name| stragglers.of(&key(name))))
    };
    assert_eq!(follow_states(&world), None, "before the first reconcile");
    world.reconcile().await;
    assert_eq!(follow_states(&world), Some([FollowState::UpToDate; 2]));
    world.request(None).await.unwrap();
    world.reconcile().await;
    assert_eq!(follow_states(&world), Some([FollowState::Pending; 2]));
    world.beat("r-1");
    let overdue_after = stragglers::overdue_after(world.fleet.heartbeat_interval().get(), 2, 20);
    tokio::time::advance(overdue_after).await;
    world.reconcile().await;
    assert_eq!(follow_states(&world), Some([FollowState::UpToDate, FollowState::Overdue(StragglerReason::Unheard)]));
    let old = world.kcp.ca_state().target().id.clone();
    world.beat_with("r-2", "0", Some(&old));
    world.reconcile().await;
    assert_eq!(follow_states(&world).unwrap()[1], FollowState::Overdue(StragglerReason::Bundle));
    let mut world = world.restart().await;
    world.reconcile().await;
    assert_eq!(follow_states(&world).unwrap()[1], FollowState::Pending, "a new receiver has to hear of it first");
    for _ in 0..3 {
        world.beat("r-1");
        world.beat("r-2");
        world.reconcile().await;
    }
    world.reconcile().await;
    assert_eq!(follow_states(&world), Some([FollowState::UpToDate; 2]), "there is no rotation any more");
}

/// Two replicas with a runtime each. The first holds the shard of `r-1` and the fleet role.
async fn replicas() -> (Arc<FakePeers>, [World; 2]) {
    let kcp = FakeKcp::default();
    let peers = Arc::new(FakePeers::default());
    let shards = ShardCount::default();
    let [shard, other] = ["r-1", "r-2"].map(|runtime| shards.of_runtime(&runtime.parse().unwrap()));
    assert_ne!(shard, other);
    let [one, two] = [0, 1].map(|_| Replicas::joining(&peers));
    one.role.acquire(WriteFence::default());
    let one = World::open(kcp.clone(), one, |it| it == shard).await;
    let two = World::open(kcp, two, |it| it != shard).await;
    (peers, [one, two])
}

impl World {
    fn progress(&self) -> Option<Arc<RotationProgress>> {
        self.rotation_handle.progress.borrow().clone()
    }

    fn follow_state(&self, name: &str) -> FollowState {
        self.rotation_handle.stragglers.borrow().as_ref().unwrap().of(&KymaKey::new("kcp-system", name))
    }
}

#[tokio::test]
async fn phase_waits_for_the_runtimes_of_every_replica() {
    let (peers, [mut one, mut two]) = replicas().await;
    assert_eq!((one.reconcile().await, peers.asked()), (PhaseName::Steady, 0), "a steady CA waits for none");
    assert_eq!(one.progress().unwrap().runtimes, 2);
    one.request(None).await.unwrap();
    one.beat("r-1");
    assert_eq!(one.reconcile().await, PhaseName::Spread, "the other replica has not observed the phase");
    assert!(one.progress().unwrap().incomplete);
    two.watch();
    assert_eq!((one.reconcile().await, two.reconcile().await), (PhaseName::Spread, PhaseName::Spread));
    let progress = one.progress().unwrap();
    assert_eq!((progress.waiting_for, progress.runtimes, progress.incomplete), (1, 2, false));
    assert_eq!(progress.stragglers[0].kyma, "kcp-system/r-2");
    assert_eq!((two.progress(), two.follow_state("r-2")), (None, FollowState::Pending), "each observes its own");
    assert_eq!(one.follow_state("r-2"), FollowState::UpToDate);
    two.beat("r-2");
    let asked = peers.asked();
    assert_eq!(two.reconcile().await, PhaseName::Spread, "it does not decide");
    assert_eq!(peers.asked(), asked);
    assert_eq!(one.reconcile().await, PhaseName::Reissue);
}

#[tokio::test]
async fn no_phase_ends_on_answers_of_a_part_of_the_fleet() {
    let (peers, [mut one, mut two]) = replicas().await;
    one.request(None).await.unwrap();
    two.watch();
    one.beat("r-1");
    assert_eq!(one.reconcile().await, PhaseName::Spread);
    two.beat("r-2");
    for error in [AskError::Incomplete, AskError::Unavailable] {
        peers.fail(Some(error));
        assert_eq!(one.reconcile().await, PhaseName::Spread);
        let progress = one.progress().unwrap();
        assert_eq!((progress.waiting_for, progress.incomplete), (1, true), "the last numbers");
    }
    peers.fail(None);
    // A shard that was acquired just now, and whose Kymas are not placed yet.
    let acquired = ShardCount::default().of_runtime(&"r-1".parse().unwrap());
    two.fleet.acquire(acquired, Instance::new(2), &WriteFence::default(), Instant::now());
    assert_eq!(one.reconcile().await, PhaseName::Spread);
    two.fleet.release(acquired);
    assert_eq!(one.reconcile().await, PhaseName::Reissue);
    peers.fail(Some(AskError::Incomplete));
    two.watch();
    one.request(Some(0)).await.unwrap();
    assert_eq!(one.reconcile().await, PhaseName::Retire, "an operator forces it");
}

#[tokio::test]
async fn rotation_goes_on_where_the_role_is() {
    let (_, [mut one, mut two]) = replicas().await;
    one.request(None).await.unwrap();
    one.rotation.replicas.role.release().await;
    two.rotation.replicas.role.acquire(WriteFence::default());
    two.watch();
    one.beat("r-1");
    two.beat("r-2");
    assert_eq!((one.reconcile().await, one.progress()), (PhaseName::Spread, None));
    assert_eq!(two.reconcile().await, PhaseName::Reissue);
    let progress = two.progress().unwrap();
    assert_eq!((progress.phase, progress.runtimes), (PhaseName::Spread, 2));
}
