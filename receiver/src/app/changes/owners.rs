//! Index of the access Secrets by Kyma, so that a lookup does not scan all Secrets.

use std::{collections::HashMap, sync::Arc};

use kube::runtime::reflector::{ObjectRef, Store};
use parking_lot::Mutex;
use tidewatch_api::key::KymaKey;
use tidewatch_cluster::runtime_access::AccessSecret;

/// Cache of the access Secrets with its index, which is bounded by the Secrets in the cache.
pub(super) struct SecretOwners {
    cache: Store<AccessSecret>,
    index: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Kyma of each Secret at its last event; a changed label moves a Secret to another Kyma.
    kymas: HashMap<KymaKey, KymaKey>,
    /// Sorted Secrets of each Kyma, nearly always one.
    secrets: HashMap<KymaKey, Vec<KymaKey>>,
}

impl From<Store<AccessSecret>> for SecretOwners {
    fn from(cache: Store<AccessSecret>) -> Self {
        Self { cache, index: Mutex::default() }
    }
}

impl SecretOwners {
    /// Records a Secret. Returns the Kymas that it concerns: the one it belongs to, and the one it belonged to before.
    pub(super) fn apply(&self, secret: &AccessSecret) -> Vec<KymaKey> {
        self.index.lock().set(secret.key().clone(), secret.kyma().cloned())
    }

    /// Records the deletion of a Secret. Returns the Kyma that it belonged to.
    pub(super) fn delete(&self, secret: &AccessSecret) -> Vec<KymaKey> {
        self.index.lock().set(secret.key().clone(), None)
    }

    /// Returns the Secrets of a Kyma from the cache, without scanning the others.
    pub(super) fn read(&self, kyma: &KymaKey) -> Vec<Arc<AccessSecret>> {
        let secrets = self.index.lock().secrets.get(kyma).cloned().unwrap_or_default();
        let cached = secrets.iter().filter_map(|secret| self.get(secret));
        // The cache may be ahead of this index: the label may have changed already.
        cached.filter(|secret| secret.kyma() == Some(kyma)).collect()
    }

    /// Returns a Secret from the cache.
    pub(super) fn find(&self, secret: &KymaKey) -> Option<AccessSecret> {
        self.get(secret).map(|found| (*found).clone())
    }

    /// Returns all Secrets that are reduced, or all that are not.
    pub(super) fn all(&self, reduced: bool) -> Vec<Arc<AccessSecret>> {
        self.cache.state_filter(|secret| secret.is_reduced() == reduced)
    }

    /// Lets a Secret share the text of its keys with the index.
    pub(super) fn share_keys(&self, secret: &mut AccessSecret) {
        let index = self.index.lock();
        if let Some((key, kyma)) = index.kymas.get_key_value(secret.key()) {
            secret.share(key, kyma);
        }
    }

    fn get(&self, secret: &KymaKey) -> Option<Arc<AccessSecret>> {
        self.cache.get(&ObjectRef::new(&secret.name).within(&secret.namespace))
    }
}

impl State {
    fn set(&mut self, secret: KymaKey, owner: Option<KymaKey>) -> Vec<KymaKey> {
        let previous = match &owner {
            Some(owner) => self.kymas.insert(secret.clone(), owner.clone()),
            None => self.kymas.remove(&secret),
        };
        let previous = previous.filter(|previous| Some(previous) != owner.as_ref());
        if let Some(previous) = &previous
            && let Some(secrets) = self.secrets.get_mut(previous)
        {
            secrets.retain(|known| *known != secret);
            if secrets.is_empty() {
                self.secrets.remove(previous);
            }
        }
        if let Some(owner) = &owner {
            let secrets = self.secrets.entry(owner.clone()).or_default();
            if let Err(at) = secrets.binary_search(&secret) {
                secrets.reserve_exact(1);
                secrets.insert(at, secret);
            }
        }
        owner.into_iter().chain(previous).collect()
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::{reflector::store::Writer, watcher::Event};
    use serde_json::json;
    use tidewatch_api::names::label;
    use tidewatch_cluster::runtime_access::ListedSecret;

    use super::*;

    fn secret(name: &str, kyma: Option<&str>) -> AccessSecret {
        let labels = kyma.map(|kyma| json!({label::KYMA_NAME: kyma}));
        let listed = json!({"metadata": {"name": name, "namespace": "ns", "labels": labels}});
        serde_json::from_value::<ListedSecret>(listed).unwrap().into()
    }

    fn kyma(name: &str) -> KymaKey {
        KymaKey::new("ns", name)
    }

    #[test]
    fn secrets_are_found_by_their_current_label() {
        let mut writer = Writer::<AccessSecret>::default();
        let owners = SecretOwners::from(writer.as_reader());
        let mut apply = |secret: &AccessSecret| {
            writer.apply_watcher_event(&Event::Apply(secret.clone()));
            owners.apply(secret)
        };
        let names =
            |of: &str| owners.read(&kyma(of)).iter().map(|secret| secret.key().name.clone()).collect::<Vec<_>>();
        assert_eq!(apply(&secret("s1", Some("a"))), [kyma("a")]);
        assert_eq!(apply(&secret("s2", Some("a"))), [kyma("a")]);
        assert_eq!(apply(&secret("other", Some("b"))), [kyma("b")]);
        assert_eq!(
            (names("a"), names("b"), names("c")),
            (vec!["s1".into(), "s2".into()], vec!["other".into()], vec![])
        );

        assert_eq!(apply(&secret("s2", Some("b"))), [kyma("b"), kyma("a")], "both Kymas are affected");
        assert_eq!((names("a"), names("b")), (vec!["s1".to_owned()], vec!["other".to_owned(), "s2".to_owned()]));
        assert_eq!(apply(&secret("s2", None)), [kyma("b")]);
        assert_eq!(names("b"), ["other"]);
        assert_eq!(owners.delete(&secret("s1", Some("a"))), [kyma("a")]);
        assert!(names("a").is_empty(), "although the cache still has it");
        assert!(owners.delete(&secret("s1", Some("a"))).is_empty());
        assert_eq!(owners.index.lock().secrets.len(), 1, "no entry is leaked");
    }

    #[test]
    fn secret_whose_label_changed_in_the_cache_is_not_returned() {
        let mut writer = Writer::<AccessSecret>::default();
        let owners = SecretOwners::from(writer.as_reader());
        owners.apply(&secret("s", Some("a")));
        writer.apply_watcher_event(&Event::Apply(secret("s", Some("b"))));
        assert!(owners.read(&kyma("a")).is_empty());
    }
}
