//! User CRs that block the removal of a module: all objects of the kinds that it manages, in all namespaces, less those
//! that it brought itself, those that go with its default CR, and those with a marker that keeps them. An object that is
//! being deleted still blocks: its finalizers need the module's operator.
//!
//! A module may manage kinds whose CRDs its operator installs: its team lists them as associated. Such a kind may be
//! another one's as well, so that an annotation on its CRD lets the resources stay.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use jiff::SignedDuration;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, PartialObjectMeta},
};
use tidewatch_api::{
    CustomResourcePolicy, Manifest,
    names::{annotation, field_manager},
};
use tidewatch_cluster::{
    kinds::{Definition, Kind, Kinds},
    runtime_access::{ListError, ListLimits, list_map},
};

use super::{
    default_object,
    execution::CONCURRENT_LISTS,
    failure::Failure,
    inventory::{Inventory, ObjectKey, owner_of, split_api_version},
    kept::is_marked,
    search::{in_served_version, locate},
};

/// Objects that a sentence names.
const MAX_NAMED: usize = 5;
/// User CRs of one kind that are counted. More of them are not listed.
const MAX_COUNTED: usize = 500;
/// Objects of one kind that are listed while none of them is surely of a user.
const MAX_LISTED: usize = 5_000;
/// Owners between an object and the default module CR.
const MAX_GENERATIONS: usize = 8;
/// A CRD that is older than a Manifest by more than this was there before it.
const CLOCK_DIFFERENCE: SignedDuration = SignedDuration::from_secs(60);

/// CRs in a sentence: at most five of them are named, in an order that stays the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ObjectList {
    /// The first ones.
    named: Vec<ObjectKey>,
    /// Number of the others.
    others: usize,
    /// There are more than were listed.
    has_more: bool,
    /// CRDs of associated kinds among them.
    associated: BTreeSet<String>,
}

impl ObjectList {
    fn of(objects: &BTreeSet<&ObjectKey>) -> Self {
        let named = objects.iter().take(MAX_NAMED).map(|key| (*key).clone()).collect();
        Self { named, others: objects.len().saturating_sub(MAX_NAMED), ..Self::default() }
    }

    /// Returns true if there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.named.is_empty() && !self.has_more
    }
}

impl fmt::Display for ObjectList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named: Vec<_> = self.named.iter().map(ToString::to_string).collect();
        f.write_str(&named.join(", "))?;
        match (self.has_more, self.others) {
            (true, _) if self.named.is_empty() => f.write_str("more resources than are listed")?,
            (true, _) => f.write_str(" and many more")?,
            (false, 0) => {}
            (false, others) => write!(f, " and {others} more")?,
        }
        if self.associated.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = self.associated.iter().take(MAX_NAMED).map(String::as_str).collect();
        write!(f, "; the annotation {}=true on the CRD lets them stay: {}", annotation::ALLOW_REMOVAL, names.join(", "))
    }
}

/// CRs of the kinds of a module, as a removal finds them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Those of users.
    pub(super) blockers: ObjectList,
    /// The default module CRs, which are deleted with the module: the declared one, and any that was created as such.
    pub(super) defaults: BTreeSet<ObjectKey>,
    /// Those that exist because of a default module CR, and go with it.
    pub(super) children: ObjectList,
}

/// Listed objects of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Listed {
    /// Group and kind.
    kind: (String, String),
    is_namespaced: bool,
    objects: BTreeMap<ObjectKey, Origin>,
    /// The list ended before the last object.
    is_cut: bool,
    /// The CRD of a kind that is the module's only because its team lists it as associated.
    associated: Option<String>,
}

impl Listed {
    /// The declared default module CR alone, if it is deleted with the module.
    fn only(mut self, exempt: &Exempt<'_>) -> Self {
        self.objects.retain(|key, _| exempt.is_declared(key));
        Self { is_cut: false, ..self }
    }
}

/// Origin of an object by its metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Origin {
    /// It was created as a default module CR.
    is_default: bool,
    /// Group, kind and name of its owners.
    owners: Vec<(String, String, String)>,
}

impl Origin {
    fn of(object: &PartialObjectMeta) -> Self {
        let mut managers = object.managed_fields().iter().filter_map(|entry| entry.manager.as_deref());
        let owners = object.owner_references().iter().map(|owner| {
            let (group, _) = split_api_version(&owner.api_version);
            (group.to_owned(), owner.kind.clone(), owner.name.clone())
        });
        Self { is_default: managers.any(|manager| manager == field_manager::DEFAULT_OBJECT), owners: owners.collect() }
    }
}

/// Sorts the listed objects.
fn sort(listed: &[Listed], exempt: &Exempt<'_>) -> Found {
    let objects = || listed.iter().flat_map(|it| &it.objects);
    let mut defaults: BTreeSet<ObjectKey> = exempt.default.iter().map(|key| in_scope(key, listed)).collect();
    if exempt.deletes_defaults {
        // One of an associated kind may be that of another module.
        let own = listed.iter().filter(|it| it.associated.is_none()).flat_map(|it| &it.objects);
        defaults.extend(own.filter(|(_, origin)| origin.is_default).map(|(key, _)| key.clone()));
    }
    let is_ours = |key: &ObjectKey| defaults.contains(key) || exempt.is_recorded(key);
    let others: BTreeMap<_, _> = objects().filter(|(key, _)| !is_ours(key)).collect();
    let children = children(&others, &defaults);
    let users = others.keys().copied().filter(|key| !children.contains(key)).collect::<BTreeSet<_>>();
    let blocks = |it: &&Listed| it.is_cut || it.objects.keys().any(|key| users.contains(key));
    let associated = listed.iter().filter(blocks).filter_map(|it| it.associated.clone()).collect();
    let has_more = listed.iter().any(|it| it.is_cut);
    let blockers = ObjectList { has_more, associated, ..ObjectList::of(&users) };
    let children = ObjectList::of(&children);
    Found { blockers, defaults, children }
}

/// The key as the objects of its kind are listed: without a namespace if the kind is cluster-scoped.
fn in_scope(key: &ObjectKey, listed: &[Listed]) -> ObjectKey {
    let is_of = |it: &Listed| it.kind.0 == key.group && it.kind.1 == key.kind && !it.is_namespaced;
    let namespace = if listed.iter().any(is_of) { String::new() } else { key.namespace.clone() };
    ObjectKey { namespace, ..key.clone() }
}

/// Selects the objects all of whose owners are default module CRs, or such objects themselves: Kubernetes deletes them with
/// their owners. An owner in another namespace is none.
fn children<'a>(others: &BTreeMap<&'a ObjectKey, &Origin>, defaults: &BTreeSet<ObjectKey>) -> BTreeSet<&'a ObjectKey> {
    let mut found: BTreeSet<&ObjectKey> = BTreeSet::new();
    for _ in 0..MAX_GENERATIONS {
        let is_known = |key: &ObjectKey| defaults.contains(key) || found.contains(key);
        let is_owner = |(group, kind, name): &(String, String, String), namespace: &str| {
            let owner = |namespace: &str| ObjectKey::new(group, kind, namespace, name);
            is_known(&owner(namespace)) || is_known(&owner(""))
        };
        let is_child = |key: &ObjectKey, origin: &Origin| {
            !origin.owners.is_empty() && origin.owners.iter().all(|owner| is_owner(owner, &key.namespace))
        };
        let more: Vec<_> = others
            .iter()
            .filter(|(key, origin)| !found.contains(*key) && is_child(key, origin))
            .map(|(key, _)| *key)
            .collect();
        if more.is_empty() {
            break;
        }
        found.extend(more);
    }
    found
}

/// Objects that do not block the removal.
struct Exempt<'a> {
    inventory: &'a Inventory,
    /// Default module CRs are deleted with the module.
    deletes_defaults: bool,
    /// The declared default module CR, if it is deleted with the module.
    default: Option<ObjectKey>,
}

impl<'a> Exempt<'a> {
    fn of(manifest: &Manifest, inventory: &'a Inventory) -> Self {
        let deletes_defaults = manifest.spec.policy() == CustomResourcePolicy::CreateAndDelete;
        Self { inventory, deletes_defaults, default: default_object::of(manifest).filter(|_| deletes_defaults) }
    }

    /// A listed object without a namespace is cluster-scoped: then the namespace of a recorded one has no meaning.
    fn is_recorded(&self, listed: &ObjectKey) -> bool {
        let of_object =
            |key: &ObjectKey| (&key.group, &key.kind, &key.name) == (&listed.group, &listed.kind, &listed.name);
        self.inventory.contains(listed) || listed.namespace.is_empty() && self.inventory.keys().any(of_object)
    }

    fn is_declared(&self, listed: &ObjectKey) -> bool {
        let is_it = |key: &ObjectKey| {
            let has_namespace = listed.namespace.is_empty() || key.namespace == listed.namespace;
            has_namespace && (&key.group, &key.kind, &key.name) == (&listed.group, &listed.kind, &listed.name)
        };
        self.default.as_ref().is_some_and(is_it)
    }

    fn count(&self, kind: &Kind) -> usize {
        let keys = self.inventory.keys().chain(&self.default);
        keys.filter(|key| key.group == kind.group && key.kind == kind.kind).count()
    }
}

/// Finds the user CRs that block the removal of a module. The module manages the kinds of its default CRs, the kinds of
/// the CRDs in its inventory that exist and belong to it, and the associated ones that [`manages`]. A kind that is not
/// served has no objects. Of the kinds in `kept_groups`, whose CRDs stay with another module, only the declared default CR
/// goes.
///
/// # Errors
/// A request failed: then it is not known what blocks the removal.
pub(super) async fn find(
    client: &Client,
    kinds: &mut Kinds,
    manifest: &Manifest,
    inventory: &Inventory,
    kept_groups: &BTreeSet<String>,
) -> Result<Found, Failure> {
    let exempt = &Exempt::of(manifest, inventory);
    let definitions = definitions(client, manifest, inventory).await?;
    let of_definitions = list_defined(client, &definitions, exempt).await?;
    let mut listed: Vec<_> = of_definitions.into_iter().map(|(_, listed)| listed).collect();
    let defined = definitions.iter().filter_map(Definition::preferred);
    let known: BTreeSet<_> = defined.map(|kind| (kind.group.to_string(), kind.kind.to_string())).collect();
    let declared = manifest.spec.resource().map(ObjectKey::of);
    let defaults = declared.into_iter().chain(default_object::of(manifest)).map(|key| (key.group, key.kind));
    let defaults: BTreeSet<_> = defaults.filter(|kind| !known.contains(kind)).collect();
    let associated = associated(manifest).filter(|kind| !known.contains(kind) && !defaults.contains(kind));
    let associated: Vec<_> = associated.collect();
    let unknown = defaults.iter().chain(&associated).map(|(group, kind)| (group.as_str(), kind.as_str()));
    let action = "find the kinds of resources that block the removal".to_owned();
    kinds.prefetch(client, unknown.collect::<Vec<_>>()).await.map_err(Failure::during(action))?;
    for (group, kind) in &defaults {
        let list = |kind: Arc<Kind>| async move { list(client, &kind, exempt).await };
        let located = in_served_version(client, kinds, group, kind, list).await?;
        listed.extend(located.map(|listed| if kept_groups.contains(group) { listed.only(exempt) } else { listed }));
    }
    let mut managed = read_associated(client, kinds, &associated).await?;
    managed.retain(|definition| manages(manifest, definition));
    for (definition, found) in list_defined(client, &managed, exempt).await? {
        listed.push(Listed { associated: definition.metadata.name.clone(), ..found });
    }
    Ok(sort(&listed, exempt))
}

/// Group and kind of each associated kind.
fn associated(manifest: &Manifest) -> impl Iterator<Item = (String, String)> {
    let names = manifest.annotations().get(annotation::ASSOCIATED).map(String::as_str).unwrap_or_default();
    let kinds = names.split(',').filter_map(|name| name.split_once('.'));
    kinds.map(|(kind, group)| (group.to_owned(), kind.to_owned())).collect::<BTreeSet<_>>().into_iter()
}

/// True for an associated kind that the module manages: its CRD belongs to no other module, came after the Manifest, and does
/// not let its resources stay.
fn manages(manifest: &Manifest, definition: &Definition) -> bool {
    let annotations = definition.metadata.annotations.as_ref();
    let value = |name: &str| annotations.and_then(|all| all.get(name)).map(String::as_str);
    let created =
        [&definition.metadata, &manifest.metadata].map(|head| head.creation_timestamp.as_ref().map(|at| at.0));
    // The clocks of the two clusters may differ.
    let is_older = matches!(created, [Some(kind), Some(module)] if module.duration_since(kind) > CLOCK_DIFFERENCE);
    !is_older
        && value(annotation::OWNED_BY).is_none_or(|owned_by| owned_by == owner_of(manifest))
        && value(annotation::ALLOW_REMOVAL) != Some("true")
}

/// Reads the CRDs of kinds, given as group and kind. A kind that is not served has none.
async fn read_associated(
    client: &Client,
    kinds: &mut Kinds,
    associated: &[(String, String)],
) -> Result<Vec<Definition>, Failure> {
    let mut names = Vec::new();
    for (group, kind) in associated {
        let located = locate(client, kinds, group, kind).await?;
        names.extend(located.map(|located| format!("{}.{group}", located.plural)));
    }
    read_definitions(client, names).await
}

/// Reads the CRDs of the inventory that exist and do not belong to another Manifest. One without an owner counts: the
/// next apply makes it ours again.
async fn definitions(client: &Client, manifest: &Manifest, inventory: &Inventory) -> Result<Vec<Definition>, Failure> {
    let names = inventory.keys().filter(|key| key.is_definition()).map(|key| key.name.clone());
    let mut definitions = read_definitions(client, names.collect()).await?;
    let owner = owner_of(manifest);
    let is_ours = |definition: &Definition| {
        let annotations = definition.metadata.annotations.as_ref();
        annotations.and_then(|all| all.get(annotation::OWNED_BY)).is_none_or(|owned_by| *owned_by == owner)
    };
    definitions.retain(is_ours);
    Ok(definitions)
}

/// Reads those of several CRDs that exist.
async fn read_definitions(client: &Client, names: Vec<String>) -> Result<Vec<Definition>, Failure> {
    let requests: Vec<_> = names.into_iter().map(|name| read_definition(client, name)).collect();
    let read: Vec<_> = stream::iter(requests).buffered(CONCURRENT_LISTS).try_collect().await?;
    Ok(read.into_iter().flatten().collect())
}

async fn read_definition(client: &Client, name: String) -> Result<Option<Definition>, Failure> {
    Definition::read(client, &name).await.map_err(Failure::during(format!("read the CRD {name}")))
}

/// Lists the objects of the kinds that CRDs define, of each beside its CRD.
async fn list_defined<'a>(
    client: &Client,
    definitions: &'a [Definition],
    exempt: &Exempt<'_>,
) -> Result<Vec<(&'a Definition, Listed)>, Failure> {
    let kinds = definitions.iter().filter_map(|definition| Some((definition, definition.preferred()?)));
    let requests: Vec<_> = kinds
        .map(|(definition, kind)| async move {
            let listed = match list(client, &kind, exempt).await {
                Err(failure) if failure.is_unserved && !exists(client, definition).await? => Listed::default(),
                listed => listed?,
            };
            Ok::<_, Failure>((definition, listed))
        })
        .collect();
    stream::iter(requests).buffered(CONCURRENT_LISTS).try_collect().await
}

/// Returns false if a CRD is gone by now, or if its kind was never served.
async fn exists(client: &Client, definition: &Definition) -> Result<bool, Failure> {
    let name = definition.metadata.name.clone().unwrap_or_default();
    let current = read_definition(client, name).await?;
    Ok(current.is_some_and(|definition| definition.is_established()))
}

/// Lists objects of a kind in all namespaces: at least all exempt ones, and [`MAX_COUNTED`] others if there are so many.
async fn list(client: &Client, kind: &Kind, exempt: &Exempt<'_>) -> Result<Listed, Failure> {
    let limit = exempt.count(kind) + MAX_COUNTED;
    let listed = list_some(client, kind, limit).await?;
    let is_users = |(key, origin): (&ObjectKey, &Origin)| {
        origin.owners.is_empty() && !origin.is_default && !exempt.is_recorded(key) && !exempt.is_declared(key)
    };
    if listed.is_cut && limit < MAX_LISTED && !listed.objects.iter().any(is_users) {
        return list_some(client, kind, MAX_LISTED).await;
    }
    Ok(listed)
}

async fn list_some(client: &Client, kind: &Kind, limit: usize) -> Result<Listed, Failure> {
    let api: Api<PartialObjectMeta> = kind.api(client, "");
    let mut objects = BTreeMap::new();
    let keep = |object: PartialObjectMeta| {
        // It stays, and so does its CRD.
        if is_marked(&object) {
            return;
        }
        objects.insert(ObjectKey::listed(kind, &object), Origin::of(&object));
    };
    let limits = ListLimits { objects: limit, ..ListLimits::default() };
    let is_cut = match list_map(&api, &ListParams::default(), &limits, keep).await {
        Ok(_) => false,
        Err(ListError::Objects(_)) => true,
        Err(error) => return Err(Failure::new(format!("list the objects of the kind {}", kind.kind), &error.into())),
    };
    let kind_of = (kind.group.to_string(), kind.kind.to_string());
    Ok(Listed { kind: kind_of, is_namespaced: kind.namespaced, objects, is_cut, associated: None })
}

#[cfg(test)]
mod tests;
