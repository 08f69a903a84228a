//! What the tasks that decide for the whole fleet have in common.

use crate::{
    evidence::Replicas, pause::Pause, recorder::EventRecorder, stores::Stores, table::RuntimeTable, takeover::Takeover,
};

/// Parts of a receiver from which a task assesses runtimes, and through which it acts on them. Clones share them.
#[derive(Clone)]
pub struct Services {
    /// States of event paths, and the queue of reconciles.
    pub fleet: RuntimeTable,
    /// Caches of KCP.
    pub stores: Stores,
    /// Paused runtimes.
    pub pause: Pause,
    /// Kymas that belong to this receiver.
    pub takeover: Takeover,
    /// Records the progress as Kubernetes Events.
    pub recorder: EventRecorder,
    /// All replicas.
    pub replicas: Replicas,
}
