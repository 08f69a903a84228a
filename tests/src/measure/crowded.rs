//! The setting of the measurements with many agents: a real KCP, a receiver, and a crowd with its runtimes.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, bail};

use super::figure::cpu_of;
use crate::{
    bed::TestBed,
    landscape::{Landscape, Options},
    load::{Crowd, until_within},
    product::Memory,
    progress::Step,
};

/// The module that stands in every catalog.
pub(super) const MODULE: &str = "template-operator";
/// However large the crowd, nothing takes longer.
pub(super) const PATIENCE: Duration = Duration::from_secs(1_800);

/// What stands while something is measured.
pub(super) struct Crowded {
    pub(super) crowd: Crowd,
    pub(super) landscape: Arc<Landscape>,
    _bed: TestBed,
}

impl Crowded {
    /// A receiver with the arguments given, and nobody there yet.
    pub(super) async fn start(receiver: &[&str]) -> Result<Self> {
        let receiver = receiver.iter().map(|argument| (*argument).to_owned()).collect();
        let options = Options { receiver, log: "warn".to_owned(), ..Options::default() };
        let bed = TestBed::start().await?;
        let landscape = Landscape::start(bed.kcp().await?, "kcp-system", options).await?;
        Self::on(bed, landscape).await
    }

    /// The same with a receiver that issues the certificates of agents, and installs none.
    pub(super) async fn start_issuing() -> Result<Self> {
        let options = Options { agent_image: String::new(), log: "warn".to_owned(), ..Options::default() };
        let bed = TestBed::start().await?;
        let landscape = Landscape::from_nothing(bed.kcp().await?, "kcp-system", options).await?;
        Self::on(bed, landscape).await
    }

    async fn on(bed: TestBed, landscape: Landscape) -> Result<Self> {
        let landscape = Arc::new(landscape);
        landscape.write_module(MODULE, "1.0.0", "1.1.0").await?;
        let crowd = Crowd::new(landscape.clone()).await?;
        Ok(Self { crowd, landscape, _bed: bed })
    }

    /// Registers more runtimes until there are so many, and waits until each is served. Their agents have not begun.
    pub(super) async fn register(&mut self, to: usize) -> Result<()> {
        let step = Step::begin(format!("registering runtimes, up to {to}"));
        self.crowd.grow(to).await?;
        self.crowd.served(PATIENCE).await?;
        step.done();
        Ok(())
    }

    /// Registers and starts more agents until there are so many, and waits until there is nothing left to do.
    pub(super) async fn grow(&mut self, to: usize) -> Result<()> {
        self.register(to).await?;
        let step = Step::begin(format!("{to} agents come to rest"));
        self.crowd.start();
        self.crowd.at_rest(PATIENCE).await?;
        step.done();
        Ok(())
    }

    /// Waits until the receiver says of so many runtimes that their path is proven.
    pub(super) async fn proven(&self, of: usize) -> Result<()> {
        let wanted = f64::from(u32::try_from(of)?);
        until_within("every path to be proven", PATIENCE, async || {
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

    /// The receiver's page of metrics.
    pub(super) async fn metrics(&self) -> Result<String> {
        let (_, page) = self.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        Ok(page)
    }

    /// CPU time of the receiver so far, in seconds.
    pub(super) async fn receiver_cpu(&self) -> Result<f64> {
        Ok(self.landscape.with_receiver(async |receiver| cpu_of(receiver.process().pid())).await??)
    }

    /// The receiver's memory.
    pub(super) async fn receiver_memory(&self) -> Result<Memory> {
        Ok(self.landscape.with_receiver(async |receiver| receiver.memory()).await??)
    }
}

/// The value of a series on a page of metrics; zero while it is not there.
pub(super) fn metric(page: &str, series: &str) -> f64 {
    let value = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok());
    value.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_is_found_by_its_whole_name() {
        let page = "# TYPE a gauge\na{b=\"c\"} 3\na{b=\"cd\"} 5\n";
        assert_eq!(metric(page, "a{b=\"c\"}"), 3.0);
        assert_eq!((metric(page, "a"), metric(page, "b")), (0.0, 0.0));
    }
}
