//! The form of the files, before contradictions are ruled out.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

use super::{Contract, Expected, NamedTest, Object, Proof, Put, Read, Request, Shape, Step, Way};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tool {
    tool: String,
    version: String,
    sources: Vec<String>,
    #[serde(default)]
    objects: BTreeMap<String, Object>,
    #[serde(default)]
    shapes: BTreeMap<String, Shape>,
    contracts: Vec<RawContract>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RawContract {
    name: String,
    #[serde(default)]
    given: Vec<RawStep>,
    #[serde(default)]
    sends: Vec<RawStep>,
    #[serde(default)]
    then: Vec<RawStep>,
    proved_by: Option<NamedTest>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RawStep {
    object: String,
    create: Option<Value>,
    put: Option<Put>,
    json_patch: Option<Vec<Value>>,
    merge_patch: Option<Value>,
    apply: Option<RawApply>,
    delete: Option<RawDelete>,
    answer: Option<u16>,
    at: Option<String>,
    is: Option<Value>,
    one_of: Option<Vec<Value>>,
    contains: Option<String>,
    #[serde(default)]
    exists: bool,
    #[serde(default)]
    absent: bool,
    #[serde(default)]
    gone: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawApply {
    manager: String,
    #[serde(default)]
    force: bool,
    body: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDelete {
    propagation: Option<String>,
}

/// Contract and what is wrong with it.
type Fault = (String, String);

impl Tool {
    /// Rules contradictions out. An error names the contract.
    pub(super) fn check(self, file: String) -> Result<super::Tool, Fault> {
        let Self { tool, version, sources, objects, shapes, contracts } = self;
        let mut names = BTreeSet::new();
        let mut checked = Vec::new();
        for contract in contracts {
            let name = contract.name.clone();
            let fault = |fault: String| (name.clone(), fault);
            if !names.insert(name.clone()) {
                return Err(fault("another contract of this file has this name".to_owned()));
            }
            let contract = contract.check().map_err(fault)?;
            refer(&contract, &objects, &shapes).map_err(fault)?;
            checked.push(contract);
        }
        Ok(super::Tool { file, name: tool, version, sources, objects, shapes, contracts: checked })
    }
}

impl RawContract {
    fn check(self) -> Result<Contract, String> {
        let Self { name, given, sends, then, proved_by } = self;
        if let Some(test) = proved_by {
            let is_replayed = !(given.is_empty() && sends.is_empty() && then.is_empty());
            return if is_replayed {
                Err("provedBy excludes given, sends and then".to_owned())
            } else {
                Ok(Contract { name, proof: Proof::Elsewhere(test) })
            };
        }
        let steps = |raw: Vec<RawStep>| raw.into_iter().map(RawStep::check).collect::<Result<Vec<_>, _>>();
        let requests = steps(sends)?.into_iter().map(|step| match step {
            Step::Send(request) => Ok(request),
            Step::Await(read) => Err(format!("sends has a read of {}", read.object)),
        });
        let reads = steps(then)?.into_iter().map(|step| match step {
            Step::Await(read) => Ok(read),
            Step::Send(request) => Err(format!("then has a request to {}", request.object)),
        });
        let sends = requests.collect::<Result<Vec<_>, _>>()?;
        let then = reads.collect::<Result<Vec<_>, _>>()?;
        if then.is_empty() && sends.iter().all(|request| request.answer.is_none()) {
            return Err("nothing is expected".to_owned());
        }
        Ok(Contract { name, proof: Proof::Replay { given: steps(given)?, sends, then } })
    }
}

impl RawStep {
    fn check(self) -> Result<Step, String> {
        let Self { object, create, put, json_patch, merge_patch, apply, delete, answer, .. } = self;
        let apply = apply.map(|RawApply { manager, force, body }| Way::Apply { manager, force, body });
        let delete = delete.map(|RawDelete { propagation }| Way::Delete { propagation });
        let patches = [json_patch.map(Way::JsonPatch), merge_patch.map(Way::MergePatch), apply];
        let others = [create.map(Way::Create), put.map(Way::Put), delete];
        let way = only_one(patches.into_iter().chain(others)).map_err(|number| match number {
            0 => None,
            number => Some(format!("a request to {object} is {number} requests")),
        });

        let values =
            [self.is.map(Expected::Is), self.one_of.map(Expected::OneOf), self.contains.map(Expected::Contains)];
        let facts = [
            self.exists.then_some(Expected::Exists),
            self.absent.then_some(Expected::Absent),
            self.gone.then_some(Expected::Gone),
        ];
        let expected = only_one(values.into_iter().chain(facts)).map_err(|number| match number {
            0 => None,
            number => Some(format!("a read of {object} expects {number} things")),
        });

        match (way, expected) {
            (Err(Some(fault)), _) | (_, Err(Some(fault))) => Err(fault),
            (Ok(way), Err(None)) if self.at.is_none() => Ok(Step::Send(Request { object, way, answer })),
            (Err(None), Ok(expected)) if answer.is_none() => Ok(Step::Await(Read::new(object, self.at, expected)?)),
            _ => Err(format!("a step at {object} is neither a request nor a read")),
        }
    }
}

/// The only one that is there, or how many there are.
fn only_one<T>(all: impl Iterator<Item = Option<T>>) -> Result<T, usize> {
    let mut there: Vec<_> = all.flatten().collect();
    match (there.pop(), there.len()) {
        (Some(only), 0) => Ok(only),
        (None, _) => Err(0),
        (Some(_), others) => Err(others + 1),
    }
}

/// Every name of an object and of a shape is known.
fn refer(
    contract: &Contract,
    objects: &BTreeMap<String, Object>,
    shapes: &BTreeMap<String, Shape>,
) -> Result<(), String> {
    let Proof::Replay { given, sends, then } = &contract.proof else { return Ok(()) };
    let given_requests = given.iter().filter_map(|step| match step {
        Step::Send(request) => Some(request),
        Step::Await(_) => None,
    });
    let given_reads = given.iter().filter_map(|step| match step {
        Step::Await(read) => Some(read),
        Step::Send(_) => None,
    });
    let requests: Vec<_> = given_requests.chain(sends).collect();
    let names = requests.iter().map(|request| &request.object).chain(given_reads.chain(then).map(|read| &read.object));
    for name in names {
        if !objects.contains_key(name) {
            return Err(format!("no object {name:?} in objects"));
        }
    }
    for request in requests {
        if let Way::Put(Put { knows: Some(shape), .. }) = &request.way
            && !shapes.contains_key(shape)
        {
            return Err(format!("no shape {shape:?} in shapes"));
        }
    }
    Ok(())
}
