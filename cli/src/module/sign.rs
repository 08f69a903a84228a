//! `module sign`.

use std::{fmt, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};
use tidewatch_kit::table;
use tidewatch_oci::{
    descriptor::{self, AccessType, Document, Resource, ResourceDigest},
    key_folder,
    signature::{self, Method, SignatureAlgorithm, SigningKey},
};

use super::{
    InvalidError,
    artefact::{self, Artefact},
    constructor::MAX_DESCRIPTOR,
    image::ImageReference,
    layout,
    push::{PushFlags, Pushed},
    show::{Stored, report::Report as Shown, source::Source},
    template,
};
use crate::{block_on, exit, output};

/// Part of an artefact in errors.
const PLACE: &str = "component descriptor";

/// Arguments of `module sign`.
#[derive(Clone, Debug, Args)]
pub struct Sign {
    /// OCI layout as written by `module pack`, a folder or a tar archive; the signed one takes its place
    #[arg(value_name = "LAYOUT")]
    pub layout: PathBuf,

    /// File with an RSA private key of 2,048 to 8,192 bits in PEM, without encryption
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,

    /// Name of the signature, by which verifiers select the public key; one with the same name is replaced
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub signature_name: String,

    /// Signature algorithm; all OCM tools verify the default
    #[arg(long, value_enum, default_value_t)]
    pub algorithm: Algorithm,

    /// The push to a registry.
    #[command(flatten)]
    pub push: PushFlags,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Signature algorithm of `module sign`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Algorithm {
    /// RSASSA-PKCS1-v1_5 with SHA-256
    #[default]
    Pkcs1,
    /// RSASSA-PSS with SHA-256
    Pss,
}

/// Result of `module sign`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    component: String,
    version: String,
    /// Digest of the manifest.
    digest: String,
    signature: SignatureReport,
    /// Layout that was written.
    layout: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pushed: Option<Pushed>,
    warnings: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SignatureReport {
    name: String,
    algorithm: String,
    normalisation_algorithm: String,
    hash_algorithm: String,
    /// Digest that is signed.
    digest: String,
}

impl Sign {
    pub(super) fn run(&self) -> Result<u8> {
        let key = SigningKey::from_pem(&key_folder::content(&self.key)?);
        let key = key.with_context(|| format!("the private key {}", self.key.display()))?;
        let stored = block_on(async { Stored::read(&Source::layout(&self.layout)?).await })?;
        let problems = Shown::new(&stored, "").problems;
        if !problems.is_empty() {
            return Err(InvalidError::new(self.layout.display(), problems.join("; ")).into());
        }
        let (artefact, mut report) = self.sign(&key, &stored)?;
        if self.layout.is_dir() {
            layout::write_folder(artefact.contents(), &self.layout)
        } else {
            layout::write_archive(artefact.contents(), &self.layout)
        }?;
        report.pushed = self.push.push(&artefact)?;
        output::report(self.json, &report)?;
        Ok(exit::SUCCESS)
    }

    fn sign(&self, key: &SigningKey, stored: &Stored) -> Result<(Artefact, Report)> {
        let (document, warnings) = with_digests(stored)?;
        let algorithm = match self.algorithm {
            Algorithm::Pkcs1 => SignatureAlgorithm::Pkcs1,
            Algorithm::Pss => SignatureAlgorithm::Pss,
        };
        let method = Method { algorithm, ..Method::default() };
        let signature = key.sign(&document, &self.signature_name, method).context("sign the component descriptor")?;
        let document = document.with_signature(signature.clone());
        let text = template::to_yaml(document.value()).context("write the component descriptor")?;
        if text.len() > MAX_DESCRIPTOR {
            let problem = format!("{} bytes exceed the limit of {MAX_DESCRIPTOR} bytes", text.len());
            return Err(InvalidError::new(PLACE, problem).into());
        }
        let read = descriptor::parse(artefact::DESCRIPTOR, text.as_bytes()).context("read the written descriptor")?;
        ensure!(read == document, "the component descriptor has values that YAML does not keep");
        let manifest = serde_json::from_slice(&stored.manifest);
        let manifest = manifest.map_err(|error| InvalidError::new("manifest", error))?;
        let component = stored.component.clone();
        let artefact = Artefact::with_descriptor(component, manifest, &stored.pointer.digest, &text, &stored.layers);
        let artefact = artefact.context("pack the component descriptor")?;
        let report = self.report(&artefact, &signature, warnings);
        Ok((artefact, report))
    }

    fn report(&self, artefact: &Artefact, signature: &Value, warnings: Vec<String>) -> Report {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let digest = &signature["digest"];
        Report {
            component: artefact.component.name().to_owned(),
            version: artefact.component.version().to_owned(),
            digest: artefact.manifest.digest.to_string(),
            signature: SignatureReport {
                name: self.signature_name.clone(),
                algorithm: text(&signature["signature"]["algorithm"]),
                normalisation_algorithm: text(&digest["normalisationAlgorithm"]),
                hash_algorithm: text(&digest["hashAlgorithm"]),
                digest: text(&digest["value"]),
            },
            layout: self.layout.display().to_string(),
            pushed: None,
            warnings,
        }
    }
}

/// The component descriptor with digests of all resources. One whose content is neither in the artefact nor named by a
/// digest is excluded from the signature, with a warning.
fn with_digests(stored: &Stored) -> Result<(Document, Vec<String>)> {
    let mut document = stored.document.value().clone();
    let mut warnings = Vec::new();
    let lists = ["/component/resources", "/spec/resources"];
    let list = lists.iter().find(|list| document.pointer(list).is_some_and(Value::is_array));
    let resources = list.and_then(|list| document.pointer_mut(list)?.as_array_mut());
    for (resource, member) in stored.descriptor.resources.iter().zip(resources.into_iter().flatten()) {
        if resource.digest.is_some() || AccessType::of(&resource.access) == AccessType::None {
            continue;
        }
        let digest = known(resource, stored, member).unwrap_or_else(|| {
            warnings.push(format!("the signature does not cover the content of the resource {}", resource.name));
            signature::excluded()
        });
        let ResourceDigest { hash_algorithm, normalisation_algorithm, value } = digest;
        member["digest"] = json!({
            "hashAlgorithm": hash_algorithm, "normalisationAlgorithm": normalisation_algorithm, "value": value,
        });
    }
    Ok((document.into(), warnings))
}

/// The digest of a local blob, or of an image that is named by it.
fn known(resource: &Resource, stored: &Stored, member: &Value) -> Option<ResourceDigest> {
    let digest = |normalisation: &str, value: String| ResourceDigest {
        hash_algorithm: "SHA-256".to_owned(),
        normalisation_algorithm: normalisation.to_owned(),
        value,
    };
    if let Some(image) = &resource.image {
        let image = ImageReference::parse(image).ok()?;
        return image.digest().map(|value| digest("ociArtifactDigest/v1", value.hex()));
    }
    let reference = member["access"]["localReference"].as_str()?.parse().ok()?;
    stored.layers.contains_key(&reference).then(|| digest("genericBlobDigest/v1", reference.hex()))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { component, version, digest, signature, layout, pushed, warnings } = self;
        writeln!(f, "{component}:{version} {digest}")?;
        let SignatureReport { name, algorithm, normalisation_algorithm, hash_algorithm, digest } = signature;
        let name = table::sanitize(name);
        writeln!(f, "signature: {name} {algorithm} {normalisation_algorithm} {hash_algorithm} {digest}")?;
        writeln!(f, "written: {}", table::sanitize(layout))?;
        if let Some(Pushed { reference, effect }) = pushed {
            writeln!(f, "pushed: {reference} ({effect})")?;
        }
        for warning in warnings {
            writeln!(f, "warning: {}", table::sanitize(warning))?;
        }
        Ok(())
    }
}
