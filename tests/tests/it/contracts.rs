//! Contracts with tools and neighbours: requests that other programs send, and what they read afterwards, as data in
//! `tests/data/tools`. This module parses that data strictly; the test `tools` replays it.
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
use tidewatch_testing::paths;

mod body;
mod raw;
mod read;
mod values;

pub(crate) use body::{Put, Shape, put, resolve};
pub(crate) use read::{Expected, Mismatch, Read};
pub(crate) use values::Values;

/// Failure to read the contracts.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ContractError {
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
pub(crate) struct Tool {
    /// Name of its file without extension.
    pub(crate) file: String,
    /// Name of the program.
    pub(crate) name: String,
    /// Commit or release whose sources were read, or the month of the snapshot.
    pub(crate) version: String,
    /// Repository, paths and commits of the sources.
    pub(crate) sources: Vec<String>,
    /// Objects that its contracts name.
    pub(crate) objects: BTreeMap<String, Object>,
    /// Types of the program, as the members that they know.
    pub(crate) shapes: BTreeMap<String, Shape>,
    /// Its contracts, in the order of their replay.
    pub(crate) contracts: Vec<Contract>,
}

/// A place that answers requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Place {
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
pub(crate) struct Object {
    /// The server.
    pub(crate) cluster: Place,
    /// Path and query on that server, with placeholders.
    pub(crate) path: String,
}

/// One promise.
#[derive(Debug)]
pub(crate) struct Contract {
    /// Its name, unique in its file.
    pub(crate) name: String,
    /// How it is proved.
    pub(crate) proof: Proof,
}

/// How a contract is proved.
#[derive(Debug)]
pub(crate) enum Proof {
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
pub(crate) struct NamedTest {
    /// Its file, relative to the repository.
    pub(crate) file: PathBuf,
    /// Name of its function.
    pub(crate) test: String,
}

impl NamedTest {
    /// Returns true if the file has a function of this name directly below a test attribute.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn exists(&self) -> io::Result<bool> {
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
pub(crate) enum Step {
    /// A request.
    Send(Request),
    /// A state to wait for.
    Await(Read),
}

/// A request.
#[derive(Debug)]
pub(crate) struct Request {
    /// Name of the object.
    pub(crate) object: String,
    /// What is sent.
    pub(crate) way: Way,
    /// The expected status; `None` for any success.
    pub(crate) answer: Option<u16>,
}

/// Way of a write.
#[derive(Debug)]
pub(crate) enum Way {
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
pub(crate) fn folder() -> PathBuf {
    paths::workspace().join("tests").join("data").join("tools")
}

/// All contracts of a folder, sorted by the names of the files.
///
/// # Errors
/// See [`ContractError`].
pub(crate) fn read_all(folder: &Path) -> Result<Vec<Tool>, ContractError> {
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
