//! Installs, upgrades, observes and removes one module in one cluster. Knows no control plane.
//!
//! The record of a module is a Manifest: the version to install, the inventory of its objects, and its status. A [`Store`]
//! keeps it, in whichever cluster. [`Engine::reconcile`] reads the record, renders the objects of its version, applies them in
//! stages, prunes and removes objects, and reports their readiness. A failed request on one object stops no other.
//!
//! `step` decides on the next action from the facts, `execute` carries it out on the state in `execution`: `apply` and
//! `apply_job` write objects that are installed, `parting` deletes objects that leave. `keeping` looks for data of users.
//! `adoption`, `default_object`, `inventory`, `jobs`, `module`, `own_webhook`, `ready`, `recreation`, `render`, `report`,
//! `sharing`, `stage`, `status`, `step` and `preview` are pure. `refusals` remembers objects that the API server would refuse
//! again, `yields` the fields that are left to other writers.

mod adoption;
mod aggregated;
mod apply;
mod apply_job;
mod blocking;
mod content;
mod create_default;
mod created_jobs;
mod default_object;
mod execute;
mod execution;
mod failure;
mod image;
mod injected;
mod inventory;
mod jobs;
mod keeping;
mod kept;
mod memory;
mod migrate;
#[cfg(test)]
mod model;
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
    injected::{SecretData, takes_data},
    inventory::{Inventory, ObjectKey},
    memory::Memories,
    module::{goal_of, inventory_of, is_superseded, precedence, succession},
    outcome::{End, Next, Outcome, Progress},
    pods::PodSelection,
    reconcile::{ChangedObject, Cluster, Engine, Request, WATCH_PODS_AFTER},
    report::{Shown, awaits_resources},
    secret_store::SecretStore,
    step::Goal,
    store::{Store, StoreError},
};
