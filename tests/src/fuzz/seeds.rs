//! Seeds of the fuzz targets: inputs that the parsers accept.

mod agent;
mod module;

use std::{sync::LazyLock, time::Duration};

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};
use tidewatch_api::identity::Epoch;
use tidewatch_contract::{
    certificate::{Leaf, to_pem},
    event::{OBJECT_CHANGED, WATCH_CHANGED},
    signature::{Headers, Message, Nonce, Signer},
};
use tidewatch_kit::tls::Identity;
use tidewatch_testing::control_plane::credentials;
use tidewatch_trust::{Ca, PemIdentity};

pub(super) use module::{COMPONENT, COMPONENT_VERSION, DESCRIPTOR_MEDIA_TYPE};

/// Time of the known signature, in Unix seconds.
pub(super) const NOW: i64 = 1_800_000_000;
/// Audience of the seeds' tokens.
pub(super) const AUDIENCE: &str = "spiffe://kyma.local/tidewatch";
/// Body that the known signature covers.
pub(super) const BODY: &[u8] = b"[]";
/// Placeholder for every credential in a seed.
pub(super) const TOKEN: &str = "sesame-0123456789";
/// Placeholder for the epoch that an agent has just drawn.
pub(super) const EPOCH: &str = "00000000000000ee";
/// Certificate and key of a runtime, and the agent's trust bundle; made once in each process, because the repository
/// holds no keys.
pub(super) struct RuntimeIdentity {
    pub(super) chain: String,
    pub(super) key: String,
    pub(super) roots: String,
}

pub(super) static IDENTITY: LazyLock<RuntimeIdentity> = LazyLock::new(|| {
    let year = Duration::from_secs(365 * 24 * 60 * 60);
    let ca = Ca::generate("fuzz", NOW, year).expect("a CA can be made");
    let runtime = "r-1".parse().expect("an id");
    let domain = "kyma.local".parse().expect("a domain");
    let PemIdentity { chain, key } = ca.make_runtime(&runtime, &domain, NOW, year).expect("a certificate can be made");
    RuntimeIdentity { chain, key, roots: ca.trust_bundle().to_pem() }
});

/// Signed header fields, and the certificate of the signer.
pub(super) struct Signed {
    pub(super) leaf: Leaf,
    pub(super) headers: Headers,
}

fn pair() -> (CertificateDer<'static>, KeyPair) {
    let key = KeyPair::generate().expect("a key can be made");
    let certificate = CertificateParams::default().self_signed(&key).expect("a certificate can be made");
    (certificate.der().clone(), key)
}

/// Signs with the seeds' key.
pub(super) fn signed() -> Signed {
    let Identity { chain, key } =
        Identity::from_pem(IDENTITY.chain.as_bytes(), IDENTITY.key.as_bytes()).expect("these are a pair");
    let leaf = Leaf::read(&chain[0]).expect("this is a certificate");
    let signer = Signer::new(&key, leaf.fingerprint.clone()).expect("the key is P-256");
    let message =
        Message { method: "POST", authority: "kcp.test", path: "/v3/events", content_type: "application/json" };
    let nonce = Nonce { epoch: Epoch::new(1), counter: 7 };
    let headers = signer.sign(&message, BODY, nonce, NOW).expect("a signature can be made");
    Signed { leaf, headers }
}

/// The certificate in Envoy's forwarding format.
pub(super) fn xfcc(certificate: &CertificateDer<'_>) -> String {
    let encoded: String = to_pem(certificate)
        .bytes()
        .map(|byte| if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect();
    format!("Hash=00;Cert=\"{encoded}\";Subject=\"CN=a\\\",b\";URI=spiffe://kyma.local/runtime/r-1")
}

/// Valid inputs of a target; none for an unknown name.
///
/// # Panics
/// When no key can be made.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    let texts = match target {
        "signature" => {
            let Headers { content_digest, signature_input, signature } = signed().headers;
            vec![format!("{content_digest}\n{signature_input}\n{signature}")]
        }
        "client_cert" => {
            use base64::{Engine as _, engine::general_purpose::STANDARD};
            vec![format!(":{}:", STANDARD.encode(pair().0)), ":AA==:".to_owned()]
        }
        "xfcc" | "v2_forwarded" => {
            let certificate = pair().0;
            vec![xfcc(&certificate), tidewatch_contract::v2::forwarded_header(&certificate)]
        }
        "events" => vec![batch().to_string()],
        "heartbeat" => vec![heartbeat().to_string()],
        "v2_event" => vec![
            r#"{"watched":{"Namespace":"kyma-system","Name":"default"},"watchedGvk":{"group":"g","version":"v1","kind":"Kyma"}}"#.to_owned(),
            r#"{"Watched":{"name":"<&>\u2028"},"watchedGVK":null}"#.to_owned(),
        ],
        "plan" => vec![plan().to_string()],
        "kubeconfig" => kubeconfigs()
            .iter()
            .flat_map(|config| [config.to_string(), yaml(config)])
            .chain([several_contexts().to_string()])
            .collect(),
        "agent_kubeconfig" => kubeconfigs().iter().map(Value::to_string).collect(),
        "token" => vec![token()],
        "token_keys" => vec![token_keys()],
        "certificate_request" => vec![certificate_request()],
        "descriptor" | "layer" => return module::contents(target),
        of_an_agent => agent::texts(of_an_agent),
    };
    texts.into_iter().map(String::into_bytes).collect()
}

/// A token of the agent without a valid signature.
pub(super) fn token() -> String {
    use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
    let claims = json!({
        "aud": [AUDIENCE], "exp": NOW + 3_600, "iat": NOW, "nbf": NOW, "iss": "https://kubernetes.default.svc",
        "kubernetes.io": {"namespace": "kyma-system", "pod": {"name": "p", "uid": "u"},
                          "serviceaccount": {"name": "tidewatch-agent", "uid": "s"}},
    });
    let header = json!({"alg": "RS256", "kid": "k"});
    let [header, claims] = [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part.to_string()));
    format!("{header}.{claims}.AAAA")
}

/// One key of each kind, with the token's key id.
fn token_keys() -> String {
    use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
    let number = |bytes: usize| URL_SAFE_NO_PAD.encode(vec![0xa5; bytes]);
    json!({"keys": [
        {"use": "sig", "kty": "RSA", "kid": "k", "alg": "RS256", "n": number(256), "e": "AQAB"},
        {"use": "sig", "kty": "EC", "kid": "k", "alg": "ES256", "crv": "P-256", "x": number(32), "y": number(32)},
    ]})
    .to_string()
}

fn certificate_request() -> String {
    let key = KeyPair::generate().expect("a key can be made");
    let request = CertificateParams::default().serialize_request(&key).expect("a request can be made");
    json!({"runtime": "r-1", "request": request.pem().expect("a request is PEM")}).to_string()
}

fn batch() -> Value {
    let event = |kind: &str, sequence: u64, change: Value| {
        json!({
            "specversion": "1.0", "type": kind, "source": "/runtimes/r-1",
            "subject": "operator.kyma-project.io/v1beta2/kymas/kyma-system/default",
            "id": format!("00000000000000ab-{sequence}"), "sequence": sequence.to_string(),
            "time": "2026-01-01T00:00:00Z", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "data": {"watch": "kyma", "manager": "lifecycle-manager", "kind": "Kyma", "uid": "u", "resourceVersion": "42",
                     "generation": 3, "change": change, "delta": "0000000000000000000000000000000a"}
        })
    };
    json!([event(OBJECT_CHANGED, 1, json!("spec")), event(WATCH_CHANGED, 2, Value::Null)])
}

fn heartbeat() -> Value {
    json!({
        "epoch": "00000000000000ab", "sequence": 7, "counter": 3, "waiting": 0, "parked": 0, "planRevision": "r",
        "agentVersion": "0.1.0", "certificate": {"notAfter": "2027-01-01T00:00:00Z", "fingerprint": "00"},
        "trustRevision": "0000000000000001", "canary": {"ageSeconds": 3},
        "watches": [{"name": "kyma", "objects": 1, "digest": "0000000000000000000000000000000a", "listedSecondsAgo": 1,
                     "aliveSecondsAgo": 1, "coarse": false}, {"name": "catalog", "objects": 0, "error": "403"}]
    })
}

fn plan() -> Value {
    json!({"revision": "r", "watches": [
        {"name": "kyma", "group": "operator.kyma-project.io", "version": "v1beta2", "resource": "kymas",
         "namespace": "kyma-system", "fieldSelector": "metadata.name=default", "field": "spec",
         "manager": "lifecycle-manager", "work": ["kyma"]},
        {"name": "workloads/keda", "group": "apps", "version": "*", "resource": "deployments", "labelSelector": "a=b",
         "field": "status", "manager": "lifecycle-manager", "work": ["manifest", "installer"]}
    ], "groupWatches": [
        {"name": "watcher/kcp-system/cloud-manager", "group": "cloud-resources.kyma-project.io", "version": "*",
         "resource": "*", "field": "spec", "manager": "cloud-manager", "work": ["forward"]}
    ]})
}

/// One kubeconfig with a token and one with a certificate.
fn kubeconfigs() -> [Value; 2] {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    let (certificate, key) = pair();
    let ca = STANDARD.encode(to_pem(&certificate));
    let key = STANDARD.encode(key.serialize_pem());
    let config = |user: Value| {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": "https://runtime.test:6443", "certificate-authority-data": &ca}}],
            "users": [{"name": "u", "user": user}],
        })
    };
    [config(json!({"token": TOKEN})), config(json!({"client-certificate-data": &ca, "client-key-data": &key}))]
}

/// One whose current context selects among several clusters.
fn several_contexts() -> Value {
    let (certificate, _) = pair();
    credentials::kubeconfig("c", "https://runtime.test:6443", to_pem(&certificate).as_bytes(), TOKEN)
}

/// The same kubeconfig in YAML block style, as written by hand.
fn yaml(config: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let cluster = &config["clusters"][0]["cluster"];
    let user: String = config["users"][0]["user"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("    {key}: {}\n", text(value)))
        .collect();
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\ncontexts:\n- name: x\n  context: {{cluster: c, user: u}}\n\
         clusters:\n- name: c\n  cluster:\n    server: {}\n    certificate-authority-data: {}\nusers:\n- name: u\n  user:\n{user}",
        text(&cluster["server"]),
        text(&cluster["certificate-authority-data"]),
    )
}
