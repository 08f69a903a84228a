//! What both sides count, and when nothing is open between them.

use std::time::SystemTime;

use anyhow::{Context as _, Result, bail, ensure};
use tidewatch_tests::{demo::stamps, landscape::until};

use crate::support::One;

/// What was counted so far by the two processes of now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Events that the agent gave a sequence.
    pub(crate) given: u64,
    /// Events that the ledger recorded.
    pub(crate) recorded: u64,
    /// Events that came while an earlier one was missing, or out of their order.
    pub(crate) disordered: u64,
    /// Digests that did not agree.
    pub(crate) differing: u64,
}

/// The sum of a metric's samples that have all these labels.
pub(crate) fn sum(page: &str, name: &str, labels: &[&str]) -> u64 {
    let samples = page.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let (given, value) = rest.rsplit_once(' ')?;
        let mine = (given.is_empty() || given.starts_with('{')) && labels.iter().all(|label| given.contains(label));
        mine.then(|| value.parse::<f64>().ok()).flatten()
    });
    // Counts and gauges of objects: whole, and small.
    samples.sum::<f64>() as u64
}

impl One {
    /// The agent's metrics.
    pub(crate) async fn agent_page(&self) -> Result<String> {
        Ok(self.runtime.with_agent(async |agent| agent.get("/metrics").await).await??.1)
    }

    /// The receiver's metrics.
    pub(crate) async fn receiver_page(&self) -> Result<String> {
        Ok(self.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??.1)
    }

    /// Waits until a metric of the agent has at least a value.
    pub(crate) async fn agent_counts(&self, name: &str, labels: &[&str], least: u64) -> Result<()> {
        until(&format!("{name}{labels:?} of at least {least} at the agent"), async || {
            Ok((sum(&self.agent_page().await?, name, labels) >= least).then_some(()))
        })
        .await
    }

    /// Waits until a metric of the receiver has at least a value.
    pub(crate) async fn receiver_counts(&self, name: &str, labels: &[&str], least: u64) -> Result<()> {
        until(&format!("{name}{labels:?} of at least {least} at the receiver"), async || {
            Ok((sum(&self.receiver_page().await?, name, labels) >= least).then_some(()))
        })
        .await
    }

    /// Waits until the receiver was told that a watch was listed after a time.
    pub(crate) async fn listed(&self, watch: &str, after: SystemTime) -> Result<()> {
        let file = self.landscape.stamp_file();
        until(&format!("a list of {watch}"), async || {
            let told = stamps::read(&file)?.into_iter().find(|stamp| {
                stamp.runtime == self.runtime.id().as_str()
                    && stamp.watch == watch
                    && stamp.resource_version == "-"
                    && stamp.wanted >= after
            });
            Ok(told.map(drop))
        })
        .await
    }

    /// Waits until nothing is open: the agent waits for nothing, every watch works, and the receiver has no work.
    pub(crate) async fn in_sync(&self) -> Result<()> {
        until("both sides to be in sync", async || {
            let page = self.agent_page().await?;
            for figure in ["events_waiting", "events_parked", "events_unsettled", "watches_failing", "watches_coarse"] {
                let open = sum(&page, &format!("tidewatch_agent_{figure}"), &[]);
                ensure!(open == 0, "the agent says {figure} {open}");
            }
            let page = self.receiver_page().await?;
            for place in ["user", "in-work"] {
                let open = sum(&page, "tidewatch_queue_kymas", &[place]);
                ensure!(open == 0, "the receiver says {place} {open}");
            }
            Ok(Some(()))
        })
        .await
    }

    /// What both processes of now have counted.
    pub(crate) async fn counts(&self) -> Result<Counts> {
        let (agent, receiver) = (self.agent_page().await?, self.receiver_page().await?);
        let results = |results: &[&str]| {
            results
                .iter()
                .map(|result| sum(&receiver, "tidewatch_fleet_events_total", &[&format!("\"{result}\"")]))
                .sum()
        };
        Ok(Counts {
            given: sum(&agent, "tidewatch_agent_events_total", &[]),
            recorded: results(&["recorded"]),
            disordered: results(&["ahead", "below", "too-far"]),
            differing: sum(&receiver, "tidewatch_fleet_digest_differences_total", &[]),
        })
    }

    /// Compares what both have counted since then: each event that got a sequence was recorded once, and in order.
    pub(crate) async fn counts_agree_since(&self, before: Counts) -> Result<()> {
        let now = self.counts().await?;
        ensure!(now.given > before.given, "nothing was counted: {now:?}");
        ensure!(now.given - before.given == now.recorded - before.recorded, "{before:?} {now:?}");
        ensure!(now.disordered == before.disordered, "{before:?} {now:?}");
        Ok(())
    }

    /// Looks through both logs for what no fault excuses.
    pub(crate) async fn nothing_was_odd(&self) -> Result<()> {
        let agent = self.runtime.with_agent(async |agent| agent.log_text()).await??;
        let receiver = self.landscape.with_receiver(async |receiver| receiver.log_text()).await??;
        for (who, log) in [("agent", &agent), ("receiver", &receiver)] {
            for word in ["panicked", "Digests of watches do not agree"] {
                if let Some(line) = log.lines().find(|line| line.contains(word)) {
                    bail!("the {who}'s log says: {line}");
                }
            }
        }
        ensure!(self.counts().await.context("count")?.differing == 0, "digests differed");
        Ok(())
    }
}

#[test]
fn samples_are_summed_by_name_and_labels() {
    let page = "# HELP a_total x\na_total{r=\"x\",s=\"1\"} 2\na_total{r=\"y\",s=\"1\"} 3\na_total_more 5\nb 7\n";
    assert_eq!(sum(page, "a_total", &[]), 5);
    assert_eq!(sum(page, "a_total", &["\"y\""]), 3);
    assert_eq!(sum(page, "b", &[]), 7);
    assert_eq!(sum(page, "c", &[]), 0);
}
