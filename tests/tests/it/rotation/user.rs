//! A user who writes all the time, and what the API servers know of that.

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
use tidewatch_shared::{
    api::Kyma,
    names::{SKR_KYMA, SKR_NAMESPACE},
};
use tidewatch_tests::{
    control_plane::{
        Cluster, Person,
        audit::{Mark, Timed},
    },
    landscape::until,
};
use tokio::{task::JoinHandle, time};

use crate::support::Member;

/// Changes a second.
const WRITES_PER_SECOND: u32 = 20;

/// Writes to all Kymas in turns. Who was held up makes up for it: so many writes as seconds ask for are to come.
pub(super) struct User {
    ended: Arc<AtomicBool>,
    task: JoinHandle<Result<Written>>,
    clusters: Vec<(Arc<Cluster>, Mark)>,
}

/// What a user wrote.
#[derive(Default)]
struct Written {
    count: usize,
    /// What the last write to each Kyma has made of it.
    last: Vec<Kyma>,
}

/// What the audit logs have of a user's writes.
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
        let (kymas, ended) = (kymas.collect(), Arc::new(AtomicBool::new(false)));
        let task = tokio::spawn(write(kymas, ended.clone()));
        Ok(Self { ended, task, clusters })
    }

    /// Waits until there are as many writes as the time since the first one asks for.
    pub(super) async fn keeps_pace(&self) -> Result<()> {
        until("the user to have written as much as it should", async || {
            let record = self.record()?;
            ensure!(record.is_enough(), "{record}");
            Ok(Some(()))
        })
        .await
    }

    /// The last write to each Kyma, and what was recorded of all. None may have failed.
    pub(super) async fn stop(mut self) -> Result<(Vec<Kyma>, Record)> {
        self.ended.store(true, Ordering::Relaxed);
        let written = (&mut self.task).await??;
        let record = until("all writes to be recorded", async || {
            let record = self.record()?;
            ensure!(record.begun.len() == written.count, "{} are: {record}", written.count);
            Ok(Some(record))
        })
        .await?;
        ensure!(record.refused == 0, "{record}");
        Ok((written.last, record))
    }

    fn record(&self) -> Result<Record> {
        let mut record = Record { begun: Vec::new(), refused: 0 };
        for (cluster, mark) in &self.clusters {
            for Timed { write, begun, .. } in cluster.timed_writes_since(*mark)? {
                if write.user == Person::User.name() && write.resource == "kymas" {
                    record.begun.push(begun);
                    record.refused += usize::from(write.code >= 400);
                }
            }
        }
        record.begun.sort_unstable();
        Ok(record)
    }
}

async fn write(kymas: Vec<Api<Kyma>>, ended: Arc<AtomicBool>) -> Result<Written> {
    let mut pace = time::interval(Duration::from_secs(1) / WRITES_PER_SECOND);
    let mut written = Written::default();
    while !ended.load(Ordering::Relaxed) {
        written.last.clear();
        // Each turn takes the other channel.
        let channel = if (written.count / kymas.len()).is_multiple_of(2) { "regular" } else { "fast" };
        let change = Patch::Merge(json!({"spec": {"channel": channel}}));
        for kyma in &kymas {
            pace.tick().await;
            let made = kyma.patch(SKR_KYMA, &PatchParams::default(), &change).await;
            written.last.push(made.context("a user's write failed")?);
            written.count += 1;
        }
    }
    Ok(written)
}

impl Record {
    /// Whole seconds from the first to the last.
    fn seconds(&self) -> u64 {
        let span = self.begun.first().zip(self.begun.last()).map(|(first, last)| last.duration_since(*first).as_secs());
        span.and_then(|seconds| u64::try_from(seconds).ok()).unwrap_or(0)
    }

    fn is_enough(&self) -> bool {
        self.begun.len() as u64 >= u64::from(WRITES_PER_SECOND) * self.seconds()
    }

    /// In the whole second in which there were the fewest.
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
        let (count, seconds, fewest) = (self.begun.len(), self.seconds(), self.fewest());
        write!(f, "{count} writes in {seconds} s, {} of them refused, {fewest} in the poorest second", self.refused)
    }
}
