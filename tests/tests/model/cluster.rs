//! A cluster as far as watches see one: objects with versions, and what each watch would tell of them.

use std::collections::BTreeMap;

use serde_json::json;
use tidewatch_agent::core::{Seen, Uid, Version};
use tidewatch_shared::plan::{Plan, Work};

/// What objects of a resource are called in the model: below [`NAMES`].
pub(crate) type Name = u8;
/// How many names there are: more than an agent with few objects may hold, so that watches collapse and go coarse.
pub(crate) const NAMES: Name = 6;

/// A watch that a plan may name.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) name: &'static str,
    /// Index of its resource.
    pub(crate) resource: usize,
    field: &'static str,
    /// Only objects with the label.
    selects: bool,
    works: &'static [Work],
    /// What it stands for in the other plans.
    other_works: &'static [Work],
}

/// Two watches of one resource, one with a selector on a resource without generations, and one that goes to another manager.
pub(crate) const WATCHES: [Watch; COUNT] = [
    Watch {
        name: "kyma",
        resource: 0,
        field: "spec",
        selects: false,
        works: &[Work::Kyma],
        other_works: &[Work::Kyma],
    },
    Watch {
        name: "kyma-status",
        resource: 0,
        field: "status",
        selects: false,
        works: &[Work::Catalog],
        other_works: &[Work::Kyma, Work::Catalog],
    },
    Watch {
        name: "catalog",
        resource: 1,
        field: "spec",
        selects: true,
        works: &[Work::Kyma, Work::Catalog],
        other_works: &[Work::Kyma, Work::Catalog],
    },
    Watch {
        name: "other",
        resource: 2,
        field: "spec",
        selects: false,
        works: &[Work::Forward],
        other_works: &[Work::Kyma, Work::Forward],
    },
];
/// How many watches there are.
pub(crate) const COUNT: usize = 4;

pub(crate) const RESOURCES: [&str; 3] = ["kymas", "mrms", "things"];

/// Which watches a plan has (the low bits) and which works they stand for (the highest).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlanId(pub(crate) u8);

impl PlanId {
    pub(crate) const ALL: Self = Self(0b0_1111);
    /// How many there are.
    pub(crate) const COUNT: u8 = 0b10_0000;

    pub(crate) fn has(self, watch: usize) -> bool {
        self.0 & 1 << watch != 0
    }

    pub(crate) fn works(self, watch: usize) -> &'static [Work] {
        if self.0 & 0b1_0000 == 0 { WATCHES[watch].works } else { WATCHES[watch].other_works }
    }

    /// The plan; `turn` tells revisions of the same content apart.
    pub(crate) fn plan(self, turn: u64) -> Plan {
        let watch = |at: usize| {
            let Watch { name, resource, field, .. } = &WATCHES[at];
            json!({"name": name, "group": "g", "version": "v1", "resource": RESOURCES[*resource], "field": field, "manager": "m",
                   "work": self.works(at)})
        };
        let watches: Vec<_> = (0..WATCHES.len()).filter(|at| self.has(*at)).map(watch).collect();
        Plan::parse(&json!({"revision": format!("{}-{turn}", self.0), "watches": watches}).to_string()).unwrap()
    }
}

/// An object. `spec` and `status` stand for contents: numbers that nothing but a pass ever sees.
#[derive(Clone, Debug)]
struct Thing {
    uid: u64,
    generation: i64,
    version: u64,
    metadata: u64,
    spec: u64,
    /// What `spec` was before, for changes that are taken back.
    before: u64,
    status: u64,
    selected: bool,
}

/// What somebody does to an object.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Deed {
    Spec,
    /// The change before is taken back: same content, new versions.
    TakeBack,
    Metadata,
    Status,
    Label,
    Delete,
    /// Gone and there again, under another uid.
    Recreate,
}

/// What a watch reports of an object: a pass that has this has all that the watch could tell.
pub(crate) type Told = (u64, u64, u64, Option<u64>);
/// All that a watch could tell.
pub(crate) type Told1 = BTreeMap<Name, Told>;
/// The same of each watch.
pub(crate) type Truth = [Told1; COUNT];

/// What a watch stream says.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) name: Name,
    pub(crate) seen: Seen,
    pub(crate) gone: bool,
    /// The watch must tell of it.
    pub(crate) counts: bool,
    /// When it changed.
    pub(crate) tick: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    objects: [BTreeMap<Name, Thing>; RESOURCES.len()],
    version: u64,
    uids: u64,
    contents: u64,
    /// Whether the kind of the first resource has a status subresource.
    has_status: bool,
}

impl Cluster {
    /// An empty one.
    pub(crate) fn new() -> Self {
        Self { objects: Default::default(), version: 10, uids: 0, contents: 0, has_status: true }
    }
}

impl Watch {
    /// What it stands for in every plan that has it.
    pub(crate) fn works_always(&self) -> &'static [Work] {
        if self.works.len() < self.other_works.len() { self.works } else { self.other_works }
    }

    /// Whether another manager is told of each of its objects.
    pub(crate) fn is_forwarded(&self) -> bool {
        self.works.contains(&Work::Forward)
    }

    fn picks(&self, thing: &Thing) -> bool {
        !self.selects || thing.selected
    }
}

impl Cluster {
    /// Whether each version of a resource counts, as discovery says it.
    pub(crate) fn every_version(&self, resource: usize) -> bool {
        resource == 0 && !self.has_status
    }

    fn counts_status(&self, watch: &Watch) -> bool {
        watch.field == "status" || watch.resource != 0 || self.every_version(watch.resource)
    }

    /// Another definition of the first kind. Its watches end.
    pub(crate) fn redefine(&mut self) {
        self.has_status = !self.has_status;
    }

    /// The store is set back to an older state. All watches end. What is new from then on never was before.
    pub(crate) fn set_back(&mut self, older: Self) {
        *self = Self { uids: self.uids, contents: self.contents, has_status: self.has_status, ..older };
    }

    /// Does something to an object, which begins to be where it was not. Gives what the stream of each watch says of it.
    pub(crate) fn act(&mut self, resource: usize, name: Name, deed: Deed, tick: u64) -> [Vec<Said>; COUNT] {
        let before = self.objects[resource].get(&name).cloned();
        self.version += 1;
        self.contents += 1;
        let (version, content) = (self.version, self.contents);
        let after = match before.clone() {
            None => Some(self.create(content)),
            Some(_) if matches!(deed, Deed::Delete) => None,
            Some(_) if matches!(deed, Deed::Recreate) => Some(self.create(content)),
            Some(thing) => Some(self.change(thing, resource, deed, version, content)),
        };
        let mut last = before.clone();
        if let (Some(last), None) = (&mut last, &after) {
            last.version = version;
        }
        match &after {
            Some(thing) => drop(self.objects[resource].insert(name, thing.clone())),
            None => drop(self.objects[resource].remove(&name)),
        }
        std::array::from_fn(|at| {
            let watch = &WATCHES[at];
            if watch.resource != resource {
                return Vec::new();
            }
            let counts = !matches!(deed, Deed::Status) || before.is_none() || self.counts_status(watch);
            let said = |thing: &Thing, gone| Said { name, seen: Self::seen(resource, thing), gone, counts, tick };
            let was = last.as_ref().filter(|thing| watch.picks(thing));
            let is = after.as_ref().filter(|thing| watch.picks(thing));
            let replaced = matches!((was, is), (Some(was), Some(is)) if was.uid != is.uid);
            let left = was.filter(|_| is.is_none() || replaced).map(|thing| said(thing, true));
            left.into_iter().chain(is.map(|thing| said(thing, false))).collect()
        })
    }

    fn create(&mut self, content: u64) -> Thing {
        self.uids += 1;
        let (version, uid) = (self.version, self.uids);
        Thing { uid, generation: 1, version, metadata: 0, spec: content, before: content, status: 0, selected: true }
    }

    fn change(&self, mut thing: Thing, resource: usize, deed: Deed, version: u64, content: u64) -> Thing {
        thing.version = version;
        match deed {
            Deed::Spec => (thing.before, thing.spec) = (thing.spec, content),
            Deed::TakeBack => std::mem::swap(&mut thing.before, &mut thing.spec),
            Deed::Metadata => thing.metadata = (thing.metadata + 1) % 2,
            Deed::Status => thing.status = content,
            Deed::Label => (thing.selected, thing.metadata) = (!thing.selected, thing.metadata ^ 2),
            Deed::Delete | Deed::Recreate => {}
        }
        let counts =
            matches!(deed, Deed::Spec | Deed::TakeBack) || (deed_is_status(deed) && self.every_version(resource));
        thing.generation += i64::from(counts);
        thing
    }

    fn seen(resource: usize, thing: &Thing) -> Seen {
        // The others have no generations, as ConfigMaps have none.
        let generation = if resource == 0 { thing.generation } else { 0 };
        Seen {
            uid: Uid::from(thing.uid.to_string().as_str()),
            version: Version::Number(thing.version),
            generation: generation.try_into().ok(),
            metadata: thing.metadata,
        }
    }

    /// What a list of a watch has now.
    pub(crate) fn list(&self, watch: usize) -> Vec<(Name, Seen)> {
        let Watch { resource, .. } = WATCHES[watch];
        let picked = self.objects[resource].iter().filter(|(_, thing)| WATCHES[watch].picks(thing));
        picked.map(|(name, thing)| (*name, Self::seen(resource, thing))).collect()
    }

    /// What whoever reads everything now has.
    pub(crate) fn truth(&self) -> Truth {
        std::array::from_fn(|at| {
            let watch = &WATCHES[at];
            let status = |thing: &Thing| self.counts_status(watch).then_some(thing.status);
            let told = |thing: &Thing| (thing.uid, thing.spec, thing.metadata, status(thing));
            let picked = self.objects[watch.resource].iter().filter(|(_, thing)| watch.picks(thing));
            picked.map(|(name, thing)| (*name, told(thing))).collect()
        })
    }
}

const fn deed_is_status(deed: Deed) -> bool {
    matches!(deed, Deed::Status)
}
