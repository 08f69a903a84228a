//! Fetches the bodies of objects from KCP, by lists that select the objects of some Kymas. The API server answers them from
//! its watch cache, and sends only the selected objects.

use std::{collections::BTreeSet, sync::PoisonError, time::Duration};

use futures::{StreamExt as _, stream};
use kube::{Api, Resource as _, api::ListParams, core::DeserializeGuard};
use thiserror::Error;
use tidewatch_shared::names::label;
use tokio::time::{error::Elapsed, timeout};

use super::{Bodies, CachedObject as _, Missing, ObjectCache};
use crate::base::{error_levels, key::KymaKey};

/// Names of Kymas in one selector: a URL of 8 KiB, which proxies accept, has room for 7,000 bytes of them.
const MAX_SELECTOR: usize = 4_000;
/// Lists that run concurrently.
const CONCURRENT_LISTS: usize = 2;
/// Timeout of one list.
const LIST_TIMEOUT: Duration = Duration::from_secs(20);

/// Failure of one list.
#[derive(Debug, Error)]
pub(super) enum FetchError {
    #[error("list the objects of acquired runtimes in the control plane")]
    Request(#[from] kube::Error),
    #[error("the list of the objects of acquired runtimes took too long")]
    Late(#[from] Elapsed),
}

impl<C: ObjectCache> Bodies<C> {
    /// Fetches missing bodies once. What fails stays missing.
    pub(super) async fn fetch(
        &self,
        api: &Api<DeserializeGuard<C::Listed>>,
        missing: Missing,
        on_fetched: impl Fn(&KymaKey),
    ) {
        let lists = selectors(&missing).into_iter().map(|selector| async move {
            let params = ListParams::default().labels(&selector).match_any();
            Ok::<_, FetchError>(timeout(LIST_TIMEOUT, api.list(&params)).await??.items)
        });
        let mut lists = stream::iter(lists.collect::<Vec<_>>()).buffer_unordered(CONCURRENT_LISTS);
        while let Some(listed) = lists.next().await {
            match listed {
                Ok(listed) => self.add(listed, &missing).iter().for_each(&on_fetched),
                Err(error) => {
                    self.0.metrics.body_fetches_failed.get_or_create(&C::KIND).inc();
                    tracing::warn!(
                        kind = C::KIND.kind,
                        error = error_levels::own(&error),
                        cause = error_levels::cause(&error),
                        "Bodies could not be fetched, retrying"
                    );
                }
            }
        }
    }

    /// Stores the bodies of objects of which the cache has exactly this version. Returns the Kymas whose objects got bodies.
    pub(super) fn add(&self, listed: Vec<DeserializeGuard<C::Listed>>, missing: &Missing) -> BTreeSet<KymaKey> {
        let mut kymas = BTreeSet::new();
        for object in listed {
            match object.0 {
                Ok(mut listed) => {
                    listed.meta_mut().managed_fields = None;
                    kymas.extend(self.add_one(listed));
                }
                Err(invalid) => {
                    let (namespace, name) = (invalid.metadata.namespace, invalid.metadata.name);
                    let key = KymaKey::new(namespace.unwrap_or_default(), name.unwrap_or_default());
                    if missing.values().any(|objects| objects.contains(&key)) {
                        let kind = C::KIND.kind;
                        tracing::warn!(kind, object = %key, error = %invalid.error, "Invalid object has no body in the cache");
                        self.0.invalid.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
                    }
                }
            }
        }
        kymas
    }

    fn add_one(&self, listed: C::Listed) -> Option<KymaKey> {
        let mut cache = self.0.writer.lock();
        if !self.has_version_of(&listed) {
            return None;
        }
        let whole = self.0.objects.whole(listed);
        let kyma = whole.kyma();
        let is_stored = self.is_kept(&whole) && self.replace(&mut cache, whole);
        if is_stored {
            self.0.metrics.bodies_fetched.get_or_create(&C::KIND).inc();
        }
        kyma.filter(|_| is_stored)
    }

    /// Returns true if the cache has only the facts of exactly this version.
    fn has_version_of(&self, listed: &C::Listed) -> bool {
        let cached = self.0.objects.find(&KymaKey::of(listed)).filter(C::Cached::is_reduced);
        let version = listed.meta().resource_version.as_deref();
        version.is_some() && cached.is_some_and(|cached| cached.object_version() == version)
    }
}

/// Label selectors that select the objects of all these Kymas together.
fn selectors(missing: &Missing) -> Vec<String> {
    let mut selectors: Vec<String> = Vec::new();
    for kyma in missing.keys() {
        match selectors.last_mut().filter(|names| names.len() + kyma.name.len() < MAX_SELECTOR) {
            Some(names) => {
                names.push(',');
                names.push_str(&kyma.name);
            }
            None => selectors.push(kyma.name.clone()),
        }
    }
    selectors.into_iter().map(|names| format!("{} in ({names})", label::KYMA_NAME)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_name_each_kyma_once_and_fit_into_a_url() {
        let names: BTreeSet<_> = (0..1_000).map(|n| format!("f1c2d3e4-0000-4000-8000-{n:012}")).collect();
        let missing = names.iter().map(|name| (KymaKey::new("ns", name), BTreeSet::new())).collect();
        let selectors = selectors(&missing);
        let prefix = format!("{} in (", label::KYMA_NAME);
        let lists = selectors.iter().map(|selector| {
            assert!(selector.len() < MAX_SELECTOR + 100, "{}", selector.len());
            selector.strip_prefix(&prefix).unwrap().strip_suffix(')').unwrap()
        });
        let selected: Vec<_> = lists.flat_map(|names| names.split(',').map(str::to_owned)).collect();
        assert_eq!(selected, names.into_iter().collect::<Vec<_>>());
        assert!((9..=11).contains(&selectors.len()), "{}", selectors.len());
        assert_eq!(super::selectors(&Missing::new()), [""; 0]);
    }
}
