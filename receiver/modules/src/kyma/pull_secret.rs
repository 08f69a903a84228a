//! Image pull secret of the modules: a copy of KCP's in each runtime cluster.

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject},
};
use serde_json::{Value, json};
use tidewatch_api::names::{SKR_NAMESPACE, field_manager, label};
use tidewatch_cluster::object::{self, Ownership, Shape, Target, WriteBudget};
use tidewatch_installer::pull_secret::{ModulePullSecret, defect};

use super::{Error, error, status::Observation};

/// Type and data are ours as a whole. The type is immutable, and so is everything in a Secret that is marked so.
const SHAPE: Shape = Shape { immutable: &["/type", "/immutable"], ..Shape::new(Ownership::Parts(&["/data"])) };

/// The condition after the copy was applied, or put off as contested. A copy that kubelets cannot use is current all the
/// same, as for lifecycle-manager: modules may read it.
pub(super) fn observation(secret: &ModulePullSecret, contested: &[Error]) -> Observation {
    match contested.iter().find(|error| error.is_of_pull_secret()) {
        Some(error) => Err(error.line()),
        None => match secret.content() {
            None => Err(format!("the control plane has no Secret {}", secret.name)),
            Some(content) => Ok(defect(&content)),
        },
    }
}

/// Applies the copy if it differs.
pub(super) async fn ensure(
    secret: &ModulePullSecret,
    client: &Client,
    content: &Value,
    budget: &WriteBudget<'_>,
) -> Result<(), Error> {
    let mut desired = content.clone();
    desired["apiVersion"] = "v1".into();
    desired["kind"] = "Secret".into();
    desired["metadata"] = json!({
        "name": secret.name, "namespace": SKR_NAMESPACE, "labels": {label::MANAGED_BY: label::MANAGED_BY_SKR}
    });
    let api = secrets(client);
    let found = object::get(&api, &secret.name).await.map_err(Error::runtime(error::COPY_PULL_SECRET))?;
    let manager = field_manager::SYNC_CONTEXT;
    let target = Target { name: &secret.name, manager, shape: &SHAPE, desired: &desired, budget: Some(budget) };
    let converged = target.converge(&api, found, &mut None).await;
    converged.map(drop).map_err(Error::converge(error::COPY_PULL_SECRET, error::PULL_SECRET))
}

/// Deletes the copy.
pub(super) async fn remove(secret: &ModulePullSecret, client: &Client) -> Result<(), Error> {
    let api = secrets(client);
    let found = object::get_metadata(&api, &secret.name).await.map_err(Error::runtime(error::DELETE_OURS))?;
    let is_ours =
        |found: &DynamicObject| found.labels().get(label::MANAGED_BY).is_some_and(|by| by == label::MANAGED_BY_SKR);
    let Some(found) = found.filter(is_ours) else { return Ok(()) };
    let deleted = object::delete(&api, &secret.name, found.uid()).await;
    deleted.map(drop).map_err(Error::runtime(error::DELETE_OURS))
}

fn secrets(client: &Client) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), SKR_NAMESPACE, &ApiResource::erase::<Secret>(&()))
}

#[cfg(test)]
mod tests {
    use tidewatch_cluster::object::Repair;

    use super::*;

    #[test]
    fn immutable_copy_is_recreated_when_the_credentials_change() {
        let desired = json!({"type": "t", "data": {"k": "new"}});
        let compare = |data: &str, is_immutable: bool| {
            let immutable = is_immutable.then_some(true);
            let live = json!({"metadata": {}, "type": "t", "data": {"k": data}, "immutable": immutable});
            SHAPE.compare(&desired, &serde_json::from_value(live).unwrap(), None)
        };
        assert_eq!(compare("old", true), Repair::Recreate);
        assert_eq!(compare("new", true), Repair::None);
        assert_eq!(compare("old", false), Repair::Apply);
    }
}
