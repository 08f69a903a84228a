//! Users who change their runtimes one change after the other while the agents run, and the times of all changes.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tidewatch_testing::load::{SimulatedFleet, switch_channel_once};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep},
};

use super::setup::shard_of;

/// One change.
pub(super) struct Change {
    pub(super) shard: u16,
    pub(super) begun: Instant,
    /// Instant at which it was shown; `None` if it was lost.
    pub(super) shown: Option<Instant>,
}

impl Change {
    /// Seconds until it was shown.
    pub(super) fn seconds(&self) -> Option<f64> {
        Some(self.shown?.duration_since(self.begun).as_secs_f64())
    }
}

/// The users of all runtimes. They end when dropped.
pub(super) struct Users {
    is_over: watch::Sender<bool>,
    tasks: JoinSet<Vec<Change>>,
}

impl Users {
    /// Starts them: so many changes a second of all together.
    pub(super) fn start(fleet: &SimulatedFleet, rate: u32) -> Result<Self> {
        let members = fleet.members();
        let pause = Duration::from_secs(u64::try_from(members.len())?) / rate.max(1);
        let (is_over, over) = watch::channel(false);
        let mut tasks = JoinSet::new();
        for (member, number) in members.iter().zip(0_u32..) {
            // Spread over the pause: so many users do not act at the same moment.
            let offset = pause / u32::try_from(members.len())? * number;
            let member = member.without_agent();
            let mut over = over.clone();
            tasks.spawn(async move {
                let mut changes = Vec::new();
                let shard = shard_of(&member);
                sleep(offset).await;
                let mut ticks = interval(pause);
                ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
                loop {
                    tokio::select! {
                        _ = ticks.tick() => {}
                        _ = over.wait_for(|over| *over) => return changes,
                    }
                    let begun = Instant::now();
                    let shown = switch_channel_once(&member).await.ok().map(|()| Instant::now());
                    changes.push(Change { shard, begun, shown });
                }
            });
        }
        Ok(Self { is_over, tasks })
    }

    /// Lets each user wait for its last change; returns all changes in the order of their beginnings.
    pub(super) async fn end(mut self) -> Result<Vec<Change>> {
        self.is_over.send_replace(true);
        let mut changes = Vec::new();
        while let Some(ended) = self.tasks.join_next().await {
            changes.extend(ended.context("a user ended early")?);
        }
        changes.sort_by_key(|change| change.begun);
        Ok(changes)
    }
}
