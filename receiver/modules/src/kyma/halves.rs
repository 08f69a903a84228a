//! The two halves of a reconcile, at once: the user's selection with its modules, and the `surroundings` of the modules. A
//! change of the user does not wait for surroundings that are far, or that fail.

use futures::future::join;
use kube::Client;
use tidewatch_api::{Condition, plan::Work};
use tidewatch_cluster::runtime_access::{AccessRemark, KEPT_FOR};
use tidewatch_fleet::queue::{QueuedWork, WorkSet};
use tidewatch_installer::{Readiness, was_ready};
use tokio::sync::oneshot;
use tracing::debug;

use super::{
    Error, Reconcile,
    base::Prepared,
    log_failure,
    parts::{Parts, Selecting},
    remote::{self, Ensured},
    status::Conditions,
    surroundings::{self, Site, Surroundings},
};

impl Reconcile<'_> {
    /// Carries out the parts in the runtime cluster, and takes over their findings. Neither half stops the other.
    ///
    /// # Errors
    /// The failure of the surroundings, else that of the selection.
    pub(super) async fn halves(&mut self, queued: &QueuedWork, parts: Parts) -> Result<(), Error> {
        let Self { ctx, key, .. } = *self;
        let Some(selecting) = parts.selection else {
            if parts.catalog {
                self.catalog_alone(queued).await;
            }
            return Ok(());
        };
        let (client, revision) = (ctx.clients)(key)?;
        let verified = ctx.caches.verified.take_valid(key, revision, &queued.drift);
        // The other half writes its own.
        let kyma = self.kyma.clone();
        let site = Site { ctx, key, client: &client, kyma: &kyma };
        let catalog = parts.catalog.then_some(&queued.drift);
        let (sender, prepared) = oneshot::channel();
        let surroundings = Box::pin(surroundings::ensure(site, catalog, verified, sender));
        let (selected, surroundings) = match selecting {
            // Polled first, so that the selection has the first request of a new connection.
            Selecting::AtOnce => join(Box::pin(self.select(&client, prepared)), surroundings).await,
            Selecting::OnceReady => {
                let surroundings = surroundings.await;
                let is_ready = surroundings.agent.webhook.as_ref().is_some_and(Readiness::is_met);
                let became_ready = is_ready && !was_ready(&kyma) && surroundings.failure.is_none();
                let selected = if became_ready { Box::pin(self.select(&client, prepared)).await } else { Ok(()) };
                (selected, surroundings)
            }
        };
        let is_lost = selected.as_ref().is_err_and(|error| error.access().is_some());
        let failure = self.take_over(surroundings, parts.works, is_lost);
        if self.runtime.is_some() || (failure.is_none() && selected.is_ok()) {
            self.has_access();
        }
        match (failure, selected) {
            // Tried again at once, and the surroundings with it.
            (Some(_), Err(conflict)) if conflict.is_conflict() => Err(conflict),
            (Some(failure), Err(other)) => {
                // Without access both halves fail for the same reason.
                if other.access().is_some() {
                    debug!(kyma = %key, error = %other, "Selection is not reconciled either");
                } else {
                    log_failure(ctx, key, &other);
                }
                Err(failure)
            }
            (Some(failure), Ok(())) => Err(failure),
            (None, selected) => selected,
        }
    }

    /// Syncs the catalog of a reconcile with no other part.
    async fn catalog_alone(&mut self, queued: &QueuedWork) {
        let Self { ctx, key, .. } = *self;
        let synced = match (ctx.clients)(key) {
            Ok((client, _)) => {
                let site = Site { ctx, key, client: &client, kyma: &self.kyma };
                site.sync_catalog(&queued.drift).await
            }
            Err(error) => Err(error.into()),
        };
        self.catalog_ended(synced);
    }

    /// Reads or creates the runtime cluster's Kyma, and applies the modules that it selects.
    async fn select(&mut self, client: &Client, prepared: oneshot::Receiver<Prepared>) -> Result<(), Error> {
        let Self { ctx, key, .. } = *self;
        let ensured = remote::ensure(ctx, key, client, &mut self.kyma, prepared, &mut self.contested).await?;
        // Without namespace or CRDs there is no Kyma, and the surroundings report why.
        let Some(Ensured { kyma, record }) = ensured else { return Ok(()) };
        self.runtime = Some((client.clone(), kyma));
        self.unrecorded = record;
        self.modules().await
    }

    /// Takes over the findings of the surroundings. Returns their failure. `is_lost`: the selection could not be read for want of
    /// access, which the catalog need not report once more.
    fn take_over(&mut self, surroundings: Surroundings, works: WorkSet, is_lost: bool) -> Option<Error> {
        let Surroundings { conditions, mut contested, mut failure, agent, catalog } = surroundings;
        self.findings.conditions = Conditions { webhook: agent.webhook, ..conditions };
        // A failed module decides on the backoff before all others.
        let of_modules = self.outcome.class.take();
        if let Some(class) = agent.failed {
            self.failed(WorkSet::INSTALLER, class);
        }
        match agent.lost {
            // A runtime cluster whose Kyma has just been read was reached: only the installation is tried again.
            Some(lost) if self.runtime.is_some() => {
                let class = log_failure(self.ctx, self.key, &lost);
                self.failed(WorkSet::INSTALLER, class);
            }
            lost => failure = failure.or(lost),
        }
        self.outcome.requeue_after = agent.look_again;
        contested.append(&mut self.contested);
        self.put_off(works, &contested);
        match catalog {
            Some(Err(error)) if is_lost && error.is_unreached() => {
                self.failed(WorkSet::of(&[Work::Catalog]), error.class());
            }
            Some(synced) => self.catalog_ended(synced),
            None => {}
        }
        self.outcome.class = of_modules.or(self.outcome.class);
        failure
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

    /// Returns whether a failure proves that the runtime cluster is not reached. One whose Kyma has just been read was.
    pub(super) fn is_unreached(&self, error: &Error) -> bool {
        self.runtime.is_none() && error.is_unreached()
    }

    /// Reports contested objects, and retries their repair with its own backoff. The rest of the reconcile goes on.
    fn put_off(&mut self, works: WorkSet, contested: &[Error]) {
        for error in contested {
            let class = log_failure(self.ctx, self.key, error);
            self.findings.failure.get_or_insert_with(|| error.line());
            self.outcome.deferred |= works;
            self.outcome.ended = self.outcome.ended.minus(works);
            self.outcome.class.get_or_insert(class);
        }
    }

    /// Reports a sync of the catalog, unless the body of the access Secret is missing. A failure stops no other work.
    fn catalog_ended(&mut self, synced: Result<(), Error>) {
        let Self { ctx, key, .. } = *self;
        let Err(error) = synced else {
            self.findings.conditions.catalog = Some(Ok(ctx.catalog.held_notice()));
            return;
        };
        if error.is_reported() {
            let line = match &error {
                Error::Catalog(error) => error.describe(),
                error => error.line(),
            };
            self.findings.conditions.catalog = Some(Err(line));
            self.findings.conditions.access = error.access();
        }
        let work = WorkSet::of(&[Work::Catalog]);
        self.failed(work, log_failure(ctx, key, &error));
        self.outcome.unreached = self.is_unreached(&error);
        // A failure of the catalog alone delays no other work of the runtime cluster.
        if matches!(&error, Error::Catalog(error) if error.is_catalog_only()) {
            self.outcome.failed = self.outcome.failed.minus(work);
            self.outcome.deferred |= work;
        }
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
