//! Well-behaved runtimes alone, and then next to hostile ones: nothing of the former may be lost, and the latter may not exceed
//! their shares.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum as _;
use futures::future::try_join_all;
use tidewatch_api::names::{AGENT_OBJECT, SKR_NAMESPACE, TRUST_BUNDLE_KEY};
use tidewatch_kit::tls;
use tokio::time::sleep;

use super::{
    Agent, Attack, Attacks, ChangeTimes, EnrolmentEndpoint, FleetMember, Pace, SimulatedFleet, toggle_module,
    until_within,
};
use crate::{landscape::Landscape, product::metric, progress::Step};

/// Writes to KCP that a runtime may cause at once, and per second (`docs/reference/limits.md`).
const WRITES: (f64, f64) = (1_000.0, 4.0);
/// Deadline of the registration, and of an attack until it takes effect.
const DEADLINE: Duration = Duration::from_secs(600);

/// Extent of the scenario.
#[derive(Clone, Debug, clap::Args)]
pub struct Coexistence {
    /// Well-behaved runtimes
    #[arg(long, default_value_t = 100)]
    pub others: usize,
    /// Hostile runtimes for each attack
    #[arg(long, default_value_t = 10)]
    pub hostile: usize,
    /// Attacks, each made by runtimes of its own
    #[arg(long = "attack", value_enum, default_values_t = Attack::value_variants().to_vec())]
    pub attacks: Vec<Attack>,
    /// Changes of each well-behaved runtime without attacks, and as many while all attacks take effect
    #[arg(long, default_value_t = 15)]
    pub changes: u32,
    /// Changes of each well-behaved runtime before those, while the attacks use up what a runtime may do at once
    #[arg(long, default_value_t = 7)]
    pub onset: u32,
    /// Seconds between two changes of one runtime
    #[arg(long, default_value_t = 6)]
    pub pause: u32,
}

/// Observations of a scenario.
#[derive(Debug)]
pub struct CoexistenceReport {
    /// Changes without attacks.
    pub alone: ChangeTimes,
    /// Changes from the beginning of the attacks.
    pub onset: ChangeTimes,
    /// Changes after those, while all attacks take effect.
    pub attacked: ChangeTimes,
    /// Duration of the attacks in seconds.
    pub seconds: f64,
    /// Writes to KCP in this time.
    pub writes: u32,
    /// Those of them to objects of hostile runtimes.
    pub hostile_writes: u32,
    /// The number of the latter that the shares of the hostile runtimes allow.
    pub allowed_writes: f64,
    /// The receiver's metrics at the end of the attacks.
    pub metrics: String,
    /// The receiver's largest resident memory so far, in KiB.
    pub peak_rss_kib: u64,
}

impl Coexistence {
    /// Registers the runtimes and their agents, and lets the users of the well-behaved ones change their modules.
    /// The landscape issues certificates and installs agents; `module` is one of its modules.
    ///
    /// # Errors
    /// When a runtime cannot be registered, the receiver ends, a change of a well-behaved runtime is lost, or an attack
    /// never takes effect.
    pub async fn run(
        &self,
        landscape: &Landscape,
        fleet: &mut SimulatedFleet,
        module: &str,
    ) -> Result<CoexistenceReport> {
        let others = self.others;
        let hostile = self.hostile * self.attacks.len();
        let step = Step::begin(format!("registering {} runtimes", others + hostile));
        fleet.grow(others + hostile).await?;
        fleet.served(DEADLINE).await?;
        let endpoint =
            until_within("the installed agents", DEADLINE, async || installed_endpoint(landscape, fleet).map(Some))
                .await?;
        fleet.certify(&endpoint).await?;
        step.done();
        let mut agents: Vec<_> =
            fleet.members_mut().iter_mut().take(others).filter_map(FleetMember::take_agent).collect();
        let step = Step::begin(format!("changes of {others} runtimes alone"));
        let alone = self.change_all(fleet, &mut agents, module, self.changes).await?;
        step.done();
        let pid = async || landscape.with_receiver(async |receiver| receiver.process().pid()).await;
        let begun = Instant::now();
        let mark = landscape.kcp().audit_mark()?;
        let process = pid().await?;
        let mut attacks = Attacks::default();
        for (kind, attack) in self.attacks.iter().enumerate() {
            for number in 0..self.hostile {
                attacks.begin(*attack, fleet, others + kind * self.hostile + number, &endpoint, module)?;
            }
        }
        let step = Step::begin(format!("changes of {others} runtimes next to {hostile} hostile ones"));
        let onset = self.change_all(fleet, &mut agents, module, self.onset).await?;
        // Without the attacks the observations would prove nothing.
        for effect in self.attacks.iter().flat_map(|attack| attack.effects()) {
            let counts = |page: &str| metric(page, effect).filter(|count| *count > 0.0);
            let reached =
                landscape.with_receiver(async |receiver| receiver.metrics_until(DEADLINE, counts).await).await?;
            reached.with_context(|| format!("no attack is counted by {effect}"))?;
        }
        let attacked = self.change_all(fleet, &mut agents, module, self.changes).await?;
        step.done();
        let seconds = begun.elapsed().as_secs_f64();
        let writes = landscape.kcp().writes_since(mark)?;
        let (memory, page) = landscape
            .with_receiver(async |receiver| {
                let (_, page) = receiver.get("/metrics").await?;
                Ok::<_, anyhow::Error>((receiver.memory()?, page))
            })
            .await??;
        drop(attacks);
        ensure!(pid().await? == process, "the receiver has ended and was started again");
        let names: Vec<_> = fleet.members()[others..].iter().map(FleetMember::name).collect();
        let for_hostile = writes.iter().filter(|write| names.iter().any(|name| write.name.starts_with(name))).count();
        let (at_once, per_second) = WRITES;
        Ok(CoexistenceReport {
            alone,
            onset,
            attacked,
            seconds,
            writes: u32::try_from(writes.len())?,
            hostile_writes: u32::try_from(for_hostile)?,
            allowed_writes: f64::from(u32::try_from(hostile)?) * (at_once + per_second * seconds),
            metrics: page,
            peak_rss_kib: memory.peak_rss_kib,
        })
    }

    async fn change_all(
        &self,
        fleet: &SimulatedFleet,
        agents: &mut [Agent],
        module: &str,
        changes: u32,
    ) -> Result<ChangeTimes> {
        let pause = Duration::from_secs(self.pause.into());
        // Spread over the pause: so many users do not act at the same moment.
        let offset = pause / u32::try_from(self.others.max(1))?;
        let users = fleet.members().iter().zip(agents).zip(0_u32..).map(|((member, agent), number)| async move {
            sleep(offset * number).await;
            toggle_module(member, agent, module, Pace { changes, pause }).await
        });
        let mut all = ChangeTimes::default();
        try_join_all(users).await?.into_iter().for_each(|times| all.extend(times));
        Ok(all)
    }
}

/// The enrolment port, and the roots that the installer has written into the runtimes.
///
/// # Errors
/// When the landscape has no enrolment port, or a runtime has no agent yet.
pub fn installed_endpoint(landscape: &Landscape, fleet: &SimulatedFleet) -> Result<EnrolmentEndpoint> {
    let address = landscape.agents_enrolment().context("the receiver has no enrolment port")?;
    let key = format!("/configmaps/{SKR_NAMESPACE}/{AGENT_OBJECT}");
    let mut settings = fleet.members().iter().map(|member| member.cluster().object(&key));
    let first = settings.next().flatten().context("the first runtime has no agent")?;
    ensure!(settings.all(|settings| settings.is_some()), "a runtime has no agent");
    let roots = first["data"][TRUST_BUNDLE_KEY].as_str().context("the ConfigMap has no roots")?;
    EnrolmentEndpoint::new(address, tls::roots(&tls::certificates(roots.as_bytes())?)?)
}
