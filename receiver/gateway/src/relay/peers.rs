//! Questions of this replica to the others.

use std::{
    collections::BTreeSet,
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tidewatch_api::shard::{ShardCount, ShardId};
use tidewatch_fleet::peers::{AskError, Peers, Topic};
use tidewatch_kit::{random::Random, variant::VariantName as _};
use tokio::time::{Instant, sleep, timeout_at};

use super::{
    Answers, Holder, Relay, Replica,
    answers::Places,
    question::{self, Answer, MAX_QUESTION_BYTES, QuestionError},
};

/// Shortest pause before a question is repeated, longer than the first one of a connection that could not be opened; as
/// much again is jitter.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// The replicas of a receiver that is split into shards. Clones share it.
#[derive(Clone)]
pub struct ReplicaPeers(Arc<Inner>);

struct Inner {
    relay: Relay,
    answers: Answers,
    places: Places,
}

impl ReplicaPeers {
    /// Asks the replicas that `relay` knows, over its connections, and this one by its own `answers`.
    pub fn new(relay: Relay, answers: Answers) -> Self {
        Self(Arc::new(Inner { relay, answers, places: Places::new() }))
    }

    /// Asks all replicas in parallel, until their answers cover all shards.
    async fn collect(&self, topic: Topic, question: Bytes) -> Result<Vec<Bytes>, AskError> {
        let Inner { relay, places, .. } = &*self.0;
        let deadline = self.deadline(topic, &question)?;
        let place = timeout_at(deadline, places.acquire(topic)).await;
        let _place = place.ok().flatten().ok_or(AskError::Incomplete)?;
        let mut coverage = Coverage::new(relay.0.holders.shards());
        let others = relay.0.holders.replicas().into_iter().map(|replica| {
            let question = question.clone();
            async move { self.ask(&replica, topic, question, deadline).await.ok() }.boxed()
        });
        let mut asked: FuturesUnordered<_> = others.collect();
        asked.push(async { self.answer(topic, question, deadline).await.ok() }.boxed());
        while let Some(answered) = asked.next().await {
            if let Some(answer) = answered
                && coverage.add(answer)
            {
                return Ok(coverage.payloads);
            }
        }
        tracing::debug!(topic = topic.as_str(), missing = ?coverage.missing, "Shards without an answer");
        Err(AskError::Incomplete)
    }

    async fn ask_holder(&self, topic: Topic, question: Bytes) -> Result<Bytes, AskError> {
        let Inner { relay, places, .. } = &*self.0;
        let deadline = self.deadline(topic, &question)?;
        let place = timeout_at(deadline, places.acquire(topic)).await;
        let _place = place.ok().flatten().ok_or(AskError::Unavailable)?;
        match relay.0.holders.fleet_holder() {
            Holder::Here => Ok(self.answer(topic, question, deadline).await?.payload),
            Holder::At(replica) => match self.ask(&replica, topic, question, deadline).await {
                Ok(answer) => Ok(answer.payload),
                Err(QuestionError::Gone | QuestionError::Late | QuestionError::Broken) => Err(AskError::NoFleetHolder),
                Err(QuestionError::Unavailable | QuestionError::Refused | QuestionError::TooLarge) => {
                    Err(AskError::Unavailable)
                }
            },
            Holder::Unknown => Err(AskError::NoFleetHolder),
        }
    }

    /// Returns the time at which a question that begins now must have its answers.
    fn deadline(&self, topic: Topic, question: &Bytes) -> Result<Instant, AskError> {
        if question.len() > MAX_QUESTION_BYTES {
            tracing::warn!(topic = topic.as_str(), bytes = question.len(), "The question to the replicas is too large");
            return Err(AskError::Unavailable);
        }
        Ok(Instant::now() + self.0.relay.0.deadlines.of_question(topic))
    }

    /// Answers a question for the shards of this replica.
    async fn answer(&self, topic: Topic, question: Bytes, deadline: Instant) -> Result<Answer, AskError> {
        let answer = timeout_at(deadline, self.0.answers.answer(topic, question)).await;
        answer.unwrap_or(Err(AskError::Unavailable))
    }

    /// Asks one replica until the deadline; once more if the first attempt fails.
    async fn ask(
        &self,
        replica: &Arc<Replica>,
        topic: Topic,
        question: Bytes,
        deadline: Instant,
    ) -> Result<Answer, QuestionError> {
        let first = self.attempt(replica, topic, question.clone(), deadline).await;
        let Err(error) = first else { return first };
        let jitter = Random::new(RandomState::new().hash_one(&replica.name)).jitter(RETRY_PAUSE);
        let pause = RETRY_PAUSE + jitter;
        if !error.permits_retry(topic) || Instant::now() + pause >= deadline {
            return Err(error);
        }
        sleep(pause).await;
        self.attempt(replica, topic, question, deadline).await
    }

    async fn attempt(
        &self,
        replica: &Arc<Replica>,
        topic: Topic,
        question: Bytes,
        deadline: Instant,
    ) -> Result<Answer, QuestionError> {
        let relay = &self.0.relay;
        let exchange = async {
            let request = question::request(replica, topic, question)?;
            let response = relay.pool(replica).send(relay, request).await?;
            Answer::read(response, relay.0.holders.shards()).await
        };
        let result = timeout_at(deadline, exchange).await.unwrap_or(Err(QuestionError::Late));
        if let Err(error) = result {
            tracing::debug!(replica = %replica.name, topic = topic.as_str(), reason = error.as_str(), "No answer of a replica");
            relay.0.metrics.question_failed(topic, error);
        }
        result
    }
}

impl Peers for ReplicaPeers {
    fn ask_all(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Vec<Bytes>, AskError>> {
        Box::pin(async move {
            let result = self.collect(topic, question).await;
            self.0.relay.0.metrics.asked(topic, result.as_ref().err());
            result
        })
    }

    fn ask_fleet_holder(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Bytes, AskError>> {
        Box::pin(async move {
            let result = self.ask_holder(topic, question).await;
            self.0.relay.0.metrics.asked(topic, result.as_ref().err());
            result
        })
    }
}

/// The peers of a receiver that shares its shards with no other one: itself.
pub struct OnlyPeer {
    /// Answers of this receiver.
    pub answers: Answers,
    /// Number of shards of the fleet.
    pub shards: ShardCount,
}

impl Peers for OnlyPeer {
    fn ask_all(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Vec<Bytes>, AskError>> {
        Box::pin(async move {
            let mut coverage = Coverage::new(self.shards);
            let is_whole = coverage.add(self.answers.answer(topic, question).await?);
            is_whole.then_some(coverage.payloads).ok_or(AskError::Incomplete)
        })
    }

    fn ask_fleet_holder(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Bytes, AskError>> {
        Box::pin(async move { Ok(self.answers.answer(topic, question).await?.payload) })
    }
}

/// Answers to one question, and the shards that they do not cover yet.
struct Coverage {
    missing: BTreeSet<ShardId>,
    payloads: Vec<Bytes>,
}

impl Coverage {
    fn new(shards: ShardCount) -> Self {
        Self { missing: shards.shards().collect(), payloads: Vec::new() }
    }

    /// Adds an answer; true if all shards are covered. One that covers no further shard, such as that of a replica without
    /// any, is dropped. A shard that moved between two answers may be in both.
    fn add(&mut self, answer: Answer) -> bool {
        let before = self.missing.len();
        for (shard, _) in &answer.shards {
            self.missing.remove(shard);
        }
        if self.missing.len() < before {
            self.payloads.push(answer.payload);
        }
        self.missing.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use tidewatch_api::identity::Instance;
    use tidewatch_fleet::peers::Responders;

    use super::*;
    use crate::relay::Deadlines;

    /// The role of the tasks of the whole fleet may be held a moment longer than the shard.
    #[test]
    fn only_peer_answers_while_it_serves_its_shard() {
        let served = Arc::new(Mutex::new(Vec::new()));
        let responders = Responders::default();
        responders.set(Topic::Report, Arc::new(|question| async move { Ok(question) }.boxed()));
        let known = served.clone();
        let served_shards = Arc::new(move || known.lock().clone());
        let answers = Answers::new(responders, served_shards, Arc::new(|_| false), Deadlines::default());
        let peer = OnlyPeer { answers, shards: ShardCount::ONE };
        let ask = || peer.ask_all(Topic::Report, "q".into()).now_or_never().unwrap();
        assert_eq!(ask(), Err(AskError::Incomplete));
        served.lock().push((ShardCount::ONE.shard(0).unwrap(), Instance::new(1)));
        assert_eq!(ask(), Ok(vec!["q".into()]));
    }

    #[test]
    fn answers_are_whole_when_each_shard_is_covered_at_least_once() {
        let count = ShardCount::new(4).unwrap();
        let answer = |shards: &[u16], payload: &'static str| Answer {
            shards: shards.iter().map(|shard| (count.shard(*shard).unwrap(), Instance::new(1))).collect(),
            payload: payload.into(),
        };
        let mut coverage = Coverage::new(count);
        assert!(!coverage.add(answer(&[0, 1], "a")));
        assert!(!coverage.add(answer(&[], "without shards")));
        assert!(!coverage.add(answer(&[1], "nothing new")));
        assert!(!coverage.add(answer(&[1, 2], "1 moved")));
        assert!(coverage.add(answer(&[3], "b")));
        assert_eq!(coverage.payloads, ["a", "1 moved", "b"]);
    }
}
