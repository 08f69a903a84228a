//! Common steps of deletion and hand-back: writes the blocking objects to the status in KCP and requeues.

use std::ops::ControlFlow;

use kube::ResourceExt;
use tidewatch_shared::api::Kyma;

use super::{Context, Error};
use crate::{
    controllers::pending_removal::PendingRemoval,
    controllers::status::{Conditions, Findings},
    fleet::queue::{ReconcileOutcome, WorkSet},
};

/// Kind of removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The Kyma is deleted.
    Deletion,
    /// The incumbent takes over.
    HandBack,
}

/// Ends the reconcile while objects block the removal; otherwise returns the Kyma as stored for the last step.
pub(super) async fn after(
    ctx: &Context,
    kyma: Kyma,
    works: WorkSet,
    way: Way,
    came: Result<Option<PendingRemoval>, Error>,
) -> Result<ControlFlow<ReconcileOutcome, Kyma>, Error> {
    match came {
        Ok(Some(wait)) => {
            let findings = Findings { waits: wait.message, ..Findings::default() };
            write_status(ctx, kyma, way, findings).await?;
            Ok(ControlFlow::Break(ReconcileOutcome {
                requeue_after: Some(wait.requeue_after),
                ..ReconcileOutcome::ended(works)
            }))
        }
        // A Kyma that is about to be deleted needs no final status.
        Ok(None) if way == Way::Deletion => Ok(ControlFlow::Continue(kyma)),
        Ok(None) => write_status(ctx, kyma, way, Findings::default()).await.map(ControlFlow::Continue),
        Err(error) => {
            if !error.is_conflict() {
                let conditions = Conditions { access: error.access(), ..Conditions::default() };
                let findings = Findings { conditions, failure: Some(error.line()), ..Findings::default() };
                write_status(ctx, kyma, way, findings).await?;
            }
            Err(error)
        }
    }
}

async fn write_status(ctx: &Context, mut kyma: Kyma, way: Way, findings: Findings) -> Result<Kyma, Error> {
    let findings = Findings { deleting: way == Way::Deletion, ..findings };
    let (status, version) = ctx.status().write(&kyma, &findings, &super::now()).await?;
    kyma.status = Some(status);
    kyma.metadata.resource_version = version.or_else(|| kyma.resource_version());
    Ok(kyma)
}
