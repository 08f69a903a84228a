//! `module diff`.

use std::{fmt, path::PathBuf};

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use tidewatch_engine::preview::{FieldChange, ManagerChange, ObjectIdentity, Upgrade};
use tidewatch_kit::table;

use super::{
    InvalidError,
    registry::RegistryFlags,
    version::{Identity, Version},
};
use crate::{block_on, exit, output};

/// Fields that the text names of each object.
const MAX_FIELDS: usize = 20;
/// Characters of a value in the text.
const MAX_VALUE: usize = 80;

/// Arguments of `module diff`.
#[derive(Clone, Debug, Args)]
pub struct Diff {
    /// Version before: <registry>/component-descriptors/<name>:<version>, an OCI layout (a folder or a tar archive), the
    /// output of module pack, or the folder of a module's version
    #[arg(value_name = "FROM")]
    pub from: String,

    /// Version after, in the same forms
    #[arg(value_name = "TO")]
    pub to: String,

    /// ModuleTemplate of FROM, with its default module CR and manager; by default moduletemplate.yaml beside the layout
    #[arg(long, value_name = "FILE")]
    pub from_template: Option<PathBuf>,

    /// ModuleTemplate of TO
    #[arg(long, value_name = "FILE")]
    pub to_template: Option<PathBuf>,

    /// Access to the registry.
    #[command(flatten)]
    pub registry: RegistryFlags,

    /// Print JSON, with all fields and whole values
    #[arg(long)]
    pub json: bool,
}

/// Result of `module diff`.
#[derive(Clone, Debug, Serialize)]
struct Report {
    from: Identity,
    to: Identity,
    #[serde(flatten)]
    upgrade: Upgrade,
    notes: Vec<String>,
}

impl Diff {
    pub(super) fn run(&self) -> Result<u8> {
        let report = block_on(self.report())?;
        output::report(self.json, &report)?;
        Ok(if report.upgrade.is_change() { exit::FAILURE } else { exit::SUCCESS })
    }

    async fn report(&self) -> Result<Report> {
        let from = Version::read(&self.from, self.from_template.as_deref(), &self.registry).await?;
        let to = Version::read(&self.to, self.to_template.as_deref(), &self.registry).await?;
        InvalidError::of_mistakes(&to.identity.component, &to.mistakes)?;
        let upgrade = Upgrade::between(&from.content, &to.content)
            .map_err(|error| InvalidError::new(&from.identity.component, error))?;
        let side = |name: &'static str, version: &Version| -> Vec<String> {
            version.notes.iter().map(|note| format!("{name}: {note}")).collect()
        };
        let mut notes = [side("from", &from), side("to", &to)].concat();
        // What is published already does not let change.
        notes.extend(from.mistakes.iter().map(|mistake| format!("from: {mistake}")));
        if from.identity.component != to.identity.component {
            notes.push("the versions are of different components: the Manifests of the module are replaced".to_owned());
        }
        Ok(Report { from: from.identity, to: to.identity, upgrade, notes })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, upgrade, notes } = self;
        let mut page = format!("{}:{} → {}:{}\n", from.component, from.version, to.component, to.version);
        page.push_str(&objects(upgrade));
        for change in &upgrade.changed {
            page.push_str(&format!("\n{}\n{}", change.object, fields(&change.fields)));
        }
        if !upgrade.default_cr.is_empty() {
            page.push_str(&format!("\ndefault module CR, of new installations only\n{}", fields(&upgrade.default_cr)));
        }
        if let Some(ManagerChange { before, after }) = &upgrade.manager {
            let [before, after] =
                [before, after].map(|it| it.as_ref().map_or_else(|| "-".to_owned(), ObjectIdentity::to_string));
            page.push_str(&format!("\nmanager: {before} → {after}\n"));
        }
        if !upgrade.risks.is_empty() {
            page.push('\n');
        }
        for risk in &upgrade.risks {
            page.push_str(&format!("risk[{}]: {}: {}\n", risk.code, risk.object, risk.message));
        }
        for kind in &upgrade.undecided {
            page.push_str(&format!(
                "note: only a runtime knows the scope of {kind}, and so the namespaces of its objects\n"
            ));
        }
        notes.iter().for_each(|note| page.push_str(&format!("note: {note}\n")));
        let Upgrade { added, removed, changed, unchanged, .. } = upgrade;
        let added = added.len();
        let removed = removed.len();
        let changed = changed.len();
        page.push_str(&format!("{added} added, {removed} removed, {changed} changed, {unchanged} unchanged\n"));
        page.lines().try_for_each(|line| writeln!(f, "{}", table::sanitize(line)))
    }
}

/// The table of the objects that differ.
fn objects(upgrade: &Upgrade) -> String {
    let row = |change: &str, ObjectIdentity { kind, namespace, name, .. }: &ObjectIdentity, fields: String| {
        [change.to_owned(), kind.clone(), namespace.clone().unwrap_or_else(|| "-".to_owned()), name.clone(), fields]
    };
    let none = || "-".to_owned();
    let rows: Vec<_> = (upgrade.added.iter().map(|object| row("added", object, none())))
        .chain(upgrade.removed.iter().map(|object| row("removed", object, none())))
        .chain(upgrade.changed.iter().map(|it| row("changed", &it.object, it.fields.len().to_string())))
        .collect();
    if rows.is_empty() {
        String::new()
    } else {
        table::aligned(["CHANGE", "KIND", "NAMESPACE", "NAME", "FIELDS"], rows)
    }
}

/// One line per field, of bounded length.
fn fields(changes: &[FieldChange]) -> String {
    let shown = changes.iter().take(MAX_FIELDS).map(|FieldChange { path, before, after }| {
        let [before, after] = [before, after].map(|it| it.as_ref().map_or_else(|| "-".to_owned(), value));
        format!("  {path}: {before} → {after}\n")
    });
    let mut text: String = shown.collect();
    if let Some(more) = changes.len().checked_sub(MAX_FIELDS).filter(|more| *more > 0) {
        text.push_str(&format!("  … and {more} more fields; --json prints all\n"));
    }
    text
}

/// A value as JSON on one line, cut to [`MAX_VALUE`].
fn value(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= MAX_VALUE {
        return text;
    }
    text.chars().take(MAX_VALUE).chain(['…']).collect()
}
