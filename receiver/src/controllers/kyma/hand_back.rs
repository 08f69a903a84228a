//! Hand-back of a Kyma to the incumbent, requested by a label: removes our agent from the runtime cluster, then our own
//! conditions and annotations; the label's new value is our last write. Shared objects stay as the incumbent leaves
//! them: both Kymas with their finalizer, Manifests, CRDs and catalog.
//!
//! The agent's objects are removed although some bear names of the incumbent's: it applies all of its own in each
//! reconcile, and could not apply them over ours (the type of a Secret is immutable, and our fields in a Deployment
//! would remain).

use std::time::Duration;

use serde_json::json;
use tidewatch_shared::{
    api::Kyma,
    names::{annotation, label},
};
use tracing::info;

use super::{Context, Error, base, leave};
use crate::{
    base::{key::KymaKey, takeover},
    controllers::pending_removal::PendingRemoval,
};

/// Continues the hand-back of a Kyma. Returns the delay until the next step, `None` after the last one.
pub(super) async fn step(ctx: &Context, key: &KymaKey, mut kyma: Kyma) -> Result<Option<Duration>, Error> {
    // The objects of a Kyma that was never managed here are the incumbent's.
    if takeover::is_managed(&kyma) {
        let cleared = clear(ctx, key).await;
        let pending = leave::after(ctx, &mut kyma, cleared).await?;
        if pending.is_some() {
            return Ok(pending);
        }
    }
    let kyma = ctx.status().withdraw(kyma).await?;
    let metadata = json!({
        "labels": {label::HAND_BACK: label::HAND_BACK_DONE},
        "annotations": {annotation::ACCEPTED_SPEC: null, annotation::INPUTS: null},
    });
    base::patch_metadata(ctx, &kyma, metadata).await?;
    info!(kyma = %key, "Kyma is handed back");
    ctx.forget(key);
    Ok(None)
}

/// Removes the agent and the inventory from the runtime cluster. `None` once all are gone.
async fn clear(ctx: &Context, key: &KymaKey) -> Result<Option<PendingRemoval>, Error> {
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
    Ok(None)
}
