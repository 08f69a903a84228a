//! Dry run of the agent's pod. API servers admit it as they would admit the real one: a policy that refuses its image or
//! content refuses the dry run.

use kube::{
    Client,
    api::{DynamicObject, PostParams},
};
use serde_json::{Value, json};
use tidewatch_api::names::{SKR_NAMESPACE, field_manager};
use tidewatch_cluster::runtime_access::describe;
use tracing::debug;

use super::{Error, component::PODS};

/// Name of the pod, which never exists.
const NAME: &str = "tidewatch-agent-dry-run";

/// Tries the pod of a Deployment. Succeeds as well if the response says nothing about the real pod.
///
/// # Errors
/// [`Error::Trial`].
pub(super) async fn run(client: &Client, deployment: &Value) -> Result<(), Error> {
    let params = PostParams { dry_run: true, field_manager: Some(field_manager::TIDEWATCH.to_owned()) };
    let pod: DynamicObject =
        serde_json::from_value(pod(deployment)).map_err(|error| Error::Trial(kube::Error::SerdeError(error)))?;
    match PODS.api(client).create(&params, &pod).await {
        Err(error) if !is_about_the_pod(&error) => {
            debug!(cause = describe(&error), "Agent cannot be started in a dry run, installing it without");
            Ok(())
        }
        tried => tried.map(drop).map_err(Error::Trial),
    }
}

/// Returns the pod that the controllers of a Deployment would create. It has an owner, because policies may refuse pods that no
/// controller owns; nothing stores a dry run, so the owner need not exist.
fn pod(deployment: &Value) -> Value {
    let template = &deployment["spec"]["template"];
    let mut pod =
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]});
    pod["metadata"]["name"] = NAME.into();
    pod["metadata"]["namespace"] = SKR_NAMESPACE.into();
    pod["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": true,
        "name": deployment["metadata"]["name"], "uid": "00000000-0000-0000-0000-000000000000",
    }]);
    pod
}

/// Returns false for failures that the real pod would not have:
///
/// * an admission webhook has side effects, so the API server refuses all dry runs that would reach it;
/// * the account may create Deployments, but no pods;
/// * a quota that the running pod of lifecycle-manager, which ends first, uses up;
/// * a pod has the name of the dry run.
fn is_about_the_pod(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return true };
    let says = |text| status.message.contains(text);
    !match status.code {
        400 => says("does not support dry run"),
        403 => says("exceeded quota") || says("cannot create resource \"pods\""),
        409 => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn pod_is_that_of_the_template_and_has_a_controller() {
        let template = json!({"metadata": {"labels": {"app": "a"}}, "spec": {"containers": []}});
        let pod = pod(&json!({"metadata": {"name": "d"}, "spec": {"template": template}}));
        assert_eq!((&pod["metadata"]["labels"], &pod["spec"]), (&json!({"app": "a"}), &json!({"containers": []})));
        let owner = &pod["metadata"]["ownerReferences"][0];
        assert_eq!(
            (&owner["kind"], &owner["name"], &owner["controller"]),
            (&json!("ReplicaSet"), &json!("d"), &json!(true))
        );
    }

    #[test]
    fn only_failures_that_the_real_pod_would_have_count() {
        let error = |code, message| kube::Error::Api(Status::failure(message, "Reason").with_code(code).boxed());
        for (code, message, counts) in [
            (400, r#"admission webhook "x.example" does not support dry run"#, false),
            (400, r#"admission webhook "x.example" denied the request: Pod images x:1 validation failed"#, true),
            (403, r#"admission webhook "x.example" denied the request: no"#, true),
            (
                403,
                r#"pods "p" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1"#,
                false,
            ),
            (403, r#"pods "p" is forbidden: failed quota: q: must specify limits.cpu for: server"#, true),
            (
                403,
                r#"pods is forbidden: User "u" cannot create resource "pods" in API group "" in the namespace "n""#,
                false,
            ),
            (409, r#"pods "p" already exists"#, false),
            (422, r#"ValidatingAdmissionPolicy 'images' denied request: not signed"#, true),
            (500, r#"Internal error occurred: failed calling webhook "x.example""#, true),
        ] {
            assert_eq!(is_about_the_pod(&error(code, message)), counts, "{code} {message}");
        }
    }
}
