//! `module verify`.

use std::{fmt, path::PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;
use serde::Serialize;
use strum::Display;
use tidewatch_kit::table;
use tidewatch_oci::{
    descriptor::RAW_MANIFEST,
    key_folder::{self, KeyFiles},
    signature::{self, ComponentKeys, Covered, SignatureError, SignatureResult},
};

use super::{
    registry::RegistryFlags,
    show::{Stored, report::Report as Shown, source::Source},
};
use crate::{block_on, exit, output};

/// Arguments of `module verify`.
#[derive(Clone, Debug, Args)]
pub struct Verify {
    /// <registry>/component-descriptors/<name>:<version>, or an OCI layout: a folder or a tar archive
    #[arg(value_name = "REF")]
    pub reference: String,

    /// File with an RSA public key or a certificate in PEM, or folder with such files; without its ending, the name of a
    /// file is that of the signatures
    #[arg(long = "key", value_name = "PATH", required = true)]
    pub keys: Vec<PathBuf>,

    /// Access to the registry.
    #[command(flatten)]
    pub registry: RegistryFlags,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Result of `module verify`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    component: String,
    version: String,
    /// Digest of the manifest.
    digest: String,
    signatures: Vec<SignatureReport>,
    /// Images with their signed digests, which a Manifest names.
    images: Vec<String>,
    /// Reasons why the artefact is not trusted.
    problems: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SignatureReport {
    name: String,
    result: Validity,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// Result of the verification of a signature.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
enum Validity {
    /// One of the keys made it.
    Valid,
    /// It is of another key or content.
    Invalid,
    /// There is no key of its name.
    NoKey,
}

impl Verify {
    pub(super) fn run(&self) -> Result<u8> {
        let keys = self.keys()?;
        let stored = block_on(async {
            let (source, _) = Source::open(&self.reference, &self.registry).await?;
            Stored::read(&source).await
        })?;
        let report = Report::new(&stored, &keys);
        output::report(self.json, &report)?;
        Ok(if report.problems.is_empty() { exit::SUCCESS } else { exit::INVALID_MODULE })
    }

    fn keys(&self) -> Result<ComponentKeys> {
        let mut files = KeyFiles::new();
        for path in &self.keys {
            if path.is_dir() {
                files.extend(key_folder::read(path)?);
            } else {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                files.insert(name, key_folder::content(path)?);
            }
        }
        ComponentKeys::parse(&files).context("read the public keys")
    }
}

impl Report {
    fn new(stored: &Stored, keys: &ComponentKeys) -> Self {
        let mut problems = Shown::new(stored, "").problems;
        let signatures = signature::results(&stored.document, keys).unwrap_or_default();
        let images = trusted(stored, keys).unwrap_or_else(|error| {
            problems.insert(0, error.to_string());
            Vec::new()
        });
        Self {
            component: stored.component.name().to_owned(),
            version: stored.component.version().to_owned(),
            digest: stored.digest.to_string(),
            signatures: signatures.into_iter().map(SignatureReport::new).collect(),
            images,
            problems,
        }
    }
}

/// Images with their signed digests, if the artefact is trusted.
fn trusted(stored: &Stored, keys: &ComponentKeys) -> Result<Vec<String>, SignatureError> {
    signature::verify(&stored.document, keys)?;
    let Covered { descriptor, raw_manifest } = signature::cover(stored.descriptor.clone())?;
    if let Some(signed) = raw_manifest {
        // The content of a missing layer is another one, which is among the problems anyway.
        signed.verify(&stored.content_of_raw_manifest().unwrap_or_default())?;
    }
    Ok(descriptor.images)
}

impl SignatureReport {
    fn new(SignatureResult { name, result }: SignatureResult) -> Self {
        let (result, reason) = match result {
            None => (Validity::NoKey, None),
            Some(Ok(())) => (Validity::Valid, None),
            Some(Err(error)) => (Validity::Invalid, Some(error.to_string())),
        };
        Self { name, result, reason }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { component, version, digest, signatures, images, problems } = self;
        writeln!(f, "{component}:{version} {digest}")?;
        let rows = signatures.iter().map(|signature| [signature.name.clone(), signature.result.to_string()]);
        f.write_str(&table::aligned(["SIGNATURE", "RESULT"], rows.collect()))?;
        for image in images {
            writeln!(f, "image: {}", table::sanitize(image))?;
        }
        for problem in problems {
            writeln!(f, "problem: {}", table::sanitize(problem))?;
        }
        match problems.is_empty() {
            true => writeln!(f, "trusted: {RAW_MANIFEST} and these images are signed"),
            false => writeln!(f, "not trusted"),
        }
    }
}
