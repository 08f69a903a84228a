//! Questions about the whole fleet. Each replica knows the runtimes of its own shards, so a fleet-wide task or view asks all
//! replicas, and each answers for the shards that it holds.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::RwLock;
use strum::{EnumString, IntoStaticStr, VariantArray};
use thiserror::Error;

/// What a question is about: the last segment of its path, and a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, IntoStaticStr, EnumString, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Topic {
    /// Report of the runtimes.
    Report,
    /// Certificates and trust bundles of the runtimes, for a rotation of the CA.
    CaRotation,
    /// Assessment of the runtimes' agents, for their upgrade.
    AgentUpgrade,
    /// Runtimes that are admitted to the rollout of a module's version. Only the replica that runs the fleet-wide tasks
    /// asks it.
    ModuleRollout,
    /// Progress of a rotation of the CA. Only the replica that runs the fleet-wide tasks answers it.
    RotationProgress,
    /// Health of the services to which events are forwarded.
    ForwardHealth,
    /// Report that this health has changed. Only the replica that runs the fleet-wide tasks gets it.
    ForwardHealthChanged,
    /// Request for a rotation of the CA. Only the replica that runs the fleet-wide tasks answers it.
    RotateCa,
}

impl Topic {
    /// True if replicas answer only the one that runs the fleet-wide tasks: the question has an effect, which must not come
    /// late from a replica that ran them before.
    pub fn needs_fleet_role(self) -> bool {
        matches!(self, Self::ModuleRollout)
    }
}

/// A question has no answer now. Every reason is temporary. The name is a metric label.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum AskError {
    /// At least one shard has no holder that answered, so the answers are not those of the whole fleet.
    #[error("at least one shard of the fleet has no replica that answers")]
    Incomplete,
    /// No replica runs the fleet-wide tasks, or it did not answer.
    #[error("no replica that runs the tasks of the whole fleet answers")]
    NoFleetHolder,
    /// The replica cannot answer questions of this topic now, or not those of the asking replica.
    #[error("the replica cannot answer this now")]
    Unavailable,
}

/// Asks replicas.
pub trait Peers: Send + Sync + 'static {
    /// Sends a question to every replica that holds shards, this one included, and returns answers that cover every shard.
    ///
    /// # Errors
    /// [`AskError::Incomplete`]: answers of a part of the fleet are never returned. [`AskError::Unavailable`] if the question
    /// cannot be asked at all.
    fn ask_all(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Vec<Bytes>, AskError>>;

    /// Asks the replica that runs the fleet-wide tasks, which may be this one.
    ///
    /// # Errors
    /// [`AskError::NoFleetHolder`], [`AskError::Unavailable`].
    fn ask_fleet_holder(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Bytes, AskError>>;
}

/// Answers a question.
pub type Responder = Arc<dyn Fn(Bytes) -> BoxFuture<'static, Result<Bytes, AskError>> + Send + Sync>;

/// The responders of this replica, by topic. Clones share them.
#[derive(Clone, Default)]
pub struct Responders(Arc<RwLock<BTreeMap<Topic, Responder>>>);

impl Responders {
    /// Answers the questions of a topic from now on.
    pub fn set(&self, topic: Topic, responder: Responder) {
        self.0.write().insert(topic, responder);
    }

    /// Answers a question.
    ///
    /// # Errors
    /// [`AskError::Unavailable`] without a responder, and errors of the responder.
    pub async fn answer(&self, topic: Topic, question: Bytes) -> Result<Bytes, AskError> {
        let responder = self.0.read().get(&topic).cloned();
        match responder {
            Some(responder) => responder(question).await,
            None => Err(AskError::Unavailable),
        }
    }
}

/// The peers of a process that holds all shards at all times, in tests: none but itself.
#[cfg(any(test, feature = "testing"))]
impl Peers for Responders {
    fn ask_all(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Vec<Bytes>, AskError>> {
        Box::pin(async move { Ok(vec![self.answer(topic, question).await?]) })
    }

    fn ask_fleet_holder(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Bytes, AskError>> {
        Box::pin(self.answer(topic, question))
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn single_receiver_asks_itself_and_topics_without_responder_have_no_answer() {
        let responders = Responders::default();
        let ask = |topic| responders.ask_all(topic, Bytes::from_static(b"q")).now_or_never().unwrap();
        assert_eq!(ask(Topic::CaRotation), Err(AskError::Unavailable));
        responders.set(Topic::CaRotation, Arc::new(|question| Box::pin(async move { Ok(question) })));
        assert_eq!(ask(Topic::CaRotation), Ok(vec![Bytes::from_static(b"q")]));
        assert_eq!(ask(Topic::Report), Err(AskError::Unavailable));
        assert_eq!("rotate-ca".parse::<Topic>(), Ok(Topic::RotateCa));
        let name: &str = Topic::AgentUpgrade.into();
        assert_eq!(name, "agent-upgrade");
    }
}
