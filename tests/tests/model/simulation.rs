//! Agent's link and core, receiver's gateway and hub, real TLS and signatures: over a simulated network that is cut, loses, delays, and
//! between hosts that crash. Everything comes to rest, and rest is the truth.

mod stage;
mod wire;

use std::{
    hash::{BuildHasher as _, RandomState},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use arc_swap::ArcSwap;
use tidewatch_agent::{
    canary::Sightings,
    link::{Dial, Link, Parts},
    telemetry::Readiness,
};
use tidewatch_receiver::{
    forward::Outcome,
    gateway::{Gateway, Settings},
    hub::Hub,
};
use tokio::{
    sync::watch,
    time::{Duration, sleep},
};
use tokio_util::sync::CancellationToken;
use turmoil::{Builder, Sim, net::TcpListener};

use crate::{
    cluster::{Deed, NAMES, RESOURCES, WATCHES},
    receiver::REQUEST_DEADLINE,
    schedules::from_environment,
};
use stage::{PORT, RECEIVER, Stage};
use wire::{Connector, Port};

/// Seeds of one run, unless `TIDEWATCH_SEEDS` names another number.
const SEEDS: u64 = 20;
const AGENT: &str = "agent";
const RECEIVERS: &[&str] = &["receiver-0", "receiver-1"];
/// Simulated time in which things fail, and in which all must have come to rest afterwards: what a manager refused waits for minutes.
const FAULTS: Duration = Duration::from_secs(180);
const REST: Duration = Duration::from_secs(600);
/// Longer than a predecessor's last request may take.
const LASTING: Duration = REQUEST_DEADLINE.saturating_add(Duration::from_secs(5));
/// Of a message, at most, while nothing is wrong with the network.
const LATENCY: Duration = Duration::from_millis(50);
const TICK: Duration = Duration::from_millis(10);

/// Splitmix64: each seed is a simulation.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % sides
    }

    fn at(&mut self, length: usize) -> usize {
        usize::try_from(self.roll(length as u64)).unwrap()
    }

    fn millis(&mut self, most: u64) -> Duration {
        Duration::from_millis(1 + self.roll(most))
    }
}

/// A receiver: gateway, hub, and a worker that looks and records.
async fn receiver(stage: Stage, host: usize, mut dice: Dice) -> turmoil::Result {
    let hub = stage.receiver_starts(host);
    let synced = (dice.millis(3_000), hub.clone());
    tokio::spawn(async move {
        sleep(synced.0).await;
        synced.1.set_synced();
    });
    tokio::spawn(forward(stage.clone(), hub.clone(), Dice(dice.roll(u64::MAX))));
    tokio::spawn(work(stage.clone(), hub.clone(), dice));
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).await?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let identities = stage.identities();
    let authority = format!("{RECEIVER}:{PORT}").parse().unwrap();
    let settings = Settings::new(address, vec![authority], identities.domain.clone());
    let tls = Arc::new(ArcSwap::new(identities.server.config()));
    let gateway = Gateway::over(Port(listener), address, settings, tls, hub, stage.gateway_metrics());
    gateway.run(CancellationToken::new()).await;
    Ok(())
}

async fn work(stage: Stage, hub: Hub, mut dice: Dice) {
    let mut forgetful = true;
    loop {
        let job = hub.next().await;
        let reading = stage.read(&job, forgetful);
        sleep(dice.millis(500)).await;
        if dice.roll(8) == 0 {
            // Dropped without an outcome: it failed.
            continue;
        }
        let outcome = stage.record(&job, &reading);
        forgetful &= !outcome.ended.contains(tidewatch_shared::plan::Work::Catalog);
        hub.done(job, outcome);
    }
}

/// Another manager, which does not always answer, and whose mesh refuses much while things fail.
async fn forward(stage: Stage, hub: Hub, mut dice: Dice) {
    loop {
        let handing = stage.hand(hub.next_delivery().await);
        sleep(dice.millis(500)).await;
        let refuses = turmoil::sim_elapsed().is_some_and(|elapsed| elapsed < FAULTS);
        let outcome = match dice.roll(8) {
            0 | 1 => Outcome::Failed(None),
            2..5 if refuses => Outcome::Refused(403),
            _ => {
                stage.handed(&handing);
                Outcome::Delivered
            }
        };
        hub.forwarded(handing.delivery(), outcome);
    }
}

/// An agent: its link, and its core fed by the watches of a cluster.
async fn agent(stage: Stage, mut dice: Dice) -> turmoil::Result {
    let core = stage.agent_starts();
    let (_keep, credentials) = watch::channel(Some(stage.identities().agent.clone()));
    let parts = Parts {
        dial: Dial::over(Connector { hosts: RECEIVERS, current: stage.current() }),
        core,
        credentials,
        sightings: Sightings::default(),
        interval: watch::Sender::new(Duration::from_secs(2)),
        pending: Readiness::default().guard("receiver"),
        metrics: stage.agent_metrics(),
    };
    tokio::spawn(Link::new(parts).run(CancellationToken::new()));
    loop {
        sleep(dice.millis(200)).await;
        (0..WATCHES.len()).for_each(|watch| stage.agent_steps(watch));
    }
}

/// One thing that goes wrong, or right again.
fn mishap(sim: &mut Sim<'_>, stage: &Stage, dice: &mut Dice) {
    let host = dice.at(RECEIVERS.len());
    let receiver = RECEIVERS[host];
    match dice.roll(12) {
        0 => sim.partition(AGENT, receiver),
        1 => sim.partition_oneway(AGENT, receiver),
        2 => sim.partition_oneway(receiver, AGENT),
        5 => sim.set_link_fail_rate(AGENT, receiver, [0.0, 0.01, 0.03][dice.at(3)]),
        6 => sim.set_link_max_message_latency(AGENT, receiver, dice.millis(4_000)),
        7 => stage.alternate(),
        8 => {
            stage.receiver_dies(host);
            sim.crash(receiver);
            sim.bounce(receiver);
        }
        9 => {
            stage.agent_dies();
            sim.crash(AGENT);
            sim.bounce(AGENT);
        }
        _ => heal(sim),
    }
}

fn heal(sim: &mut Sim<'_>) {
    for receiver in RECEIVERS {
        sim.set_link_fail_rate(AGENT, *receiver, 0.0);
        sim.set_link_max_message_latency(AGENT, *receiver, LATENCY);
        // Each direction by itself too: a cut of one is not healed by healing both.
        sim.repair_oneway(AGENT, *receiver);
        sim.repair_oneway(*receiver, AGENT);
        sim.repair(AGENT, *receiver);
    }
}

fn act(stage: &Stage, dice: &mut Dice) {
    const DEEDS: [Deed; 7] =
        [Deed::Spec, Deed::TakeBack, Deed::Metadata, Deed::Status, Deed::Label, Deed::Delete, Deed::Recreate];
    let name = u8::try_from(dice.roll(NAMES.into())).unwrap();
    stage.act(dice.at(RESOURCES.len()), name, DEEDS[dice.at(DEEDS.len())]);
}

fn simulate(seed: u64) {
    let (stage, mut dice) = (Stage::new(RECEIVERS.len()), Dice(seed));
    let mut sim = Builder::new()
        .rng_seed(seed)
        .tick_duration(TICK)
        .simulation_duration(FAULTS + REST + REST)
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(LATENCY)
        .build();
    for (host, name) in RECEIVERS.iter().enumerate() {
        let stage = stage.clone();
        sim.host(*name, move || receiver(stage.clone(), host, Dice(seed + host as u64)));
    }
    sim.host(AGENT, {
        let stage = stage.clone();
        move || agent(stage.clone(), Dice(seed))
    });
    while sim.elapsed() < FAULTS {
        sim.step().unwrap();
        if dice.roll(20) == 0 {
            act(&stage, &mut dice);
        }
        if dice.roll(200) == 0 {
            stage.break_off(dice.at(WATCHES.len()));
        }
        if dice.roll(300) == 0 {
            mishap(&mut sim, &stage, &mut dice);
        }
    }
    heal(&mut sim);
    // Rest lasts: heartbeats go on, and what a start looks at once more has been looked at.
    let (until, mut since, mut unrest) = (sim.elapsed() + REST, sim.elapsed(), None);
    while sim.elapsed() < until && sim.elapsed() < since + LASTING {
        sim.step().unwrap();
        unrest = stage.unrest();
        if unrest.is_some() {
            since = sim.elapsed();
        }
    }
    let lasted = sim.elapsed() >= since + LASTING;
    assert!(lasted, "TIDEWATCH_SEED={seed}: no lasting rest within {REST:?}: {unrest:?}");
    assert_eq!(stage.counter("fleet_digest_differences_total"), 0, "TIDEWATCH_SEED={seed}: a false alarm");
    assert!(stage.counter("fleet_events_total") > 10, "TIDEWATCH_SEED={seed}: nothing was simulated");
}

#[test]
fn link_and_gateway_bring_everything_to_rest_over_a_bad_network() {
    if let Some(seed) = from_environment("TIDEWATCH_SEED") {
        return simulate(seed);
    }
    let first = RandomState::new().hash_one(SEEDS);
    let seeds = from_environment("TIDEWATCH_SEEDS").unwrap_or(SEEDS);
    (0..seeds).for_each(|at| simulate(first.wrapping_add(at) >> 1));
}
