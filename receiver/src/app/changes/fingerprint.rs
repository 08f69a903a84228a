//! What of an object matters to those whom it concerns. Equal essences wake nobody.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use aws_lc_rs::digest;
use kube::{ResourceExt, core::Resource};
use serde::Serialize;
use tidewatch_shared::api::{Kyma, ModuleReleaseMeta, ModuleStatus};

use crate::{
    base::key::KymaKey,
    controllers::{
        catalog::visibility::{Admission, Exclusion},
        kyma::is_our_note,
    },
};

/// Essences of one kind, by name.
pub(super) struct Essences<E>(HashMap<KymaKey, E>);

/// How an essence moved.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Moved<E> {
    /// It was not known before.
    New,
    /// It was another one.
    From(E),
}

impl<E: PartialEq> Essences<E> {
    pub(super) fn new() -> Self {
        Self(HashMap::new())
    }

    /// Takes the object as it is now; `None` if nothing that matters moved.
    pub(super) fn apply(&mut self, key: KymaKey, essence: E) -> Option<Moved<E>> {
        match self.0.insert(key.clone(), essence) {
            None => Some(Moved::New),
            Some(old) if Some(&old) == self.0.get(&key) => None,
            Some(old) => Some(Moved::From(old)),
        }
    }

    pub(super) fn delete(&mut self, key: &KymaKey) -> Option<E> {
        self.0.remove(key)
    }
}

/// Key of any namespaced object.
pub(super) fn key_of<K: Resource>(object: &K) -> KymaKey {
    KymaKey::new(object.namespace().unwrap_or_default(), object.name_any())
}

/// Metadata and generation: what a user or another controller of KCP decides. Hashes, because there is one for each object of KCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decided {
    labels: Hash,
    /// Generation, annotations that are not ours, and whether it is being deleted.
    rest: Hash,
}

type Hash = [u8; 32];

fn hash(value: &impl Serialize) -> Hash {
    let bytes = serde_json::to_vec(value).expect("plain data with string keys");
    let mut hash = Hash::default();
    hash.copy_from_slice(digest::digest(&digest::SHA256, &bytes).as_ref());
    hash
}

impl Decided {
    pub(super) fn of<K: Resource>(object: &K) -> Self {
        // Ours are written by the very passes that they would wake.
        let annotations: Vec<_> = object.annotations().iter().filter(|(key, _)| !is_our_note(key)).collect();
        let meta = object.meta();
        Self {
            labels: hash(object.labels()),
            rest: hash(&(meta.generation, annotations, meta.deletion_timestamp.is_some())),
        }
    }

    /// Whether labels differ, which decide what a Kyma may see.
    pub(super) fn labels_moved(&self, other: &Self) -> bool {
        self.labels != other.labels
    }
}

/// A release meta: all that somebody decided of it, and what of that matters to the modules of Kymas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Release {
    /// Labels and annotations of a release meta matter to catalogs alone.
    decided: Decided,
    /// Where its channels point.
    channels: BTreeMap<String, String>,
    /// Whom it admits.
    admission: Admission,
    /// What else a Kyma is told of the module.
    rest: Hash,
}

impl Release {
    /// `restricted` are the modules of `--restricted-default-modules`.
    pub(super) fn of(meta: &ModuleReleaseMeta, restricted: &BTreeSet<String>) -> Self {
        let channels = meta.spec.channels.iter().flatten();
        let channels = channels.map(|entry| (entry.channel.clone(), entry.version.clone())).collect();
        let rest = hash(&(&meta.spec.ocm_component_name, &meta.spec.versions, &meta.spec.mandatory));
        Self { decided: Decided::of(meta), channels, admission: Admission::of(meta, restricted), rest }
    }

    /// Whether it says something else than before of whether a Kyma with these labels may have the module, or why not.
    pub(super) fn admits_otherwise(&self, old: &Self, kyma_labels: &BTreeMap<String, String>) -> bool {
        verdict(&self.admission, kyma_labels) != verdict(&old.admission, kyma_labels)
    }

    /// Whether it says something else of the module or of its versions.
    pub(super) fn rest_moved(&self, old: &Self) -> bool {
        self.rest != old.rest
    }

    /// Channels that came, went or point elsewhere.
    pub(super) fn moved_channels(&self, old: &Self) -> Vec<String> {
        let names = self.channels.keys().chain(old.channels.keys());
        let mut moved: Vec<_> =
            names.filter(|name| self.channels.get(*name) != old.channels.get(*name)).cloned().collect();
        moved.sort_unstable();
        moved.dedup();
        moved
    }
}

/// Whether a Kyma with these labels is admitted, and why not where nobody is.
fn verdict<'a>(admission: &'a Admission, kyma_labels: &BTreeMap<String, String>) -> Result<(), Option<&'a Exclusion>> {
    match admission {
        Admission::Everyone => Ok(()),
        Admission::Selected(by) if by.matches(kyma_labels) => Ok(()),
        Admission::Selected(_) => Err(None),
        Admission::Nobody(why) => Err(Some(why)),
    }
}

/// What a module of a Kyma follows, as the Kyma's status tells: it lists every module of its runtime's spec, resolved or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Follows<'a> {
    /// This channel.
    Channel(&'a str),
    /// A version of its own.
    Version,
    /// It did not resolve: any movement may be what it waits for.
    Unresolved,
}

/// What a Kyma follows of a module; `None` if it does not use it.
pub(super) fn follows<'a>(kyma: &'a Kyma, module: &str) -> Option<Follows<'a>> {
    let status = status_of(kyma, module)?;
    Some(match (status.channel.as_deref().filter(|channel| !channel.is_empty()), &status.template) {
        (Some(channel), _) => Follows::Channel(channel),
        (None, Some(_)) => Follows::Version,
        (None, None) => Follows::Unresolved,
    })
}

/// Whether a module of a Kyma rests on this template, or may wait for it.
pub(super) fn rests_on(kyma: &Kyma, module: &str, template: &str) -> bool {
    status_of(kyma, module).is_some_and(|status| {
        let name = status.template.as_ref().and_then(|template| template.metadata.as_ref()?.name.as_deref());
        name.is_none_or(|name| name == template)
    })
}

fn status_of<'a>(kyma: &'a Kyma, module: &str) -> Option<&'a ModuleStatus> {
    kyma.status.iter().flat_map(|status| status.modules()).find(|status| status.name == module)
}
