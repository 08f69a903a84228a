//! Memory of index and outbox at their limits, counted by the allocator. In a binary of its own, because other tests would
//! allocate at the same time.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic, in its helpers too")]

use std::{alloc::System, num::NonZeroI64};

use clap::Parser as _;
use serde_json::json;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tidewatch_agent::{
    config::Config,
    core::{Core, ObjectState, Version, WatchId},
    telemetry::Metrics,
};
use tidewatch_api::{identity::Instance, names::AGENT_MEMORY_MIB, plan::Plan};
use tidewatch_contract::exchange::EventsResponse;
use tokio::time::Instant;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const WATCHES: usize = 8;
/// Objects of each watch, of which not all fit.
const OBJECTS: usize = 16_000;
/// Objects per call, those of a page.
const PAGE: usize = 50;

/// A core with the default limits, and its watches.
fn core() -> (Core, Config, Vec<WatchId>) {
    let config = Config::try_parse_from(["agent", "--token-file", "/token"]).unwrap();
    let core = config.core("r-1".parse().unwrap(), Metrics::default());
    let watch = |n: usize| {
        let work = if n.is_multiple_of(2) { "kyma" } else { "forward" };
        json!({"name": format!("w{n}"), "group": "g", "version": "v1", "resource": "things", "field": "status",
            "manager": "m", "work": [work]})
    };
    let watches: Vec<_> = (0..WATCHES).map(watch).collect();
    let plan = Plan::parse(&json!({"revision": "1", "watches": watches}).to_string()).unwrap();
    let ids = core.follow(&plan).started.iter().map(|started| started.id).collect();
    (core, config, ids)
}

/// The longest namespace and the longest name that Kubernetes allows for nearly all kinds.
fn key(n: usize) -> String {
    format!("{}/{n:0>253}", "n".repeat(63))
}

fn seen(version: u64) -> ObjectState {
    let uid = "0a1b2c3d-0000-4000-8000-00000000000f".into();
    ObjectState { uid, version: Version::Number(version), generation: NonZeroI64::new(1), metadata: 0 }
}

fn list(core: &Core, id: WatchId, numbers: impl Iterator<Item = usize>) {
    core.list_begun(id);
    let numbers: Vec<_> = numbers.collect();
    for page in numbers.chunks(PAGE) {
        let page = page.iter().map(|n| (key(*n).into(), seen(1))).collect();
        if !core.listed(id, page, Instant::now()) {
            break;
        }
    }
    core.list_complete(id, Instant::now());
}

/// Sends what waits; the receiver accepts it and settles nothing.
fn send(core: &Core) {
    let mut accepted = 0;
    while let Some(batch) = core.batch(Instant::now()) {
        accepted += batch.events as u64;
        let response = EventsResponse {
            instance: Instance::new(1),
            accepted,
            since: 1,
            settled: [].into(),
            refused: Vec::new(),
            heartbeat_seconds: 30,
        };
        core.apply_response(Instant::now(), batch.epoch, &response);
    }
}

/// Memory for everything else: code, stacks, connections, pages of lists and lines of watches.
const REST: usize = 40 << 20;
/// Memory of a core without objects and events.
const EMPTY: usize = 256 << 10;

#[test]
fn index_and_outbox_stay_within_their_budget_and_the_container() {
    let region = Region::new(ALLOCATOR);
    let (core, config, ids) = core();
    let budget = usize::try_from(config.max_state_mib).unwrap() << 20;
    assert!(budget + REST <= AGENT_MEMORY_MIB as usize * (1 << 20), "a container has {AGENT_MEMORY_MIB} MiB");
    let mut most = 0;
    let mut measure = |what: &str, core: &Core| {
        let stats = region.change();
        let held = stats.bytes_allocated - stats.bytes_deallocated;
        let estimate = core.figures().state_bytes;
        most = most.max(estimate);
        assert!(held <= estimate + EMPTY, "{what}: {held} bytes of an estimate of {estimate}");
        assert!(estimate <= budget, "{what}: {estimate} bytes");
    };
    let change_all = |version| {
        for id in &ids {
            (0..OBJECTS).for_each(|n| core.present(*id, &key(n), seen(version), Instant::now()));
        }
    };
    measure("empty", &core);
    for id in &ids {
        list(&core, *id, 0..OBJECTS);
    }
    measure("listed", &core);
    assert!(core.figures().coarse > 0, "the limit is reached");
    change_all(2);
    measure("changed", &core);
    send(&core);
    measure("sent", &core);
    change_all(3);
    measure("changed again", &core);
    for id in &ids {
        list(&core, *id, (0..OBJECTS).filter(|n| n.is_multiple_of(3)));
        measure("listed with a third of the objects", &core);
    }
    for id in &ids {
        (0..OBJECTS).for_each(|n| core.gone(*id, &key(n), seen(4), Instant::now()));
    }
    measure("deleted", &core);
    assert!(most > budget / 2, "{most} bytes: the limit is reached");
}
