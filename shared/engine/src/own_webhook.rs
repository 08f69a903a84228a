//! Refusals by admission webhooks, and those of the module itself that do not answer: its workloads may be what mends
//! them. Pure.

use kube::core::Status;

use super::{
    inventory::{Inventory, ObjectKey},
    render::RenderedObject,
};

/// Words before the quoted name of a webhook that does not answer.
const FAILED_CALL: &str = "failed calling webhook \"";
/// Words before the quoted name of a webhook that denies a request.
const DENIAL: &str = "admission webhook \"";
/// Begin of the quoted URL of a webhook.
const URL: &str = "\"https://";

/// Returns true for a refusal that an admission webhook causes, so that it may end without a change of the object.
pub(super) fn is_of_webhook(refusal: &Status) -> bool {
    [FAILED_CALL, DENIAL].iter().any(|words| refusal.message.contains(words))
}

/// Returns true for a refusal by a webhook that does not answer, of which the module brings the configuration or the
/// Service. The inventory has the Services of earlier versions, too.
pub(super) fn is_down(refusal: &Status, rendered: &[RenderedObject], inventory: &Inventory) -> bool {
    let call = refusal.message.split_once(FAILED_CALL).and_then(|(_, rest)| rest.split_once('"'));
    let Some((name, rest)) = call else { return false };
    let configures = |object: &RenderedObject| {
        let mut webhooks = object.body["webhooks"].as_array().into_iter().flatten();
        object.key.group == "admissionregistration.k8s.io" && webhooks.any(|webhook| webhook["name"] == name)
    };
    rendered.iter().any(configures) || service_of(rest).is_some_and(|service| inventory.contains(&service))
}

/// Key of a Service.
pub(super) fn service(namespace: &str, name: &str) -> ObjectKey {
    ObjectKey::new("", "Service", namespace, name)
}

/// The Service in the first URL of a text, `https://<name>.<namespace>.svc:443/…`.
fn service_of(text: &str) -> Option<ObjectKey> {
    let (_, url) = text.split_once(URL)?;
    let host = url.split([':', '/', '?', '"']).next()?;
    let (host, _) = host.split_once(".svc")?;
    let (name, namespace) = host.split_once('.')?;
    Some(service(namespace, name))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidewatch_api::Resource;

    use super::*;
    use crate::stage::Stage;

    fn rendered(body: Value) -> RenderedObject {
        RenderedObject {
            key: ObjectKey::of(&body),
            version: "v1".to_owned(),
            stage: Stage::Webhooks,
            served: true,
            body,
        }
    }

    fn refusal(message: &str) -> Status {
        Status::failure(message, "InternalError").with_code(500)
    }

    #[test]
    fn own_webhook_that_is_down_is_known_by_its_configuration_or_its_service() {
        let down = |name: &str, host: &str| {
            refusal(&format!(
                "Internal error occurred: failed calling webhook \"{name}\": failed to call webhook: Post \"https://{host}/validate?timeout=10s\": dial tcp 127.0.0.1:1: connect: connection refused"
            ))
        };
        let configuration = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": "w"}, "webhooks": [{"name": "new.example.test"}]});
        let rendered = [rendered(configuration)];
        let entry = Resource {
            version: "v1".into(),
            kind: "Service".into(),
            namespace: "kyma-system".into(),
            name: "hooks".into(),
            ..Resource::default()
        };
        let inventory = Inventory::read(&[entry]);
        for (refusal, expected) in [
            (down("new.example.test", "elsewhere.test:443"), true),
            (down("old.example.test", "hooks.kyma-system.svc:443"), true),
            (down("old.example.test", "hooks.kyma-system.svc"), true),
            (down("old.example.test", "hooks.default.svc:443"), false),
            (down("old.example.test", "other.kyma-system.svc:443"), false),
            (down("old.example.test", "10.0.0.1:443"), false),
            (refusal("admission webhook \"new.example.test\" denied the request: no"), false),
            (refusal("failed calling webhook"), false),
        ] {
            assert_eq!(is_down(&refusal, &rendered, &inventory), expected, "{}", refusal.message);
        }
        assert!(is_of_webhook(&down("a", "b")));
        assert!(is_of_webhook(&refusal("admission webhook \"a\" denied the request: no")));
        assert!(!is_of_webhook(&refusal("Deployment.apps \"a\" is invalid")));
    }
}
