//! Common step of deletion and hand-back: writes the blocking objects to the status in KCP.

use std::time::Duration;

use tidewatch_api::{Kyma, key::KymaKey};
use tidewatch_installer::pending_removal::PendingRemoval;

use super::{Context, Error, status::Findings};

/// Returns the delay until the next check while objects block the removal; `None` before the last step.
pub(super) async fn after(
    ctx: &Context,
    kyma: &mut Kyma,
    removal: Result<Option<PendingRemoval>, Error>,
) -> Result<Option<Duration>, Error> {
    let deleting = kyma.metadata.deletion_timestamp.is_some();
    let mut findings = Findings { deleting, ..Findings::default() };
    match &removal {
        // A Kyma that is about to be deleted needs no final status.
        Ok(None) if deleting => return Ok(None),
        Ok(pending) => findings.waits = pending.as_ref().and_then(|pending| pending.message.clone()),
        Err(error) if !error.is_reported() => return removal.map(|_| None),
        Err(error) => {
            findings.conditions.access = error.access();
            let has_access = findings.conditions.access.is_none();
            let line = error.line();
            findings.failure = Some(if deleting && !has_access { without_access(&line) } else { line });
        }
    }
    ctx.write_status(kyma, &findings).await?;
    Ok(removal?.map(|pending| ctx.caches.removals.delay(&KymaKey::of(kyma), &pending)))
}

/// Text about a deletion without access to the runtime: an access Secret that outlives its cluster would block it for ever.
pub(super) fn without_access(fault: &str) -> String {
    format!("{fault}; if the cluster no longer exists, delete its access Secret")
}
