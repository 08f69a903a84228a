//! One replica: the product's elector, follower of the shards, runtime table, relay, event port and relay port, with workers
//! that write to the runtimes under the fences.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use futures::{FutureExt as _, future::BoxFuture};
use http::Method;
use parking_lot::Mutex;
use tidewatch_api::{
    identity::{Instance, RuntimeId},
    key::KymaKey,
    leases::Unit,
    plan::Work,
};
use tidewatch_cluster::{error_class::ErrorClass, leader::WriteFence};
use tidewatch_contract::{
    exchange::{EventsResponse, HeartbeatResponse},
    heartbeat::Heartbeat,
};
use tidewatch_fleet::{
    EventBatch, Verified,
    peers::Responders,
    queue::ReconcileOutcome,
    shards::{self as ownership, Consumer, HoldersHandle, ShardElector, ShardOwnership, follow},
    table::{Job, PlacementError, RuntimeTable},
};
use tidewatch_gateway::{
    ports::{
        Gateway, Intake, Settings, V3Handler,
        relayed::{self, RelayHandler, RelayedHandlers},
        v2::V2Adapter,
    },
    relay::{Answers, Deadlines, Relay},
};
use tidewatch_receiver::app::ShardHolders;
use tokio::{
    runtime::Handle,
    time::{Instant, interval, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use turmoil::net::TcpListener;

use super::{
    LEASE, MAX_WRITE_LATENCY, NAMESPACE, REPLICAS, REQUEST_DEADLINE, RUNTIMES, Rng, TICK,
    network::{GatedListener, RelayNetwork},
    shards,
    shared_state::{self, Identities, SharedState, kyma, unit_of},
};
use crate::simulation::shared_state::{PORT, RECEIVER};

const RELAY_PORT: u16 = 9443;
const WORKERS: usize = 2;
/// Time within which the Kymas of an acquired shard are verified.
const SPREAD: Duration = Duration::from_secs(5);

/// Kymas whose catalog this process has read completely.
type WarmCaches = Arc<Mutex<BTreeSet<KymaKey>>>;

/// Runs a replica until it is stopped.
pub(crate) async fn run(shared: SharedState, at: usize, mut rng: Rng) -> turmoil::Result {
    let gate = shared.gate(at).clone();
    let holders = HoldersHandle::default();
    let (table, stop, instance) = shared.start_replica(at, holders.clone());
    tokio::spawn(watch_fences(shared.clone(), at));
    let warm = WarmCaches::default();
    for _ in 0..WORKERS {
        let worker = Worker { shared: shared.clone(), at, table: table.clone(), warm: warm.clone(), rng: rng.split() };
        tokio::spawn(gate.run(worker.run()));
    }

    let identities = Identities::get();
    let metrics = shared.metrics().clone();
    let tls = identities.replicas[at].clone();
    let known = ShardHolders::new(holders.clone(), shards());
    let network = RelayNetwork(gate.clone());
    let deadlines = Deadlines::default();
    let (relay, reports) = Relay::new(network, known, tls.clone(), metrics.relay, deadlines, Handle::current());
    let shutdown = CancellationToken::new();
    tokio::spawn(gate.run(reports.run(shutdown.clone())));

    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let listener =
        GatedListener { gate: gate.clone(), listener: TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).await? };
    let authority = format!("{RECEIVER}:{PORT}").parse().unwrap();
    let settings = Settings {
        relay: Some(relay),
        departures: Some(Arc::new(table.clone())),
        ..Settings::new(address, vec![authority], identities.domain.clone())
    };
    let server = Arc::new(ArcSwap::new(identities.server.config.clone()));
    let intake = CheckedTable { shared: shared.clone(), at, table: table.clone() };
    let mut events = None;
    let gateway = Gateway::with_listener(listener, address, settings, server, |settings| {
        let handler = Arc::new(V3Handler::new(settings, intake, metrics.gateway));
        events = Some(handler.clone());
        handler
    });
    let event_port = tokio::spawn(gate.run(gateway.run(shutdown.clone())));

    let address = SocketAddr::new(turmoil::lookup(REPLICAS[at]), RELAY_PORT);
    let listener =
        GatedListener { gate: gate.clone(), listener: TcpListener::bind((Ipv4Addr::UNSPECIFIED, RELAY_PORT)).await? };
    let answers = Answers::new(Responders::default(), Arc::new(Vec::new), Arc::new(|_| false), deadlines);
    let handlers = RelayedHandlers::<_, V2Adapter> { events: events.unwrap(), v2: None, enrolment: None, answers };
    let settings = relayed::settings(address, identities.domain.clone());
    let gateway = Gateway::with_listener(listener, address, settings, tls.server.clone(), |settings| {
        Arc::new(RelayHandler::new(settings, handlers, tls.clone(), metrics.relay_port))
    });
    let relay_port = tokio::spawn(gate.run(gateway.run(shutdown.clone())));

    let settings = ownership::Settings {
        name: REPLICAS[at].to_owned(),
        namespace: NAMESPACE.to_owned(),
        place: None,
        lease_duration: LEASE,
        shards: shards(),
        relay_address: Some(address.to_string()),
    };
    let client = shared.kcp().client(shared.link(at));
    let ShardOwnership { elector, changes } = ShardElector::start(client, settings, instance, holders, metrics.shards);
    let sync_delay = rng.millis(2_000);
    let stopped = stop.clone();
    let elector = tokio::spawn(gate.run(async move {
        if stopped.run_until_cancelled(sleep(sync_delay)).await.is_some() {
            elector.run(stopped).await;
        }
    }));
    let consumer = ReplicaWork { shared: shared.clone(), at, table, warm };
    let follower = tokio::spawn(gate.run(follow(changes, consumer)));

    gate.run(stop.cancelled()).await;
    elector.await?;
    follower.await?;
    shutdown.cancel();
    event_port.await?;
    relay_port.await?;
    shared.ended(at);
    Ok(())
}

/// Observes the fences, also while the replica is stopped: time closes them then.
async fn watch_fences(shared: SharedState, at: usize) {
    let mut ticks = interval(TICK);
    loop {
        ticks.tick().await;
        shared.observe_fences(at);
    }
}

/// The runtime table, which requests reach only if the replica holds their shard as far as it knows.
struct CheckedTable {
    shared: SharedState,
    at: usize,
    table: RuntimeTable,
}

impl Intake for CheckedTable {
    fn events(&self, batch: Verified<EventBatch>, now: i64) -> Result<EventsResponse, PlacementError> {
        self.shared.received(self.at, batch.runtime());
        self.table.events(batch, now)
    }

    fn heartbeat(&self, heartbeat: Verified<Heartbeat>, now: i64) -> Result<HeartbeatResponse, PlacementError> {
        self.shared.received(self.at, heartbeat.runtime());
        self.table.heartbeat(heartbeat, now)
    }

    fn connection_lost(&self, runtime: &RuntimeId, since: Instant) {
        self.table.connection_lost(runtime, since);
    }
}

/// The work of a replica for the shards that it holds.
struct ReplicaWork {
    shared: SharedState,
    at: usize,
    table: RuntimeTable,
    warm: WarmCaches,
}

impl Consumer for ReplicaWork {
    async fn acquire(&mut self, unit: Unit, instance: Instance, fence: WriteFence) -> Vec<KymaKey> {
        self.shared.acquired(self.at, unit, instance, &fence);
        let Unit::Shard(shard) = unit else { return Vec::new() };
        self.table.acquire(shard, instance, &fence, Instant::now());
        let runtimes = (0..RUNTIMES).filter(|runtime| unit_of(*runtime) == unit);
        let placed = runtimes.inspect(|runtime| shared_state::place(&self.table, *runtime)).map(kyma).collect();
        self.table.set_shard_synced(shard);
        placed
    }

    fn enqueue(&mut self, acquired: &[KymaKey]) {
        acquired.iter().for_each(|kyma| self.table.verify_within(kyma, SPREAD));
    }

    fn drain(&self, unit: Unit) -> BoxFuture<'static, ()> {
        let table = self.table.clone();
        async move {
            if let Unit::Shard(shard) = unit {
                table.drain(shard).await;
            }
        }
        .boxed()
    }

    fn release(&mut self, unit: Unit) {
        if let Unit::Shard(shard) = unit {
            let mut warm = self.warm.lock();
            for kyma in self.table.release(shard) {
                warm.remove(&kyma);
            }
        }
    }
}

/// Reconciles: reads a runtime, and writes what it has read.
struct Worker {
    shared: SharedState,
    at: usize,
    table: RuntimeTable,
    warm: WarmCaches,
    rng: Rng,
}

impl Worker {
    async fn run(mut self) {
        loop {
            let job = self.table.next().await;
            let outcome = tokio::select! {
                biased;
                () = job.start.cancellation.cancelled() => None,
                outcome = self.reconcile(&job) => outcome,
            };
            // A job that is dropped without an outcome counts as failed.
            let Some(outcome) = outcome else { continue };
            if outcome.ended.contains(Work::Catalog) && job.fence().is_open() {
                self.warm.lock().insert(job.key.clone());
            }
            self.table.done(job, outcome);
        }
    }

    async fn reconcile(&mut self, job: &Job) -> Option<ReconcileOutcome> {
        let is_cold = !self.warm.lock().contains(&job.key);
        let input = self.shared.read_runtime(job, is_cold);
        sleep(self.rng.millis(500)).await;
        let works = job.queued.work;
        let failed = ReconcileOutcome::failed(works, ErrorClass::Ours);
        match self.rng.below(16) {
            0 => return None,
            1 => return Some(failed),
            _ => {}
        }
        // As the clients check it, right before a write leaves.
        if job.fence().check(&Method::PATCH).is_err() {
            return Some(failed);
        }
        let max = if self.rng.below(4) == 0 { MAX_WRITE_LATENCY } else { TICK * 4 };
        let latency = self.rng.millis(u64::try_from(max.as_millis()).unwrap());
        let response = self.shared.write(self.at, job, input, latency);
        match timeout(REQUEST_DEADLINE, response).await {
            Ok(Ok(())) if self.rng.below(16) > 0 => Some(ReconcileOutcome::ended(works)),
            // The response is lost.
            _ => Some(failed),
        }
    }
}
