use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::json;
use tidewatch_api::{
    Kyma, crds,
    names::{SKR_KYMA, SKR_NAMESPACE},
};

use super::*;

async fn client(fake: &FakeApiServer, name: &str) -> Client {
    crate::install_crypto();
    let kubeconfig = Kubeconfig::from_yaml(&fake.kubeconfig(name)).expect("a kubeconfig");
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.expect("usable");
    Client::try_from(config).expect("a client")
}

fn apply() -> PatchParams {
    PatchParams::apply("test").force()
}

fn map(name: &str, labels: serde_json::Value) -> ConfigMap {
    serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}})).expect("a ConfigMap")
}

#[tokio::test]
async fn custom_resources_are_served_while_their_definition_is_there() {
    let fake = FakeApiServer::start().await.expect("served");
    let _ = fake.cluster("one");
    let client = client(&fake, "one").await;
    let kymas = Api::<Kyma>::namespaced(client.clone(), SKR_NAMESPACE);
    let error = kymas.get(SKR_KYMA).await.expect_err("no definition");
    assert!(matches!(error, kube::Error::Api(status) if status.code == 404 && status.reason != "NotFound"));

    for crd in crds::runtime_crds() {
        let applied = Api::all(client.clone()).patch(&crd.name_any(), &apply(), &Patch::Apply(&crd)).await;
        let status = applied.map(
            |crd: k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition| {
                crd.status
            },
        );
        assert!(status.expect("applied").is_some_and(|status| status.conditions.is_some()));
    }
    assert!(kymas.get_opt(SKR_KYMA).await.expect("a 404 that names it").is_none());
    let served = client.list_api_group_resources("operator.kyma-project.io/v1beta2").await.expect("discovered");
    assert!(served.resources.iter().all(|served| served.namespaced), "as the definitions say");
    let built_in = client.list_api_group_resources("apiextensions.k8s.io/v1").await.expect("discovered");
    assert!(built_in.resources.iter().all(|served| !served.namespaced));
    let kyma: Kyma = serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
        "metadata": {"name": SKR_KYMA}, "spec": {"channel": "regular"}}))
    .expect("a Kyma");
    let made = kymas.create(&PostParams::default(), &kyma).await.expect("created");
    assert_eq!((made.metadata.generation, made.namespace().as_deref()), (Some(1), Some(SKR_NAMESPACE)));
    assert!(kymas.create(&PostParams::default(), &kyma).await.is_err(), "it is there already");

    let mut shown = made.clone();
    shown.status = Some(serde_json::from_value(json!({"state": "Ready"})).expect("a status"));
    let shown = kymas.replace_status(SKR_KYMA, &PostParams::default(), &shown).await.expect("written");
    assert_eq!(shown.metadata.generation, Some(1), "a status is no spec");
    let stale = kymas.replace(SKR_KYMA, &PostParams::default(), &made).await.expect_err("a conflict");
    assert!(matches!(stale, kube::Error::Api(status) if status.code == 409));
    let patch = Patch::Merge(json!({"spec": {"modules": [{"name": "keda"}]}}));
    let patched = kymas.patch(SKR_KYMA, &PatchParams::default(), &patch).await.expect("patched");
    assert_eq!((patched.metadata.generation, patched.spec.channel.as_str()), (Some(2), "regular"));
    assert!(patched.status.is_some());
    let again = kymas.patch(SKR_KYMA, &PatchParams::default(), &patch).await.expect("patched");
    assert_eq!(again.resource_version(), patched.resource_version(), "nothing changed");
}

#[tokio::test]
async fn runtimes_are_separate_and_unknown_ones_are_refused() {
    let fake = FakeApiServer::start().await.expect("served");
    for name in ["one", "two"] {
        let maps = Api::<ConfigMap>::namespaced(client_of(&fake, name).await, "default");
        maps.create(&PostParams::default(), &map(name, json!({}))).await.expect("created");
        let names: Vec<_> =
            maps.list(&ListParams::default()).await.expect("a list").iter().map(|m| m.name_any()).collect();
        assert_eq!(names, [name]);
    }
    let stranger = client(&fake, "three").await;
    assert!(Api::<Namespace>::all(stranger).list(&ListParams::default()).await.is_err());
    assert_eq!(fake.calls(), 5);
    assert_eq!(fake.cluster("one").calls().to_string(), "1 create configmaps, 1 list configmaps");
}

#[tokio::test]
async fn connections_are_counted_until_they_end() {
    let fake = FakeApiServer::start().await.expect("served");
    let client = client_of(&fake, "one").await;
    Api::<Namespace>::all(client.clone()).list(&ListParams::default()).await.expect("a list");
    assert_eq!(fake.connections(), 1);
    drop(client);
    let ended = async {
        while fake.connections() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ended).await.expect("it ends with its client");
}

async fn client_of(fake: &FakeApiServer, name: &str) -> Client {
    let _ = fake.cluster(name);
    client(fake, name).await
}

#[tokio::test]
async fn lists_come_in_pages_and_by_selection() {
    let fake = FakeApiServer::start().await.expect("served");
    let maps = Api::<ConfigMap>::namespaced(client_of(&fake, "one").await, "default");
    for (name, labels) in [("a", json!({"x": "1"})), ("b", json!({"x": "1"})), ("c", json!({"x": "2"}))] {
        maps.create(&PostParams::default(), &map(name, labels)).await.expect("created");
    }
    let page = maps.list(&ListParams::default().limit(2)).await.expect("a page");
    let token = page.metadata.continue_.clone().expect("there is more");
    let rest = maps.list(&ListParams::default().limit(2).continue_token(&token)).await.expect("a page");
    let names: Vec<_> = page.iter().chain(rest.iter()).map(ResourceExt::name_any).collect();
    assert_eq!((names.join(""), rest.metadata.continue_.unwrap_or_default()), ("abc".to_owned(), String::new()));
    let ones = maps.list_metadata(&ListParams::default().labels("x=1")).await.expect("metadata");
    assert_eq!(ones.items.len(), 2);
    maps.delete("a", &DeleteParams::default()).await.ok();
    assert_eq!(maps.list(&ListParams::default().labels("x=1")).await.expect("a list").items.len(), 1);
}

#[tokio::test]
async fn watch_continues_from_the_list_and_expires_behind_the_history() {
    let fake = FakeApiServer::start().await.expect("served");
    let cluster = fake.cluster("one");
    let maps = Api::<ConfigMap>::namespaced(client(&fake, "one").await, "default");
    let key = |name: &str| format!("/configmaps/default/{name}");
    let label =
        |value: &'static str| move |object: &mut serde_json::Value| object["metadata"]["labels"] = json!({"x": value});
    let name = |name: &'static str| {
        move |object: &mut serde_json::Value| object["metadata"] = json!({"name": name, "labels": {"x": "1"}})
    };
    cluster.edit(&key("a"), name("a"));
    let version =
        maps.list(&ListParams::default()).await.expect("a list").metadata.resource_version.expect("a version");
    let params = WatchParams::default().labels("x=1").timeout(60);
    let mut watch = maps.watch(&params, &version).await.expect("a watch").boxed();
    let wait = async {
        let mut events = Vec::new();
        while events.len() < 4
            && let Some(event) = watch.try_next().await.expect("an event")
        {
            events.push(match event {
                WatchEvent::Added(map) => format!("+{}", map.name_any()),
                WatchEvent::Modified(map) => format!("~{}", map.name_any()),
                WatchEvent::Deleted(map) => format!("-{}", map.name_any()),
                other => panic!("{other:?}"),
            });
        }
        events
    };
    let write = async {
        cluster.edit(&key("b"), name("b"));
        cluster.edit("/configmaps/elsewhere/c", name("c"));
        cluster.edit(&key("a"), |object| object["data"] = json!({"k": "v"}));
        cluster.edit(&key("b"), label("2"));
        maps.delete("a", &DeleteParams::default()).await.ok();
    };
    let (events, ()) = tokio::join!(wait, write);
    assert_eq!(events, ["+b", "~a", "-b", "-a"]);

    for number in 0..=store::HISTORY {
        cluster.edit(&key("d"), |object| object["data"] = json!({"n": number.to_string()}));
    }
    let mut late = maps.watch(&params, &version).await.expect("a watch").boxed();
    let event = late.try_next().await.expect("an event");
    assert!(matches!(event, Some(WatchEvent::Error(status)) if status.code == 410));
}
