//! Packing, rendering and comparison of a large module by the operators' program, on disk.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tidewatch_testing::{product, progress::Step};
use tokio::process::Command;

use super::{
    Figure,
    figure::{median, millis},
};

/// Largest time of each command in milliseconds.
const BAR: f64 = 1_000.0;
/// Exit code of a comparison with differences.
const DIFFERENT: i32 = 1;

/// Extent of the measurement.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Settings {
    /// Objects of the module
    #[arg(long, default_value_t = 200)]
    pub objects: u32,
    /// Runs of each command
    #[arg(long, default_value_t = 20)]
    pub runs: u32,
}

/// Runs each command so many times and emits the medians. The floor is the start of the program.
///
/// # Errors
/// The program cannot be built, or a command fails.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let binaries = product::build_binaries().await?;
    let program = binaries.cli()?;
    let folder = tempfile::tempdir()?;
    let [from, to] = ["1.0.0", "1.1.0"].map(|version| (version, folder.path().join(version)));
    for (version, path) in [&from, &to] {
        write_module(path, version, settings.objects).with_context(|| format!("write {}", path.display()))?;
    }
    let text = |path: &Path| path.to_str().map(str::to_owned).context("a path in UTF-8");
    let from = text(&from.1)?;
    let to = text(&to.1)?;
    let [packed, other] = ["packed", "other"].map(|name| folder.path().join(name));
    let packed = text(&packed)?;
    let other = text(&other)?;
    run(program, &["module", "pack", &to, "--output", &other], 0).await?;
    let step = Step::begin(format!("{} runs with {} objects", settings.runs, settings.objects));
    let floor = median_of(settings.runs, program, &["--version"], 0).await?;
    for (figure, arguments, code) in [
        ("module_pack", &["module", "pack", &from, "--output", &packed][..], 0),
        ("module_render", &["module", "render", &packed, "--applied"], 0),
        ("module_diff", &["module", "diff", &packed, &other], DIFFERENT),
    ] {
        let value = median_of(settings.runs, program, arguments, code).await?;
        emit(&Figure::new(figure, value, "ms").at_most(BAR).with_floor(floor));
    }
    step.done();
    Ok(())
}

/// Median time of a command in milliseconds.
async fn median_of(runs: u32, program: &Path, arguments: &[&str], code: i32) -> Result<f64> {
    let mut samples = Vec::new();
    for _ in 0..runs {
        samples.push(millis(run(program, arguments, code).await?));
    }
    Ok(median(samples))
}

/// Runs the program, which must exit with this code.
async fn run(program: &Path, arguments: &[&str], code: i32) -> Result<Duration> {
    let begun = Instant::now();
    let output = Command::new(program).args(arguments).kill_on_drop(true).output().await?;
    let time = begun.elapsed();
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(code), "{arguments:?} exits with {}: {error}", output.status);
    Ok(time)
}

/// Writes the folder of a module: one CRD with a large schema, then Deployments, roles and configuration in turn.
fn write_module(folder: &Path, version: &str, objects: u32) -> Result<()> {
    fs::create_dir_all(folder)?;
    let properties: serde_json::Map<String, Value> =
        (0..500).map(|field| (format!("field{field}"), json!({"type": "string", "description": "A field."}))).collect();
    let schema = json!({"type": "object", "properties": {"spec": {"type": "object", "properties": properties}}});
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "larges.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced",
                 "names": {"kind": "Large", "plural": "larges", "singular": "large", "listKind": "LargeList"},
                 "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}]}});
    let others = (1..objects).map(|number| object(number, version));
    let text: Vec<_> = [definition].into_iter().chain(others).map(|object| object.to_string()).collect();
    fs::write(folder.join("manifest.yaml"), text.join("\n---\n"))?;
    let description = format!("component: kyma-project.io/module/large\nversion: {version}\n");
    Ok(fs::write(folder.join("module.yaml"), description)?)
}

fn object(number: u32, version: &str) -> Value {
    let metadata = json!({"name": format!("large-{number}"), "namespace": "kyma-system", "labels": {"app": format!("large-{number}")}});
    match number % 4 {
        0 => json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {
            "replicas": 1, "selector": {"matchLabels": {"app": format!("large-{number}")}},
            "template": {"metadata": {"labels": {"app": format!("large-{number}")}}, "spec": {"containers": [
                {"name": "manager", "image": format!("registry.example.com/large-{number}:{version}"), "args": ["--leader-elect"],
                 "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}}}]}}}}),
        1 => json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": [
            {"apiGroups": ["example.com"], "resources": ["larges", "larges/status"], "verbs": ["get", "list", "watch", "patch"]}]}),
        2 => json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {
            "selector": {"app": format!("large-{number}")}, "ports": [{"name": "https", "port": 443, "targetPort": 8443}]}}),
        _ => json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {
            "config.yaml": format!("version: {version}\n{}", "line: of the configuration\n".repeat(40))}}),
    }
}
