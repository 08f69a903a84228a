//! Ring rollout of a module's version: the members of a rollout and their standing, the next step, and the stored state.

pub mod decide;
pub mod members;
pub mod store;
