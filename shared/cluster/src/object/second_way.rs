//! Second ways of a server-side apply that the API server refused. Each answers one kind of refusal, and is tried once per
//! apply. Pure.
//!
//! An apply removes only the fields that its manager applied before; null in it removes nothing. So a field that is in the
//! way is first entered in `managedFields` as ours: that alone changes nothing, and the apply then removes the field together
//! with its other changes, or is refused and leaves the object as it is.

use kube::{
    ResourceExt as _,
    api::DynamicObject,
    core::{Status, response::StatusCause},
};
use prometheus_client::metrics::{counter::Counter, family::Family};
use serde_json::Value;
use tidewatch_kit::{metric_set, metrics::ReasonLabel, variant::VariantName as _};

use super::{
    fields::{self, Step, members},
    managed_fields::{self, Correction},
};

/// Words of a cause that a field cannot be changed.
const IMMUTABLE: [&str; 8] = [
    "immutable",
    "may not change",
    "may not be changed",
    "may not be set to 'None' for",
    "may not update",
    "cannot change",
    "cannot be changed",
    "updates to ",
];
/// Causes of one refusal that are answered.
const MAX_CAUSES: usize = 16;
/// Fields of one object that are removed to answer a refusal.
const MAX_FIELDS: usize = 64;

/// Reasons of the writes besides a plain apply; the name is the value of the label `reason` in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Fallback {
    /// Defaults that exclude a desired field were removed.
    Union,
    /// The remainder of the conversion of a CRD was removed.
    Conversion,
    /// An object with an immutable field was deleted and created again.
    Recreated,
    /// The API version of entries in `managedFields` was rewritten.
    FieldVersion,
    /// Entries of the tool that installed an object by hand became ours.
    Adopted,
    /// The workloads were applied although the module's own webhook does not answer.
    OwnWebhook,
    /// A field was left to another writer.
    Yielded,
}

impl Fallback {
    /// What was done, as a clause of a message.
    pub const fn done(self) -> &'static str {
        match self {
            Self::Union => "defaults that exclude a field of it were removed",
            Self::Conversion => "the rest of its spec.conversion was removed",
            Self::Recreated => "the object with the old field was deleted",
            Self::FieldVersion => "its managed fields were moved to this API version",
            Self::Adopted => "the fields of the tool that installed it were taken over",
            Self::OwnWebhook => "the workloads were applied",
            Self::Yielded => "a field was left to another writer",
        }
    }
}

metric_set! {
    /// Metrics of the writes of modules' objects.
    #[derive(Debug)]
    pub struct FallbackMetrics {
        /// Objects of modules that a plain apply could not, or was not to, bring into their form, by what was done besides.
        fallbacks: Family<ReasonLabel, Counter> = "object_fallbacks",
    }
}

impl FallbackMetrics {
    /// Counts what was done besides a plain apply.
    pub fn count(&self, fallback: Fallback) {
        self.fallbacks.get_or_create(&ReasonLabel { reason: fallback.as_str() }).inc();
    }

    /// Number of counted ones.
    #[cfg(any(test, feature = "testing"))]
    pub fn counted(&self, fallback: Fallback) -> u64 {
        self.fallbacks.get_or_create(&ReasonLabel { reason: fallback.as_str() }).get()
    }
}

/// What may be done for an object beyond an apply.
pub struct SecondWays<'a> {
    /// Metrics of what is done.
    pub metrics: &'a FallbackMetrics,
    /// Returns true for a Service of the module, given by namespace and name.
    pub is_own_service: &'a (dyn Fn(&str, &str) -> bool + Sync),
    /// Returns true if this live object may be deleted and created again; `None` if none may.
    pub recreates: Option<&'a (dyn Fn(&DynamicObject) -> bool + Sync)>,
    /// The module has not been applied completely before: what was installed by hand is taken over.
    pub takes_over: bool,
}

/// The answer to a refusal, before the next apply.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SecondWay {
    /// Corrects the entries of `managedFields`.
    Correct(Fallback, Correction),
    /// Deletes the object, which has an immutable field.
    Recreate,
}

impl SecondWay {
    pub(super) const fn fallback(&self) -> Fallback {
        match self {
            Self::Correct(fallback, _) => *fallback,
            Self::Recreate => Fallback::Recreated,
        }
    }
}

/// Returns true for a refusal to which there may be an answer, which depends on the live object.
pub(super) fn may_exist(ways: Option<&SecondWays<'_>>, refusal: &Status) -> bool {
    managed_fields::are_refused(refusal) || (refusal.code == 422 && ways.is_some())
}

/// Selects the answer to a refusal of a manager's apply; `None` if there is none.
pub(super) fn select(
    ways: Option<&SecondWays<'_>>,
    manager: &str,
    refusal: &Status,
    desired: &Value,
    live: &DynamicObject,
) -> Option<SecondWay> {
    // What is being deleted is not worth a change.
    if live.metadata.deletion_timestamp.is_some() {
        return None;
    }
    if managed_fields::are_refused(refusal) {
        let correction = managed_fields::in_one_version(desired, live)?;
        return Some(SecondWay::Correct(Fallback::FieldVersion, correction));
    }
    let ways = ways.filter(|_| refusal.code == 422)?;
    let causes = causes_of(refusal);
    if causes.iter().any(is_immutable) {
        return ways.recreates.is_some_and(|may| may(live)).then_some(SecondWay::Recreate);
    }
    let (fallback, paths) = if drops_conversion(causes, desired) {
        let paths = if ways.rendered_conversion(manager, live) { vec![conversion()] } else { Vec::new() };
        (Fallback::Conversion, paths)
    } else {
        (Fallback::Union, exclusive_defaults(causes, desired, live))
    };
    let take = || SecondWay::Correct(fallback, managed_fields::taking(manager, desired, live, &paths));
    (!paths.is_empty()).then(take)
}

/// True for a CRD whose next version has no conversion, while a field of another writer is left of it.
fn drops_conversion(causes: &[StatusCause], desired: &Value) -> bool {
    let is_of_conversion = |cause: &StatusCause| cause.field.starts_with("spec.conversion");
    desired["kind"] == "CustomResourceDefinition"
        && desired["spec"]["conversion"].is_null()
        && causes.iter().any(is_of_conversion)
}

/// Path of the conversion of a CRD.
fn conversion() -> Vec<String> {
    ["f:spec", "f:conversion"].map(str::to_owned).to_vec()
}

impl SecondWays<'_> {
    /// True if an earlier version of the module set the conversion of its CRD.
    fn rendered_conversion(&self, manager: &str, live: &DynamicObject) -> bool {
        let entries = live.managed_fields().iter().filter(|entry| entry.manager.as_deref() == Some(manager));
        let mut sets = entries.filter_map(fields::of_entry);
        let service = &live.data["spec"]["conversion"]["webhook"]["clientConfig"]["service"];
        let is_own = |(namespace, name)| (self.is_own_service)(namespace, name);
        sets.any(|set| set["f:spec"].get("f:conversion").is_some())
            || service["namespace"].as_str().zip(service["name"].as_str()).is_some_and(is_own)
    }
}

fn causes_of(refusal: &Status) -> &[StatusCause] {
    let causes = refusal.details.as_ref().map(|details| details.causes.as_slice()).unwrap_or_default();
    causes.get(..MAX_CAUSES).unwrap_or(causes)
}

/// True for the cause that a field cannot be changed.
fn is_immutable(cause: &StatusCause) -> bool {
    IMMUTABLE.iter().any(|words| cause.message.contains(words))
}

/// Fields of the live object near those that were refused that the desired form lacks and nobody owns: defaults, which
/// an API server keeps when a union gets another member, and would compute again if they were needed.
fn exclusive_defaults(causes: &[StatusCause], desired: &Value, live: &DynamicObject) -> Vec<Vec<String>> {
    let owners: Vec<_> = live.managed_fields().iter().filter_map(fields::of_entry).collect();
    let mut found = Vec::new();
    for cause in causes {
        let path = parse(&cause.field);
        if !matches!(path.first(), None | Some(Segment::Element) | Some(Segment::Member("metadata" | "status"))) {
            let search = Search { has_siblings: cause.reason == "FieldValueForbidden", found: &mut found };
            search.run(&path, Node { desired, live: &live.data, owners: owners.clone(), path: Vec::new() });
        }
    }
    found.sort();
    found.dedup();
    found.truncate(MAX_FIELDS);
    found
}

/// A segment of the path of a cause.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Segment<'a> {
    Member(&'a str),
    /// An element of a list. Its index is that in a list that the API server merged.
    Element,
}

/// Parses a path as in `spec.volumes[0].emptyDir` and `data[a.b]`.
fn parse(path: &str) -> Vec<Segment<'_>> {
    let mut segments = Vec::new();
    let mut rest = path;
    while !rest.is_empty() {
        if let Some(inner) = rest.strip_prefix('[') {
            let (key, after) = inner.split_once(']').unwrap_or((inner, ""));
            let is_index = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit());
            segments.push(if is_index { Segment::Element } else { Segment::Member(key.trim_matches('"')) });
            rest = after;
        } else {
            let name = rest.strip_prefix('.').unwrap_or(rest);
            let end = name.find(['.', '[']).unwrap_or(name.len());
            let (name, after) = name.split_at(end);
            segments.push(Segment::Member(name));
            rest = after;
        }
    }
    segments
}

/// A place in the desired form and in the live object.
struct Node<'a> {
    desired: &'a Value,
    live: &'a Value,
    /// What each manager owns here.
    owners: Vec<&'a Value>,
    /// Members of the set of fields that lead here.
    path: Vec<String>,
}

impl<'a> Node<'a> {
    /// The member, if the desired form has it.
    fn member(&self, name: &str) -> Option<Self> {
        let is_set = |value: &&Value| !value.is_null();
        Some(Node {
            desired: self.desired.get(name).filter(is_set)?,
            live: self.live.get(name).filter(is_set)?,
            owners: self.owners.iter().filter_map(|set| set.get(format!("f:{name}"))).collect(),
            path: self.path_to(format!("f:{name}")),
        })
    }

    /// The elements of a list that is a map, as far as both lists have them.
    fn elements(&self) -> Vec<Self> {
        let steps: Vec<_> = self.owners.iter().flat_map(|set| members(set)).collect();
        let of_element = |desired: &'a Value| {
            let mut keys = steps.iter().filter(|(_, step, _)| matches!(step, Step::Element(_)) && step.is_of(desired));
            let (key, step, _) = keys.next()?;
            let live = step.within(self.live)?;
            let owners = self.owners.iter().filter_map(|set| set.get(key)).collect();
            Some(Node { desired, live, owners, path: self.path_to((*key).to_owned()) })
        };
        self.desired.as_array().into_iter().flatten().filter_map(of_element).collect()
    }

    /// True for a member that the live object has, the desired form lacks, and nobody owns.
    fn is_default(&self, name: &str) -> bool {
        let is_set = |value: &Value| value.get(name).is_some_and(|member| !member.is_null());
        let is_owned = |set: &&Value| set.get(format!("f:{name}")).is_some();
        is_set(self.live) && !is_set(self.desired) && !self.owners.iter().any(is_owned)
    }

    fn defaults(&self) -> impl Iterator<Item = Vec<String>> {
        let names = self.live.as_object().into_iter().flatten().map(|(name, _)| name);
        names.filter(|name| self.is_default(name)).map(|name| self.path_to(format!("f:{name}")))
    }

    fn path_to(&self, member: String) -> Vec<String> {
        self.path.iter().cloned().chain([member]).collect()
    }
}

struct Search<'a> {
    /// A desired field was refused beside others.
    has_siblings: bool,
    found: &'a mut Vec<Vec<String>>,
}

impl Search<'_> {
    fn run(mut self, path: &[Segment<'_>], root: Node<'_>) {
        self.visit(path, &root);
    }

    /// Follows a path as far as the desired form has it. A path is no deeper than the object, whose depth the parser
    /// bounds.
    fn visit(&mut self, path: &[Segment<'_>], node: &Node<'_>) {
        let Some((segment, rest)) = path.split_first() else { return self.found.extend(node.defaults()) };
        match *segment {
            Segment::Element => node.elements().iter().for_each(|element| self.visit(rest, element)),
            Segment::Member(name) => {
                match node.member(name) {
                    Some(member) => self.visit(rest, &member),
                    None if node.is_default(name) => self.found.push(node.path_to(format!("f:{name}"))),
                    None => {}
                }
                if rest.is_empty() && self.has_siblings && !node.desired[name].is_null() {
                    self.found.extend(node.defaults());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
