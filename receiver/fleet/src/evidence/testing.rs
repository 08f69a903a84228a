//! Replicas in memory, for the tests of tasks that decide for the fleet.

use std::future;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use tidewatch_cluster::leader::WriteFence;

use super::*;

/// Replicas that answer for themselves.
#[derive(Default)]
pub struct FakePeers {
    /// All replicas.
    pub replicas: Mutex<Vec<Responders>>,
    /// Returned instead of answers.
    pub error: Mutex<Option<AskError>>,
    /// Number of questions.
    pub asked: Mutex<u32>,
    /// The replica with the fleet role.
    pub holder: Mutex<Option<Responders>>,
}

impl FakePeers {
    /// Returns this error instead of answers from now on.
    pub fn fail(&self, error: Option<AskError>) {
        *self.error.lock() = error;
    }

    /// Gives the fleet role to a replica.
    pub fn hold(&self, replica: Responders) {
        *self.holder.lock() = Some(replica);
    }

    /// Number of questions so far.
    pub fn asked(&self) -> u32 {
        *self.asked.lock()
    }
}

impl Peers for FakePeers {
    fn ask_all(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Vec<Bytes>, AskError>> {
        *self.asked.lock() += 1;
        let replicas = self.replicas.lock().clone();
        let error = *self.error.lock();
        Box::pin(async move {
            let mut answers = error.map_or(Ok(Vec::new()), Err)?;
            for replica in replicas {
                answers.push(replica.answer(topic, question.clone()).await?);
            }
            Ok(answers)
        })
    }

    fn ask_fleet_holder(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Bytes, AskError>> {
        let holder = self.holder.lock().clone();
        Box::pin(async move { holder.ok_or(AskError::NoFleetHolder)?.answer(topic, question).await })
    }
}

/// Peers that never answer.
pub struct Silent;

impl Peers for Silent {
    fn ask_all(&self, _topic: Topic, _question: Bytes) -> BoxFuture<'_, Result<Vec<Bytes>, AskError>> {
        Box::pin(future::pending())
    }

    fn ask_fleet_holder(&self, _topic: Topic, _question: Bytes) -> BoxFuture<'_, Result<Bytes, AskError>> {
        Box::pin(future::pending())
    }
}

impl Replicas {
    /// The replicas of a receiver that is the only one.
    pub fn alone() -> Self {
        let responders = Responders::default();
        let role = FleetRole::held(WriteFence::default());
        Self { role, peers: Arc::new(responders.clone()), responders }
    }

    /// A further replica, which does not have the fleet role.
    pub fn joining(peers: &Arc<FakePeers>) -> Self {
        let responders = Responders::default();
        peers.replicas.lock().push(responders.clone());
        Self { role: FleetRole::released(), peers: peers.clone(), responders }
    }
}
