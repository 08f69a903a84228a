//! The modules of a Kyma are reset to the defaults once for each request, whoever requests it and wherever the receiver is
//! interrupted.

use super::*;

const LABEL: &str = "operator.kyma-project.io/reset-modules";
const ID: &str = "operator.kyma-project.io/tidewatch-reset-modules";

impl Fixture {
    /// `keda` is a default module, and the user has deselected it.
    async fn without_defaults() -> Self {
        let mut fixture = Self::new();
        fixture.kcp.edit("kymas/k", |kyma| kyma["spec"]["modules"] = json!([{"name": "keda", "managed": true}]));
        fixture.kyma().await;
        assert_eq!(fixture.selected(), ["keda"]);
        fixture.select(json!([]));
        fixture.kyma().await;
        fixture.release_manifest();
        fixture.forget_calls();
        fixture
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
    let mut fixture = Fixture::without_defaults().await;
    for _ in 0..2 {
        fixture.forget_calls();
        fixture.request_in_kcp();
        fixture.kyma().await;
        assert_eq!((fixture.selected(), fixture.request()), (vec!["keda".to_owned()], (Value::Null, Value::Null)));
        assert!(fixture.manifest().is_some());
        assert_eq!(fixture.runtime.writes(), ["PUT kymas/default", "PUT kymas/default/status"]);
        fixture.is_not_reset_again().await;
        fixture.release_manifest();
        fixture.kyma().await;
    }
}

#[tokio::test]
async fn request_in_the_runtime_is_done_once() {
    let mut fixture = Fixture::without_defaults().await;
    fixture.request_in_runtime();
    fixture.kyma().await;
    assert_eq!(fixture.selected(), ["keda"]);
    let labels = fixture.runtime.object("kymas/default").unwrap()["metadata"]["labels"].clone();
    assert_eq!((&labels[LABEL], &labels[label::WATCHED_BY]), (&Value::Null, &json!("kyma")));
    fixture.is_not_reset_again().await;
}

#[tokio::test]
async fn interrupted_reset_ends_without_a_second_one() {
    let mut fixture = Fixture::without_defaults().await;
    fixture.request_in_kcp();
    fixture.kcp.refuse("PATCH kymas/k", 503);
    fixture.kyma().await;
    assert_eq!(fixture.selected(), Vec::<String>::new(), "its id comes first");
    fixture.kcp.refuse_nothing();
    // The reset, and not the end of the request in KCP.
    fixture.runtime.refuse("PUT kymas/default", 503);
    fixture.kyma().await;
    let (requested, id) = fixture.request();
    assert!(requested == "true" && id.is_string() && fixture.selected().is_empty());
    fixture.runtime.refuse_nothing();
    fixture.kcp.refuse("PATCH kymas/k", 503);
    fixture.kyma().await;
    assert_eq!((fixture.selected(), fixture.request()), (vec!["keda".to_owned()], (requested, id)));
    // The user selects anew before the receiver is back.
    fixture.select(json!([]));
    fixture.kcp.refuse_nothing();
    fixture.kyma().await;
    assert_eq!((fixture.selected(), fixture.request()), (vec![], (Value::Null, Value::Null)));
    fixture.is_not_reset_again().await;
}

#[tokio::test]
async fn request_that_is_taken_back_does_not_swallow_the_next_one() {
    let mut fixture = Fixture::without_defaults().await;
    fixture.request_in_kcp();
    fixture.runtime.refuse("PUT kymas/default", 503);
    fixture.kyma().await;
    fixture.runtime.refuse_nothing();
    fixture.kcp.edit("kymas/k", |kyma| drop(kyma["metadata"]["labels"].as_object_mut().unwrap().remove(LABEL)));
    fixture.kyma().await;
    assert_eq!((fixture.selected(), fixture.request().1), (vec![], Value::Null));
    fixture.request_in_kcp();
    fixture.kyma().await;
    assert_eq!(fixture.selected(), ["keda"]);
}

#[tokio::test]
async fn concurrent_change_of_the_user_is_not_overwritten_unseen() {
    let mut fixture = Fixture::without_defaults().await;
    fixture.request_in_runtime();
    fixture.runtime.meanwhile("PUT kymas/default", "kymas/default", |kyma| {
        kyma["metadata"]["labels"].as_object_mut().unwrap().remove(LABEL);
        kyma["spec"]["channel"] = "fast".into();
    });
    assert!(!fixture.kyma().await.failed.is_empty(), "a conflict");
    fixture.kyma().await;
    assert_eq!(fixture.selected(), Vec::<String>::new(), "the user has taken the request back");
}
