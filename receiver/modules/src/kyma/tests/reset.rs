//! The modules of a Kyma are reset to the defaults once for each request, whoever requests it and wherever the receiver is
//! interrupted.

use super::*;

const LABEL: &str = "operator.kyma-project.io/reset-modules";
const ID: &str = "operator.kyma-project.io/tidewatch-reset-modules";

impl Bed {
    /// `keda` is a default module, and the user has deselected it.
    async fn without_defaults() -> Self {
        let mut bed = Self::new();
        bed.kcp.edit("kymas/k", |kyma| kyma["spec"]["modules"] = json!([{"name": "keda", "managed": true}]));
        bed.kyma().await;
        assert_eq!(bed.selected(), ["keda"]);
        bed.select(json!([]));
        bed.kyma().await;
        bed.release_manifest();
        bed.forget_calls();
        bed
    }

    fn selected(&self) -> Vec<String> {
        let kyma = self.runtime.object("kymas/default").unwrap();
        let modules = kyma["spec"]["modules"].as_array().into_iter().flatten();
        modules.map(|module| module["name"].as_str().unwrap().to_owned()).collect()
    }

    fn request_in_kcp(&self) {
        self.kcp.edit("kymas/k", |kyma| kyma["metadata"]["labels"][LABEL] = "true".into());
    }

    fn request_in_runtime(&self) {
        self.runtime.edit("kymas/default", |kyma| kyma["metadata"]["labels"][LABEL] = "True".into());
    }

    /// Label and id in KCP.
    fn request(&self) -> (Value, Value) {
        let metadata = &self.kcp.object("kymas/k").unwrap()["metadata"];
        (metadata["labels"][LABEL].clone(), metadata["annotations"][ID].clone())
    }

    /// The user's selection after a reset stays.
    async fn is_not_reset_again(&mut self) {
        self.select(json!([]));
        self.kyma().await;
        assert_eq!(self.selected(), Vec::<String>::new());
        assert_eq!(self.request(), (Value::Null, Value::Null));
        self.forget_calls();
        self.kyma().await;
        assert_eq!((self.kcp.writes(), self.runtime.writes()), (vec![], vec![]));
    }
}

/// `acceptance.md` C2 39: defaults are copied, can be deselected, and are restored on request.
#[tokio::test]
async fn request_in_kcp_is_done_once() {
    let mut bed = Bed::without_defaults().await;
    for _ in 0..2 {
        bed.forget_calls();
        bed.request_in_kcp();
        bed.kyma().await;
        assert_eq!((bed.selected(), bed.request()), (vec!["keda".to_owned()], (Value::Null, Value::Null)));
        assert!(bed.manifest().is_some());
        assert_eq!(bed.runtime.writes(), ["PUT kymas/default", "PUT kymas/default/status"]);
        bed.is_not_reset_again().await;
        bed.release_manifest();
        bed.kyma().await;
    }
}

#[tokio::test]
async fn request_in_the_runtime_is_done_once() {
    let mut bed = Bed::without_defaults().await;
    bed.request_in_runtime();
    bed.kyma().await;
    assert_eq!(bed.selected(), ["keda"]);
    let labels = bed.runtime.object("kymas/default").unwrap()["metadata"]["labels"].clone();
    assert_eq!((&labels[LABEL], &labels[label::WATCHED_BY]), (&Value::Null, &json!("kyma")));
    bed.is_not_reset_again().await;
}

#[tokio::test]
async fn interrupted_reset_ends_without_a_second_one() {
    let mut bed = Bed::without_defaults().await;
    bed.request_in_kcp();
    bed.kcp.refuse("PATCH kymas/k", 503);
    bed.kyma().await;
    assert_eq!(bed.selected(), Vec::<String>::new(), "its id comes first");
    bed.kcp.refuse_nothing();
    // The reset, and not the end of the request in KCP.
    bed.runtime.refuse("PUT kymas/default", 503);
    bed.kyma().await;
    let (requested, id) = bed.request();
    assert!(requested == "true" && id.is_string() && bed.selected().is_empty());
    bed.runtime.refuse_nothing();
    bed.kcp.refuse("PATCH kymas/k", 503);
    bed.kyma().await;
    assert_eq!((bed.selected(), bed.request()), (vec!["keda".to_owned()], (requested, id)));
    // The user selects anew before the receiver is back.
    bed.select(json!([]));
    bed.kcp.refuse_nothing();
    bed.kyma().await;
    assert_eq!((bed.selected(), bed.request()), (vec![], (Value::Null, Value::Null)));
    bed.is_not_reset_again().await;
}

#[tokio::test]
async fn request_that_is_taken_back_does_not_swallow_the_next_one() {
    let mut bed = Bed::without_defaults().await;
    bed.request_in_kcp();
    bed.runtime.refuse("PUT kymas/default", 503);
    bed.kyma().await;
    bed.runtime.refuse_nothing();
    bed.kcp.edit("kymas/k", |kyma| drop(kyma["metadata"]["labels"].as_object_mut().unwrap().remove(LABEL)));
    bed.kyma().await;
    assert_eq!((bed.selected(), bed.request().1), (vec![], Value::Null));
    bed.request_in_kcp();
    bed.kyma().await;
    assert_eq!(bed.selected(), ["keda"]);
}

#[tokio::test]
async fn concurrent_change_of_the_user_is_not_overwritten_unseen() {
    let mut bed = Bed::without_defaults().await;
    bed.request_in_runtime();
    bed.runtime.meanwhile("PUT kymas/default", "kymas/default", |kyma| {
        kyma["metadata"]["labels"].as_object_mut().unwrap().remove(LABEL);
        kyma["spec"]["channel"] = "fast".into();
    });
    assert!(!bed.kyma().await.failed.is_empty(), "a conflict");
    bed.kyma().await;
    assert_eq!(bed.selected(), Vec::<String>::new(), "the user has taken the request back");
}
