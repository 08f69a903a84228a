//! Answers of this replica, to itself and to others.

use std::{collections::BTreeSet, sync::Arc};

use bytes::Bytes;
use strum::VariantArray as _;
use tidewatch_api::{identity::Instance, replica::ReplicaName, shard::ShardId};
use tidewatch_fleet::peers::{AskError, Responders, Topic};
use tidewatch_kit::variant::VariantName as _;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{
    Deadlines,
    question::{Answer, MAX_ANSWER_BYTES},
    request::PLACES,
};

/// Returns the shards that this replica may speak for now, each with its instance, which is new at each acquisition:
/// those that it holds with an open fence, and of which it knows all Kymas.
pub type ServedShards = Arc<dyn Fn() -> Vec<(ShardId, Instance)> + Send + Sync>;

/// Returns true for another replica that runs the fleet-wide tasks, as far as this one knows. It must answer from memory.
pub type IsFleetHolder = Arc<dyn Fn(&ReplicaName) -> bool + Send + Sync>;

/// Answers questions for the shards of this replica. Clones share it.
#[derive(Clone)]
pub struct Answers(Arc<Inner>);

struct Inner {
    responders: Responders,
    served: ServedShards,
    is_fleet_holder: IsFleetHolder,
    deadlines: Deadlines,
    places: Places,
}

/// Places of the questions in progress, of each topic on its own, so that views of operators hold up no task.
pub(super) struct Places(Vec<Arc<Semaphore>>);

impl Places {
    pub(super) fn new() -> Self {
        Self(Topic::VARIANTS.iter().map(|_| Arc::new(Semaphore::new(PLACES))).collect())
    }

    /// Waits for a place. The caller sets the deadline.
    pub(super) async fn acquire(&self, topic: Topic) -> Option<OwnedSemaphorePermit> {
        // There is one for each topic, and none is ever closed.
        self.0.get(topic as usize)?.clone().acquire_owned().await.ok()
    }
}

impl Answers {
    /// Answers with these responders for the shards that `served` returns.
    pub fn new(
        responders: Responders,
        served: ServedShards,
        is_fleet_holder: IsFleetHolder,
        deadlines: Deadlines,
    ) -> Self {
        Self(Arc::new(Inner { responders, served, is_fleet_holder, deadlines, places: Places::new() }))
    }

    /// Answers a question of this replica itself. The caller sets the deadline.
    pub(super) async fn answer(&self, topic: Topic, question: Bytes) -> Result<Answer, AskError> {
        let Inner { responders, served, .. } = &*self.0;
        // A shard that is acquired or lost meanwhile is not covered, even if it is lost and acquired again: its instance
        // is another one then.
        let before: BTreeSet<_> = served().into_iter().collect();
        let payload = responders.answer(topic, question).await?;
        if payload.len() > MAX_ANSWER_BYTES {
            tracing::warn!(topic = topic.as_str(), bytes = payload.len(), "The answer to a replica is too large");
            return Err(AskError::Unavailable);
        }
        Ok(Answer { shards: served().into_iter().filter(|shard| before.contains(shard)).collect(), payload })
    }

    /// Answers a question of another replica. Its place is taken until the answer has been sent.
    pub(crate) async fn answer_replica(
        &self,
        asking: &ReplicaName,
        topic: Topic,
        question: Bytes,
    ) -> Result<Answer, AskError> {
        if topic.needs_fleet_role() && !(self.0.is_fleet_holder)(asking) {
            tracing::debug!(replica = %asking, topic = topic.as_str(), "The asking replica does not have the fleet role");
            return Err(AskError::Unavailable);
        }
        let answer = async {
            let place = self.0.places.acquire(topic).await.ok_or(AskError::Unavailable)?;
            let Answer { shards, payload } = self.answer(topic, question).await?;
            Ok(Answer { shards, payload: Bytes::from_owner(PlacedPayload { payload, _place: place }) })
        };
        timeout(self.0.deadlines.of_question(topic), answer).await.map_err(|_| AskError::Unavailable)?
    }
}

/// Payload that keeps its place until it is dropped.
struct PlacedPayload {
    payload: Bytes,
    _place: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for PlacedPayload {
    fn as_ref(&self) -> &[u8] {
        &self.payload
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use parking_lot::Mutex;
    use tidewatch_api::shard::ShardCount;
    use tokio::sync::Notify;

    use super::*;

    type Served = Arc<Mutex<Vec<(ShardId, Instance)>>>;

    /// Answers that wait for a permit, and the shards that are served.
    fn answers() -> (Answers, Served, Arc<Notify>) {
        let served = Served::default();
        let release = Arc::<Notify>::default();
        let responders = Responders::default();
        let released = release.clone();
        let respond = move |question: Bytes| {
            let released = released.clone();
            async move {
                released.notified().await;
                Ok(question)
            }
            .boxed()
        };
        responders.set(Topic::Report, Arc::new(respond));
        let known = served.clone();
        let served_shards = Arc::new(move || known.lock().clone());
        (Answers::new(responders, served_shards, Arc::new(|_| false), Deadlines::default()), served, release)
    }

    #[test]
    fn answer_covers_the_shards_that_were_served_all_the_time() {
        let (answers, served, release) = answers();
        let shards: Vec<_> = ShardCount::new(4).unwrap().shards().collect();
        let at = |numbers: &[(usize, u64)]| -> Vec<_> {
            numbers.iter().map(|(shard, instance)| (shards[*shard], Instance::new(*instance))).collect()
        };
        *served.lock() = at(&[(0, 1), (1, 1), (2, 1)]);
        let mut answer = Box::pin(answers.answer(Topic::Report, Bytes::from_static(b"q")));
        assert!(answer.as_mut().now_or_never().is_none());
        // 0 is lost, 1 is lost and acquired again, and 3 is acquired.
        *served.lock() = at(&[(1, 2), (2, 1), (3, 1)]);
        release.notify_one();
        let answer = answer.now_or_never().unwrap().unwrap();
        assert_eq!((answer.shards, &*answer.payload), (at(&[(2, 1)]), &b"q"[..]));
    }

    #[test]
    fn too_large_answer_is_none() {
        let (answers, _, release) = answers();
        for (bytes, expected) in [(MAX_ANSWER_BYTES, true), (MAX_ANSWER_BYTES + 1, false)] {
            release.notify_one();
            let answer = answers.answer(Topic::Report, vec![0; bytes].into()).now_or_never().unwrap();
            assert_eq!(answer.is_ok(), expected, "{bytes}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn place_is_taken_until_the_answer_is_dropped_and_each_topic_has_its_own() {
        let (answers, _, release) = answers();
        let asking: ReplicaName = "other".parse().unwrap();
        let mut held = Vec::new();
        for _ in 0..PLACES {
            release.notify_one();
            held.push(answers.answer_replica(&asking, Topic::Report, Bytes::new()).await.unwrap());
        }
        release.notify_one();
        let other = answers.answer_replica(&asking, Topic::CaRotation, Bytes::new()).now_or_never().unwrap();
        assert_eq!(other, Err(AskError::Unavailable), "not for want of a place: it has no responder");
        let mut waiting = Box::pin(answers.answer_replica(&asking, Topic::Report, Bytes::new()));
        assert!(waiting.as_mut().now_or_never().is_none());
        held.pop();
        assert!(waiting.await.is_ok());
        held.pop();
        let late = answers.answer_replica(&asking, Topic::Report, Bytes::new()).await;
        assert_eq!(late, Err(AskError::Unavailable), "no responder waits for ever");
    }
}
