//! Findings of a reconcile of a Manifest: state and operation that follow from the facts at its end. Pure.

use tidewatch_shared::api::{Manifest, State};

use super::{
    adoption::Installation,
    execute::Failure,
    inventory::ObjectKey,
    ready::Readiness,
    status::{Findings, is_default_created},
    step::{DefaultObject, Facts, Goal, Seen},
};
use crate::{base::manifests::ManifestFacts, controllers::status::known};

/// Objects, CRDs and failures that a text names at most.
const MAX_NAMED: usize = 5;

/// Begin of the operation of a removal that user CRs block.
const BLOCKED: &str = "waiting for module crs deletion";

/// Returns true if user CRs blocked the removal of a Manifest when it was reconciled last.
pub(crate) fn is_blocked(manifest: &ManifestFacts<'_>) -> bool {
    manifest.flags.is_deleting && manifest.operation.is_some_and(|operation| operation.starts_with(BLOCKED))
}

/// Reason why there are no rendered objects, one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The layer is not available or malformed.
    Layer(String),
    /// Its objects cannot be rendered with the settings and Secrets of KCP.
    Rendering(String),
}

/// Results besides the facts.
pub(super) struct Details<'a> {
    pub(super) manifest: &'a Manifest,
    pub(super) fault: Option<&'a Fault>,
    pub(super) failures: &'a [Failure],
    /// User CRs that block the removal, as one list.
    pub(super) blockers: Option<String>,
    /// CRDs that are not established.
    pub(super) unestablished: &'a [String],
    /// Readiness of the manager, once all objects but the module's own custom resources are applied.
    pub(super) readiness: Option<Readiness>,
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
        installed: is_install.then_some(state == State::Ready),
        default_created: (is_install && super::manages_default(details.manifest)).then_some(created),
        inventory: facts.remaining(),
    })
}

fn installing(facts: &Facts<'_>, details: &Details<'_>) -> Option<(State, String)> {
    let current = known(details.manifest.status.as_ref().map(|status| status.state).unwrap_or_default());
    let Some(rendered) = facts.rendered else {
        return match details.fault {
            Some(Fault::Rendering(fault)) => Some((State::Error, fault.clone())),
            // What was applied completely stays as it is without the registry.
            _ if super::is_synced(details.manifest) => None,
            Some(Fault::Layer(fault)) => Some((State::Error, fault.clone())),
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
        return Some((State::Error, failure));
    }
    if let Some(transient) = details.failures.first() {
        let is_new = details.manifest.status.as_ref().is_none_or(|status| status.last_operation.is_none());
        return is_new.then(|| (current, transient.line()));
    }
    if !details.unestablished.is_empty() {
        let names = list(details.unestablished.iter().map(String::as_str));
        return Some((State::Processing, format!("waiting for the CRDs to be established: {names}")));
    }
    let unserved: Vec<_> =
        rendered.iter().filter(|object| !object.served).map(|object| object.key.to_string()).collect();
    if !unserved.is_empty() {
        let names = list(unserved.iter().map(String::as_str));
        return Some((State::Processing, format!("waiting for kinds that the runtime does not serve: {names}")));
    }
    if let Some(going) = terminating(facts) {
        return Some((State::Warning, format!("waiting for objects to be deleted: {going}")));
    }
    Some(match details.readiness.as_ref()? {
        Readiness::Ready => (State::Ready, "resources are ready".to_owned()),
        Readiness::Progressing(_) => (State::Processing, progress?),
        Readiness::Failed(reason) => (State::Error, reason.clone()),
    })
}

fn removing(facts: &Facts<'_>, details: &Details<'_>) -> String {
    if !details.foreign_finalizers.is_empty() {
        return format!("waiting as other finalizers are present: [{}]", details.foreign_finalizers.join(" "));
    }
    if let Some(blockers) = &details.blockers {
        return format!("{BLOCKED}: {blockers}");
    }
    if let Some(failure) = details.failures.first() {
        return failure.line();
    }
    match terminating(facts) {
        Some(going) => format!("waiting for objects to be deleted: {going}"),
        None => "the objects of the module are deleted".to_owned(),
    }
}

/// Failures that another attempt is unlikely to overcome soon, as one line.
fn failures(details: &Details<'_>) -> Option<String> {
    let lasting: Vec<_> = details.failures.iter().filter(|failure| !failure.is_transient).map(Failure::line).collect();
    (!lasting.is_empty()).then(|| join(&lasting, "; "))
}

fn terminating(facts: &Facts<'_>) -> Option<String> {
    let going = facts.seen.iter().filter(|(_, seen)| **seen == Seen::Terminating).map(|(key, _)| key);
    let mut names: Vec<_> = going.map(ObjectKey::to_string).collect();
    if facts.default_object == DefaultObject::Terminating {
        names.insert(0, "the default module CR".to_owned());
    }
    (!names.is_empty()).then(|| list(names.iter().map(String::as_str)))
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    join(&names.map(str::to_owned).collect::<Vec<_>>(), ", ")
}

fn join(texts: &[String], separator: &str) -> String {
    let named = texts.get(..MAX_NAMED).unwrap_or(texts).join(separator);
    match texts.len().saturating_sub(MAX_NAMED) {
        0 => named,
        more => format!("{named}{separator}and {more} more"),
    }
}
