//! Which access Secrets bear a Kyma's name, so that nobody looks through all of them for one Kyma.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use k8s_openapi::api::core::v1::Secret;
use kube::{
    ResourceExt,
    runtime::reflector::{ObjectRef, Store},
};
use tidewatch_shared::names::label;

use super::essence::key_of;
use crate::{base::key::KymaKey, kube::runtime_access::AccessSecret};

/// Bounded by the Secrets in the cache.
#[derive(Debug, Default)]
pub(super) struct Owners(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The Kyma that a Secret was last seen to belong to: its label may move it from one to another.
    kymas: HashMap<KymaKey, KymaKey>,
    /// The same by Kyma: names of Secrets, sorted. Nearly always one.
    secrets: HashMap<KymaKey, Vec<String>>,
}

/// The Kyma whose name a Secret bears.
fn owner(secret: &Secret) -> Option<KymaKey> {
    let name = secret.labels().get(label::KYMA_NAME)?;
    Some(KymaKey::new(secret.namespace().unwrap_or_default(), name.clone()))
}

impl Owners {
    /// A Secret is there. Returns the Kymas that it concerns: the one it belongs to, and the one it belonged to before.
    pub(super) fn apply(&self, secret: &Secret) -> Vec<KymaKey> {
        self.lock().put(key_of(secret), owner(secret))
    }

    /// A Secret is gone. Returns the Kyma that it belonged to.
    pub(super) fn delete(&self, secret: &Secret) -> Vec<KymaKey> {
        self.lock().put(key_of(secret), None)
    }

    /// The Secrets of a Kyma as the cache has them. Looks at no others.
    pub(super) fn read(&self, kyma: &KymaKey, cache: &Store<Secret>) -> Vec<AccessSecret> {
        let names = self.lock().secrets.get(kyma).cloned().unwrap_or_default();
        let cached = names.iter().filter_map(|name| cache.get(&ObjectRef::new(name).within(&kyma.namespace)));
        // The cache may be ahead: then the label has moved already.
        cached
            .filter(|secret| owner(secret).as_ref() == Some(kyma))
            .map(|secret| AccessSecret::from(&*secret))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is whole in itself.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn put(&mut self, secret: KymaKey, now: Option<KymaKey>) -> Vec<KymaKey> {
        let before = match &now {
            Some(now) => self.kymas.insert(secret.clone(), now.clone()),
            None => self.kymas.remove(&secret),
        };
        let before = before.filter(|before| Some(before) != now.as_ref());
        if let Some(before) = &before
            && let Some(names) = self.secrets.get_mut(before)
        {
            names.retain(|name| *name != secret.name);
            if names.is_empty() {
                self.secrets.remove(before);
            }
        }
        if let Some(now) = &now {
            let names = self.secrets.entry(now.clone()).or_default();
            if let Err(at) = names.binary_search(&secret.name) {
                names.reserve_exact(1);
                names.insert(at, secret.name.clone());
            }
        }
        now.into_iter().chain(before).collect()
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::{reflector::store::Writer, watcher::Event};
    use serde_json::json;

    use super::*;

    fn secret(name: &str, kyma: Option<&str>) -> Secret {
        let labels = kyma.map(|kyma| json!({label::KYMA_NAME: kyma}));
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "ns", "labels": labels}})).unwrap()
    }

    fn kyma(name: &str) -> KymaKey {
        KymaKey::new("ns", name)
    }

    #[test]
    fn secrets_are_found_by_the_name_that_they_bear_now() {
        let (owners, mut writer) = (Owners::default(), Writer::<Secret>::default());
        let cache = writer.as_reader();
        let mut apply = |secret: &Secret| {
            writer.apply_watcher_event(&Event::Apply(secret.clone()));
            owners.apply(secret)
        };
        let names = |of: &str| owners.read(&kyma(of), &cache).into_iter().map(|secret| secret.name).collect::<Vec<_>>();
        assert_eq!(apply(&secret("s1", Some("a"))), [kyma("a")]);
        assert_eq!(apply(&secret("s2", Some("a"))), [kyma("a")]);
        assert_eq!(apply(&secret("other", Some("b"))), [kyma("b")]);
        assert_eq!(
            (names("a"), names("b"), names("c")),
            (vec!["s1".into(), "s2".into()], vec!["other".into()], vec![])
        );

        assert_eq!(apply(&secret("s2", Some("b"))), [kyma("b"), kyma("a")], "both are concerned");
        assert_eq!((names("a"), names("b")), (vec!["s1".to_owned()], vec!["other".to_owned(), "s2".to_owned()]));
        assert_eq!(apply(&secret("s2", None)), [kyma("b")]);
        assert_eq!(names("b"), ["other"]);
        assert_eq!(owners.delete(&secret("s1", Some("a"))), [kyma("a")]);
        assert!(names("a").is_empty(), "though the cache still has it");
        assert!(owners.delete(&secret("s1", Some("a"))).is_empty());
        assert_eq!(owners.lock().secrets.len(), 1, "nothing is left behind");
    }

    #[test]
    fn a_cache_that_is_ahead_gives_nobody_the_secret_of_another() {
        let (owners, mut writer) = (Owners::default(), Writer::<Secret>::default());
        owners.apply(&secret("s", Some("a")));
        writer.apply_watcher_event(&Event::Apply(secret("s", Some("b"))));
        assert!(owners.read(&kyma("a"), &writer.as_reader()).is_empty());
    }
}
