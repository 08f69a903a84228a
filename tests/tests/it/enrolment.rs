//! Enrolment against real API servers, with their own tokens, signing keys and TokenReviews; renewal with an issued
//! certificate, and revocation. The receiver's unit tests cover all refusals.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::{ConfigMap, Pod, ServiceAccount},
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use rcgen::{CertificateParams, DnType, KeyPair};
use serde_json::{Value, json};
use tidewatch_api::{
    identity::{RuntimeId, TrustDomain},
    names::{AGENT_OBJECT, ENROLMENT_URL_KEY, RUNTIME_ID_KEY, SKR_NAMESPACE, TRUST_BUNDLE_KEY},
};
use tidewatch_contract::{
    certificate::{RuntimeCertificate, trust_revision},
    enrolment::{CERTIFICATES_PATH, CertificateRequest, CertificateResponse},
};
use tidewatch_kit::tls;
use tidewatch_testing::{
    bed::{self, TestBed},
    contract_client::ContractClient,
    landscape::{Landscape, Runtime, until},
};
use tidewatch_trust::PemIdentity;

use crate::support::{TestResult, quick_options};

/// The receiver's ConfigMap of revoked certificates and runtimes.
const REVOCATIONS: &str = "tidewatch-revocations";

/// Runtimes without an agent process; the test acts as their agents.
struct Stage {
    runtimes: Vec<Runtime>,
    landscape: Arc<Landscape>,
    bed: &'static TestBed,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.runtimes.iter().for_each(|runtime| self.bed.stop(runtime.name()));
    }
}

impl Stage {
    async fn start(name: &str, count: usize) -> Result<Self> {
        tidewatch_testing::install_crypto();
        let bed = bed::shared().await?;
        let landscape = Arc::new(Landscape::start_issuing(bed.kcp().await?, name, quick_options()).await?);
        let mut this = Self { runtimes: Vec::new(), landscape, bed };
        for number in 1..=count {
            let cluster = bed.runtime(&format!("{name}-{number}")).await?;
            this.runtimes.push(this.landscape.register(cluster).await?);
        }
        Ok(this)
    }

    /// Number of refusals by the enrolment port for a reason.
    async fn refusals(&self, reason: &str) -> Result<u64> {
        let (_, page) = self.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        let named = format!("reason=\"{reason}\"");
        let line = page
            .lines()
            .find(|line| line.starts_with("tidewatch_enrolment_requests_refused_total{") && line.contains(&named));
        Ok(line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0))
    }

    /// Replaces the list of revoked certificates and runtimes.
    async fn revoke(&self, keys: &[&str]) -> Result<()> {
        let maps = Api::<ConfigMap>::namespaced(self.landscape.operator(), self.landscape.namespace());
        let data: BTreeMap<_, _> = keys.iter().map(|key| (*key, "lost")).collect();
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": REVOCATIONS}, "data": data});
        maps.patch(REVOCATIONS, &PatchParams::apply("test").force(), &Patch::Apply(&map)).await?;
        Ok(())
    }
}

/// The settings in the ConfigMap of an agent.
struct Settings {
    enrolment_url: String,
    runtime: RuntimeId,
    bundle: String,
}

impl Settings {
    /// Waits until the receiver has written the ConfigMap.
    async fn of(runtime: &Runtime) -> Result<Self> {
        let maps = Api::<ConfigMap>::namespaced(runtime.cluster().client().await?, SKR_NAMESPACE);
        let data = until("the agent's ConfigMap", async || {
            let data = maps.get_opt(AGENT_OBJECT).await?.and_then(|map| map.data);
            Ok(data.filter(|data| data.contains_key(TRUST_BUNDLE_KEY)))
        })
        .await?;
        let value = |key: &str| data.get(key).cloned().with_context(|| key.to_owned());
        Ok(Self {
            enrolment_url: value(ENROLMENT_URL_KEY)?,
            runtime: value(RUNTIME_ID_KEY)?.parse()?,
            bundle: value(TRUST_BUNDLE_KEY)?,
        })
    }

    /// Requests a certificate for a new key; returns the status, the JSON of the response, and the key.
    async fn enrol(&self, token: &str) -> Result<(u16, Value, KeyPair)> {
        self.enrol_as(&self.runtime, token).await
    }

    async fn enrol_as(&self, runtime: &RuntimeId, token: &str) -> Result<(u16, Value, KeyPair)> {
        let roots = tls::roots(&tls::certificates(self.bundle.as_bytes())?)?;
        let config = tls::client(None, roots)?;
        let connector =
            hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(config).https_only().enable_http2().build();
        let client: Client<hyper_rustls::HttpsConnector<HttpConnector>, Full<Bytes>> =
            Client::builder(TokioExecutor::new()).http2_only(true).build(connector);
        let (request, key) = request("another")?;
        let body = CertificateRequest { runtime: runtime.clone(), request }.to_json()?;
        let request = Request::post(format!("{}{CERTIFICATES_PATH}", self.enrolment_url))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::AUTHORIZATION, format!("Bearer {token}"))
            .body(Full::from(body))?;
        let (parts, body) = client.request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok((parts.status.as_u16(), serde_json::from_slice(&body)?, key))
    }

    /// Enrols, and returns a client that uses the issued certificate.
    async fn contract_client(
        &self,
        landscape: &Landscape,
        token: &str,
    ) -> Result<(ContractClient, RuntimeCertificate)> {
        let (status, answer, key) = self.enrol(token).await?;
        anyhow::ensure!(status == 200, "{answer}");
        let answer = CertificateResponse::parse(answer.to_string().as_bytes())?;
        let leaf = tls::certificates(answer.chain.as_bytes())?.into_iter().next().context("a leaf")?;
        let certificate = RuntimeCertificate::read(&leaf, landscape.trust_domain())?;
        let identity = PemIdentity { chain: answer.chain, key: key.serialize_pem() };
        let roots = tls::roots(&tls::certificates(answer.trust_bundle.as_bytes())?)?;
        Ok((ContractClient::trusting(&identity, roots, &self.runtime, &landscape.authority())?, certificate))
    }
}

/// A certificate request with a foreign subject, and its key.
fn request(name: &str) -> Result<(String, KeyPair)> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    Ok((params.serialize_request(&key)?.pem()?, key))
}

/// Creates a pod of an account, without a kubelet to run it.
async fn pod(runtime: &Runtime, namespace: &str, account: &str, name: &str) -> Result<Pod> {
    let cluster = runtime.cluster();
    cluster.ensure_service_account(namespace, account).await?;
    let pods = Api::<Pod>::namespaced(cluster.client().await?, namespace);
    let pod = json!({"metadata": {"name": name}, "spec": {"serviceAccountName": account,
        "automountServiceAccountToken": false, "containers": [{"name": "server", "image": "none.test/none"}]}});
    Ok(pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?)
}

/// Requests a token for a pod's account, bound to the pod or unbound.
async fn token(runtime: &Runtime, pod: &Pod, is_bound: bool, audience: &str) -> Result<String> {
    let namespace = pod.namespace().context("a namespace")?;
    let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone()).context("an account")?;
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(pod.name_any()),
        uid: pod.uid(),
    };
    let spec = TokenRequestSpec {
        audiences: if audience.is_empty() { Vec::new() } else { vec![audience.to_owned()] },
        bound_object_ref: is_bound.then_some(bound),
        expiration_seconds: Some(3_600),
    };
    let accounts = Api::<ServiceAccount>::namespaced(runtime.cluster().client().await?, &namespace);
    let request = TokenRequest { spec, ..TokenRequest::default() };
    let answer = accounts.create_token_request(&account, &PostParams::default(), &request).await?;
    Ok(answer.status.context("a token")?.token)
}

#[tokio::test]
async fn an_agent_is_authenticated_by_its_own_api_server() -> TestResult {
    let stage = Stage::start("enrolment", 2).await?;
    let [first, second] = &stage.runtimes[..] else { panic!("two runtimes") };
    let (settings, other) = tokio::try_join!(Settings::of(first), Settings::of(second))?;
    let agent = pod(first, SKR_NAMESPACE, AGENT_OBJECT, "agent").await?;
    let audience = stage.landscape.trust_domain().token_audience();
    let good = token(first, &agent, true, &audience).await?;

    let (status, answer, key) = settings.enrol(&good).await?;
    assert_eq!(status, 200, "{answer}");
    let answer = CertificateResponse::parse(answer.to_string().as_bytes())?;
    let leaf = tls::certificates(answer.chain.as_bytes())?.remove(0);
    let certificate = RuntimeCertificate::read(&leaf, stage.landscape.trust_domain())?;
    assert_eq!((&certificate.runtime, &*certificate.leaf.public_key), (first.id(), key.public_key_raw()));
    let roots = tls::certificates(answer.trust_bundle.as_bytes())?;
    assert_eq!((answer.trust_bundle, answer.trust_revision), (settings.bundle.clone(), trust_revision(&roots)));

    let stranger = pod(first, SKR_NAMESPACE, "stranger", "stranger").await?;
    let namesake = pod(first, "default", AGENT_OBJECT, "namesake").await?;
    let deleted = pod(first, SKR_NAMESPACE, AGENT_OBJECT, "gone").await?;
    let token_of_deleted = token(first, &deleted, true, &audience).await?;
    let pods = Api::<Pod>::namespaced(first.cluster().client().await?, SKR_NAMESPACE);
    pods.delete("gone", &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() }).await?;
    let token_of_second = pod(second, SKR_NAMESPACE, AGENT_OBJECT, "agent").await?;
    let token_of_second = token(second, &token_of_second, true, &audience).await?;
    let another = "another.example".parse::<TrustDomain>()?.token_audience();
    for (case, token, status, reason) in [
        ("unbound", token(first, &agent, false, &audience).await?, 403, "token-unbound"),
        ("another account", token(first, &stranger, true, &audience).await?, 403, "token-account"),
        ("another namespace", token(first, &namesake, true, &audience).await?, 403, "token-account"),
        ("another audience", token(first, &agent, true, "").await?, 401, "token-audience"),
        ("another trust domain", token(first, &agent, true, &another).await?, 401, "token-audience"),
        ("another cluster", token_of_second.clone(), 401, "token-recent-key"),
    ] {
        let before = stage.refusals(reason).await?;
        let (status_code, problem, _) = settings.enrol(&token).await?;
        assert_eq!((status_code, stage.refusals(reason).await?), (status, before + 1), "{case}: {problem}");
    }
    // The API server may notice the deletion of the pod with a delay.
    until("the token of a deleted pod to be refused", async || {
        Ok((settings.enrol(&token_of_deleted).await?.0 == 401).then_some(()))
    })
    .await?;
    assert_eq!(settings.enrol_as(second.id(), &good).await?.0, 401, "a token counts for its own runtime only");
    assert_eq!(other.enrol(&token_of_second).await?.0, 200);

    // With the kubeconfig of another cluster the receiver reviews tokens there; certificates issued before stay valid.
    let (contract_client, _) = other.contract_client(&stage.landscape, &token_of_second).await?;
    let control_plane = first.cluster().service_account_token("kube-system", "tidewatch-control-plane").await?;
    let own = second.cluster().service_account_token("kube-system", "tidewatch-control-plane").await?;
    second.write_access(&first.cluster().kubeconfig_for_token(&control_plane)).await?;
    until("tokens of the former cluster to be refused", async || {
        Ok((other.enrol(&token_of_second).await?.0 == 401).then_some(()))
    })
    .await?;
    assert_eq!(contract_client.send(&contract_client.event(1, 1)?).await?.status(), 202);
    second.write_access(&second.cluster().kubeconfig_for_token(&own)).await?;
    until("tokens of the cluster to be accepted again", async || {
        Ok((other.enrol(&token_of_second).await?.0 == 200).then_some(()))
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn a_certificate_is_renewed_until_it_is_revoked() -> TestResult {
    let stage = Stage::start("revocation", 1).await?;
    let runtime = &stage.runtimes[0];
    let settings = Settings::of(runtime).await?;
    let agent = pod(runtime, SKR_NAMESPACE, AGENT_OBJECT, "agent").await?;
    let audience = stage.landscape.trust_domain().token_audience();
    let token = token(runtime, &agent, true, &audience).await?;
    let (contract_client, certificate) = settings.contract_client(&stage.landscape, &token).await?;

    let renewal = |runtime: &str, counter: u64| -> Result<_> {
        let body = json!({"runtime": runtime, "request": request("another")?.0, "token": token});
        contract_client.sign(CERTIFICATES_PATH, "application/json", &body, counter)
    };
    let renewed = contract_client.send(&renewal(runtime.id().as_str(), 1)?).await?;
    assert_eq!(renewed.status(), 200);
    let answer = CertificateResponse::parse(renewed.body().to_string().as_bytes())?;
    let leaf = tls::certificates(answer.chain.as_bytes())?.remove(0);
    assert_eq!(&RuntimeCertificate::read(&leaf, stage.landscape.trust_domain())?.runtime, runtime.id());
    assert_eq!(contract_client.send(&renewal("another-runtime", 2)?).await?.status(), 403);
    let alone = json!({"runtime": runtime.id().as_str(), "request": request("another")?.0});
    let alone = contract_client.sign(CERTIFICATES_PATH, "application/json", &alone, 3)?;
    assert_ne!(contract_client.send(&alone).await?.status(), 200, "a certificate alone does not renew itself");

    assert_eq!(contract_client.send(&contract_client.event(1, 4)?).await?.status(), 202);
    stage.revoke(&[&certificate.leaf.fingerprint, "-malformed-"]).await?;
    let mut counter = 10;
    let mut refused = async |contract_client: &ContractClient| {
        until("the revoked certificate to be refused", async || {
            counter += 1;
            let response = contract_client.send(&contract_client.event(counter, counter)?).await?;
            Ok((response.status() == 401
                && response.body()["type"].as_str().is_some_and(|it| it.ends_with("/certificate")))
            .then_some(()))
        })
        .await
    };
    refused(&contract_client).await?;
    let (again, _) = settings.contract_client(&stage.landscape, &token).await?;
    assert_eq!(again.send(&again.event(500, 500)?).await?.status(), 202, "a lost certificate is replaced");

    stage.revoke(&[runtime.id().as_str()]).await?;
    refused(&again).await?;
    let (status, problem, _) = settings.enrol(&token).await?;
    assert_eq!(status, 403, "{problem}");
    stage.revoke(&[]).await?;
    until("the runtime to be served again", async || Ok((settings.enrol(&token).await?.0 == 200).then_some(())))
        .await?;
    Ok(())
}
