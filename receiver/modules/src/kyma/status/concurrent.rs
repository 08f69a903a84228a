//! Concurrent writes of a Kyma in KCP that change no decision on modules: the annotation of the inputs and the conditions
//! with field managers of their own have writers beside the reconcile.

use kube::{Api, ResourceExt};
use tidewatch_api::{Kyma, names::annotation};
use tidewatch_cluster::object;

use super::condition::is_anothers;

/// Retries of a write that conflicts with concurrent writes of our own, which are few.
pub(crate) const CONFLICT_RETRIES: u32 = 3;

/// Returns the Kyma as KCP has it now, after a failed write of `kyma` that can be repeated: the write conflicted, and only
/// others' conditions and the annotation of the inputs have changed. Any other change may concern the decision, and
/// returns `failure`. `retries` counts down from [`CONFLICT_RETRIES`].
pub(crate) async fn reread(
    api: &Api<Kyma>,
    kyma: &Kyma,
    failure: kube::Error,
    retries: &mut u32,
) -> Result<Kyma, kube::Error> {
    if !object::is_conflict(&failure) || *retries == 0 {
        return Err(failure);
    }
    *retries -= 1;
    match object::get(api, &kyma.name_any()).await {
        Ok(Some(current)) if decisive(kyma.clone()) == decisive(current.clone()) => Ok(current),
        // The conflict says more than a failed read after it.
        _ => Err(failure),
    }
}

/// A Kyma without the members that the concurrent writes change.
fn decisive(mut kyma: Kyma) -> Kyma {
    kyma.metadata.managed_fields = None;
    kyma.metadata.resource_version = None;
    if let Some(annotations) = &mut kyma.metadata.annotations {
        annotations.remove(annotation::INPUTS);
    }
    let conditions = kyma.status.get_or_insert_default().conditions.get_or_insert_default();
    conditions.retain(|condition| !is_anothers(condition));
    kyma
}
