//! A user who changes Kymas continuously, and the audit logs' record of these writes.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tidewatch_api::{
    Kyma,
    names::{SKR_KYMA, SKR_NAMESPACE},
};
use tidewatch_testing::{
    control_plane::{
        Cluster, ClusterUser,
        audit::{Mark, TimedWrite},
    },
    landscape::until,
};
use tokio::{task::JoinHandle, time};

use crate::support::Member;

/// Writes per second.
const WRITES_PER_SECOND: u32 = 20;

/// Writes to all Kymas in turns.
pub(super) struct User {
    ended: Arc<AtomicBool>,
    task: JoinHandle<Result<Writes>>,
    clusters: Vec<(Arc<Cluster>, Mark)>,
}

/// The writes of a user.
#[derive(Default)]
struct Writes {
    count: usize,
    /// Each Kyma as its last write returned it.
    last: Vec<Kyma>,
}

/// The user's writes in the audit logs.
pub(super) struct Record {
    begun: Vec<Timestamp>,
    refused: usize,
}

impl User {
    pub(super) async fn start(members: &[Member]) -> Result<Self> {
        for Member { runtime, .. } in members {
            // A path can be proven before the first reconcile has placed the Kyma that a user would edit.
            let placed = format!("the Kyma to be placed in {}", runtime.name());
            until(&placed, async || Ok(runtime.skr_kyma().await?.map(drop))).await?;
        }
        let clusters = members.iter().map(|member| member.runtime.cluster());
        let clusters = clusters.map(|cluster| Ok((cluster.clone(), cluster.audit_mark()?))).collect::<Result<_>>()?;
        let kymas = members.iter().map(|member| Api::<Kyma>::namespaced(member.runtime.user(), SKR_NAMESPACE));
        let kymas = kymas.collect();
        let ended = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(write(kymas, ended.clone()));
        Ok(Self { ended, task, clusters })
    }

    /// Waits until the user has written again.
    pub(super) async fn goes_on(&self) -> Result<()> {
        let before = self.record()?.begun.len();
        until("the user to write again", async || {
            let record = self.record()?;
            ensure!(record.begun.len() > before, "{record}");
            Ok(Some(()))
        })
        .await
    }

    /// Stops the user; returns the last state of each Kyma and the record of all writes. Fails if a write was refused.
    pub(super) async fn stop(mut self) -> Result<(Vec<Kyma>, Record)> {
        self.ended.store(true, Ordering::Relaxed);
        let written = (&mut self.task).await??;
        let record = until("all writes to be recorded", async || {
            let record = self.record()?;
            ensure!(record.begun.len() == written.count, "{} writes were made: {record}", written.count);
            Ok(Some(record))
        })
        .await?;
        ensure!(record.refused == 0, "{record}");
        Ok((written.last, record))
    }

    fn record(&self) -> Result<Record> {
        let mut record = Record { begun: Vec::new(), refused: 0 };
        for (cluster, mark) in &self.clusters {
            for TimedWrite { write, begun, .. } in cluster.timed_writes_since(*mark)? {
                if write.user == ClusterUser::User.name() && write.resource == "kymas" {
                    record.begun.push(begun);
                    record.refused += usize::from(write.code >= 400);
                }
            }
        }
        record.begun.sort_unstable();
        Ok(record)
    }
}

async fn write(kymas: Vec<Api<Kyma>>, ended: Arc<AtomicBool>) -> Result<Writes> {
    let mut pace = time::interval(Duration::from_secs(1) / WRITES_PER_SECOND);
    let mut written = Writes::default();
    while !ended.load(Ordering::Relaxed) {
        written.last.clear();
        // Each turn switches to the other channel.
        let channel = if (written.count / kymas.len()).is_multiple_of(2) { "regular" } else { "fast" };
        let change = Patch::Merge(json!({"spec": {"channel": channel}}));
        for kyma in &kymas {
            pace.tick().await;
            let patched = kyma.patch(SKR_KYMA, &PatchParams::default(), &change).await;
            written.last.push(patched.context("a user's write failed")?);
            written.count += 1;
        }
    }
    Ok(written)
}

impl Record {
    /// Whole seconds between the first and the last write.
    fn seconds(&self) -> u64 {
        let span = self.begun.first().zip(self.begun.last()).map(|(first, last)| last.duration_since(*first).as_secs());
        span.and_then(|seconds| u64::try_from(seconds).ok()).unwrap_or(0)
    }

    /// The smallest number of writes in any whole second.
    fn fewest(&self) -> usize {
        let mut counts: BTreeMap<u64, usize> = (0..self.seconds()).map(|second| (second, 0)).collect();
        for begun in &self.begun {
            let second = u64::try_from(begun.duration_since(self.begun[0]).as_secs()).unwrap_or(0);
            counts.entry(second).and_modify(|count| *count += 1);
        }
        counts.into_values().min().unwrap_or(0)
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.begun.len();
        let seconds = self.seconds();
        let fewest = self.fewest();
        write!(f, "{count} writes in {seconds} s, {} of them refused, {fewest} in the slowest second", self.refused)
    }
}
