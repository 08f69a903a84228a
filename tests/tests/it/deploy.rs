//! What `deploy/` says of the receiver's installation is what an API server takes, and gives the rights that the code names.

use std::{collections::BTreeSet, path::Path, process::Command};

use kube::{
    Api, ResourceExt,
    api::{DynamicObject, Patch, PatchParams, ValidationDirective},
    core::{ApiResource, GroupVersionKind},
};
use tidewatch_receiver::rights;
use tidewatch_shared::names::KCP_NAMESPACE;
use tidewatch_tests::{bed, control_plane::Tool};

/// The objects of a kustomization, as kubectl builds it.
async fn built(folder: &str) -> Vec<DynamicObject> {
    let kubectl = bed::shared().await.unwrap().binaries().get(Tool::Kubectl).await.unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("deploy").join(folder);
    let output = Command::new(kubectl).arg("kustomize").arg(&path).args(["-o", "/dev/stdout"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.split("\n---\n").map(|object| serde_saphyr::from_str(object).unwrap()).collect()
}

fn kind(object: &DynamicObject) -> &str {
    &object.types.as_ref().unwrap().kind
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_takes_all_of_it() {
    let kcp = bed::shared().await.unwrap().kcp().await.unwrap();
    kcp.ensure_namespace(KCP_NAMESPACE).await.unwrap();
    let client = kcp.client().await.unwrap();
    for folder in ["base", "overlays/cert-manager"] {
        let objects = built(folder).await;
        let kinds: BTreeSet<_> = objects.iter().map(kind).collect();
        for wanted in ["Deployment", "Service", "Role", "NetworkPolicy", "PodMonitor", "CustomResourceDefinition"] {
            assert!(kinds.contains(wanted), "{folder} has no {wanted}");
        }
        // The kind of a monitor comes with Prometheus' operator, that of a certificate with cert-manager.
        for object in objects.iter().filter(|object| !["PodMonitor", "Certificate"].contains(&kind(object))) {
            let types = object.types.clone().unwrap();
            let resource = ApiResource::from_gvk(&GroupVersionKind::try_from(&types).unwrap());
            let api: Api<DynamicObject> = match object.namespace() {
                Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
                None => Api::all_with(client.clone(), &resource),
            };
            let mut params = PatchParams::apply("test").force().dry_run();
            params.field_validation = Some(ValidationDirective::Strict);
            let taken = api.patch(&object.name_any(), &params, &Patch::Apply(object)).await;
            taken.unwrap_or_else(|error| panic!("{folder}: {} {}: {error}", kind(object), object.name_any()));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_overlay_adds_the_issuer_and_its_rights() {
    let objects = built("overlays/cert-manager").await;
    let settings = objects.iter().find(|object| kind(object) == "ConfigMap").unwrap();
    assert_eq!(settings.data["data"]["TIDEWATCH_ISSUER"], "cert-manager:Issuer/tidewatch");
    assert!(settings.data["data"]["TIDEWATCH_RECEIVER_URL"].is_string(), "what the base sets stays");
    let granted: Vec<_> =
        objects.iter().filter(|object| kind(object) == "Role").map(|role| role.data["rules"].clone()).collect();
    for rules in [rights::rules(), rights::cert_manager_rules()] {
        assert!(granted.contains(&serde_json::to_value(&rules).unwrap()), "{rules:?}");
    }
}
