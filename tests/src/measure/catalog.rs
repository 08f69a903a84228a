//! One channel of one module moves in KCP: how long until every runtime has it, what calls that takes, and what is called while nothing
//! moves.
//!
//! * Before each move the receiver has closed its connections to the runtimes, as after any quiet minute; the TLS handshakes are part of
//!   what is measured. The time begins with the write in KCP, and is exact to a tenth of a second.
//! * The floor is one bare apply of one release meta to every runtime, with the same clients, as many at a time, in the same run.
//! * Beside it, the incumbent's way: every object of the catalog is applied to every runtime, with the same clients, as many at a time.
//!   It is the least that way can cost: no list, no Kyma, and no deletion comes on top, and the incumbent works on fewer runtimes at a time.
//! * The pace of `--catalog-sync-rate` is set as high as it goes, so that it is not what is measured. At its default the runtimes are
//!   woken one after the other for a time that is known; the bar is for the longer of the two.
//! * No Kyma selects a module, so no pass of a Kyma and no Manifest is part of it: where somebody follows the channel, these come on top,
//!   within `--module-upgrade-rollout-max-delay`.
//!
//! KCP's API server, the runtimes' and the agents share the machine with the receiver. The agents prove their paths, so nobody is
//! polled. What agents tell of the receiver's own writes, which it knows as its own, these do not tell: their objects are only numbers.

use std::{
    collections::{BTreeMap, BTreeSet},
    process,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kube::{Api, api::ListParams};
use serde_json::json;
use tidewatch_receiver::catalog::{
    Flags,
    desired::{ContentHash, Desired, Kind, ObjectId},
    snapshot::Snapshot,
};
use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    names::field_manager,
};
use tokio::time::sleep;

use super::{
    Figure, api_calls,
    bare::{self, Bare, Passed},
    crowded::{Crowded, MODULE, PATIENCE, metric},
    figure::{cpu_of, line, mebibytes, median},
};
use crate::{
    fake::{Calls, FakeCluster},
    landscape::catalog::release_meta,
    load::until_within,
    progress::{self, Step},
};

const FULL: f64 = 5_000.0;
/// The most that the flag takes.
const RATE: u32 = 10_000;
/// The channel that moves, and the versions that it moves between. Neither is ever without a template, so no template moves.
const CHANNEL: &str = "regular";
const VERSIONS: [&str; 2] = ["1.0.0", "1.1.0"];
/// The bare client's own release meta in each runtime, and its field manager.
const FLOOR: &str = "floor";
/// The kinds of a catalog.
const RESOURCES: [&str; 2] = [Kind::Template.resource(), Kind::ReleaseMeta.resource()];

/// How much is measured.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// How many runtimes, some rounds each, upwards; two numbers at least, or there is nothing to project from.
    #[arg(long, value_delimiter = ',', default_values_t = [500, 1_000, 2_000])]
    pub runtimes: Vec<usize>,
    /// Modules of the catalog, each with two templates and a release meta.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub modules: u32,
    /// Moves with each number of runtimes.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// How long nothing moves at the end, in seconds.
    #[arg(long, default_value_t = 300)]
    pub idle_seconds: u32,
}

/// One move with so many runtimes; times in seconds.
struct Moved {
    all: f64,
    /// CPU of the receiver until it rests again.
    cpu: f64,
    /// CPU of this process in the same time: all the runtimes' API servers, and the agents.
    others: f64,
    /// Calls that KCP answered, of all its clients.
    kcp: f64,
    /// Of each runtime.
    calls: Vec<Calls>,
    floor: Passed,
}

/// What is seen with one number of runtimes.
struct Seen {
    count: f64,
    moves: Vec<Moved>,
    incumbent: Passed,
    pss: f64,
    peak_rss: f64,
}

/// Runs the measurement and tells each figure. The projections are the lines through the numbers of runtimes, and never less than what
/// the largest of them needed.
///
/// # Errors
/// When the setting does not stand, or a runtime never has what it shall have.
pub async fn measure(settings: &Settings, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    ensure!(
        settings.runtimes.is_sorted() && settings.runtimes.len() > 1,
        "two numbers of runtimes at least, and they must rise"
    );
    let (rate, concurrency) = (RATE.to_string(), bare::RUNTIMES.to_string());
    // No poll, and verifications so far apart that hardly one falls into the measurement.
    let mut crowded = Crowded::start(&[
        "--catalog-sync-rate",
        &rate,
        "--concurrency",
        &concurrency,
        "--fallback-poll-seconds",
        "86400",
        "--verification-seconds",
        "2592000",
    ])
    .await?;
    for number in 1..settings.modules {
        crowded.landscape.write_module(&module(number), VERSIONS[0], VERSIONS[1]).await?;
    }
    tell(&Figure::new("catalog_sync_rate", RATE.into(), "1/s"));
    tell(&Figure::new("catalog_modules", settings.modules.into(), "modules"));
    // Where the channel points, as Crowded wrote it.
    let (mut at, mut all) = (0, Vec::new());
    for runtimes in &settings.runtimes {
        crowded.grow(*runtimes).await?;
        arrived(&crowded, VERSIONS[at]).await?;
        let mut moves = Vec::new();
        for number in 1..=settings.rounds {
            at = 1 - at;
            let step = Step::begin(format!("move {number} of {} with {runtimes} runtimes", settings.rounds));
            moves.push(one_move(&crowded, VERSIONS[at]).await?);
            step.done();
        }
        let memory = crowded.receiver_memory().await?;
        let step = Step::begin(format!("the incumbent's way with {runtimes} runtimes"));
        let incumbent = incumbent(&crowded, VERSIONS[at], VERSIONS[1 - at]).await?;
        step.done();
        let count = f64::from(u32::try_from(*runtimes)?);
        let (pss, peak_rss) = (mebibytes(memory.pss_kib), mebibytes(memory.peak_rss_kib));
        let seen = Seen { count, moves, incumbent, pss, peak_rss };
        seen.tell(tell);
        all.push(seen);
    }
    project(&all, tell);
    idle(&crowded, settings.idle_seconds, tell).await
}

impl Seen {
    fn median(&self, of: fn(&Moved) -> f64) -> f64 {
        median(self.moves.iter().map(of).collect())
    }

    fn all(&self) -> f64 {
        self.median(|moved| moved.all)
    }

    fn cpu(&self) -> f64 {
        self.median(|moved| moved.cpu)
    }

    fn tell(&self, tell: &mut impl FnMut(&Figure)) {
        let floor = self.median(|moved| moved.floor.seconds);
        let floor_cpu = self.median(|moved| moved.floor.cpu);
        tell(&Figure::new("catalog_runtimes", self.count, "runtimes"));
        tell(&Figure::new("catalog_moved", self.all(), "s").beside(floor));
        tell(&Figure::new("catalog_receiver_cpu", self.cpu(), "s").beside(floor_cpu));
        for (figure, value, unit) in [
            ("catalog_receiver_cpu_per_runtime", self.cpu() * 1e3 / self.count, "ms"),
            ("catalog_agents_and_runtimes_cpu", self.median(|moved| moved.others), "s"),
            ("catalog_kcp_calls_per_runtime", self.median(|moved| moved.kcp) / self.count, "calls"),
            ("catalog_receiver_pss", self.pss, "MiB"),
            ("catalog_receiver_peak_rss", self.peak_rss, "MiB"),
        ] {
            tell(&Figure::new(figure, value, unit));
        }
        self.tell_calls(tell);
        let Passed { seconds, cpu } = self.incumbent;
        tell(&Figure::new("catalog_incumbent_way", seconds, "s"));
        tell(&Figure::new("catalog_incumbent_way_clients_cpu", cpu, "s"));
        tell(&Figure::new("catalog_incumbent_way_over_moved", seconds / self.all(), "times"));
        tell(&Figure::new("catalog_incumbent_way_cpu_over_receiver_cpu", cpu / self.cpu(), "times"));
    }

    /// What each runtime was asked, in all moves.
    fn tell_calls(&self, tell: &mut impl FnMut(&Figure)) {
        let calls: Vec<_> = self.moves.iter().flat_map(|moved| &moved.calls).collect();
        let sum = Calls::sum(calls.iter().copied());
        progress::say(&format!("calls to the runtimes in {} moves: {sum}", self.moves.len()));
        let runtimes = number(calls.len() as u64).max(1.0);
        let patches = |calls: &Calls| RESOURCES.iter().map(|resource| calls.of("patch", resource)).sum::<u64>();
        let writes = |calls: &Calls, resource| {
            ["create", "update", "patch", "delete"].into_iter().map(|verb| calls.of(verb, resource)).sum::<u64>()
        };
        let objects: u64 = RESOURCES.iter().map(|resource| writes(&sum, resource)).sum();
        let inventories = writes(&sum, "configmaps");
        let most = calls.iter().map(|calls| patches(calls)).max().unwrap_or_default();
        let fewest = calls.iter().map(|calls| patches(calls)).min().unwrap_or_default();
        tell(&Figure::new("catalog_object_patches_per_runtime_most", number(most), "patches").at_most(1.0));
        tell(&Figure::new("catalog_object_patches_per_runtime_fewest", number(fewest), "patches").at_least(1.0));
        let others = number(objects - patches(&sum)) / runtimes;
        tell(&Figure::new("catalog_other_object_writes_per_runtime", others, "calls").at_most(0.0));
        for (figure, count) in [
            ("catalog_template_patches_per_runtime", sum.of("patch", Kind::Template.resource())),
            ("catalog_release_meta_patches_per_runtime", sum.of("patch", Kind::ReleaseMeta.resource())),
            ("catalog_inventory_writes_per_runtime", inventories),
            ("catalog_other_calls_per_runtime", sum.total() - objects - inventories),
        ] {
            tell(&Figure::new(figure, number(count) / runtimes, "calls"));
        }
    }
}

fn project(all: &[Seen], tell: &mut impl FnMut(&Figure)) {
    let at_full = |of: fn(&Seen) -> f64| {
        let points: Vec<_> = all.iter().map(|seen| (seen.count, of(seen))).collect();
        // Noise may let the line fall.
        line(&points, FULL).0.max(points.last().map_or(0.0, |(_, value)| *value))
    };
    let floor = at_full(|seen| seen.median(|moved| moved.floor.seconds));
    let moved = at_full(Seen::all);
    tell(&Figure::new("catalog_moved_at_5000", moved, "s").beside(floor));
    let paced = FULL / f64::from(Flags::default().catalog_sync_rate);
    tell(&Figure::new("catalog_moved_at_5000_at_the_default_rate", moved.max(paced), "s").at_most(60.0));
    tell(&Figure::new("catalog_receiver_cpu_at_5000", at_full(Seen::cpu), "s"));
    tell(&Figure::new("catalog_receiver_pss_at_5000", at_full(|seen| seen.pss), "MiB"));
    tell(&Figure::new("catalog_incumbent_way_at_5000", at_full(|seen| seen.incumbent.seconds), "s"));
}

/// Moves the channel in KCP to that version, once the receiver has closed its connections to the runtimes; afterwards the floor.
async fn one_move(crowded: &Crowded, to: &'static str) -> Result<Moved> {
    let Crowded { crowd, landscape, .. } = crowded;
    until_within("the receiver to close its connections to the runtimes", PATIENCE, async || {
        let open = crowd.fake().connections();
        ensure!(open == 0, "{open} are open");
        Ok(Some(()))
    })
    .await?;
    let calls = calls(crowded);
    let (kcp, cpu, others) =
        (api_calls::answered(landscape.kcp()).await?, crowded.receiver_cpu().await?, cpu_of(process::id())?);
    let begun = Instant::now();
    landscape.write_channels(MODULE, &channels(to)).await?;
    arrived(crowded, to).await?;
    let all = begun.elapsed().as_secs_f64();
    // What a pass writes after the object, the inventory above all, belongs to it.
    crowd.at_rest(PATIENCE).await?;
    let (cpu, others) = (crowded.receiver_cpu().await? - cpu, cpu_of(process::id())? - others);
    let kcp = api_calls::answered(landscape.kcp()).await? - kcp;
    let calls = self::calls(crowded).into_iter().zip(&calls).map(|(now, before)| now.since(before)).collect();
    let floor = Bare::new(crowd)?.apply(FLOOR, vec![vec![floor_object(to)]]).await?;
    Ok(Moved { all, cpu, others, kcp, calls, floor })
}

/// Waits until the channel points to that version in every runtime.
async fn arrived(crowded: &Crowded, version: &str) -> Result<()> {
    let (members, mut have) = (crowded.crowd.members(), 0);
    let key = format!("operator.kyma-project.io/{}/kyma-system/{MODULE}", Kind::ReleaseMeta.resource());
    until_within("every runtime to have where the channel points", PATIENCE, async || {
        // One that has it keeps it, so each is looked at little more than once.
        have += members[have..].iter().take_while(|member| points(member.cluster(), &key, version)).count();
        ensure!(have == members.len(), "{have} of {} have it, and another does not", members.len());
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

/// A release meta of its own, which says something else after each move.
fn floor_object(version: &'static str) -> Arc<Desired> {
    let body = release_meta(FLOOR, &channels(version));
    Arc::new(Desired {
        id: ObjectId::new(Kind::ReleaseMeta, FLOOR),
        body,
        hash: ContentHash::UNKNOWN,
        needs: Vec::new(),
    })
}

/// Applies the whole catalog, with the channel moved, to every runtime; templates first. Afterwards the channel is where it was, so that
/// the receiver finds what it left.
async fn incumbent(crowded: &Crowded, from: &'static str, to: &'static str) -> Result<Passed> {
    let objects = objects(crowded).await?;
    let is_moved = |object: &Desired| object.id.kind == Kind::ReleaseMeta && &*object.id.name == MODULE;
    let before = objects.iter().find(|object| is_moved(object)).context("the release meta that moves")?.clone();
    let mut after = Desired::clone(&before);
    after.body["spec"]["channels"] = release_meta(MODULE, &channels(to))["spec"]["channels"].take();
    let after = Arc::new(after);
    let objects = objects.into_iter().map(|object| if is_moved(&object) { after.clone() } else { object });
    let (templates, metas): (Vec<_>, Vec<_>) = objects.partition(|object| object.id.kind == Kind::Template);
    let passed = Bare::new(&crowded.crowd)?.apply(field_manager::CATALOG_SYNC, vec![templates, metas]).await?;
    arrived(crowded, to).await?;
    Bare::new(&crowded.crowd)?.apply(field_manager::CATALOG_SYNC, vec![vec![before]]).await?;
    arrived(crowded, from).await?;
    Ok(passed)
}

/// The catalog of a Kyma without labels, as the receiver computes it from KCP.
async fn objects(crowded: &Crowded) -> Result<Vec<Arc<Desired>>> {
    let (operator, namespace) = (crowded.landscape.operator(), crowded.landscape.namespace());
    let all = ListParams::default();
    let templates = Api::<ModuleTemplate>::namespaced(operator.clone(), namespace).list(&all).await?;
    let metas = Api::<ModuleReleaseMeta>::namespaced(operator, namespace).list(&all).await?;
    let (templates, metas) = (templates.items.into_iter().map(Arc::new), metas.items.into_iter().map(Arc::new));
    let snapshot = Snapshot::new(templates, metas, &BTreeSet::new(), BTreeSet::new());
    Ok(snapshot.wanted(&snapshot.class(&BTreeMap::new())).objects().cloned().collect())
}

/// Counts what the runtimes are asked while nothing moves. A runtime whose turn of verification came is left out, the busiest first: all
/// others must not be asked anything.
async fn idle(crowded: &Crowded, seconds: u32, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    const VERIFIED: &str = r#"tidewatch_path_polls_total{reason="verification"}"#;
    crowded.proven(crowded.crowd.members().len()).await?;
    crowded.crowd.at_rest(PATIENCE).await?;
    let (before, verified) = (calls(crowded), metric(&crowded.metrics().await?, VERIFIED));
    let heartbeats = crowded.crowd.tally().heartbeats();
    let step = Step::begin(format!("nothing moves for {seconds} s"));
    sleep(Duration::from_secs(seconds.into())).await;
    step.done();
    let mut calls: Vec<_> = calls(crowded).into_iter().zip(&before).map(|(now, before)| now.since(before)).collect();
    let verified = metric(&crowded.metrics().await?, VERIFIED) - verified;
    let heartbeats = crowded.crowd.tally().heartbeats() - heartbeats;
    ensure!(heartbeats > 0 || seconds < 60, "nobody sends heartbeats");
    calls.sort_by_key(|calls| std::cmp::Reverse(calls.total()));
    progress::say(&format!("calls to the runtimes while nothing moved: {}", Calls::sum(&calls)));
    let unasked = calls.iter().zip(1u32..).filter(|(_, place)| f64::from(*place) > verified);
    let outside: u64 = unasked.map(|(calls, _)| calls.total()).sum();
    tell(&Figure::new("catalog_idle_seconds", seconds.into(), "s"));
    tell(&Figure::new("catalog_idle_verifications", verified, "runtimes"));
    tell(&Figure::new("catalog_idle_calls", number(outside), "calls").at_most(0.0));
    Ok(())
}

/// What each runtime was asked so far.
fn calls(crowded: &Crowded) -> Vec<Calls> {
    crowded.crowd.members().iter().map(|member| member.cluster().calls()).collect()
}

fn number(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// The name of the nth module: the CRD takes letters alone.
fn module(number: u32) -> String {
    let letter = |power: u32| char::from(b'a' + u8::try_from(number / 26_u32.pow(power) % 26).unwrap_or(0));
    format!("module-{}{}{}", letter(2), letter(1), letter(0))
}
