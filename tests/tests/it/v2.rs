//! Contract v2 at a running receiver: events of runtime-watcher's agents enqueue their Kyma, and other clients are
//! refused.

use std::{fs, sync::Arc};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use kube::api::{DeleteParams, Patch, PatchParams};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_RSA_SHA256, RsaKeySize, SanType,
};
use serde_json::json;
use tempfile::TempDir;
use tidewatch_api::{identity::RuntimeId, names::label};
use tidewatch_contract::v2::{Event, path};
use tidewatch_kit::tls::{self, Identity};
use tidewatch_testing::{
    contract_client::ContractClient,
    landscape::{DEADLINE, Options, now, until},
    ports,
};
use tidewatch_trust::TrustBundle;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    forward::{Behavior, Manager},
    support::{SingleRuntime, module, quick_options},
    sync::sum,
};

/// A CA that issues certificates like lifecycle-manager's: RSA, no URI, no extended key usage, a subject with more than a
/// common name.
struct LifecycleManager {
    issuer: Issuer<'static, KeyPair>,
    root: TrustBundle,
}

fn rsa() -> Result<KeyPair> {
    Ok(KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048)?)
}

impl LifecycleManager {
    fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "klm-watcher-selfsigned-ca");
        let key = rsa()?;
        let root = TrustBundle::of(vec![params.self_signed(&key)?.der().clone()]);
        Ok(Self { issuer: Issuer::new(params, key), root })
    }

    fn identity(&self, common_name: &str) -> Result<Identity> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "SAP SE");
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.subject_alt_names = vec![SanType::DnsName("skr-webhook.kyma-system.svc".try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        let key = rsa()?;
        let leaf = params.signed_by(&key, &self.issuer)?.der().clone();
        Ok(Identity { chain: vec![leaf], key: key.into() })
    }
}

/// Posts over HTTP/1.1 as runtime-watcher's agent does.
async fn post(setup: &SingleRuntime, identity: &Identity, port: u16, path: &str, body: Vec<u8>) -> Result<StatusCode> {
    let config = tls::client(Some(identity), setup.landscape.ca().trust_bundle().store()?)?;
    let connector =
        hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(config).https_only().enable_http1().build();
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build(connector);
    let request = Request::post(format!("https://127.0.0.1:{port}{path}"))
        .header("content-type", "application/json")
        .body(Full::new(body.into()))?;
    let answer = client.request(request).await?;
    let status = answer.status();
    let body = answer.into_body().collect().await?.to_bytes();
    assert_eq!(body.is_empty(), status == StatusCode::OK);
    Ok(status)
}

fn event() -> Vec<u8> {
    let [namespace, name, group, version, kind] =
        ["kyma-system", "default", "operator.kyma-project.io", "v1beta2", "Kyma"].map(str::to_owned);
    Event { namespace, name, group, version, kind }.to_body().into_bytes()
}

/// Options of a receiver that serves v2 on a port, trusts lifecycle-manager's CA there, and forwards to managers on
/// loopback.
fn v2_options(lifecycle_manager: &LifecycleManager, port: u16, dir: &TempDir) -> Result<Options> {
    let ca = dir.path().join("v2-ca.crt");
    fs::write(&ca, lifecycle_manager.root.to_pem())?;
    let receiver = [
        "--v2".to_owned(),
        "--v2-address".to_owned(),
        format!("127.0.0.1:{port}"),
        "--v2-client-ca".to_owned(),
        ca.to_str().context("a path")?.to_owned(),
        "--forward-url-template".to_owned(),
        "http://127.0.0.1:{port}".to_owned(),
    ];
    Ok(Options { receiver: receiver.to_vec(), ..quick_options() })
}

/// Checks that certificates of one port are not accepted on the other, and that a runtime which speaks v3 may not fall
/// back to v2 unless that is allowed.
async fn ports_accept_only_their_certificates(setup: &SingleRuntime, agent: &Identity, port: u16) -> Result<()> {
    let (id, manager): (&RuntimeId, _) = (setup.runtime.id(), path("lifecycle-manager"));
    let ours = setup.landscape.ca();
    let domain = setup.landscape.trust_domain();
    let ours = ours.make_runtime(id, domain, now(), tidewatch_trust::RUNTIME_VALIDITY)?.identity()?;
    post(setup, &ours, port, &manager, event()).await.err().context("v2 must refuse v3's certificate")?;
    post(setup, agent, setup.landscape.event_port(), "/v3/events", event())
        .await
        .err()
        .context("v3 must refuse v2's certificate")?;

    let contract_client =
        ContractClient::new(setup.landscape.ca(), setup.landscape.ca(), domain, id, &setup.landscape.authority())?;
    assert_eq!(contract_client.send(&contract_client.event(1, 1)?).await?.status(), 202);
    assert_eq!(post(setup, agent, port, &manager, event()).await?, 403);
    let allow = json!({"metadata": {"labels": {label::ALLOW_V2: "true"}}});
    setup.kcp_kymas().await?.patch(setup.runtime.name(), &PatchParams::default(), &Patch::Merge(&allow)).await?;
    until("v2 to be allowed again", async || {
        Ok((post(setup, agent, port, &manager, event()).await? == 200).then_some(()))
    })
    .await
}

#[tokio::test]
async fn lifecycle_managers_agents_are_served_and_certificates_count_on_one_port_only() -> Result<()> {
    let lifecycle_manager = LifecycleManager::new()?;
    let port = ports::free()?;
    let dir = TempDir::new()?;
    let options = v2_options(&lifecycle_manager, port, &dir)?;
    let setup = SingleRuntime::with_options("contract-v2", &[("keda", "1.0.0", "1.1.0")], options).await?;
    until("the Kyma in the runtime", async || setup.runtime.skr_kyma().await).await?;
    let agent = lifecycle_manager.identity(setup.runtime.id().as_str())?;
    let manager = path("lifecycle-manager");

    setup.runtime.select(&["keda"]).await?;
    assert_eq!(post(&setup, &agent, port, &manager, event()).await?, 200);
    setup.skr_status("the change reported over v2", |status| module(status, "keda").is_some()).await?;
    setup
        .kcp_status("the path of an agent that speaks v2", |status| {
            status.condition("EventPath").is_some_and(|path| path.reason == "LegacyAgent")
        })
        .await?;
    // An event for a Kyma that is already in the queue does not add it; the debug log states that.
    let line = format!("event received from SKR, adding {}/contract-v2 to queue", setup.landscape.namespace());
    until("lifecycle-manager's log line", async || {
        assert_eq!(post(&setup, &agent, port, &manager, event()).await?, 200);
        let log = setup.landscape.with_receiver(async |receiver| receiver.log_text()).await??;
        Ok(log.contains(&line).then_some(()))
    })
    .await?;

    assert_eq!(post(&setup, &agent, port, &path("unknown"), event()).await?, 404);
    assert_eq!(post(&setup, &agent, port, &manager, b"no event".to_vec()).await?, 400);
    assert_eq!(post(&setup, &agent, port, &manager, vec![b' '; 16_385]).await?, 413);
    assert_eq!(post(&setup, &lifecycle_manager.identity("")?, port, &manager, event()).await?, 400);
    let stranger = lifecycle_manager.identity("stranger")?;
    assert_eq!(
        post(&setup, &stranger, port, &manager, event()).await?,
        200,
        "accepted and dropped, as by lifecycle-manager"
    );
    ports_accept_only_their_certificates(&setup, &agent, port).await?;

    // An event for another manager is forwarded with the sender's certificate.
    let other = Manager::start(Behavior::Accepts).await?;
    setup.landscape.write_watcher(&other.watcher("other")).await?;
    until("the other manager to be served", async || {
        Ok((post(&setup, &agent, port, &path("other"), event()).await? == 200).then_some(()))
    })
    .await?;
    let (runtime, forwarded_path, _) = other.receives("default").await?;
    assert_eq!((runtime.as_str(), forwarded_path.as_str()), (setup.runtime.id().as_str(), "/v2/other/event"));

    let (_, page) = setup.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
    let value = |name: &str| -> Option<f64> {
        let line = page.lines().find(|line| line.starts_with(name) && line.contains("server_name=\"listener\""))?;
        line.rsplit(' ').next()?.parse().ok()
    };
    assert!(value("watcher_listener_requests_total").context("requests")? >= 8.0, "{page}");
    assert_eq!(value("watcher_listener_exceeding_size_limit_requests_total"), Some(1.0));
    assert_eq!(value("watcher_listener_inflight_requests"), Some(0.0));
    Ok(())
}

/// Restarts the receiver while no agent of ours is connected, and returns its first answer other than 503 to a v2
/// event.
async fn first_answer_after_restart(setup: &SingleRuntime, agent: &Identity, port: u16) -> Result<StatusCode> {
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    setup.landscape.start_receiver().await?;
    until("a receiver with its Kymas", async || {
        let answer = post(setup, agent, port, &path("lifecycle-manager"), event()).await;
        Ok(answer.ok().filter(|status| *status != StatusCode::SERVICE_UNAVAILABLE))
    })
    .await
}

#[tokio::test]
async fn a_runtime_that_spoke_v3_may_not_fall_back_after_a_receiver_restart() -> Result<()> {
    let lifecycle_manager = LifecycleManager::new()?;
    let port = ports::free()?;
    let dir = TempDir::new()?;
    let setup = SingleRuntime::with_options(
        "spoken-v3",
        &[("keda", "1.0.0", "1.1.0")],
        v2_options(&lifecycle_manager, port, &dir)?,
    )
    .await?;
    let agent = lifecycle_manager.identity(setup.runtime.id().as_str())?;
    let is = async |reason: &str| {
        setup.kcp_status(reason, |status| status.condition("EventPath").is_some_and(|path| path.reason == reason)).await
    };
    until("the Kyma in the runtime", async || setup.runtime.skr_kyma().await).await?;
    assert_eq!(post(&setup, &agent, port, &path("lifecycle-manager"), event()).await?, 200);
    assert_eq!(
        first_answer_after_restart(&setup, &agent, port).await?,
        200,
        "a runtime that never spoke v3 may use v2"
    );

    setup.runtime.start_agent().await?;
    is("Proven").await?;
    setup.runtime.with_agent(async |agent| agent.kill9()).await?;
    assert_eq!(first_answer_after_restart(&setup, &agent, port).await?, 403);
    is("NoHeartbeat").await?;
    assert_eq!(first_answer_after_restart(&setup, &agent, port).await?, 403);
    Ok(())
}

/// Opens a connection to the v2 port, sends one event over it, and keeps it open.
async fn open_connection(setup: &SingleRuntime, identity: &Identity, port: u16) -> Result<TlsStream<TcpStream>> {
    let config = tls::client(Some(identity), setup.landscape.ca().trust_bundle().store()?)?;
    let tcp = TcpStream::connect(("127.0.0.1", port)).await?;
    let mut stream = TlsConnector::from(Arc::new(config)).connect("127.0.0.1".try_into()?, tcp).await?;
    let path = path("lifecycle-manager");
    let body = event();
    let head = format!("POST {path} HTTP/1.1\r\nhost: v2\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), &body].concat()).await?;
    let mut answer = vec![0; 12];
    stream.read_exact(&mut answer).await?;
    assert_eq!(answer, b"HTTP/1.1 200");
    Ok(stream)
}

#[tokio::test]
async fn deleting_a_kyma_closes_its_runtimes_connections_in_both_contracts() -> Result<()> {
    let lifecycle_manager = LifecycleManager::new()?;
    let port = ports::free()?;
    let dir = TempDir::new()?;
    let setup = SingleRuntime::with_options(
        "gone-v2",
        &[("keda", "1.0.0", "1.1.0")],
        v2_options(&lifecycle_manager, port, &dir)?,
    )
    .await?;
    until("the Kyma in the runtime", async || setup.runtime.skr_kyma().await).await?;
    let [agents, strangers] = [setup.runtime.id().as_str(), "stranger"].map(|name| lifecycle_manager.identity(name));
    let mut legacy = open_connection(&setup, &agents?, port).await?;
    setup.runtime.start_agent().await?;
    setup
        .kcp_status("a proven path", |status| status.condition("EventPath").is_some_and(|path| path.reason == "Proven"))
        .await?;
    let ended = "tidewatch_gateway_connections_ended_total";
    assert_eq!(sum(&setup.receiver_page().await?, ended, &["out"]), 0);

    setup.kcp_kymas().await?.delete(setup.runtime.name(), &DeleteParams::default()).await?;
    // The connection may end with or without a TLS close_notify.
    let _ = timeout(DEADLINE, legacy.read_to_end(&mut Vec::new())).await.context("v2 stays open")?;
    // The agent's connection ends as well; it reconnects, and is refused as an unknown runtime.
    setup.receiver_metric_reaches(ended, &["out"], 2).await?;
    setup.receiver_metric_reaches("tidewatch_gateway_requests_refused_total", &["unknown-runtime"], 1).await?;
    assert!(setup.runtime.kcp_kyma().await?.is_none());
    // A runtime that was never known is answered as lifecycle-manager would answer it.
    open_connection(&setup, &strangers?, port).await?;
    Ok(())
}
