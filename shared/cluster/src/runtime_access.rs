//! Access to runtimes: turns the kubeconfig Secrets in KCP into one bounded client per Kyma.
//!
//! No kubeconfig can make the receiver run a command, read a file or connect to a forbidden address: it is parsed as
//! plain data ([`kubeconfig`]), and every resolved address is checked ([`addresses`]). No runtime can block the
//! receiver: every response is limited in bytes, in memory once decoded, and in time ([`LimitError`]), all of them share
//! a memory budget ([`MemoryLimits`]), and every list ends ([`list_map`]).
//! Tokens and keys appear in no message and in no `Debug`.

mod budget;
mod chain;
mod classify;
mod client;
mod connector;
pub mod kubeconfig;
mod limited_stream;
mod limits;
mod list;
mod metrics;
mod reach;
mod response;
mod secret;
mod structure;
mod upgrade;
mod usage;

use std::{collections::HashMap, slice, sync::Arc, time::Duration};

use kube::Client;
use parking_lot::Mutex;
use strum::IntoStaticStr;
use thiserror::Error;
use tidewatch_api::key::KymaKey;
pub use tidewatch_kit::addresses;
use tidewatch_kit::{system_roots::SystemRoots, tls, variant::VariantName as _};
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};

pub use addresses::{Cidr, ForbiddenAddressError};
pub use budget::{MemoryLimits, retain};
pub use classify::{classify, describe, forbidden_address, limit_error};
pub use kubeconfig::KubeconfigError;
pub use list::{ListError, ListLimits, list_first, list_map, list_page};
pub use metrics::Metrics;
pub use reach::{Untrusted, is_unanswered, is_unreached, untrusted_server};
pub use response::{CONCURRENT_CALLERS, CONCURRENT_REQUESTS, LimitError, Limits};
pub use secret::{AccessSecret, ListedSecret};

use crate::{body_missing::BodyMissingError, leader::WriteFence};
use addresses::AddressRules;
use budget::{Account, MemoryBudget};
use client::{CachedClient, ClientParts};
use connector::AddressGuard;
use kubeconfig::{Roots, RuntimeKubeconfig};

/// Settings of the access to runtimes, from flags.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--allow-runtime-addresses`; takes precedence over everything that is refused.
    pub allow: Vec<Cidr>,
    /// `--deny-runtime-addresses`.
    pub deny: Vec<Cidr>,
    /// Limits of each runtime's responses.
    pub limits: Limits,
    /// Memory budget of the responses of all runtimes.
    pub memory: MemoryLimits,
    /// Roots for kubeconfigs without own ones.
    pub system_roots: SystemRoots,
    /// Write fence of all requests to runtimes.
    pub fence: WriteFence,
}

/// Reason for which a Kyma has no client. The text is one sentence for the condition `RuntimeAccess`, the name a metric
/// label.
#[derive(Clone, Debug, PartialEq, Eq, Error, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum RuntimeAccessError {
    /// No Secret is labelled with the Kyma's name. Alone it never means that the runtime is gone.
    #[error("no access Secret is labelled with this Kyma's name")]
    Missing,
    /// The only Secret, of this name, was deleted while its Kyma was being deleted. A Secret that merely lost its label looks
    /// the same.
    #[error("the access Secret {0} was deleted after the deletion of this Kyma began")]
    SecretDeleted(String),
    /// The right Secret is ambiguous; their names, at most five.
    #[error("several access Secrets are labelled with this Kyma's name: {}", .0.join(", "))]
    Several(Vec<String>),
    /// The only Secret's kubeconfig is refused.
    #[error(transparent)]
    #[strum(transparent)]
    Kubeconfig(#[from] KubeconfigError),
}

/// Reason for which there is no client of a runtime now.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ClientError {
    /// None can be built from the Secrets.
    #[error(transparent)]
    Access(#[from] RuntimeAccessError),
    /// There is a Secret, whose kubeconfig is not in the cache yet.
    #[error(transparent)]
    Body(#[from] BodyMissingError),
}

/// What an operator should know about the access to a runtime that responds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessRemark {
    /// The access Secret has no kubeconfig; the last one is used for this time.
    LastKubeconfig(Duration),
    /// The kubeconfig has no roots, so those of the receiver's system are trusted.
    PublicRoots,
}

/// Time for which the last kubeconfig of a Secret without one is used. A forced rotation of infrastructure-manager removes the
/// kubeconfig, and writes the new one later.
pub const KEPT_FOR: Duration = Duration::from_secs(600);

/// Limit of Secrets that [`RuntimeAccessError::Several`] names.
const MAX_NAMED_SECRETS: usize = 5;

/// Limit of cached idle clients, over all runtimes. After a start all runtimes are reconciled within a minute or two:
/// caching thousands of clients would need more memory than everything else, and fragment it when they are dropped.
const MAX_IDLE_CLIENTS: usize = 64;
/// Interval between two evictions of idle clients.
const EVICTION_INTERVAL: Duration = Duration::from_secs(1);

/// The clients of all runtimes. One entry per Kyma with a Secret; a client is built on demand, and evicted when it was
/// idle for half a minute, or earlier when 64 others were used more recently: a client needs more memory than all other
/// state of a quiet runtime.
#[derive(Clone)]
pub struct RuntimeAccess(Arc<Inner>);

struct Inner {
    parts: ClientParts,
    memory: MemoryBudget,
    // Held while a caller reads the Secrets and stores them.
    refresh: Mutex<()>,
    // Held for a lookup or for building one client (about 0.2 ms), never across an await.
    table: Mutex<Table>,
    /// Notified when a reader needs a client and the Secret is reduced.
    missed: Notify,
}

#[derive(Default)]
struct Table {
    entries: HashMap<KymaKey, Entry>,
    /// Name of the last Secret of a Kyma without Secrets, if it was deleted while the Kyma was being deleted; until the Kyma is
    /// removed.
    deleted: HashMap<KymaKey, Box<str>>,
    last_revision: u64,
}

impl Table {
    /// Reason for which a Kyma without Secrets has no client.
    fn without_secret(&self, key: &KymaKey) -> RuntimeAccessError {
        let deleted = self.deleted.get(key);
        deleted.map_or(RuntimeAccessError::Missing, |name| RuntimeAccessError::SecretDeleted(name.to_string()))
    }
}

struct Entry {
    /// Sorted by name, not empty; shared with the cache of the Secrets.
    secrets: Box<[Arc<AccessSecret>]>,
    revision: u64,
    /// Memory of its responses; the same for all its clients.
    account: Account,
    /// Reason for which no client can be built from the kubeconfig.
    refusal: Option<KubeconfigError>,
    /// Client of the kubeconfig, once built and until evicted: few entries have one.
    cached: Option<Box<CachedClient>>,
    kept: Option<Box<KeptSecret>>,
}

/// Former state of the only Secret, with the kubeconfig that it lacks now.
struct KeptSecret {
    secret: Arc<AccessSecret>,
    until: Instant,
}

impl Entry {
    /// Returns the former state to keep if the only Secret loses its kubeconfig by this change.
    fn keep(&self, secrets: &[Arc<AccessSecret>]) -> Option<Box<KeptSecret>> {
        let ([before], [now], None) = (&*self.secrets, secrets, &self.refusal) else { return None };
        let is_lost = matches!(before.kubeconfig(), Ok(Ok(_))) && now.lacks_kubeconfig() && now.is_same_object(before);
        is_lost.then(|| Box::new(KeptSecret { secret: before.clone(), until: Instant::now() + KEPT_FOR }))
    }

    /// Returns whether the Secrets are those of before, or give the same access.
    fn has_same_access(&self, secrets: &[Arc<AccessSecret>]) -> bool {
        let is_kept_object = |kept: &KeptSecret| secrets.iter().all(|secret| secret.is_same_object(&kept.secret));
        self.secrets.len() == secrets.len()
            && self.secrets.iter().zip(secrets).all(|(before, now)| before.gives_same_access(now))
            && self.kept.as_deref().is_none_or(is_kept_object)
    }
}

impl KeptSecret {
    /// Remaining time for which its kubeconfig is used; `None` once that time is over.
    fn rest(&self) -> Option<Duration> {
        let rest = self.until.saturating_duration_since(Instant::now());
        (!rest.is_zero()).then_some(rest)
    }
}

impl RuntimeAccess {
    /// Starts with no access to anything.
    pub fn new(settings: Settings, metrics: Metrics) -> Self {
        let Settings { allow, deny, limits, memory, system_roots, fence } = settings;
        let guard = AddressGuard { rules: Arc::new(AddressRules { allow, deny }), metrics };
        let parts =
            ClientParts { guard, limits, provider: tls::provider(), public_roots: system_roots.store().clone(), fence };
        let memory = MemoryBudget::new(memory);
        Self(Arc::new(Inner {
            parts,
            memory,
            refresh: Mutex::default(),
            table: Mutex::default(),
            missed: Notify::new(),
        }))
    }

    /// As [`set_secrets`](Self::set_secrets), with the Secrets that `read` returns. Concurrent callers are serialized,
    /// so the latest read wins: otherwise a caller that read before a Secret was added could remove it again.
    pub fn refresh_secrets(&self, key: &KymaKey, read: impl FnOnce() -> Vec<Arc<AccessSecret>>) -> bool {
        let _refreshing = self.0.refresh.lock();
        self.set_secrets(key, read())
    }

    /// Sets the Secrets that are labelled with this Kyma's name, in any order. Returns true if access changed: then the
    /// old client is dropped at once (its pending calls fail), and the next [`client`](Self::client) is a new one. A
    /// Secret of the same name and content is no change, whatever its resourceVersion. Nor is one that is reduced, or has its
    /// kubeconfig again; but the client of a reduced one is dropped, because it has the same credentials.
    ///
    /// If the only Secret loses its kubeconfig and remains the same object, access is the same for [`KEPT_FOR`]. Nothing is
    /// kept of a Secret that is reduced, nor across a restart.
    pub fn set_secrets(&self, key: &KymaKey, mut secrets: Vec<Arc<AccessSecret>>) -> bool {
        let mut table = self.0.table.lock();
        if secrets.is_empty() {
            return table.entries.remove(key).is_some();
        }
        table.deleted.remove(key);
        secrets.sort_unstable_by(|a, b| a.key().name.cmp(&b.key().name));
        let secrets = secrets.into_boxed_slice();
        if let Some(entry) = table.entries.get_mut(key).filter(|entry| entry.has_same_access(&secrets)) {
            // Else the old ones would be held beside those of the cache.
            entry.secrets = secrets;
            let is_reduced = entry.secrets.iter().any(|secret| secret.is_reduced());
            let dropped = entry.cached.take_if(|_| is_reduced);
            let forgotten = entry.kept.take_if(|_| is_reduced);
            drop(table);
            // Closes its connections, after the lock is released.
            drop(dropped);
            drop(forgotten);
            return false;
        }
        if let Err(ClientError::Access(unusable)) = only_kubeconfig(&secrets) {
            self.0.parts.guard.metrics.unusable(unusable.as_str());
        }
        if let Some(entry) = table.entries.get_mut(key)
            && let Some(kept) = entry.keep(&secrets)
        {
            entry.secrets = secrets;
            entry.kept = Some(kept);
            return false;
        }
        table.last_revision += 1;
        let revision = table.last_revision;
        let account = table.entries.get(key).map(|entry| entry.account.clone());
        let account = account.unwrap_or_else(|| self.0.memory.account());
        let entry = Entry { secrets, revision, account, refusal: None, cached: None, kept: None };
        table.entries.insert(key.clone(), entry);
        true
    }

    /// Records that a Secret of a Kyma that is being deleted was deleted. Has no effect once the Kyma has a Secret.
    pub fn secret_deleted(&self, kyma: &KymaKey, secret: &KymaKey) {
        self.0.table.lock().deleted.insert(kyma.clone(), secret.name.as_str().into());
    }

    /// Removes a Kyma.
    pub fn remove(&self, key: &KymaKey) {
        let mut table = self.0.table.lock();
        table.deleted.remove(key);
        table.entries.remove(key);
    }

    /// Remaining time for which the last kubeconfig of a Secret is used that has none now; `None` if it is not.
    pub fn kept_for(&self, key: &KymaKey) -> Option<Duration> {
        self.0.table.lock().entries.get(key)?.kept.as_ref()?.rest()
    }

    /// Returns the client of a Kyma's runtime; cached. Must be called inside a tokio executor.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn client(&self, key: &KymaKey) -> Result<Client, ClientError> {
        self.client_and_revision(key).map(|(client, _)| client)
    }

    /// As [`client`](Self::client), with a revision that is unique for each change of access: results that were
    /// verified with another revision must be verified again.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn client_and_revision(&self, key: &KymaKey) -> Result<(Client, u64), ClientError> {
        let table = &mut *self.0.table.lock();
        let Some(entry) = table.entries.get_mut(key) else { return Err(table.without_secret(key).into()) };
        let kubeconfig = self.usable_kubeconfig(&entry.secrets, entry.refusal.as_ref(), entry.kept.as_deref())?;
        let cached = match &mut entry.cached {
            Some(cached) => cached,
            none => match client::build(&self.0.parts, &entry.account, kubeconfig) {
                Ok(new) => none.insert(Box::new(new)),
                Err(refusal) => {
                    self.0.parts.guard.metrics.unusable(refusal.as_str());
                    entry.refusal = Some(refusal.clone());
                    return Err(RuntimeAccessError::from(refusal).into());
                }
            },
        };
        cached.usage.touch();
        Ok((cached.client.clone(), entry.revision))
    }

    /// Returns what an operator should know about the access to a runtime that responds.
    pub fn remark(&self, key: &KymaKey) -> Option<AccessRemark> {
        let table = self.0.table.lock();
        let entry = table.entries.get(key)?;
        if let Some(rest) = entry.kept.as_ref().and_then(|kept| kept.rest()) {
            return Some(AccessRemark::LastKubeconfig(rest));
        }
        match only_kubeconfig(&entry.secrets).ok()?.roots {
            Roots::Own(_) => None,
            Roots::Public => Some(AccessRemark::PublicRoots),
        }
    }

    /// Builds a client of a Kyma's runtime over HTTP/1.1, whose connections can be upgraded to WebSocket: for port-forwards.
    /// The rules for kubeconfigs, addresses and writes are those of [`client`](Self::client); the limits of responses do
    /// not apply. Must be called inside a tokio executor.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn upgrade_client(&self, key: &KymaKey) -> Result<Client, ClientError> {
        let table = self.0.table.lock();
        let Some(entry) = table.entries.get(key) else { return Err(table.without_secret(key).into()) };
        let kubeconfig = self.usable_kubeconfig(&entry.secrets, entry.refusal.as_ref(), entry.kept.as_deref())?;
        Ok(upgrade::build(&self.0.parts, kubeconfig).map_err(RuntimeAccessError::from)?)
    }

    /// Waits until a reader needs the client of a runtime whose Secret is reduced. Supports one caller. Cancel safe.
    pub async fn missed(&self) {
        self.0.missed.notified().await;
    }

    /// Evicts idle clients and kubeconfigs that were kept for long enough, for ever.
    pub async fn run(self) -> &'static str {
        loop {
            sleep(EVICTION_INTERVAL).await;
            self.evict_kept();
            self.evict_idle();
        }
    }

    fn evict_kept(&self) {
        let mut table = self.0.table.lock();
        let is_over = |kept: &mut Box<KeptSecret>| kept.rest().is_none();
        let over =
            table.entries.values_mut().filter_map(|entry| Some((entry.kept.take_if(is_over)?, entry.cached.take())));
        let outdated: Vec<_> = over.collect();
        drop(table);
        // Closes their connections, after the lock is released.
        drop(outdated);
    }

    fn evict_idle(&self) {
        let mut table = self.0.table.lock();
        let idle_since = |entry: &Entry| entry.cached.as_ref()?.usage.idle_since();
        let mut idle_times: Vec<_> = table.entries.values().filter_map(idle_since).collect();
        idle_times.sort_unstable_by(|a, b| b.cmp(a));
        // Clients that were last used before this are evicted.
        let full = idle_times.get(MAX_IDLE_CLIENTS - 1).copied();
        let idle = |cached: &mut Box<CachedClient>| {
            let since = cached.usage.idle_since();
            since.is_some_and(|since| since.elapsed() >= client::IDLE_TIMEOUT || full.is_some_and(|full| since < full))
        };
        let idle: Vec<_> = table.entries.values_mut().filter_map(|entry| entry.cached.take_if(idle)).collect();
        drop(table);
        // Closes their connections, after the lock is released.
        drop(idle);
    }

    /// Returns the kubeconfig of the only Secret, or the one that it had before, unless no client can be built from it.
    fn usable_kubeconfig<'a>(
        &self,
        secrets: &'a [Arc<AccessSecret>],
        refusal: Option<&KubeconfigError>,
        kept: Option<&'a KeptSecret>,
    ) -> Result<&'a RuntimeKubeconfig, ClientError> {
        if let Some(refusal) = refusal {
            return Err(RuntimeAccessError::from(refusal.clone()).into());
        }
        let kept = kept.filter(|kept| kept.rest().is_some());
        let secrets = kept.map_or(secrets, |kept| slice::from_ref(&kept.secret));
        only_kubeconfig(secrets).inspect_err(|error| {
            if let ClientError::Body(_) = error {
                self.0.missed.notify_one();
            }
        })
    }
}

/// Returns the kubeconfig of the only Secret. `secrets` is sorted.
fn only_kubeconfig(secrets: &[Arc<AccessSecret>]) -> Result<&RuntimeKubeconfig, ClientError> {
    let refused = match secrets {
        [] => RuntimeAccessError::Missing,
        [secret] => match secret.kubeconfig()? {
            Ok(kubeconfig) => return Ok(kubeconfig),
            Err(refusal) => refusal.clone().into(),
        },
        several => RuntimeAccessError::Several(
            several.iter().take(MAX_NAMED_SECRETS).map(|secret| secret.key().name.clone()).collect(),
        ),
    };
    Err(refused.into())
}

#[cfg(test)]
mod tests;
