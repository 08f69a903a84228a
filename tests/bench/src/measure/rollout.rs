//! Ring rollout of a module in many runtimes with fake API servers: a version that fails in some of them, until its rollout
//! halts; then a good version, until every runtime has it.
//!
//! The API server of each runtime that fails refuses the pods of the module's Deployment, so that its Manifest is in an error
//! state. Of every ten runtimes that get the version, by default, the first fails. The pause between rings and the delay of
//! moved channels are zero; the limit of failures is that of a receiver without flags.
//!
//! The writes until the halt are those to the runtimes that have the failing version, and the writes to KCP apart from those
//! of Kymas: the catalog of all other runtimes changes, too.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use serde_json::json;
use tidewatch_testing::{
    artefacts::{self, WIDE},
    control_plane::audit::Mark,
    fake::Calls,
    load::{FleetMember, until_within},
    progress::{self, Step},
};

use super::{
    Figure, Network,
    fleet_setup::{FleetSetup, WAIT_LIMIT, metric},
};

const FIRST: &str = "1.0.0";
const BAD: &str = "1.1.0";
const GOOD: &str = "1.2.0";
const RINGS: &str = "1%,10%,50%,100%";
/// Store key of the Kyma in a runtime.
const KYMA: &str = "operator.kyma-project.io/kymas/kyma-system/default";

/// Extent of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Number of runtimes
    #[arg(long, default_value_t = 1_000)]
    pub runtimes: usize,
    /// Number of runtimes that get the failing version for each in which it fails
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub failing_every: u32,
    #[command(flatten)]
    pub(super) network: Network,
}

/// Runs the measurement and emits each figure.
///
/// # Errors
/// When the setup cannot be started, or a runtime does not reach its desired state.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    // No poll, and verifications so far apart that hardly one falls into the measurement.
    let setup = FleetSetup::start(
        settings.network,
        &[
            "--fallback-poll-seconds",
            "86400",
            "--verification-seconds",
            "2592000",
            "--module-rollout-rings",
            RINGS,
            "--module-rollout-pause-seconds",
            "0",
        ],
    );
    let mut measured = Rollout { setup: setup.await?, module: format!("{WIDE}aaa") };
    measured.install(settings.runtimes).await?;
    emit(&Figure::new("rollout_runtimes", number(settings.runtimes), "runtimes"));
    measured.halt(settings.failing_every, emit).await?;
    measured.complete(emit).await
}

struct Rollout {
    setup: FleetSetup,
    module: String,
}

/// Counters at one time.
struct Counts {
    begun: Instant,
    kcp: Mark,
    runtimes: Vec<Calls>,
}

impl Rollout {
    async fn install(&mut self, runtimes: usize) -> Result<()> {
        self.setup.landscape.write_wide(&self.module, FIRST).await?;
        self.setup.grow(runtimes).await?;
        let step = Step::begin(format!("installing a module in {runtimes} runtimes"));
        self.setup.fleet.members().iter().for_each(|member| member.select(&[&self.module]));
        self.ready(FIRST).await?;
        self.at_rest().await?;
        step.done();
        Ok(())
    }

    /// Moves the channel to the failing version, and waits for the halt.
    async fn halt(&self, failing_every: u32, emit: &mut impl FnMut(&Figure)) -> Result<()> {
        let runtimes = self.setup.fleet.members().len();
        let step = Step::begin(format!("rolling a failing version out to {runtimes} runtimes"));
        self.setup.fleet.fake().refuse_pods(&format!(":{BAD}"), usize::try_from(failing_every)?);
        let before = self.counts()?;
        self.setup.landscape.write_wide(&self.module, BAD).await?;
        let page = until_within("the halt", WAIT_LIMIT, async || {
            let page = self.setup.metrics().await?;
            if metric(&page, r#"tidewatch_module_rollouts{state="halted"}"#) < 1.0 {
                let state: Vec<_> = page.lines().filter(|line| line.starts_with("tidewatch_module_rollout")).collect();
                bail!("{}", state.join(", "));
            }
            Ok(Some(page))
        })
        .await?;
        let seconds = before.begun.elapsed().as_secs_f64();
        self.at_rest().await?;
        step.done();
        let is_upgraded: Vec<_> = self.setup.fleet.members().iter().map(|member| self.has(member, BAD)).collect();
        let upgraded = number(is_upgraded.iter().filter(|is_upgraded| **is_upgraded).count());
        let failed = metric(&page, r#"tidewatch_module_rollout_runtimes{standing="failing"}"#);
        emit(&Figure::new("rollout_halt_upgraded", upgraded, "runtimes").at_most(number((runtimes / 100).max(1))));
        emit(&Figure::new("rollout_halt_failed", failed, "runtimes"));
        emit(&Figure::new("rollout_halt", seconds, "s"));
        ensure!(upgraded > 0.0, "no runtime has the version");
        let calls = self.calls_since(&before).into_iter().zip(is_upgraded);
        let calls: Vec<_> = calls.filter(|(_, is_upgraded)| *is_upgraded).map(|(calls, _)| calls).collect();
        let kcp = self.kcp_writes(&before, |resource| !resource.starts_with("kymas"))?;
        emit(&Figure::new("rollout_halt_writes_per_upgraded", writes(&calls)? / upgraded, "writes"));
        emit(&Figure::new("rollout_halt_kcp_writes_per_upgraded", kcp / upgraded, "writes"));
        Ok(())
    }

    /// Moves the channel to a good version, and waits until every runtime has it.
    async fn complete(&self, emit: &mut impl FnMut(&Figure)) -> Result<()> {
        let runtimes = self.setup.fleet.members().len();
        let step = Step::begin(format!("rolling a good version out to {runtimes} runtimes"));
        let before = self.counts()?;
        self.setup.landscape.write_wide(&self.module, GOOD).await?;
        self.ready(GOOD).await?;
        emit(&Figure::new("rollout_complete", before.begun.elapsed().as_secs_f64(), "s"));
        self.at_rest().await?;
        step.done();
        let of = number(runtimes);
        let runtimes = writes(&self.calls_since(&before))?;
        emit(&Figure::new("rollout_complete_writes_per_runtime", runtimes / of, "writes"));
        let kcp = self.kcp_writes(&before, |_| true)?;
        emit(&Figure::new("rollout_complete_kcp_writes_per_runtime", kcp / of, "writes"));
        Ok(())
    }

    /// Returns whether the Deployment in a runtime is that of a version.
    fn has(&self, member: &FleetMember, version: &str) -> bool {
        let key = format!("apps/deployments/kyma-system/{}", artefacts::manager(&self.module));
        let image = |deployment: serde_json::Value| {
            let image = &deployment["spec"]["template"]["spec"]["containers"][0]["image"];
            image.as_str().is_some_and(|image| image.ends_with(&format!(":{version}")))
        };
        member.cluster().object(&key).is_some_and(image)
    }

    /// Waits until the module is ready in a version in all runtimes.
    async fn ready(&self, version: &str) -> Result<()> {
        let members = self.setup.fleet.members();
        let mut have = 0;
        let is_ready = |member: &&FleetMember| {
            let kyma = member.cluster().object(KYMA).unwrap_or_default();
            let module = &kyma["status"]["modules"][0];
            module["state"] == json!("Ready") && module["version"] == json!(version)
        };
        until_within("the module to be ready", WAIT_LIMIT, async || {
            have += members[have..].iter().take_while(is_ready).count();
            ensure!(have == members.len(), "{have} of {} runtimes have {version}", members.len());
            Ok(Some(()))
        })
        .await
    }

    /// Waits until every agent follows the plan of its runtime, and no work is left.
    async fn at_rest(&self) -> Result<()> {
        until_within("every agent to follow its plan", WAIT_LIMIT, async || {
            let changed = self.setup.follow_plans()?;
            self.setup.fleet.at_rest(WAIT_LIMIT).await?;
            Ok((changed == 0).then_some(()))
        })
        .await
    }

    fn calls(&self) -> Vec<Calls> {
        self.setup.fleet.members().iter().map(|member| member.cluster().calls()).collect()
    }

    fn counts(&self) -> Result<Counts> {
        let kcp = self.setup.landscape.kcp().audit_mark()?;
        Ok(Counts { begun: Instant::now(), kcp, runtimes: self.calls() })
    }

    /// Requests to each runtime since the counts.
    fn calls_since(&self, before: &Counts) -> Vec<Calls> {
        self.calls().into_iter().zip(&before.runtimes).map(|(now, before)| now.since(before)).collect()
    }

    /// Number of the writes to these resources in KCP since the counts, without Leases.
    fn kcp_writes(&self, before: &Counts, is_counted: impl Fn(&str) -> bool) -> Result<f64> {
        let kcp = self.setup.landscape.kcp();
        let namespace = self.setup.landscape.namespace();
        let written = kcp.writes_since(before.kcp)?.into_iter();
        let written = written.filter(|write| write.namespace == namespace && write.resource != "leases");
        Ok(number(written.filter(|write| is_counted(&write.resource)).count()))
    }
}

fn writes(calls: &[Calls]) -> Result<f64> {
    let sum = Calls::sum(calls);
    progress::print_line(&format!("requests to the runtimes: {sum}"));
    Ok(number(usize::try_from(sum.writes())?))
}

fn number(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}
