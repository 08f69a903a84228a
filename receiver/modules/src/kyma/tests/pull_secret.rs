//! Image pull secret of the modules.

use super::*;

fn content(auth: &str) -> Value {
    json!({"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": auth}})
}

impl Bed {
    fn set_pull_secret(&mut self, auth: &str) {
        let secret = PullSecret::fixed(content(auth));
        self.ctx.pull_secret = Some(ModulePullSecret { name: "pull".into(), secret });
    }
}

/// `acceptance.md` C1 32: the copy.
#[tokio::test]
async fn secret_is_copied_repaired_and_replaced_when_it_changes() {
    let mut bed = Bed::settled().await;
    bed.set_pull_secret("YQ==");
    assert!(bed.kyma().await.failed.is_empty());
    let copy = |bed: &Bed| bed.runtime.object("secrets/pull").unwrap();
    let data = copy(&bed)["data"].clone();
    let labels = copy(&bed)["metadata"]["labels"].clone();
    assert_eq!(data, content("YQ==")["data"]);
    assert_eq!(labels, json!({"operator.kyma-project.io/managed-by": "kyma"}));
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!(bed.runtime.calls(), ["GET kymas/default"], "an unchanged secret is not read again");
    bed.runtime.edit("secrets/pull", |secret| secret["data"]["evil"] = json!("eA=="));
    bed.reconcile(WorkSet::RUNTIME, Drift::All).await;
    assert_eq!(copy(&bed)["data"], data);
    bed.set_pull_secret("Yg==");
    bed.kyma().await;
    assert_eq!(copy(&bed)["data"], content("Yg==")["data"]);
}

/// Status and message of the condition.
fn shown(bed: &Bed) -> Option<[String; 2]> {
    let condition = bed.condition("SKRImagePullSecretSync");
    condition.is_object().then(|| ["status", "message"].map(|member| condition[member].as_str().unwrap().to_owned()))
}

/// `acceptance.md` C1 32: the condition of the copy, which counts for the Kyma's state and goes with the setting.
#[tokio::test]
async fn condition_reports_whether_the_copy_is_current() {
    const FALSE: &str = "skr image pull secret is out of sync and needs to be resynchronized: ";
    let mut bed = Bed::settled().await;
    assert_eq!(shown(&bed), None, "without a secret");
    bed.ctx.pull_secret = Some(ModulePullSecret { name: "pull".into(), secret: PullSecret::default() });
    bed.kyma().await;
    let missing = "the control plane has no Secret pull";
    assert_eq!(shown(&bed), Some(["False".into(), format!("{FALSE}{missing}")]));
    assert_eq!(bed.status()["state"], "Processing");
    bed.set_pull_secret("YQ==");
    bed.kyma().await;
    assert_eq!(shown(&bed), Some(["True".into(), "skr image pull secret is synchronized".into()]));
    assert_eq!(bed.status()["state"], "Ready");
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]));
    bed.set_pull_secret("Yg==");
    bed.runtime.refuse("WRITE secrets", 403);
    bed.kyma().await;
    let [status, message] = shown(&bed).unwrap();
    assert!(status == "False" && message.starts_with(FALSE) && message.contains("403"), "{message}");
    assert_eq!(bed.status()["state"], "Error");
    bed.runtime.refuse_nothing();
    bed.kyma().await;
    assert_eq!(shown(&bed).unwrap()[0], "True");
    bed.ctx.pull_secret = None;
    bed.kyma().await;
    assert_eq!(shown(&bed), None, "without the setting");
}

/// lifecycle-manager copies a Secret of any type. The type of a Secret is immutable.
#[tokio::test]
async fn secret_of_another_type_is_copied_and_the_condition_says_that_kubelets_ignore_it() {
    let mut bed = Bed::settled().await;
    bed.set_pull_secret("YQ==");
    bed.kyma().await;
    let opaque = json!({"type": "Opaque", "data": {"user": "YQ==", "password": "Yg=="}});
    bed.ctx.pull_secret = Some(ModulePullSecret { name: "pull".into(), secret: PullSecret::fixed(opaque.clone()) });
    bed.forget_calls();
    bed.kyma().await;
    let copy = bed.runtime.object("secrets/pull").unwrap();
    assert_eq!((&copy["type"], &copy["data"]), (&opaque["type"], &opaque["data"]));
    assert!(bed.runtime.writes().iter().any(|call| call.starts_with("DELETE")), "{:?}", bed.runtime.writes());
    let message = "skr image pull secret is synchronized: kubelets ignore its type Opaque, only \
                   kubernetes.io/dockerconfigjson and kubernetes.io/dockercfg pull images";
    assert_eq!(shown(&bed), Some(["True".into(), message.into()]));
    assert_eq!(bed.status()["state"], "Ready");
}

#[tokio::test]
async fn refused_secret_fails_the_reconcile_with_its_reason() {
    let mut bed = Bed::settled().await;
    bed.set_pull_secret("YQ==");
    bed.runtime.refuse("WRITE secrets", 403);
    assert!(!bed.kyma().await.failed.is_empty());
    assert_eq!(bed.ctx.metrics.requeues.counted("image_pull_secret_sync", "unexpected"), 1);
    bed.runtime.refuse_nothing();
    assert!(bed.kyma().await.failed.is_empty());
}

#[tokio::test]
async fn copy_goes_with_the_kyma_and_a_secret_of_the_user_stays() {
    for is_ours in [true, false] {
        let mut bed = Bed::settled().await;
        bed.set_pull_secret("YQ==");
        bed.kyma().await;
        if !is_ours {
            bed.runtime.edit("secrets/pull", |secret| secret["metadata"]["labels"] = json!({}));
        }
        bed.delete();
        for _ in 0..10 {
            bed.kyma().await;
        }
        assert!(bed.kcp.object("kymas/k").is_none_or(|kyma| kyma["metadata"]["finalizers"] == json!([])));
        assert_eq!(bed.runtime.object("secrets/pull").is_none(), is_ours);
    }
}
