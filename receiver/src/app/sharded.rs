//! Ownership of shards by this replica. With a relay it shares them with other replicas, all of which are active, and relays the
//! requests of the others' runtimes. Without one it is the only one that is active, or stands by. Either runs the tasks of the
//! whole fleet while it holds the fleet role.

mod holders;
mod shards;

use std::{future::pending, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use futures::FutureExt as _;
use kube::Client;
use tidewatch_api::{identity::Instance, key::KymaKey};
use tidewatch_cluster::leader::{self, FleetRole};
use tidewatch_fleet::{
    peers::Peers,
    shards::{self as ownership, HoldersHandle, ShardElector, ShardOwnership},
};
use tidewatch_gateway::{
    ports::{
        self, Gateway, Intake, PortMetrics,
        relayed::{self, RelayHandler, RelayedHandlers},
        v2::V2Intake,
    },
    relay::{Answers, Deadlines, OnlyPeer, Relay, RelaySettings, ReplicaPeers, Tcp},
};
use tidewatch_trust::{ReplicaCertificate, ReplicaSource, ReplicaTls};
use tokio::{
    runtime::Handle,
    sync::watch,
    task::JoinSet,
    time::{self, MissedTickBehavior},
};
use tokio_util::sync::CancellationToken;

pub use self::holders::ShardHolders;
use super::{Binding, Process, Task, changes::ShardHandover, counters::Counters};
use crate::config::Config;

/// Interval at which a replica that is not ready looks whether all shards have holders.
const READY_INTERVAL: Duration = Duration::from_millis(200);
/// Number of tasks of an [`Ownership`].
const TASKS: usize = 2;

/// Relay and ownership, not running.
pub(super) struct Sharding {
    pub(super) holders: ShardHolders,
    relay: Option<RelayParts>,
}

/// What a replica needs that shares the shards with others.
struct RelayParts {
    settings: RelaySettings,
    tls: ReplicaTls,
    relay: Relay,
}

impl Sharding {
    /// With a relay, opens the replica's certificate and makes the relay, whose connections `executor` drives. Pushes the tasks
    /// that run forever.
    pub(super) async fn open(
        process: &Process,
        counters: &Counters,
        executor: Handle,
        tasks: &mut Vec<Task>,
    ) -> Result<Self> {
        let holders = ShardHolders::new(HoldersHandle::default(), process.replica.shards);
        let relay = match process.replica.relay.clone() {
            Some(settings) => Some(open_relay(process, settings, holders.clone(), counters, executor, tasks).await?),
            None => None,
        };
        Ok(Self { holders, relay })
    }

    /// True if this replica shares the shards with no other one.
    pub(super) fn is_alone(&self) -> bool {
        self.relay.is_none()
    }

    /// Relay to the other replicas.
    pub(super) fn relay(&self) -> Option<Relay> {
        self.relay.as_ref().map(|parts| parts.relay.clone())
    }

    /// All replicas, of which this one answers its own questions with `answers`.
    pub(super) fn peers(&self, answers: Answers) -> Arc<dyn Peers> {
        match self.relay() {
            Some(relay) => Arc::new(ReplicaPeers::new(relay, answers)),
            None => Arc::new(OnlyPeer { answers, shards: self.holders.shards }),
        }
    }

    /// Listens on the relay port, if there is one. Its requests go to the handlers of the ports that accept those of agents.
    pub(super) fn bind<I: Intake, T: V2Intake>(
        &self,
        config: &Config,
        handlers: RelayedHandlers<I, T>,
        metrics: PortMetrics,
    ) -> Option<Binding<RelayHandler<I, T>>> {
        let RelayParts { settings, tls, .. } = self.relay.as_ref()?;
        let settings = ports::Settings {
            handshake_steps: config.capacity.handshake_steps(),
            ..relayed::settings(settings.address, config.trust_domain.clone())
        };
        let server = tls.server.clone();
        let tls = tls.clone();
        let handler = move |settings: &_| Arc::new(RelayHandler::new(settings, handlers, tls, metrics));
        Some(Gateway::bind(settings, server, handler).boxed())
    }

    /// Begins to own shards: beside others only once the caches of KCP have synced.
    pub(super) fn start(
        &self,
        process: OwnerParts<'_>,
        followers: Followers,
        metrics: ownership::Metrics,
    ) -> Ownership {
        let OwnerParts { config, leases, instance, relay_address, synced } = process;
        let relay = self.relay.as_ref().map(|parts| &parts.settings);
        let advertised = |relay: &RelaySettings| Some(SocketAddr::new(relay.advertise, relay_address?.port()));
        let own_name = config.replicas.replica_name.as_ref();
        let settings = ownership::Settings {
            name: own_name.map_or_else(leader::host, ToString::to_string),
            namespace: config.namespace.clone(),
            place: config.lease.lease_place.clone(),
            lease_duration: config.lease.lease_duration,
            shards: self.holders.shards,
            relay_address: relay.and_then(advertised).map(|address| address.to_string()),
        };
        let ShardOwnership { elector, changes } =
            ShardElector::start(leases, settings, instance, self.holders.holders.clone(), metrics);
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let held = followers.held.subscribe();
        let mut owning = JoinSet::new();
        let is_alone = self.is_alone();
        owning.spawn(async move {
            // Meanwhile the other replicas serve the shards. Without any, agents may connect while the caches sync.
            let may_claim = async {
                if !is_alone {
                    synced.cancelled().await;
                }
            };
            if stopped.run_until_cancelled(may_claim).await.is_some() {
                elector.run(stopped).await;
            }
        });
        owning.spawn(ownership::follow(changes, followers));
        Ownership { tasks: owning, stop, held, holders: self.holders.clone(), is_alone }
    }
}

/// Opens the certificate of a replica that shares the shards with others, and makes its relay.
async fn open_relay(
    process: &Process,
    settings: RelaySettings,
    holders: ShardHolders,
    counters: &Counters,
    executor: Handle,
    tasks: &mut Vec<Task>,
) -> Result<RelayParts> {
    let Process { config, tls_state, .. } = process;
    let source = match (&settings.files, &tls_state.authority) {
        (Some(files), _) => ReplicaSource::Files(files.clone()),
        (None, Some(authority)) => ReplicaSource::Issuer(authority.clone()),
        (None, None) => anyhow::bail!(
            "--relay-address needs --relay-cert, --relay-key and --relay-ca, because this receiver issues no certificates"
        ),
    };
    let name = settings.name.clone();
    let domain = config.trust_domain.clone();
    let opened = ReplicaCertificate::open(name, domain, source, tls_state.trust(), counters.replica.clone()).await;
    let (tls, certificate) = opened.context("prepare the replica's certificate")?;
    tasks.push(certificate.run().boxed());
    let (relay, reports) =
        Relay::new(Tcp, holders, tls.clone(), counters.relay.clone(), Deadlines::default(), executor);
    // Ends with the process, as all tasks do.
    tasks.push(
        async move {
            reports.run(CancellationToken::new()).await;
            "relay of lost connections"
        }
        .boxed(),
    );
    Ok(RelayParts { settings, tls, relay })
}

/// Called with the Kymas of acquired shards.
type OnAcquired = Box<dyn Fn(&[KymaKey]) + Send>;

/// Parts of this process that the ownership of shards needs.
pub(super) struct OwnerParts<'a> {
    pub(super) config: &'a Config,
    /// Client of the Leases alone, without a write fence.
    pub(super) leases: Client,
    pub(super) instance: Instance,
    /// Address of the listener for relayed requests, if there is one.
    pub(super) relay_address: Option<SocketAddr>,
    /// Cancelled once the caches of KCP have synced.
    pub(super) synced: CancellationToken,
}

/// Units that this replica works for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    /// The Lease of a shard is held; the work for it may not have begun yet.
    pub(super) has_claim: bool,
    pub(super) has_shard: bool,
    pub(super) has_role: bool,
    pub(super) has_lost_shard: bool,
}

/// Components that follow the held shards.
pub(super) struct Followers {
    pub(super) handover: ShardHandover,
    pub(super) role: FleetRole,
    /// Enqueues the Kymas of acquired shards.
    pub(super) enqueue: OnAcquired,
    /// Drops the results of earlier reconciles of a Kyma.
    pub(super) forget: Box<dyn Fn(&KymaKey) + Send>,
    pub(super) held: watch::Sender<Held>,
    /// Cancelled once requests of a shard are accepted.
    pub(super) serves_shard: CancellationToken,
}

/// A replica that owns shards. Its tasks end when it is dropped: then no Lease is renewed any more.
pub(super) struct Ownership {
    /// The elector, and the follower of its changes, which ends after it.
    tasks: JoinSet<()>,
    stop: CancellationToken,
    held: watch::Receiver<Held>,
    holders: ShardHolders,
    is_alone: bool,
}

impl Ownership {
    /// Waits until a shard is claimed.
    pub(super) fn is_claimed(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut held = self.held.clone();
        async move { wait_for(&mut held, |held| held.has_claim).await }
    }

    /// Waits until this replica is to serve agents: with a relay until each shard and the fleet role have had holders, and
    /// without one until it holds them itself.
    pub(super) fn is_complete(&self) -> impl Future<Output = ()> + Send + use<> {
        let holders = self.holders.clone();
        let mut held = self.held.clone();
        let is_alone = self.is_alone;
        async move {
            if is_alone {
                wait_for(&mut held, |held| held.has_shard && held.has_role).await;
                return;
            }
            let mut ticks = time::interval(READY_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            while !holders.are_complete() {
                ticks.tick().await;
            }
        }
    }

    /// Waits for the unexpected end of one of the tasks, and without a relay for the loss of the shard: its agents would stay
    /// connected to a replica that does not serve them. Cancel safe.
    pub(super) async fn ended(&mut self) -> anyhow::Error {
        let Self { tasks, held, is_alone, .. } = self;
        tokio::select! {
            ended = tasks.join_next() => match ended {
                Some(Err(error)) => anyhow::Error::new(error).context("the task of the shards failed"),
                Some(Ok(())) | None => anyhow::anyhow!("task ended unexpectedly: shards"),
            },
            () = wait_for(held, |held| held.has_lost_shard), if *is_alone => {
                // Nothing is left to hand over.
                tasks.shutdown().await;
                anyhow::anyhow!("this receiver lost its shard")
            }
        }
    }

    /// Hands all shards over, and gives the membership back, within the duration of the Lease. The listeners must go on meanwhile:
    /// requests of shards that have moved are relayed to their new holders.
    ///
    /// Without one of the tasks nothing can be handed over in order: the other one ends at once, and the Leases expire.
    pub(super) async fn leave(mut self) {
        if self.tasks.len() < TASKS {
            return;
        }
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Waits for a change of the held units; forever once their follower has ended.
async fn wait_for(held: &mut watch::Receiver<Held>, wanted: impl FnMut(&Held) -> bool) {
    let has_ended = held.wait_for(wanted).await.is_err();
    if has_ended {
        pending().await
    }
}

#[cfg(test)]
mod tests {

    use tidewatch_api::shard::ShardCount;
    use tokio::sync::oneshot;

    use super::*;

    /// Ends with the task that has it.
    type Alive = oneshot::Sender<()>;

    fn ownership() -> (Ownership, CancellationToken) {
        let stop = CancellationToken::new();
        let held = watch::channel(Held::default()).1;
        let holders = ShardHolders::new(HoldersHandle::default(), ShardCount::ONE);
        (Ownership { tasks: JoinSet::new(), stop: stop.clone(), held, holders, is_alone: false }, stop)
    }

    /// A task that never ends by itself.
    fn spawn_endless(ownership: &mut Ownership) -> oneshot::Receiver<()> {
        let (alive, ended): (Alive, _) = oneshot::channel();
        ownership.tasks.spawn(async move {
            let _alive = alive;
            pending().await
        });
        ended
    }

    /// A replica whose process is about to fail must not renew the Leases of shards that it does not serve any more.
    #[tokio::test(start_paused = true)]
    async fn elector_ends_with_its_ownership() {
        let (mut owner, stop) = ownership();
        let ended = [spawn_endless(&mut owner), spawn_endless(&mut owner)];
        drop(owner);
        for ended in ended {
            assert!(time::timeout(Duration::from_secs(60), ended).await.expect("aborted").is_err());
        }
        assert!(!stop.is_cancelled(), "nothing is handed over");
    }

    #[tokio::test(start_paused = true)]
    async fn leaving_waits_for_both_tasks() {
        let (mut owner, stop) = ownership();
        let (let_follower_end, may_end) = oneshot::channel::<()>();
        let stopped = stop.clone();
        owner.tasks.spawn(async move { stopped.cancelled().await });
        owner.tasks.spawn(async move { drop(may_end.await) });
        assert!(owner.ended().now_or_never().is_none());
        let mut leave = Box::pin(owner.leave());
        assert!(time::timeout(Duration::from_secs(60), &mut leave).await.is_err(), "the follower runs");
        assert!(stop.is_cancelled());
        drop(let_follower_end);
        time::timeout(Duration::from_secs(60), leave).await.expect("both have ended");
    }

    /// Its agents would stay connected to it. Beside others it relays their requests.
    #[tokio::test(start_paused = true)]
    async fn lost_shard_ends_the_replica_that_is_alone() {
        for is_alone in [true, false] {
            let (mut owner, _) = ownership();
            let (sender, held) = watch::channel(Held { has_claim: true, has_shard: true, ..Held::default() });
            owner.held = held;
            owner.is_alone = is_alone;
            let elector = spawn_endless(&mut owner);
            assert!(owner.is_complete().now_or_never().is_none(), "the fleet role is missing");
            sender.send_modify(|held| held.has_role = true);
            assert_eq!(owner.is_complete().now_or_never().is_some(), is_alone);
            assert!(owner.ended().now_or_never().is_none());
            sender.send_modify(|held| held.has_lost_shard = true);
            let lost = time::timeout(Duration::from_secs(60), owner.ended()).await;
            assert_eq!(lost.is_ok_and(|error| error.to_string().contains("lost its shard")), is_alone);
            let has_ended = time::timeout(Duration::from_secs(60), elector).await.is_ok();
            assert_eq!(has_ended, is_alone, "it renews no Lease any more");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failed_task_is_reported_and_leaves_at_once() {
        for panics in [false, true] {
            let (mut owner, _) = ownership();
            let other = spawn_endless(&mut owner);
            owner.tasks.spawn(async move { assert!(!panics, "as the test wants") });
            let error = owner.ended().await.to_string();
            assert_eq!(error.contains("failed"), panics, "{error}");
            time::timeout(Duration::from_secs(60), owner.leave()).await.expect("no wait");
            assert!(time::timeout(Duration::from_secs(60), other).await.expect("aborted").is_err());
        }
    }
}
