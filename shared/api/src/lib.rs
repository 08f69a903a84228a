//! Types and names of the objects that clusters store for Tidewatch: the custom resources, labels and annotations, the ids
//! of runtimes and processes, and the plan of an agent.
//!
//! | Modules | Content |
//! |---|---|
//! | [`names`], [`identity`] | names of objects, labels and annotations; ids of runtimes and processes |
//! | [`labels`], [`selectors`] | syntax and values of labels; label selectors |
//! | [`plan`] | the watches of an agent |
//! | `crds`, types of the crate's root | the custom resources, with the feature `resources` |
//! | `key`, [`shard`], [`replica`] | the key of a Kyma, with the feature `resources`; the shard of a runtime; the name of a replica |
//! | `selection` | the modules that a Kyma selects, with the feature `resources` |
//! | `facts` | facts about Kymas and Manifests, also in reduced form, with the feature `resources` |
//! | `leases` | the Leases of the shards, with the feature `resources` |

mod condition;
#[cfg(feature = "resources")]
pub mod facts;
pub mod identity;
#[cfg(feature = "resources")]
pub mod key;
pub mod labels;
#[cfg(feature = "resources")]
pub mod leases;
pub mod names;
pub mod plan;
pub mod replica;
#[cfg(feature = "resources")]
mod resources;
#[cfg(feature = "resources")]
pub mod selection;
pub mod selectors;
pub mod shard;

pub use condition::ConditionStatus;
#[cfg(feature = "resources")]
pub use resources::*;
