//! What is worth telling: the difference between what a Kyma or Watcher said before and what it says now.

use std::{collections::BTreeMap, fmt};

use kube::{Resource, ResourceExt};
use tidewatch_shared::api::{Condition, ConditionStatus, Kyma, State, Watcher};

use super::states;

/// The one kind among those that Events are about which is not of our group.
pub(super) const CONFIG_MAP: &str = "ConfigMap";

/// Whom an Event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct About {
    pub(crate) kind: &'static str,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
}

/// Something to tell.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct News {
    pub(crate) about: About,
    /// Somebody should look at it.
    pub(crate) warning: bool,
    /// A CamelCase word of a closed set.
    pub(crate) reason: &'static str,
    /// In words for people.
    pub(crate) note: String,
}

/// What matters of a Kyma here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Facet {
    uid: String,
    state: State,
    modules: BTreeMap<Box<str>, State>,
    /// What the conditions say, where they are there.
    access: Option<ConditionStatus>,
    catalog: Option<ConditionStatus>,
    crds: Option<ConditionStatus>,
    /// Status and reason.
    path: Option<(ConditionStatus, Box<str>)>,
    paused: bool,
    /// It lacks what the labels of the state metrics come from.
    unlabelled: bool,
}

impl Facet {
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

    /// Whether it is the same Kyma, and not one that was made anew under its name.
    pub(super) fn is_same_object(&self, other: &Self) -> bool {
        self.uid == other.uid
    }
}

fn state(kyma: &Kyma) -> State {
    kyma.status.as_ref().map(|status| status.state()).unwrap_or_default()
}

fn condition<'a>(kyma: &'a Kyma, kind: &str) -> Option<&'a Condition> {
    kyma.status.as_ref()?.condition(kind)
}

/// Collects what is told of one object.
struct Teller {
    about: About,
    news: Vec<News>,
}

impl Teller {
    fn new<K: Resource<DynamicType = ()>>(kind: &'static str, object: &K) -> Self {
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let about = About { kind, namespace, name, uid: object.uid().unwrap_or_default() };
        Self { about, news: Vec::new() }
    }

    fn well(&mut self, reason: &'static str, note: impl Into<String>) {
        self.tell(false, reason, note.into());
    }

    fn badly(&mut self, reason: &'static str, note: impl Into<String>) {
        self.tell(true, reason, note.into());
    }

    fn tell(&mut self, warning: bool, reason: &'static str, note: String) {
        self.news.push(News { about: self.about.clone(), warning, reason, note });
    }
}

/// What is new of a Kyma; without a `before` it was not there.
pub(super) fn of_kyma(before: Option<&Facet>, now: &Facet, kyma: &Kyma) -> Vec<News> {
    let nothing = Facet::default();
    let before = before.unwrap_or(&nothing);
    if before == now {
        return Vec::new();
    }
    let mut teller = Teller::new("Kyma", kyma);
    if now.unlabelled && !before.unlabelled {
        let note = "metrics leave this Kyma out: it has no annotation skr-domain with a domain of a runtime, or no label kyma-project.io/instance-id";
        teller.badly("MetricsError", note);
    }
    conditions(&mut teller, before, now, kyma);
    // Without access every module is in error, for the one reason that was told.
    if now.access != Some(ConditionStatus::False) && before.access != Some(ConditionStatus::False) {
        modules(&mut teller, before, now, kyma);
    }
    if before.state != now.state {
        whole(&mut teller, now.state, kyma);
    }
    teller.news
}

fn whole(teller: &mut Teller, state: State, kyma: &Kyma) {
    let operation = kyma.status.as_ref().and_then(|status| status.last_operation.as_ref());
    let note = operation.map_or_else(String::new, |operation| operation.operation.clone());
    match state {
        State::Ready => teller.well("KymaReady", note),
        State::Warning => teller.badly("KymaWarning", note),
        State::Error => teller.badly("KymaError", note),
        State::Deleting => teller.well("KymaDeleting", note),
        State::Unset | State::Processing | State::Unmanaged => {}
    }
}

fn modules(teller: &mut Teller, before: &Facet, now: &Facet, kyma: &Kyma) {
    let moved = |name: &str, state| before.modules.get(name) != Some(&state);
    let modules = kyma.status.iter().flat_map(|status| status.modules());
    for module in modules.filter(|module| moved(&module.name, module.state)) {
        let note = match &module.message {
            Some(message) => format!("module {}: {message}", module.name),
            None => format!("module {} is in state {}", module.name, module.state),
        };
        match module.state {
            State::Ready => teller.well("ModuleReady", note),
            State::Warning => teller.badly("ModuleWarning", note),
            State::Error => teller.badly("ModuleError", note),
            State::Deleting => teller.well("ModuleDeleting", note),
            State::Unmanaged => teller.well("ModuleUnmanaged", note),
            State::Unset | State::Processing => {}
        }
    }
    for name in before.modules.keys().filter(|name| !now.modules.contains_key(*name)) {
        teller.well("ModuleRemoved", format!("module {name} is gone"));
    }
}

fn conditions(teller: &mut Teller, before: &Facet, now: &Facet, kyma: &Kyma) {
    use ConditionStatus::{False, True};
    let said =
        |kind| condition(kyma, kind).map_or_else(String::new, |said| format!("{}: {}", said.reason, said.message));
    let words = |kind| condition(kyma, kind).map_or_else(String::new, |said| said.message.clone());
    if before.access != now.access {
        match (now.access, before.access) {
            (Some(False), _) => teller.badly("RuntimeAccessLost", said("RuntimeAccess")),
            (Some(True), Some(False)) => teller.well("RuntimeAccessRestored", words("RuntimeAccess")),
            _ => {}
        }
    }
    for (before, now, kind, lost, restored) in [
        (before.crds, now.crds, "CRDsSync", "CRDsOutOfSync", "CRDsSynced"),
        (before.catalog, now.catalog, "ModuleCatalog", "CatalogOutOfSync", "CatalogSynced"),
    ] {
        match (before == now, now, before) {
            (false, Some(False), _) => teller.badly(lost, words(kind)),
            (false, Some(True), Some(False)) => teller.well(restored, words(kind)),
            _ => {}
        }
    }
    if before.path != now.path {
        match now.path {
            Some((True, _)) => teller.well("EventPathProven", words("EventPath")),
            Some((False, _)) => teller.badly("EventPathLost", said("EventPath")),
            // Nobody claims that something is broken.
            Some(_) => teller.well("EventPathUnknown", said("EventPath")),
            None => {}
        }
    }
    match (before.paused, now.paused) {
        (false, true) => teller.well("Paused", said("Paused")),
        (true, false) => teller.well("Resumed", "what waited for the end of the pause is worked on"),
        _ => {}
    }
}

/// What becomes of the upgrade of agents, told about the ConfigMap in which it stands.
pub(super) fn of_upgrade(namespace: &str, name: &str, uid: &str, halted: bool, note: String) -> News {
    let about = About { kind: CONFIG_MAP, namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.to_owned() };
    let reason = if halted { "AgentUpgradeHalted" } else { "AgentUpgrade" };
    News { about, warning: halted, reason, note }
}

/// The end of a Kyma. One that is only not selected any more is no news.
pub(super) fn of_lost_kyma(kyma: &Kyma) -> Option<News> {
    kyma.metadata.deletion_timestamp.as_ref()?;
    let mut teller = Teller::new("Kyma", kyma);
    teller.well("KymaDeleted", "the Kyma, its modules and what was put into its runtime are gone");
    teller.news.pop()
}

/// An object that cannot be read: what it said before holds, where it was `known`. The object is namespace, name and uid.
pub(super) fn of_unreadable(
    kind: &'static str,
    (namespace, name, uid): (String, String, String),
    known: bool,
    cause: &impl fmt::Display,
) -> News {
    let about = About { kind, namespace, name, uid };
    let till_then = if known { "what it said before holds" } else { "it is as if it were not there" };
    News { about, warning: true, reason: "Unreadable", note: format!("it cannot be read, and {till_then}: {cause}") }
}

pub(super) fn state_of(watcher: &Watcher) -> State {
    watcher.status.as_ref().map(|status| status.state).unwrap_or_default()
}

/// What is new of a Watcher.
pub(super) fn of_watcher(before: State, watcher: &Watcher) -> Option<News> {
    let now = state_of(watcher);
    if before == now {
        return None;
    }
    let conditions = watcher.status.as_ref().and_then(|status| status.conditions.as_ref());
    let note =
        conditions.and_then(|conditions| conditions.first()).map_or_else(String::new, |said| said.message.clone());
    let mut teller = Teller::new("Watcher", watcher);
    match now {
        State::Ready => teller.well("WatcherServed", note),
        State::Warning => teller.badly("ManagerFailing", note),
        State::Error => teller.badly("WatcherRefused", note),
        State::Unset | State::Processing | State::Deleting | State::Unmanaged => {}
    }
    teller.news.pop()
}
