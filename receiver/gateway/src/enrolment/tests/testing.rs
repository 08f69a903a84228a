//! Fixtures for the tests of enrolment and of its port: token issuers, runtimes that respond, and a certificate issuer.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use aws_lc_rs::{
    encoding::{AsDer, PublicKeyX509Der},
    rand::SystemRandom,
    rsa::KeySize,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _, RSA_PKCS1_SHA256, RsaKeyPair},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use http::StatusCode;
use kube::Client;
use parking_lot::Mutex;
use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};
use tidewatch_api::{identity::TrustDomain, key::KymaKey, plan::Plan};
use tidewatch_cluster::{
    body_missing::BodyMissingError,
    runtime_access::{ClientError, RuntimeAccessError},
    testing,
};
use tidewatch_contract::{
    certificate::{Leaf, RuntimeCertificate},
    enrolment::CertificateRequest,
};
use tidewatch_fleet::table::{self, RuntimeTable};
use tidewatch_kit::{metrics::Registry, variant::VariantName as _};
use tidewatch_trust::{CA_VALIDITY, Ca, RUNTIME_VALIDITY, testing::fixed_authority};
use x509_parser::{prelude::FromDer, public_key::PublicKey, x509::SubjectPublicKeyInfo};

use crate::enrolment::{EnrolmentService, Flags, IssuanceKind, Metrics, Revocations, keys};

pub(crate) const NOW: i64 = 1_800_000_000;
/// Audience of the agents' tokens in [`domain`].
pub(crate) const AUDIENCE: &str = "spiffe://kyma.local/tidewatch";

pub(crate) fn unix_now() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    i64::try_from(now.as_secs()).unwrap()
}

pub(crate) fn domain() -> TrustDomain {
    "kyma.local".parse().unwrap()
}

/// Claims of the agent's token, as Kubernetes writes them.
pub(crate) fn claims(now: i64) -> Value {
    json!({
        "aud": [AUDIENCE], "exp": now + 3_600, "iat": now, "nbf": now, "iss": "https://kubernetes.default.svc",
        "jti": "j", "sub": "system:serviceaccount:kyma-system:tidewatch-agent",
        "kubernetes.io": {
            "namespace": "kyma-system", "node": {"name": "n", "uid": "node-uid"},
            "pod": {"name": "p", "uid": "pod-uid"}, "serviceaccount": {"name": "tidewatch-agent", "uid": "s"},
        },
    })
}

/// Signs the tokens of a cluster.
pub(crate) struct Issuer {
    pub(crate) kid: String,
    key: Key,
}

enum Key {
    Rsa(Box<RsaKeyPair>),
    P256(EcdsaKeyPair),
}

impl Issuer {
    pub(crate) fn rsa(kid: &str) -> Self {
        Self { kid: kid.to_owned(), key: Key::Rsa(Box::new(RsaKeyPair::generate(KeySize::Rsa2048).unwrap())) }
    }

    pub(crate) fn p256(kid: &str) -> Self {
        let key = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
        Self { kid: kid.to_owned(), key: Key::P256(key) }
    }

    pub(crate) fn sign(&self, claims: &Value) -> String {
        let algorithm = if let Key::Rsa(_) = self.key { "RS256" } else { "ES256" };
        self.sign_as(&json!({"alg": algorithm, "kid": self.kid}), claims)
    }

    pub(crate) fn sign_as(&self, header: &Value, claims: &Value) -> String {
        let [header, claims] = [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part.to_string()));
        let signed = format!("{header}.{claims}");
        let random = SystemRandom::new();
        let signature = match &self.key {
            Key::Rsa(key) => {
                let mut signature = vec![0; key.public_modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &random, signed.as_bytes(), &mut signature).unwrap();
                signature
            }
            Key::P256(key) => key.sign(&random, signed.as_bytes()).unwrap().as_ref().to_vec(),
        };
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    pub(crate) fn jwk(&self) -> Value {
        let text = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        match &self.key {
            Key::Rsa(key) => {
                let der: PublicKeyX509Der<'_> = key.public_key().as_der().unwrap();
                let (_, info) = SubjectPublicKeyInfo::from_der(der.as_ref()).unwrap();
                let Ok(PublicKey::RSA(key)) = info.parsed() else { panic!("an RSA key") };
                let n = text(key.modulus);
                let e = text(key.exponent);
                json!({"kty": "RSA", "use": "sig", "alg": "RS256", "kid": self.kid, "n": n, "e": e})
            }
            Key::P256(key) => {
                let (x, y) = key.public_key().as_ref()[1..].split_at(32);
                let x = text(x);
                let y = text(y);
                json!({"kty": "EC", "use": "sig", "alg": "ES256", "kid": self.kid, "crv": "P-256", "x": x, "y": y})
            }
        }
    }

    pub(crate) fn set(issuers: &[Self]) -> Value {
        json!({"keys": issuers.iter().map(Self::jwk).collect::<Vec<_>>()})
    }
}

/// Behavior of a runtime's API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behavior {
    Well,
    /// Responds to everything with an error of this status.
    Failing(u16),
    /// Never responds.
    Hung,
}

/// Fake API server of a runtime for keys and token reviews. Clones share it.
#[derive(Clone)]
pub(crate) struct FakeRuntime(Arc<Mutex<State>>);

struct State {
    issuer: Arc<Issuer>,
    behavior: Behavior,
    review: Value,
    /// Numbers of key fetches and of token reviews.
    call_counts: (usize, usize),
    on_review: Option<Box<dyn FnOnce() + Send>>,
}

impl FakeRuntime {
    pub(crate) fn new(issuer: Issuer) -> Self {
        let review = json!({"authenticated": true, "audiences": [AUDIENCE], "user": {
            "username": "system:serviceaccount:kyma-system:tidewatch-agent",
            "extra": {"authentication.kubernetes.io/pod-uid": ["pod-uid"]}}});
        let issuer = Arc::new(issuer);
        let behavior = Behavior::Well;
        Self(Arc::new(Mutex::new(State { issuer, behavior, review, call_counts: (0, 0), on_review: None })))
    }

    /// A currently valid token of its agent.
    pub(crate) fn token(&self) -> String {
        self.issuer().sign(&claims(unix_now()))
    }

    pub(crate) fn issuer(&self) -> Arc<Issuer> {
        self.0.lock().issuer.clone()
    }

    pub(crate) fn replace_issuer(&self, issuer: Issuer) {
        self.0.lock().issuer = Arc::new(issuer);
    }

    pub(crate) fn set_behavior(&self, behavior: Behavior) {
        self.0.lock().behavior = behavior;
    }

    /// Sets the status of further token reviews.
    pub(crate) fn set_review(&self, review: Value) {
        self.0.lock().review = review;
    }

    /// Runs `act` once, on the next token review.
    pub(crate) fn on_review(&self, act: impl FnOnce() + Send + 'static) {
        self.0.lock().on_review = Some(Box::new(act));
    }

    pub(crate) fn call_counts(&self) -> (usize, usize) {
        self.0.lock().call_counts
    }

    pub(crate) fn client(&self) -> Client {
        let this = self.clone();
        testing::client("default", move |parts, body| {
            let (status, answer) = this.answer(parts.uri.path(), body);
            Some((StatusCode::from_u16(status).ok()?, answer.to_string()))
        })
    }

    /// Returns status and body; status 0 means no response.
    fn answer(&self, path: &str, body: &[u8]) -> (u16, Value) {
        let mut state = self.0.lock();
        let is_review = path == "/apis/authentication.k8s.io/v1/tokenreviews";
        if is_review {
            state.call_counts.1 += 1;
            let spec = &serde_json::from_slice::<Value>(body).unwrap()["spec"];
            assert_eq!(spec["audiences"], json!([AUDIENCE]));
            assert!(spec["token"].as_str().is_some_and(|token| token.contains('.')));
        } else {
            assert_eq!(path, keys::PATH);
            state.call_counts.0 += 1;
        }
        let answer = match state.behavior {
            Behavior::Well if is_review => (201, json!({"spec": {}, "status": state.review})),
            Behavior::Well => (200, json!({"keys": [state.issuer.jwk()]})),
            Behavior::Failing(status) => {
                (status, json!({"kind": "Status", "code": status, "message": "no", "reason": "No"}))
            }
            Behavior::Hung => (0, Value::Null),
        };
        let act = if is_review { state.on_review.take() } else { None };
        drop(state);
        if let Some(act) = act {
            act();
        }
        answer
    }
}

/// Client and kubeconfig revision of each Kyma's runtime.
#[derive(Clone, Default)]
pub(crate) struct FakeRuntimeClients(Arc<Mutex<HashMap<KymaKey, FoundClient>>>);

type FoundClient = Result<(Client, u64), ClientError>;

impl FakeRuntimeClients {
    pub(crate) fn set(&self, kyma: &str, runtime: &FakeRuntime, revision: u64) {
        self.0.lock().insert(key(kyma), Ok((runtime.client(), revision)));
    }

    /// The body of the access Secret is not in the cache.
    pub(crate) fn reduce(&self, kyma: &str) {
        let missing = BodyMissingError { kind: "access Secret", key: key(kyma).to_string() };
        self.0.lock().insert(key(kyma), Err(missing.into()));
    }

    fn client(&self, kyma: &KymaKey) -> FoundClient {
        self.0.lock().get(kyma).cloned().unwrap_or_else(|| Err(RuntimeAccessError::Missing.into()))
    }
}

pub(crate) fn key(kyma: &str) -> KymaKey {
    KymaKey::new("kcp-system", kyma)
}

/// Assigns a runtime to a Kyma.
pub(crate) fn place(fleet: &RuntimeTable, kyma: &str, runtime: &str) {
    let plan = Plan::parse(r#"{"revision": "1", "watches": []}"#).unwrap();
    fleet.place(key(kyma), "", Some(runtime.parse().unwrap()), Arc::new(plan));
}

/// An enrolment service with its environment: two Kymas, `k-1` with the runtime `r-1` and `k-2` with `r-2`.
pub(crate) struct Fixture {
    pub(crate) enrolments: EnrolmentService,
    pub(crate) fleet: RuntimeTable,
    pub(crate) runtime_clients: FakeRuntimeClients,
    pub(crate) revocations: Revocations,
    pub(crate) registry: Registry,
    pub(crate) first: FakeRuntime,
    pub(crate) second: FakeRuntime,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::limited(None)
    }

    pub(crate) fn limited(by_address: Option<u32>) -> Self {
        let counts = table::Metrics::register(&mut Registry::default());
        let fleet = RuntimeTable::alone(1, table::Settings::default(), counts);
        let mut registry = Registry::default();
        let runtime_clients = FakeRuntimeClients::default();
        let metrics = Metrics::register(&mut registry);
        let [first, second] = ["a", "b"].map(|kid| FakeRuntime::new(Issuer::p256(kid)));
        for (kyma, runtime, id) in [("k-1", &first, "r-1"), ("k-2", &second, "r-2")] {
            place(&fleet, kyma, id);
            runtime_clients.set(kyma, runtime, 1);
        }
        fleet.set_synced();
        let ca = Ca::generate("test root", unix_now(), CA_VALIDITY).unwrap();
        let authority = fixed_authority(ca, domain(), RUNTIME_VALIDITY);
        let revocations = Revocations::new(metrics.clone(), Duration::ZERO);
        let clients = runtime_clients.clone();
        let clients = Box::new(move |kyma: &KymaKey| clients.client(kyma));
        let flags = Flags {
            enrolment_address: "127.0.0.1:0".parse().unwrap(),
            enrolment_max_connections: 64,
            enrolment_limit_by_address: by_address.map(|most| most.try_into().unwrap()),
        };
        let enrolments =
            EnrolmentService::new(&flags, &domain(), authority, fleet.clone(), revocations.clone(), clients, metrics);
        Self { enrolments, fleet, runtime_clients, revocations, registry, first, second }
    }

    /// Number of certificates issued, from the metrics.
    pub(in crate::enrolment) fn count_issued(&self, by: IssuanceKind) -> u64 {
        let series = format!("enrolment_certificates_issued_total{{by=\"{}\"}} ", by.as_str());
        let page = self.registry.encode().unwrap();
        page.lines().find_map(|line| line.strip_prefix(&*series)).map_or(0, |count| count.parse().unwrap())
    }
}

/// A certificate of a runtime with this fingerprint.
pub(crate) fn certificate(runtime: &str, fingerprint: &str) -> RuntimeCertificate {
    let leaf = Leaf {
        der: vec![0].into(),
        fingerprint: fingerprint.to_owned(),
        public_key: Vec::new(),
        not_after: i64::MAX,
        not_before: 0,
        authority: None,
    };
    RuntimeCertificate { runtime: runtime.parse().unwrap(), leaf }
}

/// A certificate request for a key, in PEM.
pub(crate) fn request_for(key: &KeyPair, change: impl FnOnce(&mut CertificateParams)) -> String {
    let mut params = CertificateParams::default();
    change(&mut params);
    params.serialize_request(key).unwrap().pem().unwrap()
}

/// A valid request of an agent.
pub(crate) fn honest_request(runtime: &str) -> CertificateRequest {
    let key = KeyPair::generate().unwrap();
    CertificateRequest { runtime: runtime.parse().unwrap(), request: request_for(&key, |_| {}) }
}

/// Longer than any timeout.
pub(crate) const LONG: Duration = Duration::from_secs(120);
