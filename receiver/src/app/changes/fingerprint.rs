//! Fingerprints: the fields of an object that matter. Events with an equal fingerprint enqueue nothing.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash,
};

use aws_lc_rs::digest;
use kube::{ResourceExt, core::Resource};
use serde::Serialize;
use tidewatch_api::{
    Manifest, ModuleReleaseMeta,
    facts::{ManifestFacts, RestDigest},
    key::{Key, KymaKey, OfKyma},
    names::{annotation, finalizer},
};
use tidewatch_fleet::{stores::kymas::CachedKyma, takeover::Takeover, watch::Change};
use tidewatch_modules::kyma::is_own_annotation;
use tidewatch_select::{
    catalog::visibility::{Admission, HidingRule},
    kyma::is_installable,
};

/// Fingerprints of one kind, by key.
pub(super) struct Fingerprints<E, K = OfKyma>(HashMap<Key<K>, E>);

/// Change of a fingerprint.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FingerprintChange<E> {
    /// The object is new.
    New,
    /// The fingerprint changed; the previous one.
    Changed(E),
}

impl<E, K> Default for Fingerprints<E, K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<E: PartialEq, K: Clone + Eq + hash::Hash> Fingerprints<E, K> {
    /// Records the current fingerprint of an object; `None` if it did not change.
    pub(super) fn apply(&mut self, key: Key<K>, fingerprint: E) -> Option<FingerprintChange<E>> {
        match self.0.insert(key.clone(), fingerprint) {
            None => Some(FingerprintChange::New),
            Some(old) if Some(&old) == self.0.get(&key) => None,
            Some(old) => Some(FingerprintChange::Changed(old)),
        }
    }

    pub(super) fn delete(&mut self, key: &Key<K>) -> Option<E> {
        self.0.remove(key)
    }
}

impl<E: PartialEq> Fingerprints<E> {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Records a change. Returns the object, unless its fingerprint is the same or it is in the first list; a changed one
    /// with its previous fingerprint.
    pub(super) fn observe<'a, K: Resource>(
        &mut self,
        change: &Change<'a, K>,
        fingerprint: impl FnOnce(&K) -> E,
    ) -> Option<(&'a K, Option<E>)> {
        match *change {
            Change::Initial(object) => {
                self.0.insert(KymaKey::of(object), fingerprint(object));
                None
            }
            Change::Applied(object) => match self.apply(KymaKey::of(object), fingerprint(object))? {
                FingerprintChange::New => Some((object, None)),
                FingerprintChange::Changed(old) => Some((object, Some(old))),
            },
            Change::Deleted(object) => self.delete(&KymaKey::of(object)).map(|_| (object, None)),
            Change::Listed => None,
        }
    }
}

/// Fingerprint of the metadata and the generation, which users and other controllers of KCP write. Consists of hashes,
/// because there is one for each object of KCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectFingerprint {
    /// Determine the visibility of modules to a Kyma.
    pub(super) labels: Hash,
    /// Generation, annotations except the receiver's own, and of an object that is being deleted its finalizers.
    rest: Hash,
}

pub(super) type Hash = RestDigest;

fn hash(value: &impl Serialize) -> Hash {
    let bytes = serde_json::to_vec(value).expect("plain data with string keys");
    let mut hash = Hash::default();
    hash.copy_from_slice(digest::digest(&digest::SHA256, &bytes).as_ref());
    hash
}

impl ObjectFingerprint {
    pub(super) fn of<K: Resource>(object: &K) -> Self {
        Self { labels: hash(object.labels()), rest: Self::rest_of(object) }
    }

    /// The same for both forms of a Kyma.
    fn of_kyma(kyma: &CachedKyma) -> Self {
        match kyma {
            CachedKyma::Whole(kyma) => Self::of(kyma.as_ref()),
            CachedKyma::Reduced(reduced) => Self { labels: hash(kyma.facts().labels()), rest: reduced.rest },
        }
    }

    /// Digest of the fields except the labels, which a reduced object keeps.
    pub(super) fn rest_of<K: Resource>(object: &K) -> RestDigest {
        // Reconciles write the receiver's own annotations, and must not enqueue themselves.
        let annotations: Vec<_> = object.annotations().iter().filter(|(key, _)| !is_own_annotation(key)).collect();
        let meta = object.meta();
        // The status of a Kyma that is being deleted names them.
        let blocking = meta.deletion_timestamp.as_ref().map(|_| &meta.finalizers);
        hash(&(meta.generation, annotations, blocking))
    }
}

/// Fingerprint of a Kyma.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KymaFingerprint {
    pub(super) object: ObjectFingerprint,
    /// Differs if the Kyma was deleted and created again while the watch was interrupted: a list shows the new one only.
    uid: Box<str>,
    /// A label of the Kyma stops the reconciles of its Manifests.
    pub(super) is_held: bool,
}

impl KymaFingerprint {
    pub(super) fn of(kyma: &CachedKyma, takeover: &Takeover) -> Self {
        let facts = kyma.facts();
        // A deletion goes on despite `skip-reconciliation`.
        let is_skipped = takeover.selector().skips(facts) && !facts.is_deleting();
        let is_held = is_skipped || facts.is_paused() || facts.is_hand_back_requested();
        Self { object: ObjectFingerprint::of_kyma(kyma), uid: facts.uid().into(), is_held }
    }

    /// Returns true if it is of another Kyma of the same name.
    pub(super) fn is_of_another(&self, other: &Self) -> bool {
        self.uid != other.uid
    }
}

/// Fingerprint of a Manifest. Times and conditions do not matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ManifestFingerprint {
    /// Fields that a reconcile of its Kyma decides on and shows, except those of the message.
    pub(super) shown: Hash,
    /// Message that the status of its Kyma shows, and the applied layer.
    pub(super) message: Hash,
    /// Objects that the runtime's plan depends on.
    pub(super) inventory: Hash,
    /// Fields that a reconcile of the Manifest starts from, except its own result in the status.
    pub(super) desired: Hash,
}

impl ManifestFingerprint {
    pub(super) fn of(manifest: &Manifest) -> Self {
        let meta = &manifest.metadata;
        // The reconcile records the applied layer, and adds and removes its own finalizers.
        let annotations: Vec<_> =
            manifest.annotations().iter().filter(|(key, _)| *key != annotation::SYNC_OCI_REF).collect();
        let (own, foreign): (Vec<_>, Vec<_>) =
            manifest.finalizers().iter().partition(|name| finalizer::MANIFEST.contains(&name.as_str()));
        let lacks_own = meta.deletion_timestamp.is_none() && own.len() < 2;
        let desired = (&meta.uid, meta.generation, &meta.labels, &annotations, foreign, lacks_own);
        let applied = manifest.annotations().get(annotation::SYNC_OCI_REF);
        // Until an upgrade is applied, the state is that of the version before.
        let is_outdated = applied.is_some() && !ManifestFacts::from(manifest).flags.is_synced;
        let identity = (&meta.uid, meta.generation, &meta.labels, &annotations, is_outdated, &meta.owner_references);
        let status = manifest.status.as_ref();
        let operation = status.and_then(|status| status.last_operation.as_ref()).map(|last| last.operation.as_str());
        Self {
            shown: hash(&(identity, meta.deletion_timestamp.is_some(), status.map(|status| status.state))),
            message: hash(&(operation.unwrap_or_default(), applied)),
            inventory: hash(&status.map(|status| &status.synced)),
            desired: hash(&(desired, meta.deletion_timestamp.is_some())),
        }
    }
}

/// Fingerprint of a release meta: of the whole object, and of the fields that matter to the modules of Kymas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReleaseFingerprint {
    /// Whole object; labels and annotations of a release meta matter only to catalogs.
    object: ObjectFingerprint,
    /// Versions of the channels, by channel.
    channels: BTreeMap<String, String>,
    /// Selection of the Kymas that may use the module.
    admission: Admission,
    /// Component name, versions and mandatory flag of the module.
    pub(super) rest: Hash,
    /// `None` if runtimes are not to have the module as a mandatory one.
    pub(super) mandatory: Option<MandatoryFingerprint>,
}

/// Fingerprint of a mandatory module that can be installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MandatoryFingerprint {
    pub(super) version: String,
    pub(super) component: Option<String>,
}

impl MandatoryFingerprint {
    pub(super) fn of(meta: &ModuleReleaseMeta) -> Option<Self> {
        let mandatory = meta.spec.mandatory.as_ref().filter(|_| is_installable(meta))?;
        Some(Self { version: mandatory.version.clone(), component: meta.spec.ocm_component_name.clone() })
    }
}

impl ReleaseFingerprint {
    /// `restricted` are the modules of `--restricted-default-modules`.
    pub(super) fn of(meta: &ModuleReleaseMeta, restricted: &BTreeSet<String>) -> Self {
        let channels = meta.spec.channels.iter().flatten();
        let channels = channels.map(|entry| (entry.channel.clone(), entry.version.clone())).collect();
        let rest = hash(&(&meta.spec.ocm_component_name, &meta.spec.versions, &meta.spec.mandatory));
        let admission = Admission::of(meta, restricted);
        let mandatory = MandatoryFingerprint::of(meta);
        Self { object: ObjectFingerprint::of(meta), channels, admission, rest, mandatory }
    }

    /// Returns true if the admission of a Kyma with these labels, or the reason for its exclusion, differs.
    pub(super) fn admission_differs(&self, old: &Self, kyma_labels: &BTreeMap<String, String>) -> bool {
        admission_result(&self.admission, kyma_labels) != admission_result(&old.admission, kyma_labels)
    }

    /// Channels that were added, removed, or changed to another version.
    pub(super) fn moved_channels<'a>(&'a self, old: &'a Self) -> BTreeSet<&'a str> {
        let names = self.channels.keys().chain(old.channels.keys());
        names.filter(|name| self.channels.get(*name) != old.channels.get(*name)).map(String::as_str).collect()
    }
}

/// Admission of a Kyma with these labels; the error holds the reason if the module is excluded for all.
fn admission_result<'a>(
    admission: &'a Admission,
    kyma_labels: &BTreeMap<String, String>,
) -> Result<(), Option<&'a HidingRule>> {
    match admission {
        Admission::All => Ok(()),
        Admission::Selected(by) if by.matches(kyma_labels) => Ok(()),
        Admission::Selected(_) => Err(None),
        Admission::Excluded(why) => Err(Some(why)),
    }
}
