//! Contracts with tools and neighbours: requests that other programs send, and what they read afterwards, as data in
//! `tests/data/tools`. This module parses that data strictly; the integration test `tools` replays it.
//!
//! One file describes one program:
//!
//! ```yaml
//! tool: Busola
//! version: 2026-08                     # a commit or release, or the month of the sources
//! sources: [kyma-project/busola src/components/Modules/support.ts bf83411f]
//! objects:
//!   kyma: {cluster: runtime, path: /apis/operator.kyma-project.io/v1beta2/namespaces/kyma-system/kymas/default}
//! contracts:
//! - name: unmanage a module
//!   given:                             # state before: requests and reads of anybody
//!   - {object: kyma, mergePatch: {spec: {modules: [{name: keda}]}}}
//!   sends:                             # requests as the program sends them
//!   - {object: kyma, jsonPatch: [{op: replace, path: /spec/modules/0/managed, value: false}]}
//!   then:                              # what it reads; all of it holds at one time, soon
//!   - {object: kyma, at: "$.status.modules[?@.name=='keda'].state", is: Unmanaged}
//! ```
//!
//! * A request has one of `create`, `put`, `jsonPatch`, `mergePatch`, `apply` and `delete`, and the expected status in
//!   `answer`, if that is not a success.
//! * A `put` is what a program with types of its own does: it reads the object, keeps the members that its types know
//!   (`knows`, a name in `shapes`), makes its `change`, and writes the whole object. A shape has `all` for a member that
//!   is kept whole.
//! * A read selects values by a JSONPath of RFC 9535 and has one of `is`, `oneOf`, `exists`, `absent` and `contains`,
//!   or is `gone` for an object that does not exist.
//! * A segment `{name=keda}` in the path of a patch stands for the index of the element whose `name` is `keda`.
//! * `${name}` stands for a value of the landscape, for instance `${kyma}`; see [`Values`].
//! * A contract that another test proves names that test in `provedBy` instead of `sends` and `then`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::paths;

mod body;
mod raw;
mod read;
mod values;

pub use body::{BodyError, Put, Shape, put, resolve};
pub use read::{Expected, Mismatch, Read};
pub use values::{UnknownValue, Values};

/// Failure to read the contracts.
#[derive(Debug, thiserror::Error)]
pub enum ContractError {
    /// A file cannot be read.
    #[error("read {0}")]
    Read(PathBuf, #[source] io::Error),
    /// A file is not YAML of this form.
    #[error("parse {0}")]
    Parse(PathBuf, #[source] Box<serde_saphyr::Error>),
    /// A contract contradicts itself.
    #[error("{file}: contract {contract:?}: {fault}")]
    Contract {
        /// File with the contract.
        file: PathBuf,
        /// Name of the contract.
        contract: String,
        /// What is wrong.
        fault: String,
    },
}

/// Contracts of one program.
#[derive(Debug)]
pub struct Tool {
    /// Name of its file without extension.
    pub file: String,
    /// Name of the program.
    pub name: String,
    /// Commit or release whose sources were read, or the month of the snapshot.
    pub version: String,
    /// Repository, paths and commits of the sources.
    pub sources: Vec<String>,
    /// Objects that its contracts name.
    pub objects: BTreeMap<String, Object>,
    /// Types of the program, as the members that they know.
    pub shapes: BTreeMap<String, Shape>,
    /// Its contracts, in the order of their replay.
    pub contracts: Vec<Contract>,
}

/// A place that answers requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// The API server of the control plane.
    Kcp,
    /// The API server of the runtime.
    Runtime,
    /// The probe port of the receiver.
    Receiver,
}

/// An object, or a collection of objects, by its URL.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Object {
    /// The server.
    pub cluster: Place,
    /// Path and query on that server, with placeholders.
    pub path: String,
}

/// One promise.
#[derive(Debug)]
pub struct Contract {
    /// Its name, unique in its file.
    pub name: String,
    /// How it is proved.
    pub proof: Proof,
}

/// How a contract is proved.
#[derive(Debug)]
pub enum Proof {
    /// By a replay.
    Replay {
        /// Steps that lead to the state before.
        given: Vec<Step>,
        /// Requests of the program.
        sends: Vec<Request>,
        /// What it reads afterwards.
        then: Vec<Read>,
    },
    /// By another test.
    Elsewhere(NamedTest),
}

/// A test of this repository.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedTest {
    /// Its file, relative to the repository.
    pub file: PathBuf,
    /// Name of its function.
    pub test: String,
}

impl NamedTest {
    /// Returns true if the file has a function of this name directly below a test attribute.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn exists(&self) -> io::Result<bool> {
        let text = fs::read_to_string(paths::workspace().join(&self.file))?;
        let lines: Vec<_> = text.lines().map(str::trim).collect();
        let is_test = |line: &str| matches!(line, "#[test]" | "#[tokio::test]");
        let names = |line: &str| {
            let function = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
            function.is_some_and(|rest| rest.strip_prefix(&self.test).is_some_and(|rest| rest.starts_with('(')))
        };
        Ok(lines.windows(2).any(|pair| is_test(pair[0]) && names(pair[1])))
    }
}

/// A step to a state.
#[derive(Debug)]
pub enum Step {
    /// A request.
    Send(Request),
    /// A state to wait for.
    Await(Read),
}

/// A request.
#[derive(Debug)]
pub struct Request {
    /// Name of the object.
    pub object: String,
    /// What is sent.
    pub way: Way,
    /// The expected status; `None` for any success.
    pub answer: Option<u16>,
}

/// Way of a write.
#[derive(Debug)]
pub enum Way {
    /// POST to a collection.
    Create(serde_json::Value),
    /// Read, modify, PUT.
    Put(Put),
    /// PATCH with `application/json-patch+json`.
    JsonPatch(Vec<serde_json::Value>),
    /// PATCH with `application/merge-patch+json`.
    MergePatch(serde_json::Value),
    /// PATCH with `application/apply-patch+yaml`.
    Apply {
        /// The field manager.
        manager: String,
        /// Whether it takes fields over from other managers.
        force: bool,
        /// The desired fields.
        body: serde_json::Value,
    },
    /// DELETE.
    Delete {
        /// What happens to the dependants.
        propagation: Option<String>,
    },
}

/// Folder of the contracts.
#[must_use]
pub fn folder() -> PathBuf {
    paths::workspace().join("tests").join("data").join("tools")
}

/// All contracts of a folder, sorted by the names of the files.
///
/// # Errors
/// See [`ContractError`].
pub fn read_all(folder: &Path) -> Result<Vec<Tool>, ContractError> {
    let unreadable = |error| ContractError::Read(folder.to_owned(), error);
    let entries = fs::read_dir(folder).map_err(unreadable)?.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
    let files: BTreeSet<_> = entries.into_iter().map(|entry| entry.path()).collect();
    files.iter().map(|file| read_file(file)).collect()
}

fn read_file(file: &Path) -> Result<Tool, ContractError> {
    let text = fs::read_to_string(file).map_err(|error| ContractError::Read(file.to_owned(), error))?;
    parse(file, &text)
}

fn parse(file: &Path, text: &str) -> Result<Tool, ContractError> {
    let raw: raw::Tool =
        serde_saphyr::from_str(text).map_err(|error| ContractError::Parse(file.to_owned(), Box::new(error)))?;
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    raw.check(stem).map_err(|(contract, fault)| ContractError::Contract { file: file.to_owned(), contract, fault })
}

#[cfg(test)]
mod tests;
