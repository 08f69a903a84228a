//! The files under `deploy/` that are generated from the Rust code: CRDs, admission policies, installation and metrics
//! reference.
//!
//! [`generated`] renders all files, [`Folder`] compares and writes them; `cargo generate` does both. [`image`] builds
//! the container images.
//!
//! # Example
//!
//! ```
//! let generated = tidewatch_deploy::generated()?;
//! let files = generated.iter().flat_map(|(_, files)| files);
//! assert!(files.map(|file| file.name.as_str()).any(|name| name == "kymas.yaml"));
//! # Ok::<_, anyhow::Error>(())
//! ```

mod admission;
mod alerts;
mod base;
mod folder;
pub mod image;
mod page;
mod reference;
mod render;
pub mod sbom;

use anyhow::Result;

pub use self::{
    admission::admission,
    base::{base, ca_namespace, cert_manager, istio},
    folder::{Difference, Folder},
    page::metrics,
    reference::{custom_resources, flags},
    render::{File, crds},
};

/// Renders all generated files, grouped by folder.
///
/// # Errors
/// An object cannot be serialized.
pub fn generated() -> Result<Vec<(Folder, Vec<File>)>> {
    Ok(vec![
        (Folder::within("crds"), crds()?),
        (Folder::within("admission"), admission()?),
        (Folder::within("base"), base()?),
        (Folder::within("overlays/ca-namespace"), ca_namespace()?),
        (Folder::within("overlays/cert-manager"), cert_manager()?),
        (Folder::within("overlays/istio"), istio()?),
        (Folder { shared: true, ..Folder::within("../docs/reference") }, vec![metrics(), flags(), custom_resources()]),
        (Folder { shared: true, ..Folder::within("../docs/operations") }, vec![alerts::page()]),
    ])
}
