//! Writes of an installation: each wave of [`Component::wave`] is decided at once, sent at once, and taken over in the order of
//! the components.

use std::collections::BTreeMap;

use futures::future::join_all;
use kube::{Client, ResourceExt, api::DynamicObject};
use serde_json::Value;
use tidewatch_api::names::field_manager;
use tidewatch_cluster::object::{self, Converged, Target, WriteBudget};

use super::InstallRun;
use crate::{Component, Error, compare::shape, desired::DesiredObject, error::ObjectName, rbac, readiness};

/// The write of one component, and what its requests have done so far.
pub(super) struct Write<'a> {
    desired: &'a DesiredObject,
    body: Value,
    found: Option<DynamicObject>,
    /// There was no object.
    is_new: bool,
    /// The role keeps more rights than desired until the plan is written.
    is_widened: bool,
    /// Hash of the form in which this API server stores the object, if it adds fields.
    accepted: Option<u64>,
    /// Foreign finalizers and owners were removed from an object that is being deleted.
    is_released: bool,
    /// The desired object was written.
    is_applied: bool,
}

impl<'a> InstallRun<'a> {
    /// Selects the writes of a wave. A failed component blocks those that depend on it.
    pub(super) fn prepare(
        &mut self,
        wave: usize,
        unverified: &[&'a DesiredObject],
        found: &mut BTreeMap<Component, Option<DynamicObject>>,
    ) -> Vec<Write<'a>> {
        let mut writes = Vec::new();
        for &desired in unverified.iter().filter(|desired| desired.component.wave() == wave) {
            // Missing here are those that could not be read, and those that a takeover has written.
            let Some(found) = found.remove(&desired.component) else { continue };
            if desired.component.dependencies().iter().any(|dependency| self.failed(*dependency)) {
                self.report.blocked.insert(desired.component);
            } else {
                writes.push(self.write_of(desired, found));
            }
        }
        if wave > Component::ConfigMap.wave() {
            writes.extend(self.narrowed_roles());
        }
        writes
    }

    /// Decides on the write of a component: image, rights and priority are those of this moment.
    pub(super) fn write_of(&mut self, desired: &'a DesiredObject, found: Option<DynamicObject>) -> Write<'a> {
        let component = desired.component;
        if component == Component::Deployment
            && let Some(found) = &found
        {
            self.follow_image(found);
        }
        let body = desired.body(&self.params);
        let role = found.as_ref().filter(|_| matches!(component, Component::ClusterRole | Component::Role));
        let widened = role.and_then(|found| rbac::widened(&body, &found.data));
        let is_widened = widened.is_some();
        Write { is_widened, ..self.new_write(desired, widened.unwrap_or(body), found) }
    }

    /// Writes that remove the rights that only the previous plan needed, once the new plan is written.
    fn narrowed_roles(&mut self) -> Vec<Write<'a>> {
        if self.failed(Component::ConfigMap) || self.report.blocked.contains(&Component::ConfigMap) {
            return Vec::new();
        }
        let widened = std::mem::take(&mut self.widened_roles);
        let narrowed = widened.into_iter().map(|(role, found)| {
            let body = role.body(&self.params);
            self.new_write(role, body, Some(found))
        });
        narrowed.collect()
    }

    fn new_write(&self, desired: &'a DesiredObject, body: Value, found: Option<DynamicObject>) -> Write<'a> {
        Write {
            desired,
            body,
            is_new: found.is_none(),
            found,
            is_widened: false,
            accepted: self.installed.accepted_forms.get(&desired.component).copied(),
            is_released: false,
            is_applied: false,
        }
    }

    /// Sends writes at once, and takes their results over in order.
    pub(super) async fn write_all(&mut self, writes: Vec<Write<'a>>) {
        let client = self.client;
        let budget = &self.budget;
        let sent: Vec<_> = writes.into_iter().map(|write| write.send(client, budget)).collect();
        let sent = join_all(sent).await;
        for (write, result) in sent {
            self.settle(write, result);
        }
    }

    /// Takes over the result of a write.
    fn settle(&mut self, write: Write<'a>, result: Result<DynamicObject, Error>) {
        let component = write.desired.component;
        match write.accepted {
            Some(form) => self.installed.accepted_forms.insert(component, form),
            None => self.installed.accepted_forms.remove(&component),
        };
        if write.is_released || write.is_applied {
            self.report.written.insert(component);
        }
        if write.is_applied && component == Component::Deployment {
            self.installed.awaiting_pod = true;
            self.installed.rechecks = 0;
        }
        match result {
            Ok(object) if write.is_widened => self.widened_roles.push((write.desired, object)),
            result => self.record(write.desired, result),
        }
        if component == Component::PriorityClass {
            self.params.without_priority = write.is_new && self.failed(component);
        }
    }

    fn record(&mut self, desired: &DesiredObject, result: Result<DynamicObject, Error>) {
        let object = match result {
            Ok(object) => object,
            Err(error) => {
                // The next reconcile reads what it found.
                self.installed.doubt(desired.component);
                return self.fail(desired.component, error);
            }
        };
        if desired.component == Component::Deployment {
            self.installed.awaiting_pod |= !readiness::is_available(&object);
            self.installed.image = Some(self.params.image.clone());
            self.installed.unproven_before = self.params.unproven_before;
            self.installed.without_priority = self.params.without_priority;
        }
        self.installed.mark_verified(desired, &self.params);
    }
}

impl Write<'_> {
    /// Sends the requests. Returns the write with what they have done, and the current object.
    async fn send(mut self, client: &Client, budget: &WriteBudget<'_>) -> (Self, Result<DynamicObject, Error>) {
        let result = self.converge(client, budget).await;
        (self, result)
    }

    /// Repairs an object if it differs from the desired one, and returns its current state.
    async fn converge(&mut self, client: &Client, budget: &WriteBudget<'_>) -> Result<DynamicObject, Error> {
        let component = self.desired.component;
        let object_name = ObjectName::of(component);
        let found = match self.found.take() {
            Some(found) if found.metadata.deletion_timestamp.is_some() => {
                self.release(client, budget, &found).await?;
                None
            }
            found => found,
        };
        let name = component.name();
        let shape = shape(component);
        let desired = &self.body;
        let target = Target { name, manager: field_manager::TIDEWATCH, shape: &shape, desired, budget: Some(budget) };
        let converged = target.converge(&component.kind().api(client), found, &mut self.accepted).await;
        let Converged { object, written, .. } = converged.map_err(Error::write(object_name))?;
        self.is_applied = written;
        if written && object.metadata.deletion_timestamp.is_some() {
            return Err(Error::Terminating(object_name));
        }
        Ok(object)
    }

    /// Removes foreign finalizers and owners from an object that is being deleted, so that it can be created again.
    async fn release(&mut self, client: &Client, budget: &WriteBudget<'_>, found: &DynamicObject) -> Result<(), Error> {
        let component = self.desired.component;
        let object_name = ObjectName::of(component);
        if !object::has_foreign_lifecycle(&found.metadata) || !budget.may_write() {
            return Err(Error::Terminating(object_name));
        }
        let api = component.kind().api(client);
        let released = object::release(&api, component.name(), field_manager::TIDEWATCH, found).await;
        let released = released.map_err(Error::request("write", object_name))?;
        budget.wrote();
        self.is_released = true;
        if released.finalizers().is_empty() { Ok(()) } else { Err(Error::Terminating(object_name)) }
    }
}
