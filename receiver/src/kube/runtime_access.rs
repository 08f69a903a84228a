//! Access to runtimes: from the kubeconfig Secrets in KCP to one bounded client per Kyma.
//!
//! No kubeconfig can make the receiver run a command, read a file or reach an address that it should not: it is read as
//! data ([`kubeconfig`]), and every resolved address is judged ([`addresses`]). No runtime can hold the receiver up: every
//! answer has a limit of bytes and of time ([`CutOff`]), and every list an end ([`list_all`]). Tokens and keys show in no
//! message and in no `Debug`.

pub mod addresses;
mod answer;
mod chain;
mod classify;
mod client;
mod connector;
pub mod kubeconfig;
mod list;
mod metrics;

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use aws_lc_rs::digest::{self, SHA256};
use k8s_openapi::api::core::v1::Secret;
use kube::{Client, ResourceExt};
use thiserror::Error;
use tidewatch_shared::tls;
use tokio::time::sleep;

pub use addresses::{Cidr, Forbidden};
pub use answer::{CutOff, Limits};
pub use classify::{classify, cut_off, describe, forbidden_address};
pub use kubeconfig::Refusal;
pub use list::{ListError, ListLimits, list_all};
pub use metrics::Metrics;

use crate::{base::key::KymaKey, kube::leader::Fence};
use addresses::Rules;
use client::{Built, Parts};
use connector::Guard;
use kubeconfig::RuntimeKubeconfig;

/// What flags decide about access.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--allow-runtime-addresses`; wins over everything that is refused.
    pub allow: Vec<Cidr>,
    /// `--deny-runtime-addresses`.
    pub deny: Vec<Cidr>,
    /// Limits of each runtime's answers.
    pub limits: Limits,
    /// Until when runtimes may be written to.
    pub fence: Fence,
}

/// What of an access Secret matters.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessSecret {
    /// Its name.
    pub name: String,
    /// `metadata.resourceVersion`.
    pub resource_version: String,
    /// The value of the key `config`.
    pub kubeconfig: Option<Vec<u8>>,
}

impl From<&Secret> for AccessSecret {
    fn from(secret: &Secret) -> Self {
        Self {
            name: secret.name_any(),
            resource_version: secret.resource_version().unwrap_or_default(),
            kubeconfig: secret
                .data
                .as_ref()
                .and_then(|data| data.get(kubeconfig::SECRET_KEY))
                .map(|bytes| bytes.0.clone()),
        }
    }
}

impl fmt::Debug for AccessSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessSecret")
            .field("name", &self.name)
            .field("resource_version", &self.resource_version)
            .finish_non_exhaustive()
    }
}

/// Why a Kyma has no client. The text is one sentence for the condition `RuntimeAccess`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Unusable {
    /// No Secret bears the Kyma's name. Alone it never means that the runtime is gone.
    #[error("no access Secret is labelled with this Kyma's name")]
    Missing,
    /// Which one is right cannot be known; their names, at most five of them.
    #[error("several access Secrets are labelled with this Kyma's name: {}", .0.join(", "))]
    Several(Vec<String>),
    /// The only Secret's kubeconfig is refused.
    #[error(transparent)]
    Kubeconfig(#[from] Refusal),
}

impl Unusable {
    /// A label of a closed set.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Several(_) => "several",
            Self::Kubeconfig(refusal) => refusal.label(),
        }
    }
}

/// How many Secrets [`Unusable::Several`] names.
const MAX_NAMED: usize = 5;

/// Clients that nothing uses at the moment, over all runtimes. After a start all are looked at within a minute or two: were the clients
/// of thousands kept, they would need more memory than all else, and leave it in pieces when they go.
const MAX_RESTING: usize = 64;
/// How often clients that rest are looked for.
const ROUND: Duration = Duration::from_secs(1);

/// The clients of all runtimes. One entry per Kyma with a Secret; a client is built when it is asked for, and dropped when it was
/// idle for half a minute, or earlier when more than 64 others were used since: a client costs more memory than all else that is known
/// of a quiet runtime.
#[derive(Clone)]
pub struct RuntimeAccess(Arc<Inner>);

struct Inner {
    parts: Parts,
    // Held while somebody reads which Secrets there are and says so.
    turn: Mutex<()>,
    // Held for a lookup or the building of one client (about 0.2 ms), never across an await.
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<KymaKey, Entry>,
    last: u64,
}

struct Entry {
    prints: Vec<Print>,
    revision: u64,
    access: Access,
}

enum Access {
    Usable { kubeconfig: Box<RuntimeKubeconfig>, built: Option<Built> },
    Unusable(Unusable),
}

/// What tells two Secrets apart without keeping either.
struct Print {
    name: String,
    resource_version: String,
    content: Option<digest::Digest>,
}

impl Print {
    fn is(&self, secret: &AccessSecret) -> bool {
        self.name == secret.name
            && (self.resource_version == secret.resource_version
                || self.content.as_ref().map(AsRef::as_ref) == content(secret).as_ref().map(AsRef::as_ref))
    }

    fn of(secret: &AccessSecret) -> Self {
        let AccessSecret { name, resource_version, .. } = secret;
        Self { name: name.clone(), resource_version: resource_version.clone(), content: content(secret) }
    }
}

fn content(secret: &AccessSecret) -> Option<digest::Digest> {
    secret.kubeconfig.as_deref().map(|bytes| digest::digest(&SHA256, bytes))
}

impl RuntimeAccess {
    /// Starts with no access to anything.
    #[must_use]
    pub fn new(settings: Settings, metrics: Metrics) -> Self {
        let Settings { allow, deny, limits, fence } = settings;
        let guard = Guard { rules: Arc::new(Rules::new(allow, deny)), metrics };
        let parts = Parts { guard, limits, provider: tls::provider(), fence };
        Self(Arc::new(Inner { parts, turn: Mutex::default(), table: Mutex::default() }))
    }

    /// As [`set_secrets`](Self::set_secrets), with the Secrets as `read` finds them: of two who read and say at the same time, what
    /// was read last is what stays. Without this, who read before a Secret came could forget it again.
    pub fn follow_secrets(&self, key: &KymaKey, read: impl FnOnce() -> Vec<AccessSecret>) -> bool {
        let _turn = self.0.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.set_secrets(key, &read())
    }

    /// Says which Secrets bear this Kyma's name now, in any order. Tells whether access changed: then the old client is
    /// forgotten at once (calls under way end with it), and the next [`client`](Self::client) is a new one. A Secret of the
    /// same name and content is no change, whatever its version.
    pub fn set_secrets(&self, key: &KymaKey, secrets: &[AccessSecret]) -> bool {
        let mut table = self.table();
        if secrets.is_empty() {
            return table.entries.remove(key).is_some();
        }
        let mut secrets: Vec<_> = secrets.iter().collect();
        secrets.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        if let Some(entry) = table.entries.get_mut(key)
            && entry.prints.len() == secrets.len()
            && entry.prints.iter().zip(&secrets).all(|(print, secret)| print.is(secret))
        {
            for (print, secret) in entry.prints.iter_mut().zip(secrets) {
                print.resource_version.clone_from(&secret.resource_version);
            }
            return false;
        }
        let access = match judge(&secrets) {
            Ok(kubeconfig) => Access::Usable { kubeconfig: Box::new(kubeconfig), built: None },
            Err(unusable) => {
                self.0.parts.guard.metrics.unusable(unusable.label());
                Access::Unusable(unusable)
            }
        };
        table.last += 1;
        let revision = table.last;
        let prints = secrets.into_iter().map(Print::of).collect();
        table.entries.insert(key.clone(), Entry { prints, revision, access });
        true
    }

    /// Forgets a Kyma.
    pub fn remove(&self, key: &KymaKey) {
        self.table().entries.remove(key);
    }

    /// The client of a Kyma's runtime. Cheap after the first time; must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`Unusable`].
    pub fn client(&self, key: &KymaKey) -> Result<Client, Unusable> {
        self.client_and_revision(key).map(|(client, _)| client)
    }

    /// As [`client`](Self::client), with a number that is different for each change of access: what was verified with
    /// another one has to be verified again.
    ///
    /// # Errors
    /// [`Unusable`].
    pub fn client_and_revision(&self, key: &KymaKey) -> Result<(Client, u64), Unusable> {
        let mut table = self.table();
        let entry = table.entries.get_mut(key).ok_or(Unusable::Missing)?;
        let built = match &mut entry.access {
            Access::Unusable(unusable) => return Err(unusable.clone()),
            Access::Usable { built: Some(built), .. } => Ok(&*built),
            Access::Usable { kubeconfig, built } => {
                client::build(&self.0.parts, kubeconfig).map(|new| &*built.insert(new))
            }
        };
        match built {
            Ok(built) => {
                built.usage.now();
                Ok((built.client.clone(), entry.revision))
            }
            Err(refusal) => {
                self.0.parts.guard.metrics.unusable(refusal.label());
                let unusable = Unusable::from(refusal);
                entry.access = Access::Unusable(unusable.clone());
                Err(unusable)
            }
        }
    }

    /// Drops the clients that nobody uses, for ever.
    pub async fn run(self) -> &'static str {
        loop {
            sleep(ROUND).await;
            self.drop_idle();
        }
    }

    fn drop_idle(&self) {
        let mut table = self.table();
        let rests = |entry: &Entry| match &entry.access {
            Access::Usable { built: Some(built), .. } => built.usage.rests_since(),
            Access::Usable { built: None, .. } | Access::Unusable(_) => None,
        };
        let mut resting: Vec<_> = table.entries.values().filter_map(rests).collect();
        resting.sort_unstable_by(|a, b| b.cmp(a));
        // What was used last before this goes.
        let full = resting.get(MAX_RESTING - 1).copied();
        let idle = |built: &mut Built| {
            let since = built.usage.rests_since();
            since.is_some_and(|since| since.elapsed() >= client::IDLE || full.is_some_and(|full| since < full))
        };
        let idle = |entry: &mut Entry| match &mut entry.access {
            Access::Usable { built, .. } => built.take_if(idle),
            Access::Unusable(_) => None,
        };
        let idle: Vec<_> = table.entries.values_mut().filter_map(idle).collect();
        drop(table);
        // Their connections close here, without the lock.
        drop(idle);
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `secrets` is sorted and not empty.
fn judge(secrets: &[&AccessSecret]) -> Result<RuntimeKubeconfig, Unusable> {
    match secrets {
        [] => Err(Unusable::Missing),
        [secret] => {
            let bytes = secret.kubeconfig.as_deref().ok_or(Refusal::NoKey)?;
            Ok(RuntimeKubeconfig::parse(bytes)?)
        }
        several => Err(Unusable::Several(several.iter().take(MAX_NAMED).map(|secret| secret.name.clone()).collect())),
    }
}

#[cfg(test)]
mod tests;
