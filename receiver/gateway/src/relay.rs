//! Relay of requests between replicas. Any replica accepts a request of any runtime; the one that holds the runtime's
//! shard processes it.
//!
//! The accepting replica performs the handshake, the checks of certificate and head, the limits of the runtime and those
//! of the body. For a runtime of another replica it then passes method, path, the header fields that matter, the
//! client's certificate and the body unchanged to the *relay port* of the holder (`ports::relayed`), over HTTP/2 and
//! mutual TLS with certificates of replicas ([`ReplicaTls`]). The holder performs all checks as if the request had come
//! to itself, so a signature is verified once, end to end, and all limits of a runtime hold across replicas.
//!
//! Replicas also exchange *questions* about the whole fleet over the same connections: [`ReplicaPeers`] sends them, and
//! [`Answers`] responds for the shards that this replica holds. Answers of a part of the fleet are never returned. A question
//! is never passed on.
//!
//! A refusal is immediate and temporary (503 with `Retry-After`) while the holder is unknown, gone, full or late: the
//! agent keeps its events, and nothing is stored here. A request whose bytes may have left is never sent again, and one
//! that was relayed is never relayed again.

mod answers;
mod connect;
mod connection;
mod error;
mod flags;
mod holder;
mod http2;
mod lost;
mod metrics;
mod peers;
mod question;
mod request;
mod response;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tidewatch_api::{identity::RuntimeId, replica::ReplicaName, shard::ShardCount};
use tidewatch_fleet::peers::Topic;
use tidewatch_trust::ReplicaTls;
use tokio::{
    runtime::Handle,
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;

use self::{
    holder::HolderPool,
    lost::{LostConnections, Report},
};
use crate::ports::HttpResponse;

pub use self::{
    answers::{Answers, IsFleetHolder, ServedShards},
    connect::{Connect, Tcp},
    error::RelayError,
    flags::{Flags, FlagsError, RelaySettings, ReplicaSettings},
    metrics::Metrics,
    peers::{OnlyPeer, ReplicaPeers},
};
pub(crate) use self::{
    lost::{LOST_PATH, LostConnection, MAX_LOST_BYTES},
    question::{MAX_QUESTION_BYTES, QUESTION_PATH},
    request::{RELAY_FIELD, RelayedPort, RelayedRequest, source_of},
    response::{RelayedResponse, mark_last},
};

/// Holders with a connection pool at most: more than there are replicas, whose pools stay while they come and go.
const MAX_HOLDERS: usize = 64;

/// Another replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Its name, which its certificate must carry.
    pub name: ReplicaName,
    /// Address of its relay port.
    pub address: SocketAddr,
}

/// Holder of a runtime's shard, or of the role that runs the fleet-wide tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// This replica.
    Here,
    /// Another one.
    At(Arc<Replica>),
    /// No replica, or it is not known which.
    Unknown,
}

/// Knows the live replicas and the holder of each shard. It must answer from memory.
pub trait Holders: Send + Sync + 'static {
    /// Number of shards of the fleet.
    fn shards(&self) -> ShardCount;

    /// Holder of a runtime's shard. Asked once for each request.
    fn holder(&self, runtime: &RuntimeId) -> Holder;

    /// Holder of the role that runs the fleet-wide tasks.
    fn fleet_holder(&self) -> Holder;

    /// Live replicas, each once; those that hold no shard, and this one, may be left out.
    fn replicas(&self) -> Vec<Arc<Replica>>;
}

/// Deadlines of the relay and of its answers.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// Establishing a connection to a holder, TLS included.
    pub(crate) connect: Duration,
    /// Interval of HTTP/2 PINGs on a connection, and the time for their acknowledgement.
    pub(crate) ping: Duration,
    /// From the end of a request's body until the response is complete, for requests that are processed without waiting
    /// for anything: events, heartbeats, lost connections.
    pub(crate) event: Duration,
    /// The same for an event of contract v2, which may wait for another manager.
    pub(crate) v2: Duration,
    /// The same for renewals and enrolments, which wait for the runtime and the issuer.
    pub(crate) issuance: Duration,
    /// From a question to its answers.
    pub(crate) question: Duration,
    /// From a request for a rotation of the CA to its answer: above the time in which the CA's Secret must be written.
    pub(crate) rotation: Duration,
}

impl Deadlines {
    const fn of(&self, port: RelayedPort) -> Duration {
        match port {
            RelayedPort::Event | RelayedPort::Lost => self.event,
            RelayedPort::V2 => self.v2,
            RelayedPort::Renewal | RelayedPort::Enrolment => self.issuance,
            RelayedPort::Question => self.question,
        }
    }

    fn of_question(&self, topic: Topic) -> Duration {
        if topic == Topic::RotateCa { self.rotation } else { self.question }
    }
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            ping: Duration::from_secs(5),
            event: Duration::from_secs(5),
            v2: Duration::from_secs(12),
            issuance: Duration::from_secs(32),
            question: Duration::from_secs(5),
            rotation: Duration::from_secs(17),
        }
    }
}

/// Relays requests to the holders of their shards. Clones share it.
#[derive(Clone)]
pub struct Relay(Arc<Inner>);

struct Inner {
    holders: Box<dyn Holders>,
    tls: ReplicaTls,
    connect: Box<dyn Connect>,
    /// Drives the connections. Other executors may make their first request, and be busy or end later.
    executor: Handle,
    deadlines: Deadlines,
    /// Pools of the holders known so far: few, read with each request, and replaced when one is new or has moved.
    pools: ArcSwap<Vec<Arc<HolderPool>>>,
    reports: mpsc::Sender<Report>,
    metrics: Metrics,
}

/// Reports lost connections to the holders of their runtimes, in the background.
pub struct RelayTask(LostConnections);

impl Relay {
    /// Relays over `connect`, such as [`Tcp`], to the replicas that `holders` names. `executor`, that of the ports, drives the
    /// connections: on another one, relayed requests would wait for its work. The task must run, or no lost connection is
    /// reported.
    pub fn new(
        connect: impl Connect,
        holders: impl Holders,
        tls: ReplicaTls,
        metrics: Metrics,
        deadlines: Deadlines,
        executor: Handle,
    ) -> (Self, RelayTask) {
        let (reports, queue) = mpsc::channel(lost::CAPACITY);
        let holders = Box::new(holders);
        let connect = Box::new(connect);
        let pools = ArcSwap::default();
        let relay = Self(Arc::new(Inner { holders, tls, connect, executor, deadlines, pools, reports, metrics }));
        (relay.clone(), RelayTask(LostConnections { relay, queue }))
    }

    /// TLS of the connections between replicas.
    pub(super) fn tls(&self) -> &ReplicaTls {
        &self.0.tls
    }

    /// Returns the holder to which a request of a runtime must be relayed; `None` if this replica processes it.
    ///
    /// # Errors
    /// [`RelayError::Unknown`]; for a request that was relayed to this replica also [`RelayError::NotHere`].
    pub(super) fn holder(&self, runtime: &RuntimeId, is_relayed: bool) -> Result<Option<Arc<Replica>>, RelayError> {
        let refused = match self.find(runtime) {
            Holder::Here => return Ok(None),
            Holder::At(replica) if !is_relayed => return Ok(Some(replica)),
            Holder::At(_) => RelayError::NotHere,
            Holder::Unknown if is_relayed => RelayError::NotHere,
            Holder::Unknown => RelayError::Unknown,
        };
        self.0.metrics.refused(refused);
        Err(refused)
    }

    /// Returns the holder of a runtime's shard.
    pub(super) fn find(&self, runtime: &RuntimeId) -> Holder {
        self.0.holders.holder(runtime)
    }

    /// Relays a request of a runtime, and returns the holder's response, whatever its status.
    ///
    /// # Errors
    /// [`RelayError`], as soon as it is certain.
    pub(super) async fn send(
        &self,
        holder: &Arc<Replica>,
        runtime: &RuntimeId,
        request: RelayedRequest<'_>,
    ) -> Result<HttpResponse, RelayError> {
        let begun = Instant::now();
        let port = request.port;
        let result = self.exchange(holder, runtime, request, begun).await;
        self.0.metrics.relayed(port, begun.elapsed(), result.as_ref().err());
        result
    }

    async fn exchange(
        &self,
        holder: &Arc<Replica>,
        runtime: &RuntimeId,
        request: RelayedRequest<'_>,
        begun: Instant,
    ) -> Result<HttpResponse, RelayError> {
        let pool = self.pool(holder);
        let _permit = pool.acquire(request.port, runtime)?;
        let deadline = begun + self.0.deadlines.of(request.port);
        let request = request.build()?;
        let exchange = async { response::read(pool.send(self, request).await?).await };
        timeout_at(deadline, exchange).await.map_err(|_| RelayError::Late)?
    }

    /// Returns the pool of a holder. A holder at another address gets a new one.
    fn pool(&self, holder: &Arc<Replica>) -> Arc<HolderPool> {
        let find = |pools: &[Arc<HolderPool>]| pools.iter().find(|pool| pool.replica == *holder).cloned();
        if let Some(pool) = find(&self.0.pools.load()) {
            return pool;
        }
        let new = Arc::new(HolderPool::new(holder.clone()));
        let before = self.0.pools.rcu(|pools| {
            if find(pools).is_some() {
                return pools.clone();
            }
            // Requests in flight keep the pool that they have.
            let others = pools.iter().filter(|pool| pool.replica.name != holder.name);
            Arc::new([new.clone()].into_iter().chain(others.take(MAX_HOLDERS - 1).cloned()).collect::<Vec<_>>())
        });
        // Another request may have added it at the same time.
        find(&before).unwrap_or(new)
    }

    /// Reports to the holder that a runtime closed or lost its last connection here, or that a heartbeat over one is
    /// overdue; nothing arrived over it after `since`. Best effort.
    pub(super) fn report_lost(&self, holder: Arc<Replica>, runtime: RuntimeId, since: Instant) {
        if self.0.reports.try_send(Report { holder, runtime, since }).is_err() {
            self.0.metrics.lost_reported("dropped", 1);
        }
    }
}

impl RelayTask {
    /// Runs until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let reporting = self.0.run();
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = reporting => {}
        }
    }
}
