//! Access to a runtime: the condition `RuntimeAccess` names the fault of an unusable kubeconfig, and a repaired one is
//! used at once (`acceptance.md` 8, 9).

use base64::{Engine as _, prelude::BASE64_STANDARD};
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    KymaStatus, State,
    names::{KUBECONFIG_KEY, label},
};
use tidewatch_testing::control_plane::{ClusterUser, credentials};

use crate::support::{SingleRuntime, TestResult, condition};

const CONDITION: &str = "RuntimeAccess";

#[tokio::test]
async fn an_unusable_kubeconfig_is_named_and_a_good_one_is_used_at_once() -> TestResult {
    let setup = SingleRuntime::without_agent("access", &[]).await?;
    let cluster = setup.runtime.cluster();
    let token = cluster.credentials().token(ClusterUser::Other);
    let good: Value = serde_json::from_str(&cluster.kubeconfig_for_token(token))?;
    let with = |path: &str, value: Value| {
        let mut changed = good.clone();
        let (parent, member) = path.rsplit_once('/').unwrap();
        match changed.pointer_mut(parent).unwrap() {
            Value::Array(items) => items.push(value),
            object => object[member] = value,
        }
        changed.to_string()
    };
    let ready = |status: &KymaStatus| status.state() == State::Ready;
    setup.kcp_status("readiness", ready).await?;
    // The current context refers to the second cluster.
    let user = "/users/0/user";
    let cluster_entry = "/clusters/1/cluster";
    let server = format!("{cluster_entry}/server");
    let exec = json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/true"}});
    let url = cluster.url();
    for (kubeconfig, word) in [
        (with(user, exec), "exec"),
        (with(user, json!({"tokenFile": "/etc/passwd"})), "file"),
        (with(&server, json!(url.replace("https://", "http://"))), "https"),
        (with(&server, json!("https://169.254.169.254")), "169.254.169.254"),
        (with(&format!("{cluster_entry}/insecure-skip-tls-verify"), json!(true)), "insecure"),
        (with("/current-context", json!("other")), "current-context"),
        (with("/current-context", json!("")), "3 contexts"),
        ("{".to_owned(), "malformed"),
    ] {
        setup.runtime.write_access(&kubeconfig).await?;
        let status = setup
            .kcp_status(word, |status| {
                condition(status, CONDITION).is_ok_and(|(good, message)| !good && message.contains(word))
            })
            .await?;
        assert_eq!(status.state(), State::Error, "{word}");
        let (_, message) = condition(&status, CONDITION)?;
        assert!(!message.contains(token), "a message must not contain a token");
    }
    let (foreign, ..) = credentials::certificates("foreign")?;
    let foreign = with(&format!("{cluster_entry}/certificate-authority-data"), json!(BASE64_STANDARD.encode(foreign)));
    setup.runtime.write_access(&foreign).await?;
    setup
        .kcp_status("an untrusted server", |status| {
            let cause = "is not trusted: none of the trusted roots issued it";
            condition(status, CONDITION).is_ok_and(|(good, message)| !good && message.ends_with(cause))
        })
        .await?;

    let good = good.to_string();
    setup.runtime.write_access(&good).await?;
    let healed =
        |status: &tidewatch_api::KymaStatus| ready(status) && condition(status, CONDITION).is_ok_and(|(good, _)| good);
    setup.kcp_status("readiness again", healed).await?;

    let secrets = Api::<Secret>::namespaced(setup.landscape.kcp().client().await?, setup.landscape.namespace());
    let second = json!({
        "metadata": {"name": "second", "labels": {label::KYMA_NAME: setup.runtime.name()}}, "stringData": {KUBECONFIG_KEY: good},
    });
    secrets.create(&PostParams::default(), &serde_json::from_value(second)?).await?;
    setup
        .kcp_status("two Secrets", |status| {
            condition(status, CONDITION).is_ok_and(|(good, message)| !good && message.contains("second"))
        })
        .await?;
    secrets.delete("second", &DeleteParams::default()).await?;
    setup.kcp_status("readiness once more", healed).await?;
    Ok(())
}
