//! The surroundings of the user's selection in a runtime cluster: namespace and CRDs first, then at once image pull secret,
//! plan or agent, and catalog. The selection learns from it only that namespace and CRDs are there.

use std::{collections::BTreeSet, time::Duration};

use futures::future::{OptionFuture, join4};
use kube::{Client, ResourceExt as _};
use tidewatch_api::{Kyma, identity::RuntimeId, key::KymaKey, names::label};
use tidewatch_cluster::{
    error_class::ErrorClass,
    runtime_access::{describe, is_unanswered, retain},
};
use tidewatch_fleet::queue::Drift;
use tidewatch_installer::{Component, ComponentError, InstallationState, Readiness, Report, Subject};
use tidewatch_kit::variant::VariantName as _;
use tokio::sync::oneshot;
use tracing::{debug, warn};

use super::{
    Context, Error, REFUSED_AGAIN,
    base::{self, Prepared},
    pull_secret,
    status::Conditions,
    verified_cache::Verified,
};

/// The runtime cluster of one reconcile.
#[derive(Clone, Copy)]
pub(super) struct Site<'a> {
    pub(super) ctx: &'a Context,
    pub(super) key: &'a KymaKey,
    pub(super) client: &'a Client,
    /// The Kyma in KCP when the reconcile began.
    pub(super) kyma: &'a Kyma,
}

/// Result of the surroundings.
#[derive(Default)]
pub(super) struct Surroundings {
    /// Those of the CRDs and the image pull secret.
    pub(super) conditions: Conditions,
    /// Objects that a competing writer changes back, in the order of their steps.
    pub(super) contested: Vec<Error>,
    /// The first failure of namespace, CRDs, image pull secret and plan.
    pub(super) failure: Option<Error>,
    pub(super) agent: Agent,
    /// `None` if the catalog was not synced.
    pub(super) catalog: Option<Result<(), Error>>,
}

/// Result of the agent's installation.
#[derive(Default)]
pub(super) struct Agent {
    /// The condition `SKRWebhook`; `None` leaves it as it is.
    pub(super) webhook: Option<Readiness>,
    /// Nothing answered, so the installation ended early.
    pub(super) lost: Option<Error>,
    /// Class of a failure that backs off.
    pub(super) failed: Option<ErrorClass>,
    /// Delay until the installation is looked at again.
    pub(super) look_again: Option<Duration>,
}

/// Brings the surroundings to their desired state; the catalog only if its drift is given. Sends `prepared` once namespace and
/// CRDs are there. If they are not, drops it and does nothing else. A later part that fails stops no other.
pub(super) async fn ensure(
    site: Site<'_>,
    catalog: Option<&Drift>,
    mut verified: Verified,
    prepared: oneshot::Sender<Prepared>,
) -> Surroundings {
    let Site { ctx, key, client, .. } = site;
    let mut found = Surroundings::default();
    match base::ensure(ctx, key, client, &mut verified, &mut found.contested).await {
        Ok(base) => {
            // A selection that did not have to wait is no longer listening.
            let _ = prepared.send(base);
        }
        Err(error) => {
            if matches!(error, Error::Crd { .. } | Error::NotEstablished(_) | Error::CrdTerminating(_)) {
                found.conditions.crds = Some(Err(error.line()));
            }
            found.failure = Some(error);
            return found;
        }
    }
    let crd = found.contested.iter().find(|error| matches!(error, Error::CrdContested(_)));
    found.conditions.crds = Some(crd.map_or(Ok(None), |error| Err(error.line())));

    let copied = base::copy_pull_secret(ctx, key, client, &mut verified.pull_secret);
    let planned = base::bring_plan(ctx, key, client, &mut verified.plan);
    // None of the agent's objects is kept.
    let installed = Box::pin(retain(site.install(&mut verified.installed)));
    let synced = Box::pin(OptionFuture::from(catalog.map(|drift| site.sync_catalog(drift))));
    let (copied, planned, agent, synced) = join4(copied, planned, installed, synced).await;
    // Each entry was proved in this reconcile or before, whatever becomes of the other half.
    ctx.caches.verified.keep(key, verified);

    for error in [copied, planned].into_iter().filter_map(Result::err) {
        if error.is_contested() {
            found.contested.push(error);
        } else {
            found.failure.get_or_insert(error);
        }
    }
    found.conditions.pull_secret = match &found.failure {
        Some(error) if error.is_of_pull_secret() => Some(Err(error.line())),
        _ => ctx.pull_secret.as_ref().map(|secret| pull_secret::observation(secret, &found.contested)),
    };
    Surroundings { agent, catalog: synced, ..found }
}

impl Site<'_> {
    /// Installs the agent. Once nothing answers, sends no further requests, which would wait in vain.
    async fn install(self, installed: &mut InstallationState) -> Agent {
        let Self { ctx, key, client, kyma } = self;
        let Some(installer) = &ctx.installer else { return Agent::default() };
        let id = kyma.labels().get(label::RUNTIME_ID).and_then(|id| id.parse::<RuntimeId>().ok());
        let Some(id) = id else {
            let message = format!("the Kyma has no runtime id in its label {}", label::RUNTIME_ID);
            let webhook = Some(Readiness::Not { reason: "NoRuntimeId", message });
            return Agent { webhook, ..Agent::default() };
        };
        let plan = ctx.plans.of(key);
        let subject = Subject { key, kyma, runtime: &id };
        let mut report = installer.install(client, subject, &plan, installed, &ctx.budgets).await;
        let Report { failures, written, blocked } = &report;
        if !written.is_empty() {
            let written = names(written);
            debug!(kyma = %key, written, "Agent installation repaired");
        }
        for failure in failures {
            let cause = failure.error.call().map(describe);
            warn!(kyma = %key, error = %failure.error, cause, blocked = names(blocked), "Agent is not installed as desired");
        }
        let is_lost = |failure: &ComponentError| failure.error.call().is_some_and(is_unanswered);
        if let Some(at) = failures.iter().position(is_lost) {
            let lost = Some(Error::Install(report.failures.swap_remove(at).error));
            return Agent { lost, ..Agent::default() };
        }
        let (webhook, look) = installer.readiness(client, key, kyma, &report, installed).await;
        // A refusal by the user's cluster is reported in the status and ends the work; other failures back off.
        let failed = failures.iter().map(|failure| failure.error.class()).find(|class| *class != ErrorClass::Refused);
        let look_again = match failed {
            Some(_) => None,
            None if failures.iter().all(ComponentError::is_of_additional) => look,
            None => Some(REFUSED_AGAIN),
        };
        Agent { webhook, lost: None, failed, look_again }
    }

    /// Syncs the catalog.
    pub(super) async fn sync_catalog(self, drift: &Drift) -> Result<(), Error> {
        let Self { ctx, key, client, kyma } = self;
        ctx.catalog.sync(key, client, kyma.labels(), &ctx.stores, drift).await.map_err(Error::Catalog)
    }
}

/// Names of components, for a log line.
fn names(components: &BTreeSet<Component>) -> String {
    components.iter().map(|component| component.as_str()).collect::<Vec<_>>().join(", ")
}
