//! Container images of the programs as OCI layouts (image-spec 1.1), written without a container daemon: the program, what it
//! links dynamically, and the few files that a C library looks for. The same input makes the same bytes.

mod layer;
mod layout;
mod libraries;

use std::{
    io,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use thiserror::Error;

use self::{
    layer::{Layer, Writer},
    layout::{Blob, Layout},
};

/// User and group that programs run as: distroless' `nonroot`.
const NONROOT: &str = "65532:65532";
/// Where programs that trust public authorities look for them.
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Why an image was not written.
#[derive(Debug, Error)]
pub enum ImageError {
    /// A file or folder.
    #[error("{action} {}", .path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On which.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The dynamic loader did not say what the program links.
    #[error("the libraries of {} cannot be listed", .program.display())]
    List {
        /// Which program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A library is not on this machine.
    #[error("{} links {library}, which is not found", .program.display())]
    Library {
        /// Which program.
        program: PathBuf,
        /// Which library.
        library: String,
    },
    /// A layer could not be packed.
    #[error("pack a layer")]
    Pack(#[source] io::Error),
    /// The machine's architecture has no name in Go's list, which the specification refers to.
    #[error("images for {0} are not known")]
    Architecture(&'static str),
}

/// A program to be packed.
#[derive(Clone, Debug)]
pub struct Program<'a> {
    /// Its name: that of the image, and of its only executable.
    pub name: &'a str,
    /// Its version: the reference in the layout.
    pub version: &'a str,
    /// Where it was built.
    pub path: &'a Path,
}

/// Writes the image of a program to a folder, which is replaced as a whole. Returns the digest of its manifest.
///
/// # Errors
/// [`ImageError`]; what was there before stays.
pub fn write(program: &Program<'_>, to: &Path) -> Result<String, ImageError> {
    let (base, executable) = (base_layer(program)?, executable_layer(program)?);
    let config = config(program, &[&base, &executable])?;
    let layout = Layout::begin(to)?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": layout.put(&Blob::json("application/vnd.oci.image.config.v1+json", &config))?,
        "layers": [layout.put(&base.blob)?, layout.put(&executable.blob)?],
    });
    let manifest = layout.put(&Blob::json("application/vnd.oci.image.manifest.v1+json", &manifest))?;
    layout.end(manifest, program.version)
}

/// What changes with the machine that builds: the libraries and what belongs to them.
fn base_layer(program: &Program<'_>) -> Result<Layer, ImageError> {
    let mut layer = Writer::new();
    layer.text(
        "etc/passwd",
        "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n",
    )?;
    layer.text("etc/group", "root:x:0:\nnonroot:x:65532:\n")?;
    layer.text("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")?;
    layer.folder("tmp", 0o1777)?;
    if Path::new(AUTHORITIES).exists() {
        layer.file(Path::new(AUTHORITIES), AUTHORITIES, 0o644)?;
    }
    for library in libraries::of(program.path)? {
        layer.file(&library, &library.to_string_lossy(), 0o755)?;
    }
    layer.end()
}

fn executable_layer(program: &Program<'_>) -> Result<Layer, ImageError> {
    let mut layer = Writer::new();
    layer.file(program.path, program.name, 0o755)?;
    layer.end()
}

/// The image's configuration. Its creation has no time, so that it depends on its content alone.
fn config(program: &Program<'_>, layers: &[&Layer]) -> Result<Value, ImageError> {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => return Err(ImageError::Architecture(other)),
    };
    let diff_ids: Vec<_> = layers.iter().map(|layer| layer.unpacked.as_str()).collect();
    Ok(json!({
        "architecture": architecture,
        "os": "linux",
        "config": {
            "User": NONROOT,
            "Entrypoint": [format!("/{}", program.name)],
            "Env": ["PATH=/"],
            "WorkingDir": "/",
            "Labels": {
                "org.opencontainers.image.title": program.name,
                "org.opencontainers.image.version": program.version,
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }))
}

#[cfg(test)]
mod tests;
