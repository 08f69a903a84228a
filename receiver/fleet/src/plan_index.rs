//! Index of a plan's watches.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, LazyLock},
};

use kube::ResourceExt as _;
use tidewatch_api::{
    crds::runtime_crds,
    plan::{Plan, PlannedWatch, Work, carries_secrets},
};
use tidewatch_contract::event::{Change, Event, Object, Payload, Subject};

use crate::queue::{Drift, WorkSet};

/// API group of CustomResourceDefinitions.
const DEFINITIONS: &str = "apiextensions.k8s.io";

/// Names of our own CRDs in a runtime.
static OUR_CRDS: LazyLock<BTreeSet<String>> =
    LazyLock::new(|| runtime_crds().iter().map(|definition| definition.name_any()).collect());

/// Plan with its watches by name, shared by all runtimes with that plan.
#[derive(Debug)]
pub(crate) struct PlanIndex {
    pub(super) plan: Arc<Plan>,
    work: HashMap<String, WorkSet>,
    /// Groups of the watches on all resources of one, by the name of the watch.
    groups: HashMap<String, String>,
}

impl PlanIndex {
    pub(crate) fn new(plan: Arc<Plan>) -> Self {
        let work_of = |watch: &PlannedWatch| (watch.name.clone(), watch.work.iter().copied().collect());
        let work = plan.watches().iter().map(work_of).collect();
        let of_groups = plan.watches().iter().filter(|watch| watch.is_of_group());
        let groups = of_groups.map(|watch| (watch.name.clone(), watch.group.clone())).collect();
        Self { plan, work, groups }
    }

    /// Work of a watch; `None` if the plan has no such watch.
    pub(super) fn work(&self, watch: &str) -> Option<WorkSet> {
        self.work.get(watch).copied()
    }

    /// Work of the watch of an event; `None` if the plan has no such watch. That on a group has events of the harmless
    /// resources of this group alone.
    pub(super) fn work_of(&self, event: &Event) -> Option<WorkSet> {
        let work = self.work(&event.watch)?;
        let subject = match &event.payload {
            Payload::Object(object) => &object.subject,
            Payload::Unnamed { subject, .. } => subject,
            Payload::Watch => return Some(work),
        };
        let belongs = |group: &String| *group == subject.group && !carries_secrets(group, &subject.resource);
        self.groups.get(&event.watch).is_none_or(belongs).then_some(work)
    }

    /// Work of the event's watch that its object does not need: the reconcile of the Kyma applies our own CRDs, and those of
    /// the modules concern their Manifests alone.
    pub(super) fn unneeded(&self, event: &Event) -> WorkSet {
        let Payload::Object(Object { subject, .. }) = &event.payload else { return WorkSet::EMPTY };
        let is_definition = subject.group == DEFINITIONS && subject.resource == "customresourcedefinitions";
        if is_definition && !OUR_CRDS.contains(&subject.name) { WorkSet::of(&[Work::Kyma]) } else { WorkSet::EMPTY }
    }

    /// The first watch on all resources of a group that these names lack.
    pub(super) fn missing_group<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Option<&str> {
        let is_missing = |watch: &&String| !names.clone().any(|name| name == watch.as_str());
        self.groups.keys().filter(is_missing).min().map(String::as_str)
    }

    /// Drift of any object of a watch. Only the reconciles of Manifests distinguish it from that of any object at all.
    pub(super) fn drift(&self, watch: &str) -> Drift {
        let planned = self.plan.watches().iter().find(|planned| planned.name == watch);
        let is_of_modules = |planned: &&PlannedWatch| self.work(&planned.name) == Some(WorkSet::MANIFEST);
        planned.filter(is_of_modules).map_or(Drift::All, |planned| {
            Drift::of(Object {
                subject: Subject {
                    group: planned.group.clone(),
                    version: planned.version.clone(),
                    resource: planned.resource.clone(),
                    namespace: String::new(),
                    name: String::new(),
                },
                kind: String::new(),
                uid: String::new(),
                resource_version: String::new(),
                generation: None,
                change: Change::Spec,
            })
        })
    }
}
