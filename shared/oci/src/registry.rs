//! Lookups of component descriptors and layers that never wait: a first lookup starts one fetch in the background, and
//! the results of all fetches are kept, repeated after failures, and announced when they change.

mod changes;
mod key;
mod resolve;
mod table;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fmt,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;
use thiserror::Error;
use tidewatch_kit::addresses::AddressRules;
use tokio::{
    sync::{Notify, Semaphore},
    task::{Id, JoinSet},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

pub use changes::Change;
pub use key::{Key, LayerKey, Lookup, LookupError};

use super::{
    component::ComponentVersion,
    credentials::{Credentials, CredentialsError, RegistryAddress, RegistryTarget},
    descriptor::Descriptor,
    digest::Digest,
    fetch::{Fetcher, METADATA_ADDRESS, MetadataServer},
    flags::{Settings, Source},
    key_folder::{self, KeyFolderError},
    layer::LayerKind,
    metrics::Metrics,
    signature::ComponentKeys,
    store::Store,
    tls::{self, TlsError},
};
use changes::ChangeSet;
use key::Value;
use resolve::{Live, Resolver};
use table::{Outcome, Table};

/// Concurrent fetches.
const CONCURRENCY: usize = 4;
/// Bytes of results in memory; others are read from the store again.
const MAX_RESULT_BYTES: usize = 64 << 20;

/// The registry of the modules. Clones share it.
#[derive(Clone)]
pub struct Registry(Arc<Shared>);

struct Shared {
    table: Mutex<Table>,
    /// A fetch became due.
    wake: Notify,
    changes: ChangeSet,
    resolver: Resolver,
    source: Source,
    metrics: Metrics,
}

/// Files that are missing or not usable at start.
#[derive(Debug, Error)]
pub enum RegistryError {
    /// Roots of the registry's certificate.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Keys of `--component-keys`.
    #[error(transparent)]
    Keys(#[from] KeyFolderError),
}

/// Runs the fetches of all lookups, and owns their tasks.
#[derive(Debug)]
pub struct Worker(Registry);

impl Registry {
    /// Sets up keys, connections and store, without a request. Blocking: called at start.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub fn new(settings: &Settings, metrics: Metrics) -> Result<(Self, Worker), RegistryError> {
        let keys = settings.component_keys.as_deref().map(key_folder::keys).transpose()?;
        let roots = tls::roots(settings.ca_file.as_ref())?;
        let rules = AddressRules { allow: Vec::new(), deny: settings.denied_addresses.clone() };
        let transports = tls::transports(roots, settings.proxy.matcher(), rules)?;
        let metadata = MetadataServer::new(tls::direct(), METADATA_ADDRESS);
        let fetcher = Fetcher::new(transports, settings.allowed_hosts.clone(), metrics.clone());
        let fetcher = fetcher.with_google(metadata);
        let store = Store::open(&settings.content_dir, settings.content_max_bytes, metrics.clone());
        let (registry, worker) = Self::with(fetcher, store, settings.source.clone(), MAX_RESULT_BYTES, metrics);
        registry.0.resolver.keys.store(keys.map(Arc::new));
        Ok((registry, worker))
    }

    /// Sets up a registry with these connections and this store.
    pub(crate) fn with(
        fetcher: Fetcher,
        store: Store,
        source: Source,
        max_bytes: usize,
        metrics: Metrics,
    ) -> (Self, Worker) {
        let of_host =
            |address: &RegistryAddress, credentials| Some(Arc::new(RegistryTarget::new(address.clone(), credentials)));
        let (target, secret) = match &source {
            Source::Host(address) => (of_host(address, None), ""),
            Source::Google(address) => (of_host(address, Some(Credentials::GoogleMetadata)), ""),
            Source::Secret { name, .. } => (None, name.as_str()),
        };
        let live = Arc::new(ArcSwap::from_pointee(Live { target, error: None }));
        let resolver = Resolver {
            fetcher,
            store,
            live,
            secret: secret.into(),
            keys: Arc::new(ArcSwapOption::empty()),
            metrics: metrics.clone(),
            unpacking: Arc::new(Semaphore::new(1)),
        };
        // The fraction of a second differs between processes, which is enough for jitter.
        let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| u64::from(now.subsec_nanos()));
        let registry = Self(Arc::new(Shared {
            table: Mutex::new(Table::new(max_bytes, seed)),
            wake: Notify::new(),
            changes: ChangeSet::default(),
            resolver,
            source,
            metrics,
        }));
        (registry.clone(), Worker(registry))
    }

    /// Looks up the descriptor of a component version.
    pub fn descriptor(&self, component: &ComponentVersion) -> Lookup<Descriptor> {
        match self.lookup(&Key::Descriptor(component.clone())) {
            Some(Ok(Value::Descriptor(descriptor))) => Lookup::Ready(descriptor),
            Some(Err(error)) => Lookup::Failed(error),
            // The kind of a key is that of its value.
            Some(Ok(Value::Layer(_))) | None => Lookup::Pending,
        }
    }

    /// Looks up the YAML text of a layer, the concatenation of blobs of a repository below the registry's path.
    pub fn layer(&self, repository: &str, digests: &[Digest], kind: LayerKind) -> Lookup<String> {
        let key = LayerKey { repository: repository.into(), digests: digests.into(), kind };
        match self.lookup(&Key::Layer(key)) {
            Some(Ok(Value::Layer(text))) => Lookup::Ready(text),
            Some(Err(error)) => Lookup::Failed(error),
            Some(Ok(Value::Descriptor(_))) | None => Lookup::Pending,
        }
    }

    /// Address of the registry; `None` while the Secret that names it is missing. A [`Change::All`] follows when it
    /// appears.
    pub fn address(&self) -> Option<RegistryAddress> {
        self.0.resolver.live.load().target.as_ref().map(|target| target.address.clone())
    }

    /// Waits for a key whose lookup now has another result. For one consumer: each change is returned once. Cancel
    /// safe.
    pub async fn changed(&self) -> Change {
        self.0.changes.next().await
    }

    /// Replaces the keys that component descriptors have to be signed with. All descriptors are verified again, from the
    /// store as far as it has them; lookups are pending until then.
    pub fn set_component_keys(&self, keys: ComponentKeys) {
        self.0.resolver.keys.store(Some(Arc::new(keys)));
        let mut table = self.0.table.lock();
        table.renew_descriptors(Instant::now());
        self.0.measure(&table);
        drop(table);
        self.0.wake.notify_one();
    }

    /// Replaces the registry and its credentials by those of a dockerconfigjson, `None` if the Secret does not exist.
    /// Returns whether that is a change. Failed fetches are then repeated. If there was no registry before, a
    /// [`Change::All`] follows.
    ///
    /// # Errors
    /// [`CredentialsError`]: the previous value stays.
    pub fn set_credentials(&self, docker_config: Option<&[u8]>) -> Result<bool, CredentialsError> {
        let Source::Secret { subpath, .. } = &self.0.source else { return Err(CredentialsError::Unexpected) };
        let parsed = docker_config.map(|json| RegistryTarget::from_docker_config(json, subpath)).transpose();
        let live = self.0.resolver.live.load();
        let before = live.target.as_ref();
        let (target, error) = match parsed {
            Ok(target) if before.zip(target.as_ref()).is_some_and(|(before, target)| before.equals(target)) => {
                (before.cloned(), None)
            }
            Ok(target) => (target.map(Arc::new), None),
            Err(error) => (before.cloned(), Some(error)),
        };
        let generation = |target: Option<&Arc<RegistryTarget>>| target.map(|target| target.generation());
        let changed = generation(before) != generation(target.as_ref()) || live.error != error;
        let has_appeared = before.is_none() && target.is_some();
        if changed {
            self.0.resolver.live.store(Arc::new(Live { target, error }));
            self.0.table.lock().retry_all(Instant::now());
            self.0.wake.notify_one();
        }
        if has_appeared {
            // Keys with a result are not fetched again, so that nothing else announces the address.
            self.0.changes.add_all();
        }
        error.map_or(Ok(changed), Err)
    }

    fn lookup(&self, key: &Key) -> Option<Outcome> {
        let mut table = self.0.table.lock();
        let answer = table.lookup(key, Instant::now());
        if answer.due {
            self.0.measure(&table);
            drop(table);
            if let Some(displaced) = answer.displaced {
                self.0.changes.add(displaced);
            }
            self.0.wake.notify_one();
        }
        answer.outcome
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("source", &self.0.source).finish_non_exhaustive()
    }
}

impl Shared {
    fn measure(&self, table: &Table) {
        let (pending, failed) = table.pending_and_failed();
        self.metrics.pending.set(i64::try_from(pending).unwrap_or(i64::MAX));
        self.metrics.failed.set(i64::try_from(failed).unwrap_or(i64::MAX));
    }

    fn begin(&self) -> Option<Key> {
        let mut table = self.table.lock();
        let key = table.begin(Instant::now());
        // Forgotten keys count no longer.
        self.measure(&table);
        key
    }

    fn settle(&self, key: Key, result: Result<Value, LookupError>) {
        let failed = result.as_ref().err().map(ToString::to_string);
        let mut table = self.table.lock();
        let changed = table.settle(&key, result, Instant::now());
        self.measure(&table);
        drop(table);
        match failed {
            None => tracing::debug!(%key, "Fetched"),
            // A repeated failure is logged once.
            Some(error) if changed => tracing::warn!(%key, error, "Fetch failed, it is repeated"),
            Some(error) => tracing::debug!(%key, error, "Fetch failed again"),
        }
        if changed {
            self.changes.add(key);
        }
    }
}

impl Worker {
    /// Fetches until it is stopped; unfinished fetches end with it.
    pub async fn run(self, stop: CancellationToken) -> &'static str {
        let shared = &self.0.0;
        let mut fetches = JoinSet::new();
        let mut keys = HashMap::<Id, Key>::new();
        loop {
            while fetches.len() < CONCURRENCY {
                let Some(key) = shared.begin() else { break };
                let resolver = shared.resolver.clone();
                let of = key.clone();
                let task = fetches.spawn(async move { resolver.resolve(&of).await });
                keys.insert(task.id(), key);
            }
            let planned = shared.table.lock().next_planned().filter(|_| fetches.len() < CONCURRENCY);
            tokio::select! {
                () = stop.cancelled() => return "fetches from the registry",
                Some(ended) = fetches.join_next_with_id(), if !fetches.is_empty() => {
                    let id = ended.as_ref().map_or_else(|error| error.id(), |(id, _)| *id);
                    if let Some(key) = keys.remove(&id) {
                        let aborted = LookupError::Aborted(key.clone());
                        shared.settle(key, ended.map_or(Err(aborted), |(_, result)| result));
                    }
                }
                () = shared.wake.notified() => {}
                () = sleep_until(planned.unwrap_or_else(Instant::now)), if planned.is_some() => {}
            }
        }
    }
}
