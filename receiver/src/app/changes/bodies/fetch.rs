//! Fetches the bodies of objects from KCP, by lists that select the objects of some Kymas. The API server answers from its
//! watch cache, and sends only the selected objects.

use std::{collections::BTreeSet, time::Duration};

use anyhow::Context as _;
use futures::{StreamExt as _, stream};
use kube::{Api, Resource as _, api::ListParams, core::DeserializeGuard};
use tidewatch_api::key::{Key, KymaKey};
use tidewatch_kit::log_error;
use tokio::time::timeout;

use super::{Bodies, CachedObject as _, Missing, ObjectCache};

/// Requests that run concurrently.
const CONCURRENT_REQUESTS: usize = 2;
/// Timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);

impl<C: ObjectCache> Bodies<C> {
    /// Fetches missing bodies once. What fails stays missing.
    pub(super) async fn fetch(
        &self,
        api: &Api<DeserializeGuard<C::Listed>>,
        missing: Missing<C>,
        on_fetched: impl Fn(&KymaKey),
    ) {
        let selectors = self.0.objects.selectors(&Vec::from_iter(missing.keys()));
        let requests = selectors.into_iter().map(|selector| async move {
            let params = ListParams::default().labels(&selector).match_any();
            let listed = timeout(REQUEST_TIMEOUT, api.list(&params)).await;
            let listed = listed.context("reading the objects of acquired runtimes took too long")?;
            listed.context("read the objects of acquired runtimes in the control plane")
        });
        let mut answers = stream::iter(requests.collect::<Vec<_>>()).buffer_unordered(CONCURRENT_REQUESTS);
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(listed) => self.add(listed.items, &missing).iter().for_each(&on_fetched),
                Err(error) => {
                    self.0.metrics.body_fetches_failed.get_or_create(&C::KIND).inc();
                    log_error!(warn, error.as_ref(), kind = C::KIND.kind, "Bodies could not be fetched, retrying");
                }
            }
        }
    }

    /// Stores the bodies of objects of which the cache has exactly this version. Returns the Kymas whose objects got bodies.
    pub(super) fn add(&self, listed: Vec<DeserializeGuard<C::Listed>>, missing: &Missing<C>) -> BTreeSet<KymaKey> {
        let mut kymas = BTreeSet::new();
        for object in listed {
            match object.0 {
                Ok(mut listed) => {
                    listed.meta_mut().managed_fields = None;
                    kymas.extend(self.add_one(listed));
                }
                Err(invalid) => {
                    let namespace = invalid.metadata.namespace;
                    let name = invalid.metadata.name;
                    let key = Key::new(namespace.unwrap_or_default(), name.unwrap_or_default());
                    if missing.values().any(|objects| objects.contains(&key)) {
                        let kind = C::KIND.kind;
                        tracing::warn!(kind, object = %key, error = %invalid.error, "Invalid object has no body in the cache");
                        self.0.invalid.lock().insert(key);
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
        let cached = self.0.objects.find(&Key::of(listed)).filter(C::Cached::is_reduced);
        let version = listed.meta().resource_version.as_deref();
        version.is_some() && cached.is_some_and(|cached| cached.object_version() == version)
    }
}
