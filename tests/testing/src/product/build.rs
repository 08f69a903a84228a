//! `cargo build` from inside a test or a measurement.

use std::{
    collections::BTreeMap,
    env, io,
    path::PathBuf,
    process::{Command, Stdio},
};

use serde::Deserialize;

use crate::paths;

/// Most characters of cargo's messages in an error.
const MAX_ERROR_CHARS: usize = 4_000;
/// The package that is built in a profile of its own for measurements.
const AGENT: &str = "tidewatch-agent";

/// Reason why a binary of the product is missing.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BuildError {
    /// cargo cannot be run.
    #[error("run cargo: {0}")]
    Call(String),
    /// It does not compile.
    #[error("cargo build failed:\n{0}")]
    Compile(String),
    /// It compiles, but has no binary of that name.
    #[error("no binary {0} in the workspace")]
    Missing(String),
}

/// Builds the binaries of these packages and returns their paths, by name. Measured binaries are built as in the
/// images: the receiver with its allocator, and the agent in its own profile.
pub(super) fn cargo_build(packages: &[&str]) -> Result<BTreeMap<String, PathBuf>, BuildError> {
    let agent_separately = cfg!(feature = "jemalloc") && !cfg!(debug_assertions);
    let mut arguments = selected(packages, agent_separately);
    arguments.extend(["--features", "tidewatch-receiver/stamps"]);
    if cfg!(debug_assertions) {
        arguments.extend(["--features", "tidewatch-testing/unified"]);
    }
    if cfg!(feature = "otlp") {
        arguments.extend(["--features", "tidewatch-receiver/otlp"]);
        arguments.extend(["--features", "tidewatch-agent/otlp"].iter().filter(|_| !agent_separately));
    }
    if cfg!(feature = "jemalloc") {
        arguments.extend(["--features", "tidewatch-receiver/jemalloc"]);
    }
    let profile = profile();
    arguments.extend(["--profile", &profile]);
    let mut built = call(&arguments)?;
    if agent_separately {
        let traces: &[&str] = if cfg!(feature = "otlp") { &["--features", "otlp"] } else { &[] };
        built.extend(call(&[&["-p", AGENT, "--profile", "agent"], traces].concat())?);
    }
    Ok(built)
}

/// The cargo profile of the running binary: the folder below the target folder that holds it.
fn profile() -> String {
    let folder = env::current_exe().ok().and_then(|binary| {
        let folders = binary.ancestors().skip(1).filter_map(|folder| folder.file_name()?.to_str());
        folders.map(str::to_owned).find(|folder| !["deps", "examples"].contains(&folder.as_str()))
    });
    match folder.as_deref() {
        // The folder of the profiles `dev` and `test`.
        Some("debug") | None => "dev".to_owned(),
        Some(folder) => folder.to_owned(),
    }
}

/// Arguments for the packages of the first call; without the agent if it has a call of its own.
fn selected<'a>(packages: &[&'a str], agent_separately: bool) -> Vec<&'a str> {
    let packages = packages.iter().copied().filter(|package| !(agent_separately && *package == AGENT));
    packages.flat_map(|package| ["-p", package]).collect()
}

fn call(arguments: &[&str]) -> Result<BTreeMap<String, PathBuf>, BuildError> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(paths::workspace()).args(["build", "--message-format=json-render-diagnostics"]);
    // Only what runs in pods or on an operator's machine: not this crate's own binaries.
    let has = |package: &str| arguments.contains(&package);
    let binaries = [
        (AGENT, "tidewatch-agent"),
        ("tidewatch-receiver", "tidewatch-receiver"),
        ("tidewatch-cli", "tidewatch"),
        ("tidewatch-sample-operator", "sample-operator"),
    ];
    command.args(binaries.iter().filter(|(package, _)| has(package)).flat_map(|(_, binary)| ["--bin", binary]));
    command.args(arguments);
    let call = |e: io::Error| BuildError::Call(e.to_string());
    let output = command.stdin(Stdio::null()).output().map_err(call)?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let skipped = text.chars().count().saturating_sub(MAX_ERROR_CHARS);
        return Err(BuildError::Compile(text.chars().skip(skipped).collect()));
    }
    Ok(executables(&String::from_utf8_lossy(&output.stdout)))
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    target: Target,
    executable: Option<PathBuf>,
}

#[derive(Deserialize, Default)]
struct Target {
    name: String,
}

/// The executables in cargo's messages, one JSON object per line.
fn executables(messages: &str) -> BTreeMap<String, PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok());
    messages.filter_map(|message| Some((message.target.name, message.executable?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_executables_among_cargos_messages() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"name":"tidewatch_agent","kind":["lib"]},"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"tidewatch-agent"},"executable":"/t/tidewatch-agent"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        let expected = BTreeMap::from([("tidewatch-agent".to_owned(), PathBuf::from("/t/tidewatch-agent"))]);
        assert_eq!(executables(messages), expected);
    }

    #[test]
    fn the_agent_is_built_once() {
        let packages = [AGENT, "tidewatch-receiver"];
        assert_eq!(selected(&packages, false), ["-p", AGENT, "-p", "tidewatch-receiver"]);
        assert_eq!(selected(&packages, true), ["-p", "tidewatch-receiver"]);
    }
}
