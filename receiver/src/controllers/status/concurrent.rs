//! Concurrent writes of a Kyma in KCP that change nothing which a reconcile decides on: the annotation of the inputs and
//! the conditions with field managers of their own have writers beside the reconcile.

use kube::{Api, ResourceExt, api::ObjectMeta};
use tidewatch_shared::{api::Kyma, names::annotation};

use crate::kube::object;

/// Retries of a write that conflicts with concurrent writes of our own, which are few.
#[derive(Debug)]
pub(crate) struct ConflictRetries(u32);

impl Default for ConflictRetries {
    fn default() -> Self {
        Self(3)
    }
}

impl ConflictRetries {
    /// Reads the Kyma after a failed write, which can be repeated if this succeeds: the write conflicted, and status and
    /// annotation of the inputs are all that changed. Any other change may concern the decision, and returns `failure`.
    pub(crate) async fn reread(
        &mut self,
        api: &Api<Kyma>,
        kyma: &mut Kyma,
        failure: kube::Error,
    ) -> Result<(), kube::Error> {
        if !object::is_conflict(&failure) || self.0 == 0 {
            return Err(failure);
        }
        self.0 -= 1;
        match object::get(api, &kyma.name_any()).await {
            Ok(Some(current)) if decides_alike(kyma, &current) => {
                *kyma = current;
                Ok(())
            }
            // The conflict says more than a failed read after it.
            _ => Err(failure),
        }
    }
}

/// Returns true if two versions of a Kyma differ at most in the status and the annotation of the inputs.
fn decides_alike(before: &Kyma, after: &Kyma) -> bool {
    decisive(&before.metadata) == decisive(&after.metadata) && before.spec == after.spec
}

/// Metadata without the members that each of these writes changes.
fn decisive(metadata: &ObjectMeta) -> ObjectMeta {
    let mut metadata = ObjectMeta { managed_fields: None, resource_version: None, ..metadata.clone() };
    if let Some(annotations) = &mut metadata.annotations {
        annotations.remove(annotation::INPUTS);
    }
    metadata
}
