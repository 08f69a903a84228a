//! Events from the difference between the previous and the current state of a Kyma or Watcher.

use std::collections::BTreeMap;

use kube::{Resource, ResourceExt};
use tidewatch_api::{
    Condition, ConditionStatus, Kyma, State, Watcher,
    facts::KymaFacts,
    key::KymaKey,
    leases::{self, Unit},
    names::{GROUP, VERSION},
};

use super::states;

/// Kinds that Events regard outside of Kyma's API group.
pub(super) const CONFIG_MAP: &str = "ConfigMap";
const LEASE: &str = "Lease";

/// Object that an Event regards.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Regarding {
    /// Its kind.
    pub kind: &'static str,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid; empty if it is not known.
    pub uid: String,
}

impl Regarding {
    /// The Lease of the fleet role, for Events about the receiver itself.
    pub fn lease(namespace: &str) -> Self {
        let name = leases::unit(Unit::Fleet);
        Self { kind: LEASE, namespace: namespace.to_owned(), name, uid: String::new() }
    }

    /// A ConfigMap of the receiver.
    pub fn config_map(namespace: &str, name: &str) -> Self {
        Self { kind: CONFIG_MAP, namespace: namespace.to_owned(), name: name.to_owned(), uid: String::new() }
    }

    /// A release meta of KCP; `uid` is empty if it is not known.
    pub fn release_meta(namespace: &str, name: &str, uid: &str) -> Self {
        let kind = "ModuleReleaseMeta";
        Self { kind, namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.to_owned() }
    }

    pub(super) fn api_version(&self) -> String {
        match self.kind {
            CONFIG_MAP => "v1".to_owned(),
            LEASE => "coordination.k8s.io/v1".to_owned(),
            _ => format!("{GROUP}/{VERSION}"),
        }
    }
}

/// Event that is not written yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PendingEvent {
    /// Object that it regards.
    pub regarding: Regarding,
    /// True for the type `Warning`, for an operator to investigate; false for `Normal`.
    pub warning: bool,
    /// CamelCase reason of a closed set.
    pub reason: &'static str,
    /// Human-readable message.
    pub note: String,
}

impl PendingEvent {
    /// An Event for an operator to investigate.
    pub fn warning(regarding: Regarding, reason: &'static str, note: String) -> Self {
        Self { regarding, warning: true, reason, note }
    }
}

/// Fields of a Kyma that cause Events when they change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KymaSnapshot {
    pub(super) uid: String,
    state: State,
    modules: BTreeMap<Box<str>, State>,
    /// Status of the conditions `RuntimeAccess`, `ModuleCatalog` and `CRDsSync`, if present.
    access: Option<ConditionStatus>,
    catalog: Option<ConditionStatus>,
    crds: Option<ConditionStatus>,
    /// Status and reason of the condition `EventPath`.
    path: Option<(ConditionStatus, Box<str>)>,
    paused: bool,
    /// True if the Kyma lacks a label or annotation from which the state metrics take their labels.
    unlabelled: bool,
}

impl KymaSnapshot {
    pub(super) fn of(kyma: &Kyma) -> Self {
        let status = |kind| condition(kyma, kind).map(|condition| condition.status);
        let modules = kyma.status.iter().flat_map(|status| status.modules());
        Self {
            uid: kyma.uid().unwrap_or_default(),
            state: state(kyma),
            modules: modules.map(|module| (module.name.as_str().into(), module.state)).collect(),
            access: status("RuntimeAccess"),
            catalog: status("ModuleCatalog"),
            crds: status("CRDsSync"),
            path: condition(kyma, "EventPath").map(|path| (path.status, path.reason.as_str().into())),
            paused: status("Paused") == Some(ConditionStatus::True),
            unlabelled: states::labels(kyma).is_none(),
        }
    }
}

fn state(kyma: &Kyma) -> State {
    kyma.status.as_ref().map(|status| status.state()).unwrap_or_default()
}

fn condition<'a>(kyma: &'a Kyma, kind: &str) -> Option<&'a Condition> {
    kyma.status.as_ref()?.condition(kind)
}

/// Collects the Events of one object.
struct EventCollector {
    regarding: Regarding,
    events: Vec<PendingEvent>,
}

impl EventCollector {
    fn new<K: Resource<DynamicType = ()>>(kind: &'static str, object: &K) -> Self {
        let namespace = object.namespace().unwrap_or_default();
        let name = object.name_any();
        let regarding = Regarding { kind, namespace, name, uid: object.uid().unwrap_or_default() };
        Self { regarding, events: Vec::new() }
    }

    fn normal(&mut self, reason: &'static str, note: impl Into<String>) {
        self.push(false, reason, note.into());
    }

    fn warning(&mut self, reason: &'static str, note: impl Into<String>) {
        self.push(true, reason, note.into());
    }

    fn push(&mut self, warning: bool, reason: &'static str, note: String) {
        self.events.push(PendingEvent { regarding: self.regarding.clone(), warning, reason, note });
    }
}

/// Events of a changed Kyma; `before` is `None` for a new one.
pub(super) fn of_kyma(before: Option<&KymaSnapshot>, now: &KymaSnapshot, kyma: &Kyma) -> Vec<PendingEvent> {
    let nothing = KymaSnapshot::default();
    let before = before.unwrap_or(&nothing);
    if before == now {
        return Vec::new();
    }
    let mut events = EventCollector::new("Kyma", kyma);
    if now.unlabelled && !before.unlabelled {
        let note = "metrics leave this Kyma out: it has no annotation skr-domain with a domain of a runtime, or no label kyma-project.io/instance-id";
        events.warning("MetricsError", note);
    }
    conditions(&mut events, before, now, kyma);
    // Without access every module is in state Error for the reason of the condition's Event.
    if now.access != Some(ConditionStatus::False) && before.access != Some(ConditionStatus::False) {
        modules(&mut events, before, now, kyma);
    }
    if before.state != now.state {
        state_event(&mut events, now.state, kyma);
    }
    events.events
}

fn state_event(events: &mut EventCollector, state: State, kyma: &Kyma) {
    let operation = kyma.status.as_ref().and_then(|status| status.last_operation.as_ref());
    let note = operation.map_or_else(String::new, |operation| operation.operation.clone());
    match state {
        State::Ready => events.normal("KymaReady", note),
        State::Warning => events.warning("KymaWarning", note),
        State::Error => events.warning("KymaError", note),
        State::Deleting => events.normal("KymaDeleting", note),
        State::Unset | State::Processing | State::Unmanaged => {}
    }
}

fn modules(events: &mut EventCollector, before: &KymaSnapshot, now: &KymaSnapshot, kyma: &Kyma) {
    let changed = |name: &str, state| before.modules.get(name) != Some(&state);
    let modules = kyma.status.iter().flat_map(|status| status.modules());
    for module in modules.filter(|module| changed(&module.name, module.state)) {
        let note = match &module.message {
            Some(message) => format!("module {}: {message}", module.name),
            None => format!("module {} is in state {}", module.name, module.state),
        };
        match module.state {
            State::Ready => events.normal("ModuleReady", note),
            State::Warning => events.warning("ModuleWarning", note),
            State::Error => events.warning("ModuleError", note),
            State::Deleting => events.normal("ModuleDeleting", note),
            State::Unmanaged => events.normal("ModuleUnmanaged", note),
            State::Unset | State::Processing => {}
        }
    }
    for name in before.modules.keys().filter(|name| !now.modules.contains_key(*name)) {
        events.normal("ModuleRemoved", format!("module {name} is gone"));
    }
}

fn conditions(events: &mut EventCollector, before: &KymaSnapshot, now: &KymaSnapshot, kyma: &Kyma) {
    use ConditionStatus::{False, True};
    let reason_and_message = |kind| {
        condition(kyma, kind)
            .map_or_else(String::new, |condition| format!("{}: {}", condition.reason, condition.message))
    };
    let message = |kind| condition(kyma, kind).map_or_else(String::new, |condition| condition.message.clone());
    let access = (before.access, now.access, "RuntimeAccess", "RuntimeAccessLost", "RuntimeAccessRestored");
    let crds = (before.crds, now.crds, "CRDsSync", "CRDsOutOfSync", "CRDsSynced");
    let catalog = (before.catalog, now.catalog, "ModuleCatalog", "CatalogOutOfSync", "CatalogSynced");
    for (before, now, kind, lost, restored) in [access, crds, catalog] {
        match (before == now, now, before) {
            (false, Some(False), _) if kind == "RuntimeAccess" => events.warning(lost, reason_and_message(kind)),
            (false, Some(False), _) => events.warning(lost, message(kind)),
            (false, Some(True), Some(False)) => events.normal(restored, message(kind)),
            _ => {}
        }
    }
    if before.path != now.path {
        match now.path {
            Some((True, _)) => events.normal("EventPathProven", message("EventPath")),
            Some((False, _)) => events.warning("EventPathLost", reason_and_message("EventPath")),
            // No failure is proven.
            Some(_) => events.normal("EventPathUnknown", reason_and_message("EventPath")),
            None => {}
        }
    }
    match (before.paused, now.paused) {
        (false, true) => events.normal("Paused", reason_and_message("Paused")),
        (true, false) => events.normal("Resumed", "what waited for the end of the pause is worked on"),
        _ => {}
    }
}

/// Event of a deleted Kyma; none for one that is only no longer selected.
pub(super) fn of_deleted_kyma(key: &KymaKey, kyma: KymaFacts<'_>) -> Option<PendingEvent> {
    let namespace = key.namespace.clone();
    let name = key.name.clone();
    let uid = kyma.uid().to_owned();
    kyma.is_deleting().then(|| PendingEvent {
        regarding: Regarding { kind: "Kyma", namespace, name, uid },
        warning: false,
        reason: "KymaDeleted",
        note: "the Kyma, its modules and what was put into its runtime are gone".to_owned(),
    })
}

pub(super) fn state_of(watcher: &Watcher) -> State {
    watcher.status.as_ref().map(|status| status.state).unwrap_or_default()
}

/// Event of a changed Watcher.
pub(super) fn of_watcher(before: State, watcher: &Watcher) -> Option<PendingEvent> {
    let now = state_of(watcher);
    if before == now {
        return None;
    }
    let conditions = watcher.status.as_ref().and_then(|status| status.conditions.as_ref());
    let note = conditions
        .and_then(|conditions| conditions.first())
        .map_or_else(String::new, |condition| condition.message.clone());
    let mut events = EventCollector::new("Watcher", watcher);
    match now {
        State::Ready => events.normal("WatcherServed", note),
        State::Warning => events.warning("ManagerFailing", note),
        State::Error => events.warning("WatcherRefused", note),
        State::Unset | State::Processing | State::Deleting | State::Unmanaged => {}
    }
    events.events.pop()
}
