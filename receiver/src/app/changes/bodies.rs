//! Bodies of the cached Kymas, Manifests and access Secrets: whole objects of the shards that it
//! holds or acquires, facts of the others.
//!
//! The watch alone decides which objects exist, and in which version. A [`fetch`] only adds the body of exactly the version
//! that the cache has, so it restores no deleted object and no earlier state, whatever the order in which it and the watch
//! arrive. The form of an object is chosen while the cache is locked: one that was reduced because its shard was not kept is found
//! by every scan that begins after the shard is.

mod caches;
mod fetch;
mod kept;
mod kinds;
mod kymas;
mod manifests;
mod object;
mod secrets;
mod selectors;
mod shards;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kube::{Api, core::DeserializeGuard, runtime::reflector::Store};
use parking_lot::{Mutex, RwLock};
use tidewatch_api::{
    key::KymaKey,
    shard::{ShardCount, ShardId},
};
use tidewatch_cluster::Metrics;
use tidewatch_fleet::{
    stores::kymas::CachedKyma,
    watch::{LockedCache, SharedWriter},
};
use tidewatch_kit::random::Random;
use tokio::{
    sync::Notify,
    task,
    time::{self, Instant, MissedTickBehavior},
};

pub(super) use self::{
    caches::CacheBodies, kinds::ObjectCache, kymas::KymaCache, manifests::ManifestCache, object::CachedObject,
    secrets::SecretCache,
};
use self::{kept::KeptShards, kinds::KeyOf, shards::KymaShards};

/// Bound of the delay after a round that left bodies missing; it doubles up to [`MAX_RETRY`].
const RETRY: Duration = Duration::from_millis(200);
/// Least delay: with full jitter it would often be none, also while a list of the watch is incomplete.
const MIN_RETRY: Duration = Duration::from_millis(20);
const MAX_RETRY: Duration = Duration::from_secs(5);
/// Objects that are reduced before other tasks may run.
const CHUNK: usize = 256;
/// Interval of the metrics, and of the end of the time of released shards.
const COUNT_INTERVAL: Duration = Duration::from_secs(15);

/// Bodies of the cached objects of one kind. Clones share their state.
pub(super) struct Bodies<C: ObjectCache>(Arc<Inner<C>>);

struct Inner<C: ObjectCache> {
    objects: Arc<C>,
    writer: SharedWriter<C::Cached>,
    shards: KymaShards,
    kept: RwLock<KeptShards>,
    /// Reduced objects whose present version cannot be decoded: no fetch can add their body.
    invalid: Mutex<BTreeSet<KeyOf<C>>>,
    /// Notified when objects may have to be reduced, or bodies to be fetched.
    changed: Notify,
    /// Notified after each round that no list has interrupted.
    fetched: Notify,
    metrics: Metrics,
}

/// The objects without a body that have to have one, by Kyma.
type Missing<C> = BTreeMap<KymaKey, BTreeSet<KeyOf<C>>>;

impl<C: ObjectCache> Clone for Bodies<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: ObjectCache> Bodies<C> {
    pub(super) fn new(
        objects: Arc<C>,
        writer: SharedWriter<C::Cached>,
        kymas: Store<CachedKyma>,
        shards: ShardCount,
        metrics: Metrics,
    ) -> Self {
        let (kept, invalid) = Default::default();
        let (changed, fetched) = Default::default();
        let shards = KymaShards::new(kymas, shards);
        Self(Arc::new(Inner { objects, writer, shards, kept, invalid, changed, fetched, metrics }))
    }

    /// Returns the form in which an object is stored. Called while the cache is locked.
    pub(super) fn compact(&self, listed: C::Listed) -> C::Cached {
        let whole = self.0.objects.whole(listed);
        self.reduced(&whole).unwrap_or(whole)
    }

    /// Keeps the whole objects of a shard from now on; the missing bodies are fetched.
    pub(super) fn keep(&self, shard: ShardId) {
        self.kept(|kept| kept.keep(shard));
        self.0.changed.notify_one();
    }

    /// Waits until no body of a shard's objects is missing, those excepted that cannot be decoded, or the shard is
    /// released. Cancel safe.
    pub(super) async fn are_complete(&self, shard: ShardId) {
        loop {
            let fetched = self.0.fetched.notified();
            tokio::pin!(fetched);
            fetched.as_mut().enable();
            let is_complete = || self.missing(|of| of == shard).is_some_and(|missing| missing.is_empty());
            if !self.is_own(shard) || is_complete() {
                return;
            }
            // The end of a list wakes no waiter; a round waits for it, and then does.
            self.0.changed.notify_one();
            fetched.await;
        }
    }

    /// Lets the objects of a shard that is not held any longer be reduced, after a time.
    pub(super) fn release(&self, shard: ShardId) {
        self.kept(|kept| kept.release(shard, Instant::now()));
        self.0.fetched.notify_waiters();
    }

    /// Reduces the objects of all shards that are neither held nor being acquired.
    pub(super) fn reduce_others(&self) {
        self.kept(KeptShards::reduce_others);
        self.0.changed.notify_one();
    }

    /// Records that a Kyma in the cache is new or may have come into another shard.
    pub(super) fn kyma_moved(&self, kyma: &KymaKey) {
        let is_wrong = |object: &C::Cached| match object.is_reduced() {
            true => self.shard_of(object).is_some_and(|shard| self.is_own(shard)),
            false => !self.is_kept(object),
        };
        if self.0.objects.of_kyma(kyma).iter().any(is_wrong) {
            self.0.changed.notify_one();
        }
    }

    /// Reduces objects and fetches bodies whenever that is due. `on_fetched` is called with the Kymas whose objects got
    /// bodies. Runs for ever.
    pub(super) async fn run(
        self,
        api: Api<DeserializeGuard<C::Listed>>,
        on_fetched: impl Fn(&KymaKey),
    ) -> &'static str {
        let mut ticks = time::interval(COUNT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Replicas that take over the shards of a lost one fetch at the same time.
        let mut random = Random::default();
        loop {
            tokio::select! {
                () = self.0.changed.notified() => {}
                () = self.0.objects.missed() => {}
                now = ticks.tick() => {
                    self.count();
                    if !self.kept(|kept| kept.expire(now)) {
                        continue;
                    }
                }
            }
            let mut failures = 0_u32;
            while !self.round(&api, &on_fetched).await {
                failures = failures.saturating_add(1);
                time::sleep(random.backoff(RETRY, MAX_RETRY, failures).max(MIN_RETRY)).await;
            }
            self.count();
        }
    }

    /// Reduces what is not kept, and fetches the missing bodies once. Returns false if something is left to do.
    async fn round(&self, api: &Api<DeserializeGuard<C::Listed>>, on_fetched: impl Fn(&KymaKey)) -> bool {
        if !self.reduce().await {
            return false;
        }
        let Some(missing) = self.missing(|shard| self.is_own(shard)) else { return false };
        if !missing.is_empty() {
            tracing::info!(kind = C::KIND.kind, kymas = missing.len(), "Fetching the objects of acquired runtimes");
            self.fetch(api, missing, on_fetched).await;
        }
        let is_complete = self.missing(|shard| self.is_own(shard)).is_some_and(|missing| missing.is_empty());
        self.0.fetched.notify_waiters();
        is_complete
    }

    /// Reduces all objects that are not kept. Returns false during a list, which decides by itself.
    async fn reduce(&self) -> bool {
        for chunk in self.0.objects.all(false).chunks(CHUNK) {
            let others = chunk.iter().filter(|object| !self.is_kept(object));
            if !others.map(|object| object.key()).all(|key| self.reduce_one(&key)) {
                return false;
            }
            task::yield_now().await;
        }
        true
    }

    fn reduce_one(&self, key: &KeyOf<C>) -> bool {
        let mut cache = self.0.writer.lock();
        // It or its shard may have changed meanwhile.
        let reduced = self.0.objects.find(key).and_then(|current| self.reduced(&current));
        reduced.is_none_or(|reduced| self.replace(&mut cache, reduced))
    }

    /// Stores another form of an object. Returns false during a list.
    fn replace(&self, cache: &mut LockedCache<'_, C::Cached>, object: C::Cached) -> bool {
        let is_replaced = cache.replace(object.clone());
        if is_replaced {
            self.0.objects.replaced(&object);
        }
        is_replaced
    }

    /// The reduced form of a whole object that is not kept.
    fn reduced(&self, cached: &C::Cached) -> Option<C::Cached> {
        let is_other = !cached.is_reduced() && !self.is_kept(cached);
        is_other.then(|| self.0.objects.reduce(cached))?
    }

    /// Reduced objects of known Kymas in the selected shards; `None` during a list, whose objects are not known yet.
    fn missing(&self, selects: impl Fn(ShardId) -> bool) -> Option<Missing<C>> {
        let cache = self.0.writer.lock();
        let reduced = (!cache.is_listing()).then(|| self.0.objects.all(true))?;
        drop(cache);
        let mut invalid = self.0.invalid.lock();
        if !invalid.is_empty() {
            invalid.retain(|key| self.0.objects.find(key).is_some_and(|object| object.is_reduced()));
        }
        let mut missing = Missing::<C>::new();
        for object in reduced.iter().filter(|object| self.shard_of(object).is_some_and(&selects)) {
            let key = object.key();
            if let Some(kyma) = object.kyma().filter(|_| !invalid.contains(&key)) {
                missing.entry(kyma).or_default().insert(key);
            }
        }
        Some(missing)
    }

    /// Returns true if the body of an object is to be in the cache: its shard is kept or not known.
    fn is_kept(&self, object: &C::Cached) -> bool {
        self.shard_of(object).is_none_or(|shard| self.keeps(shard))
    }

    fn keeps(&self, shard: ShardId) -> bool {
        self.0.kept.read().contains(shard)
    }

    fn is_own(&self, shard: ShardId) -> bool {
        self.0.kept.read().is_own(shard)
    }

    /// Shard whose holder needs the body of an object; `None` if it is not known.
    fn shard_of(&self, object: &C::Cached) -> Option<ShardId> {
        self.0.objects.shard_of(object, &self.0.shards)
    }

    /// Updates the metrics.
    fn count(&self) {
        let reduced = i64::try_from(self.0.objects.all(true).len()).unwrap_or(i64::MAX);
        self.0.metrics.reduced.get_or_create(&C::KIND).set(reduced);
    }

    fn kept<T>(&self, change: impl FnOnce(&mut KeptShards) -> T) -> T {
        change(&mut self.0.kept.write())
    }
}

#[cfg(test)]
mod tests;
