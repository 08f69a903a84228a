//! Ring rollout of a module's version: the members of a rollout and their standing, and the next step.

pub mod decide;
pub mod members;
