//! Issues through `CertificateRequest`s of cert-manager.io/v1: creates one, polls for the issuer's result, checks it,
//! and deletes it.
//!
//! cert-manager signs the names in a request. So the request must name exactly its runtime, and the result is checked
//! like a certificate that a runtime presents.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, SanType};
use rustls_pki_types::UnixTime;
use serde::Deserialize;
use serde_json::json;
use tidewatch_api::{
    identity::{RuntimeId, TrustDomain},
    names::label,
    replica::ReplicaName,
};
use tidewatch_contract::certificate::{Leaf, RuntimeCertificate};
use tidewatch_kit::tls;
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};

use super::{
    IssueError, PemIdentity, PkiError, SigningRequest, TrustBundle, ca::REPLICA_COMMON_NAME, proxy, replica::accepted,
};

/// Timeout from the request to the certificate.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Requests that wait for the issuer concurrently.
const MAX_CONCURRENT_REQUESTS: usize = 64;
/// A request that gets no permit within this time is refused.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay before the first poll; doubled for each further one.
const FIRST_POLL_DELAY: Duration = Duration::from_millis(50);
/// Longest delay between two polls.
const MAX_POLL_DELAY: Duration = Duration::from_secs(1);
/// A certificate may be valid for this much longer than requested.
const MAX_EXTRA_VALIDITY: Duration = Duration::from_secs(60 * 60);
/// Largest difference of the issuer's clock to the own one.
const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_secs(60);
/// Longest issuer message that is passed on, in characters.
const MAX_MESSAGE_CHARS: usize = 256;

/// A cert-manager issuer.
pub(super) struct CertManager {
    api: Api<DynamicObject>,
    resource: ApiResource,
    kind: String,
    name: String,
    permits: Semaphore,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    conditions: Vec<Condition>,
    /// Base64 of PEM, leaf first.
    certificate: Option<String>,
}

#[derive(Deserialize)]
struct Condition {
    r#type: String,
    status: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
}

impl CertManager {
    pub(super) fn new(kcp: Client, namespace: &str, kind: &str, name: &str) -> Self {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("cert-manager.io", "v1", "CertificateRequest"));
        let api = Api::namespaced_with(kcp, namespace, &resource);
        let permits = Semaphore::new(MAX_CONCURRENT_REQUESTS);
        Self { api, resource, kind: kind.to_owned(), name: name.to_owned(), permits }
    }

    /// Issues the chain for the key of a request, in PEM, checked against the roots that this receiver accepts.
    pub(super) async fn issue(
        &self,
        runtime: &RuntimeId,
        domain: &TrustDomain,
        request: &SigningRequest,
        validity: Duration,
        clients: &TrustBundle,
    ) -> Result<String, IssueError> {
        if !request.names_exactly(runtime, domain) {
            return Err(IssueError::Names);
        }
        let mut object = self.object(&request.to_pem(), &["digital signature", "client auth"], validity);
        object.labels_mut().insert(label::RUNTIME_ID.to_owned(), runtime.as_str().to_owned());
        let chain = self.result(&object).await?;
        check(&chain, runtime, domain, request, validity, clients)?;
        Ok(chain)
    }

    /// Generates a key and issues the certificate of a replica for it. The request is made here: none that an agent
    /// sent reaches this.
    pub(super) async fn issue_replica(
        &self,
        replica: &ReplicaName,
        domain: &TrustDomain,
        validity: Duration,
        clients: &TrustBundle,
    ) -> Result<PemIdentity, IssueError> {
        let (key, request) = replica_request(replica, domain).map_err(IssueError::Request)?;
        let object = self.object(&request, &["digital signature", "server auth", "client auth"], validity);
        let identity = PemIdentity { chain: self.result(&object).await?, key: key.serialize_pem() };
        let issued = identity.identity().map_err(IssueError::Chain)?;
        let leaf = issued.chain.first().ok_or(IssueError::Foreign("is missing"))?;
        let begins = Leaf::read(leaf).map_or(0, |leaf| leaf.not_before);
        accepted::check(&issued, replica, domain, clients, time_of_check(begins, UnixTime::now()))?;
        Ok(identity)
    }

    /// Submits a request and returns the issuer's chain in PEM.
    async fn result(&self, request: &DynamicObject) -> Result<String, IssueError> {
        let permit = timeout(PERMIT_TIMEOUT, self.permits.acquire()).await;
        // The semaphore is never closed.
        let _permit = permit.ok().and_then(Result::ok).ok_or(IssueError::Busy)?;
        let submitted = timeout(TIMEOUT, self.submit(request)).await;
        submitted.map_err(|_| IssueError::Timeout(TIMEOUT))?
    }

    async fn submit(&self, request: &DynamicObject) -> Result<String, IssueError> {
        let api = |error: kube::Error| IssueError::Api(Box::new(error));
        let created = self.api.create(&PostParams::default(), request).await.map_err(api)?;
        let created = CreatedRequest { api: self.api.clone(), name: created.name_any() };
        let mut pause = FIRST_POLL_DELAY;
        loop {
            sleep(pause).await;
            pause = (pause * 2).min(MAX_POLL_DELAY);
            let object = self.api.get(&created.name).await.map_err(api)?;
            if let Some(chain) = issued_chain(&object)? {
                return Ok(chain);
            }
        }
    }

    fn object(&self, request: &str, usages: &[&str], validity: Duration) -> DynamicObject {
        let mut object = DynamicObject::new("", &self.resource).data(json!({"spec": {
            "request": STANDARD.encode(request),
            "duration": format!("{}s", validity.as_secs()),
            "isCA": false,
            "usages": usages,
            "issuerRef": {"group": "cert-manager.io", "kind": self.kind, "name": self.name},
        }}));
        object.metadata.name = None;
        object.metadata.generate_name = Some("tidewatch-".to_owned());
        object.labels_mut().insert(label::MANAGED_BY.to_owned(), label::MANAGED_BY_KCP.to_owned());
        object
    }
}

/// Generates a key and the request of a replica's certificate for it, in PEM.
fn replica_request(replica: &ReplicaName, domain: &TrustDomain) -> Result<(KeyPair, String), PkiError> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(PkiError::GenerateKey)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, REPLICA_COMMON_NAME);
    params.subject_alt_names = vec![SanType::URI(replica.uri(domain).try_into().map_err(PkiError::Name)?)];
    let request = params.serialize_request(&key).and_then(|request| request.pem()).map_err(PkiError::Sign)?;
    Ok((key, request))
}

/// A created request; dropping it deletes the object, also on timeout or error.
struct CreatedRequest {
    api: Api<DynamicObject>,
    name: String,
}

impl Drop for CreatedRequest {
    fn drop(&mut self) {
        let api = self.api.clone();
        let name = std::mem::take(&mut self.name);
        // Detached. An object that stays behind is a record of a certificate, not a secret.
        tokio::spawn(async move {
            let deleted = timeout(TIMEOUT, api.delete(&name, &DeleteParams::default())).await;
            if !matches!(deleted, Ok(Ok(_))) {
                tracing::warn!(name, "A CertificateRequest could not be deleted");
            }
        });
    }
}

/// Parses the issuer's result; `None` while it is pending.
fn issued_chain(object: &DynamicObject) -> Result<Option<String>, IssueError> {
    let status = object.data.get("status").cloned().unwrap_or_default();
    let status: Status = serde_json::from_value(status).unwrap_or_default();
    let find = |kind, state| status.conditions.iter().find(|one| one.r#type == kind && one.status == state);
    let failed = find("Denied", "True").or_else(|| find("InvalidRequest", "True")).or_else(|| {
        find("Ready", "False").filter(|condition| matches!(condition.reason.as_str(), "Failed" | "Denied"))
    });
    if let Some(condition) = failed {
        let message = condition.message.chars().filter(|char| !char.is_control()).take(MAX_MESSAGE_CHARS).collect();
        return Err(IssueError::Refused(message));
    }
    if find("Ready", "True").is_none() {
        return Ok(None);
    }
    let chain =
        status.certificate.and_then(|text| STANDARD.decode(text).ok()).and_then(|pem| String::from_utf8(pem).ok());
    chain.map(Some).ok_or(IssueError::Foreign("is missing"))
}

/// Time at which a new certificate is checked: the begin of its validity if the issuer's clock is slightly ahead, since
/// cert-manager does not backdate certificates.
fn time_of_check(begins: i64, now: UnixTime) -> UnixTime {
    let begins = Duration::from_secs(begins.try_into().unwrap_or(0));
    let now = Duration::from_secs(now.as_secs());
    let is_skewed = begins > now && begins - now <= MAX_CLOCK_DIFFERENCE;
    UnixTime::since_unix_epoch(if is_skewed { begins } else { now })
}

/// Checks that the runtime could connect here with this chain.
fn check(
    chain: &str,
    runtime: &RuntimeId,
    domain: &TrustDomain,
    request: &SigningRequest,
    validity: Duration,
    clients: &TrustBundle,
) -> Result<(), IssueError> {
    let chain = tls::certificates(chain.as_bytes()).map_err(IssueError::Chain)?;
    let (leaf, rest) = chain.split_first().ok_or(IssueError::Foreign("is missing"))?;
    let read = RuntimeCertificate::read(leaf, domain)?;
    if read.runtime != *runtime {
        return Err(IssueError::Foreign("is another runtime's"));
    }
    if read.leaf.public_key != rcgen::PublicKeyData::der_bytes(&request.key) {
        return Err(IssueError::Foreign("is of another key"));
    }
    let now = time_of_check(read.leaf.not_before, UnixTime::now());
    let verifier = proxy::verifier(clients.store().map_err(IssueError::Chain)?);
    verifier
        .map_err(|_| IssueError::Foreign("cannot be checked"))?
        .verify_client_cert(leaf, rest, now)
        .map_err(|_| IssueError::Foreign("is not valid now, or does not chain to the accepted roots"))?;
    // One that is valid for far longer than requested would outlive the runtime's entitlement.
    let latest_end = now.as_secs().saturating_add((validity + MAX_EXTRA_VALIDITY).as_secs());
    if u64::try_from(read.leaf.not_after).is_ok_and(|end| end <= latest_end) {
        Ok(())
    } else {
        Err(IssueError::Foreign("is valid for longer than requested"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    use http::{Method, StatusCode};
    use parking_lot::Mutex;
    use rcgen::ExtendedKeyUsagePurpose;
    use serde_json::Value;
    use tidewatch_cluster::testing;
    use tidewatch_kit::variant::VariantName as _;

    use super::*;
    use crate::{BACKDATE, CA_VALIDITY, Ca, RUNTIME_VALIDITY};

    fn now() -> i64 {
        jiff::Timestamp::now().as_second()
    }

    fn request(name: &str, key: &KeyPair) -> SigningRequest {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        let uri = format!("spiffe://kyma.local/runtime/{name}");
        params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        SigningRequest::from_der(params.serialize_request(key).unwrap().der()).unwrap()
    }

    /// The request, the number of polls, and all calls.
    type Object = (Option<Value>, usize, Vec<String>);

    /// Fake cert-manager: returns the status of its one request on the second poll.
    #[derive(Clone)]
    struct Signer {
        status: Arc<dyn Fn(&Value) -> Value + Send + Sync>,
        object: Arc<Mutex<Object>>,
    }

    impl Signer {
        fn new(status: impl Fn(&Value) -> Value + Send + Sync + 'static) -> Self {
            Self { status: Arc::new(status), object: Arc::default() }
        }

        fn issuer(&self) -> CertManager {
            let signer = self.clone();
            let client = testing::client("kcp-system", move |parts, body| {
                let (status, answer) = signer.answer(&parts.method, parts.uri.path(), body);
                Some((status, answer.to_string()))
            });
            CertManager::new(client, "kcp-system", "ClusterIssuer", "kyma")
        }

        fn answer(&self, method: &Method, path: &str, body: &[u8]) -> (StatusCode, Value) {
            let (object, looks, calls) = &mut *self.object.lock();
            let rest = path.strip_prefix("/apis/cert-manager.io/v1/namespaces/kcp-system/certificaterequests").unwrap();
            calls.push(format!("{method}{rest}"));
            match *method {
                Method::POST => {
                    let mut created: Value = serde_json::from_slice(body).unwrap();
                    created["metadata"]["name"] = json!("tidewatch-abc");
                    *object = Some(created.clone());
                    (StatusCode::CREATED, created)
                }
                Method::GET => {
                    let mut known = object.clone().unwrap();
                    *looks += 1;
                    if *looks > 1 {
                        known["status"] = (self.status)(&known);
                    }
                    (StatusCode::OK, known)
                }
                Method::DELETE => (StatusCode::OK, object.take().unwrap()),
                _ => panic!("{method}"),
            }
        }
    }

    fn ready(chain: &str) -> Value {
        json!({"conditions": [{"type": "Approved", "status": "True"}, {"type": "Ready", "status": "True", "reason": "Issued"}],
               "certificate": STANDARD.encode(chain)})
    }

    async fn submit(signer: &Signer, csr: &SigningRequest, clients: &TrustBundle) -> Result<String, IssueError> {
        let runtime = "r-1".parse().unwrap();
        let domain = "kyma.local".parse().unwrap();
        signer.issuer().issue(&runtime, &domain, csr, RUNTIME_VALIDITY, clients).await
    }

    #[tokio::test(start_paused = true)]
    async fn request_is_created_polled_checked_and_deleted() {
        let ca = Arc::new(Ca::generate("cert-manager", now(), CA_VALIDITY).unwrap());
        let key = KeyPair::generate().unwrap();
        let csr = request("r-1", &key);
        let clients = ca.trust_bundle();
        let signer = Signer::new(move |object| {
            let spec = &object["spec"];
            assert_eq!(spec["issuerRef"], json!({"group": "cert-manager.io", "kind": "ClusterIssuer", "name": "kyma"}));
            assert_eq!((&spec["duration"], &spec["isCA"]), (&json!("86400s"), &json!(false)));
            let pem = STANDARD.decode(spec["request"].as_str().unwrap()).unwrap();
            let request = SigningRequest::from_pem(&pem).unwrap();
            let runtime = "r-1".parse().unwrap();
            let domain = "kyma.local".parse().unwrap();
            ready(&ca.issue_runtime(&runtime, &domain, &request.key, now(), RUNTIME_VALIDITY).unwrap())
        });
        let chain = submit(&signer, &csr, &clients).await.unwrap();
        assert!(chain.starts_with("-----BEGIN CERTIFICATE-----"));
        while signer.object.lock().0.is_some() {
            tokio::task::yield_now().await;
        }
        let calls = std::mem::take(&mut signer.object.lock().2);
        assert_eq!(calls, ["POST", "GET/tidewatch-abc", "GET/tidewatch-abc", "DELETE/tidewatch-abc"]);
    }

    #[tokio::test(start_paused = true)]
    async fn certificate_that_does_not_match_the_request_is_rejected() {
        let ca = Arc::new(Ca::generate("cert-manager", now(), CA_VALIDITY).unwrap());
        let [key, other] = [(); 2].map(|()| KeyPair::generate().unwrap());
        let csr = request("r-1", &key);
        let clients = ca.trust_bundle();
        let domain: TrustDomain = "kyma.local".parse().unwrap();
        let issue = |ca: &Ca, name: &str, key: &KeyPair, at: i64| {
            ca.issue_runtime(&name.parse().unwrap(), &domain, key, at, RUNTIME_VALIDITY).unwrap()
        };
        let strange = Ca::generate("strange", now(), CA_VALIDITY).unwrap();
        let future = now() + 3_600 + BACKDATE.as_secs().cast_signed();
        let past = Ca::generate("cert-manager", now() - 200_000, CA_VALIDITY).unwrap();
        let long = RUNTIME_VALIDITY * 2;
        let long = ca.issue_runtime(&"r-1".parse().unwrap(), &domain, &csr.key, now(), long).unwrap();
        let server = ca.make_server(&["r-1".try_into().unwrap()], now(), RUNTIME_VALIDITY).unwrap();
        for (chain, clients) in [
            (issue(&ca, "r-2", &key, now()), clients.clone()),
            (issue(&ca, "r-1", &other, now()), clients.clone()),
            (issue(&strange, "r-1", &key, now()), clients.clone()),
            (issue(&past, "r-1", &key, now() - 100_000), past.trust_bundle()),
            (issue(&ca, "r-1", &key, future), clients.clone()),
            (long, clients.clone()),
            (server.chain, clients.clone()),
            (ca.certificate_pem().to_owned(), clients.clone()),
            (String::new(), clients.clone()),
            ("garbage".to_owned(), clients.clone()),
        ] {
            let signer = Signer::new(move |_| ready(&chain));
            let refused = submit(&signer, &csr, &clients).await.unwrap_err();
            assert_eq!(refused.as_str(), "foreign", "{refused:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn certificate_of_an_issuer_whose_clock_is_slightly_ahead_is_accepted() {
        let ca = Arc::new(Ca::generate("cert-manager", now(), CA_VALIDITY).unwrap());
        let (key, domain): (_, TrustDomain) = (KeyPair::generate().unwrap(), "kyma.local".parse().unwrap());
        let begin = now() + 30 + BACKDATE.as_secs().cast_signed();
        let chain = ca.issue_runtime(&"r-1".parse().unwrap(), &domain, &key, begin, RUNTIME_VALIDITY).unwrap();
        let signer = Signer::new(move |_| ready(&chain));
        assert!(submit(&signer, &request("r-1", &key), &ca.trust_bundle()).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn replica_requests_its_own_uri_and_rejects_any_other_certificate() {
        let ca = Arc::new(Ca::generate("cert-manager", now(), CA_VALIDITY).unwrap());
        let clients = ca.trust_bundle();
        let (name, domain): (ReplicaName, TrustDomain) = ("a".parse().unwrap(), "kyma.local".parse().unwrap());
        let requested = Arc::<Mutex<Option<Value>>>::default();
        for (usages, uri, outcome) in [
            (vec![ServerAuth, ClientAuth], "spiffe://kyma.local/replica/a", Ok(())),
            (vec![ClientAuth], "spiffe://kyma.local/replica/a", Err("foreign")),
            (vec![ServerAuth, ClientAuth], "spiffe://kyma.local/replica/b", Err("foreign")),
            (vec![ServerAuth, ClientAuth], "spiffe://kyma.local/runtime/a", Err("foreign")),
        ] {
            let issuer = ca.clone();
            let seen = requested.clone();
            let signer = Signer::new(move |object| {
                *seen.lock() = Some(object["spec"].clone());
                let pem = STANDARD.decode(object["spec"]["request"].as_str().unwrap()).unwrap();
                let key = SigningRequest::from_pem(&pem).unwrap().key;
                ready(&issuer.sign(&key, uri, &usages))
            });
            let issued = signer.issuer().issue_replica(&name, &domain, RUNTIME_VALIDITY, &clients).await;
            assert_eq!(issued.map(drop).map_err(|error| error.as_str()), outcome, "{uri}");
        }
        let spec = requested.lock().take().unwrap();
        assert_eq!(spec["usages"], json!(["digital signature", "server auth", "client auth"]));
        let pem = String::from_utf8(STANDARD.decode(spec["request"].as_str().unwrap()).unwrap()).unwrap();
        let request = rcgen::CertificateSigningRequestParams::from_pem(&pem).unwrap().params;
        assert_eq!(request.subject_alt_names, [SanType::URI("spiffe://kyma.local/replica/a".try_into().unwrap())]);
    }

    #[tokio::test(start_paused = true)]
    async fn refusing_and_silent_issuers_end_in_time() {
        let clients = Ca::generate("cert-manager", now(), CA_VALIDITY).unwrap().trust_bundle();
        let key = KeyPair::generate().unwrap();
        let responding = |kind: &'static str, status: &'static str, reason: &'static str| {
            Signer::new(
                move |_| json!({"conditions": [{"type": kind, "status": status, "reason": reason, "message": "no\u{7}"}]}),
            )
        };
        for signer in [
            responding("Denied", "True", "policy"),
            responding("InvalidRequest", "True", "x"),
            responding("Ready", "False", "Failed"),
            responding("Ready", "False", "Denied"),
        ] {
            let refused = submit(&signer, &request("r-1", &key), &clients).await.unwrap_err();
            assert!(matches!(&refused, IssueError::Refused(words) if words == "no"), "{refused:?}");
        }
        let silent = responding("Ready", "False", "Pending");
        assert!(matches!(submit(&silent, &request("r-1", &key), &clients).await, Err(IssueError::Timeout(_))));
        while silent.object.lock().0.is_some() {
            tokio::task::yield_now().await;
        }
        let unused = Signer::new(|_| panic!("the issuer must not be called"));
        assert!(matches!(submit(&unused, &request("r-2", &key), &clients).await, Err(IssueError::Names)));
        assert!(unused.object.lock().2.is_empty());
    }
}
