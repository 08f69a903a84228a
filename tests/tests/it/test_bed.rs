//! The test bed itself, on real control planes.

use std::{process::Command, time::Duration};

use k8s_openapi::api::{
    apps::v1::Deployment,
    authentication::v1::{TokenReview, TokenReviewSpec},
    core::v1::{ConfigMap, Namespace},
};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
    runtime::{conditions::is_deployment_completed, wait::await_condition},
};
use serde_json::{from_value, json};
use tidewatch_testing::{
    bed::{self, BedError, TestBed},
    control_plane::{
        Admission, Binaries, ClusterUser,
        apiserver::{ApiServer, ApiServerError, Settings},
        credentials::Credentials,
    },
    process::ProcessError,
    proxy::Proxy,
};

fn namespace(name: &str) -> Namespace {
    from_value(json!({"metadata": {"name": name}})).expect("a namespace")
}

#[tokio::test]
async fn clusters_that_share_an_etcd_are_isolated() {
    let bed = bed::shared().await.expect("a test bed");
    let (kcp, runtime) = tokio::join!(bed.kcp(), bed.runtime("one"));
    let kcp = kcp.expect("a KCP");
    let runtime = runtime.expect("a runtime");
    assert_ne!(kcp.credentials().ca_pem, runtime.credentials().ca_pem);
    assert_ne!(kcp.credentials().issuer_public_pem, runtime.credentials().issuer_public_pem);

    let in_kcp = Api::<Namespace>::all(kcp.client().await.expect("a client"));
    let in_runtime = Api::<Namespace>::all(runtime.client().await.expect("a client"));
    in_runtime.create(&PostParams::default(), &namespace("only-there")).await.expect("created");
    assert!(in_runtime.get_opt("only-there").await.expect("read").is_some());
    assert!(in_kcp.get_opt("only-there").await.expect("read").is_none());
}

#[tokio::test]
async fn an_api_server_authenticates_only_its_own_accounts() {
    let bed = bed::shared().await.expect("a test bed");
    let runtime = bed.runtime("one").await.expect("a runtime");
    let kcp = bed.kcp().await.expect("a KCP");
    runtime.ensure_service_account("vouch", "agent").await.expect("an account");
    let token = runtime.service_account_token_for("vouch", "agent", &["tidewatch"]).await.expect("a token");
    let spec = TokenReviewSpec { token: Some(token), audiences: Some(vec!["tidewatch".to_owned()]) };
    let review = TokenReview { spec, ..Default::default() };
    let review_in = async |client| {
        let reviews = Api::<TokenReview>::all(client);
        let answer = reviews.create(&PostParams::default(), &review).await.expect("reviewed");
        answer.status.expect("a status")
    };
    let here = review_in(runtime.client().await.expect("a client")).await;
    assert_eq!(here.authenticated, Some(true), "{here:?}");
    assert_eq!(here.user.and_then(|user| user.username).as_deref(), Some("system:serviceaccount:vouch:agent"));
    let elsewhere = review_in(kcp.client().await.expect("a client")).await;
    assert_ne!(elsewhere.authenticated, Some(true), "another cluster has another issuer key");
}

#[tokio::test]
async fn a_service_account_has_no_rights_by_default() {
    let bed = bed::shared().await.expect("a test bed");
    let runtime = bed.runtime("one").await.expect("a runtime");
    runtime.ensure_service_account("bare", "agent").await.expect("an account");
    let token = runtime.service_account_token("bare", "agent").await.expect("a token");
    let client = runtime.client_for_token(&token).await.expect("a client");
    match Api::<Namespace>::all(client).get("default").await {
        Err(kube::Error::Api(status)) if status.is_forbidden() => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_audit_log_names_the_writer() {
    let bed = bed::shared().await.expect("a test bed");
    let kcp = bed.kcp().await.expect("a KCP");
    kcp.ensure_namespace("audited").await.expect("created");
    let mark = kcp.audit_mark().expect("a mark");
    let before = kcp.write_requests().await.expect("metrics");
    let api = Api::<ConfigMap>::namespaced(kcp.client_as(ClusterUser::User).await.expect("a client"), "audited");
    let map = from_value(json!({"metadata": {"name": "written"}})).expect("a map");
    api.create(&PostParams::default(), &map).await.expect("created");
    api.get("written").await.expect("read");
    api.delete("written", &DeleteParams::default()).await.expect("deleted");

    let writes = kcp.writes_since(mark).expect("the log");
    let mine: Vec<_> = writes.iter().filter(|write| write.namespace == "audited").collect();
    assert_eq!(mine.iter().map(|write| write.verb.as_str()).collect::<Vec<_>>(), ["create", "delete"]);
    assert!(
        mine.iter().all(|write| write.user == "user" && write.resource == "configmaps" && !write.is_kubernetes_own())
    );
    let after = kcp.write_requests().await.expect("metrics");
    let grown = after.iter().filter(|(kind, _)| kind.resource == "configmaps" && kind.verb == "DELETE");
    assert!(grown.clone().count() > 0 && grown.clone().all(|(kind, n)| before.get(kind) < Some(n)), "{after:?}");
}

#[tokio::test]
async fn a_proxy_cuts_and_resumes_connections_to_a_cluster() {
    let bed = bed::shared().await.expect("a test bed");
    let kcp = bed.kcp().await.expect("a KCP");
    let proxy = Proxy::start(kcp.server().address()).await.expect("a proxy");
    let url = format!("https://{}", proxy.address());
    let text = kcp.kubeconfig_at(&url, kcp.credentials().token(ClusterUser::Admin));
    let parsed = kube::config::Kubeconfig::from_yaml(&text).expect("a kubeconfig");
    let config = kube::Config::from_custom_kubeconfig(parsed, &Default::default()).await.expect("a config");
    let api = Api::<Namespace>::all(kube::Client::try_from(config).expect("a client"));
    api.get("default").await.expect("read");
    proxy.cut();
    assert!(api.get("default").await.is_err());
    proxy.resume();
    api.get("default").await.expect("read again");
}

#[tokio::test]
async fn a_killed_api_server_restarts_with_its_data() {
    let bed = TestBed::start().await.expect("a test bed");
    let runtime = bed.runtime("phoenix").await.expect("a runtime");
    runtime.ensure_service_account("kept", "agent").await.expect("an account");
    let token = runtime.service_account_token("kept", "agent").await.expect("a token");
    let api = Api::<Namespace>::all(runtime.client().await.expect("a client"));
    let pid = runtime.server().process().pid();
    runtime.server().kill();
    assert!(api.get("kept").await.is_err());
    runtime.server().restart().await.expect("back");
    assert_ne!(runtime.server().process().pid(), pid);
    api.get("kept").await.expect("the same client finds the same data");
    // The issuer's keys are the same, so an old token is still authenticated.
    let client = runtime.client_for_token(&token).await.expect("a client");
    match Api::<Namespace>::all(client).get("kept").await {
        Err(kube::Error::Api(status)) if status.is_forbidden() => {}
        other => panic!("{other:?}"),
    }
    let dir = bed.dir().to_path_buf();
    drop((runtime, bed));
    assert!(!dir.exists(), "a successful test bed removes its folder");
}

#[tokio::test]
async fn a_restarted_api_server_waits_for_its_port() {
    let bed = bed::shared().await.expect("a test bed");
    let runtime = bed.runtime("port").await.expect("a runtime");
    let server = runtime.server();
    server.kill();
    let squatter = std::net::TcpListener::bind(server.address()).expect("the port is free now");
    let log = runtime.dir().join("kube-apiserver.log");
    let leave = async move {
        while !std::fs::read_to_string(&log).expect("a log").contains("address already in use") {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        drop(squatter);
    };
    let (restarted, ()) = tokio::join!(server.restart(), leave);
    restarted.expect("back on its port");
    Api::<Namespace>::all(runtime.client().await.expect("a client")).get("default").await.expect("read");
}

#[tokio::test]
async fn a_frozen_api_server_is_silent_until_it_thaws() {
    let bed = bed::shared().await.expect("a test bed");
    let runtime = bed.runtime("thawing").await.expect("a runtime");
    let api = Api::<Namespace>::all(runtime.client().await.expect("a client"));
    runtime.server().freeze().expect("frozen");
    let silence = tokio::time::timeout(Duration::from_millis(500), api.get("default")).await;
    runtime.server().thaw().expect("thawed");
    assert!(silence.is_err());
    api.get("default").await.expect("read");
}

#[tokio::test]
async fn a_deployment_becomes_ready_where_workloads_run() {
    let bed = bed::shared().await.expect("a test bed");
    let runtime = bed.runtime_with_workloads("busy").await.expect("a runtime");
    let deployments = Api::<Deployment>::namespaced(runtime.client().await.expect("a client"), "default");
    let deployment = from_value(json!({
        "metadata": {"name": "ready"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "ready"}},
            "template": {
                "metadata": {"labels": {"app": "ready"}},
                "spec": {"containers": [{"name": "main", "image": "example.invalid/never-pulled"}]},
            },
        },
    }));
    deployments.create(&PostParams::default(), &deployment.expect("a deployment")).await.expect("created");
    let ready = await_condition(deployments, "ready", is_deployment_completed());
    tokio::time::timeout(Duration::from_secs(60), ready).await.expect("in time").expect("ready");
    assert!(matches!(bed.runtime("busy").await, Err(BedError::OtherKind(_, "with workloads"))));
}

/// Stands in for a kube-apiserver that exits at once.
#[tokio::test]
async fn the_error_of_a_crashed_api_server_has_its_output_and_log_path() {
    let dir = tempfile::tempdir().expect("a folder");
    let binary = dir.path().join("kube-apiserver");
    // Written by a child: a file that this process has open for writing while another test forks cannot be executed.
    let write = r#"printf '#!/bin/sh\necho the store is unreachable >&2\nexit 1\n' >"$0" && chmod 755 "$0""#;
    assert!(Command::new("sh").arg("-c").arg(write).arg(&binary).status().expect("a shell").success());
    let name = "dying".to_owned();
    let cluster = dir.path().to_path_buf();
    let etcd_url = "http://127.0.0.1:1".to_owned();
    let settings = Settings { binary, name, dir: cluster.clone(), etcd_url, admission: Admission::ApiOnly };
    let credentials = Credentials::create("dying", dir.path()).expect("credentials").into();
    let error = ApiServer::start(settings, credentials).await.expect_err("it dies");
    let ApiServerError::Start(_, error @ ProcessError::Ended { .. }) = error else { panic!("{error}") };
    let text = error.to_string();
    assert!(text.contains("exit status: 1") && text.contains("the store is unreachable"), "{text}");
    assert!(text.contains(&cluster.join("kube-apiserver.log").display().to_string()), "{text}");
}

#[tokio::test]
async fn invalid_cluster_names_are_refused() {
    let bed = bed::shared().await.expect("a test bed");
    assert!(matches!(bed.runtime("kcp").await, Err(BedError::Name(_))));
    assert!(matches!(bed.runtime("../x").await, Err(BedError::Name(_))));
    assert!(Binaries::from_env().find(tidewatch_testing::control_plane::Tool::Etcd).is_some(), "etcd is available");
}
