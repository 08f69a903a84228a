//! The way back to the incumbent, asked for by a label: what only we have in the runtime goes, then what only we say of the Kyma; the
//! answer in that label is our last write. What both have, the incumbent finds as it would have left it: the Kymas with their
//! finalizer, the Manifests, the definitions and the catalog.
//!
//! The agent's objects go although some bear names of the incumbent's: it applies all of its own with each pass, and could not apply
//! them over ours (the type of a Secret never changes, and fields of ours in a Deployment would stay).

use std::ops::ControlFlow;

use serde_json::json;
use tidewatch_shared::{
    api::Kyma,
    names::{annotation, label},
};
use tracing::info;

use super::{
    Context, Error, base,
    leave::{self, Way},
    status,
};
use crate::{
    base::{key::KymaKey, takeover},
    controllers::wait::Wait,
    fleet::queue::{Outcome, Works},
};

/// Goes on with the hand-back of a Kyma.
pub(super) async fn step(ctx: &Context, key: &KymaKey, mut kyma: Kyma, works: Works) -> Result<Outcome, Error> {
    // Of one that was never ours, the incumbent's objects are what stands there.
    if takeover::is_held(&kyma) {
        let came = clear(ctx, key).await;
        kyma = match leave::after(ctx, kyma, works, Way::HandBack, came).await? {
            ControlFlow::Break(outcome) => return Ok(outcome),
            ControlFlow::Continue(kyma) => kyma,
        };
    }
    let kyma = status::withdraw(ctx, kyma).await?;
    let metadata = json!({
        "labels": {label::HAND_BACK: label::HAND_BACK_DONE},
        "annotations": {annotation::ACCEPTED_SPEC: null, annotation::INPUTS: null},
    });
    base::patch_metadata(ctx, &kyma, metadata).await?;
    info!(kyma = %key, "Kyma is handed back");
    ctx.forget(key);
    Ok(Outcome::ended(works))
}

/// Takes the agent out of the runtime, and the notes of what was put there. `None` when all of it is gone.
async fn clear(ctx: &Context, key: &KymaKey) -> Result<Option<Wait>, Error> {
    let (client, _) = (ctx.clients)(key).map_err(Error::Access)?;
    // Nothing of what was verified is so any more, should the hand-back be called off.
    ctx.memory.forget(key);
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
