//! Objects that are not deleted although the module does not need them any more: those with a marker, and those with data of
//! users. A version that no longer contains a CRD, a Namespace or a PersistentVolumeClaim must not delete what users have
//! stored.

mod namespace;

use std::{collections::BTreeMap, fmt};

use kube::{
    Api, Client,
    api::{ListParams, PartialObjectMeta},
};
use tidewatch_api::names::annotation;
use tidewatch_cluster::{
    kinds::{Definition, Kind, is_unserved},
    runtime_access::list_first,
};
use tidewatch_kit::foreign_text::{MAX_NAME_BYTES, line};

use super::{
    execution::Execution,
    failure::Failure,
    inventory::{Inventory, ObjectKey},
    kept::{dropped, is_marked},
    remote::Remote,
    render::RenderedObject,
    sharing::Sharing,
    step::Seen,
};

/// Objects of one kind that are looked at; more of them count as content.
const MAX_LISTED: u16 = 100;

/// Cause that keeps an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A resource of a CRD, or an object in a Namespace.
    Object(ObjectKey),
    /// More objects of this kind than are looked at.
    Many(String),
    /// Volume of a PersistentVolumeClaim.
    Volume(String),
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object(key) => key.fmt(f),
            Self::Many(kind) => write!(f, "many objects of the kind {kind}"),
            Self::Volume(name) => write!(f, "its volume {name}"),
        }
    }
}

/// One sentence about an object that a version does not contain and that stays.
pub(super) fn remark(key: &ObjectKey, content: &Content) -> String {
    let until = match content {
        Content::Volume(_) => "delete it if nobody needs its data",
        _ if key.is_definition() => "it is deleted once none of its resources is left",
        _ => "it is deleted once nothing of others is left in it",
    };
    let dropped = dropped(&key.to_string());
    format!(
        "{dropped}, and stays because of {content}: {until}, or let it stay with the annotation {}=true",
        annotation::KEEP
    )
}

/// Objects of a module that say nothing about users.
pub(super) struct Own<'a> {
    pub(super) inventory: &'a Inventory,
    pub(super) rendered: &'a [RenderedObject],
    /// Results for objects of the inventory that were to leave before.
    pub(super) seen: &'a BTreeMap<ObjectKey, Seen>,
    pub(super) sharing: &'a Sharing,
}

impl Own<'_> {
    /// Returns true for an object that leaves as well. One that the module still contains, that stays for its data, or that
    /// another module has, too, needs what it is in.
    fn leaves(&self, key: &ObjectKey) -> bool {
        let stays = self.seen.get(key) == Some(&Seen::Kept) || self.sharing.is_shared(key);
        self.inventory.contains(key) && !stays && !self.rendered.iter().any(|object| object.key == *key)
    }
}

impl Execution<'_> {
    /// Looks for something in an object that its deletion would destroy. PersistentVolumeClaims go with the whole module, and
    /// stay if one version drops them.
    pub(super) async fn find_content(&self, remote: &Remote<'_>, is_prune: bool) -> Result<Option<Content>, Failure> {
        let key = remote.key;
        let own = Own {
            inventory: &self.facts.inventory,
            rendered: self.facts.rendered.filter(|_| is_prune).unwrap_or_default(),
            seen: &self.facts.seen,
            sharing: &self.sharing,
        };
        match (key.group.as_str(), key.kind.as_str()) {
            _ if key.is_definition() => of_definition(&self.request.cluster.client, &key.name, &own).await,
            ("", "Namespace") => namespace::content(&self.request.cluster.client, &key.name, &own).await,
            ("", "PersistentVolumeClaim") if is_prune => of_claim(remote).await,
            _ => Ok(None),
        }
    }
}

/// Any resource of the kind that a CRD defines; those that the module itself contains in this version, too.
async fn of_definition(client: &Client, name: &str, own: &Own<'_>) -> Result<Option<Content>, Failure> {
    let read = Definition::read(client, name).await.map_err(Failure::during(format!("read the CRD {name}")));
    let Some(definition) = read? else { return Ok(None) };
    let Some(kind) = definition.preferred() else { return Ok(None) };
    let api: Api<PartialObjectMeta> = kind.api(client, "");
    let listed = match list_first(&api, &ListParams::default(), MAX_LISTED).await {
        Ok(listed) => listed,
        // It was never served.
        Err(error) if is_unserved(&error) && !definition.is_established() => return Ok(None),
        Err(error) => return Err(Failure::new(format!("list the objects of the kind {}", kind.kind), &error)),
    };
    Ok(first_of_others(&kind, &listed, |key, _| own.leaves(key)))
}

/// The volume of a claim. One that was never bound has no data.
async fn of_claim(remote: &Remote<'_>) -> Result<Option<Content>, Failure> {
    let found = remote.read("read").await?;
    let volume =
        found.and_then(|found| found.data["spec"]["volumeName"].as_str().map(|name| line(name, MAX_NAME_BYTES)));
    Ok(volume.filter(|name| !name.is_empty()).map(Content::Volume))
}

/// The first listed object that is not exempt, or has a marker, if there is one; a full page of exempt ones may have others
/// behind it.
fn first_of_others(
    kind: &Kind,
    listed: &[PartialObjectMeta],
    is_exempt: impl Fn(&ObjectKey, &PartialObjectMeta) -> bool,
) -> Option<Content> {
    for object in listed {
        let key = ObjectKey::listed(kind, object);
        if is_marked(object) || !is_exempt(&key, object) {
            return Some(Content::Object(key));
        }
    }
    (listed.len() >= usize::from(MAX_LISTED)).then(|| Content::Many(kind.kind.to_string()))
}
