//! The receiver's side of Kubernetes: watches of the control plane, the recorder of Events, and the owners of shards.

pub mod recorder;
pub mod shards;
pub(crate) mod watch;

pub use watch::{CommonKymaParts, CommonParts};
