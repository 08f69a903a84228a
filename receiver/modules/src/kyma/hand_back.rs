//! Hand-back of a Kyma to lifecycle-manager, requested by a label: removes our agent from the runtime cluster, waits for
//! the reconciles of its Manifests to end, then removes our own conditions and annotations; the label's new value is
//! our last write. Shared objects stay as lifecycle-manager leaves them: both Kymas with their finalizer, Manifests, CRDs
//! and catalog.
//!
//! The agent's objects are removed although some bear names of lifecycle-manager's: it applies all of its own in each
//! reconcile, and could not apply them over ours (the type of a Secret is immutable, and our fields in a Deployment
//! would remain).

use std::time::Duration;

use serde_json::json;
use tidewatch_api::{
    Kyma,
    facts::KymaFacts,
    key::KymaKey,
    names::{annotation, label},
};
use tidewatch_fleet::stores::kymas;
use tidewatch_installer::pending_removal::PendingRemoval;
use tracing::info;

use super::{Context, Error, base, leave, skip_label};

/// Interval of checks for reconciles of Manifests in progress.
const RECHECK: Duration = Duration::from_secs(1);

/// Continues the hand-back of a Kyma. Returns the delay until the next step, `None` after the last one.
pub(super) async fn step(ctx: &Context, key: &KymaKey, mut kyma: Kyma) -> Result<Option<Duration>, Error> {
    // The objects of a Kyma that was never managed here are lifecycle-manager's.
    if KymaFacts::from(&kyma).is_managed() {
        let cleared = clear(ctx, key, &kyma).await;
        let pending = leave::after(ctx, &mut kyma, cleared).await?;
        if pending.is_some() {
            return Ok(pending);
        }
    }
    let kyma = ctx.withdraw_conditions(kyma).await?;
    let metadata = json!({
        "labels": {label::HAND_BACK: label::HAND_BACK_DONE},
        "annotations": {annotation::ACCEPTED_SPEC: null, annotation::INPUTS: null},
    });
    base::patch_metadata(ctx, &kyma, metadata).await?;
    info!(kyma = %key, "Kyma is handed back");
    ctx.forget(key);
    Ok(None)
}

/// Removes the agent and the inventory from the runtime cluster, and our label from the Manifests. `None` once all are
/// gone, and no Manifest is reconciled any more.
async fn clear(ctx: &Context, key: &KymaKey, kyma: &Kyma) -> Result<Option<PendingRemoval>, Error> {
    let (client, _) = (ctx.clients)(key)?;
    // A cancelled hand-back verifies everything again.
    ctx.caches.verified.forget(key);
    ctx.catalog.forget(key);
    if let Some(installer) = &ctx.installer {
        let waits = installer.remove(&client).await.map_err(|failure| Error::Agent(failure.error))?;
        if waits.is_some() {
            return Ok(waits);
        }
    }
    ctx.catalog.remove_inventory(&client).await.map_err(Error::Catalog)?;
    if !is_shown(ctx, key) || (ctx.modules_in_progress)(key) {
        let message = "waiting for the reconciles of the modules to end".to_owned();
        return Ok(Some(PendingRemoval::after(RECHECK, Some(message))));
    }
    skip_label::remove(ctx, kyma).await?;
    Ok(None)
}

/// Returns true if the cache shows the request, so that no reconcile of a Manifest begins any more.
fn is_shown(ctx: &Context, key: &KymaKey) -> bool {
    let cached = kymas::find(&ctx.stores.kymas, key);
    cached.is_some_and(|kyma| kyma.facts().is_hand_back_requested())
}
