//! Selects the next action of a Manifest's reconcile from the facts that it has gathered so far. Pure.
//!
//! The reconcile carries the action out, adds the result to the facts, and selects again, until [`Action::End`]. Each
//! action adds a fact, so that a reconcile ends. A reconcile may stop after any action: the next one begins with the
//! recorded inventory and reaches the same end.

use std::collections::{BTreeMap, BTreeSet};

use strum::VariantArray as _;

use super::{
    adoption::Installation,
    inventory::{Inventory, ObjectKey},
    render::RenderedObject,
    stage::Stage,
};

/// Purpose of a reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// The objects of the module exist as rendered, and no others of its inventory.
    Install,
    /// No object of the inventory exists, apart from those that another Manifest keeps. User CRs block it, and so does the
    /// default module CR until it is gone; meanwhile the module is kept as rendered.
    Remove,
    /// The objects of an unmanaged module stay without our label.
    Release,
}

/// Result of the last action on one object in this reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// The object is as rendered, or has lost our label.
    Current,
    /// The API server refused the request, or did not respond.
    Failed,
    /// A CRD that is not applied yet: its stored resources are written in another version first.
    Migrating,
    /// The module's own webhook does not answer, and the API server refused the request.
    Guarded,
    /// The object is being deleted.
    Terminating,
    /// A Job of an earlier version runs, and cannot be changed.
    Running,
    /// The object does not exist, or belongs to another Manifest or to nobody of ours.
    Absent,
    /// The object is not desired any more, and stays because of data of users.
    Kept,
}

/// State of the default module CR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DefaultObject {
    /// The Manifest has none, the policy ignores it, or it was created before.
    NotWanted,
    /// It is to be created, or to be deleted.
    Pending,
    /// It exists, or is deleted.
    Done,
    /// The request failed.
    Failed,
    /// It is being deleted.
    Terminating,
}

/// Facts of a reconcile.
#[derive(Clone, Debug)]
pub(super) struct Facts<'a> {
    pub(super) goal: Goal,
    /// The Manifest has all our finalizers, or is being deleted and gets no more.
    pub(super) has_finalizers: bool,
    /// Objects of the version, ordered by stage; `None` while they are not available.
    pub(super) rendered: Option<&'a [RenderedObject]>,
    /// The inventory as recorded in the Manifest.
    pub(super) inventory: Inventory,
    /// Objects that belong to the Manifest, but that its inventory lacked, are in it; false if that could not be found
    /// out, `None` before the search.
    pub(super) recovered: Option<bool>,
    pub(super) seen: BTreeMap<ObjectKey, Seen>,
    /// The CRDs of the module are established; `None` before the first read.
    pub(super) established: Option<bool>,
    pub(super) default_object: DefaultObject,
    /// The default module CR was created in the life of this Manifest.
    pub(super) default_created: bool,
    /// The module in the runtime cluster before the first write.
    pub(super) installation: Installation,
    /// User CRs block the removal; `None` before they were listed.
    pub(super) blocked: Option<bool>,
}

/// Next action of a reconcile.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action<'a> {
    /// Adds our finalizers to the Manifest.
    AddFinalizers,
    /// Looks for a module that the user installed by hand.
    FindInstallation,
    /// Reports that such a module is adopted, before any object is written.
    Adopt(String),
    /// Records this inventory in the Manifest, before its new objects are written.
    Record(Inventory),
    /// Applies objects of one stage, in any order.
    Apply(Vec<&'a RenderedObject>),
    /// Waits for CRDs to be established, and may apply objects that do not need them meanwhile, in any order.
    AwaitDefinitions { definitions: Vec<&'a RenderedObject>, meanwhile: Vec<&'a RenderedObject> },
    /// Creates the default module CR.
    CreateDefault,
    /// Searches the runtime for objects of the Manifest that its inventory lacks, and records them.
    Recover,
    /// Lists the user CRs of all kinds that the module manages.
    FindBlockers,
    /// Deletes the default module CR.
    DeleteDefault,
    /// Deletes objects of one stage that the module does not contain any more, in any order, as far as they belong to this
    /// Manifest alone and have no data of users.
    Prune(Vec<ObjectKey>),
    /// Deletes objects of one stage of a module that is removed, in any order, as far as they belong to this Manifest alone.
    Delete(Vec<ObjectKey>),
    /// Removes our label from objects of an unmanaged module.
    Unlabel(Vec<ObjectKey>),
    /// Deletes the Manifest and removes all our finalizers: nothing is left to do in the runtime cluster.
    Leave,
    /// Ends the reconcile.
    End,
}

/// Selects the next action.
pub(super) fn step<'a>(facts: &Facts<'a>) -> Action<'a> {
    match facts.goal {
        Goal::Install if facts.has_finalizers => facts.install(),
        Goal::Install => Action::AddFinalizers,
        Goal::Remove => facts.remove(),
        Goal::Release => facts.release(),
    }
}

impl<'a> Facts<'a> {
    fn install(&self) -> Action<'a> {
        let Some(rendered) = self.rendered else { return Action::End };
        if let Some(action) = self.adopt() {
            return action;
        }
        if let Some(action) = self.apply(rendered, |_| true) {
            return action;
        }
        match self.default_object {
            DefaultObject::Pending => return Action::CreateDefault,
            DefaultObject::Failed => return Action::End,
            _ => {}
        }
        self.prune(rendered, |_| true).unwrap_or(Action::End)
    }

    /// Keeps the selected objects as rendered while a removal waits: the manager of the module serves the CRs that are left.
    /// The default module CR is not created again, and no CRD is pruned, since that would delete its CRs.
    fn maintain(&self, is_kept: impl Fn(&ObjectKey) -> bool) -> Action<'a> {
        let Some(rendered) = self.rendered else { return Action::End };
        let pruned = || self.prune(rendered, |key| !key.is_definition());
        self.apply(rendered, is_kept).or_else(pruned).unwrap_or(Action::End)
    }

    /// Deletes the selected objects of the inventory that are no longer rendered; `None` once they are gone.
    fn prune(&self, rendered: &[RenderedObject], is_selected: impl Fn(&ObjectKey) -> bool) -> Option<Action<'a>> {
        // An object of a kind that is not served yet may be one that the inventory has under another key.
        if rendered.iter().any(|object| !object.served) {
            return Some(Action::End);
        }
        let keys: BTreeSet<_> = rendered.iter().map(|object| &object.key).collect();
        self.delete(|key| is_selected(key) && !keys.contains(key), Action::Prune)
    }

    /// The first write of a Manifest must not overwrite a module that the user installed by hand, unless it is adopted;
    /// `None` once that is clear.
    fn adopt(&self) -> Option<Action<'a>> {
        if !self.inventory.is_empty() {
            return None;
        }
        match &self.installation {
            Installation::Unknown => Some(Action::FindInstallation),
            Installation::Failed | Installation::Foreign(_) => Some(Action::End),
            Installation::Adoptable(message) => Some(Action::Adopt(message.clone())),
            Installation::Ours => None,
        }
    }

    /// Applies the selected objects by stages, in order; `None` once all of them of served kinds are current.
    fn apply(&self, rendered: &'a [RenderedObject], is_selected: impl Fn(&ObjectKey) -> bool) -> Option<Action<'a>> {
        let served = || rendered.iter().filter(|object| object.served && is_selected(&object.key));
        let mut grown = self.inventory.clone();
        let mut has_grown = false;
        // The namespace of all modules belongs to no module.
        for object in served().filter(|object| !object.key.is_common()) {
            has_grown |= grown.grow(&object.key, &object.version);
        }
        if has_grown {
            return Some(Action::Record(grown));
        }
        let of = |stage: Stage| served().filter(move |object| object.stage == stage);
        let unseen = |stage: Stage| of(stage).filter(|object| !self.seen.contains_key(&object.key)).collect::<Vec<_>>();
        for stage in Stage::VARIANTS {
            let to_apply = unseen(*stage);
            if !to_apply.is_empty() {
                return Some(Action::Apply(to_apply));
            }
            let of_stage: Vec<_> = of(*stage).collect();
            // The workloads may be what mends a webhook of the module.
            let is_passed = |seen: &Seen| matches!(seen, Seen::Current | Seen::Guarded);
            if !of_stage.iter().all(|object| self.seen.get(&object.key).is_some_and(is_passed)) {
                return Some(Action::End);
            }
            let definitions: Vec<_> = of_stage.into_iter().filter(|object| object.key.is_definition()).collect();
            match self.established {
                _ if definitions.is_empty() => {}
                // The workloads are the first that may need the kinds of the module.
                None => {
                    return Some(Action::AwaitDefinitions { definitions, meanwhile: unseen(Stage::Configuration) });
                }
                Some(false) => return Some(Action::End),
                Some(true) => {}
            }
        }
        // So may the removal of its configuration, which this version does not contain any more.
        let prune = || self.prune(rendered, |key| is_selected(key) && key.is_webhook_configuration());
        self.is_guarded().then(|| prune().unwrap_or(Action::End))
    }

    /// Before the first decision on a deletion, the inventory must have all objects: a CRD that it lacks defines a kind of
    /// user CRs, too.
    fn recover(&self) -> Option<Action<'a>> {
        match self.recovered {
            None => Some(Action::Recover),
            Some(false) => Some(Action::End),
            Some(true) => None,
        }
    }

    fn remove(&self) -> Action<'a> {
        if let Some(action) = self.recover() {
            return action;
        }
        // Existing objects of the module were never touched: they are the user's.
        if self.inventory.is_empty() && !self.default_created {
            return Action::Leave;
        }
        match self.blocked {
            None => return Action::FindBlockers,
            Some(true) => return self.maintain(|_| true),
            Some(false) => {}
        }
        match self.default_object {
            DefaultObject::Pending => return Action::DeleteDefault,
            // It may need a manager that was deleted, or a version with a mend.
            DefaultObject::Failed | DefaultObject::Terminating => return self.maintain(|_| true),
            DefaultObject::NotWanted | DefaultObject::Done => {}
        }
        let is_custom = |key: &ObjectKey| Stage::recorded(key, &self.inventory) == Stage::CustomResources;
        match self.delete(is_custom, Action::Delete) {
            // So may the CRs of the module's own.
            Some(Action::End) => self.maintain(|key| !is_custom(key)),
            Some(action) => action,
            None => self.delete(|_| true, Action::Delete).unwrap_or(Action::Leave),
        }
    }

    /// Deletes the selected objects of the inventory, those of the last stage first; `None` once all are gone.
    fn delete(
        &self,
        is_selected: impl Fn(&ObjectKey) -> bool,
        action: fn(Vec<ObjectKey>) -> Action<'a>,
    ) -> Option<Action<'a>> {
        let selected: Vec<_> = self.inventory.keys().filter(|key| !key.is_common() && is_selected(key)).collect();
        for stage in Stage::VARIANTS.iter().rev() {
            let of_stage = || selected.iter().copied().filter(|key| Stage::recorded(key, &self.inventory) == *stage);
            let exists = |key: &&ObjectKey| matches!(self.seen.get(*key), None | Some(Seen::Current));
            let existing: Vec<_> = of_stage().filter(exists).cloned().collect();
            if !existing.is_empty() {
                return Some(action(existing));
            }
            if of_stage().any(|key| !matches!(self.seen.get(key), Some(Seen::Absent | Seen::Kept))) {
                return Some(Action::End);
            }
        }
        None
    }

    fn release(&self) -> Action<'a> {
        if let Some(action) = self.recover() {
            return action;
        }
        let unseen = self.inventory.keys().filter(|key| !key.is_common() && !self.seen.contains_key(*key));
        let unseen: Vec<_> = unseen.cloned().collect();
        if !unseen.is_empty() {
            return Action::Unlabel(unseen);
        }
        let is_left = |seen: &Seen| matches!(seen, Seen::Current | Seen::Absent);
        if self.seen.values().all(is_left) { Action::Leave } else { Action::End }
    }

    /// Keeps the copies of an image pull secret that is not available now: pods in the runtime may use them.
    pub(super) fn keep_copies(&mut self, secret: &str) {
        let rendered = self.rendered.unwrap_or_default();
        let is_rendered = |key: &ObjectKey| rendered.iter().any(|object| object.key == *key);
        let is_copy = |key: &&ObjectKey| key.is_secret() && key.name == secret && !is_rendered(key);
        let copies = self.inventory.keys().filter(is_copy).cloned();
        self.seen.extend(copies.map(|key| (key, Seen::Kept)));
    }

    /// Forgets the objects that went with a Namespace or a CRD, and returns their keys.
    pub(super) fn forget_held(&mut self, by: &ObjectKey) -> Vec<ObjectKey> {
        let held: Vec<_> = self.seen.keys().filter(|key| by.holds(key)).cloned().collect();
        self.seen.retain(|key, _| !by.holds(key));
        held
    }

    /// True if all rendered objects exist as rendered.
    pub(super) fn objects_are_current(&self) -> bool {
        let is_current = |object: &RenderedObject| self.seen.get(&object.key) == Some(&Seen::Current);
        self.rendered.is_some_and(|rendered| rendered.iter().all(is_current))
    }

    /// True if some custom resources of the module's own kinds failed, and no other object: the module's webhook may refuse
    /// them until its manager runs.
    pub(super) fn only_custom_resources_failed(&self) -> bool {
        let is_failed = |object: &&RenderedObject| self.seen.get(&object.key) == Some(&Seen::Failed);
        let mut failed = self.rendered.unwrap_or_default().iter().filter(is_failed).peekable();
        failed.peek().is_some() && failed.all(|object| object.stage == Stage::CustomResources)
    }

    /// True if the module's own webhook, which does not answer, refused some objects.
    pub(super) fn is_guarded(&self) -> bool {
        self.seen.values().any(|seen| *seen == Seen::Guarded)
    }

    /// True if no object failed for another reason.
    pub(super) fn only_guarded_failed(&self) -> bool {
        let is_passed =
            |object: &RenderedObject| matches!(self.seen.get(&object.key), Some(Seen::Current | Seen::Guarded));
        self.is_guarded() && self.rendered.is_some_and(|rendered| rendered.iter().all(is_passed))
    }

    /// True if all rendered objects and the default module CR exist, and no others of the inventory but those that are kept.
    /// During a removal, which waits for CRs, only of the objects.
    pub(super) fn is_applied(&self) -> bool {
        let is_settled = match self.goal {
            Goal::Remove => self.waits(),
            Goal::Install | Goal::Release => {
                matches!(self.default_object, DefaultObject::NotWanted | DefaultObject::Done)
            }
        };
        let is_left = |seen: &Seen| matches!(seen, Seen::Current | Seen::Absent | Seen::Kept);
        is_settled && self.objects_are_current() && self.seen.values().all(is_left)
    }

    /// True for a removal that waits for CRs, while the module is kept as rendered.
    pub(super) fn waits(&self) -> bool {
        let is_default_left = matches!(self.default_object, DefaultObject::Failed | DefaultObject::Terminating);
        self.goal == Goal::Remove && (self.blocked == Some(true) || is_default_left)
    }

    /// The inventory without the objects that no longer exist.
    pub(super) fn remaining(&self) -> Inventory {
        let mut inventory = self.inventory.clone();
        for (key, seen) in &self.seen {
            if *seen == Seen::Absent {
                inventory.shrink(key);
            }
        }
        inventory
    }
}

#[cfg(test)]
mod tests;
