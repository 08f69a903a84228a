//! What clusters store of Tidewatch: the custom resources, the names of objects, labels and annotations, the ids of runtimes
//! and processes, and the plan of an agent.
//!
//! | Modules | Content |
//! |---|---|
//! | [`names`], [`identity`] | names of objects, labels and annotations; ids of runtimes and processes |
//! | [`plan`] | what an agent watches |
//! | `crds`, types of the crate's root | the custom resources, with the feature `resources` |

pub mod identity;
pub mod names;
pub mod plan;
#[cfg(feature = "resources")]
mod resources;

#[cfg(feature = "resources")]
pub use resources::*;
