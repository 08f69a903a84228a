//! Event counts of agent and receiver, and the state in which no work is pending between them.

use std::time::SystemTime;

use anyhow::{Context as _, Result, bail, ensure};
use tidewatch_testing::{landscape::until, stamps};

use crate::support::SingleRuntime;

/// Events to which the agent assigned a sequence.
const ASSIGNED: &str = "tidewatch_agent_events_total";
/// Requests of the agent.
const REQUESTS: &str = "tidewatch_agent_requests_total";
/// Labels of accepted requests with events.
const ACCEPTED: [&str; 2] = ["route=\"events\"", "\"taken\""];
/// Labels of requests with events for which no receiver was reachable.
const UNREACHABLE: [&str; 2] = ["route=\"events\"", "\"connect\""];

/// Lines at the end of a log that the report of a failure shows.
const LAST_LINES: usize = 25;

/// Counts of the current agent and receiver processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Events to which the agent assigned a sequence.
    pub(crate) assigned: u64,
    /// Events that the ledger recorded.
    pub(crate) recorded: u64,
    /// Events that arrived out of order or before a missing one.
    pub(crate) out_of_order: u64,
    /// Digests that did not agree.
    pub(crate) digest_mismatches: u64,
    /// Events assigned before this baseline that may still be recorded after it.
    pub(crate) open: u64,
}

/// The sum of a metric's samples that have all these labels.
pub(crate) fn sum(page: &str, name: &str, labels: &[&str]) -> u64 {
    let samples = page.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let (series, value) = rest.rsplit_once(' ')?;
        let mine = (series.is_empty() || series.starts_with('{')) && labels.iter().all(|label| series.contains(label));
        mine.then(|| value.parse::<f64>().ok()).flatten()
    });
    // Counts, and gauges of objects: whole and small numbers.
    samples.sum::<f64>() as u64
}

impl SingleRuntime {
    /// The agent's metrics.
    pub(crate) async fn agent_page(&self) -> Result<String> {
        Ok(self.runtime.with_agent(async |agent| agent.get("/metrics").await).await??.1)
    }

    /// The receiver's metrics.
    pub(crate) async fn receiver_page(&self) -> Result<String> {
        Ok(self.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??.1)
    }

    /// Waits until a metric of the agent has at least this value.
    pub(crate) async fn agent_metric_reaches(&self, name: &str, labels: &[&str], least: u64) -> Result<()> {
        until(&format!("{name}{labels:?} of at least {least} at the agent"), async || {
            Ok((sum(&self.agent_page().await?, name, labels) >= least).then_some(()))
        })
        .await
    }

    /// Waits until a metric of the receiver has at least this value.
    pub(crate) async fn receiver_metric_reaches(&self, name: &str, labels: &[&str], least: u64) -> Result<()> {
        until(&format!("{name}{labels:?} of at least {least} at the receiver"), async || {
            Ok((sum(&self.receiver_page().await?, name, labels) >= least).then_some(()))
        })
        .await
    }

    /// Waits until the receiver has the event of a list of this watch after a time.
    pub(crate) async fn list_arrives(&self, watch: &str, after: SystemTime) -> Result<()> {
        let file = self.landscape.stamp_file();
        until(&format!("a list of {watch}"), async || {
            let arrived = stamps::read(&file)?.into_iter().find(|stamp| {
                stamp.runtime == self.runtime.id().as_str()
                    && stamp.watch == watch
                    && stamp.resource_version == "-"
                    && stamp.enqueued >= after
            });
            Ok(arrived.map(drop))
        })
        .await
    }

    /// Waits until no work is pending: the agent has no open event, every watch works, and the receiver's queue is
    /// empty.
    pub(crate) async fn in_sync(&self) -> Result<()> {
        let synced = until("both sides to be in sync", async || {
            let page = self.agent_page().await?;
            for figure in ["events_waiting", "events_parked", "events_unsettled", "watches_failing", "watches_coarse"] {
                let open = sum(&page, &format!("tidewatch_agent_{figure}"), &[]);
                ensure!(open == 0, "{figure} of the agent is {open}");
            }
            let page = self.receiver_page().await?;
            for place in ["user", "in-work"] {
                let open = sum(&page, "tidewatch_queue_kymas", &[place]);
                ensure!(open == 0, "the receiver's queue has {open} Kymas in {place}");
            }
            Ok(Some(()))
        })
        .await;
        match synced {
            Ok(()) => Ok(()),
            Err(error) => Err(error.context(self.open_work().await.context("read what is open")?)),
        }
    }

    /// Describes the work that is pending on either side: figures of the receiver, and the ends of both logs.
    async fn open_work(&self) -> Result<String> {
        let agent = self.runtime.with_agent(async |agent| agent.log_text()).await??;
        let receiver = self.landscape.with_receiver(async |receiver| receiver.log_text()).await??;
        let page = self.receiver_page().await?;
        let figures = page.lines().filter(|line| line.starts_with("tidewatch_queue_") || line.contains("_manifest"));
        let figures: Vec<_> = figures.filter(|line| !line.ends_with(" 0") && !line.contains("_bucket")).collect();
        let tail = |log: &str| {
            let lines: Vec<_> = log.lines().collect();
            lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
        };
        Ok(format!(
            "figures of the receiver:\n{}\nlog of the receiver:\n{}\nlog of the agent:\n{}\n",
            figures.join("\n"),
            tail(&receiver),
            tail(&agent)
        ))
    }

    /// Returns the counts of the current processes, reading the agent's first.
    pub(crate) async fn counts(&self) -> Result<Counts> {
        let mut assigned = sum(&self.agent_page().await?, ASSIGNED, &[]);
        let mut counts = recorded(&self.receiver_page().await?);
        // An event between both readings would be in the second alone. A load never pauses, so the number of tries is limited.
        for _ in 0..20 {
            let later = sum(&self.agent_page().await?, ASSIGNED, &[]);
            if later == assigned {
                break;
            }
            assigned = later;
            counts = recorded(&self.receiver_page().await?);
        }
        Ok(Counts { assigned, ..counts })
    }

    /// Compares the counts since `before` while no work is pending: each event with a sequence was recorded once and in
    /// order. Up to `open` events more are accepted: their fate is unknown after a receiver was killed.
    pub(crate) async fn counts_agree_since(&self, before: Counts) -> Result<()> {
        let now = self.counts().await?;
        ensure!(now.assigned > before.assigned, "no event was counted: {now:?}");
        check_counts(before, now, now.assigned)
    }

    /// Compares the counts during a load: the events that the agent had assigned a moment ago were recorded, and no
    /// more than it has assigned by now. Returns the former number, all acknowledged.
    pub(crate) async fn counts_agree_so_far(&self, before: Counts) -> Result<u64> {
        let page = self.agent_page().await?;
        let assigned = sum(&page, ASSIGNED, &[]);
        let taken = sum(&page, REQUESTS, &ACCEPTED);
        // One request is in flight at a time, with all events that have a sequence and no acknowledgement: it is the
        // next request to be accepted, unless it was accepted already.
        self.agent_metric_reaches(REQUESTS, &ACCEPTED, taken + 1).await?;
        let now = self.counts().await?;
        let later = sum(&self.agent_page().await?, ASSIGNED, &[]);
        check_counts(before, Counts { assigned, ..now }, later)?;
        Ok(assigned)
    }

    /// Kills the agent with SIGKILL during a load; returns the baseline of its successor.
    ///
    /// Its counts are lost with it. All events that it had assigned at the last reading were recorded before; how many
    /// later ones were still sent is unknown. Once its connection has ended none of them is recorded any more: from
    /// then on each recorded event was assigned by the successor.
    pub(crate) async fn kill_agent(&self, before: Counts) -> Result<Counts> {
        self.counts_agree_so_far(before).await?;
        self.runtime.with_agent(async |agent| agent.kill9()).await?;
        until("the dead agent's connection to end", async || {
            Ok((sum(&self.receiver_page().await?, "tidewatch_gateway_connections", &[]) == 0).then_some(()))
        })
        .await?;
        let now = Counts { assigned: 0, ..recorded(&self.receiver_page().await?) };
        ensure!(now.out_of_order == before.out_of_order, "{before:?} {now:?}");
        Ok(now)
    }

    /// Kills the receiver with SIGKILL during a load; returns the baseline of the agent and the next receiver.
    pub(crate) async fn kill_receiver(&self, before: Counts) -> Result<Counts> {
        let answered = self.counts_agree_so_far(before).await?;
        self.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
        self.baseline_after_receiver(answered).await
    }

    /// Returns the baseline of the agent and the next receiver after the previous one has ended; `answered` is the
    /// number of events that the agent had assigned and the previous receiver had acknowledged.
    ///
    /// The receiver's counts are lost with it. An event that the agent assigned later may have been recorded by the
    /// previous receiver; by its successor, if it is retransmitted with the same sequence; by both, if only the
    /// acknowledgement was lost; or by none, if the successor answers a heartbeat first: then all unsettled events get
    /// new sequences and are counted with them. So the successor records all events assigned from now on, and at most
    /// these others. While no receiver answers, the agent assigns no more than one request's events.
    pub(crate) async fn baseline_after_receiver(&self, answered: u64) -> Result<Counts> {
        let so_far = sum(&self.agent_page().await?, REQUESTS, &UNREACHABLE);
        self.agent_metric_reaches(REQUESTS, &UNREACHABLE, so_far + 1).await?;
        let assigned = sum(&self.agent_page().await?, ASSIGNED, &[]);
        Ok(Counts { assigned, open: assigned - answered, ..Counts::default() })
    }

    /// Searches both logs for lines that no fault of a test excuses.
    pub(crate) async fn logs_are_clean(&self) -> Result<()> {
        let agent = self.runtime.with_agent(async |agent| agent.log_text()).await??;
        let receiver = self.landscape.with_receiver(async |receiver| receiver.log_text()).await??;
        for (program, log) in [("agent", &agent), ("receiver", &receiver)] {
            for word in ["panicked", "Digests of watches differ"] {
                if let Some(line) = log.lines().find(|line| line.contains(word)) {
                    bail!("the {program}'s log has: {line}");
                }
            }
        }
        ensure!(self.counts().await.context("count")?.digest_mismatches == 0, "digests differed");
        Ok(())
    }
}

/// Reads the counts of a receiver from its metrics page.
fn recorded(page: &str) -> Counts {
    let results = |results: &[&str]| {
        results.iter().map(|result| sum(page, "tidewatch_fleet_events_total", &[&format!("\"{result}\"")])).sum()
    };
    Counts {
        recorded: results(&["recorded"]),
        out_of_order: results(&["ahead", "below", "too-far"]),
        digest_mismatches: sum(page, "tidewatch_fleet_digest_differences_total", &[]),
        ..Counts::default()
    }
}

/// Checks that the events assigned by now were recorded, and no more than those assigned by `later` plus the open ones.
fn check_counts(before: Counts, now: Counts, later: u64) -> Result<()> {
    let all = format!("{before:?} {now:?} {later}");
    let recorded = now.recorded.checked_sub(before.recorded).with_context(|| all.clone())?;
    let least = now.assigned - before.assigned;
    let most = later - before.assigned + before.open;
    ensure!((least..=most).contains(&recorded), "{recorded} recorded, {least} to {most} assigned: {all}");
    ensure!(now.out_of_order == before.out_of_order, "{before:?} {now:?}");
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
