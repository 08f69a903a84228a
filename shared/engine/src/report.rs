//! Findings of a reconcile of a Manifest: state and operation that follow from the facts at its end. Pure.

use std::{borrow::Borrow, collections::BTreeMap};

use tidewatch_api::{Manifest, State};
use tidewatch_cluster::kinds::is_of_kubernetes;

use super::{
    adoption::Installation,
    blocking::Found,
    default_object::Going,
    failure::Failure,
    inventory::ObjectKey,
    kept::dropped,
    module::manages_default,
    ready::Readiness,
    render::RenderedObject,
    status::{Findings, is_default_created},
    step::{DefaultObject, Facts, Goal, Seen},
};

/// Objects, CRDs and failures that a text names at most.
const MAX_NAMED: usize = 5;

/// Begin of the operation of a removal that user CRs block.
const BLOCKED: &str = "waiting for module crs deletion";
/// Begin of the operation of a removal that waits for the default module CR.
const DEFAULT_LEFT: &str = "waiting for the default module CR to be deleted";
/// Separator before the own words of a default module CR in an operation. These may change at any time.
const SAYS: &str = "; it says: ";

/// Begin of the operation while the module's own webhook keeps objects from being applied.
const OWN_WEBHOOK: &str = "the module's own webhook does not answer, its other objects are applied";

/// Parts of a Manifest that show for which resources it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitFacts<'a> {
    /// The Manifest is being deleted.
    pub is_deleting: bool,
    /// State in its status.
    pub state: Option<State>,
    /// Last operation in its status.
    pub operation: Option<&'a str>,
}

/// Returns true if the removal of a Manifest waited for CRs when it was reconciled last: for those of users, or for the
/// default module CR.
fn waits_for_resources(shown: &WaitFacts<'_>) -> bool {
    let is_wait = |operation: &str| operation.starts_with(BLOCKED) || operation.starts_with(DEFAULT_LEFT);
    shown.is_deleting && shown.operation.is_some_and(is_wait)
}

/// An operation without the own words of a default module CR.
pub(super) fn cause(operation: &str) -> &str {
    operation.split_once(SAYS).map_or(operation, |(cause, _)| cause)
}

/// Returns true if a Manifest waited for the end of the resources of a CRD when it was reconciled last: they block its removal,
/// or keep the CRD although its version does not contain it.
pub fn awaits_resources(shown: &WaitFacts<'_>, definition: &str) -> bool {
    let is_kept = |operation: &str| operation.contains(&dropped(&format!("CustomResourceDefinition {definition}")));
    let is_warning = shown.state == Some(State::Warning);
    waits_for_resources(shown) || is_warning && shown.operation.is_some_and(is_kept)
}

/// Reason why there are no rendered objects, one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The content of the version is not available or malformed.
    Content(String),
    /// Its objects cannot be rendered with the data for its Secrets.
    Rendering(String),
}

/// Results of the actions besides the facts.
#[derive(Default)]
pub(super) struct Results {
    pub(super) failures: Vec<Failure>,
    /// CRs of the module's kinds, once they were searched during a removal.
    pub(super) crs: Found,
    /// Default module CRs that are being deleted.
    pub(super) going: Vec<Going>,
    /// CRDs that are not established.
    pub(super) unestablished: Vec<String>,
    /// CRDs whose resources are being stored in another version, with that version.
    pub(super) migrating: Vec<String>,
    /// Objects that are left as they are, although the module is applied, with a sentence about each.
    pub(super) remarks: BTreeMap<ObjectKey, String>,
}

/// What the findings follow from besides the facts.
pub(super) struct Details<'a> {
    pub(super) manifest: &'a Manifest,
    pub(super) fault: Option<&'a Fault>,
    pub(super) results: &'a Results,
    /// Readiness of the manager, once all objects but the module's own custom resources are applied. During a removal,
    /// while it waits for CRs.
    pub(super) readiness: Option<Readiness>,
    /// Fields that other writers change again and again, a sentence each.
    pub(super) disputes: &'a [String],
    /// Finalizers of other controllers, once ours are removed.
    pub(super) foreign_finalizers: &'a [String],
}

/// Computes the findings; `None` keeps the status, since the reconcile proved nothing against it.
pub(super) fn findings(facts: &Facts<'_>, details: &Details<'_>) -> Option<Findings> {
    let (state, operation) = match facts.goal {
        Goal::Install => installing(facts, details)?,
        Goal::Remove => (State::Deleting, removing(facts, details)),
        Goal::Release => (State::Error, failures(details)?),
    };
    let is_install = facts.goal == Goal::Install;
    let created = is_default_created(details.manifest) || facts.default_object == DefaultObject::Done;
    Some(Findings {
        state,
        operation,
        rendered: is_install.then_some(facts.rendered.is_some()),
        installed: is_install.then_some(state == State::Ready || is_warned(state, facts, details)),
        default_created: (is_install && manages_default(details.manifest)).then_some(created),
        inventory: facts.remaining(),
    })
}

fn installing(facts: &Facts<'_>, details: &Details<'_>) -> Option<(State, String)> {
    let current = details.manifest.status.as_ref().map(|status| status.state).unwrap_or_default().known();
    let Some(rendered) = facts.rendered else {
        return match details.fault {
            Some(Fault::Rendering(fault)) => Some((State::Error, fault.clone())),
            // A version that was applied completely stays as it is without its content.
            _ if details.manifest.is_synced() => None,
            Some(Fault::Content(fault)) => Some((State::Error, fault.clone())),
            None if details.manifest.status.is_some() => None,
            None => Some((State::Processing, "waiting for the layer of the module".to_owned())),
        };
    };
    if let Installation::Foreign(reason) = &facts.installation {
        return Some((State::Warning, reason.clone()));
    }
    let progress = match &details.readiness {
        Some(Readiness::Progressing(reason)) => Some(format!("waiting for resources to become ready: {reason}")),
        _ => None,
    };
    // The module's own webhook may refuse its custom resources until the manager is ready.
    let may_wait = facts.default_object == DefaultObject::Failed || facts.only_custom_resources_failed();
    if let (true, Some(progress)) = (may_wait, &progress) {
        return Some((State::Processing, progress.clone()));
    }
    if let Some(failure) = failures(details) {
        if !facts.only_guarded_failed() {
            return Some((State::Error, failure));
        }
        let state = if progress.is_some() { State::Processing } else { State::Error };
        return Some((state, format!("{OWN_WEBHOOK}: {failure}")));
    }
    if let Some(transient) = details.results.failures.first() {
        let is_new = details.manifest.status.as_ref().is_none_or(|status| status.last_operation.is_none());
        return is_new.then(|| (current, transient.line()));
    }
    if let Some(migrating) = migrating(details) {
        return Some((State::Processing, migrating));
    }
    if !details.results.unestablished.is_empty() {
        let names = list(details.results.unestablished.iter().map(String::as_str));
        return Some((State::Processing, format!("waiting for the CRDs to be established: {names}")));
    }
    let unserved = |is_selected: fn(&str) -> bool| {
        let objects = rendered.iter().filter(|object| !object.served && is_selected(&object.key.group));
        let names: Vec<_> = objects.map(with_version).collect();
        (!names.is_empty()).then(|| list(names.iter().map(String::as_str)))
    };
    if let Some(names) = unserved(is_of_kubernetes) {
        return Some((State::Error, format!("the runtime does not serve these kinds of Kubernetes: {names}")));
    }
    if let Some(names) = unserved(|_| true) {
        return Some((State::Processing, format!("waiting for kinds that the runtime does not serve: {names}")));
    }
    if let Some(running) = named(facts, Seen::Running) {
        return Some((State::Processing, format!("waiting for the end of Jobs of an earlier version: {running}")));
    }
    if let Some(going) = terminating(facts) {
        return Some((State::Warning, format!("waiting for objects to be deleted: {going}")));
    }
    Some(match details.readiness.as_ref()? {
        Readiness::Ready if has_warnings(details) => (State::Warning, warnings(details)),
        Readiness::Ready => (State::Ready, "resources are ready".to_owned()),
        Readiness::Progressing(_) => (State::Processing, progress?),
        Readiness::Failed(reason) => (State::Error, reason.clone()),
    })
}

/// True if warnings are all that keeps the module from being ready.
fn is_warned(state: State, facts: &Facts<'_>, details: &Details<'_>) -> bool {
    let is_ready = facts.is_applied() && details.readiness == Some(Readiness::Ready);
    state == State::Warning && is_ready && has_warnings(details)
}

fn has_warnings(details: &Details<'_>) -> bool {
    !(details.results.remarks.is_empty() && details.disputes.is_empty())
}

/// Sentences about what is not as the module demands, although it is applied.
fn warnings(details: &Details<'_>) -> String {
    let disputes = details.disputes.iter().map(String::as_str);
    let sentences: Vec<_> = details.results.remarks.values().map(String::as_str).chain(disputes).collect();
    join(&sentences, "; ")
}

fn removing(facts: &Facts<'_>, details: &Details<'_>) -> String {
    if !details.foreign_finalizers.is_empty() {
        return format!("waiting as other finalizers are present: [{}]", details.foreign_finalizers.join(" "));
    }
    let Found { blockers, children, .. } = &details.results.crs;
    if !blockers.is_empty() {
        return with_troubles(format!("{BLOCKED}: {blockers}"), None, details);
    }
    // A deletion that failed says more.
    if facts.default_object == DefaultObject::Terminating {
        let going: Vec<_> = details.results.going.iter().map(ToString::to_string).collect();
        let left =
            if going.is_empty() { format!("what belongs to it is left: {children}") } else { join(&going, ", ") };
        let says = details.results.going.iter().find_map(|going| going.says.as_deref());
        return with_troubles(format!("{DEFAULT_LEFT}: {left}"), says, details);
    }
    if let Some(failure) = failures(details).or_else(|| details.results.failures.first().map(Failure::line)) {
        return failure;
    }
    match terminating(facts) {
        Some(going) => format!("waiting for objects to be deleted: {going}"),
        None => "the objects of the module are deleted".to_owned(),
    }
}

/// Adds to a wait for CRs what may be its cause: what keeps the module from being as rendered, its manager that does not
/// run, and what the default module CR says itself.
fn with_troubles(wait: String, says: Option<&str>, details: &Details<'_>) -> String {
    let unready = match &details.readiness {
        Some(Readiness::Progressing(reason) | Readiness::Failed(reason)) => {
            Some(format!("the module is not ready: {reason}"))
        }
        _ => None,
    };
    let troubles: Vec<_> = [Some(wait), failures(details), migrating(details), unready].into_iter().flatten().collect();
    let says = says.map(|says| format!("{SAYS}{says}")).unwrap_or_default();
    format!("{}{says}", troubles.join("; "))
}

/// Failures that another attempt is unlikely to overcome soon, as one line.
fn failures(details: &Details<'_>) -> Option<String> {
    let lasting: Vec<_> =
        details.results.failures.iter().filter(|failure| !failure.is_transient).map(Failure::line).collect();
    (!lasting.is_empty()).then(|| join(&lasting, "; "))
}

fn terminating(facts: &Facts<'_>) -> Option<String> {
    named(facts, Seen::Terminating)
}

/// The migration of CRDs, which their application waits for.
fn migrating(details: &Details<'_>) -> Option<String> {
    let names = || list(details.results.migrating.iter().map(String::as_str));
    (!details.results.migrating.is_empty())
        .then(|| format!("waiting for the resources of CRDs to be stored in a version that stays: {}", names()))
}

/// The objects with this result, as one list.
fn named(facts: &Facts<'_>, result: Seen) -> Option<String> {
    let objects = facts.seen.iter().filter(|(_, seen)| **seen == result);
    let names: Vec<_> = objects.map(|(key, _)| key.to_string()).collect();
    (!names.is_empty()).then(|| list(names.iter().map(String::as_str)))
}

/// An object with the version of its kind.
fn with_version(object: &RenderedObject) -> String {
    format!("{} ({})", object.key, object.body["apiVersion"].as_str().unwrap_or_default())
}

pub(super) fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    join(&names.map(str::to_owned).collect::<Vec<_>>(), ", ")
}

fn join<T: Borrow<str>>(texts: &[T], separator: &str) -> String {
    let named = texts.get(..MAX_NAMED).unwrap_or(texts).join(separator);
    match texts.len().saturating_sub(MAX_NAMED) {
        0 => named,
        more => format!("{named}{separator}and {more} more"),
    }
}
