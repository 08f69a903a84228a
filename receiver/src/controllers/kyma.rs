//! The reconcile of one Kyma: fetch → validate → build → apply → status, and its end.
//!
//! A pass reads the Kyma in KCP and the one in its runtime, and whatever `memory` does not know to be as it shall be. It writes
//! only what differs. What `validate`, `lookup`, `build`, `modules` and `status` decide is pure.

mod apply;
mod base;
mod build;
mod crd;
mod deletion;
mod error;
pub(crate) mod fetch;
mod hand_back;
mod inputs;
mod leave;
mod lookup;
mod memory;
mod metrics;
mod modules;
mod remote;
mod requeues;
mod status;
#[cfg(test)]
mod tests;
mod validate;
mod written;

use std::{collections::BTreeSet, time::Duration};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Client, ResourceExt, runtime::reflector::ObjectRef};
use tidewatch_shared::{api::Kyma, identity::RuntimeId, names::label, plan::Work, trace};
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

pub use error::Error;
pub use metrics::Metrics;
pub use requeues::Requeues;

pub(crate) use inputs::{Inputs, is_our_note};

use self::{
    error::unusable,
    lookup::Sources,
    memory::{Memory, Verified},
    remote::Both,
    status::{Access, Findings},
    validate::validate,
    written::Written,
};
use crate::{
    base::{
        class::Class,
        key::KymaKey,
        labels::is_true,
        pause::Pause,
        stores::{CurrentPlan, Stores},
        takeover::{self, Takeover},
    },
    controllers::{
        catalog::Catalog,
        installer::{self, Installer, Readiness, Report},
    },
    fleet::{
        hub::Job,
        queue::{Outcome, Wanted, Works},
    },
    kube::runtime_access::{RuntimeAccess, Unusable, describe},
};

/// Until an installation that a runtime refuses is tried again.
pub(crate) const REFUSED_AGAIN: Duration = Duration::from_secs(60);
/// The reason of the condition about access when there is no Secret.
const SECRET_MISSING: &str = "AccessSecretMissing";

/// What flags decide about Kymas.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The registry that Manifests pull from: host with optional port and path.
    pub registry: String,
    /// `--restricted-default-modules`.
    pub restricted_modules: BTreeSet<String>,
    /// Whose runtime nothing is written to.
    pub pause: Pause,
    /// Which Kymas are this receiver's.
    pub takeover: Takeover,
    /// How long a new definition is waited for in a runtime.
    pub established_within: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            registry: String::new(),
            restricted_modules: BTreeSet::new(),
            pause: Pause::default(),
            takeover: Takeover::default(),
            established_within: Duration::from_secs(10),
        }
    }
}

/// Everything that a pass touches.
pub struct Context {
    kcp: Client,
    stores: Stores,
    clients: Clients,
    catalog: Catalog,
    plan: CurrentPlan,
    installer: Option<Installer>,
    settings: Settings,
    metrics: Metrics,
    memory: Memory,
    written: Written,
}

/// The client of a runtime with its number, or why there is none.
type Clients = Box<dyn Fn(&KymaKey) -> Result<(Client, u64), Unusable> + Send + Sync>;

impl Context {
    /// Knows no runtime yet.
    #[must_use]
    pub fn new(
        kcp: Client,
        stores: Stores,
        access: RuntimeAccess,
        catalog: Catalog,
        plan: CurrentPlan,
        settings: Settings,
        metrics: Metrics,
    ) -> Self {
        let clients: Clients = Box::new(move |key| access.client_and_revision(key));
        Self {
            kcp,
            stores,
            clients,
            catalog,
            plan,
            installer: None,
            settings,
            metrics,
            memory: Memory::default(),
            written: Written::default(),
        }
    }

    /// Installs the agents too.
    #[must_use]
    pub fn with_installer(self, installer: Installer) -> Self {
        Self { installer: Some(installer), ..self }
    }

    /// Forgets what was verified in a runtime whose Kyma is gone.
    pub fn forget(&self, key: &KymaKey) {
        self.memory.forget(key);
        self.written.forget(key);
        self.catalog.forget(key);
    }
}

/// Works on one Kyma as far as its job wants. Never fails: what went wrong stands in the outcome, in the status where it
/// concerns the user, and in the log.
pub async fn pass(ctx: &Context, job: &Job) -> Outcome {
    let _span = traced(job);
    work(ctx, &job.key, &job.wanted, job.patience()).await
}

/// The span of a pass: it continues the trace of the wait for it.
pub(crate) fn traced(job: &Job) -> Option<trace::Span> {
    trace::span("reconcile", None, job.traceparent())
}

async fn work(ctx: &Context, key: &KymaKey, wanted: &Wanted, patience: Duration) -> Outcome {
    let start = Instant::now();
    // Forwarding is another worker's: it stays as it is.
    let works = wanted.works.minus(Works::of(&[Work::Forward]));
    let outcome = match timeout(patience, reconcile(ctx, key, wanted, works)).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(error)) => failed(ctx, key, works, &error),
        Err(_) => {
            // What was sent last may land or not: the next pass reads everything.
            ctx.memory.forget(key);
            ctx.catalog.forget(key);
            failed(ctx, key, works, &Error::TooLong(patience))
        }
    };
    ctx.metrics.ended(&outcome, start.elapsed());
    outcome
}

fn failed(ctx: &Context, key: &KymaKey, works: Works, error: &Error) -> Outcome {
    let class = error.class();
    ctx.metrics.requeues.failed(error);
    if error.is_conflict() {
        debug!(kyma = %key, %error, "somebody else wrote, the work begins anew");
    } else {
        let cause = std::error::Error::source(error).map(|source| match source.downcast_ref::<kube::Error>() {
            Some(call) => describe(call),
            None => source.to_string(),
        });
        warn!(kyma = %key, %error, cause, class = class.as_str(), "work failed");
    }
    Outcome::failed(works, class)
}

/// What may be done about a Kyma.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Everything.
    Active,
    /// Nothing, by pause or `skip-reconciliation`.
    Parked,
    /// Its end.
    Deleting,
    /// The way back to the incumbent.
    HandBack,
}

/// A deletion goes on although the Kyma is skipped, but not while it is paused; so does a hand-back. A Kyma that is being deleted is
/// handed to nobody.
fn mode(settings: &Settings, kyma: &Kyma) -> Mode {
    let labelled = |key| is_true(Some(kyma.labels()), key);
    match kyma.metadata.deletion_timestamp {
        _ if settings.pause.of(kyma).is_some() => Mode::Parked,
        Some(_) => Mode::Deleting,
        None if takeover::is_asked_back(kyma) => Mode::HandBack,
        None if labelled(label::SKIP_RECONCILIATION) && !settings.takeover.selects_skipped() => Mode::Parked,
        None => Mode::Active,
    }
}

async fn reconcile(ctx: &Context, key: &KymaKey, wanted: &Wanted, works: Works) -> Result<Outcome, Error> {
    let Some(kyma) = fetch::kcp_kyma(ctx, key).await? else {
        ctx.forget(key);
        return Ok(Outcome::ended(wanted.works));
    };
    let mode = mode(&ctx.settings, &kyma);
    if mode == Mode::Parked {
        return Ok(Outcome::default());
    }
    if let Some(rest) = ctx.settings.takeover.wait(key, &kyma, Instant::now()) {
        // It settles nothing, and is looked at again.
        return Ok(Outcome { again_in: Some(rest), ..Outcome::failed(works, Class::Refused) });
    }
    match mode {
        Mode::Deleting => return deletion::step(ctx, key, kyma, works).await.map(|outcome| waiting(ctx, outcome)),
        Mode::HandBack => return hand_back::step(ctx, key, kyma, works).await.map(|outcome| waiting(ctx, outcome)),
        Mode::Active | Mode::Parked => {}
    }
    let only = |of: &[Work]| works.minus(Works::of(of)).is_empty();
    let (only_catalog, is_whole) = (only(&[Work::Catalog]), !only(&[Work::Catalog, Work::Installer]));
    let kyma = base::mark(ctx, kyma).await?;
    // Taken before anything is read, so that what changes meanwhile is not noted as worked on.
    let inputs = Inputs::of(&kyma, &ctx.plan.load(), &ctx.catalog.content(kyma.labels(), &ctx.stores));
    let (installed, findings) = (Ok(None), Findings::default());
    let mut pass = Pass { ctx, key, kyma, is_whole, runtime: None, installed, turn: None, findings };
    let worked = if only_catalog { Ok(()) } else { pass.base(wanted).await };
    let mut outcome = Outcome::ended(works);
    if worked.is_ok() && works.contains(Work::Catalog) {
        outcome = pass.catalog(wanted, works).await;
    }
    let worked = match worked {
        Ok(()) if pass.is_whole => pass.modules().await,
        worked => worked,
    };
    if let Err(error) = worked {
        if !error.is_conflict() {
            pass.findings.failure = Some(error.line());
            pass.findings.conditions.access = error.access().or(pass.findings.conditions.access.take());
            pass.record_failure().await?;
        }
        return Err(error);
    }
    pass.record().await?;
    let outcome = Outcome { turn: pass.turn, ..with_installer(outcome, pass.installed) };
    inputs::note(ctx, &pass.kyma, &inputs, outcome.ended).await;
    Ok(outcome)
}

/// What became of the installation besides: tried again with backoff, or looked at again after a time.
fn with_installer(outcome: Outcome, installed: Result<Option<Duration>, Class>) -> Outcome {
    let installer = Works::INSTALLER;
    match installed {
        Ok(again_in) => Outcome { again_in: outcome.again_in.or(again_in), ..outcome },
        Err(class) => Outcome {
            ended: outcome.ended.minus(installer),
            failed: outcome.failed | installer,
            class: outcome.class.or(Some(class)),
            ..outcome
        },
    }
}

/// Counts what is looked at again because it is not gone yet.
fn waiting(ctx: &Context, outcome: Outcome) -> Outcome {
    if outcome.again_in.is_some() {
        ctx.metrics.requeues.waits();
    }
    outcome
}

/// One pass over one Kyma.
struct Pass<'a> {
    ctx: &'a Context,
    key: &'a KymaKey,
    /// The Kyma in KCP as it was last read or written.
    kyma: Kyma,
    /// It is about the Kyma in the runtime too.
    is_whole: bool,
    /// The client, and the Kyma in the runtime, as far as it was looked at.
    runtime: Option<(Client, Kyma)>,
    /// When to look at the installation again, or how it failed.
    installed: Result<Option<Duration>, Class>,
    /// After how long a module may have the version to which its channel moved.
    turn: Option<Duration>,
    findings: Findings,
}

impl Pass<'_> {
    /// Brings the runtime to what every runtime has; its Kyma too, if the pass is about it.
    async fn base(&mut self, wanted: &Wanted) -> Result<(), Error> {
        let Self { ctx, key, .. } = *self;
        let (client, revision) = (ctx.clients)(key).map_err(Error::Access)?;
        let mut verified = ctx.memory.take(key, revision, &wanted.drift);
        base::ensure(ctx, &client, &mut verified).await.inspect_err(|error| {
            if matches!(error, Error::Crd { .. } | Error::NotEstablished(_) | Error::CrdTerminating(_)) {
                self.findings.conditions.crds = Some(Err(error.line()));
            }
        })?;
        self.findings.conditions.crds = Some(Ok(None));
        self.install(&client, &mut verified).await;
        if !self.is_whole {
            ctx.memory.keep(key, verified);
            self.findings.conditions.access = Some(Access::Usable);
            return Ok(());
        }
        let Both { kcp, runtime } = remote::ensure(ctx, &client, self.kyma.clone()).await?;
        ctx.memory.keep(key, verified);
        self.findings.conditions.access = Some(Access::Usable);
        self.kyma = kcp;
        self.runtime = Some((client, runtime));
        Ok(())
    }

    /// Brings the agent to the runtime. Its failure stops nothing else.
    async fn install(&mut self, client: &Client, verified: &mut Verified) {
        let Self { ctx, key, .. } = *self;
        let Some(installer) = &ctx.installer else { return };
        let installed = &mut verified.installed;
        let id = self.kyma.labels().get(label::RUNTIME_ID).and_then(|id| id.parse::<RuntimeId>().ok());
        let Some(id) = id else {
            let message = format!("the Kyma has no runtime id in its label {}", label::RUNTIME_ID);
            self.findings.conditions.webhook = Some(Readiness::Not { reason: "NoRuntimeId", message });
            return;
        };
        let plan = ctx.plan.load_full();
        let report = installer.install(client, key, &id, &plan, installed).await;
        let Report { failures, written, held } = &report;
        if !written.is_empty() {
            debug!(kyma = %key, ?written, "the agent's installation was mended");
        }
        for failure in failures {
            let cause = failure.error.call().map(describe);
            warn!(kyma = %key, error = %failure.error, cause, ?held, "the agent is not installed as it shall be");
        }
        let (readiness, look) = installer.readiness(client, key, &self.kyma, &report, installed).await;
        // What the Kyma waited for is there: its state may be another one.
        self.is_whole |= readiness == Some(Readiness::Ready) && !installer::was_ready(&self.kyma);
        self.findings.conditions.webhook = readiness;
        // What the user's cluster refuses is the user's to see, and ends the work; the rest is tried again with backoff.
        let class = failures.iter().map(|failure| failure.error.class()).find(|class| *class != Class::Refused);
        self.installed = match class {
            Some(class) => Err(class),
            None if failures.is_empty() => Ok(look),
            None => Ok(Some(REFUSED_AGAIN)),
        };
    }

    /// Brings the catalog to the runtime. Its failure stops nothing else.
    async fn catalog(&mut self, wanted: &Wanted, works: Works) -> Outcome {
        let Self { ctx, key, .. } = *self;
        let client = match &self.runtime {
            Some((client, _)) => Ok(client.clone()),
            None => (ctx.clients)(key).map(|(client, _)| client),
        };
        let synced = match client {
            Ok(client) => {
                let labels = self.kyma.labels();
                ctx.catalog.sync(key, &client, labels, &ctx.stores, &wanted.drift).await.map_err(Error::Catalog)
            }
            Err(unusable) => Err(Error::Access(unusable)),
        };
        let catalog = Works::of(&[Work::Catalog]);
        match synced {
            Ok(_) => {
                self.findings.conditions.catalog = Some(Ok(ctx.catalog.held().map(|held| held.to_string())));
                Outcome::ended(works)
            }
            Err(error) => {
                self.findings.conditions.access = error.access().or(self.findings.conditions.access.take());
                let outcome = failed(ctx, key, catalog, &error);
                let ended = works.minus(catalog);
                let (words, is_alone) = match &error {
                    Error::Catalog(error) => (error.words(), error.is_of_catalog_alone()),
                    error => (error.line(), false),
                };
                self.findings.conditions.catalog = Some(Err(words));
                // What one runtime does not take of the catalog holds up nothing else of it.
                match is_alone {
                    true => Outcome { ended, failed: Works::EMPTY, put_off: catalog, ..outcome },
                    false => Outcome { ended, ..outcome },
                }
            }
        }
    }

    /// Brings the Manifests to what the runtime's Kyma wants.
    async fn modules(&mut self) -> Result<(), Error> {
        let Some((_, runtime)) = &self.runtime else { return Ok(()) };
        let wanted = match validate(&runtime.spec) {
            Ok(wanted) => wanted,
            Err(invalid) => {
                self.findings.failure = Some(invalid.to_string());
                return Ok(());
            }
        };
        let Self { ctx, kyma, .. } = self;
        let namespace = kyma.namespace().unwrap_or_default();
        let (stores, uid) = (&ctx.stores, kyma.uid().unwrap_or_default());
        let sources = Sources {
            namespace: &namespace,
            kyma_labels: kyma.labels(),
            restricted: &ctx.settings.restricted_modules,
            release_meta: &|name| stores.release_metas.get(&ObjectRef::new(name).within(&namespace)),
            template: &|name| stores.templates.get(&ObjectRef::new(name).within(&namespace)),
            held: &|module| ctx.catalog.holds(module),
            turn: &|module, channel, version| ctx.catalog.turn(&uid, module, channel, version),
        };
        let owned = fetch::owned_manifests(ctx, self.key, kyma).await?;
        let decisions = modules::decide(kyma, &wanted.modules, &owned, &sources, &ctx.settings.registry);
        self.turn = decisions.turn;
        let old = kyma.status.clone().unwrap_or_default();
        self.findings.modules = Some(apply::apply(ctx, self.key, kyma, decisions, &old).await?);
        self.findings.channel = Some(wanted.channel);
        Ok(())
    }

    /// Writes what was found out to both Kymas, where it says something new.
    async fn record(&self) -> Result<(), Error> {
        let (status, _) = status::write_kcp(self.ctx, &self.kyma, &self.findings, &now()).await?;
        match &self.runtime {
            Some((client, runtime)) => status::write_runtime(client, runtime, &status).await,
            None if Some(&status) != self.kyma.status.as_ref() => self.show(&status).await,
            None => Ok(()),
        }
    }

    /// As [`Self::record`], but what fails in the runtime is no news.
    async fn record_failure(&self) -> Result<(), Error> {
        let (status, _) = status::write_kcp(self.ctx, &self.kyma, &self.findings, &now()).await?;
        if let Some((client, runtime)) = &self.runtime
            && let Err(error) = status::write_runtime(client, runtime, &status).await
        {
            debug!(kyma = %self.key, %error, "the runtime does not see the failure");
        }
        Ok(())
    }

    /// Shows a status that changed in a pass which had no need of the runtime's Kyma.
    async fn show(&self, status: &tidewatch_shared::api::KymaStatus) -> Result<(), Error> {
        // Without access there is nobody to show it to.
        if let (Ok((client, _)), Some(Access::Usable) | None) =
            ((self.ctx.clients)(self.key), &self.findings.conditions.access)
            && let Some(runtime) = fetch::runtime_kyma(&client).await?
        {
            status::write_runtime(&client, &runtime, status).await?;
        }
        Ok(())
    }
}

/// The time in whole seconds, as statuses keep it.
fn now() -> Time {
    Time(Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default())
}
