//! `module pack`.

use std::{fmt, fs, path::PathBuf};

use anyhow::{Context as _, Result};
use clap::{ArgGroup, Args};
use serde::Serialize;
use tidewatch_kit::table;
use tidewatch_oci::digest::BlobReference;

use super::{
    artefact::Artefact,
    constructor,
    folder::Folder,
    layout,
    push::{PushFlags, Pushed},
    template,
};
use crate::{exit, output};

/// Name of the layout's folder.
pub(super) const LAYOUT: &str = "layout";
/// Name of the layout's archive.
pub(super) const ARCHIVE: &str = "layout.tar";

/// Arguments of `module pack`.
#[derive(Clone, Debug, Args)]
#[command(group = ArgGroup::new("destination").args(["output", "push"]).required(true).multiple(true))]
pub struct Pack {
    /// Folder with module.yaml and the files that it names
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,

    /// Directory for the OCI layout, in the folder layout, and for moduletemplate.yaml; created if it does not exist
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,

    /// Write the OCI layout as the tar archive layout.tar instead of a folder
    #[arg(long, requires = "output")]
    pub tar: bool,

    /// The push to a registry.
    #[command(flatten)]
    pub push: PushFlags,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Result of `module pack`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    component: String,
    version: String,
    module: String,
    /// Digest of the manifest.
    digest: String,
    /// The blobs: config, component descriptor, local resources.
    blobs: Vec<BlobReference>,
    /// Files that were written.
    files: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pushed: Option<Pushed>,
    warnings: Vec<String>,
}

impl Pack {
    pub(super) fn run(&self) -> Result<u8> {
        let folder = Folder::read(&self.folder)?;
        let artefact = constructor::pack(&folder, self.push.push.as_ref())?;
        let template = template::render(&folder)?;
        let mut report = Report::new(&folder, &artefact);
        report.files = self.write(&artefact, &template)?;
        report.pushed = self.push.push(&artefact)?;
        output::report(self.json, &report)?;
        Ok(exit::SUCCESS)
    }

    /// Writes layout and template, and returns their paths.
    fn write(&self, artefact: &Artefact, template: &str) -> Result<Vec<String>> {
        let Some(output) = &self.output else { return Ok(Vec::new()) };
        fs::create_dir_all(output).with_context(|| format!("create {}", output.display()))?;
        let layout = output.join(if self.tar { ARCHIVE } else { LAYOUT });
        let contents = artefact.contents();
        if self.tar { layout::write_archive(contents, &layout) } else { layout::write_folder(contents, &layout) }?;
        let file = output.join(template::FILE);
        fs::write(&file, template).with_context(|| format!("write {}", file.display()))?;
        Ok([layout, file].map(|path| path.display().to_string()).into())
    }
}

impl Report {
    fn new(folder: &Folder, artefact: &Artefact) -> Self {
        let blobs = artefact.blobs.iter().map(|blob| BlobReference {
            media_type: blob.media_type.to_string(),
            digest: blob.digest,
            size: blob.content.len() as u64,
        });
        Self {
            component: artefact.component.name().to_owned(),
            version: artefact.component.version().to_owned(),
            module: folder.config.module().to_owned(),
            digest: artefact.manifest.digest.to_string(),
            blobs: blobs.collect(),
            files: Vec::new(),
            pushed: None,
            warnings: folder.warnings(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}:{} {}", self.component, self.version, self.digest)?;
        let rows = self.blobs.iter().map(|BlobReference { media_type, digest, size }| {
            [media_type.clone(), size.to_string(), digest.to_string()]
        });
        f.write_str(&table::aligned(["BLOB", "BYTES", "DIGEST"], rows.collect()))?;
        for file in &self.files {
            writeln!(f, "written: {}", table::sanitize(file))?;
        }
        if let Some(Pushed { reference, effect }) = &self.pushed {
            writeln!(f, "pushed: {reference} ({effect})")?;
        }
        for warning in &self.warnings {
            writeln!(f, "warning: {}", table::sanitize(warning))?;
        }
        Ok(())
    }
}
