//! A replica among others, all of which are active: it owns some of the shards, relays the requests of the others' runtimes,
//! and runs the tasks of the whole fleet while it holds the fleet role.

mod holders;
mod shards;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use futures::FutureExt as _;
use kube::Client;
use tidewatch_api::{identity::Instance, key::KymaKey};
use tidewatch_cluster::leader::{self, FleetRole};
use tidewatch_fleet::shards::{self as ownership, HoldersHandle, ShardElector, ShardOwnership};
use tidewatch_gateway::{
    admin::shards::CurrentHolders,
    ports::{
        self, Gateway, Intake, PortMetrics,
        relayed::{self, RelayHandler, RelayedHandlers},
        v2::V2Intake,
    },
    relay::{self, Answers, IsFleetHolder, Relay, ReplicaPeers, ReplicaSettings},
};
use tidewatch_kit::readiness::{Pending, Readiness};
use tidewatch_trust::{ReplicaCertificate, ReplicaMetrics, ReplicaSource, ReplicaTls, TlsState};
use tokio::{
    runtime::Handle,
    task::JoinSet,
    time::{self, MissedTickBehavior},
};
use tokio_util::sync::CancellationToken;

pub use self::holders::ShardHolders;
use super::{
    changes::ShardHandover,
    task::{Binding, Task},
};
use crate::config::Config;

/// Interval at which a replica that is not ready looks whether all shards have holders.
const READY_INTERVAL: Duration = Duration::from_millis(200);
/// Time after which the shards have been divided among replicas that started together: before it, few bodies of cached
/// objects would be dropped that an acquisition does not fetch again.
const REDUCE_AFTER: Duration = Duration::from_secs(60);
/// Number of tasks of an [`Ownership`].
const TASKS: usize = 2;

/// The parts of a replica that exist before its components.
pub(super) struct Replica {
    settings: ReplicaSettings,
    /// Client of the Leases alone, without a write fence.
    client: Client,
    /// Pending until each shard has a holder, for the first time.
    all_held: Pending,
    serving: leader::Metrics,
}

/// Relay and ownership, not running.
pub(super) struct Sharding {
    replica: Replica,
    tls: ReplicaTls,
    pub(super) relay: Relay,
    holders: ShardHolders,
}

impl Replica {
    /// The client must be for the Leases alone, without a write fence. `serving` shows from when on the replica serves.
    pub(super) fn new(
        settings: ReplicaSettings,
        client: Client,
        readiness: &Readiness,
        serving: leader::Metrics,
    ) -> Self {
        Self { settings, client, all_held: readiness.pending("shards"), serving }
    }

    /// Opens the replica's certificate and makes its relay, whose connections `executor` drives. Pushes the tasks that run
    /// forever.
    pub(super) async fn open(
        self,
        config: &Config,
        tls_state: &TlsState,
        relay_metrics: relay::Metrics,
        certificate_metrics: ReplicaMetrics,
        executor: Handle,
        tasks: &mut Vec<Task>,
    ) -> Result<Sharding> {
        let source = match (&self.settings.files, &tls_state.authority) {
            (Some(files), _) => ReplicaSource::Files(files.clone()),
            (None, Some(authority)) => ReplicaSource::Issuer(authority.clone()),
            (None, None) => anyhow::bail!(
                "--relay-address needs --relay-cert, --relay-key and --relay-ca, because this receiver issues no certificates"
            ),
        };
        let name = self.settings.name.clone();
        let domain = config.trust_domain.clone();
        let opened = ReplicaCertificate::open(name, domain, source, tls_state.trust(), certificate_metrics).await;
        let (tls, certificate) = opened.context("prepare the replica's certificate")?;
        tasks.push(certificate.run().boxed());
        let holders = ShardHolders::new(HoldersHandle::default(), config.replicas.shards);
        let (relay, reports) = Relay::new(holders.clone(), tls.clone(), relay_metrics, executor);
        // Ends with the process, as all tasks do.
        tasks.push(
            async move {
                reports.run(CancellationToken::new()).await;
                "relay of lost connections"
            }
            .boxed(),
        );
        Ok(Sharding { replica: self, tls, relay, holders })
    }
}

/// Called with the Kymas of acquired shards.
type OnAcquired = Box<dyn Fn(&[KymaKey]) + Send>;

/// Parts of this process that the ownership of shards needs.
pub(super) struct ProcessParts {
    pub(super) instance: Instance,
    /// Address of the listener for relayed requests.
    pub(super) relay_address: SocketAddr,
    /// Cancelled once the caches of KCP have synced.
    pub(super) synced: CancellationToken,
}

/// Components that follow the held shards.
pub(super) struct Followers {
    pub(super) handover: ShardHandover,
    pub(super) role: FleetRole,
    /// Enqueues the Kymas of acquired shards.
    pub(super) enqueue: OnAcquired,
    /// Drops the results of earlier reconciles of a Kyma.
    pub(super) forget: Box<dyn Fn(&KymaKey) + Send>,
}

/// A replica that owns shards. Its tasks end when it is dropped: then no Lease is renewed any more.
pub(super) struct Ownership {
    /// The elector, and the follower of its changes, which ends after it.
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Sharding {
    /// All replicas, of which this one answers its own questions with `answers`.
    pub(super) fn peers(&self, answers: Answers) -> ReplicaPeers {
        ReplicaPeers::new(self.relay.clone(), self.holders.clone(), answers)
    }

    /// Recognizes the replica that runs the fleet-wide tasks, as the Leases show it.
    pub(super) fn is_fleet_holder(&self) -> IsFleetHolder {
        self.holders.is_fleet_holder()
    }

    /// Holders for the report of the shards.
    pub(super) fn current_holders(&self) -> CurrentHolders {
        self.holders.views()
    }

    /// Listens on the relay port, whose requests go to the handlers of the ports that accept those of agents.
    pub(super) fn bind<I: Intake, T: V2Intake>(
        &self,
        config: &Config,
        handlers: RelayedHandlers<I, T>,
        metrics: PortMetrics,
    ) -> Binding<RelayHandler<I, T>> {
        let settings = ports::Settings {
            handshake_steps: config.capacity.handshake_steps(),
            ..relayed::settings(self.replica.settings.address, config.trust_domain.clone())
        };
        let tls = self.tls.clone();
        let handler = move |settings: &_| Arc::new(RelayHandler::new(settings, handlers, tls, metrics));
        Gateway::bind(settings, self.tls.server.clone(), handler).boxed()
    }

    /// Begins to own shards once the caches of KCP have synced.
    pub(super) fn start(
        self,
        config: &Config,
        process: ProcessParts,
        followers: Followers,
        metrics: ownership::Metrics,
        tasks: &mut JoinSet<&'static str>,
    ) -> Result<Ownership> {
        let Replica { settings, client, all_held, serving } = self.replica;
        let ProcessParts { instance, relay_address, synced } = process;
        let holders = self.holders.handle();
        let advertised = SocketAddr::new(settings.advertise, relay_address.port());
        let settings = ownership::Settings {
            name: settings.name.to_string(),
            namespace: config.namespace.clone(),
            place: config.lease.lease_place.clone(),
            lease_duration: config.lease.lease_duration,
            unsharded_lease: config.lease.lease_name.clone(),
            shards: config.replicas.shards,
            relay_address: Some(advertised.to_string()),
        };
        let started = ShardElector::start(client, settings, instance, holders.clone(), metrics);
        let ShardOwnership { elector, changes } = started.context("start the guard of the shards")?;
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let shards = config.replicas.shards;
        let mut owning = JoinSet::new();
        let handover = followers.handover.clone();
        owning.spawn(async move {
            // Shards whose Kymas are not known yet could not be served.
            if stopped.run_until_cancelled(synced.cancelled()).await.is_some() {
                elector.run(stopped).await;
            }
        });
        owning.spawn(ownership::follow(changes, followers));
        tasks.spawn(async move {
            let mut ticks = time::interval(READY_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            while !holders.current().are_complete(shards) {
                ticks.tick().await;
            }
            serving.serve_as_replica();
            all_held.done();
            time::sleep(REDUCE_AFTER).await;
            handover.reduce_others();
            std::future::pending().await
        });
        Ok(Ownership { tasks: owning, stop })
    }
}

impl Ownership {
    /// Waits for the unexpected end of one of the tasks. Cancel safe.
    pub(super) async fn ended(&mut self) -> anyhow::Error {
        match self.tasks.join_next().await {
            Some(Err(error)) => anyhow::Error::new(error).context("the task of the shards failed"),
            Some(Ok(())) | None => anyhow::anyhow!("task ended unexpectedly: shards"),
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

#[cfg(test)]
mod tests {
    use std::future::pending;

    use futures::FutureExt as _;
    use tokio::sync::oneshot;

    use super::*;

    /// Ends with the task that has it.
    type Alive = oneshot::Sender<()>;

    fn ownership() -> (Ownership, CancellationToken) {
        let stop = CancellationToken::new();
        (Ownership { tasks: JoinSet::new(), stop: stop.clone() }, stop)
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
