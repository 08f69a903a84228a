//! One pass over the catalog of one runtime.
//!
//! Order: templates in, release metas in, release metas out, templates out; so a reader never sees a channel that points to
//! nothing. What fails stops nothing but what depends on it. What cannot be read may be missing, or may be there as it was.

use std::{collections::BTreeSet, sync::Arc};

use futures::{StreamExt, stream};
use tidewatch_shared::event::Object;

use super::{
    desired::{Kind, ObjectId, Wanted},
    diff::{self, Delete, Known, Put, Steps, Verdict},
    error::{Attempt, Failure, Failures, SyncError, Target},
    inventory::Inventory,
    metrics::Metrics,
    runtime::{Runtime, Written},
};
use crate::base::short_map::ShortMap;

/// Calls at a time to one runtime.
const CONCURRENCY: usize = 4;

/// What a pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// Calls that wrote an object.
    pub written: usize,
    /// Objects that were deleted.
    pub deleted: usize,
}

/// What a pass looks at in the runtime.
#[derive(Clone, Copy, Debug)]
pub(super) enum Look<'a> {
    /// Everything.
    Everywhere,
    /// What these events tell something new of, perhaps nothing.
    At(&'a [Object]),
}

/// Brings the runtime's catalog to what is wanted. The inventory follows each step, so that it holds after a failure too.
pub(super) async fn pass(
    runtime: &Runtime,
    metrics: &Metrics,
    wanted: &Wanted,
    inventory: &mut Inventory,
    look: Look<'_>,
) -> Result<Synced, SyncError> {
    if matches!(look, Look::At([])) && inventory.is_of(wanted.content()) {
        return Ok(Synced::default());
    }
    let mut pass = Pass { runtime, inventory, failures: Vec::new(), held: 0, done: Synced::default() };
    let (steps, blind) = match look {
        Look::Everywhere => (pass.look_everywhere(wanted).await?, BTreeSet::new()),
        Look::At(events) => pass.look_at(wanted, diff::news(events, wanted, pass.inventory)).await,
    };
    // Before anything is written, so that a crash never loses track of what was made.
    let put = steps.puts.iter().map(|put| &put.desired.id);
    if pass.inventory.grow(put) {
        pass.write_inventory().await?;
    }
    pass.carry_out(steps, &blind, metrics).await;
    if pass.failures.iter().any(|failure| is_not_found(&failure.source)) {
        // A kind or the namespace was taken away under our feet, and more with it: nothing that we know holds any more.
        pass.inventory.unsure.extend(pass.inventory.known.keys().cloned());
    }
    let is_failed = |failure: &Failure| failure.target != Target::Inventory;
    let whole = !pass.failures.iter().any(is_failed) && pass.held == 0;
    pass.inventory.class = whole.then(|| wanted.content().into());
    pass.write_inventory().await?;
    let Pass { failures, held, done, .. } = pass;
    Failures::new(failures, held).map_or(Ok(done), |failures| Err(SyncError::Objects(failures)))
}

struct Pass<'a> {
    runtime: &'a Runtime,
    inventory: &'a mut Inventory,
    failures: Vec<Failure>,
    held: usize,
    done: Synced,
}

impl Pass<'_> {
    /// Lists both kinds and judges each object. What we remembered gives way to what is there.
    async fn look_everywhere(&mut self, wanted: &Wanted) -> Result<Steps, SyncError> {
        let mut survey = Survey::default();
        for kind in Kind::ALL {
            self.survey(kind, wanted, &mut survey).await?;
        }
        let Survey { mut steps, known, seen } = survey;
        let missing = wanted.objects().filter(|desired| !seen.contains(&desired.id));
        steps.puts.extend(missing.map(|desired| Put { desired: Arc::clone(desired), present: false }));
        (self.inventory.known, self.inventory.unsure) = (known, BTreeSet::new());
        Ok(steps)
    }

    /// Writes the inventory where it says something new, or where objects were written: only so does who undoes what another process
    /// did find out that it wrote the inventory as well. Who cannot write it goes on all the same: what is ours bears our mark as
    /// well. But if somebody else wrote it, somebody else works here.
    async fn write_inventory(&mut self) -> Result<(), SyncError> {
        let data = self.inventory.data();
        if self.inventory.is_stored_as(&data) && self.done == Synced::default() {
            return Ok(());
        }
        self.failures.retain(|failure| failure.target != Target::Inventory);
        let version = self.inventory.version().map(str::to_owned);
        let written = match self.runtime.write_inventory(data.clone(), version.as_deref()).await {
            Err(kube::Error::Api(status)) if status.is_not_found() && version.is_some() => {
                self.runtime.write_inventory(data.clone(), None).await
            }
            written => written,
        };
        match written {
            Ok(version) => self.inventory.stored_as(version, &data),
            Err(error) if is_conflict(&error) => return Err(SyncError::Inventory(error)),
            Err(source) => {
                self.inventory.is_in_doubt();
                self.failures.push(Failure { target: Target::Inventory, attempt: Attempt::Apply, source });
            }
        }
        Ok(())
    }

    async fn survey(&self, kind: Kind, wanted: &Wanted, survey: &mut Survey) -> Result<(), SyncError> {
        let objects = self.runtime.list(kind).await.map_err(|source| SyncError::List { kind, source })?;
        for object in objects {
            let id = ObjectId::new(kind, object.metadata.name.as_deref().unwrap_or_default());
            let known = self.inventory.known.get(&id);
            let ours = diff::of_ours(&object, known);
            match diff::judge(&id, wanted, Some(&object), known) {
                Verdict::Same(known) => drop(survey.known.insert(id.clone(), known)),
                Verdict::Put(put) => {
                    survey.known.extend(ours.map(|ours| (id.clone(), ours)));
                    survey.steps.puts.push(put);
                }
                Verdict::Delete(delete) => {
                    survey.known.extend(ours.map(|ours| (id.clone(), ours)));
                    survey.steps.deletes.push(delete);
                }
                Verdict::Leave => continue,
            }
            survey.seen.insert(id);
        }
        Ok(())
    }

    /// Reads the objects that there is news of; all others go by memory. Those that could not be read come with the steps.
    async fn look_at(&mut self, wanted: &Wanted, mut news: BTreeSet<ObjectId>) -> (Steps, BTreeSet<ObjectId>) {
        let mut blind = BTreeSet::new();
        news.append(&mut self.inventory.unsure);
        let mut steps = diff::against_inventory(wanted, self.inventory);
        steps.puts.retain(|put| !news.contains(&put.desired.id));
        steps.deletes.retain(|delete| !news.contains(&delete.id));
        let reads = stream::iter(news).map(|id| {
            let runtime = self.runtime.clone();
            async move {
                let read = runtime.get(&id).await;
                (id, read)
            }
        });
        let reads: Vec<_> = reads.buffer_unordered(CONCURRENCY).collect().await;
        for (id, read) in reads {
            let object = match read {
                Ok(object) => object,
                Err(source) => {
                    self.fail(id.clone(), Attempt::Read, source);
                    blind.insert(id);
                    continue;
                }
            };
            match diff::judge(&id, wanted, object.as_ref(), self.inventory.known.get(&id)) {
                Verdict::Same(known) => drop(self.inventory.known.insert(id, known)),
                Verdict::Put(put) => steps.puts.push(put),
                Verdict::Delete(delete) => {
                    let known = self.inventory.known.get(&id);
                    let ours = object.as_ref().and_then(|object| diff::of_ours(object, known));
                    self.inventory.known.extend(ours.map(|ours| (id, ours)));
                    steps.deletes.push(delete);
                }
                Verdict::Leave => drop(self.inventory.known.remove(&id)),
            }
        }
        (steps, blind)
    }

    async fn carry_out(&mut self, steps: Steps, blind: &BTreeSet<ObjectId>, metrics: &Metrics) {
        let (templates, metas): (Vec<_>, Vec<_>) =
            steps.puts.into_iter().partition(|put| put.desired.id.kind == Kind::Template);
        let (old_templates, old_metas): (Vec<_>, Vec<_>) =
            steps.deletes.into_iter().partition(|delete| delete.id.kind == Kind::Template);

        let failed = self.put(templates).await;
        let absent = failed.iter().filter(|put| !put.present).map(|put| &put.desired.id);
        let unseen = blind.iter().filter(|id| id.kind == Kind::Template);
        let missing: BTreeSet<_> = absent.chain(unseen).map(|id| &id.name).collect();
        let (held, metas): (Vec<_>, Vec<_>) =
            metas.into_iter().partition(|put| put.desired.needs.iter().any(|name| missing.contains(name)));
        metrics.held(held.len());

        let mut stuck: Vec<_> = held.into_iter().map(|put| put.desired.id.clone()).collect();
        self.hold(&stuck);
        stuck.extend(blind.iter().filter(|id| id.kind == Kind::ReleaseMeta).cloned());
        stuck.extend(self.put(metas).await.into_iter().map(|put| put.desired.id.clone()));
        stuck.extend(self.delete(old_metas).await.into_iter().map(|delete| delete.id));

        // A release meta that could not be brought forward, or not be read, may still point to the templates of its module.
        let pointed_to = |template: &Delete| stuck.iter().any(|meta| template.id.is_of(&meta.name));
        let (waiting, free): (Vec<_>, Vec<_>) = old_templates.into_iter().partition(pointed_to);
        self.hold(&waiting.into_iter().map(|delete| delete.id).collect::<Vec<_>>());
        self.delete(free).await;
    }

    /// Applies objects; those that failed come back. A write that failed may have landed all the same.
    async fn put(&mut self, puts: Vec<Put>) -> Vec<Put> {
        let writes = stream::iter(puts).map(|put| {
            let runtime = self.runtime.clone();
            async move {
                let written = runtime.put(&put.desired).await;
                (put, written)
            }
        });
        let writes: Vec<_> = writes.buffer_unordered(CONCURRENCY).collect().await;
        let mut failed = Vec::new();
        for (put, written) in writes {
            let id = put.desired.id.clone();
            match written {
                Ok(Written { object, writes }) => {
                    self.done.written += writes;
                    self.inventory.unsure.remove(&id);
                    self.inventory.known.insert(id, Known::new(put.desired.hash, &object));
                }
                Err(source) => {
                    self.fail(id, Attempt::Apply, source);
                    failed.push(put);
                }
            }
        }
        failed
    }

    /// Deletes objects; those that failed come back.
    async fn delete(&mut self, deletes: Vec<Delete>) -> Vec<Delete> {
        let calls = stream::iter(deletes).map(|delete| {
            let runtime = self.runtime.clone();
            async move {
                let deleted = runtime.delete(&delete.id, &delete.uid).await;
                (delete, deleted)
            }
        });
        let calls: Vec<_> = calls.buffer_unordered(CONCURRENCY).collect().await;
        let mut failed = Vec::new();
        for (delete, deleted) in calls {
            match deleted {
                Ok(was_it) => {
                    self.inventory.known.remove(&delete.id);
                    self.inventory.unsure.remove(&delete.id);
                    self.done.deleted += usize::from(was_it);
                    if !was_it {
                        self.inventory.unsure.insert(delete.id);
                    }
                }
                Err(source) => {
                    self.fail(delete.id.clone(), Attempt::Delete, source);
                    failed.push(delete);
                }
            }
        }
        failed
    }

    fn fail(&mut self, id: ObjectId, attempt: Attempt, source: kube::Error) {
        self.inventory.unsure.insert(id.clone());
        self.failures.push(Failure { target: Target::Object(id), attempt, source });
    }

    fn hold(&mut self, ids: &[ObjectId]) {
        self.held += ids.len();
        self.inventory.unsure.extend(ids.iter().cloned());
    }
}

/// Another version is there, or one where none was.
fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found())
}

/// What a list of everything found.
#[derive(Default)]
struct Survey {
    steps: Steps,
    known: ShortMap<ObjectId, Known>,
    seen: BTreeSet<ObjectId>,
}

/// Deletes everything that is ours, release metas first. A kind that the runtime does not serve has no objects.
pub(super) async fn remove_all(runtime: &Runtime, inventory: &mut Inventory) -> Result<Synced, SyncError> {
    let nothing = Wanted::new([]);
    let mut pass = Pass { runtime, inventory, failures: Vec::new(), held: 0, done: Synced::default() };
    for kind in Kind::ALL.into_iter().rev() {
        let mut survey = Survey::default();
        match pass.survey(kind, &nothing, &mut survey).await {
            Ok(()) => drop(pass.delete(survey.steps.deletes).await),
            Err(error) if error.says_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    let Pass { failures, done, .. } = pass;
    Failures::new(failures, 0).map_or(Ok(done), |failures| Err(SyncError::Objects(failures)))
}
