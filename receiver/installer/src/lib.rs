//! Installs, repairs, upgrades and removes the agent of each runtime, with the least rights that work.
//!
//! Pure modules: `component` enumerates the objects, `objects` builds them, `rbac` derives the agent's rights from the
//! plan, `watches` adds the watches on the installation itself, `compare` holds the rules by which found objects are
//! compared. `apply` writes the objects that differ in waves, `trial` tries the pod before lifecycle-manager's ends, `removal`
//! deletes all of them, `readiness` computes the condition `SKRWebhook`, `upgrade` assigns images in stages. No code in this
//! crate reads the content of the agent's identity Secret: the key stays in the runtime.

mod apply;
mod compare;
mod component;
mod desired;
mod error;
mod flags;
mod metrics;
mod objects;
pub mod pending_removal;
pub mod pull_secret;
mod rbac;
mod readiness;
mod removal;
mod state;
mod trial;
pub mod upgrade;
mod url;
pub mod watcher;
mod watches;

pub use component::Component;
pub use error::{ComponentError, Error};
pub use flags::{AgentPullSecret, Flags, MemoryLimit, ParseMemoryLimitError, Settings};
pub use metrics::Metrics;
pub use state::InstallationState;
pub use url::{ParsePublicUrlError, PublicUrl};
pub use watches::watches;

pub use readiness::{Readiness, SECRET_DELETED, SECRET_MISSING, SYNCHRONIZED, was_ready};

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use kube::Client;
use parking_lot::Mutex;
use tidewatch_api::{Kyma, identity::RuntimeId, key::KymaKey, plan::Plan};
use tidewatch_cluster::{WriteBudgets, object};
use tidewatch_fleet::PathState;
use tidewatch_trust::Trust;

use self::{desired::DesiredObjects, readiness::PathEvidence};
use crate::{pending_removal::PendingRemoval, pull_secret::PullSecret};

/// Plans with cached desired objects. Runtimes with the same kinds in their modules share a plan.
const MAX_PLANS: usize = 32;

/// Returns the current trust bundles.
pub type TrustSource = Box<dyn Fn() -> Arc<Trust> + Send + Sync>;
/// Returns the state of a runtime's event path; `None` for an unknown Kyma.
pub type EventPathOf = Box<dyn Fn(&KymaKey) -> Option<PathState> + Send + Sync>;

/// Installer of agents, shared by all runtimes.
pub struct Installer {
    settings: Settings,
    trust_source: TrustSource,
    path: EventPathOf,
    upgrade: upgrade::UpgradeHandle,
    /// Image pull secret, copied to every runtime as well.
    pub pull_secret: PullSecret,
    metrics: Metrics,
    /// Cache: runtimes with the same plan, roots and pull secret have the same objects, except for [`desired::Params`].
    desired: Mutex<VecDeque<Arc<DesiredObjects>>>,
}

/// Kyma whose runtime gets an agent.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// Its key.
    pub key: &'a KymaKey,
    /// The Kyma in KCP.
    pub kyma: &'a Kyma,
    /// Its runtime.
    pub runtime: &'a RuntimeId,
}

/// Result of one installation.
#[derive(Debug, Default)]
pub struct Report {
    /// Components that were written.
    pub written: BTreeSet<Component>,
    /// Components that could not be reconciled, with the error.
    pub failures: Vec<ComponentError>,
    /// Components that were skipped because a component they depend on failed.
    pub blocked: BTreeSet<Component>,
}

impl Installer {
    /// Creates an installer without image pull secret.
    pub fn new(
        settings: Settings,
        trust_source: TrustSource,
        path: EventPathOf,
        upgrade: upgrade::UpgradeHandle,
        metrics: Metrics,
    ) -> Self {
        let pull_secret = PullSecret::default();
        Self { settings, trust_source, path, upgrade, pull_secret, metrics, desired: Mutex::default() }
    }

    /// Reconciles the installation in a runtime. Reads only the objects that `installed` does not list as verified,
    /// writes only those that differ, and marks in `installed` those that were verified. A refused object is reported
    /// and blocks only its dependents.
    pub async fn install(
        &self,
        client: &Client,
        Subject { key, kyma, runtime }: Subject<'_>,
        plan: &Arc<Plan>,
        installed: &mut InstallationState,
        budgets: &WriteBudgets,
    ) -> Report {
        let desired = self.desired(plan);
        let image = self.upgrade.image_for(runtime);
        let budget = budgets.of(key, object::Component::Agent, "", ());
        let path = PathEvidence::of((self.path)(key).as_ref(), kyma);
        let report = apply::InstallRun::new(client, runtime, image, path, &desired, installed, budget).run().await;
        self.metrics.installed(&report);
        self.report_image(key, installed);
        report
    }

    /// Deletes the installation of this receiver or of lifecycle-manager: its webhook configurations, then the agent, then
    /// its other objects. Returns `Some` while the runtime is still deleting.
    ///
    /// # Errors
    /// [`ComponentError`].
    pub async fn remove(&self, client: &Client) -> Result<Option<PendingRemoval>, ComponentError> {
        removal::step(client).await
    }

    /// Reports the image and availability of the agent to the upgrade.
    fn report_image(&self, key: &KymaKey, installed: &InstallationState) {
        if let Some(image) = &installed.image {
            self.upgrade.observe(key, image, !installed.awaiting_pod, installed.unproven_before);
        }
    }

    fn desired(&self, plan: &Arc<Plan>) -> Arc<DesiredObjects> {
        let trust = (self.trust_source)();
        let pull_secret = self.pull_secret.content();
        let is_current = |cached: &&Arc<DesiredObjects>| cached.is_current(plan, &trust.agents, pull_secret.as_ref());
        let mut cache = self.desired.lock();
        if let Some(cached) = cache.iter().find(is_current) {
            return cached.clone();
        }
        let desired = Arc::new(DesiredObjects::new(&self.settings, plan.clone(), &trust.agents, pull_secret.as_ref()));
        if cache.len() >= MAX_PLANS {
            cache.pop_front();
        }
        cache.push_back(desired.clone());
        desired
    }
}
