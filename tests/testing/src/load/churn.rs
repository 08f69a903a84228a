//! A runtime whose modules, agent and certificate change for as long as it exists.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use tokio::time::sleep;

use super::{Agent, EnrolmentClient, FleetMember, Pace, toggle_module};

/// Turn in each cycle after which the agent gets another certificate, and so another connection.
const ENROLS: u32 = 1;
/// Turn in each cycle after which the agent restarts: a new epoch, and every watch is listed anew.
const RESTARTS: u32 = 3;
/// Turns of a cycle.
const CYCLE: u32 = 5;

/// Counters over all runtimes that change.
#[derive(Debug, Default)]
pub struct ChurnCounters {
    changes: AtomicU64,
    certificates: AtomicU64,
    restarts: AtomicU64,
}

impl ChurnCounters {
    /// Changes of modules that are in the status of the runtime's Kyma.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Certificates that replaced an earlier one.
    pub fn certificates(&self) -> u64 {
        self.certificates.load(Ordering::Relaxed)
    }

    /// Restarts of agents.
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }
}

/// One runtime with its user and its agent.
pub struct ChangingRuntime {
    pub(super) member: FleetMember,
    pub(super) agent: Agent,
    pub(super) enrolment: EnrolmentClient,
    /// Module that the user selects and deselects.
    pub(super) module: String,
    /// Pause after each turn.
    pub(super) pause: Duration,
    pub(super) counters: Arc<ChurnCounters>,
}

impl ChangingRuntime {
    /// Takes turns for ever: a change of the modules, and in some turns another certificate or a restart of the agent.
    /// `first` is the number of the first turn, so that not all runtimes do the same at once.
    ///
    /// # Errors
    /// When a change does not reach the status of the runtime's Kyma in time, or no certificate is issued.
    pub async fn run(mut self, first: u32) -> Result<()> {
        for turn in first.. {
            self.turn(turn).await.with_context(|| format!("turn {turn} of {}", self.member.name()))?;
            sleep(self.pause).await;
        }
        Ok(())
    }

    async fn turn(&mut self, turn: u32) -> Result<()> {
        toggle_module(&self.member, &mut self.agent, &self.module, Pace { changes: 1, pause: self.pause }).await?;
        self.counters.changes.fetch_add(1, Ordering::Relaxed);
        match turn % CYCLE {
            ENROLS => {
                let issued = self.enrolment.enrol().await?;
                self.agent.set_identity(issued)?;
                self.counters.certificates.fetch_add(1, Ordering::Relaxed);
            }
            RESTARTS => {
                self.member.handle().update(|state| {
                    state.begin_epoch();
                    state.mark_lists();
                });
                self.counters.restarts.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
        Ok(())
    }
}
