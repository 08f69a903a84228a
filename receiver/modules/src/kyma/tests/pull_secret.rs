//! Image pull secret of the modules.

use super::*;

fn content(auth: &str) -> Value {
    json!({"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": auth}})
}

impl Fixture {
    fn set_pull_secret(&mut self, auth: &str) {
        let secret = PullSecret::fixed(content(auth));
        self.ctx.pull_secret = Some(ModulePullSecret { name: "pull".into(), secret });
    }
}

/// `acceptance.md` C1 32: the copy.
#[tokio::test]
async fn secret_is_copied_repaired_and_replaced_when_it_changes() {
    let mut fixture = Fixture::settled().await;
    fixture.set_pull_secret("YQ==");
    assert!(fixture.kyma().await.failed.is_empty());
    let copy = |fixture: &Fixture| fixture.runtime.object("secrets/pull").unwrap();
    let data = copy(&fixture)["data"].clone();
    let labels = copy(&fixture)["metadata"]["labels"].clone();
    assert_eq!(data, content("YQ==")["data"]);
    assert_eq!(labels, json!({"operator.kyma-project.io/managed-by": "kyma"}));
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!(fixture.runtime.calls(), ["GET kymas/default"], "an unchanged secret is not read again");
    fixture.runtime.edit("secrets/pull", |secret| secret["data"]["evil"] = json!("eA=="));
    fixture.reconcile(WorkSet::RUNTIME, Drift::All).await;
    assert_eq!(copy(&fixture)["data"], data);
    fixture.set_pull_secret("Yg==");
    fixture.kyma().await;
    assert_eq!(copy(&fixture)["data"], content("Yg==")["data"]);
}

/// Status and message of the condition.
fn shown(fixture: &Fixture) -> Option<[String; 2]> {
    let condition = fixture.condition("SKRImagePullSecretSync");
    condition.is_object().then(|| ["status", "message"].map(|member| condition[member].as_str().unwrap().to_owned()))
}

/// `acceptance.md` C1 32: the condition of the copy, which counts for the Kyma's state and goes with the setting.
#[tokio::test]
async fn condition_reports_whether_the_copy_is_current() {
    const FALSE: &str = "skr image pull secret is out of sync and needs to be resynchronized: ";
    let mut fixture = Fixture::settled().await;
    assert_eq!(shown(&fixture), None, "without a secret");
    fixture.ctx.pull_secret = Some(ModulePullSecret { name: "pull".into(), secret: PullSecret::default() });
    fixture.kyma().await;
    let missing = "the control plane has no Secret pull";
    assert_eq!(shown(&fixture), Some(["False".into(), format!("{FALSE}{missing}")]));
    assert_eq!(fixture.status()["state"], "Processing");
    fixture.set_pull_secret("YQ==");
    fixture.kyma().await;
    assert_eq!(shown(&fixture), Some(["True".into(), "skr image pull secret is synchronized".into()]));
    assert_eq!(fixture.status()["state"], "Ready");
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
    fixture.set_pull_secret("Yg==");
    fixture.runtime.refuse("WRITE secrets", 403);
    fixture.kyma().await;
    let [status, message] = shown(&fixture).unwrap();
    assert!(status == "False" && message.starts_with(FALSE) && message.contains("403"), "{message}");
    assert_eq!(fixture.status()["state"], "Error");
    fixture.runtime.refuse_nothing();
    fixture.kyma().await;
    assert_eq!(shown(&fixture).unwrap()[0], "True");
    fixture.ctx.pull_secret = None;
    fixture.kyma().await;
    assert_eq!(shown(&fixture), None, "without the setting");
}

/// lifecycle-manager copies a Secret of any type. The type of a Secret is immutable.
#[tokio::test]
async fn secret_of_another_type_is_copied_and_the_condition_says_that_kubelets_ignore_it() {
    let mut fixture = Fixture::settled().await;
    fixture.set_pull_secret("YQ==");
    fixture.kyma().await;
    let opaque = json!({"type": "Opaque", "data": {"user": "YQ==", "password": "Yg=="}});
    fixture.ctx.pull_secret = Some(ModulePullSecret { name: "pull".into(), secret: PullSecret::fixed(opaque.clone()) });
    fixture.forget_calls();
    fixture.kyma().await;
    let copy = fixture.runtime.object("secrets/pull").unwrap();
    assert_eq!((&copy["type"], &copy["data"]), (&opaque["type"], &opaque["data"]));
    assert!(fixture.runtime.writes().iter().any(|call| call.starts_with("DELETE")), "{:?}", fixture.runtime.writes());
    let message = "skr image pull secret is synchronized: kubelets ignore its type Opaque, only \
                   kubernetes.io/dockerconfigjson and kubernetes.io/dockercfg pull images";
    assert_eq!(shown(&fixture), Some(["True".into(), message.into()]));
    assert_eq!(fixture.status()["state"], "Ready");
}

#[tokio::test]
async fn refused_secret_fails_the_reconcile_with_its_reason() {
    let mut fixture = Fixture::settled().await;
    fixture.set_pull_secret("YQ==");
    fixture.runtime.refuse("WRITE secrets", 403);
    assert!(!fixture.kyma().await.failed.is_empty());
    assert_eq!(fixture.ctx.metrics.requeues.counted("image_pull_secret_sync", "unexpected"), 1);
    fixture.runtime.refuse_nothing();
    assert!(fixture.kyma().await.failed.is_empty());
}

#[tokio::test]
async fn copy_goes_with_the_kyma_and_a_secret_of_the_user_stays() {
    for is_ours in [true, false] {
        let mut fixture = Fixture::settled().await;
        fixture.set_pull_secret("YQ==");
        fixture.kyma().await;
        if !is_ours {
            fixture.runtime.edit("secrets/pull", |secret| secret["metadata"]["labels"] = json!({}));
        }
        fixture.delete();
        for _ in 0..10 {
            fixture.kyma().await;
        }
        assert!(fixture.kcp.object("kymas/k").is_none_or(|kyma| kyma["metadata"]["finalizers"] == json!([])));
        assert_eq!(fixture.runtime.object("secrets/pull").is_none(), is_ours);
    }
}
