//! Replicas behind load balancers, and a simulated fleet whose agents connect to these.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use tidewatch_api::{leases::Unit, shard::ShardCount};
use tidewatch_testing::{
    balancer::Balancer,
    bed::TestBed,
    landscape::{DEADLINE, Landscape, Options, Replica, until},
    load::{EnrolmentEndpoint, FleetMember, SimulatedFleet, until_within},
    progress::Step,
};

use super::{
    super::{
        figure::cpu_of,
        fleet_setup::{MODULE, WAIT_LIMIT, options},
    },
    Settings,
};

/// The processes and the fleet.
pub(super) struct ReplicaSetup {
    pub(super) fleet: SimulatedFleet,
    pub(super) running: BTreeMap<String, Replica>,
    events: Balancer,
    enrolments: Balancer,
    endpoint: EnrolmentEndpoint,
    pub(super) landscape: Arc<Landscape>,
    _bed: TestBed,
}

impl ReplicaSetup {
    /// Starts replicas that share all shards equally, and registers runtimes whose agents have certificates and do not run yet.
    pub(super) async fn start(replicas: &[&str], agents: u32, settings: &Settings) -> Result<Self> {
        let bed = TestBed::start().await?;
        let options =
            Options { agent_image: String::new(), lease_seconds: settings.lease, ..options(settings.network) };
        let landscape = Arc::new(Landscape::prepare_issuing(bed.kcp().await?, "kcp-system", options).await?);
        landscape.write_module(MODULE, "1.0.0", "1.1.0").await?;
        // In place of the receiver that listens there in other landscapes.
        let events = Balancer::start(landscape.event_port()).await?;
        let enrolments = Balancer::start(landscape.enrolment_port().context("an enrolment port")?).await?;
        let enrolment = landscape.agents_enrolment().context("an enrolment port")?;
        let endpoint = EnrolmentEndpoint::new(enrolment, landscape.ca().trust_bundle().store()?)?;
        let fleet = SimulatedFleet::new(landscape.clone()).await?;
        let running = BTreeMap::new();
        let mut this = Self { fleet, running, events, enrolments, endpoint, landscape, _bed: bed };
        for replica in replicas {
            this.launch(replica).await?;
        }
        this.are_ready().await?;
        this.share_equally().await?;
        let step = Step::begin(format!("registering {agents} runtimes"));
        this.fleet.grow(usize::try_from(agents)?).await?;
        this.fleet.served(WAIT_LIMIT).await?;
        this.fleet.certify(&this.endpoint).await?;
        step.done();
        Ok(this)
    }

    /// Starts a replica, which gets connections at once.
    pub(super) async fn launch(&mut self, name: &str) -> Result<()> {
        let replica = self.landscape.start_replica(name).await?;
        self.running.insert(name.to_owned(), replica);
        self.balance();
        Ok(())
    }

    /// Takes a replica out of the load balancers.
    pub(super) fn remove(&mut self, name: &str) -> Result<Replica> {
        let replica = self.running.remove(name).with_context(|| format!("the replica {name} does not run"))?;
        self.balance();
        Ok(replica)
    }

    fn balance(&self) {
        let targets = |of: fn(&Replica) -> Option<SocketAddr>| self.running.values().filter_map(of).collect();
        self.events.set_targets(targets(|replica| Some(replica.events)));
        self.enrolments.set_targets(targets(|replica| replica.enrolment));
    }

    pub(super) async fn are_ready(&self) -> Result<()> {
        try_join_all(self.running.values().map(|replica| replica.process.ready(DEADLINE))).await?;
        Ok(())
    }

    /// Waits until all shards and the fleet role have holders, and no replica has two more than another.
    pub(super) async fn share_equally(&self) -> Result<()> {
        until("equal shares of the replicas", async || {
            let holders = self.landscape.holders().await?;
            let of = |name: &String| holders.values().filter(|holder| *holder == name).count();
            let shares: Vec<_> = self.running.keys().map(of).collect();
            let is_fair = shares.iter().max().zip(shares.iter().min()).is_some_and(|(most, least)| most - least <= 1);
            let all = usize::from(ShardCount::default().get()) + 1;
            ensure!(is_fair && shares.iter().sum::<usize>() == all, "shares of {shares:?}");
            Ok(Some(()))
        })
        .await
    }

    /// Shards that a replica holds.
    pub(super) async fn shards_of(&self, name: &str) -> Result<BTreeSet<u16>> {
        let holders = self.landscape.holders().await?;
        let shard = |(unit, holder): (Unit, String)| match unit {
            Unit::Shard(shard) if holder == name => Some(shard.number()),
            Unit::Shard(_) | Unit::Fleet => None,
        };
        Ok(holders.into_iter().filter_map(shard).collect())
    }

    /// Waits until the agents, which run, have received that all their events are settled; returns the number of those that
    /// are not by the deadline.
    pub(super) async fn unsettled(&self, deadline: Duration) -> usize {
        let settled = until_within("all events to be settled", deadline, async || {
            ensure!(self.fleet.unsettled() == 0, "{} events are not settled", self.fleet.unsettled());
            Ok(Some(()))
        });
        if settled.await.is_ok() { 0 } else { self.fleet.unsettled() }
    }

    /// CPU time of all replicas so far, in seconds.
    pub(super) fn cpu(&self) -> Result<f64> {
        self.running.values().map(|replica| Ok(cpu_of(replica.process.process().pid())?)).sum()
    }
}

/// Number of the shard of a runtime.
pub(super) fn shard_of(member: &FleetMember) -> u16 {
    ShardCount::default().of_runtime(member.id()).number()
}
