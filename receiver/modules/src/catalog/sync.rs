//! One sync of one runtime's catalog.
//!
//! Order: apply templates, apply release metas, delete release metas, delete templates; so no reader ever observes a
//! channel that points to a missing template. The calls of one step are concurrent. A failure blocks only its dependents. An
//! object that could not be read counts as missing where a reference to it would dangle, and as unchanged where it may itself
//! hold references.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures::{StreamExt, future::join_all, stream};
use tidewatch_cluster::{
    object::{WriteError, is_conflict},
    runtime_access::retain,
};
use tidewatch_contract::event::Object;
use tidewatch_fleet::queue::Drift;
use tidewatch_select::catalog::desired::{DesiredCatalog, Kind, ObjectId};

use super::{
    diff::{self, Action, Apply, Delete, Steps},
    error::{Attempt, CallError, Failures, SyncError},
    inventory::{Inventory, InventoryEntry},
    runtime::Runtime,
};

/// Concurrent calls to one runtime: a quarter of what it gets from all callers.
const CONCURRENCY: usize = 16;

/// Reconciles the runtime's catalog with the desired one. It reads the objects that `drift` reports, and with
/// [`Drift::All`] lists both kinds. The inventory is updated with each step, so it is accurate after a failure too.
pub(super) async fn run(
    runtime: &Runtime,
    desired: &DesiredCatalog,
    inventory: &mut Inventory,
    drift: &Drift,
) -> Result<(), SyncError> {
    let events = match drift {
        Drift::All => None,
        Drift::None => Some(&[][..]),
        Drift::Objects(events) | Drift::Reported(events) => Some(events.as_slice()),
    };
    if events.is_some_and(<[_]>::is_empty) && inventory.is_current(desired.fingerprint()) {
        return Ok(());
    }
    let mut run = SyncRun::new(runtime, inventory);
    let (steps, unread) = match events {
        None => (run.relist(desired).await?, BTreeSet::new()),
        Some(events) => run.read_changed(desired, events).await,
    };
    // Before the first write, so that a crash never loses track of a created object.
    if run.inventory.add_unverified(steps.applies.iter().map(|apply| &apply.desired.id)) {
        run.write_inventory().await?;
    }
    run.execute(steps, &unread).await;
    if run.failures.has_missing() {
        // The CRD or the namespace was deleted during the sync, and other objects with it: no entry can be relied on.
        run.inventory.unverified.extend(run.inventory.entries.keys().cloned());
    }
    let is_complete = run.failures.are_without_objects() && run.blocked == 0;
    run.inventory.fingerprint = is_complete.then(|| desired.fingerprint().into());
    run.write_inventory().await?;
    run.finish()
}

struct SyncRun<'a> {
    runtime: &'a Runtime,
    inventory: &'a mut Inventory,
    failures: Failures,
    blocked: usize,
    /// An object was written or deleted.
    has_written: bool,
}

impl<'a> SyncRun<'a> {
    fn new(runtime: &'a Runtime, inventory: &'a mut Inventory) -> Self {
        Self { runtime, inventory, failures: Failures::default(), blocked: 0, has_written: false }
    }

    fn finish(self) -> Result<(), SyncError> {
        self.failures.into_error(self.blocked).map_or(Ok(()), Err)
    }

    /// Lists both kinds at once and decides on each object. The observed entries replace the cached ones.
    async fn relist(&mut self, desired: &DesiredCatalog) -> Result<Steps, SyncError> {
        let listings = join_all(Kind::ALL.map(|kind| self.list_kind(kind, desired))).await;
        let mut all = Listing::default();
        for listing in listings {
            all.append(listing?);
        }
        let Listing { mut steps, entries, seen } = all;
        let missing = desired.objects().filter(|object| !seen.contains(&object.id));
        steps.applies.extend(missing.map(|object| Apply { desired: Arc::clone(object), present: false }));
        (self.inventory.entries, self.inventory.unverified) = (entries.into_iter().collect(), BTreeSet::new());
        Ok(steps)
    }

    /// Persists the inventory if its content or any object changed. The write after an object change has the effect
    /// that a process that reverts the work of another one gets a conflict. A conflict aborts the sync, since another
    /// writer is at work; any other failure does not, since managed objects also carry the field manager.
    async fn write_inventory(&mut self) -> Result<(), SyncError> {
        let data = self.inventory.data();
        if self.inventory.is_stored_as(&data) && !self.has_written {
            return Ok(());
        }
        self.failures.set_inventory(None);
        let version = self.inventory.version().map(str::to_owned);
        let written = match self.runtime.write_inventory(data.clone(), version.as_deref()).await {
            Err(kube::Error::Api(status)) if status.is_not_found() && version.is_some() => {
                self.runtime.write_inventory(data.clone(), None).await
            }
            written => written,
        };
        match written {
            Ok(version) => self.inventory.mark_stored(version, &data),
            Err(error) if is_conflict(&error) => return Err(SyncError::Inventory(error)),
            Err(error) => {
                self.inventory.mark_unconfirmed();
                self.failures.set_inventory(Some(error.into()));
            }
        }
        Ok(())
    }

    /// Lists one kind and decides on each object.
    async fn list_kind(&self, kind: Kind, desired: &DesiredCatalog) -> Result<Listing, SyncError> {
        let listed = self.runtime.list(kind, |object| {
            // No API server lists an object of another name.
            let id = ObjectId::checked(kind, object.metadata.name.as_deref()?)?;
            let entry = self.inventory.entries.get(&id);
            let owned = diff::owned_entry(&object, entry);
            let action = diff::action_for(&id, desired, Some(&object), entry);
            Some((id, owned, action))
        });
        let listed = listed.await.map_err(|source| SyncError::List { kind, source })?;
        let mut listing = Listing::default();
        for (id, owned, action) in listed.into_iter().flatten() {
            match action {
                Action::UpToDate(entry) => drop(listing.entries.insert(id.clone(), entry)),
                Action::Apply(apply) => {
                    listing.entries.extend(owned.map(|owned| (id.clone(), owned)));
                    listing.steps.applies.push(apply);
                }
                Action::Delete(delete) => {
                    listing.entries.extend(owned.map(|owned| (id.clone(), owned)));
                    listing.steps.deletes.push(delete);
                }
                // Present, and so nothing to add.
                Action::Ignore if desired.is_held(&id) => {}
                Action::Ignore => continue,
            }
            listing.seen.insert(id);
        }
        Ok(listing)
    }

    /// Reads the objects with changes and takes all others from the inventory. Returns the steps, and the objects that
    /// could not be read.
    async fn read_changed(&mut self, desired: &DesiredCatalog, events: &[Object]) -> (Steps, BTreeSet<ObjectId>) {
        let mut unread = BTreeSet::new();
        let mut changed = diff::changed_objects(events, desired, self.inventory);
        changed.append(&mut self.inventory.unverified);
        changed.extend(diff::unknown_held_objects(desired, self.inventory));
        let mut steps = diff::diff_inventory(desired, self.inventory);
        steps.applies.retain(|apply| !changed.contains(&apply.desired.id));
        steps.deletes.retain(|delete| !changed.contains(&delete.id));
        let entries = &self.inventory.entries;
        let reads = stream::iter(changed).map(|id| {
            let runtime = self.runtime.clone();
            async move {
                // Many objects: none is kept.
                let read = retain(async {
                    let object = runtime.get(&id).await?;
                    let action = diff::action_for(&id, desired, object.as_ref(), entries.get(&id));
                    let owned = object.as_ref().and_then(|object| diff::owned_entry(object, entries.get(&id)));
                    Ok::<_, kube::Error>((action, owned))
                });
                let read = read.await;
                (id, read.map_err(CallError::from))
            }
        });
        let reads: Vec<_> = reads.buffer_unordered(CONCURRENCY).collect().await;
        for (id, read) in reads {
            let (action, owned) = match read {
                Ok(read) => read,
                Err(source) => {
                    self.fail(id.clone(), Attempt::Read, Some(source));
                    unread.insert(id);
                    continue;
                }
            };
            match action {
                Action::UpToDate(entry) => drop(self.inventory.entries.insert(id, entry)),
                Action::Apply(apply) => steps.applies.push(apply),
                Action::Delete(delete) => {
                    self.inventory.entries.extend(owned.map(|owned| (id, owned)));
                    steps.deletes.push(delete);
                }
                Action::Ignore => drop(self.inventory.entries.remove(&id)),
            }
        }
        (steps, unread)
    }

    async fn execute(&mut self, steps: Steps, unread: &BTreeSet<ObjectId>) {
        let (templates, metas): (Vec<_>, Vec<_>) =
            steps.applies.into_iter().partition(|apply| apply.desired.id.kind == Kind::Template);
        let (old_templates, old_metas): (Vec<_>, Vec<_>) =
            steps.deletes.into_iter().partition(|delete| delete.id.kind == Kind::Template);

        let failed = self.apply(templates).await;
        let absent = failed.iter().filter(|apply| !apply.present).map(|apply| &apply.desired.id);
        let unread_templates = unread.iter().filter(|id| id.kind == Kind::Template);
        let missing: BTreeSet<_> = absent.chain(unread_templates).map(|id| &id.name).collect();
        let (blocked, metas): (Vec<_>, Vec<_>) =
            metas.into_iter().partition(|apply| apply.desired.requires.iter().any(|name| missing.contains(name)));
        self.runtime.metrics.blocked(blocked.len());

        let mut outdated: Vec<_> = blocked.into_iter().map(|apply| apply.desired.id.clone()).collect();
        self.block(&outdated);
        outdated.extend(unread.iter().filter(|id| id.kind == Kind::ReleaseMeta).cloned());
        outdated.extend(self.apply(metas).await.into_iter().map(|apply| apply.desired.id.clone()));
        outdated.extend(self.delete(old_metas).await.into_iter().map(|delete| delete.id));

        // A release meta that was not updated, or not read, may still reference templates of its module.
        let is_referenced = |template: &Delete| outdated.iter().any(|meta| template.id.belongs_to(&meta.name));
        let (referenced, unreferenced): (Vec<_>, Vec<_>) = old_templates.into_iter().partition(is_referenced);
        self.block(&referenced.into_iter().map(|delete| delete.id).collect::<Vec<_>>());
        self.delete(unreferenced).await;
    }

    /// Applies objects and returns the failed ones. A failed write may have been persisted all the same.
    async fn apply(&mut self, applies: Vec<Apply>) -> Vec<Apply> {
        let writes = stream::iter(applies).map(|apply| {
            let runtime = self.runtime.clone();
            async move {
                // Many objects: none is kept.
                let written = retain(async {
                    let object = runtime.apply(&apply.desired).await?;
                    Ok::<_, WriteError>(InventoryEntry::new(apply.desired.hash, &object))
                });
                let written = written.await;
                // Thousands of calls can fail, each with a long message.
                (apply, written.map_err(|error| error.request().map(CallError::from)))
            }
        });
        let writes: Vec<_> = writes.buffer_unordered(CONCURRENCY).collect().await;
        let mut failed = Vec::new();
        for (apply, written) in writes {
            let id = apply.desired.id.clone();
            match written {
                Ok(entry) => {
                    self.has_written = true;
                    self.inventory.unverified.remove(&id);
                    self.inventory.entries.insert(id, entry);
                }
                Err(cause) => {
                    self.fail(id, Attempt::Apply, cause);
                    failed.push(apply);
                }
            }
        }
        failed
    }

    /// Deletes objects and returns the failed ones.
    async fn delete(&mut self, deletes: Vec<Delete>) -> Vec<Delete> {
        let calls = stream::iter(deletes).map(|delete| {
            let runtime = self.runtime.clone();
            async move {
                let deleted = runtime.delete(&delete.id, &delete.uid).await;
                (delete, deleted.map_err(CallError::from))
            }
        });
        let calls: Vec<_> = calls.buffer_unordered(CONCURRENCY).collect().await;
        let mut failed = Vec::new();
        for (delete, deleted) in calls {
            match deleted {
                Ok(true) => {
                    self.inventory.entries.remove(&delete.id);
                    self.inventory.unverified.remove(&delete.id);
                    self.has_written = true;
                }
                // Another object took the name: the next sync reads it.
                Ok(false) => {
                    self.inventory.entries.remove(&delete.id);
                    self.inventory.unverified.insert(delete.id);
                }
                Err(source) => {
                    self.fail(delete.id.clone(), Attempt::Delete, Some(source));
                    failed.push(delete);
                }
            }
        }
        failed
    }

    fn fail(&mut self, id: ObjectId, attempt: Attempt, cause: Option<CallError>) {
        self.inventory.unverified.insert(id.clone());
        self.failures.add(id, attempt, cause);
    }

    fn block(&mut self, ids: &[ObjectId]) {
        self.blocked += ids.len();
        self.inventory.unverified.extend(ids.iter().cloned());
    }
}

/// Result of listing one kind or both.
#[derive(Default)]
struct Listing {
    steps: Steps,
    entries: BTreeMap<ObjectId, InventoryEntry>,
    seen: BTreeSet<ObjectId>,
}

impl Listing {
    fn append(&mut self, mut other: Self) {
        self.steps.applies.append(&mut other.steps.applies);
        self.steps.deletes.append(&mut other.steps.deletes);
        self.entries.append(&mut other.entries);
        self.seen.append(&mut other.seen);
    }
}

/// Deletes all managed objects, release metas first. A kind that the runtime does not serve has no objects.
pub(super) async fn remove_all(runtime: &Runtime, inventory: &mut Inventory) -> Result<(), SyncError> {
    let nothing = DesiredCatalog::new([]);
    let mut run = SyncRun::new(runtime, inventory);
    for kind in Kind::ALL.into_iter().rev() {
        match run.list_kind(kind, &nothing).await {
            Ok(listing) => drop(run.delete(listing.steps.deletes).await),
            Err(error) if error.is_not_served() => {}
            Err(error) => return Err(error),
        }
    }
    run.finish()
}
