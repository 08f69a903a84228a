//! Builds container images as OCI layouts (image-spec 1.1) without a container daemon: the program and its tools, their
//! dynamic libraries, and the files that a C library reads. Equal input produces equal bytes.

mod layer;
mod libraries;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use tidewatch_cli::module::{
    Blob,
    layout::{Contents, write_folder},
};

use self::layer::{Layer, Writer};

/// User and group of the process: `nonroot` of the distroless images.
const NONROOT: &str = "65532:65532";
/// Media type of a manifest.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Path of the bundle of public certificate authorities.
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// An executable in an image.
#[derive(Clone, Debug)]
pub struct Executable<'a> {
    /// The name in the image.
    pub name: &'a str,
    /// The path on the build machine.
    pub path: PathBuf,
}

/// Writes an image of these executables to a folder, which is replaced as a whole, and returns the digest of the
/// manifest. The entry point is the executable with the name of the image; the version is the reference in the layout.
///
/// # Errors
/// A file cannot be read or written, the libraries of an executable cannot be listed or found, the architecture of the build
/// machine is not supported, or the folder has something else than a layout. The previous content of the folder stays.
pub fn write(name: &str, version: &str, executables: &[Executable<'_>], to: &Path) -> Result<String> {
    let base = base_layer(executables)?;
    let packed = executable_layer(executables)?;
    let config = config(name, version, &[&base, &packed])?;
    let config = Blob::new("application/vnd.oci.image.config.v1+json", config.to_string().into_bytes());
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.reference(),
        "layers": [base.blob.reference(), packed.blob.reference()],
    });
    let manifest = Blob::new(MANIFEST, manifest.to_string().into_bytes());
    let blobs = [config, base.blob, packed.blob];
    write_folder(Contents { manifest: &manifest, blobs: &blobs, reference: version.to_owned() }, to)?;
    Ok(manifest.digest.to_string())
}

/// The layer of files that depend on the build machine: the libraries and the C library's configuration.
fn base_layer(executables: &[Executable<'_>]) -> Result<Layer> {
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
    let mut libraries = BTreeSet::new();
    for executable in executables {
        libraries.extend(libraries::of(&executable.path)?);
    }
    for library in libraries {
        layer.file(&library, &library.to_string_lossy(), 0o755)?;
    }
    layer.finish()
}

fn executable_layer(executables: &[Executable<'_>]) -> Result<Layer> {
    let mut layer = Writer::new();
    for Executable { name, path } in executables {
        layer.file(path, name, 0o755)?;
    }
    layer.finish()
}

/// The image configuration. It contains no creation time, so that it depends on the content alone.
fn config(name: &str, version: &str, layers: &[&Layer]) -> Result<Value> {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        // The specification refers to Go's list of names.
        other => bail!("the architecture {other} is not supported"),
    };
    let diff_ids: Vec<_> = layers.iter().map(|layer| layer.unpacked.to_string()).collect();
    Ok(json!({
        "architecture": architecture,
        "os": "linux",
        "config": {
            "User": NONROOT,
            "Entrypoint": [format!("/{name}")],
            "Env": ["PATH=/"],
            "WorkingDir": "/",
            "Labels": {
                "org.opencontainers.image.title": name,
                "org.opencontainers.image.version": version,
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }))
}

#[cfg(test)]
mod tests;
