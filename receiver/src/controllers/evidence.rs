//! Evidence about the runtimes of the whole fleet. Each replica summarizes those of its shards, and a task that decides for the
//! fleet merges the summaries of all replicas.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::FutureExt as _;
use serde::{Serialize, de::DeserializeOwned};
use tidewatch_cluster::leader::FleetRole;
use tidewatch_fleet::peers::{AskError, Peers, Responders, Topic};
use tidewatch_kit::error_levels;
use tokio::time::timeout;

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
    pub(super) async fn ask<A: DeserializeOwned>(
        &self,
        topic: Topic,
        question: &impl Serialize,
    ) -> Result<Vec<A>, AskError> {
        let asked = timeout(ASK_TIMEOUT, self.peers.ask_all(topic, encode(topic, question)?));
        let answers = asked.await.map_err(|_| AskError::Incomplete)??;
        answers.iter().map(|answer| decode(topic, answer)).collect()
    }

    /// Answers the questions of a topic with a function that does not wait.
    pub(super) fn respond<Q, A>(&self, topic: Topic, answer: impl Fn(Q) -> Result<A, AskError> + Send + Sync + 'static)
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
pub(super) fn encode(topic: Topic, content: &impl Serialize) -> Result<Bytes, AskError> {
    serde_json::to_vec(content).map(Bytes::from).map_err(|error| unusable(topic, &error))
}

/// Parses a question or an answer. Another replica may be of another version.
///
/// # Errors
/// [`AskError::Unavailable`].
pub(super) fn decode<T: DeserializeOwned>(topic: Topic, content: &[u8]) -> Result<T, AskError> {
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
pub(super) mod tests {
    use std::future;

    use futures::future::BoxFuture;
    use parking_lot::Mutex;
    use tidewatch_cluster::leader::WriteFence;

    use super::*;

    /// Replicas that answer for themselves.
    #[derive(Default)]
    pub(in crate::controllers) struct FakePeers {
        pub(in crate::controllers) replicas: Mutex<Vec<Responders>>,
        /// Returned instead of answers.
        pub(in crate::controllers) error: Mutex<Option<AskError>>,
        /// Number of questions.
        pub(in crate::controllers) asked: Mutex<u32>,
        /// The replica with the fleet role.
        pub(in crate::controllers) holder: Mutex<Option<Responders>>,
    }

    impl FakePeers {
        pub(in crate::controllers) fn fail(&self, error: Option<AskError>) {
            *self.error.lock() = error;
        }

        pub(in crate::controllers) fn hold(&self, replica: Responders) {
            *self.holder.lock() = Some(replica);
        }

        pub(in crate::controllers) fn asked(&self) -> u32 {
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
    struct Silent;

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
        pub(in crate::controllers) fn alone() -> Self {
            let responders = Responders::default();
            let role = FleetRole::held(WriteFence::default());
            Self { role, peers: Arc::new(responders.clone()), responders }
        }

        /// A further replica, which does not have the fleet role.
        pub(in crate::controllers) fn joining(peers: &Arc<FakePeers>) -> Self {
            let responders = Responders::default();
            peers.replicas.lock().push(responders.clone());
            Self { role: FleetRole::released(), peers: peers.clone(), responders }
        }
    }

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
