//! `module render`.

use std::{fmt, path::PathBuf};

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use strum::Display;
use tidewatch_engine::preview::{LEFT_OUT, ObjectIdentity};
use tidewatch_kit::table;

use super::{
    InvalidError,
    registry::RegistryFlags,
    template,
    version::{Identity, Version},
};
use crate::{block_on, exit, output};

/// Arguments of `module render`.
#[derive(Clone, Debug, Args)]
pub struct Render {
    /// <registry>/component-descriptors/<name>:<version>, an OCI layout (a folder or a tar archive), the output of module
    /// pack, or the folder of a module's version
    #[arg(value_name = "REF")]
    pub reference: String,

    /// Print the objects as the receiver writes them to a runtime: in the order of application, with namespaces, localised
    /// images, ownership labels and annotations
    #[arg(long)]
    pub applied: bool,

    /// ModuleTemplate of the version, with its default module CR and manager; by default moduletemplate.yaml beside the layout
    #[arg(long, value_name = "FILE")]
    pub template: Option<PathBuf>,

    /// Access to the registry.
    #[command(flatten)]
    pub registry: RegistryFlags,

    /// Print JSON instead of YAML
    #[arg(long)]
    pub json: bool,
}

/// Form of the printed objects.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
enum Form {
    /// As in the artefact.
    Packed,
    /// As written to a runtime.
    Applied,
}

/// Result of `module render`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    #[serde(flatten)]
    identity: Identity,
    form: Form,
    objects: Vec<Value>,
    #[serde(rename = "defaultCR", skip_serializing_if = "Option::is_none")]
    default_cr: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    manager: Option<ObjectIdentity>,
    /// Parts of the written objects that are not printed.
    left_out: Vec<String>,
    notes: Vec<String>,
    /// Objects and default module CR as YAML.
    #[serde(skip)]
    documents: Vec<String>,
}

impl Render {
    pub(super) fn run(&self) -> Result<u8> {
        output::report(self.json, &block_on(self.report())?)?;
        Ok(exit::SUCCESS)
    }

    async fn report(&self) -> Result<Report> {
        let Version { identity, content, notes, mistakes } =
            Version::read(&self.reference, self.template.as_deref(), &self.registry).await?;
        InvalidError::of_mistakes(&identity.component, &mistakes)?;
        let applied = content.applied().map_err(|error| InvalidError::new(&identity.component, error))?;
        let (form, objects, left_out): (_, Vec<_>, Vec<_>) = if self.applied {
            let undecided = applied.undecided.iter().map(|kind| {
                format!("the namespace of {kind}, whose scope only a runtime knows: it is the one of the artefact")
            });
            let left_out = LEFT_OUT.into_iter().map(str::to_owned).chain(undecided);
            (Form::Applied, applied.bodies().cloned().collect(), left_out.collect())
        } else {
            (Form::Packed, content.packed().cloned().collect(), Vec::new())
        };
        let documents = objects.iter().chain(&content.default_cr).map(template::to_yaml).collect::<Result<_>>()?;
        let manager = applied.manager;
        Ok(Report { identity, form, objects, default_cr: content.default_cr, manager, left_out, notes, documents })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { identity: Identity { component, version, digest }, form, objects, .. } = self;
        let digest = digest.iter().map(|digest| format!(" {digest}")).collect::<String>();
        writeln!(
            f,
            "# {}",
            table::sanitize(&format!("{component}:{version}{digest}, {} objects as {form}", objects.len()))
        )?;
        if let Some(manager) = &self.manager {
            writeln!(f, "# manager: {}", table::sanitize(&manager.to_string()))?;
        }
        for (title, texts) in [("left out", &self.left_out), ("note", &self.notes)] {
            texts.iter().try_for_each(|text| writeln!(f, "# {title}: {}", table::sanitize(text)))?;
        }
        for (index, document) in self.documents.iter().enumerate() {
            f.write_str("---\n")?;
            if index == objects.len() {
                f.write_str("# default module CR: created once, and never changed\n")?;
            }
            writeln!(f, "{}", document.trim_end())?;
        }
        Ok(())
    }
}
