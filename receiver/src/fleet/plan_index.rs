//! Index of a plan's watches.

use std::{collections::HashMap, sync::Arc};

use tidewatch_shared::{
    event::{Change, Event, Object, Payload, Subject},
    plan::{Plan, PlannedWatch, carries_secrets},
};

use crate::fleet::queue::{Drift, WorkSet};

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
