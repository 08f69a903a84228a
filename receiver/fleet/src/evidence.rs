//! Evidence about the runtimes of the whole fleet. Each replica summarizes those of its shards, and a task that decides for the
//! fleet merges the summaries of all replicas.

#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::FutureExt as _;
use serde::{Serialize, de::DeserializeOwned};
use tidewatch_cluster::leader::FleetRole;
use tidewatch_kit::error_levels;
use tokio::time::timeout;

use crate::peers::{AskError, Peers, Responders, Topic};

/// Deadline of a question to all replicas. Peers have shorter deadlines of their own.
const ASK_TIMEOUT: Duration = Duration::from_secs(6);

/// Replicas of the receiver, for a task of each that decides for the fleet in one of them.
#[derive(Clone)]
pub struct Replicas {
    /// Permission to decide for the fleet.
    pub role: FleetRole,
    /// All replicas.
    pub peers: Arc<dyn Peers>,
    /// Answers the questions of other replicas.
    pub responders: Responders,
}

impl Replicas {
    /// Asks all replicas. The answers are about each runtime of the fleet.
    ///
    /// # Errors
    /// [`AskError`]: a decision that needs the evidence has to wait.
    pub async fn ask<A: DeserializeOwned>(&self, topic: Topic, question: &impl Serialize) -> Result<Vec<A>, AskError> {
        let asked = timeout(ASK_TIMEOUT, self.peers.ask_all(topic, encode(topic, question)?));
        let answers = asked.await.map_err(|_| AskError::Incomplete)??;
        answers.iter().map(|answer| decode(topic, answer)).collect()
    }

    /// Asks the replica that runs the fleet-wide tasks.
    ///
    /// # Errors
    /// [`AskError`].
    pub async fn ask_fleet_holder<A: DeserializeOwned>(
        &self,
        topic: Topic,
        question: &impl Serialize,
    ) -> Result<A, AskError> {
        decode(topic, &self.peers.ask_fleet_holder(topic, encode(topic, question)?).await?)
    }

    /// Answers the questions of a topic with a function that does not wait.
    pub fn respond<Q, A>(&self, topic: Topic, answer: impl Fn(Q) -> Result<A, AskError> + Send + Sync + 'static)
    where
        Q: DeserializeOwned,
        A: Serialize,
    {
        let respond = move |question: Bytes| {
            let answered = decode(topic, &question).and_then(&answer).and_then(|answer| encode(topic, &answer));
            async { answered }.boxed()
        };
        self.responders.set(topic, Arc::new(respond));
    }
}

/// Serializes a question or an answer.
///
/// # Errors
/// [`AskError::Unavailable`].
pub fn encode(topic: Topic, content: &impl Serialize) -> Result<Bytes, AskError> {
    serde_json::to_vec(content).map(Bytes::from).map_err(|error| unusable(topic, &error))
}

/// Parses a question or an answer. Another replica may be of another version.
///
/// # Errors
/// [`AskError::Unavailable`].
pub fn decode<T: DeserializeOwned>(topic: Topic, content: &[u8]) -> Result<T, AskError> {
    serde_json::from_slice(content).map_err(|error| unusable(topic, &error))
}

fn unusable(topic: Topic, error: &serde_json::Error) -> AskError {
    let topic: &str = topic.into();
    tracing::debug!(
        topic,
        error = error_levels::own(error),
        "A question between replicas, or its answer, cannot be used"
    );
    AskError::Unavailable
}

#[cfg(test)]
mod tests {
    use super::{
        testing::{FakePeers, Silent},
        *,
    };

    #[tokio::test]
    async fn every_replica_answers_in_its_words_or_nothing_is_known() {
        let topic = Topic::AgentUpgrade;
        let peers = Arc::new(FakePeers::default());
        let [asking, _] = [1, 2].map(|summand: u32| {
            let replica = Replicas::joining(&peers);
            replica.respond(topic, move |n: u32| n.checked_add(summand).ok_or(AskError::Unavailable));
            replica
        });
        assert_eq!(asking.ask::<u32>(topic, &5).await, Ok(vec![6, 7]));
        assert_eq!(asking.ask::<u32>(topic, &u32::MAX).await, Err(AskError::Unavailable), "one cannot answer");
        assert_eq!(asking.ask::<u32>(topic, &"five").await, Err(AskError::Unavailable), "of another version");
        assert_eq!(asking.ask::<String>(topic, &5).await, Err(AskError::Unavailable), "an answer of another version");
        peers.fail(Some(AskError::Incomplete));
        assert_eq!(asking.ask::<u32>(topic, &5).await, Err(AskError::Incomplete));
    }

    #[tokio::test(start_paused = true)]
    async fn silence_ends_at_the_deadline() {
        let replicas = Replicas { peers: Arc::new(Silent), ..Replicas::alone() };
        assert_eq!(replicas.ask::<u32>(Topic::CaRotation, &1).await, Err(AskError::Incomplete));
    }
}
