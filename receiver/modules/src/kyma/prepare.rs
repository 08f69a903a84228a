//! Prepares the runtime cluster: the objects that every one has, the agent, its Kyma, and its catalog.

use std::collections::BTreeSet;

use kube::{Client, ResourceExt as _};
use tidewatch_api::{Condition, ConditionStatus, Kyma, identity::RuntimeId, names::label, plan::Work};
use tidewatch_cluster::{
    error_class::ErrorClass,
    runtime_access::{AccessRemark, KEPT_FOR, describe, is_unanswered, retain},
};
use tidewatch_fleet::queue::{QueuedWork, WorkSet};
use tidewatch_installer::{Component, ComponentError, Readiness, Report, Subject, was_ready};
use tidewatch_kit::variant::VariantName as _;
use tracing::{debug, warn};

use super::{
    Error, REFUSED_AGAIN, Reconcile, base, log_failure, pull_secret,
    remote::{self, Ensured},
    status::Conditions,
    verified_cache::Verified,
};

impl Reconcile<'_> {
    /// Applies the objects that every runtime cluster has; if the work covers the modules, also reads or creates its Kyma.
    pub(super) async fn prepare(&mut self, queued: &QueuedWork, works: WorkSet) -> Result<(), Error> {
        let Self { ctx, key, .. } = *self;
        let (client, revision) = (ctx.clients)(key)?;
        let mut verified = ctx.caches.verified.take_valid(key, revision, &queued.drift);
        let mut contested = Vec::new();
        base::ensure(ctx, key, &client, &mut verified, &mut contested).await.inspect_err(|error| {
            if matches!(error, Error::Crd { .. } | Error::NotEstablished(_) | Error::CrdTerminating(_)) {
                self.findings.conditions.crds = Some(Err(error.line()));
            }
            if error.is_of_pull_secret() {
                self.findings.conditions.pull_secret = Some(Err(error.line()));
            }
        })?;
        let crd = contested.iter().find(|error| matches!(error, Error::CrdContested(_)));
        self.findings.conditions.crds = Some(crd.map_or(Ok(None), |error| Err(error.line())));
        self.findings.conditions.pull_secret =
            ctx.pull_secret.as_ref().map(|secret| pull_secret::observation(secret, &contested));
        // None of the agent's objects is kept.
        retain(self.install(&client, &mut verified)).await?;
        let became_ready =
            self.findings.conditions.webhook.as_ref().is_some_and(Readiness::is_met) && !was_ready(&self.kyma);
        if works.minus(WorkSet::INSTALLER).is_empty() && !became_ready && !failed_on_runtime(&self.kyma) {
            ctx.caches.verified.keep(key, verified);
            self.has_access();
            self.put_off(works, &contested);
            return Ok(());
        }
        let Ensured { kyma, record } = remote::ensure(ctx, key, &client, &mut self.kyma, &mut contested).await?;
        ctx.caches.verified.keep(key, verified);
        self.put_off(works, &contested);
        self.has_access();
        self.runtime = Some((client, kyma));
        self.unrecorded = record;
        Ok(())
    }

    /// Reports that the runtime responds. While that is by the last kubeconfig of a Secret that has none now, the Kyma is
    /// reconciled again when that time ends.
    fn has_access(&mut self) {
        let remark = (self.ctx.access_remark)(self.key);
        self.findings.conditions.access = Some(remark.map_or(Readiness::Ready, with_remark));
        if let Some(AccessRemark::LastKubeconfig(rest)) = remark {
            self.outcome.requeue_after = self.outcome.requeue_after.into_iter().chain([rest]).min();
        }
    }

    /// Reports contested objects, and retries their repair with its own backoff. The rest of the reconcile goes on.
    fn put_off(&mut self, works: WorkSet, contested: &[Error]) {
        for error in contested {
            let class = log_failure(self.ctx, self.key, error);
            self.findings.failure.get_or_insert_with(|| error.line());
            (self.outcome.deferred, self.outcome.ended) = (works, self.outcome.ended.minus(works));
            self.outcome.class.get_or_insert(class);
        }
    }

    /// Installs the agent. Its failure stops no other work, unless nothing answered: then further requests would wait in vain.
    async fn install(&mut self, client: &Client, verified: &mut Verified) -> Result<(), Error> {
        let Self { ctx, key, .. } = *self;
        let Some(installer) = &ctx.installer else { return Ok(()) };
        let installed = &mut verified.installed;
        let id = self.kyma.labels().get(label::RUNTIME_ID).and_then(|id| id.parse::<RuntimeId>().ok());
        let Some(id) = id else {
            let message = format!("the Kyma has no runtime id in its label {}", label::RUNTIME_ID);
            self.findings.conditions.webhook = Some(Readiness::Not { reason: "NoRuntimeId", message });
            return Ok(());
        };
        let plan = ctx.plans.of(key);
        let subject = Subject { key, kyma: &self.kyma, runtime: &id };
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
            return Err(Error::Install(report.failures.swap_remove(at).error));
        }
        let (readiness, look) = installer.readiness(client, key, &self.kyma, &report, installed).await;
        self.findings.conditions.webhook = readiness;
        // A refusal by the user's cluster is reported in the status and ends the work; other failures back off.
        let class = failures.iter().map(|failure| failure.error.class()).find(|class| *class != ErrorClass::Refused);
        match class {
            Some(class) => self.failed(WorkSet::INSTALLER, class),
            None if failures.iter().all(ComponentError::is_of_additional) => self.outcome.requeue_after = look,
            None => self.outcome.requeue_after = Some(REFUSED_AGAIN),
        }
        Ok(())
    }

    /// Syncs the catalog, and writes the result to the status of KCP's Kyma, unless the body of the access Secret is missing. A
    /// failure of the sync stops no other work.
    pub(super) async fn catalog(&mut self, queued: &QueuedWork) -> Result<(), Error> {
        let Self { ctx, key, .. } = *self;
        let client = match &self.runtime {
            Some((client, _)) => Ok(client.clone()),
            None => (ctx.clients)(key).map(|(client, _)| client),
        };
        let synced = match client {
            Ok(client) => {
                let synced = ctx.catalog.sync(key, &client, self.kyma.labels(), &ctx.stores, &queued.drift).await;
                synced.map_err(Error::Catalog)
            }
            Err(error) => Err(error.into()),
        };
        let observed = match &synced {
            Ok(()) => Ok(ctx.catalog.held_notice()),
            Err(Error::Catalog(error)) => Err(error.describe()),
            Err(error) => Err(error.line()),
        };
        let access = synced.as_ref().err().and_then(Error::access);
        let conditions = Conditions { catalog: Some(observed), access, ..Conditions::default() };
        if synced.as_ref().err().is_none_or(Error::is_reported) {
            ctx.write_conditions(&mut self.kyma, &conditions).await?;
        }
        let Err(error) = synced else { return Ok(()) };
        let work = WorkSet::of(&[Work::Catalog]);
        self.failed(work, log_failure(ctx, key, &error));
        // A runtime cluster whose Kyma has just been read was reached.
        self.outcome.unreached = self.runtime.is_none() && error.is_unreached();
        // A failure of the catalog alone delays no other work of the runtime cluster.
        if matches!(&error, Error::Catalog(error) if error.is_catalog_only()) {
            self.outcome.failed = self.outcome.failed.minus(work);
            self.outcome.deferred |= work;
        }
        Ok(())
    }
}

/// Condition `RuntimeAccess` of a runtime that responds.
fn with_remark(remark: AccessRemark) -> Readiness {
    match remark {
        AccessRemark::LastKubeconfig(_) => Readiness::ReadyWith {
            reason: "LastKubeconfig",
            message: format!(
                "the runtime can be reached with the last kubeconfig of the access Secret, which has none now; it is used for \
                 up to {} minutes",
                KEPT_FOR.as_secs() / 60
            ),
        },
        AccessRemark::PublicRoots => Readiness::ReadyWith {
            reason: Condition::READY,
            message:
                "the runtime can be reached; the kubeconfig has no CA data, so the public roots of the receiver's \
                      system are trusted"
                    .to_owned(),
        },
    }
}

/// Names of components, for a log line.
fn names(components: &BTreeSet<Component>) -> String {
    components.iter().map(|component| component.as_str()).collect::<Vec<_>>().join(", ")
}

/// Returns true if the last reconcile failed on the runtime cluster itself: then state and modules report that failure, and only a
/// reconcile of the modules resolves it.
fn failed_on_runtime(kyma: &Kyma) -> bool {
    let is_false = |kind| {
        let condition = kyma.status.as_ref().and_then(|status| status.condition(kind));
        condition.is_some_and(|condition| condition.status == ConditionStatus::False)
    };
    is_false("RuntimeAccess") || is_false("CRDsSync")
}
