//! The agent in each runtime: everything it needs to run with the least rights that work, kept exactly as it shall be.
//!
//! `objects` says what is installed, `rights` what of it the plan decides, `watches` what of it the agent itself watches, `form` whether a
//! read object is as it shall be: all pure. `apply` writes what differs, `removal` takes all of it away, `readiness` says what keeps an
//! agent from running, `upgrade` which image it gets. Nothing here reads the agent's Secret: its key stays where it is.

mod apply;
mod error;
mod flags;
mod form;
mod kit;
mod metrics;
mod objects;
mod part;
pub mod pull;
mod readiness;
mod removal;
mod rights;
mod state;
pub mod upgrade;
mod url;
mod watches;

pub use error::{Error, Failure};
pub use flags::{Flags, MemoryLimit, ParseMemoryLimit, Settings};
pub use metrics::Metrics;
pub use part::Part;
pub use state::Installed;
pub use url::{ParsePublicUrl, PublicUrl};
pub use watches::watches;

pub(crate) use readiness::{Readiness, was_ready};

use std::{collections::BTreeSet, sync::Arc};

use arc_swap::ArcSwapOption;
use kube::Client;
use tidewatch_shared::{identity::RuntimeId, plan::Plan};

use self::kit::Kit;
use crate::{base::key::KymaKey, controllers::wait::Wait, fleet::PathState, pki::Trust};

/// What is trusted at this moment.
pub type Trusted = Box<dyn Fn() -> Arc<Trust> + Send + Sync>;
/// Whether the path from a runtime is proven; `None` for an unknown Kyma.
pub type PathOf = Box<dyn Fn(&KymaKey) -> Option<PathState> + Send + Sync>;

/// Installs agents. One for all runtimes.
pub struct Installer {
    settings: Settings,
    trusted: Trusted,
    path: PathOf,
    course: upgrade::Course,
    pulled: pull::Pulled,
    metrics: Metrics,
    /// Nearly all of what is installed is the same in all runtimes that have the same plan.
    kit: ArcSwapOption<Kit>,
}

/// What became of an installation.
#[derive(Debug, Default)]
pub struct Report {
    /// Parts that were written.
    pub written: BTreeSet<Part>,
    /// Parts that could not be brought to what they shall be, and why.
    pub failures: Vec<Failure>,
    /// Parts that wait for others that failed.
    pub held: BTreeSet<Part>,
}

impl Installer {
    /// Knows no runtime yet.
    #[must_use]
    pub fn new(settings: Settings, trusted: Trusted, path: PathOf, course: upgrade::Course, metrics: Metrics) -> Self {
        let pulled = pull::Pulled::default();
        Self { settings, trusted, path, course, pulled, metrics, kit: ArcSwapOption::empty() }
    }

    /// Brings what the image is pulled with to the runtimes too.
    #[must_use]
    pub fn with_pull_secret(self, pulled: pull::Pulled) -> Self {
        Self { pulled, ..self }
    }

    /// Brings a runtime to what an agent needs. Asks only for what `installed` does not know, writes only what differs, and notes what it
    /// proved. What is refused is named and stops nothing that does not depend on it.
    pub async fn install(
        &self,
        client: &Client,
        key: &KymaKey,
        runtime: &RuntimeId,
        plan: &Arc<Plan>,
        installed: &mut Installed,
    ) -> Report {
        let (kit, image) = (self.kit(plan), self.course.image_of(runtime));
        let report = apply::Run::new(client, runtime, image, &kit, installed).run().await;
        self.metrics.installed(&report);
        self.note(key, installed);
        report
    }

    /// Takes away what was installed, by us or by the incumbent: its webhooks first, then the agent, and its objects after it. `Some` while the
    /// runtime is still deleting.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) async fn remove(&self, client: &Client) -> Result<Option<Wait>, Failure> {
        removal::step(client).await
    }

    /// What the upgrade of agents is judged by.
    fn note(&self, key: &KymaKey, installed: &Installed) {
        if let Some(image) = &installed.image {
            self.course.saw(key, image, !installed.settling);
        }
    }

    fn kit(&self, plan: &Arc<Plan>) -> Arc<Kit> {
        let (trust, pulled) = ((self.trusted)(), self.pulled.content());
        if let Some(kit) = self.kit.load_full().filter(|kit| kit.is_of(plan, &trust.agents, pulled.as_ref())) {
            return kit;
        }
        let kit = Arc::new(Kit::new(&self.settings, plan.clone(), &trust.agents, pulled.as_ref()));
        self.kit.store(Some(kit.clone()));
        kit
    }
}
