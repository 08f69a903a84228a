//! `cargo build` from inside a test or a measurement.

use std::{
    collections::BTreeMap,
    env, io,
    path::PathBuf,
    process::{Command, Stdio},
};

use serde::Deserialize;

use crate::paths;

/// How many characters of cargo's complaints an error carries.
const COMPLAINTS: usize = 4_000;
/// What is measured in a profile of its own.
const AGENT: &str = "tidewatch-agent";

/// Why a binary of ours is not there.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BuildError {
    /// cargo cannot be called.
    #[error("call cargo: {0}")]
    Call(String),
    /// It does not compile.
    #[error("cargo build failed:\n{0}")]
    Compile(String),
    /// It compiles, but has no binary of that name.
    #[error("there is no binary {0} in the workspace")]
    Missing(String),
}

/// Builds the binaries of these packages and returns where they are, by name. What is measured is built as the images have it: the
/// receiver with its allocator, and the agent in its own profile.
pub(super) fn cargo_build(packages: &[&str]) -> Result<BTreeMap<String, PathBuf>, BuildError> {
    let agent_apart = cfg!(feature = "jemalloc") && !cfg!(debug_assertions);
    let mut arguments = selected(packages, agent_apart);
    if cfg!(feature = "otlp") {
        arguments.extend(["--features", "tidewatch-tests/otlp"]);
    }
    if cfg!(feature = "jemalloc") {
        arguments.extend(["--features", "tidewatch-tests/jemalloc"]);
    }
    if !cfg!(debug_assertions) {
        arguments.push("--release");
    }
    let mut built = call(&arguments)?;
    if agent_apart {
        let traces: &[&str] = if cfg!(feature = "otlp") { &["--features", "otlp"] } else { &[] };
        built.extend(call(&[&["-p", AGENT, "--profile", "agent"], traces].concat())?);
    }
    Ok(built)
}

/// Which packages the first call builds: not the agent, when it has a call of its own.
fn selected<'a>(packages: &[&'a str], agent_apart: bool) -> Vec<&'a str> {
    let packages = packages.iter().copied().filter(|package| !(agent_apart && *package == AGENT));
    packages.flat_map(|package| ["-p", package]).collect()
}

fn call(arguments: &[&str]) -> Result<BTreeMap<String, PathBuf>, BuildError> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(paths::workspace()).args(["build", "--bins", "--message-format=json-render-diagnostics"]);
    command.args(arguments);
    let call = |e: io::Error| BuildError::Call(e.to_string());
    let output = command.stdin(Stdio::null()).output().map_err(call)?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let skipped = text.chars().count().saturating_sub(COMPLAINTS);
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
