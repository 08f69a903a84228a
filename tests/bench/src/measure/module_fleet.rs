//! Modules in many runtimes with fake API servers: installation, an upgrade by a channel, reconciles among few and many
//! Manifests, a restart, memory, and calls while nothing changes.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_api::{Kyma, Manifest};
use tidewatch_testing::{
    artefacts::WIDE,
    fake::Calls,
    landscape::until,
    load::{FleetMember, until_within},
    progress::{self, Step},
};
use tokio::time::sleep;

use super::{
    Figure, Network, api_calls,
    figure::mebibytes,
    fleet_setup::{FleetSetup, WAIT_LIMIT, metric},
};

/// Version of all modules at first.
const FIRST: &str = "1.0.0";
/// Store key of the Kyma in a runtime.
const KYMA: &str = "operator.kyma-project.io/kymas/kyma-system/default";
/// Concurrent writes to KCP.
const CONCURRENT_WRITES: usize = 8;
/// Time in which connections to the runtimes close and memory returns to the system.
const REST: Duration = Duration::from_secs(100);
/// Time over which the CPU time of an idle receiver is measured.
const IDLE_SAMPLE: Duration = Duration::from_secs(20);
/// Number of the Kyma reconciles that ended.
const RECONCILES: &str = "tidewatch_kyma_pass_duration_seconds_count";

/// Extent of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Numbers of runtimes, ascending; the restart and everything after it happen with the largest
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1_000, 5_000])]
    pub runtimes: Vec<usize>,
    /// Modules of each runtime
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(2..=26))]
    pub modules: u8,
    /// Kymas that are reconciled with each number of runtimes; at most as many as the smallest number
    #[arg(long, default_value_t = 100)]
    pub reconciles: usize,
    /// Runtimes in which a module is removed, installed and upgraded after the restart
    #[arg(long, default_value_t = 200)]
    pub changed: usize,
    /// Seconds without changes at the end
    #[arg(long, default_value_t = 600)]
    pub idle_seconds: u32,
    #[command(flatten)]
    pub(super) network: Network,
}

/// Runs the measurement and emits each figure.
///
/// # Errors
/// When the setup cannot be started, or a runtime does not reach its desired state.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    ensure!(
        !settings.runtimes.is_empty() && settings.runtimes.is_sorted(),
        "ascending numbers of runtimes are required"
    );
    let smallest = settings.runtimes.first().copied().unwrap_or_default();
    ensure!(settings.reconciles <= smallest, "at most {smallest} Kymas can be reconciled");
    // No poll, and verifications so far apart that hardly one falls into the measurement.
    let arguments = ["--fallback-poll-seconds", "86400", "--verification-seconds", "2592000"];
    let mut measured = ModuleFleet::start(settings.modules, settings.network, &arguments).await?;
    let mut first = None;
    for runtimes in &settings.runtimes {
        measured.install(*runtimes, emit).await?;
        measured.upgrade(emit).await?;
        let cost = measured.reconciles(settings.reconciles).await?;
        let among_few = *first.get_or_insert(cost);
        emit(&Figure::new("module_fleet_kyma_reconcile_cpu", cost, "ms").ratio_at_most(
            among_few,
            cost / among_few,
            1.2,
        ));
    }
    measured.restart(emit).await?;
    measured.memory("module_fleet_receiver_pss", emit).await?;
    measured.changes(settings.changed).await?;
    measured.memory("module_fleet_receiver_pss_after_changes", emit).await?;
    measured.idle(settings.idle_seconds, emit).await
}

/// Runtimes with several modules each.
pub(super) struct ModuleFleet {
    pub(super) setup: FleetSetup,
    pub(super) modules: Vec<String>,
    /// Version of the first module in its channel; that of all others never changes.
    version: String,
    upgrades: u32,
}

/// Counters at one time.
struct Counts {
    begun: Instant,
    receiver_cpu: f64,
    kcp: f64,
    runtimes: Vec<Calls>,
    registry: usize,
}

impl ModuleFleet {
    /// Starts a receiver with these arguments, and releases so many modules.
    pub(super) async fn start(modules: u8, network: Network, receiver: &[&str]) -> Result<Self> {
        let setup = FleetSetup::start(network, receiver).await?;
        let modules: Vec<_> =
            (0..modules).map(|n| format!("{WIDE}{}", char::from(b'a' + n).to_string().repeat(3))).collect();
        for module in &modules {
            setup.landscape.write_wide(module, FIRST).await?;
        }
        Ok(Self { setup, modules, version: FIRST.to_owned(), upgrades: 0 })
    }

    /// Registers runtimes up to this number, and installs all modules in the new ones.
    pub(super) async fn install(&mut self, runtimes: usize, emit: &mut impl FnMut(&Figure)) -> Result<()> {
        let known = self.setup.fleet.members().len();
        self.setup.grow(runtimes).await?;
        let step = Step::begin(format!("installing {} modules in {} runtimes", self.modules.len(), runtimes - known));
        let before = self.counts().await?;
        self.setup.fleet.members()[known..].iter().for_each(|member| self.select(member, &self.modules));
        let ready = self.ready().await?;
        step.done();
        let manifests = number((runtimes - known) * self.modules.len());
        emit(&Figure::new("module_fleet_runtimes", number(runtimes), "runtimes"));
        emit(&Figure::new("module_fleet_manifests", number(runtimes * self.modules.len()), "Manifests"));
        self.emit_between(&before, ready, &INSTALLED, manifests, emit).await
    }

    /// Moves the channel of the first module.
    async fn upgrade(&mut self, emit: &mut impl FnMut(&Figure)) -> Result<()> {
        let runtimes = self.setup.fleet.members().len();
        let step = Step::begin(format!("upgrading a module in {runtimes} runtimes"));
        let before = self.counts().await?;
        self.point().await?;
        let ready = self.ready().await?;
        step.done();
        let requests = self.setup.landscape.artefacts().requests() - before.registry;
        emit(&Figure::new("module_fleet_moved_registry_requests", number(requests), "requests").at_most(8.0));
        self.emit_between(&before, ready, &MOVED, number(runtimes), emit).await
    }

    /// Releases a new version of the first module.
    async fn point(&mut self) -> Result<()> {
        self.upgrades += 1;
        self.version = format!("1.{}.0", self.upgrades);
        self.setup.landscape.write_wide(&self.modules[0], &self.version).await
    }

    /// CPU time of one Kyma reconcile that a change of its labels causes, in milliseconds. Each opens a connection to its
    /// runtime.
    async fn reconciles(&self, of: usize) -> Result<f64> {
        let fleet = &self.setup.fleet;
        self.setup.disconnected().await?;
        let idle = self.idle_cpu().await?;
        let step = Step::begin(format!("{of} reconciles of Kymas among {}", fleet.members().len()));
        let kymas = Api::<Kyma>::namespaced(self.setup.landscape.operator(), self.setup.landscape.namespace());
        let params = PatchParams::default();
        let done = metric(&self.setup.metrics().await?, RECONCILES);
        let begun = Instant::now();
        let cpu = self.setup.receiver_cpu().await?;
        let mark = Patch::Merge(json!({"metadata": {"labels": {"measured": fleet.members().len().to_string()}}}));
        let marked = fleet.members().iter().take(of).map(|member| kymas.patch(member.name(), &params, &mark));
        stream::iter(marked).buffer_unordered(CONCURRENT_WRITES).try_for_each(async |_| Ok(())).await?;
        fleet.at_rest(WAIT_LIMIT).await?;
        let done = metric(&self.setup.metrics().await?, RECONCILES) - done;
        let cpu = self.setup.receiver_cpu().await? - cpu - idle * begun.elapsed().as_secs_f64();
        step.done();
        ensure!(done >= number(of) * 0.9, "{done} reconciles of {of} changes");
        Ok(cpu * 1e3 / done)
    }

    /// CPU seconds per second while nothing changes.
    async fn idle_cpu(&self) -> Result<f64> {
        let begun = Instant::now();
        let cpu = self.setup.receiver_cpu().await?;
        sleep(IDLE_SAMPLE).await;
        Ok((self.setup.receiver_cpu().await? - cpu) / begun.elapsed().as_secs_f64())
    }

    /// Restarts the receiver, which adopts all Manifests without a write to a runtime.
    async fn restart(&self, emit: &mut impl FnMut(&Figure)) -> Result<()> {
        let fleet = &self.setup.fleet;
        let landscape = &self.setup.landscape;
        let step = Step::begin(format!("restarting the receiver with {} runtimes", fleet.members().len()));
        landscape.with_receiver(async |receiver| receiver.kill9()).await?;
        let before = self.calls();
        let begun = Instant::now();
        landscape.start_receiver().await?;
        self.setup.proven(fleet.members().len()).await?;
        self.ready().await?;
        step.done();
        emit(&Figure::new("module_fleet_restart_settled", begun.elapsed().as_secs_f64(), "s"));
        emit(&Figure::new("module_fleet_restart_receiver_cpu", self.setup.receiver_cpu().await?, "s"));
        let sum = Calls::sum(&since(self.calls(), &before));
        progress::print_line(&format!("requests to the runtimes after the restart: {sum}"));
        let runtimes = number(fleet.members().len());
        emit(&Figure::new("module_fleet_restart_calls_per_runtime", count(sum.total()) / runtimes, "calls"));
        emit(&Figure::new("module_fleet_restart_writes", count(sum.writes()), "writes").at_most(0.0));
        Ok(())
    }

    /// Removes the first module in so many runtimes, installs it again, and moves its channel.
    async fn changes(&mut self, of: usize) -> Result<()> {
        let step = Step::begin(format!("removing, installing and upgrading a module in {of} runtimes"));
        let every = (self.setup.fleet.members().len() / of.max(1)).max(1);
        let chosen = || self.setup.fleet.members().iter().step_by(every).take(of);
        chosen().for_each(|member| self.select(member, &self.modules[1..]));
        until_within("the module to go", WAIT_LIMIT, async || {
            let left = chosen().filter(|member| self.shown(member, 0).is_some()).count();
            ensure!(left == 0, "{left} of {of} runtimes have it");
            Ok(Some(()))
        })
        .await?;
        self.setup.follow_plans()?;
        chosen().for_each(|member| self.select(member, &self.modules));
        self.ready().await?;
        self.point().await?;
        self.ready().await?;
        step.done();
        Ok(())
    }

    /// Memory after a rest.
    async fn memory(&self, figure: &'static str, emit: &mut impl FnMut(&Figure)) -> Result<()> {
        let step = Step::begin(format!("a rest of {} s", REST.as_secs()));
        sleep(REST).await;
        step.done();
        let kcp = self.setup.landscape.kcp().client().await?;
        let manifests = Api::<Manifest>::namespaced(kcp, self.setup.landscape.namespace());
        let found =
            until("the Manifests", async || Ok(Some(manifests.list_metadata(&ListParams::default()).await?))).await?;
        let expected = self.setup.fleet.members().len() * self.modules.len();
        ensure!(found.items.len() == expected, "{} Manifests instead of {expected}", found.items.len());
        let memory = self.setup.receiver_memory().await?;
        emit(&Figure::new(figure, mebibytes(memory.pss_kib), "MiB").at_most(512.0));
        emit(&Figure::new("module_fleet_receiver_peak_rss", mebibytes(memory.peak_rss_kib), "MiB"));
        Ok(())
    }

    /// Requests to runtimes and writes to KCP while nothing changes.
    async fn idle(&self, seconds: u32, emit: &mut impl FnMut(&Figure)) -> Result<()> {
        const VERIFIED: &str = r#"tidewatch_path_polls_total{reason="verification"}"#;
        let kcp = self.setup.landscape.kcp();
        let before = self.calls();
        let mark = kcp.audit_mark()?;
        let verified = metric(&self.setup.metrics().await?, VERIFIED);
        let step = Step::begin(format!("no changes for {seconds} s"));
        sleep(Duration::from_secs(seconds.into())).await;
        step.done();
        let verified = metric(&self.setup.metrics().await?, VERIFIED) - verified;
        let mut calls = since(self.calls(), &before);
        progress::print_line(&format!("requests to the runtimes without changes: {}", Calls::sum(&calls)));
        calls.sort_by_key(|calls| std::cmp::Reverse(calls.total()));
        // As many runtimes as were verified in this time are left out, the busiest first.
        let others = calls.iter().zip(1_u32..).filter(|(_, place)| f64::from(*place) > verified);
        let others: u64 = others.map(|(calls, _)| calls.total()).sum();
        let is_ours = |write: &&tidewatch_testing::control_plane::audit::Write| {
            write.namespace == self.setup.landscape.namespace() && write.resource != "leases"
        };
        let writes: Vec<_> = kcp.writes_since(mark)?;
        let kinds: BTreeSet<_> = writes.iter().filter(is_ours).map(|write| write.resource.clone()).collect();
        progress::print_line(&format!("kinds written in KCP without changes: {kinds:?}"));
        emit(&Figure::new("module_fleet_idle_seconds", seconds.into(), "s"));
        emit(&Figure::new("module_fleet_idle_verifications", verified, "runtimes"));
        emit(&Figure::new("module_fleet_idle_calls", count(others), "calls").at_most(0.0));
        let writes = writes.iter().filter(is_ours).count();
        emit(&Figure::new("module_fleet_idle_kcp_writes", number(writes), "writes").at_most(0.0));
        Ok(())
    }

    fn select(&self, member: &FleetMember, modules: &[String]) {
        let names: Vec<_> = modules.iter().map(String::as_str).collect();
        member.select(&names);
    }

    /// State and version of a module in the status of a runtime's Kyma.
    fn shown(&self, member: &FleetMember, module: usize) -> Option<(Value, Value)> {
        let kyma = member.cluster().object(KYMA)?;
        let shown = kyma["status"]["modules"].as_array()?.iter().find(|shown| shown["name"] == self.modules[module])?;
        Some((shown["state"].clone(), shown["version"].clone()))
    }

    /// Waits until all modules are ready in their versions in all runtimes; then until every agent follows the plan of its
    /// runtime, and no work is left. Returns the time of the former.
    async fn ready(&self) -> Result<Instant> {
        let members = self.setup.fleet.members();
        let mut have = 0;
        let is_ready = |member: &&FleetMember| {
            (0..self.modules.len()).all(|module| {
                let version = if module == 0 { &self.version } else { FIRST };
                self.shown(member, module) == Some((json!("Ready"), json!(version)))
            })
        };
        until_within("every module to be ready", WAIT_LIMIT, async || {
            have += members[have..].iter().take_while(is_ready).count();
            if have < members.len() {
                bail!("{have} of {} runtimes are ready; the next: {:?}", members.len(), self.shown(&members[have], 0));
            }
            Ok(Some(()))
        })
        .await?;
        let ready = Instant::now();
        until_within("every agent to follow its plan", WAIT_LIMIT, async || {
            let changed = self.setup.follow_plans()?;
            self.setup.fleet.at_rest(WAIT_LIMIT).await?;
            Ok((changed == 0).then_some(()))
        })
        .await?;
        Ok(ready)
    }

    fn calls(&self) -> Vec<Calls> {
        self.setup.fleet.members().iter().map(|member| member.cluster().calls()).collect()
    }

    async fn counts(&self) -> Result<Counts> {
        let landscape = &self.setup.landscape;
        Ok(Counts {
            begun: Instant::now(),
            receiver_cpu: self.setup.receiver_cpu().await?,
            kcp: api_calls::answered(landscape.kcp()).await?,
            runtimes: self.calls(),
            registry: landscape.artefacts().requests(),
        })
    }

    /// Emits the time from the counts until `ready`, and the receiver's CPU time and the requests since the counts, for
    /// each of so many units.
    async fn emit_between(
        &self,
        before: &Counts,
        ready: Instant,
        names: &[&'static str; 4],
        units: f64,
        emit: &mut impl FnMut(&Figure),
    ) -> Result<()> {
        let seconds = (ready - before.begun).as_secs_f64();
        let cpu = self.setup.receiver_cpu().await? - before.receiver_cpu;
        let kcp = api_calls::answered(self.setup.landscape.kcp()).await? - before.kcp;
        let sum = Calls::sum(&since(self.calls(), &before.runtimes));
        progress::print_line(&format!("requests to the runtimes: {sum}"));
        let [time, receiver, runtime, control_plane] = *names;
        emit(&Figure::new(time, seconds * 1e3 / units, "ms"));
        emit(&Figure::new(receiver, cpu * 1e3 / units, "ms"));
        emit(&Figure::new(runtime, count(sum.total()) / units, "calls"));
        emit(&Figure::new(control_plane, kcp / units, "calls"));
        Ok(())
    }
}

/// Figures of an installation, per Manifest.
const INSTALLED: [&str; 4] = [
    "module_fleet_install_per_manifest",
    "module_fleet_install_receiver_cpu_per_manifest",
    "module_fleet_install_calls_per_manifest",
    "module_fleet_install_kcp_calls_per_manifest",
];
/// Figures of a moved channel, per runtime.
const MOVED: [&str; 4] = [
    "module_fleet_moved_per_runtime",
    "module_fleet_moved_receiver_cpu_per_runtime",
    "module_fleet_moved_calls_per_runtime",
    "module_fleet_moved_kcp_calls_per_runtime",
];

fn since(now: Vec<Calls>, before: &[Calls]) -> Vec<Calls> {
    let fresh = Calls::default();
    let before = before.iter().chain(std::iter::repeat(&fresh));
    now.into_iter().zip(before).map(|(now, before)| now.since(before)).collect()
}

fn number(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

fn count(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}
