//! Types and names of the objects that clusters store for Tidewatch: the custom resources, labels and annotations, the ids
//! of runtimes and processes, and the plan of an agent.
//!
//! | Modules | Content |
//! |---|---|
//! | [`names`], [`identity`] | names of objects, labels and annotations; ids of runtimes and processes |
//! | [`plan`] | the watches of an agent |
//! | `crds`, types of the crate's root | the custom resources, with the feature `resources` |

pub mod identity;
pub mod names;
pub mod plan;
#[cfg(feature = "resources")]
mod resources;

#[cfg(feature = "resources")]
pub use resources::*;
