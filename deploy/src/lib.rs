//! The files under `deploy/` that come from the Rust code: what is installed, and the page of metrics.
//!
//! [`generated`] renders all of it, [`Folder`] compares and writes; `cargo generate` does both. [`image`] writes the programs as
//! container images.

mod admission;
mod base;
mod folder;
pub mod image;
mod page;
mod render;

pub use self::{
    admission::admission,
    base::{base, cert_manager},
    folder::{Difference, Folder, FolderError},
    page::metrics,
    render::{File, RenderError, crds},
};

/// Everything that is generated, by the folder that it belongs to.
///
/// # Errors
/// [`RenderError`].
pub fn generated() -> Result<Vec<(Folder, Vec<File>)>, RenderError> {
    Ok(vec![
        (Folder::within("crds"), crds()?),
        (Folder::within("admission"), admission()?),
        (Folder::within("base"), base()?),
        (Folder::within("overlays/cert-manager"), cert_manager()?),
        (Folder::deploy(), vec![metrics()]),
    ])
}
