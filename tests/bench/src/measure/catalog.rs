//! One channel of one module moves in KCP: the time until every runtime has it, the requests that this takes, and the
//! requests while nothing changes.
//!
//! * Before each move the receiver has closed its connections to the runtimes, as after any quiet minute; the TLS
//!   handshakes are part of the measurement. The time begins with the write in KCP, and is exact to a tenth of a
//!   second.
//! * The floor is one bare apply of one release meta to every runtime, with the same clients and concurrency, in the
//!   same run.
//! * lifecycle-manager's way is measured beside it: every object of the catalog is applied to every runtime, with the same
//!   clients and concurrency. It is the least cost of that way: no list, no Kyma, and no deletion is included, and
//!   lifecycle-manager works on fewer runtimes at a time.
//! * `--catalog-sync-rate` is set to its maximum, so that it does not limit the measurement. At its default the
//!   runtimes are enqueued over a known time; the bar is for the longer of the two.
//! * No Kyma selects a module, so no reconcile of a Kyma and no Manifest is included: for Kymas that follow the channel
//!   these come on top, within `--module-upgrade-rollout-max-delay`.
//!
//! KCP's API server, the runtimes' and the agents share the machine with the receiver. The agents prove their paths, so
//! no runtime is polled. Real agents report the receiver's own writes, which it recognises as its own; the simulated
//! ones do not: their objects are only numbers.

use std::{
    collections::{BTreeMap, BTreeSet},
    process,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kube::{Api, api::ListParams};
use serde_json::json;
use tidewatch_api::{ModuleReleaseMeta, ModuleTemplate, names::field_manager};
use tidewatch_kit::variant::VariantName as _;
use tidewatch_select::catalog::{
    desired::{ContentHash, DesiredObject, Kind, ObjectId},
    rollout::DEFAULT_SYNC_RATE,
    snapshot::Snapshot,
};
use tidewatch_testing::{
    fake::{Calls, FakeCluster},
    landscape::catalog::release_meta,
    load::until_within,
    progress::{self, Step},
};
use tokio::time::sleep;

use super::{
    Figure, Network, api_calls,
    bare::{self, BareClients, PassCost},
    figure::{cpu_of, line, mebibytes, median},
    fleet_setup::{FleetSetup, MODULE, WAIT_LIMIT, metric},
};

const TARGET: f64 = 5_000.0;
/// The maximum of `--catalog-sync-rate`, in runtimes per second.
const RATE: u32 = 10_000;
/// The channel that moves, and the versions between which it moves. Both always have a template, so no template
/// changes.
const CHANNEL: &str = "regular";
pub(super) const VERSIONS: [&str; 2] = ["1.0.0", "1.1.0"];
/// Name of the bare client's own release meta in each runtime, and its field manager.
const FLOOR: &str = "floor";
/// Resources of a catalog.
const RESOURCES: [&str; 2] = ["moduletemplates", "modulereleasemetas"];

/// Extent of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Numbers of runtimes, some rounds each, ascending; at least two, for the projection
    #[arg(long, value_delimiter = ',', default_values_t = [500, 1_000, 2_000])]
    pub runtimes: Vec<usize>,
    /// Modules of the catalog, each with two templates and a release meta
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub modules: u32,
    /// Moves with each number of runtimes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Seconds without changes at the end
    #[arg(long, default_value_t = 300)]
    pub idle_seconds: u32,
    #[command(flatten)]
    pub(super) network: Network,
}

/// One move with so many runtimes; times in seconds.
pub(super) struct MoveSample {
    pub(super) all: f64,
    /// CPU time of the receiver until its queue is empty again.
    pub(super) cpu: f64,
    /// CPU time of this process in the same time: the runtimes' API servers, and the agents.
    pub(super) others: f64,
    /// Requests of all clients that KCP answered.
    kcp: f64,
    /// Requests to each runtime.
    pub(super) calls: Vec<Calls>,
    pub(super) floor: PassCost,
}

/// The samples of one number of runtimes.
struct Samples {
    count: f64,
    moves: Vec<MoveSample>,
    lifecycle_manager: PassCost,
    pss: f64,
    peak_rss: f64,
}

/// Runs the measurement and emits each figure. The projections are the lines through the numbers of runtimes, and never
/// less than the value of the largest.
///
/// # Errors
/// When the setup cannot be started, or a runtime does not reach its desired state.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    ensure!(
        settings.runtimes.is_sorted() && settings.runtimes.len() > 1,
        "at least two ascending numbers of runtimes are required"
    );
    let rate = RATE.to_string();
    let concurrency = bare::RUNTIMES.to_string();
    // No poll, and verifications so far apart that hardly one falls into the measurement.
    let mut setup = FleetSetup::start(
        settings.network,
        &[
            "--catalog-sync-rate",
            &rate,
            "--concurrency",
            &concurrency,
            "--fallback-poll-seconds",
            "86400",
            "--verification-seconds",
            "2592000",
        ],
    )
    .await?;
    for number in 1..settings.modules {
        setup.landscape.write_module(&module(number), VERSIONS[0], VERSIONS[1]).await?;
    }
    emit(&Figure::new("catalog_sync_rate", RATE.into(), "1/s"));
    emit(&Figure::new("catalog_modules", settings.modules.into(), "modules"));
    // Index of the channel's current version; the setup wrote the first.
    let mut at = 0;
    let mut all = Vec::new();
    for runtimes in &settings.runtimes {
        setup.grow(*runtimes).await?;
        arrived(&setup, VERSIONS[at]).await?;
        let mut moves = Vec::new();
        for number in 1..=settings.rounds {
            at = 1 - at;
            let step = Step::begin(format!("move {number} of {} with {runtimes} runtimes", settings.rounds));
            moves.push(one_move(&setup, VERSIONS[at]).await?);
            step.done();
        }
        let memory = setup.receiver_memory().await?;
        let step = Step::begin(format!("applying the catalog lifecycle-manager's way to {runtimes} runtimes"));
        let lifecycle_manager = lifecycle_manager(&setup, VERSIONS[at], VERSIONS[1 - at]).await?;
        step.done();
        let count = f64::from(u32::try_from(*runtimes)?);
        let pss = mebibytes(memory.pss_kib);
        let peak_rss = mebibytes(memory.peak_rss_kib);
        let seen = Samples { count, moves, lifecycle_manager, pss, peak_rss };
        seen.emit(emit);
        all.push(seen);
    }
    project(&all, emit);
    idle(&setup, settings.idle_seconds, emit).await
}

impl Samples {
    fn median(&self, of: fn(&MoveSample) -> f64) -> f64 {
        median(self.moves.iter().map(of).collect())
    }

    fn all(&self) -> f64 {
        self.median(|moved| moved.all)
    }

    fn cpu(&self) -> f64 {
        self.median(|moved| moved.cpu)
    }

    fn emit(&self, emit: &mut impl FnMut(&Figure)) {
        let floor = self.median(|moved| moved.floor.seconds);
        let floor_cpu = self.median(|moved| moved.floor.cpu);
        emit(&Figure::new("catalog_runtimes", self.count, "runtimes"));
        emit(&Figure::new("catalog_moved", self.all(), "s").with_floor(floor));
        emit(&Figure::new("catalog_receiver_cpu", self.cpu(), "s").with_floor(floor_cpu));
        for (figure, value, unit) in [
            ("catalog_receiver_cpu_per_runtime", self.cpu() * 1e3 / self.count, "ms"),
            ("catalog_agents_and_runtimes_cpu", self.median(|moved| moved.others), "s"),
            ("catalog_kcp_calls_per_runtime", self.median(|moved| moved.kcp) / self.count, "calls"),
            ("catalog_receiver_pss", self.pss, "MiB"),
            ("catalog_receiver_peak_rss", self.peak_rss, "MiB"),
        ] {
            emit(&Figure::new(figure, value, unit));
        }
        self.emit_calls(emit);
        let PassCost { seconds, cpu } = self.lifecycle_manager;
        emit(&Figure::new("catalog_lifecycle_manager_way", seconds, "s"));
        emit(&Figure::new("catalog_lifecycle_manager_way_clients_cpu", cpu, "s"));
        emit(&Figure::new("catalog_lifecycle_manager_way_over_moved", seconds / self.all(), "times"));
        emit(&Figure::new("catalog_lifecycle_manager_way_cpu_over_receiver_cpu", cpu / self.cpu(), "times"));
    }

    /// Requests to each runtime over all moves.
    fn emit_calls(&self, emit: &mut impl FnMut(&Figure)) {
        let calls: Vec<_> = self.moves.iter().flat_map(|moved| &moved.calls).collect();
        let sum = Calls::sum(calls.iter().copied());
        progress::print_line(&format!("requests to the runtimes in {} moves: {sum}", self.moves.len()));
        let runtimes = number(calls.len() as u64).max(1.0);
        let writes = |calls: &Calls, resource| {
            ["create", "update", "patch", "delete"].into_iter().map(|verb| calls.of(verb, resource)).sum::<u64>()
        };
        let objects: u64 = RESOURCES.iter().map(|resource| writes(&sum, resource)).sum();
        let inventories = writes(&sum, "configmaps");
        let most = calls.iter().map(|calls| patches(calls)).max().unwrap_or_default();
        let fewest = calls.iter().map(|calls| patches(calls)).min().unwrap_or_default();
        emit(&Figure::new("catalog_object_patches_per_runtime_most", number(most), "patches").at_most(1.0));
        emit(&Figure::new("catalog_object_patches_per_runtime_fewest", number(fewest), "patches").at_least(1.0));
        let others = number(objects - patches(&sum)) / runtimes;
        emit(&Figure::new("catalog_other_object_writes_per_runtime", others, "calls").at_most(0.0));
        for (figure, count) in [
            ("catalog_template_patches_per_runtime", sum.of("patch", Kind::Template.as_str())),
            ("catalog_release_meta_patches_per_runtime", sum.of("patch", Kind::ReleaseMeta.as_str())),
            ("catalog_inventory_writes_per_runtime", inventories),
            ("catalog_other_calls_per_runtime", sum.total() - objects - inventories),
        ] {
            emit(&Figure::new(figure, number(count) / runtimes, "calls"));
        }
    }
}

fn project(all: &[Samples], emit: &mut impl FnMut(&Figure)) {
    let at_full = |of: fn(&Samples) -> f64| {
        let points: Vec<_> = all.iter().map(|seen| (seen.count, of(seen))).collect();
        // Noise may give the line a negative slope.
        line(&points, TARGET).0.max(points.last().map_or(0.0, |(_, value)| *value))
    };
    let floor = at_full(|seen| seen.median(|moved| moved.floor.seconds));
    let moved = at_full(Samples::all);
    emit(&Figure::new("catalog_moved_at_5000", moved, "s").with_floor(floor));
    let paced = TARGET / f64::from(DEFAULT_SYNC_RATE);
    emit(&Figure::new("catalog_moved_at_5000_at_the_default_rate", moved.max(paced), "s").at_most(60.0));
    emit(&Figure::new("catalog_receiver_cpu_at_5000", at_full(Samples::cpu), "s"));
    emit(&Figure::new("catalog_receiver_pss_at_5000", at_full(|seen| seen.pss), "MiB"));
    emit(&Figure::new("catalog_lifecycle_manager_way_at_5000", at_full(|seen| seen.lifecycle_manager.seconds), "s"));
}

/// Moves the channel in KCP to that version, once the receiver has closed its connections to the runtimes; measures the
/// floor afterwards.
pub(super) async fn one_move(setup: &FleetSetup, to: &'static str) -> Result<MoveSample> {
    let FleetSetup { fleet, landscape, .. } = setup;
    setup.disconnected().await?;
    let calls = calls(setup);
    let kcp = api_calls::answered(landscape.kcp()).await?;
    let cpu = setup.receiver_cpu().await?;
    let others = cpu_of(process::id())?;
    let begun = Instant::now();
    landscape.write_channels(MODULE, &channels(to)).await?;
    arrived(setup, to).await?;
    let all = begun.elapsed().as_secs_f64();
    // Writes of the reconcile after the object, above all the inventory, are part of its cost.
    fleet.at_rest(WAIT_LIMIT).await?;
    let cpu = setup.receiver_cpu().await? - cpu;
    let others = cpu_of(process::id())? - others;
    let kcp = api_calls::answered(landscape.kcp()).await? - kcp;
    let calls = self::calls(setup).into_iter().zip(&calls).map(|(now, before)| now.since(before)).collect();
    let floor = BareClients::new(fleet)?.apply(FLOOR, vec![vec![floor_object(to)]]).await?;
    Ok(MoveSample { all, cpu, others, kcp, calls, floor })
}

/// Waits until the channel points to that version in every runtime.
async fn arrived(setup: &FleetSetup, version: &str) -> Result<()> {
    let members = setup.fleet.members();
    let mut have = 0;
    let key = format!("operator.kyma-project.io/{}/kyma-system/{MODULE}", Kind::ReleaseMeta.as_str());
    until_within("the moved channel in every runtime", WAIT_LIMIT, async || {
        // A runtime that has it keeps it, so each is checked little more than once.
        have += members[have..].iter().take_while(|member| points(member.cluster(), &key, version)).count();
        ensure!(have == members.len(), "only {have} of {} runtimes have it", members.len());
        Ok(Some(()))
    })
    .await
}

fn points(cluster: &FakeCluster, key: &str, version: &str) -> bool {
    let meta = cluster.object(key).unwrap_or_default();
    let channels = meta["spec"]["channels"].as_array();
    channels.is_some_and(|channels| channels.contains(&json!({"channel": CHANNEL, "version": version})))
}

fn channels(version: &'static str) -> [(&'static str, &'static str); 2] {
    [(CHANNEL, version), ("fast", VERSIONS[1])]
}

/// A release meta of the bare client, with content that differs after each move.
fn floor_object(version: &'static str) -> Arc<DesiredObject> {
    let body = release_meta(FLOOR, &channels(version));
    Arc::new(DesiredObject {
        id: ObjectId::new(Kind::ReleaseMeta, FLOOR),
        body,
        hash: ContentHash::UNKNOWN,
        requires: Vec::new(),
    })
}

/// Applies the whole catalog, with the channel moved, to every runtime; templates first. Moves the channel back
/// afterwards, so the receiver finds the state that it left.
async fn lifecycle_manager(setup: &FleetSetup, from: &'static str, to: &'static str) -> Result<PassCost> {
    let objects = objects(setup).await?;
    let is_moved = |object: &DesiredObject| object.id.kind == Kind::ReleaseMeta && &*object.id.name == MODULE;
    let before = objects.iter().find(|object| is_moved(object)).context("no release meta of the moved module")?.clone();
    let mut after = DesiredObject::clone(&before);
    after.body["spec"]["channels"] = release_meta(MODULE, &channels(to))["spec"]["channels"].take();
    let after = Arc::new(after);
    let objects = objects.into_iter().map(|object| if is_moved(&object) { after.clone() } else { object });
    let (templates, metas): (Vec<_>, Vec<_>) = objects.partition(|object| object.id.kind == Kind::Template);
    let passed = BareClients::new(&setup.fleet)?.apply(field_manager::CATALOG_SYNC, vec![templates, metas]).await?;
    arrived(setup, to).await?;
    BareClients::new(&setup.fleet)?.apply(field_manager::CATALOG_SYNC, vec![vec![before]]).await?;
    arrived(setup, from).await?;
    Ok(passed)
}

/// The catalog of a Kyma without labels, as the receiver computes it from KCP.
async fn objects(setup: &FleetSetup) -> Result<Vec<Arc<DesiredObject>>> {
    let operator = setup.landscape.operator();
    let namespace = setup.landscape.namespace();
    let all = ListParams::default();
    let templates = Api::<ModuleTemplate>::namespaced(operator.clone(), namespace).list(&all).await?;
    let metas = Api::<ModuleReleaseMeta>::namespaced(operator, namespace).list(&all).await?;
    let templates = templates.items.into_iter().map(Arc::new);
    let metas = metas.items.into_iter().map(Arc::new);
    let snapshot = Snapshot::new(templates, metas, &BTreeSet::new(), BTreeSet::new());
    Ok(snapshot.desired(&snapshot.class(&BTreeMap::new())).objects().cloned().collect())
}

/// Counts the requests to the runtimes while nothing changes. As many runtimes as were verified in this time are left
/// out, the busiest first; all others must receive no request.
async fn idle(setup: &FleetSetup, seconds: u32, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    const VERIFIED: &str = r#"tidewatch_path_polls_total{reason="verification"}"#;
    setup.proven(setup.fleet.members().len()).await?;
    setup.fleet.at_rest(WAIT_LIMIT).await?;
    let before = calls(setup);
    let verified = metric(&setup.metrics().await?, VERIFIED);
    let heartbeats = setup.fleet.counters().heartbeats();
    let step = Step::begin(format!("no changes for {seconds} s"));
    sleep(Duration::from_secs(seconds.into())).await;
    step.done();
    let mut calls: Vec<_> = calls(setup).into_iter().zip(&before).map(|(now, before)| now.since(before)).collect();
    let verified = metric(&setup.metrics().await?, VERIFIED) - verified;
    let heartbeats = setup.fleet.counters().heartbeats() - heartbeats;
    ensure!(heartbeats > 0 || seconds < 60, "no agent sends heartbeats");
    calls.sort_by_key(|calls| std::cmp::Reverse(calls.total()));
    progress::print_line(&format!("requests to the runtimes without changes: {}", Calls::sum(&calls)));
    let unasked = calls.iter().zip(1u32..).filter(|(_, place)| f64::from(*place) > verified);
    let outside: u64 = unasked.map(|(calls, _)| calls.total()).sum();
    emit(&Figure::new("catalog_idle_seconds", seconds.into(), "s"));
    emit(&Figure::new("catalog_idle_verifications", verified, "runtimes"));
    emit(&Figure::new("catalog_idle_calls", number(outside), "calls").at_most(0.0));
    Ok(())
}

/// Patches of a catalog's objects.
pub(super) fn patches(calls: &Calls) -> u64 {
    RESOURCES.iter().map(|resource| calls.of("patch", resource)).sum()
}

/// Requests to each runtime so far.
fn calls(setup: &FleetSetup) -> Vec<Calls> {
    setup.fleet.members().iter().map(|member| member.cluster().calls()).collect()
}

fn number(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// The name of the nth module: the CRD allows letters only.
fn module(number: u32) -> String {
    let letter = |power: u32| char::from(b'a' + u8::try_from(number / 26_u32.pow(power) % 26).unwrap_or(0));
    format!("module-{}{}{}", letter(2), letter(1), letter(0))
}
