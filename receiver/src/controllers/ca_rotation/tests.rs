use std::collections::BTreeMap;

use tidewatch_shared::{
    heartbeat::{CertificateState, Heartbeat},
    identity::{Epoch, Instance, RuntimeId},
};

use super::*;
use crate::{
    base::key::KymaKey,
    fleet::hub,
    pki::{
        Follows, PhaseName, Setup, TlsFlags, Upkeep,
        testing::{Fake, flags},
    },
};

/// A receiver with its CA and two runtimes.
struct World {
    fake: Fake,
    standing: Standing,
    upkeep: Upkeep,
    hub: Hub,
    rotation: Rotation,
    rotations: Rotations,
    counter: u64,
}

impl World {
    async fn new(fake: Fake) -> Self {
        let (flags, domain) = (flags(), "kyma.local".parse().unwrap());
        let tls = TlsFlags { tls_cert: None, tls_key: None, client_ca: None, proxy_ca: None, proxy_identity: None };
        let names = vec!["localhost".parse().unwrap()];
        let setup = Setup { flags: &flags, tls: &tls, names, domain: &domain, namespace: "kcp-system", proxy: None };
        let metrics = Metrics::default();
        let (standing, upkeep) = Standing::open(setup, fake.client(), metrics.clone()).await.unwrap();
        let mut registry = crate::telemetry::Metrics::new();
        let hub_metrics = hub::Metrics::register(registry.rooms());
        let hub = Hub::new(Instance::new(1), hub::Settings::default(), hub_metrics, Instant::now());
        let plan = Arc::new(crate::controllers::watcher::plan::<Arc<tidewatch_shared::api::Watcher>>(&[]).0);
        for name in ["r-1", "r-2"] {
            hub.place(KymaKey::new("kcp-system", name), Some(name.parse().unwrap()), plan.clone());
        }
        hub.set_synced();
        let (rotation, rotations) =
            Rotation::new(standing.clone(), fake.client(), "kcp-system", &flags, hub.clone(), metrics);
        Self { fake, standing, upkeep, hub, rotation, rotations, counter: 0 }
    }

    /// A receiver that was killed, and another one on the same Secret.
    async fn restart(self) -> Self {
        let counter = self.counter;
        Self { counter, ..Self::new(self.fake).await }
    }

    /// A heartbeat of an agent that follows what it was told at once; whether it is asked to renew.
    fn beat(&mut self, runtime: &str) -> bool {
        let trust = self.standing.trust().borrow().clone();
        let revision = trust.agents.revision().to_owned();
        self.beat_with(runtime, &revision, trust.issuer.as_ref())
    }

    fn beat_with(
        &mut self,
        runtime: &str,
        revision: &str,
        authority: Option<&tidewatch_shared::certificate::KeyId>,
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
        self.hub.heartbeat_with(&runtime, now, heartbeat, authority, now).unwrap().renew
    }

    /// One look, and what it wrote comes back through the watch.
    async fn look(&mut self) -> PhaseName {
        self.rotation.look().await;
        self.watch();
        self.fake.stored().name()
    }

    fn watch(&mut self) {
        self.upkeep.take(self.fake.secret().as_ref(), unix());
    }

    async fn order(&mut self, force_after_seconds: Option<u32>) -> Result<Ordered, NotOrdered> {
        let ordered = self.rotation.order(Order { force_after_seconds }).await;
        self.watch();
        ordered
    }
}

/// Members that other versions of the heartbeat may have.
fn empty() -> Heartbeat {
    serde_json::from_value(serde_json::json!({
        "epoch": "0000000000000001", "sequence": 0, "counter": 0, "waiting": 0, "parked": 0, "agentVersion": "",
        "certificate": {"notAfter": "", "fingerprint": ""}, "watches": [],
    }))
    .unwrap()
}

#[tokio::test]
async fn a_rotation_goes_through_its_phases_as_agents_follow_with_a_kill_in_each() {
    let mut world = World::new(Fake::default()).await;
    let old = world.fake.stored().target().id.clone();
    assert_eq!(world.look().await, PhaseName::Steady);
    let target = world.order(None).await.unwrap().target;
    assert_ne!(target, old);
    for (phase, next) in [
        (PhaseName::Spread, PhaseName::Reissue),
        (PhaseName::Reissue, PhaseName::Retire),
        (PhaseName::Retire, PhaseName::Steady),
    ] {
        assert_eq!(world.look().await, phase, "nobody has followed");
        world.beat("r-1");
        assert_eq!(world.look().await, phase, "one has not followed");
        let progress = world.rotations.progress().unwrap();
        assert_eq!((progress.phase, progress.waiting_for, progress.runtimes), (phase, 1, 2));
        assert_eq!(progress.stragglers[0].kyma, "kcp-system/r-2");
        world = world.restart().await;
        assert_eq!(world.look().await, phase, "a new receiver has heard of nobody");
        assert_eq!(world.rotations.progress().unwrap().stragglers.len(), 2);
        assert_eq!(world.order(None).await.unwrap().target, target, "it is under way");
        for runtime in ["r-1", "r-2"] {
            world.beat(runtime);
        }
        assert_eq!(world.look().await, next);
    }
    assert_eq!(world.fake.stored().target().id, target);
    assert_eq!(world.standing.trust().borrow().clients.roots().len(), 1);
}

#[tokio::test]
async fn agents_with_a_certificate_of_the_old_root_are_asked_to_renew() {
    let mut world = World::new(Fake::default()).await;
    let old = world.fake.stored().target().id.clone();
    assert!(!world.beat("r-1"));
    world.order(None).await.unwrap();
    let revision = |world: &World| world.standing.trust().borrow().agents.revision().to_owned();
    for phase in [PhaseName::Spread, PhaseName::Reissue] {
        world.rotation.tell(&world.standing.trust().borrow().clone());
        let bundle = revision(&world);
        let asked = ["r-1", "r-2"].map(|runtime| world.beat_with(runtime, &bundle, Some(&old)));
        assert_eq!(asked, [phase == PhaseName::Reissue; 2], "{phase}");
        world.look().await;
    }
    assert_eq!(world.fake.stored().name(), PhaseName::Reissue, "both still have their old certificates");
    assert_eq!(world.rotations.progress().unwrap().stragglers[0].behind, Behind::Certificate);
}

#[tokio::test]
async fn a_write_that_fails_changes_nothing_and_is_tried_again() {
    let mut world = World::new(Fake::default()).await;
    world.fake.refuse(true);
    assert_eq!(world.order(None).await, Err(NotOrdered::Write));
    assert_eq!(world.fake.stored().name(), PhaseName::Steady);
    assert_eq!(world.standing.trust().borrow().agents.roots().len(), 1);
    world.fake.refuse(false);
    world.order(None).await.unwrap();
    assert_eq!(world.fake.stored().name(), PhaseName::Spread);
    // Somebody else writes between our read and our write.
    for runtime in ["r-1", "r-2"] {
        world.beat(runtime);
    }
    world.fake.edit(|secret| secret.metadata.annotations = Some(BTreeMap::new()));
    world.rotation.not_before = Instant::now();
    world.rotation.look().await;
    assert_eq!(world.fake.stored().name(), PhaseName::Spread, "a conflict writes nothing");
    world.watch();
    assert_eq!(world.look().await, PhaseName::Reissue);
}

#[tokio::test]
async fn what_was_written_is_not_written_again_before_the_watch_brings_it() {
    let mut world = World::new(Fake::default()).await;
    world.rotation.order(Order::default()).await.unwrap();
    for runtime in ["r-1", "r-2"] {
        world.beat(runtime);
    }
    world.fake.calls();
    for _ in 0..3 {
        world.rotation.look().await;
    }
    assert!(world.fake.calls().is_empty());
    world.watch();
    assert_eq!(world.fake.stored().name(), PhaseName::Spread);
}

#[tokio::test]
async fn a_rotation_can_be_told_later_not_to_wait_for_ever() {
    let mut world = World::new(Fake::default()).await;
    world.order(None).await.unwrap();
    assert_eq!(world.look().await, PhaseName::Spread);
    world.order(Some(0)).await.unwrap();
    for phase in [PhaseName::Reissue, PhaseName::Retire, PhaseName::Steady] {
        assert_eq!(world.look().await, phase);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_secret_is_replaced_and_a_refused_one_never() {
    let mut world = World::new(Fake::default()).await;
    let first = world.fake.stored().target().id.clone();
    world.fake.set("state.json", b"no");
    world.watch();
    world.fake.calls();
    world.rotation.look().await;
    tokio::time::advance(LOST * 2).await;
    world.rotation.look().await;
    assert!(world.fake.calls().is_empty());
    assert_eq!(world.order(None).await, Err(NotOrdered::Secret));

    world.fake.remove();
    world.watch();
    world.rotation.look().await;
    assert!(world.fake.secret().is_none(), "somebody may be about to restore it");
    tokio::time::advance(LOST).await;
    world.rotation.look().await;
    let second = world.fake.stored().target().id.clone();
    assert_ne!(second, first);
    assert_eq!(
        world.standing.trust().borrow().issuer.as_ref(),
        Some(&first),
        "what is stored takes effect by the watch"
    );
    world.watch();
    assert_eq!(world.standing.trust().borrow().issuer.as_ref(), Some(&second));
}

#[tokio::test(start_paused = true)]
async fn whoever_does_not_follow_in_time_is_told_of_until_he_does() {
    let mut world = World::new(Fake::default()).await;
    let key = |name: &str| KymaKey::new("kcp-system", name);
    let follows = |world: &World| world.rotations.laggards().map(|told| ["r-1", "r-2"].map(|name| told.of(&key(name))));
    assert_eq!(follows(&world), None, "nobody was looked at");
    world.look().await;
    assert_eq!(follows(&world), Some([Follows::Well; 2]));
    world.order(None).await.unwrap();
    world.look().await;
    assert_eq!(follows(&world), Some([Follows::NotYet; 2]));
    world.beat("r-1");
    let patience = laggards::patience(world.hub.heartbeat_interval().get(), 2, 20);
    tokio::time::advance(patience).await;
    world.look().await;
    assert_eq!(follows(&world), Some([Follows::Well, Follows::Late(Behind::Unheard)]));
    let old = world.fake.stored().target().id.clone();
    world.beat_with("r-2", "0", Some(&old));
    world.look().await;
    assert_eq!(follows(&world).unwrap()[1], Follows::Late(Behind::Bundle));
    let mut world = world.restart().await;
    world.look().await;
    assert_eq!(follows(&world).unwrap()[1], Follows::NotYet, "a new receiver has to hear of it first");
    for _ in 0..3 {
        world.beat("r-1");
        world.beat("r-2");
        world.look().await;
    }
    world.look().await;
    assert_eq!(follows(&world), Some([Follows::Well; 2]), "there is no rotation any more");
}
