//! User CRs that block the removal of a module: all objects of the kinds that it manages, in all namespaces, less those
//! that it brought itself. An object that is being deleted still blocks: its finalizers need the module's operator.

use std::{collections::BTreeSet, fmt};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, PartialObjectMeta},
};
use tidewatch_shared::{
    api::{CustomResourcePolicy, Manifest},
    names::annotation,
};

use super::{
    inventory::{Inventory, ObjectKey},
    search::SearchError,
};
use crate::kube::{
    kinds::{Definition, Kinds, ServedKind, is_unserved},
    runtime_access::{ListError, ListLimits, list_map},
};

/// Objects that a sentence names.
const MAX_NAMED: usize = 5;
/// User CRs of one kind that are counted. More of them are not listed.
const MAX_COUNTED: usize = 500;
/// Concurrent requests to one runtime cluster.
const CONCURRENT_REQUESTS: usize = 4;
/// Longest name of an object in Kubernetes, in characters; names come from a runtime's API server.
const MAX_NAME_CHARS: usize = 253;

/// User CRs that block the removal of a module. The text names at most five of them, in an order that stays the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Blockers {
    /// The first ones.
    named: Vec<ObjectKey>,
    /// Number of the others.
    others: usize,
    /// There are more than were listed.
    has_more: bool,
}

impl Blockers {
    /// Returns true if nothing blocks the removal.
    pub(super) fn is_empty(&self) -> bool {
        self.named.is_empty()
    }
}

impl fmt::Display for Blockers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, ObjectKey { kind, namespace, name, .. }) in self.named.iter().enumerate() {
            let comma = if n == 0 { "" } else { ", " };
            let slash = if namespace.is_empty() { "" } else { "/" };
            write!(f, "{comma}{kind} {namespace}{slash}{name}")?;
        }
        match (self.has_more, self.others) {
            (true, _) => f.write_str(" and many more"),
            (false, 0) => Ok(()),
            (false, others) => write!(f, " and {others} more"),
        }
    }
}

/// Listed objects of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Listed {
    objects: BTreeSet<ObjectKey>,
    /// The list ended before the last object.
    is_cut: bool,
}

/// Selects the user CRs among listed objects: those that are neither in the inventory nor the default module CR, if
/// that is deleted with the module.
fn blockers(listed: &[Listed], exempt: &Exempt<'_>) -> Blockers {
    let is_users = |key: &&ObjectKey| !exempt.contains(key);
    let users: BTreeSet<_> = listed.iter().flat_map(|it| &it.objects).filter(is_users).collect();
    Blockers {
        named: users.iter().copied().take(MAX_NAMED).cloned().collect(),
        others: users.len().saturating_sub(MAX_NAMED),
        has_more: listed.iter().any(|it| it.is_cut),
    }
}

/// Objects that do not block the removal.
struct Exempt<'a> {
    inventory: &'a Inventory,
    /// The default module CR, if it is deleted with the module.
    default: Option<ObjectKey>,
}

impl<'a> Exempt<'a> {
    fn of(manifest: &Manifest, inventory: &'a Inventory) -> Self {
        let is_deleted = manifest.spec.policy() == CustomResourcePolicy::CreateAndDelete;
        Self { inventory, default: manifest.spec.resource().filter(|_| is_deleted).map(ObjectKey::of) }
    }

    fn keys(&self) -> impl Iterator<Item = &ObjectKey> {
        self.inventory.entries().map(|(key, _)| key).chain(&self.default)
    }

    /// A listed object without a namespace is cluster-scoped: then the namespace of an exempt one has no meaning.
    fn contains(&self, listed: &ObjectKey) -> bool {
        if !listed.namespace.is_empty() {
            return self.inventory.contains(listed) || self.default.as_ref() == Some(listed);
        }
        let of_object =
            |key: &ObjectKey| (&key.group, &key.kind, &key.name) == (&listed.group, &listed.kind, &listed.name);
        self.keys().any(of_object)
    }

    fn count(&self, kind: &ServedKind<'_>) -> usize {
        self.keys().filter(|key| key.group == kind.group && key.kind == kind.kind).count()
    }
}

/// Finds the user CRs that block the removal of a module. The module manages the kind of its default CR, the kinds of
/// the CRDs in its inventory that exist and belong to it, and the `associated` ones, given as group and kind. A kind that
/// is not served has no objects.
///
/// # Errors
/// A request failed: then it is not known what blocks the removal.
pub(super) async fn find(
    client: &Client,
    kinds: &mut Kinds,
    manifest: &Manifest,
    inventory: &Inventory,
    associated: &[(String, String)],
) -> Result<Blockers, SearchError> {
    let exempt = Exempt::of(manifest, inventory);
    let definitions = definitions(client, manifest, inventory).await?;
    let mut listed = list_defined(client, &definitions, &exempt).await?;
    let default = manifest.spec.resource().map(ObjectKey::of).map(|key| (key.group, key.kind));
    let mut others: BTreeSet<_> = associated.iter().cloned().chain(default).collect();
    for kind in definitions.iter().filter_map(Definition::preferred) {
        others.remove(&(kind.group.to_owned(), kind.kind.to_owned()));
    }
    for (group, kind) in others {
        listed.extend(list_located(client, kinds, &group, &kind, &exempt).await?);
    }
    Ok(blockers(&listed, &exempt))
}

/// Reads the CRDs of the inventory that exist and do not belong to another Manifest. One without an owner counts: the
/// next apply makes it ours again.
async fn definitions(
    client: &Client,
    manifest: &Manifest,
    inventory: &Inventory,
) -> Result<Vec<Definition>, SearchError> {
    let names = inventory.entries().filter(|(key, _)| key.is_definition()).map(|(key, _)| key.name.clone());
    let requests: Vec<_> = names.map(|name| read_definition(client, name)).collect();
    let read = stream::iter(requests).buffered(CONCURRENT_REQUESTS).try_collect::<Vec<_>>().await?;
    let owner = format!("{}/{}", manifest.namespace().unwrap_or_default(), manifest.name_any());
    let is_ours = |definition: &Definition| {
        let annotations = definition.metadata.annotations.as_ref();
        annotations.and_then(|all| all.get(annotation::OWNED_BY)).is_none_or(|owned_by| *owned_by == owner)
    };
    Ok(read.into_iter().flatten().filter(is_ours).collect())
}

async fn read_definition(client: &Client, name: String) -> Result<Option<Definition>, SearchError> {
    Definition::read(client, &name).await.map_err(|source| SearchError::Definition { name, source })
}

/// Lists the objects of the kinds that CRDs define.
async fn list_defined(
    client: &Client,
    definitions: &[Definition],
    exempt: &Exempt<'_>,
) -> Result<Vec<Listed>, SearchError> {
    let kinds = definitions.iter().filter_map(|definition| Some((definition, definition.preferred()?)));
    let requests: Vec<_> = kinds
        .map(|(definition, kind)| async move {
            match list(client, kind, exempt.count(&kind)).await {
                Ok(listed) => Ok(listed),
                Err(source) if is_unserved(&source) && !exists(client, definition).await? => Ok(Listed::default()),
                Err(source) => Err(SearchError::List { kind: kind.kind.to_owned(), source }),
            }
        })
        .collect();
    stream::iter(requests).buffered(CONCURRENT_REQUESTS).try_collect().await
}

/// Returns false if a CRD is gone by now, or if its kind was never served.
async fn exists(client: &Client, definition: &Definition) -> Result<bool, SearchError> {
    let name = definition.metadata.name.clone().unwrap_or_default();
    let current = read_definition(client, name).await?;
    Ok(current.is_some_and(|definition| definition.is_established()))
}

/// Lists the objects of a kind whose CRD is not in the inventory. `None` if the kind is not served.
async fn list_located(
    client: &Client,
    kinds: &mut Kinds,
    group: &str,
    kind: &str,
    exempt: &Exempt<'_>,
) -> Result<Option<Listed>, SearchError> {
    let failed = |source| SearchError::List { kind: kind.to_owned(), source };
    match list_in_any_version(client, kinds, group, kind, exempt).await? {
        // The known version may be out of date.
        Some(Err(error)) if is_unserved(&error) => {
            kinds.invalidate(group);
            list_in_any_version(client, kinds, group, kind, exempt).await?.transpose().map_err(failed)
        }
        listed => listed.transpose().map_err(failed),
    }
}

async fn list_in_any_version(
    client: &Client,
    kinds: &mut Kinds,
    group: &str,
    kind: &str,
    exempt: &Exempt<'_>,
) -> Result<Option<kube::Result<Listed>>, SearchError> {
    let located = kinds.locate(client, group, kind).await;
    let Some(located) = located.map_err(|source| SearchError::Kind { kind: kind.to_owned(), source })? else {
        return Ok(None);
    };
    let served = located.view();
    Ok(Some(list(client, served, exempt.count(&served)).await))
}

/// Lists objects of a kind in all namespaces, at least all `exempt` ones and [`MAX_COUNTED`] others if there are so many.
async fn list(client: &Client, kind: ServedKind<'_>, exempt: usize) -> kube::Result<Listed> {
    let api: Api<PartialObjectMeta> = kind.api(client, "");
    let mut objects = BTreeSet::new();
    let keep = |object: PartialObjectMeta| {
        objects.insert(ObjectKey {
            group: kind.group.to_owned(),
            kind: kind.kind.to_owned(),
            namespace: clean(&object.namespace().unwrap_or_default()),
            name: clean(&object.name_any()),
        });
    };
    let limits = ListLimits { objects: exempt + MAX_COUNTED, ..ListLimits::default() };
    match list_map(&api, &ListParams::default(), &limits, keep).await {
        Ok(_) => Ok(Listed { objects, is_cut: false }),
        Err(ListError::Objects(_)) if objects.len() > exempt => Ok(Listed { objects, is_cut: true }),
        Err(ListError::Page(error)) => Err(error),
        Err(error) => Err(kube::Error::Service(error.into())),
    }
}

/// A name for a message.
fn clean(name: &str) -> String {
    name.chars().filter(|char| !char.is_control()).take(MAX_NAME_CHARS).collect()
}

#[cfg(test)]
mod tests;
