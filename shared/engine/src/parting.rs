//! Objects of the inventory that leave a Manifest: they are deleted, handed over to another module, or released.

use std::collections::BTreeSet;

use futures::{StreamExt as _, future::join_all, stream};
use kube::{ResourceExt as _, api::DynamicObject};
use serde_json::{Value, json};
use tidewatch_api::{
    CustomResourcePolicy, Manifest,
    names::{annotation, label},
};
use tidewatch_cluster::{object, runtime_access::retain};

use super::{
    StoreError, aggregated, default_object,
    execution::{CONCURRENCY, Execution},
    failure::Failure,
    inventory::{Inventory, ObjectKey},
    keeping,
    kept::is_marked,
    module::keeps_default,
    remote::Remote,
    sharing::{Holder, Parting, Sharing},
    step::Seen,
};

/// End of an object that no other Manifest needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Departure {
    /// It is deleted, unless it has data of users: the module stays without it.
    Prune,
    /// It is deleted with the module.
    Delete,
    /// It stays without our label: the module becomes unmanaged.
    Release,
}

impl Departure {
    const fn verb(self) -> &'static str {
        match self {
            Self::Prune | Self::Delete => "delete",
            Self::Release => "remove our label from",
        }
    }
}

/// Result for one object.
struct Parted {
    seen: Seen,
    /// One sentence about an object that stays.
    remark: Option<String>,
}

impl From<Seen> for Parted {
    fn from(seen: Seen) -> Self {
        Self { seen, remark: None }
    }
}

/// Kinds of which user CRs block a removal.
pub(super) struct BlockingKinds {
    pub(super) manifest: Manifest,
    pub(super) inventory: Inventory,
    /// API groups of the CRDs that stay with another module.
    pub(super) kept_groups: BTreeSet<String>,
}

impl Execution<'_> {
    /// Lets objects of the inventory leave. A kind that is not served has no objects.
    ///
    /// # Errors
    /// The store does not return the other Manifests.
    pub(super) async fn part(&mut self, mut keys: Vec<ObjectKey>, departure: Departure) -> Result<(), StoreError> {
        let mut aggregated = Vec::new();
        if departure != Departure::Release {
            aggregated = self.aggregated_roles(&keys).await;
            keys.retain(|key| !aggregated.contains(key));
        }
        for keys in [aggregated, keys] {
            self.part_in_any_order(&keys, departure).await?;
        }
        Ok(())
    }

    /// The aggregated ClusterRoles among these objects. Their controller sees the deletions in their order: it does not
    /// apply a role again that went before those that the role selects.
    async fn aggregated_roles(&mut self, keys: &[ObjectKey]) -> Vec<ObjectKey> {
        let roles: Vec<_> = keys.iter().filter(|key| aggregated::is_cluster_role(key)).collect();
        let Some(role) = roles.first().filter(|_| roles.len() > 1) else { return Vec::new() };
        // A failure is found again, and reported, when the object is deleted.
        let Ok(Some(Remote { api, .. })) = self.locate(role).await else { return Vec::new() };
        let reads = roles.into_iter().map(|key| {
            retain(async {
                let found = object::get_metadata(&api, &key.name).await.ok().flatten();
                found.filter(|found| aggregated::is_aggregated(key, found)).map(|_| key.clone())
            })
        });
        let found: Vec<_> = stream::iter(reads.collect::<Vec<_>>()).buffered(CONCURRENCY).collect().await;
        found.into_iter().flatten().collect()
    }

    async fn part_in_any_order(&mut self, keys: &[ObjectKey], departure: Departure) -> Result<(), StoreError> {
        for chunk in keys.chunks(CONCURRENCY) {
            // The inventory of another Manifest may have grown since the reconcile began.
            self.look_at_others().await?;
            if self.turn.is_none() && chunk.iter().any(|key| self.sharing.may_be_owned(key)) {
                self.turn = Some(self.engine.memories.turns.next(&self.request.cluster.key).await);
                self.look_at_others().await?;
            }
            let mut located = Vec::new();
            for key in chunk {
                located.push(self.locate(key).await);
            }
            let this = &*self;
            let requests: Vec<_> =
                located.into_iter().map(|located| retain(this.part_from(located, departure))).collect();
            let results = join_all(requests).await;
            for (key, mut result) in chunk.iter().zip(results) {
                if result.as_ref().is_err_and(|failure| failure.is_unserved) {
                    // The CRD is gone, or serves another version by now.
                    self.kinds.invalidate(&key.group);
                    let located = self.locate(key).await;
                    result = self.part_from(located, departure).await;
                }
                let Parted { seen, remark } = result.unwrap_or_else(|failure| {
                    self.results.failures.push(failure);
                    Seen::Failed.into()
                });
                // A removal that has to wait again compares what it has deleted.
                self.memory.doubt(key);
                self.facts.seen.insert(key.clone(), seen);
                self.results.remarks.extend(remark.map(|remark| (key.clone(), remark)));
            }
            self.wake_late_heirs(chunk).await?;
        }
        Ok(())
    }

    /// Kinds of which user CRs block the removal: a CRD that stays with another Manifest keeps its resources. Returns the
    /// Manifest and the inventory without them, and without the default module CR that another Manifest of the module keeps.
    pub(super) fn blocking_kinds(&self) -> BlockingKinds {
        let mut manifest = self.record.manifest.clone();
        let mut inventory = self.facts.inventory.clone();
        let mut kept_groups = BTreeSet::new();
        let stays = |key: &&ObjectKey| key.is_definition() && (key.is_common() || self.sharing.is_shared(key));
        for key in self.facts.inventory.keys().filter(stays) {
            kept_groups.extend(key.name.split_once('.').map(|(_, group)| group.to_owned()));
            inventory.shrink(key);
        }
        let is_kept = |default: &ObjectKey| self.heirs.iter().any(|heir| keeps_default(heir, default));
        let default = default_object::of(&manifest).filter(is_kept);
        if manifest.spec.resource().map(ObjectKey::of).as_ref().is_some_and(is_kept) {
            manifest.spec.resource = None;
        }
        if let Some(default) = default {
            manifest.annotations_mut().remove(annotation::CREATED_DEFAULT);
            manifest.spec.custom_resource_policy = Some(CustomResourcePolicy::Ignore);
            inventory.grow(&default, "");
        }
        BlockingKinds { manifest, inventory, kept_groups }
    }

    async fn look_at_others(&mut self) -> Result<(), StoreError> {
        let others = self.request.store.others(&self.record.manifest).await?;
        let rendered = self.facts.rendered.unwrap_or_default().iter().map(|object| &object.key);
        let objects = self.facts.inventory.keys().chain(rendered);
        self.sharing = Sharing::of(&self.record.manifest, &others, objects);
        Ok(())
    }

    /// A Manifest that recorded one of these objects while it was deleted may have seen it before.
    async fn wake_late_heirs(&mut self, keys: &[ObjectKey]) -> Result<(), StoreError> {
        let before = std::mem::take(&mut self.sharing);
        self.look_at_others().await?;
        for key in keys.iter().filter(|key| !before.is_shared(key)) {
            if let Some(heir) = self.sharing.heir(key) {
                self.request.store.wake(&heir.key);
            }
        }
        Ok(())
    }

    async fn part_from(
        &self,
        located: Result<Option<Remote<'_>>, Failure>,
        departure: Departure,
    ) -> Result<Parted, Failure> {
        let Some(remote) = located? else { return Ok(Seen::Absent.into()) };
        let remote = &remote;
        let key = remote.key;
        let Some(found) = remote.read_metadata(departure.verb()).await? else { return Ok(Seen::Absent.into()) };
        match self.sharing.parting(key, &found) {
            // The controller of aggregated roles has created it again.
            Parting::Withdraw if departure != Departure::Release && aggregated::is_leftover(key, &found) => {
                delete_found(remote, &found).await.map(Parted::from)
            }
            Parting::HandOver(heir) => {
                self.hand_over(remote, &found, heir).await?;
                if departure != Departure::Release && !self.sharing.has_successor(key) {
                    self.end_joining(remote, &found).await?;
                }
                Ok(Seen::Absent.into())
            }
            Parting::Delete if departure == Departure::Release => unlabel(remote).await.map(Parted::from),
            Parting::Delete => self.delete_unless_kept(remote, &found, departure).await,
            // Somebody has removed the annotation.
            Parting::Withdraw if departure == Departure::Release && !is_owned(&found) => {
                unlabel(remote).await.map(Parted::from)
            }
            // Fields that an unmanaged module has added to an object of another one stay with its own objects.
            Parting::Withdraw if departure == Departure::Release => Ok(Seen::Absent.into()),
            Parting::Withdraw => {
                if !self.sharing.has_successor(key) {
                    self.end_joining(remote, &found).await?;
                }
                Ok(Seen::Absent.into())
            }
        }
    }

    /// Deletes an object, unless a marker or data of users keep it. While the module stays, such an object stays in the
    /// inventory, and is looked at again; otherwise it is left to the user.
    async fn delete_unless_kept(
        &self,
        remote: &Remote<'_>,
        found: &DynamicObject,
        departure: Departure,
    ) -> Result<Parted, Failure> {
        let key = remote.key;
        if is_marked(found) {
            return self.leave_behind(remote, "its marker").await;
        }
        if found.metadata.deletion_timestamp.is_some() {
            return Ok(Seen::Terminating.into());
        }
        let is_prune = departure == Departure::Prune;
        let of_deletion =
            |failure: Failure| Failure { operation: format!("delete {key}: {}", failure.operation), ..failure };
        match self.find_content(remote, is_prune).await.map_err(of_deletion)? {
            Some(content) if is_prune => Ok(Parted { seen: Seen::Kept, remark: Some(keeping::remark(key, &content)) }),
            Some(content) => self.leave_behind(remote, &content.to_string()).await,
            None => delete_found(remote, found).await.map(Parted::from),
        }
    }

    async fn leave_behind(&self, remote: &Remote<'_>, cause: &str) -> Result<Parted, Failure> {
        unlabel(remote).await?;
        tracing::warn!(manifest = %self.key, object = %remote.key, cause, "Object of the module stays in the runtime");
        Ok(Seen::Absent.into())
    }

    /// Makes another Manifest the owner of an object, and has it reconciled: it applies its own fields, and removes ours.
    async fn hand_over(&self, remote: &Remote<'_>, found: &DynamicObject, heir: &Holder) -> Result<(), Failure> {
        let key = remote.key;
        let marks = json!({"metadata": {"uid": found.uid(), "resourceVersion": found.resource_version(),
            "annotations": {annotation::OWNED_BY: heir.owner}}});
        let operation = format!("hand {key} over to the module {}", heir.module);
        remote.merge_metadata("hand over", marks).await.map_err(|failure| Failure { operation, ..failure })?;
        tracing::info!(manifest = %self.key, object = %key, heir = %heir.key, "Object is handed over to another module");
        self.request.store.wake(&heir.key);
        Ok(())
    }

    /// An object of a kind in any version that the runtime serves; `None` if it serves none.
    pub(super) async fn locate<'k>(&mut self, key: &'k ObjectKey) -> Result<Option<Remote<'k>>, Failure> {
        let client = &self.request.cluster.client;
        let kind = self.kinds.locate(client, &key.group, &key.kind).await;
        let kind = kind.map_err(Failure::during(format!("find the kind of {key}")))?;
        Ok(kind.map(|kind| {
            let api = kind.api(client, &key.namespace);
            Remote { key, version: kind.version.to_string(), api }
        }))
    }
}

fn is_owned(found: &DynamicObject) -> bool {
    found.annotations().contains_key(annotation::OWNED_BY)
}

async fn delete_found(remote: &Remote<'_>, found: &DynamicObject) -> Result<Seen, Failure> {
    Ok(match remote.delete(found).await? {
        // Its controller may apply it once more: the next reconcile looks at it again.
        None if aggregated::is_aggregated(remote.key, found) => Seen::Terminating,
        None => Seen::Absent,
        Some(_) => Seen::Terminating,
    })
}

async fn unlabel(remote: &Remote<'_>) -> Result<Seen, Failure> {
    let marks = json!({"metadata": {"labels": {label::MANAGED_BY: Value::Null}}});
    let exists = remote.merge_metadata(Departure::Release.verb(), marks).await?;
    Ok(if exists { Seen::Current } else { Seen::Absent })
}
