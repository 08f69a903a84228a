//! Setup of the measurements with many agents: a real KCP, a receiver, and a simulated fleet with its runtimes.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use tidewatch_api::{
    names::{AGENT_OBJECT, PLAN_KEY, SKR_NAMESPACE},
    plan::Plan,
};
use tidewatch_contract::admin::{FLEET_PATH, fleet::Report};
use tidewatch_testing::{
    bed::TestBed,
    http,
    landscape::{DEADLINE, Landscape, Options},
    load::{SimulatedFleet, until_within},
    product::{self, Memory},
    progress::Step,
};

use super::{
    Network,
    figure::{cpu_of, time_of},
};

/// The module of every catalog.
pub(super) const MODULE: &str = "template-operator";
/// First part of the names of the receiver's threads that serve agents.
const GATEWAY: &str = "gateway";
/// Deadline of every wait, longer than any wait with the largest fleet.
pub(super) const WAIT_LIMIT: Duration = Duration::from_secs(1_800);

/// The processes and the fleet of a measurement.
pub(super) struct FleetSetup {
    pub(super) fleet: SimulatedFleet,
    pub(super) landscape: Arc<Landscape>,
    _bed: TestBed,
}

impl FleetSetup {
    /// Starts a receiver with these arguments, and an empty fleet.
    pub(super) async fn start(network: Network, receiver: &[&str]) -> Result<Self> {
        let receiver = receiver.iter().map(|argument| (*argument).to_owned()).collect();
        let options = Options { receiver, ..options(network) };
        let bed = TestBed::start().await?;
        let landscape = Landscape::start(bed.kcp().await?, "kcp-system", options).await?;
        Self::on(bed, landscape).await
    }

    /// As [`FleetSetup::start`], with a receiver that issues the certificates of agents, and installs none.
    pub(super) async fn start_issuing(network: Network) -> Result<Self> {
        let options = Options { agent_image: String::new(), ..options(network) };
        let bed = TestBed::start().await?;
        let landscape = Landscape::start_issuing(bed.kcp().await?, "kcp-system", options).await?;
        Self::on(bed, landscape).await
    }

    /// As [`FleetSetup::start`], with a receiver that issues the certificates of agents and installs them.
    pub(super) async fn start_complete(network: Network) -> Result<Self> {
        let bed = TestBed::start().await?;
        let landscape = Landscape::start_issuing(bed.kcp().await?, "kcp-system", options(network)).await?;
        Self::on(bed, landscape).await
    }

    async fn on(bed: TestBed, landscape: Landscape) -> Result<Self> {
        let landscape = Arc::new(landscape);
        landscape.write_module(MODULE, "1.0.0", "1.1.0").await?;
        let fleet = SimulatedFleet::new(landscape.clone()).await?;
        Ok(Self { fleet, landscape, _bed: bed })
    }

    /// Registers runtimes up to this number, and waits until each is served. Their agents do not run yet.
    pub(super) async fn register(&mut self, to: usize) -> Result<()> {
        let step = Step::begin(format!("registering {to} runtimes"));
        self.fleet.grow(to).await?;
        self.fleet.served(WAIT_LIMIT).await?;
        step.done();
        Ok(())
    }

    /// Registers and starts agents up to this number, and waits until the queue is empty and everything is settled.
    pub(super) async fn grow(&mut self, to: usize) -> Result<()> {
        self.register(to).await?;
        let step = Step::begin(format!("waiting for the events of {to} agents to be settled"));
        self.fleet.start();
        self.fleet.at_rest(WAIT_LIMIT).await?;
        step.done();
        Ok(())
    }

    /// Waits until the receiver reports so many paths as proven.
    pub(super) async fn proven(&self, of: usize) -> Result<()> {
        let wanted = f64::from(u32::try_from(of)?);
        until_within("every path to be proven", WAIT_LIMIT, async || {
            let page = self.metrics().await?;
            let proven = metric(&page, r#"tidewatch_fleet_paths{state="Proven"}"#);
            if proven < wanted {
                let paths: Vec<_> = page.lines().filter(|line| line.starts_with("tidewatch_fleet_paths{")).collect();
                bail!("{}", paths.join(", "));
            }
            Ok(Some(()))
        })
        .await
    }

    /// Gives every agent the plan in its runtime, and returns the number of changed plans.
    pub(super) fn follow_plans(&self) -> Result<usize> {
        let key = format!("/configmaps/{SKR_NAMESPACE}/{AGENT_OBJECT}");
        let mut changed = 0;
        for member in self.fleet.members() {
            let map = member.cluster().object(&key).context("a runtime has no plan")?;
            let plan = Plan::parse(map["data"][PLAN_KEY].as_str().context("a ConfigMap has no plan")?)?;
            changed += usize::from(member.handle().update(|state| state.follow(&plan)));
        }
        Ok(changed)
    }

    /// The receiver's metrics page.
    pub(super) async fn metrics(&self) -> Result<String> {
        let (_, page) = self.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        Ok(page)
    }

    /// The receiver's report of all runtimes.
    pub(super) async fn report(&self) -> Result<Report> {
        let admin = self.landscape.with_receiver(async |receiver| receiver.admin()).await?;
        let (_, report) = http::get(admin.context("no admin listener")?, FLEET_PATH, DEADLINE).await?;
        serde_json::from_str(&report).context("read the fleet")
    }

    /// Waits until the receiver has closed its idle connections to the runtimes, as after any quiet minute. Those of
    /// verifications are few, and in a large fleet there is always one.
    pub(super) async fn disconnected(&self) -> Result<()> {
        let few = self.fleet.members().len() / 100;
        until_within("the receiver to close its connections to the runtimes", WAIT_LIMIT, async || {
            let open = self.fleet.fake().connections();
            ensure!(open <= few, "{open} connections are open");
            Ok(Some(()))
        })
        .await
    }

    /// CPU time of the receiver so far, in seconds.
    pub(super) async fn receiver_cpu(&self) -> Result<f64> {
        Ok(self.landscape.with_receiver(async |receiver| cpu_of(receiver.process().pid())).await??)
    }

    /// CPU time so far of the receiver's threads that serve agents, in seconds; they live as long as the process.
    pub(super) async fn gateway_cpu(&self) -> Result<f64> {
        let by_thread = self.landscape.with_receiver(async |receiver| receiver.cpu_by_thread()).await??;
        Ok(time_of(&by_thread, GATEWAY).as_secs_f64())
    }

    /// The receiver's memory.
    pub(super) async fn receiver_memory(&self) -> Result<Memory> {
        Ok(self.landscape.with_receiver(async |receiver| receiver.memory()).await??)
    }
}

/// A landscape of this network, with few log lines.
pub(super) fn options(network: Network) -> Options {
    Options { log: "warn".to_owned(), distance: network.distance(), ..Options::default() }
}

/// Value of a series on a metrics page; zero if it is absent.
pub(super) fn metric(page: &str, series: &str) -> f64 {
    sample(page, series).unwrap_or_default()
}

/// Value of a series on a metrics page; one whose absence would be taken for zero.
///
/// # Errors
/// The page does not have it.
pub(super) fn sample(page: &str, series: &str) -> Result<f64> {
    product::metric(page, series).with_context(|| format!("the metrics page has no {series}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_is_found_by_its_whole_name() {
        let page = "# TYPE a gauge\na{b=\"c\"} 3\na{b=\"cd\"} 5\n";
        assert_eq!(metric(page, "a{b=\"c\"}"), 3.0);
        assert_eq!((metric(page, "a"), metric(page, "b")), (0.0, 0.0));
        assert_eq!(sample(page, "a{b=\"cd\"}").unwrap(), 5.0);
        assert!(sample(page, "a").is_err() && sample(page, "b").is_err());
    }
}
