//! Installs, upgrades, observes and removes one module in one cluster. Knows no control plane.
//!
//! The record of a module is a Manifest: the version to install, the inventory of its objects, and its status. A [`Store`]
//! keeps it, and [`Content`] provides the objects of its version. [`Engine::reconcile`] renders them, applies them in stages,
//! prunes and removes objects, and reports their readiness. A failed request on one object stops no other.
//!
//! | Modules | Content |
//! |---|---|
//! | `reconcile`, `outcome` | one reconcile: facts, rendering, actions, status; its end, and the time of the next one |
//! | `step`, `module`, `adoption`, `jobs`, `own_webhook`, `ready`, `recreation`, `sharing`, `report`, `status` | decisions and texts; pure, but for `sharing::join` |
//! | `render`, `image`, `stage`, `inventory`, `injected` | the objects of a version as they are written; pure |
//! | `execution`, `remote`, `look`, `execute`, `apply`, `apply_job`, `definitions`, `migrate`, `yielding` | the state of one reconcile, and the requests of an installation |
//! | `parting`, `keeping`, `blocking`, `recovery`, `search` | the requests of a removal |
//! | `memory`, `refusals`, `yields`, `own_writes`, `pods`, `turns` | what reconciles remember between them |
//! | `record`, `store`, `secret_store` | where the Manifest is kept |
//! | [`preview`] | objects of a version, and changes by an upgrade; pure |
//!
//! # Example
//!
//! ```no_run
#![doc = include_str!("../examples/install_module.rs")]
//! ```

mod adoption;
mod aggregated;
mod apply;
mod apply_job;
mod blocking;
mod content;
mod create_default;
mod created_jobs;
mod default_object;
mod definitions;
mod execute;
mod execution;
mod failure;
mod image;
mod injected;
mod inventory;
mod jobs;
mod keeping;
mod kept;
mod look;
mod memory;
mod migrate;
mod module;
mod outcome;
mod own_webhook;
mod own_writes;
mod parting;
mod pods;
pub mod preview;
mod ready;
mod reconcile;
mod record;
mod recovery;
mod recreation;
mod refusals;
mod remote;
mod render;
mod report;
mod search;
mod secret_store;
mod sharing;
mod stage;
mod status;
mod step;
mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod turns;
mod yielding;
mod yields;

pub use self::{
    content::{Content, ModuleObjects, PullSecret, SecretsError},
    default_object::CreatedDefault,
    execute::finalizers,
    injected::{SecretData, wants_injected_data},
    inventory::{Inventory, ObjectKey},
    memory::Memories,
    module::{goal_of, inventory_of, precedence, succession},
    outcome::{End, Next, Outcome, Progress},
    pods::PodSelection,
    reconcile::{ChangedObject, Cluster, Engine, Request},
    report::{WaitFacts, awaits_resources},
    secret_store::SecretStore,
    step::Goal,
    store::{Store, StoreError},
};

#[cfg(test)]
mod tests;
