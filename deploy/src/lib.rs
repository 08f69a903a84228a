//! The files under `deploy/` that come from the Rust code: what is installed, and the page of metrics.
//!
//! [`crds`] and [`metrics`] render, [`Folder`] compares and writes; `cargo generate` does both.

mod folder;
mod page;
mod render;

pub use self::{
    folder::{Difference, Folder, FolderError},
    page::metrics,
    render::{File, RenderError, crds},
};
