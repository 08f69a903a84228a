//! Builds container images as OCI layouts (image-spec 1.1) without a container daemon: the program and its tools, their
//! dynamic libraries, and the files that a C library reads. Equal input produces equal bytes.

mod layer;
mod layout;
mod libraries;

use std::{
    collections::BTreeSet,
    io, iter,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use thiserror::Error;

use self::{
    layer::{Layer, Writer},
    layout::{Blob, Layout},
};

/// User and group of the process: `nonroot` of the distroless images.
const NONROOT: &str = "65532:65532";
/// Path of the bundle of public certificate authorities.
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The error of building an image.
#[derive(Debug, Error)]
pub enum ImageError {
    /// A file or folder cannot be read or written.
    #[error("{action} {}", .path.display())]
    File {
        /// The failed operation.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The dynamic loader did not list the libraries.
    #[error("the libraries of {} cannot be listed", .program.display())]
    List {
        /// The program.
        program: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A library does not exist on the build machine.
    #[error("cannot find {library}, which {} links", .program.display())]
    Library {
        /// The program.
        program: PathBuf,
        /// The library.
        library: String,
    },
    /// A layer cannot be packed.
    #[error("cannot pack a layer")]
    Pack(#[source] io::Error),
    /// The architecture of the build machine has no name in Go's list, which the specification refers to.
    #[error("the architecture {0} is not supported")]
    Architecture(&'static str),
}

/// The program to pack.
#[derive(Clone, Debug)]
pub struct Program<'a> {
    /// The name of the image and of its executable.
    pub name: &'a str,
    /// The version, which is the reference in the layout.
    pub version: &'a str,
    /// The path of the executable.
    pub path: &'a Path,
    /// Further executables in the image.
    pub tools: &'a [Tool<'a>],
}

/// An executable in an image that another program is the entry point of.
#[derive(Clone, Debug)]
pub struct Tool<'a> {
    /// The name in the image.
    pub name: &'a str,
    /// The path of the executable.
    pub path: &'a Path,
}

/// Writes the image of a program to a folder, which is replaced as a whole, and returns the digest of the manifest.
///
/// # Errors
/// [`ImageError`]; the previous content of the folder stays.
pub fn write(program: &Program<'_>, to: &Path) -> Result<String, ImageError> {
    let (base, executable) = (base_layer(program)?, executable_layer(program)?);
    let config = config(program, &[&base, &executable])?;
    let layout = Layout::create(to)?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": layout.put(&Blob::json("application/vnd.oci.image.config.v1+json", &config))?,
        "layers": [layout.put(&base.blob)?, layout.put(&executable.blob)?],
    });
    let manifest = layout.put(&Blob::json("application/vnd.oci.image.manifest.v1+json", &manifest))?;
    layout.finish(manifest, program.version)
}

/// The layer of files that depend on the build machine: the libraries and the C library's configuration.
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
    let mut all = BTreeSet::new();
    for executable in iter::once(program.path).chain(program.tools.iter().map(|tool| tool.path)) {
        all.extend(libraries::of(executable)?);
    }
    for library in all {
        layer.file(&library, &library.to_string_lossy(), 0o755)?;
    }
    layer.finish()
}

fn executable_layer(program: &Program<'_>) -> Result<Layer, ImageError> {
    let mut layer = Writer::new();
    layer.file(program.path, program.name, 0o755)?;
    for tool in program.tools {
        layer.file(tool.path, tool.name, 0o755)?;
    }
    layer.finish()
}

/// The image configuration. It contains no creation time, so that it depends on the content alone.
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
