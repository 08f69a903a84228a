//! Access to a runtime: what is unusable is named in the condition `RuntimeAccess`, and what is repaired is used at once
//! (`acceptance.md` 8, 9).

use anyhow::Result;
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use serde_json::json;
use tidewatch_shared::{
    api::State,
    names::{KUBECONFIG_KEY, label},
};
use tidewatch_tests::control_plane::Person;

use crate::support::{One, condition};

const CONDITION: &str = "RuntimeAccess";

#[tokio::test]
async fn an_unusable_kubeconfig_is_named_and_a_good_one_is_used_at_once() -> Result<()> {
    let one = One::without_agent("access", &[]).await?;
    let good = one.runtime.cluster().kubeconfig_for_token(one.runtime.cluster().credentials().token(Person::Other));
    let ready = |status: &tidewatch_shared::api::KymaStatus| status.state() == State::Ready;
    one.kcp_status("readiness", ready).await?;
    let token = good.lines().find(|line| line.contains("token:")).unwrap_or_default().trim().to_owned();
    for (kubeconfig, word) in [
        (good.replace(&token, "exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/true}"), "exec"),
        (good.replace(&token, "tokenFile: /etc/passwd"), "file"),
        (good.replace("https://", "http://"), "https"),
        (good.replace("https://127.0.0.1", "https://169.254.169.254"), "169.254.169.254"),
        ("{".to_owned(), "kubeconfig"),
    ] {
        one.runtime.write_access(&kubeconfig).await?;
        let status = one
            .kcp_status(word, |status| {
                condition(status, CONDITION).is_ok_and(|(good, message)| !good && message.contains(word))
            })
            .await?;
        assert_eq!(status.state(), State::Error, "{word}");
        let (_, message) = condition(&status, CONDITION)?;
        assert!(!message.contains(&token), "a token must never be shown");
    }
    one.runtime.write_access(&good).await?;
    let healed = |status: &tidewatch_shared::api::KymaStatus| {
        ready(status) && condition(status, CONDITION).is_ok_and(|(good, _)| good)
    };
    one.kcp_status("readiness again", healed).await?;

    let secrets = Api::<Secret>::namespaced(one.landscape.kcp().client().await?, one.landscape.namespace());
    let second = json!({
        "metadata": {"name": "second", "labels": {label::KYMA_NAME: one.runtime.name()}}, "stringData": {KUBECONFIG_KEY: good},
    });
    secrets.create(&PostParams::default(), &serde_json::from_value(second)?).await?;
    one.kcp_status("two Secrets", |status| {
        condition(status, CONDITION).is_ok_and(|(good, message)| !good && message.contains("second"))
    })
    .await?;
    secrets.delete("second", &DeleteParams::default()).await?;
    one.kcp_status("readiness once more", healed).await?;
    Ok(())
}
