//! Enrolment at real API servers: their own tokens, their own keys, their own word on both; renewal over what was issued, and
//! revocation. The table of refusals in full is in the receiver's own tests.

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
use tidewatch_receiver::pki::PemIdentity;
use tidewatch_shared::{
    certificate::{RuntimeCertificate, trust_revision},
    enrolment::{CERTIFICATES_PATH, CertificateAnswer, CertificateRequest},
    identity::RuntimeId,
    names::{AGENT_OBJECT, ENROLMENT_URL_KEY, RUNTIME_ID_KEY, SKR_NAMESPACE, TOKEN_AUDIENCE, TRUST_BUNDLE_KEY},
    tls,
};
use tidewatch_tests::{
    bed::{self, TestBed},
    landscape::{Landscape, Runtime, until},
    speaker::Speaker,
};

use crate::support::{Tested, quick};

/// The ConfigMap of the receiver that lists who is revoked.
const REVOCATIONS: &str = "tidewatch-revocations";

/// Two runtimes without a running agent, whose part the test plays.
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
        tidewatch_tests::install_crypto();
        let bed = bed::shared().await?;
        let landscape = Arc::new(Landscape::from_nothing(bed.kcp().await?, name, quick()).await?);
        let mut this = Self { runtimes: Vec::new(), landscape, bed };
        for number in 1..=count {
            let cluster = bed.runtime(&format!("{name}-{number}")).await?;
            this.runtimes.push(this.landscape.register(cluster).await?);
        }
        Ok(this)
    }

    /// How often the enrolment port refused for a reason.
    async fn refusals(&self, reason: &str) -> Result<u64> {
        let (_, page) = self.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        let named = format!("reason=\"{reason}\"");
        let line = page
            .lines()
            .find(|line| line.starts_with("tidewatch_enrolment_requests_refused_total{") && line.contains(&named));
        Ok(line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0))
    }

    /// Replaces the list of who is revoked.
    async fn revoke(&self, keys: &[&str]) -> Result<()> {
        let maps = Api::<ConfigMap>::namespaced(self.landscape.operator(), self.landscape.namespace());
        let data: BTreeMap<_, _> = keys.iter().map(|key| (*key, "lost")).collect();
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": REVOCATIONS}, "data": data});
        maps.patch(REVOCATIONS, &PatchParams::apply("test").force(), &Patch::Apply(&map)).await?;
        Ok(())
    }
}

/// What an agent finds in its ConfigMap.
struct Settings {
    enrolment_url: String,
    runtime: RuntimeId,
    bundle: String,
}

impl Settings {
    /// Waits until the receiver has brought it.
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

    /// Asks for a certificate, for a key of its own; returns the status, the JSON, and the key.
    async fn enrol(&self, token: &str) -> Result<(u16, Value, KeyPair)> {
        self.enrol_as(&self.runtime, token).await
    }

    async fn enrol_as(&self, runtime: &RuntimeId, token: &str) -> Result<(u16, Value, KeyPair)> {
        let roots = tls::roots(&tls::certificates(self.bundle.as_bytes())?)?;
        let config = tls::client_without_identity(roots)?;
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

    /// Enrols, and speaks with what it got.
    async fn speaker(&self, landscape: &Landscape, token: &str) -> Result<(Speaker, RuntimeCertificate)> {
        let (status, answer, key) = self.enrol(token).await?;
        anyhow::ensure!(status == 200, "{answer}");
        let answer = CertificateAnswer::parse(answer.to_string().as_bytes())?;
        let leaf = tls::certificates(answer.chain.as_bytes())?.into_iter().next().context("a leaf")?;
        let certificate = RuntimeCertificate::read(&leaf, landscape.trust_domain())?;
        let identity = PemIdentity { chain: answer.chain, key: key.serialize_pem() };
        let roots = tls::roots(&tls::certificates(answer.trust_bundle.as_bytes())?)?;
        Ok((Speaker::trusting(&identity, roots, &self.runtime, &landscape.authority())?, certificate))
    }
}

/// A certificate request that names somebody else, and its key.
fn request(name: &str) -> Result<(String, KeyPair)> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    Ok((params.serialize_request(&key)?.pem()?, key))
}

/// A pod of an account; nobody runs it.
async fn pod(runtime: &Runtime, namespace: &str, account: &str, name: &str) -> Result<Pod> {
    let cluster = runtime.cluster();
    cluster.ensure_service_account(namespace, account).await?;
    let pods = Api::<Pod>::namespaced(cluster.client().await?, namespace);
    let pod = json!({"metadata": {"name": name}, "spec": {"serviceAccountName": account,
        "automountServiceAccountToken": false, "containers": [{"name": "server", "image": "none.test/none"}]}});
    Ok(pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?)
}

/// A token of a pod's account, bound to the pod or to nothing.
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
    let asked = TokenRequest { spec, ..TokenRequest::default() };
    let answer = accounts.create_token_request(&account, &PostParams::default(), &asked).await?;
    Ok(answer.status.context("a token")?.token)
}

#[tokio::test]
async fn a_runtimes_own_api_server_says_who_its_agent_is() -> Tested {
    let stage = Stage::start("enrolment", 2).await?;
    let [one, two] = &stage.runtimes[..] else { panic!("two runtimes") };
    let (settings, other) = tokio::try_join!(Settings::of(one), Settings::of(two))?;
    let agent = pod(one, SKR_NAMESPACE, AGENT_OBJECT, "agent").await?;
    let good = token(one, &agent, true, TOKEN_AUDIENCE).await?;

    let (status, answer, key) = settings.enrol(&good).await?;
    assert_eq!(status, 200, "{answer}");
    let answer = CertificateAnswer::parse(answer.to_string().as_bytes())?;
    let leaf = tls::certificates(answer.chain.as_bytes())?.remove(0);
    let certificate = RuntimeCertificate::read(&leaf, stage.landscape.trust_domain())?;
    assert_eq!((&certificate.runtime, &*certificate.leaf.public_key), (one.id(), key.public_key_raw()));
    let roots = tls::certificates(answer.trust_bundle.as_bytes())?;
    assert_eq!((answer.trust_bundle, answer.trust_revision), (settings.bundle.clone(), trust_revision(&roots)));

    let stranger = pod(one, SKR_NAMESPACE, "stranger", "stranger").await?;
    let namesake = pod(one, "default", AGENT_OBJECT, "namesake").await?;
    let gone = pod(one, SKR_NAMESPACE, AGENT_OBJECT, "gone").await?;
    let of_gone = token(one, &gone, true, TOKEN_AUDIENCE).await?;
    let pods = Api::<Pod>::namespaced(one.cluster().client().await?, SKR_NAMESPACE);
    pods.delete("gone", &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() }).await?;
    let of_two = pod(two, SKR_NAMESPACE, AGENT_OBJECT, "agent").await?;
    let of_two = token(two, &of_two, true, TOKEN_AUDIENCE).await?;
    for (what, token, status, reason) in [
        ("unbound", token(one, &agent, false, TOKEN_AUDIENCE).await?, 403, "token-unbound"),
        ("another account", token(one, &stranger, true, TOKEN_AUDIENCE).await?, 403, "token-account"),
        ("another namespace", token(one, &namesake, true, TOKEN_AUDIENCE).await?, 403, "token-account"),
        ("another audience", token(one, &agent, true, "").await?, 401, "token-audience"),
        ("another cluster", of_two.clone(), 401, "token-key"),
    ] {
        let before = stage.refusals(reason).await?;
        let (said, problem, _) = settings.enrol(&token).await?;
        assert_eq!((said, stage.refusals(reason).await?), (status, before + 1), "{what}: {problem}");
    }
    // The API server's own view of its pods may lag a moment behind.
    until("the token of a pod that is gone to be refused", async || {
        Ok((settings.enrol(&of_gone).await?.0 == 401).then_some(()))
    })
    .await?;
    assert_eq!(settings.enrol_as(two.id(), &good).await?.0, 401, "nobody asks for another's certificate");
    assert_eq!(other.enrol(&of_two).await?.0, 200);

    // The kubeconfig of another cluster: from now on that one is asked, and what was issued before holds.
    let (speaker, _) = other.speaker(&stage.landscape, &of_two).await?;
    let control_plane = one.cluster().service_account_token("kube-system", "tidewatch-control-plane").await?;
    let own = two.cluster().service_account_token("kube-system", "tidewatch-control-plane").await?;
    two.write_access(&one.cluster().kubeconfig_for_token(&control_plane)).await?;
    until("the tokens of the cluster before to be refused", async || {
        Ok((other.enrol(&of_two).await?.0 == 401).then_some(()))
    })
    .await?;
    assert_eq!(speaker.say(&speaker.event(1, 1)?).await?.status(), 202);
    two.write_access(&two.cluster().kubeconfig_for_token(&own)).await?;
    until("the tokens of the cluster to be taken again", async || {
        Ok((other.enrol(&of_two).await?.0 == 200).then_some(()))
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn what_was_issued_renews_itself_until_it_is_revoked() -> Tested {
    let stage = Stage::start("revocation", 1).await?;
    let runtime = &stage.runtimes[0];
    let settings = Settings::of(runtime).await?;
    let agent = pod(runtime, SKR_NAMESPACE, AGENT_OBJECT, "agent").await?;
    let token = token(runtime, &agent, true, TOKEN_AUDIENCE).await?;
    let (speaker, certificate) = settings.speaker(&stage.landscape, &token).await?;

    let asks = |runtime: &str| -> Result<Value> { Ok(json!({"runtime": runtime, "request": request("another")?.0})) };
    let renewal = speaker.signed(CERTIFICATES_PATH, "application/json", &asks(runtime.id().as_str())?, 1)?;
    let renewed = speaker.say(&renewal).await?;
    assert_eq!(renewed.status(), 200);
    let answer = CertificateAnswer::parse(renewed.body().to_string().as_bytes())?;
    let leaf = tls::certificates(answer.chain.as_bytes())?.remove(0);
    assert_eq!(&RuntimeCertificate::read(&leaf, stage.landscape.trust_domain())?.runtime, runtime.id());
    let impostor = speaker.signed(CERTIFICATES_PATH, "application/json", &asks("somebody-else")?, 2)?;
    assert_eq!(speaker.say(&impostor).await?.status(), 403);

    assert_eq!(speaker.say(&speaker.event(1, 3)?).await?.status(), 202);
    stage.revoke(&[&certificate.leaf.fingerprint, "-malformed-"]).await?;
    let mut counter = 10;
    let mut refused = async |speaker: &Speaker| {
        until("the revoked certificate to be refused", async || {
            counter += 1;
            let said = speaker.say(&speaker.event(counter, counter)?).await?;
            Ok((said.status() == 401 && said.body()["type"].as_str().is_some_and(|it| it.ends_with("/certificate")))
                .then_some(()))
        })
        .await
    };
    refused(&speaker).await?;
    let (again, _) = settings.speaker(&stage.landscape, &token).await?;
    assert_eq!(again.say(&again.event(500, 500)?).await?.status(), 202, "a lost certificate is replaced");

    stage.revoke(&[runtime.id().as_str()]).await?;
    refused(&again).await?;
    let (status, problem, _) = settings.enrol(&token).await?;
    assert_eq!(status, 403, "{problem}");
    stage.revoke(&[]).await?;
    until("the runtime to be served again", async || Ok((settings.enrol(&token).await?.0 == 200).then_some(())))
        .await?;
    Ok(())
}
