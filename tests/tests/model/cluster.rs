//! A model of a runtime cluster as watches observe it: objects with versions, and the events that each watch reports.

use std::collections::BTreeMap;

use serde_json::json;
use tidewatch_agent::core::{ObjectState, Uid, Version};
use tidewatch_api::plan::{Plan, Work};

/// Index of an object of a resource, below [`NAMES`].
pub(crate) type Name = u8;
/// Number of object names: more than an agent with a small cap may hold, so that watches collapse and turn coarse.
pub(crate) const NAMES: Name = 6;

/// A watch that a plan may contain.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) name: &'static str,
    /// Index into [`RESOURCES`].
    pub(crate) resource: usize,
    field: &'static str,
    /// Limits the watch to objects with the label.
    has_selector: bool,
    works: &'static [Work],
    /// Work that the watch triggers in plans with the highest bit of [`PlanId`] set.
    alternate_works: &'static [Work],
}

/// All watches: two of one resource, one with a selector on a resource without generations, and one that is forwarded
/// to another manager.
pub(crate) const WATCHES: [Watch; WATCH_COUNT] = [
    Watch {
        name: "kyma",
        resource: 0,
        field: "spec",
        has_selector: false,
        works: &[Work::Kyma],
        alternate_works: &[Work::Kyma],
    },
    Watch {
        name: "kyma-status",
        resource: 0,
        field: "status",
        has_selector: false,
        works: &[Work::Catalog],
        alternate_works: &[Work::Kyma, Work::Catalog],
    },
    Watch {
        name: "catalog",
        resource: 1,
        field: "spec",
        has_selector: true,
        works: &[Work::Kyma, Work::Catalog],
        alternate_works: &[Work::Kyma, Work::Catalog],
    },
    Watch {
        name: "other",
        resource: 2,
        field: "spec",
        has_selector: false,
        works: &[Work::Forward],
        alternate_works: &[Work::Kyma, Work::Forward],
    },
];
/// Number of watches.
pub(crate) const WATCH_COUNT: usize = 4;

pub(crate) const RESOURCES: [&str; 3] = ["kymas", "mrms", "things"];

/// Encodes the watches of a plan (low bits) and the set of work that they trigger (highest bit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlanId(pub(crate) u8);

impl PlanId {
    pub(crate) const ALL: Self = Self(0b0_1111);
    /// Number of plans.
    pub(crate) const COUNT: u8 = 0b10_0000;

    pub(crate) fn has(self, watch: usize) -> bool {
        self.0 & 1 << watch != 0
    }

    pub(crate) fn works(self, watch: usize) -> &'static [Work] {
        if self.0 & 0b1_0000 == 0 { WATCHES[watch].works } else { WATCHES[watch].alternate_works }
    }

    /// Builds the plan; `revision` distinguishes revisions of the same content.
    pub(crate) fn plan(self, revision: u64) -> Plan {
        let watch = |at: usize| {
            let Watch { name, resource, field, .. } = &WATCHES[at];
            json!({"name": name, "group": "g", "version": "v1", "resource": RESOURCES[*resource], "field": field,
                   "manager": "m", "work": self.works(at)})
        };
        let watches: Vec<_> = (0..WATCHES.len()).filter(|at| self.has(*at)).map(watch).collect();
        Plan::parse(&json!({"revision": format!("{}-{revision}", self.0), "watches": watches}).to_string()).unwrap()
    }
}

/// An object in the store. `spec` and `status` are numbers that stand for contents; only a reconcile reads them.
#[derive(Clone, Debug)]
struct StoredObject {
    uid: u64,
    generation: i64,
    version: u64,
    metadata: u64,
    spec: u64,
    /// The `spec` before the last change, for changes that are reverted.
    previous_spec: u64,
    status: u64,
    labelled: bool,
}

/// A change to an object.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mutation {
    Spec,
    /// Restores the previous spec: same content, new resourceVersion and generation.
    RevertSpec,
    Metadata,
    Status,
    Label,
    Delete,
    /// Deletes and creates the object, with a new uid.
    Recreate,
}

impl Mutation {
    pub(crate) const ALL: [Self; 7] =
        [Self::Spec, Self::RevertSpec, Self::Metadata, Self::Status, Self::Label, Self::Delete, Self::Recreate];
}

/// The state of an object that is visible through a watch: uid, spec, metadata, and status where the watch covers it. A
/// reconcile that has read it has read everything that the watch could report.
pub(crate) type ObservedObject = (u64, u64, u64, Option<u64>);
/// State of all objects of one watch.
pub(crate) type ObservedObjects = BTreeMap<Name, ObservedObject>;
/// State of all objects of all watches.
pub(crate) type ClusterSnapshot = [ObservedObjects; WATCH_COUNT];

/// An event of a watch stream.
#[derive(Clone, Debug)]
pub(crate) struct WatchEvent {
    pub(crate) name: Name,
    pub(crate) state: ObjectState,
    pub(crate) deleted: bool,
    /// The agent must report the change.
    pub(crate) reportable: bool,
    /// Tick of the change.
    pub(crate) tick: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    objects: [BTreeMap<Name, StoredObject>; RESOURCES.len()],
    version: u64,
    uids: u64,
    contents: u64,
    /// The kind of the first resource has a status subresource.
    has_status: bool,
}

impl Cluster {
    /// Returns an empty cluster.
    pub(crate) fn new() -> Self {
        Self { objects: Default::default(), version: 10, uids: 0, contents: 0, has_status: true }
    }
}

impl Watch {
    /// Returns the work that the watch triggers in every plan that contains it.
    pub(crate) fn common_works(&self) -> &'static [Work] {
        if self.works.len() < self.alternate_works.len() { self.works } else { self.alternate_works }
    }

    /// Returns true if another manager receives an event for each object of the watch.
    pub(crate) fn is_forwarded(&self) -> bool {
        self.works.contains(&Work::Forward)
    }

    fn matches(&self, object: &StoredObject) -> bool {
        !self.has_selector || object.labelled
    }
}

impl Cluster {
    /// Returns true if every resourceVersion of the resource counts as a change, as discovery determines it.
    pub(crate) fn every_version(&self, resource: usize) -> bool {
        resource == 0 && !self.has_status
    }

    fn reports_status(&self, watch: &Watch) -> bool {
        watch.field == "status" || watch.resource != 0 || self.every_version(watch.resource)
    }

    /// Redefines the kind of the first resource, with or without a status subresource. The caller ends its watches.
    pub(crate) fn toggle_status_subresource(&mut self) {
        self.has_status = !self.has_status;
    }

    /// Restores the store from a backup. The caller ends all watches. Uids and contents that are created afterwards
    /// have never been used before.
    pub(crate) fn restore(&mut self, backup: Self) {
        *self = Self { uids: self.uids, contents: self.contents, has_status: self.has_status, ..backup };
    }

    /// Applies a mutation to an object and creates the object if it does not exist. Returns the events of each watch
    /// stream.
    pub(crate) fn mutate(
        &mut self,
        resource: usize,
        name: Name,
        mutation: Mutation,
        tick: u64,
    ) -> [Vec<WatchEvent>; WATCH_COUNT] {
        let before = self.objects[resource].get(&name).cloned();
        self.version += 1;
        self.contents += 1;
        let version = self.version;
        let content = self.contents;
        let after = match before.clone() {
            None => Some(self.create(content)),
            Some(_) if matches!(mutation, Mutation::Delete) => None,
            Some(_) if matches!(mutation, Mutation::Recreate) => Some(self.create(content)),
            Some(object) => Some(self.change(object, resource, mutation, version, content)),
        };
        let mut last = before.clone();
        if let (Some(last), None) = (&mut last, &after) {
            last.version = version;
        }
        match &after {
            Some(object) => drop(self.objects[resource].insert(name, object.clone())),
            None => drop(self.objects[resource].remove(&name)),
        }
        std::array::from_fn(|at| {
            let watch = &WATCHES[at];
            if watch.resource != resource {
                return Vec::new();
            }
            let reportable = !matches!(mutation, Mutation::Status) || before.is_none() || self.reports_status(watch);
            let event = |object: &StoredObject, deleted| WatchEvent {
                name,
                state: Self::object_state(resource, object),
                deleted,
                reportable,
                tick,
            };
            let old = last.as_ref().filter(|object| watch.matches(object));
            let new = after.as_ref().filter(|object| watch.matches(object));
            let replaced = matches!((old, new), (Some(old), Some(new)) if old.uid != new.uid);
            let removed = old.filter(|_| new.is_none() || replaced).map(|object| event(object, true));
            removed.into_iter().chain(new.map(|object| event(object, false))).collect()
        })
    }

    fn create(&mut self, content: u64) -> StoredObject {
        self.uids += 1;
        let version = self.version;
        let uid = self.uids;
        StoredObject {
            uid,
            generation: 1,
            version,
            metadata: 0,
            spec: content,
            previous_spec: content,
            status: 0,
            labelled: true,
        }
    }

    fn change(
        &self,
        mut object: StoredObject,
        resource: usize,
        mutation: Mutation,
        version: u64,
        content: u64,
    ) -> StoredObject {
        object.version = version;
        match mutation {
            Mutation::Spec => (object.previous_spec, object.spec) = (object.spec, content),
            Mutation::RevertSpec => std::mem::swap(&mut object.previous_spec, &mut object.spec),
            Mutation::Metadata => object.metadata = (object.metadata + 1) % 2,
            Mutation::Status => object.status = content,
            Mutation::Label => (object.labelled, object.metadata) = (!object.labelled, object.metadata ^ 2),
            Mutation::Delete | Mutation::Recreate => {}
        }
        let bumps_generation = matches!(mutation, Mutation::Spec | Mutation::RevertSpec)
            || (is_status_mutation(mutation) && self.every_version(resource));
        object.generation += i64::from(bumps_generation);
        object
    }

    fn object_state(resource: usize, object: &StoredObject) -> ObjectState {
        // Objects of the other resources have no generation, like ConfigMaps.
        let generation = if resource == 0 { object.generation } else { 0 };
        ObjectState {
            uid: Uid::from(object.uid.to_string().as_str()),
            version: Version::Number(object.version),
            generation: generation.try_into().ok(),
            metadata: object.metadata,
        }
    }

    /// Returns the current list response of a watch.
    pub(crate) fn list(&self, watch: usize) -> Vec<(Name, ObjectState)> {
        let Watch { resource, .. } = WATCHES[watch];
        let matching = self.objects[resource].iter().filter(|(_, object)| WATCHES[watch].matches(object));
        matching.map(|(name, object)| (*name, Self::object_state(resource, object))).collect()
    }

    /// Returns the current state of all objects of all watches, as a complete read returns it.
    pub(crate) fn snapshot(&self) -> ClusterSnapshot {
        std::array::from_fn(|at| {
            let watch = &WATCHES[at];
            let status = |object: &StoredObject| self.reports_status(watch).then_some(object.status);
            let observed = |object: &StoredObject| (object.uid, object.spec, object.metadata, status(object));
            let matching = self.objects[watch.resource].iter().filter(|(_, object)| watch.matches(object));
            matching.map(|(name, object)| (*name, observed(object))).collect()
        })
    }
}

const fn is_status_mutation(mutation: Mutation) -> bool {
    matches!(mutation, Mutation::Status)
}
