//! Admission policies of a runtime, of the kinds of SAP BTP (no NetworkPolicy without rules) and of Warden (only images that it
//! can verify), on a real API server.

use anyhow::{Context as _, Result};
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, PostParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use tidewatch_api::names::SKR_NAMESPACE;
use tidewatch_testing::{
    bed,
    landscape::{AGENT_IMAGE, until},
};

use crate::{
    installer::{OBJECTS, Object, WEBHOOKS, installing_options, lifecycle_manager},
    load::KEDA,
    support::{SingleRuntime, TestResult, condition},
};

const ADMISSION: &str = "admissionregistration.k8s.io";

fn api(client: &Client, group: &str, kind: &str) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
    if group == ADMISSION {
        Api::all_with(client.clone(), &resource)
    } else {
        Api::namespaced_with(client.clone(), SKR_NAMESPACE, &resource)
    }
}

/// Refuses objects in the namespace of the agent that do not meet the expression, until the returned binding is deleted.
/// `probe` is an object that does not meet it.
async fn refuse(
    client: &Client,
    name: &str,
    (group, kind, plural): (&str, &str, &str),
    expression: &str,
    probe: Value,
) -> Result<Api<DynamicObject>> {
    let version = format!("{ADMISSION}/v1");
    let policy = json!({"apiVersion": version, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name}, "spec": {
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": SKR_NAMESPACE}},
            "resourceRules": [{"apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"], "resources": [plural]}],
        },
        "validations": [{"expression": expression, "message": format!("refused by {name}")}],
    }});
    let binding = json!({"apiVersion": version, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]}});
    let bindings = api(client, ADMISSION, "ValidatingAdmissionPolicyBinding");
    let policies = api(client, ADMISSION, "ValidatingAdmissionPolicy");
    policies.create(&PostParams::default(), &serde_json::from_value(policy)?).await?;
    bindings.create(&PostParams::default(), &serde_json::from_value(binding)?).await?;
    let probe: DynamicObject = serde_json::from_value(probe)?;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    until("the policy to hold", async || {
        let refused = api(client, group, kind).create(&dry, &probe).await.err();
        Ok(refused.filter(|error| error.to_string().contains(name)).map(drop))
    })
    .await?;
    Ok(bindings)
}

const POLICIES: (&str, &str, &str) = ("networking.k8s.io", "NetworkPolicy", "networkpolicies");

/// A policy that denies all traffic of all pods.
fn deny_all() -> Value {
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "probe"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}})
}

#[tokio::test]
async fn network_policies_that_a_runtime_refuses_keep_no_agent_from_it() -> TestResult {
    let cluster = bed::shared().await?.runtime("rules").await?;
    cluster.ensure_namespace(SKR_NAMESPACE).await?;
    let client = cluster.client().await?;
    let has_rules = |direction: &str| format!("(has(object.spec.{direction}) && size(object.spec.{direction}) > 0)");
    let expression = format!("{} || {}", has_rules("ingress"), has_rules("egress"));
    refuse(&client, "no-deny-all", POLICIES, &expression, deny_all()).await?;
    let setup = SingleRuntime::with_options("rules", &[KEDA], installing_options(&[])).await?;
    let objects = setup.installed().await?;
    let status = setup.kcp_status("the condition", |status| status.condition("SKRWebhook").is_some()).await?;
    let (_, message) = condition(&status, "SKRWebhook")?;
    assert!(!message.contains("NetworkPolicy"), "{message}");

    let mut allowing = deny_all();
    allowing["spec"]["ingress"] = json!([{}]);
    refuse(&client, "no-policy", POLICIES, "false", allowing).await?;
    for policy in objects.iter().filter(|object| object.plural == "networkpolicies") {
        policy.api.delete(policy.name, &DeleteParams::default()).await?;
    }
    let status = setup.kcp_status("the refusal", |status| {
        status.condition("SKRWebhook").is_some_and(|condition| condition.message.contains("refused by no-policy"))
    });
    let status = status.await?;
    let condition = status.condition("SKRWebhook").context("the condition")?;
    assert_ne!(condition.reason, "Refused", "{}", condition.message);
    Ok(())
}

#[tokio::test]
async fn refused_image_leaves_the_installation_of_lifecycle_manager_until_it_is_accepted() -> TestResult {
    let cluster = bed::shared().await?.runtime("signed-images").await?;
    lifecycle_manager(&cluster).await?;
    let client = cluster.client().await?;
    let probe = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"},
        "spec": {"containers": [{"name": "probe", "image": "unsigned:1"}]}});
    let is_signed = "object.spec.containers.all(container, container.image.startsWith('signed.example/'))";
    let bindings = refuse(&client, "only-signed", ("", "Pod", "pods"), is_signed, probe).await?;
    let deployment = Object::new(&client, OBJECTS[13]);
    let webhooks = Object::new(&client, WEBHOOKS);
    let before = (deployment.content().await?, webhooks.content().await?);
    let setup = SingleRuntime::with_options("signed-images", &[KEDA], installing_options(&[])).await?;
    let status = setup.kcp_status("the refusal", |status| {
        status.condition("SKRWebhook").is_some_and(|condition| condition.message.contains("refused by only-signed"))
    });
    let (holds, message) = condition(&status.await?, "SKRWebhook")?;
    assert!(!holds && message.contains("so the one of lifecycle-manager stays"), "{message}");
    assert_eq!((deployment.content().await?, webhooks.content().await?), before);

    bindings.delete("only-signed", &DeleteParams::default()).await?;
    until("the takeover", async || {
        let content = deployment.content().await?;
        let image = &content["spec"]["template"]["spec"]["containers"][0]["image"];
        Ok((image == AGENT_IMAGE && webhooks.api.get_opt(webhooks.name).await?.is_none()).then_some(()))
    })
    .await?;
    Ok(())
}
