//! What several reconcilers need: short digests of contents, and versions of modules as lifecycle-manager compares them. No IO.

pub(crate) mod digest;
pub mod versions;
