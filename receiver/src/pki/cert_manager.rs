//! Issuing through `CertificateRequest`s of cert-manager.io/v1: one is made, answered by the issuer, checked, and deleted.
//!
//! cert-manager signs what a request says. So the request must say exactly who asks, and what comes back is believed only as far as
//! this receiver would believe it from a runtime.

use std::{sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::UnixTime;
use serde::Deserialize;
use serde_json::json;
use tidewatch_shared::{
    certificate::RuntimeCertificate,
    identity::{RuntimeId, TrustDomain},
    names::label,
    tls,
};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};

use super::{Issue, Request, TrustBundle};

/// From the request to the certificate.
const DEADLINE: Duration = Duration::from_secs(10);
/// Requests that wait for the issuer at the same time.
const AT_ONCE: usize = 64;
/// A request that finds no place within this time is refused.
const PLACE_DEADLINE: Duration = Duration::from_secs(2);
/// First pause between two looks; each next one is twice as long.
const FIRST_LOOK: Duration = Duration::from_millis(50);
/// Longest pause between two looks.
const LONGEST_LOOK: Duration = Duration::from_secs(1);
/// A certificate may hold so much longer than was asked for.
const SLACK: Duration = Duration::from_secs(60 * 60);
/// Characters of an issuer's words that are passed on.
const MAX_WORDS: usize = 256;

/// An issuer of cert-manager.
pub(super) struct CertManager {
    api: Api<DynamicObject>,
    resource: ApiResource,
    kind: String,
    name: String,
    places: Arc<Semaphore>,
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
        let kind_of_request = GroupVersionKind::gvk("cert-manager.io", "v1", "CertificateRequest");
        let resource = ApiResource::from_gvk(&kind_of_request);
        let api = Api::namespaced_with(kcp, namespace, &resource);
        let places = Arc::new(Semaphore::new(AT_ONCE));
        Self { api, resource, kind: kind.to_owned(), name: name.to_owned(), places }
    }

    /// The chain for the key of a request, in PEM, checked against the roots that this receiver accepts.
    pub(super) async fn issue(
        &self,
        runtime: &RuntimeId,
        domain: &TrustDomain,
        request: &Request,
        validity: Duration,
        clients: &TrustBundle,
    ) -> Result<String, Issue> {
        if !request.names_exactly(runtime, domain) {
            return Err(Issue::Names);
        }
        let place = timeout(PLACE_DEADLINE, self.places.acquire()).await;
        // Nobody closes the semaphore.
        let _place = place.ok().and_then(Result::ok).ok_or(Issue::Busy)?;
        let chain =
            timeout(DEADLINE, self.ask(runtime, request, validity)).await.map_err(|_| Issue::Late(DEADLINE))??;
        check(&chain, runtime, domain, request, clients)?;
        check_end(&chain, validity)?;
        Ok(chain)
    }

    async fn ask(&self, runtime: &RuntimeId, request: &Request, validity: Duration) -> Result<String, Issue> {
        let api = |error: kube::Error| Issue::Api(Box::new(error));
        let wanted = self.object(runtime, request, validity);
        let made = self.api.create(&PostParams::default(), &wanted).await.map_err(api)?;
        let made = Made { api: self.api.clone(), name: made.name_any() };
        let mut pause = FIRST_LOOK;
        loop {
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_LOOK);
            let object = self.api.get(&made.name).await.map_err(api)?;
            if let Some(chain) = answer(&object)? {
                return Ok(chain);
            }
        }
    }

    fn object(&self, runtime: &RuntimeId, request: &Request, validity: Duration) -> DynamicObject {
        let mut object = DynamicObject::new("", &self.resource).data(json!({"spec": {
            "request": STANDARD.encode(request.to_pem()),
            "duration": format!("{}s", validity.as_secs()),
            "isCA": false,
            "usages": ["digital signature", "client auth"],
            "issuerRef": {"group": "cert-manager.io", "kind": self.kind, "name": self.name},
        }}));
        object.metadata.name = None;
        object.metadata.generate_name = Some("tidewatch-".to_owned());
        object.labels_mut().extend([
            (label::MANAGED_BY.to_owned(), label::MANAGED_BY_KCP.to_owned()),
            (label::RUNTIME_ID.to_owned(), runtime.as_str().to_owned()),
        ]);
        object
    }
}

/// A request that was made: deleted when it is of no more use, however that came.
struct Made {
    api: Api<DynamicObject>,
    name: String,
}

impl Drop for Made {
    fn drop(&mut self) {
        let (api, name) = (self.api.clone(), std::mem::take(&mut self.name));
        // Nobody waits for it; what stays behind is a record of a certificate, and no secret.
        tokio::spawn(async move {
            let deleted = timeout(DEADLINE, api.delete(&name, &DeleteParams::default())).await;
            if !matches!(deleted, Ok(Ok(_))) {
                tracing::warn!(name, "A CertificateRequest could not be deleted");
            }
        });
    }
}

/// What the issuer has said by now.
fn answer(object: &DynamicObject) -> Result<Option<String>, Issue> {
    let status = object.data.get("status").cloned().unwrap_or_default();
    let status: Status = serde_json::from_value(status).unwrap_or_default();
    let is = |condition: &&Condition, kind: &str, state: &str| condition.r#type == kind && condition.status == state;
    let find = |kind, state| status.conditions.iter().find(|condition| is(condition, kind, state));
    let failed = find("Denied", "True").or_else(|| find("InvalidRequest", "True")).or_else(|| {
        find("Ready", "False").filter(|condition| matches!(condition.reason.as_str(), "Failed" | "Denied"))
    });
    if let Some(condition) = failed {
        let words = condition.message.chars().filter(|char| !char.is_control()).take(MAX_WORDS).collect();
        return Err(Issue::Refused(words));
    }
    if find("Ready", "True").is_none() {
        return Ok(None);
    }
    let chain =
        status.certificate.and_then(|text| STANDARD.decode(text).ok()).and_then(|pem| String::from_utf8(pem).ok());
    chain.map(Some).ok_or(Issue::Foreign("is missing"))
}

/// Whether a chain is one with which that runtime could connect here.
fn check(
    chain: &str,
    runtime: &RuntimeId,
    domain: &TrustDomain,
    request: &Request,
    clients: &TrustBundle,
) -> Result<(), Issue> {
    let chain = tls::certificates(chain.as_bytes()).map_err(Issue::Chain)?;
    let (leaf, rest) = chain.split_first().ok_or(Issue::Foreign("is missing"))?;
    let read = RuntimeCertificate::read(leaf, domain)?;
    if read.runtime != *runtime {
        return Err(Issue::Foreign("is another runtime's"));
    }
    if read.leaf.public_key != rcgen::PublicKeyData::der_bytes(request.key()) {
        return Err(Issue::Foreign("is of another key"));
    }
    let roots = clients.store().map_err(Issue::Chain)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), tls::provider());
    let verifier = verifier.build().map_err(|_| Issue::Foreign("cannot be checked"))?;
    verifier
        .verify_client_cert(leaf, rest, UnixTime::now())
        .map_err(|_| Issue::Foreign("does not hold now, or does not chain to the roots that are accepted"))?;
    Ok(())
}

/// What holds far longer than was asked for would outlive what it stands for.
fn check_end(chain: &str, validity: Duration) -> Result<(), Issue> {
    let latest = UnixTime::now().as_secs().saturating_add((validity + SLACK).as_secs());
    let end = super::sources::end_of(chain).and_then(|end| u64::try_from(end).ok());
    if end.is_some_and(|end| end <= latest) { Ok(()) } else { Err(Issue::Foreign("holds longer than was asked for")) }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use http::{Method, StatusCode};
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
    use serde_json::Value;

    use super::*;
    use crate::{
        pki::{CA_VALIDITY, Ca, RUNTIME_VALIDITY},
        testing,
    };

    fn now() -> i64 {
        jiff::Timestamp::now().as_second()
    }

    fn request(name: &str, key: &KeyPair) -> Request {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        let uri = format!("spiffe://kyma.local/runtime/{name}");
        params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        Request::from_der(params.serialize_request(key).unwrap().der()).unwrap()
    }

    /// The request, how often it was looked at, and all calls.
    type Object = (Option<Value>, usize, Vec<String>);

    /// Plays cert-manager: what it says of the one request that it is given, on the second look.
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
            let (object, looks, calls) = &mut *self.object.lock().unwrap_or_else(PoisonError::into_inner);
            let rest = path.strip_prefix("/apis/cert-manager.io/v1/namespaces/kcp-system/certificaterequests").unwrap();
            calls.push(format!("{method}{rest}"));
            match *method {
                Method::POST => {
                    let mut made: Value = serde_json::from_slice(body).unwrap();
                    made["metadata"]["name"] = json!("tidewatch-abc");
                    *object = Some(made.clone());
                    (StatusCode::CREATED, made)
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

    async fn ask(signer: &Signer, asked: &Request, clients: &TrustBundle) -> Result<String, Issue> {
        let (runtime, domain) = ("r-1".parse().unwrap(), "kyma.local".parse().unwrap());
        signer.issuer().issue(&runtime, &domain, asked, RUNTIME_VALIDITY, clients).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_is_made_answered_checked_and_deleted() {
        let ca = Arc::new(Ca::generate("cert-manager", now(), CA_VALIDITY).unwrap());
        let key = KeyPair::generate().unwrap();
        let (asked, clients) = (request("r-1", &key), ca.trust_bundle());
        let signer = Signer::new(move |object| {
            let spec = &object["spec"];
            assert_eq!(spec["issuerRef"], json!({"group": "cert-manager.io", "kind": "ClusterIssuer", "name": "kyma"}));
            assert_eq!((&spec["duration"], &spec["isCA"]), (&json!("86400s"), &json!(false)));
            let pem = STANDARD.decode(spec["request"].as_str().unwrap()).unwrap();
            let request = Request::from_pem(&pem).unwrap();
            let (runtime, domain) = ("r-1".parse().unwrap(), "kyma.local".parse().unwrap());
            ready(&ca.issue_runtime(&runtime, &domain, &request, now(), RUNTIME_VALIDITY).unwrap())
        });
        let chain = ask(&signer, &asked, &clients).await.unwrap();
        assert!(chain.starts_with("-----BEGIN CERTIFICATE-----"));
        while signer.object.lock().unwrap().0.is_some() {
            tokio::task::yield_now().await;
        }
        let calls = std::mem::take(&mut signer.object.lock().unwrap().2);
        assert_eq!(calls, ["POST", "GET/tidewatch-abc", "GET/tidewatch-abc", "DELETE/tidewatch-abc"]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_that_runtimes_certificate_is_not_handed_out() {
        let ca = Arc::new(Ca::generate("cert-manager", now(), CA_VALIDITY).unwrap());
        let [key, other] = [(); 2].map(|()| KeyPair::generate().unwrap());
        let (asked, clients) = (request("r-1", &key), ca.trust_bundle());
        let domain: TrustDomain = "kyma.local".parse().unwrap();
        let issue = |ca: &Ca, name: &str, key: &KeyPair, at: i64| {
            ca.issue_runtime(&name.parse().unwrap(), &domain, &request(name, key), at, RUNTIME_VALIDITY).unwrap()
        };
        let strange = Ca::generate("strange", now(), CA_VALIDITY).unwrap();
        let past = Ca::generate("cert-manager", now() - 200_000, CA_VALIDITY).unwrap();
        let long = RUNTIME_VALIDITY * 2;
        let long = ca.issue_runtime(&"r-1".parse().unwrap(), &domain, &asked, now(), long).unwrap();
        let server = ca.make_server(&["r-1".parse().unwrap()], now(), RUNTIME_VALIDITY).unwrap();
        for (chain, clients) in [
            (issue(&ca, "r-2", &key, now()), clients.clone()),
            (issue(&ca, "r-1", &other, now()), clients.clone()),
            (issue(&strange, "r-1", &key, now()), clients.clone()),
            (issue(&past, "r-1", &key, now() - 100_000), past.trust_bundle()),
            (long, clients.clone()),
            (server.chain, clients.clone()),
            (ca.certificate_pem().to_owned(), clients.clone()),
            (String::new(), clients.clone()),
            ("garbage".to_owned(), clients.clone()),
        ] {
            let signer = Signer::new(move |_| ready(&chain));
            let refused = ask(&signer, &asked, &clients).await.unwrap_err();
            assert_eq!(refused.as_str(), "foreign", "{refused:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_and_silence_of_the_issuer_end_in_time() {
        let clients = Ca::generate("cert-manager", now(), CA_VALIDITY).unwrap().trust_bundle();
        let key = KeyPair::generate().unwrap();
        let says = |kind: &'static str, status: &'static str, reason: &'static str| {
            Signer::new(
                move |_| json!({"conditions": [{"type": kind, "status": status, "reason": reason, "message": "no\u{7}"}]}),
            )
        };
        for signer in [
            says("Denied", "True", "policy"),
            says("InvalidRequest", "True", "x"),
            says("Ready", "False", "Failed"),
            says("Ready", "False", "Denied"),
        ] {
            let refused = ask(&signer, &request("r-1", &key), &clients).await.unwrap_err();
            assert!(matches!(&refused, Issue::Refused(words) if words == "no"), "{refused:?}");
        }
        let silent = says("Ready", "False", "Pending");
        assert!(matches!(ask(&silent, &request("r-1", &key), &clients).await, Err(Issue::Late(_))));
        while silent.object.lock().unwrap().0.is_some() {
            tokio::task::yield_now().await;
        }
        let never = Signer::new(|_| panic!("it must not be asked"));
        assert!(matches!(ask(&never, &request("r-2", &key), &clients).await, Err(Issue::Names)));
        assert!(never.object.lock().unwrap().2.is_empty());
    }
}
