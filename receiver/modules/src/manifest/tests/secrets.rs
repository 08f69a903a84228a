//! Data of Secrets in KCP for the module `deployer`.

use super::*;
use crate::module_secrets::{MODULE, ModuleSecrets};

const SECRET: &str = "secrets/image-pull-secret";
const TEXT: &str = "inject-data-from-kcp transform failed: ";

fn secret(name: &str, annotations: &Value) -> Value {
    let mut secret = object("v1", "Secret", name);
    secret["metadata"]["annotations"] = annotations.clone();
    (secret["data"], secret["stringData"]) = (json!({"key": "b2xk"}), json!({"other": "text"}));
    secret
}

/// The Manifest of a module with three Secrets, of which one takes data of KCP.
fn fixture(module: &str, is_restricted: bool) -> Fixture {
    let mut fixture = Fixture::new();
    let takes = json!({"operator.kyma-project.io/inject-data-from-kcp": "true"});
    let refuses = json!({"operator.kyma-project.io/inject-data-from-kcp": "false"});
    let secrets = [("image-pull-secret", takes), ("not", refuses), ("plain", json!({}))];
    let layer = secrets.iter().map(|(name, annotations)| secret(name, annotations)).chain(objects()).collect();
    fixture.set_layer(ModuleObjects::Ready(Arc::new(layer)));
    fixture.edit(|manifest| manifest["metadata"]["labels"][label::MODULE_NAME] = module.into());
    fixture.ctx.secrets = is_restricted.then(|| ModuleSecrets::new(fixture.kcp.client(), NAMESPACE));
    fixture
}

fn set_source(fixture: &Fixture, module: Option<&str>, data: &str) {
    fixture.kcp.edit(SECRET, |source| {
        *source = json!({"apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": "image-pull-secret", "namespace": NAMESPACE, "labels": {}}, "data": {".dockerconfigjson": data}});
        if let Some(module) = module {
            source["metadata"]["labels"][label::MODULE_NAME] = module.into();
        }
    });
}

async fn settle(fixture: &mut Fixture) {
    for _ in 0..4 {
        fixture.reconcile().await;
    }
}

/// Data of a Secret in the runtime.
fn data(fixture: &Fixture, name: &str) -> Value {
    let secret = fixture.runtime.object(&format!("secrets/{name}")).unwrap();
    json!([secret["data"], secret["stringData"]])
}

/// `acceptance.md` C1 29.
#[tokio::test]
async fn annotated_secret_has_the_data_of_kcp_and_follows_it() {
    let mut fixture = fixture(MODULE, true);
    set_source(&fixture, Some(MODULE), "bmV3");
    settle(&mut fixture).await;
    assert_eq!(data(&fixture, "image-pull-secret"), json!([{".dockerconfigjson": "bmV3"}, null]));
    let own = json!([{"key": "b2xk", "other": "dGV4dA=="}, null]);
    assert_eq!([data(&fixture, "not"), data(&fixture, "plain")], [own.clone(), own]);
    set_source(&fixture, Some(MODULE), "bmV3ZXI=");
    fixture.reconcile().await;
    assert_eq!(data(&fixture, "image-pull-secret")[0], json!({".dockerconfigjson": "bmV3ZXI="}));
    fixture.runtime.calls();
    fixture.reconcile().await;
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
}

/// `acceptance.md` C1 29.
#[tokio::test]
async fn unusable_secret_of_kcp_is_an_error_that_writes_nothing_and_ends_with_its_cause() {
    let mut fixture = fixture(MODULE, true);
    let key = label::MODULE_NAME;
    let missing = format!(
        "{TEXT}failed to fetch kcp secret \"image-pull-secret\": failed to get secret image-pull-secret-kcp-system: Secret \"image-pull-secret\" not found"
    );
    settle(&mut fixture).await;
    assert_eq!(fixture.state(), (State::Error, missing.clone()));
    assert!(fixture.runtime.object("secrets/plain").is_none(), "nothing is applied without it");
    set_source(&fixture, Some(MODULE), "bmV3");
    settle(&mut fixture).await;
    assert_ne!(fixture.state().0, State::Error);
    for (module, text) in [
        (
            Some("not-deployer"),
            format!(
                "{TEXT}kcp source secret {key} label does not match the manifest module: secret=image-pull-secret expected=deployer actual=not-deployer"
            ),
        ),
        (None, format!("{TEXT}kcp source secret is missing the required {key} label: secret=image-pull-secret")),
    ] {
        set_source(&fixture, module, "ZXZpbA==");
        fixture.reconcile().await;
        assert_eq!(fixture.state(), (State::Error, text));
    }
    fixture.kcp.remove(SECRET);
    fixture.reconcile().await;
    assert_eq!(fixture.state(), (State::Error, missing));
    assert_eq!(data(&fixture, "image-pull-secret")[0], json!({".dockerconfigjson": "bmV3"}), "the installed data stay");
    set_source(&fixture, Some(MODULE), "bmV3");
    fixture.reconcile().await;
    assert_ne!(fixture.state().0, State::Error);
}

/// `acceptance.md` C1 29.
#[tokio::test]
async fn another_module_and_an_unrestricted_one_get_no_data() {
    for (module, is_restricted) in [("other", true), (MODULE, false)] {
        let mut fixture = fixture(module, is_restricted);
        set_source(&fixture, Some(module), "bmV3");
        settle(&mut fixture).await;
        assert_eq!(data(&fixture, "image-pull-secret")[0], json!({"key": "b2xk", "other": "dGV4dA=="}), "{module}");
    }
}

/// A failure of KCP says nothing about the runtime, and nothing against the installed module.
#[tokio::test]
async fn failed_read_of_kcp_is_ours_and_keeps_the_status() {
    let mut fixture = fixture(MODULE, true);
    set_source(&fixture, Some(MODULE), "bmV3");
    settle(&mut fixture).await;
    let before = fixture.state();
    fixture.runtime.calls();
    fixture.kcp.refuse("GET secrets", 403);
    let outcome = fixture.verify().await;
    assert_eq!((outcome.class, outcome.failed), (Some(ErrorClass::Ours), WorkSet::MANIFEST));
    assert_eq!((fixture.state(), fixture.runtime.writes()), (before, Vec::new()));
    fixture.kcp.refuse_nothing();
    assert_eq!(fixture.verify().await.class, None);
}
