//! The order of the crates: a crate imports crates of lower layers only.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, Result};
use tidewatch_testing::paths;

use crate::support::TestResult;

/// Crates, lowest layer first. Crates of one layer do not import each other: so the reconciles do not import the gateway, nor
/// the program of operators what runs in the control plane.
const LAYERS: &[&[&str]] = &[
    &["kit"],
    &["api"],
    &["contract", "cluster", "oci"],
    &["engine", "rollout", "agent"],
    &["select"],
    &["author"],
    &["trust", "fleet", "cli"],
    &["installer"],
    &["gateway", "modules"],
    &["receiver"],
    &["deploy"],
    &["testing", "sample-operator"],
    &["tests", "bench"],
];

/// Imports of each crate, without those of its tests.
fn imports() -> Result<BTreeMap<String, Vec<String>>> {
    let root = paths::workspace();
    let workspace = fs::read_to_string(root.join("Cargo.toml"))?;
    let members = workspace.lines().find_map(|line| line.strip_prefix("members = ")).context("the members")?;
    let folders = members.split('"').filter(|text| text.chars().any(char::is_alphabetic));
    folders.map(|folder| imports_of(&root.join(folder))).collect()
}

fn imports_of(folder: &Path) -> Result<(String, Vec<String>)> {
    let manifest = fs::read_to_string(folder.join("Cargo.toml"))?;
    let mut section = "";
    let mut name = None;
    let mut imports = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if let Some(text) = line.strip_prefix("name = \"tidewatch-").filter(|_| section == "[package]") {
            name = Some(text.trim_end_matches('"').to_owned());
        } else if let Some(text) = line.strip_prefix("tidewatch-").filter(|_| section == "[dependencies]") {
            imports.extend(text.split(['.', ' ']).next().map(str::to_owned));
        }
    }
    Ok((name.with_context(|| format!("the name of {}", folder.display()))?, imports))
}

#[test]
fn a_crate_imports_crates_of_lower_layers_only() -> TestResult {
    let all = imports()?;
    let layer_of = |name: &str| LAYERS.iter().position(|layer| layer.contains(&name));
    let listed: usize = LAYERS.iter().map(|layer| layer.len()).sum();
    assert_eq!(listed, all.len(), "{:?}", all.keys());
    let mut wrong = Vec::new();
    for (name, imports) in &all {
        let layer = layer_of(name).with_context(|| format!("{name} is in no layer"))?;
        let upward = imports.iter().filter(|import| layer_of(import).is_none_or(|of| of >= layer));
        wrong.extend(upward.map(|import| format!("{name} -> {import}")));
    }
    assert_eq!(wrong, Vec::<String>::new());
    assert!(all["modules"].iter().any(|import| import == "fleet"), "imports are found");
    Ok(())
}
