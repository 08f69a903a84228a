//! What is installed: the files under `deploy/` that come from the Rust types.
//!
//! [`crds`] renders, [`Folder`] compares and writes; `cargo generate` does both.

mod folder;
mod render;

pub use self::{
    folder::{Difference, Folder, FolderError},
    render::{File, RenderError, crds},
};
