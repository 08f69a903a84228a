//! Takes an installation away: the agent, then its objects in the opposite order of their making.

use std::time::Duration;

use kube::{Client, ResourceExt, api::ListParams};
use tidewatch_shared::names::label;

use super::{
    Error, Failure, Part,
    apply::{delete, metadata},
    error::Object,
    objects::pod_selector,
    part::PODS,
};

/// Until what is being deleted is looked for again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Does as much as can be done now. `None` when all is gone.
pub(super) async fn step(client: &Client) -> Result<Option<Duration>, Failure> {
    let mut waits = false;
    for part in Part::ALL.into_iter().rev() {
        let fail = |error| Failure { part, error };
        let (api, object) = (part.kind().api(client), Object::of(part));
        let found = metadata(&api, part.name()).await.map_err(|source| fail(Error::Read { object, source }))?;
        // An object of that name that is not ours stays.
        let ours = |by: &String| by == label::MANAGED_BY_SKR;
        if let Some(found) = found.filter(|found| found.labels().get(label::MANAGED_BY).is_some_and(ours)) {
            waits = true;
            if found.metadata.deletion_timestamp.is_none() {
                let deleted = delete(&api, part.name(), found.uid()).await;
                deleted.map_err(|source| fail(Error::Delete { object, source }))?;
            }
        }
        if part == Part::Deployment && runs(client).await.map_err(|source| fail(Error::Read { object, source }))? {
            // Its process still needs what is below.
            return Ok(Some(LOOK_AGAIN));
        }
    }
    Ok(waits.then_some(LOOK_AGAIN))
}

/// Whether a pod of the agent is there.
async fn runs(client: &Client) -> kube::Result<bool> {
    let pods = PODS.api(client).list_metadata(&ListParams::default().labels(&pod_selector()).limit(1)).await?;
    Ok(!pods.items.is_empty())
}
