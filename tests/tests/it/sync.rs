//! What both sides count, and when nothing is open between them.

use std::time::SystemTime;

use anyhow::{Context as _, Result, bail, ensure};
use tidewatch_tests::{demo::stamps, landscape::until};

use crate::support::One;

/// Events that got a sequence, at the agent.
const GIVEN: &str = "tidewatch_agent_events_total";
/// The agent's requests.
const REQUESTS: &str = "tidewatch_agent_requests_total";
/// Those with events that were taken.
const TAKEN: [&str; 2] = ["route=\"events\"", "\"taken\""];
/// Those with events for which nobody was there.
const CONNECT: [&str; 2] = ["route=\"events\"", "\"connect\""];

/// What was counted so far by the two processes of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Events that the agent gave a sequence.
    pub(crate) given: u64,
    /// Events that the ledger recorded.
    pub(crate) recorded: u64,
    /// Events that came while an earlier one was missing, or out of their order.
    pub(crate) disordered: u64,
    /// Digests that did not agree.
    pub(crate) differing: u64,
    /// Of those that were given before this count began, so many may be recorded since.
    pub(crate) open: u64,
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

    /// What both processes of now have counted, the agent first.
    pub(crate) async fn counts(&self) -> Result<Counts> {
        let given = sum(&self.agent_page().await?, GIVEN, &[]);
        Ok(Counts { given, ..recorded(&self.receiver_page().await?) })
    }

    /// Compares what both have counted since then, now that nothing is open: each event that got a sequence was recorded once, and in
    /// order; beside those of which nobody could know after a receiver that was killed.
    pub(crate) async fn counts_agree_since(&self, before: Counts) -> Result<()> {
        let now = self.counts().await?;
        ensure!(now.given > before.given, "nothing was counted: {now:?}");
        agree(before, now, now.given)
    }

    /// The same while changes are made: what the agent had given a moment ago was recorded, and no more than it has given. Returns what it
    /// had given, all of which was answered.
    pub(crate) async fn counts_agree_so_far(&self, before: Counts) -> Result<u64> {
        let page = self.agent_page().await?;
        let (given, taken) = (sum(&page, GIVEN, &[]), sum(&page, REQUESTS, &TAKEN));
        // One request is on its way at a time, with all that has a sequence and no answer: it is the next one that is taken, unless it was
        // taken already.
        self.agent_counts(REQUESTS, &TAKEN, taken + 1).await?;
        let now = self.counts().await?;
        let later = sum(&self.agent_page().await?, GIVEN, &[]);
        agree(before, Counts { given, ..now }, later)?;
        Ok(given)
    }

    /// Kills the agent with -9 while changes are made; returns from where its successor counts.
    ///
    /// Its count dies with it. All that it had given when it was asked last was recorded before; of what it has given since then, nobody
    /// can tell how much was still sent. Once its connection has ended nothing of that is recorded any more: what is recorded from then on
    /// was given by its successor, one for one.
    pub(crate) async fn kill_agent(&self, before: Counts) -> Result<Counts> {
        self.counts_agree_so_far(before).await?;
        self.runtime.with_agent(async |agent| agent.kill9()).await?;
        until("the dead agent's connection to end", async || {
            Ok((sum(&self.receiver_page().await?, "tidewatch_gateway_connections", &[]) == 0).then_some(()))
        })
        .await?;
        let now = Counts { given: 0, ..recorded(&self.receiver_page().await?) };
        ensure!(now.disordered == before.disordered, "{before:?} {now:?}");
        Ok(now)
    }

    /// Kills the receiver with -9 while changes are made; returns from where the agent and the next receiver count.
    pub(crate) async fn kill_receiver(&self, before: Counts) -> Result<Counts> {
        let answered = self.counts_agree_so_far(before).await?;
        self.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
        self.without_receiver(answered).await
    }

    /// From where the agent and the next receiver count, after one that is no more; `answered` is what the agent had given, and was
    /// answered, while that lived.
    ///
    /// Its count dies with it. What the agent has given since then may have been recorded by it, or by its successor if it comes once more
    /// under the same sequence, or by both if only the answer was lost, or by none if the successor answers a heartbeat first: then all that
    /// is not settled gets new sequences, and is counted with them. So the successor records what is given from now on, and at most that
    /// besides. While nobody answers, the agent gives no more than one request.
    pub(crate) async fn without_receiver(&self, answered: u64) -> Result<Counts> {
        let so_far = sum(&self.agent_page().await?, REQUESTS, &CONNECT);
        self.agent_counts(REQUESTS, &CONNECT, so_far + 1).await?;
        let given = sum(&self.agent_page().await?, GIVEN, &[]);
        Ok(Counts { given, open: given - answered, ..Counts::default() })
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

/// What a receiver's page says.
fn recorded(page: &str) -> Counts {
    let results = |results: &[&str]| {
        results.iter().map(|result| sum(page, "tidewatch_fleet_events_total", &[&format!("\"{result}\"")])).sum()
    };
    Counts {
        recorded: results(&["recorded"]),
        disordered: results(&["ahead", "below", "too-far"]),
        differing: sum(page, "tidewatch_fleet_digest_differences_total", &[]),
        ..Counts::default()
    }
}

/// What was given until now was recorded, and no more than what was given until `later`, and what was open.
fn agree(before: Counts, now: Counts, later: u64) -> Result<()> {
    let all = format!("{before:?} {now:?} {later}");
    let recorded = now.recorded.checked_sub(before.recorded).with_context(|| all.clone())?;
    let (least, most) = (now.given - before.given, later - before.given + before.open);
    ensure!((least..=most).contains(&recorded), "{recorded} recorded, {least} to {most} given: {all}");
    ensure!(now.disordered == before.disordered, "{before:?} {now:?}");
    Ok(())
}

#[test]
fn samples_are_summed_by_name_and_labels() {
    let page = "# HELP a_total x\na_total{r=\"x\",s=\"1\"} 2\na_total{r=\"y\",s=\"1\"} 3\na_total_more 5\nb 7\n";
    assert_eq!(sum(page, "a_total", &[]), 5);
    assert_eq!(sum(page, "a_total", &["\"y\""]), 3);
    assert_eq!(sum(page, "b", &[]), 7);
    assert_eq!(sum(page, "c", &[]), 0);
}
