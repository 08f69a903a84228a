//! A replica among others, all of which are active: it owns some of the shards, relays the requests of the others' runtimes,
//! and runs the tasks of the whole fleet while it holds the fleet role.

mod holders;
mod shards;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use futures::FutureExt as _;
use kube::Client;
use tidewatch_shared::identity::Instance;
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{self, MissedTickBehavior},
};
use tokio_util::sync::CancellationToken;

pub use self::holders::ShardHolders;
use super::{
    build::{Binding, Task},
    changes::ShardHandover,
};
use crate::{
    config::Config,
    controllers::{event_path::AcquiredKymas, kyma},
    ingress::{
        admin::shards::CurrentHolders,
        gateway::{
            self, Gateway, Intake, PortMetrics,
            relayed::{self, RelayHandler, RelayedHandlers},
            v2::V2Intake,
        },
        relay::{self, Answers, Relay, ReplicaPeers, ReplicaSettings},
    },
    kube::{
        leader::{self, FleetRole},
        shards::{self as ownership, HoldersHandle, ShardElector, ShardOwnership},
    },
    pki::{ReplicaCertificate, ReplicaMetrics, ReplicaSource, ReplicaTls, TlsState},
    telemetry::{Pending, Readiness},
};

/// Interval at which a replica that is not ready looks whether all shards have holders.
const READY_INTERVAL: Duration = Duration::from_millis(200);

/// The parts of a replica that exist before it owns shards.
pub(super) struct Replica {
    pub(super) settings: ReplicaSettings,
    /// Pending until each shard has a holder, for the first time.
    all_held: Pending,
    serving: leader::Metrics,
}

/// Relay and ownership, not running.
pub(super) struct Sharding {
    settings: ReplicaSettings,
    all_held: Pending,
    serving: leader::Metrics,
    pub(super) tls: ReplicaTls,
    pub(super) relay: Relay,
    pub(super) holders: HoldersHandle,
    known: ShardHolders,
}

impl Replica {
    /// `serving` shows from when on the replica serves.
    pub(super) fn new(settings: ReplicaSettings, readiness: &Readiness, serving: leader::Metrics) -> Self {
        Self { settings, all_held: readiness.pending("shards"), serving }
    }

    /// Opens the replica's certificate and makes its relay. Pushes the tasks that run forever.
    pub(super) async fn open(
        self,
        config: &Config,
        tls_state: &TlsState,
        (relay_metrics, certificate_metrics): (relay::Metrics, ReplicaMetrics),
        tasks: &mut Vec<Task>,
    ) -> Result<Sharding> {
        let Self { settings, all_held, serving } = self;
        let source = match (&settings.files, &tls_state.authority) {
            (Some(files), _) => ReplicaSource::Files(files.clone()),
            (None, Some(authority)) => ReplicaSource::Issuer(authority.clone()),
            (None, None) => anyhow::bail!(
                "--relay-address needs --relay-cert, --relay-key and --relay-ca, because this receiver issues no certificates"
            ),
        };
        let (name, domain) = (settings.name.clone(), config.trust_domain.clone());
        let opened = ReplicaCertificate::open(name, domain, source, tls_state.trust(), certificate_metrics).await;
        let (tls, certificate) = opened.context("prepare the replica's certificate")?;
        tasks.push(certificate.run().boxed());
        let holders = HoldersHandle::default();
        let known = ShardHolders::new(holders.clone(), config.replicas.shards);
        let (relay, reports) = Relay::new(known.clone(), tls.clone(), relay_metrics);
        // Ends with the process, as all tasks do.
        tasks.push(
            async move {
                reports.run(CancellationToken::new()).await;
                "relay of lost connections"
            }
            .boxed(),
        );
        Ok(Sharding { settings, all_held, serving, tls, relay, holders, known })
    }
}

/// Components that follow the held shards.
pub(super) struct Followers {
    pub(super) handover: ShardHandover,
    pub(super) acquired: AcquiredKymas,
    pub(super) context: Arc<kyma::Context>,
    pub(super) role: FleetRole,
}

/// A replica that owns shards.
pub(super) struct Ownership {
    elector: JoinHandle<()>,
    follower: JoinHandle<()>,
    stop: CancellationToken,
}

impl Sharding {
    /// All replicas, of which this one answers its own questions with `answers`.
    pub(super) fn peers(&self, answers: Answers) -> ReplicaPeers {
        ReplicaPeers::new(self.relay.clone(), self.known.clone(), answers)
    }

    /// Holders for the report of the shards.
    pub(super) fn current_holders(&self) -> CurrentHolders {
        self.known.views()
    }

    /// Listens on the relay port, whose requests go to the handlers of the ports that accept those of agents.
    pub(super) fn bind<I: Intake, T: V2Intake>(
        &self,
        config: &Config,
        handlers: RelayedHandlers<I, T>,
        metrics: PortMetrics,
    ) -> Binding<RelayHandler<I, T>> {
        let settings = gateway::Settings {
            handshake_steps: config.capacity.handshake_steps(),
            ..relayed::settings(self.settings.address, config.trust_domain.clone())
        };
        let handler = move |settings: &_| Arc::new(RelayHandler::new(settings, handlers, metrics));
        Gateway::bind(settings, self.tls.server.clone(), handler).boxed()
    }

    /// Begins to own shards once the caches of KCP have synced. The client must be the elector's own, without a write fence.
    pub(super) fn start(
        self,
        client: Client,
        config: &Config,
        (instance, metrics): (Instance, ownership::Metrics),
        relay_address: SocketAddr,
        synced: CancellationToken,
        (followers, tasks): (Followers, &mut JoinSet<&'static str>),
    ) -> Result<Ownership> {
        let Self { settings, all_held, serving, holders, .. } = self;
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
        let (stopped, shards) = (stop.clone(), config.replicas.shards);
        let elector = tokio::spawn(async move {
            // Shards whose Kymas are not known yet could not be served.
            if stopped.run_until_cancelled(synced.cancelled()).await.is_some() {
                elector.run(stopped).await;
            }
        });
        let follower = tokio::spawn(ownership::follow(changes, followers));
        tasks.spawn(async move {
            let mut ticks = time::interval(READY_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            while !holders.current().are_complete(shards) {
                ticks.tick().await;
            }
            serving.serve_as_replica();
            all_held.done();
            std::future::pending().await
        });
        Ok(Ownership { elector, follower, stop })
    }
}

impl Ownership {
    /// Waits for the unexpected end of the elector. Cancel safe.
    pub(super) async fn ended(&mut self) -> anyhow::Error {
        let ended = tokio::select! {
            ended = &mut self.elector => ended,
            ended = &mut self.follower => ended,
        };
        match ended {
            Ok(()) => anyhow::anyhow!("task ended unexpectedly: shards"),
            Err(error) => anyhow::Error::new(error).context("the task of the shards failed"),
        }
    }

    /// Hands all shards over, and gives the membership back, within the duration of the Lease. The listeners must go on meanwhile:
    /// requests of shards that have moved are relayed to their new holders.
    pub(super) async fn leave(self) {
        self.stop.cancel();
        let _ = self.elector.await;
        let _ = self.follower.await;
    }
}
