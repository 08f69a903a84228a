//! Contract v2 at a running receiver: an agent as the incumbent's wakes its Kyma, and everybody else is refused.

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
use tidewatch_receiver::pki::{self, TrustBundle};
use tidewatch_shared::{
    identity::RuntimeId,
    names::label,
    tls::{self, Identity},
    v2::{Event, path},
};
use tidewatch_tests::{
    bed,
    landscape::{DEADLINE, Options, now, until},
    ports,
    speaker::Speaker,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    forward::{Manager, Manner},
    support::{One, module, quick},
    sync::sum,
};

/// Certificates as the incumbent has them: RSA, no URI, no extended key usage, a subject with more than a name.
struct Incumbent {
    issuer: Issuer<'static, KeyPair>,
    root: TrustBundle,
}

fn rsa() -> Result<KeyPair> {
    Ok(KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048)?)
}

impl Incumbent {
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
        Ok(Identity { chain: vec![leaf], key: key.serialize_der().into() })
    }
}

/// Posts over HTTP/1.1, as the incumbent's agent does.
async fn post(one: &One, identity: &Identity, port: u16, path: &str, body: Vec<u8>) -> Result<StatusCode> {
    let config = tls::client(identity, one.landscape.ca().trust_bundle().store()?)?;
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

/// A receiver that serves v2 on a port, to whom the incumbent's CA vouches for, and forwards to managers on loopback.
fn serving(incumbent: &Incumbent, port: u16, dir: &TempDir) -> Result<Options> {
    let ca = dir.path().join("v2-ca.crt");
    fs::write(&ca, incumbent.root.to_pem())?;
    let receiver = [
        "--v2".to_owned(),
        "--v2-address".to_owned(),
        format!("127.0.0.1:{port}"),
        "--v2-client-ca".to_owned(),
        ca.to_str().context("a path")?.to_owned(),
        "--forward-url-template".to_owned(),
        "http://127.0.0.1:{port}".to_owned(),
    ];
    Ok(Options { receiver: receiver.to_vec(), ..quick() })
}

/// Certificates of one port are worth nothing on the other, and a runtime that speaks v3 does not fall back unless it is allowed to.
async fn no_door_is_the_others(one: &One, agent: &Identity, port: u16) -> Result<()> {
    let (id, manager): (&RuntimeId, _) = (one.runtime.id(), path("lifecycle-manager"));
    let (ours, domain) = (one.landscape.ca(), one.landscape.trust_domain());
    let ours = ours.make_runtime(id, domain, now(), pki::RUNTIME_VALIDITY)?.identity()?;
    post(one, &ours, port, &manager, event()).await.err().context("v3's certificate must not count on v2")?;
    post(one, agent, one.landscape.event_port(), "/v3/events", event()).await.err().context("nor v2's on v3")?;

    let speaker = Speaker::new(one.landscape.ca(), one.landscape.ca(), domain, id, &one.landscape.authority())?;
    assert_eq!(speaker.say(&speaker.event(1, 1)?).await?.status(), 202);
    assert_eq!(post(one, agent, port, &manager, event()).await?, 403);
    let allow = json!({"metadata": {"labels": {label::ALLOW_V2: "true"}}});
    one.kcp_kymas().await?.patch(one.runtime.name(), &PatchParams::default(), &Patch::Merge(&allow)).await?;
    until(
        "v2 to be allowed again",
        async || Ok((post(one, agent, port, &manager, event()).await? == 200).then_some(())),
    )
    .await
}

#[tokio::test]
async fn the_incumbents_agents_are_served_and_nobody_gets_in_by_the_other_door() -> Result<()> {
    let (incumbent, port, dir) = (Incumbent::new()?, ports::free()?, TempDir::new()?);
    let options = serving(&incumbent, port, &dir)?;
    let one = One::with("contract-v2", &[("keda", "1.0.0", "1.1.0")], options).await?;
    until("the Kyma in the runtime", async || one.runtime.skr_kyma().await).await?;
    let agent = incumbent.identity(one.runtime.id().as_str())?;
    let manager = path("lifecycle-manager");

    one.runtime.select(&["keda"]).await?;
    assert_eq!(post(&one, &agent, port, &manager, event()).await?, 200);
    one.skr_status("the change that v2 told of", |status| module(status, "keda").is_some()).await?;
    // An event that finds its Kyma in the queue does not add it, and says so to those who look closer.
    let line = format!("event received from SKR, adding {}/contract-v2 to queue", one.landscape.namespace());
    until("the incumbent's line", async || {
        assert_eq!(post(&one, &agent, port, &manager, event()).await?, 200);
        let log = one.landscape.with_receiver(async |receiver| receiver.log_text()).await??;
        Ok(log.contains(&line).then_some(()))
    })
    .await?;

    assert_eq!(post(&one, &agent, port, &path("nobody"), event()).await?, 404);
    assert_eq!(post(&one, &agent, port, &manager, b"no event".to_vec()).await?, 400);
    assert_eq!(post(&one, &agent, port, &manager, vec![b' '; 16_385]).await?, 413);
    assert_eq!(post(&one, &incumbent.identity("")?, port, &manager, event()).await?, 400);
    let stranger = incumbent.identity("stranger")?;
    assert_eq!(post(&one, &stranger, port, &manager, event()).await?, 200, "as the incumbent answers, and drops it");
    no_door_is_the_others(&one, &agent, port).await?;

    // An event for another manager is passed on to it, with the certificate of who sent it.
    let other = Manager::start(Manner::Takes).await?;
    one.landscape.write_watcher(&other.watcher("other")).await?;
    until("the other manager to be known", async || {
        Ok((post(&one, &agent, port, &path("other"), event()).await? == 200).then_some(()))
    })
    .await?;
    let (runtime, told, _) = other.hears("default").await?;
    assert_eq!((runtime.as_str(), told.as_str()), (one.runtime.id().as_str(), "/v2/other/event"));

    let (_, page) = one.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
    let value = |name: &str| -> Option<f64> {
        let line = page.lines().find(|line| line.starts_with(name) && line.contains("server_name=\"listener\""))?;
        line.rsplit(' ').next()?.parse().ok()
    };
    assert!(value("watcher_listener_requests_total").context("requests")? >= 8.0, "{page}");
    assert_eq!(value("watcher_listener_exceeding_size_limit_requests_total"), Some(1.0));
    assert_eq!(value("watcher_listener_inflight_requests"), Some(0.0));
    Ok(())
}

/// Another process takes over, to whom no agent of ours speaks; what it says to contract v2 first.
async fn first_word_of_another_receiver(one: &One, agent: &Identity, port: u16) -> Result<StatusCode> {
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    one.landscape.start_receiver().await?;
    until("a receiver that knows its Kymas", async || {
        let said = post(one, agent, port, &path("lifecycle-manager"), event()).await;
        Ok(said.ok().filter(|status| *status != StatusCode::SERVICE_UNAVAILABLE))
    })
    .await
}

#[tokio::test]
async fn who_has_spoken_v3_does_not_fall_back_when_the_receiver_is_another_one() -> Result<()> {
    let (incumbent, port, dir) = (Incumbent::new()?, ports::free()?, TempDir::new()?);
    let one = One::with("spoken-v3", &[("keda", "1.0.0", "1.1.0")], serving(&incumbent, port, &dir)?).await?;
    let agent = incumbent.identity(one.runtime.id().as_str())?;
    let is = async |reason: &str| {
        one.kcp_status(reason, |status| status.condition("EventPath").is_some_and(|path| path.reason == reason)).await
    };
    until("the Kyma in the runtime", async || one.runtime.skr_kyma().await).await?;
    assert_eq!(post(&one, &agent, port, &path("lifecycle-manager"), event()).await?, 200);
    assert_eq!(first_word_of_another_receiver(&one, &agent, port).await?, 200, "who never spoke it is none of them");

    one.runtime.start_agent().await?;
    is("Proven").await?;
    one.runtime.with_agent(async |agent| agent.kill9()).await?;
    assert_eq!(first_word_of_another_receiver(&one, &agent, port).await?, 403);
    is("NoHeartbeat").await?;
    assert_eq!(first_word_of_another_receiver(&one, &agent, port).await?, 403);
    Ok(())
}

#[tokio::test]
async fn our_own_agent_speaks_it_too() -> Result<()> {
    const NAME: &str = "own-v2";
    let port = ports::free()?;
    // The roots of both ports are the same here, as the agent has one certificate; its path is known before the file is there.
    let ca = bed::shared().await?.kcp().await?.dir().join("landscapes").join(NAME).join("ca.crt");
    let ca = ca.to_str().context("a path")?.to_owned();
    let receiver =
        ["--v2".to_owned(), "--v2-address".to_owned(), format!("127.0.0.1:{port}"), "--v2-client-ca".to_owned(), ca];
    let agent = ["--contract", "v2"].map(str::to_owned).to_vec();
    let options = Options { receiver: receiver.to_vec(), agent, agents_port: Some(port), ..quick() };
    let one = One::with(NAME, &[("keda", "1.0.0", "1.1.0")], options).await?;
    one.runtime.start_agent().await?;
    until("the Kyma in the runtime", async || one.runtime.skr_kyma().await).await?;
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the change that v2 told of", |status| module(status, "keda").is_some()).await?;
    one.kcp_status("the path of an agent that speaks v2", |status| {
        status.condition("EventPath").is_some_and(|path| path.reason == "LegacyAgent")
    })
    .await?;
    let (_, page) = one.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
    assert!(page.contains("tidewatch_gateway_requests_accepted_total{route=\"v2\"}"), "{page}");
    assert!(!page.contains("tidewatch_gateway_requests_total{route=\"events\"}"), "{page}");
    Ok(())
}

/// A connection to the port of v2 over which one event was said, and which is kept open.
async fn open(one: &One, identity: &Identity, port: u16) -> Result<TlsStream<TcpStream>> {
    let config = tls::client(identity, one.landscape.ca().trust_bundle().store()?)?;
    let tcp = TcpStream::connect(("127.0.0.1", port)).await?;
    let mut stream = TlsConnector::from(Arc::new(config)).connect("127.0.0.1".try_into()?, tcp).await?;
    let (path, body) = (path("lifecycle-manager"), event());
    let head = format!("POST {path} HTTP/1.1\r\nhost: v2\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), &body].concat()).await?;
    let mut answer = vec![0; 12];
    stream.read_exact(&mut answer).await?;
    assert_eq!(answer, b"HTTP/1.1 200");
    Ok(stream)
}

#[tokio::test]
async fn a_kyma_that_is_gone_ends_the_connections_of_its_runtime_in_both_contracts() -> Result<()> {
    let (incumbent, port, dir) = (Incumbent::new()?, ports::free()?, TempDir::new()?);
    let one = One::with("gone-v2", &[("keda", "1.0.0", "1.1.0")], serving(&incumbent, port, &dir)?).await?;
    until("the Kyma in the runtime", async || one.runtime.skr_kyma().await).await?;
    let [agents, strangers] = [one.runtime.id().as_str(), "stranger"].map(|name| incumbent.identity(name));
    let mut legacy = open(&one, &agents?, port).await?;
    one.runtime.start_agent().await?;
    one.kcp_status("a proven path", |status| status.condition("EventPath").is_some_and(|path| path.reason == "Proven"))
        .await?;
    let ended = "tidewatch_gateway_connections_ended_total";
    assert_eq!(sum(&one.receiver_page().await?, ended, &["out"]), 0);

    one.kcp_kymas().await?.delete(one.runtime.name(), &DeleteParams::default()).await?;
    // Whether it says goodbye in TLS or not.
    let _ = timeout(DEADLINE, legacy.read_to_end(&mut Vec::new())).await.context("v2 stays open")?;
    // The agent's as well; it comes again, and is told that nobody knows it.
    one.receiver_counts(ended, &["out"], 2).await?;
    one.receiver_counts("tidewatch_gateway_requests_refused_total", &["unknown-runtime"], 1).await?;
    assert!(one.runtime.kcp_kyma().await?.is_none());
    // Whom nobody ever knew is answered as the incumbent would.
    open(&one, &strangers?, port).await?;
    Ok(())
}
