//! A fake API server that keeps one Secret, and a rotation that tests of other modules step through.

use std::sync::{Arc, Mutex};

use http::{Method, StatusCode};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::Client;
use serde_json::json;

use super::{
    CA_VALIDITY, Ca, CertificateReloader, Flags, Metrics, PhaseName, Setup, TlsState,
    ca_state::{CaState, Phase, Root},
    tls_state::generate_root,
};
use crate::{
    pki::{ProxyIdentity, TlsFlags},
    testing,
};

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

/// Certificates of a receiver behind a proxy while its CA rotates.
pub(crate) struct Rotating {
    fake: Fake,
    pub(crate) tls_state: TlsState,
    reloader: CertificateReloader,
    old: Root,
    new: Root,
}

impl Rotating {
    pub(crate) async fn behind(proxy: &ProxyIdentity) -> Self {
        let (fake, flags, domain) = (Fake::default(), flags(), "kyma.local".parse().unwrap());
        let tls = TlsFlags { tls_cert: None, tls_key: None, client_ca: None, proxy_ca: None, proxy_identity: None };
        let (names, proxy) = (vec!["kcp.test".parse().unwrap()], Some(proxy));
        let setup = Setup { flags: &flags, tls: &tls, names, domain: &domain, namespace: "kcp-system", proxy };
        let (tls_state, reloader) = TlsState::open(setup, fake.client(), Metrics::default()).await.unwrap();
        let (old, new) = (fake.ca_state().target().clone(), generate_root(CA_VALIDITY, now()).unwrap());
        Self { fake, tls_state, reloader, old, new }
    }

    /// The initial root, and the one that replaces it.
    pub(crate) fn roots(&self) -> [&Ca; 2] {
        [&self.old.ca, &self.new.ca]
    }

    /// Stores a phase and returns it through the watch. The last one is [`PhaseName::Steady`], with the new root alone.
    pub(crate) fn enter(&mut self, phase: PhaseName) {
        let (root, next, leaves_end) = (self.old.clone(), self.new.clone(), now() + 86_400);
        let phase = match phase {
            PhaseName::Spread => Phase::Spread { root, next },
            PhaseName::Reissue => Phase::Reissue { root, next, leaves_end },
            PhaseName::Retire => Phase::Retire { root: next, old: root.ca.trust_bundle(), leaves_end },
            PhaseName::Steady => Phase::Steady { root: next },
        };
        let ca_state = CaState { phase, since: now(), force_after: None };
        self.fake.edit(|secret| secret.data = Some(ca_state.write()));
        self.reloader.apply_secret(self.fake.secret().as_ref(), now());
    }
}

/// The flags with their defaults.
pub(crate) fn flags() -> Flags {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }
    // `--server-ca` refers to these flags of [`TlsFlags`].
    let line = <Line as clap::CommandFactory>::command()
        .arg(clap::Arg::new("tls_cert"))
        .arg(clap::Arg::new("client_ca").long("client-ca"));
    let mut matches = line.get_matches_from(["x"]);
    <Line as clap::FromArgMatches>::from_arg_matches_mut(&mut matches).unwrap().flags
}

#[derive(Default)]
struct State {
    secret: Option<Secret>,
    version: u64,
    calls: Vec<String>,
    refuses: bool,
}

/// Handle of the fake server; clones share it.
#[derive(Clone, Default)]
pub(crate) struct Fake(Arc<Mutex<State>>);

impl Fake {
    pub(crate) fn client(&self) -> Client {
        let fake = self.clone();
        testing::client("kcp-system", move |parts, body| Some(fake.answer(&parts.method, parts.uri.path(), body)))
    }

    fn answer(&self, method: &Method, path: &str, body: &[u8]) -> (StatusCode, String) {
        let state = &mut *self.0.lock().unwrap();
        let named = path.ends_with("/secrets/tidewatch-ca");
        assert!(named || path == "/api/v1/namespaces/kcp-system/secrets", "{path}");
        state.calls.push(method.to_string());
        let failure = |code: StatusCode, reason: &str| {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason,
                "message": reason, "code": code.as_u16()});
            (code, status.to_string())
        };
        if state.refuses && method != Method::GET {
            return failure(StatusCode::FORBIDDEN, "Forbidden");
        }
        match (method, &state.secret) {
            (&Method::GET, Some(secret)) => (StatusCode::OK, serde_json::to_string(secret).unwrap()),
            (&Method::GET | &Method::PUT, None) => failure(StatusCode::NOT_FOUND, "NotFound"),
            (&Method::POST, Some(_)) => failure(StatusCode::CONFLICT, "AlreadyExists"),
            (&Method::POST, None) => (StatusCode::CREATED, state.put(serde_json::from_slice(body).unwrap())),
            (&Method::PUT, Some(known)) => {
                let secret: Secret = serde_json::from_slice(body).unwrap();
                if secret.metadata.resource_version != known.metadata.resource_version {
                    return failure(StatusCode::CONFLICT, "Conflict");
                }
                (StatusCode::OK, state.put(secret))
            }
            other => panic!("unexpected {}", other.0),
        }
    }

    pub(crate) fn secret(&self) -> Option<Secret> {
        self.0.lock().unwrap().secret.clone()
    }

    pub(crate) fn ca_state(&self) -> CaState {
        CaState::read(&self.secret().unwrap().data.unwrap()).unwrap()
    }

    /// Changes the Secret like another writer.
    pub(crate) fn edit(&self, change: impl FnOnce(&mut Secret)) {
        let state = &mut *self.0.lock().unwrap();
        let mut secret = state.secret.clone().unwrap_or_default();
        change(&mut secret);
        state.put(secret);
    }

    pub(crate) fn set(&self, key: &str, value: &[u8]) {
        self.edit(|secret| {
            secret.data.get_or_insert_default().insert(key.to_owned(), ByteString(value.to_vec()));
        });
    }

    pub(crate) fn remove(&self) -> Secret {
        self.0.lock().unwrap().secret.take().unwrap()
    }

    pub(crate) fn refuse(&self, refuses: bool) {
        self.0.lock().unwrap().refuses = refuses;
    }

    /// Drains the recorded calls.
    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().calls)
    }
}

impl State {
    fn put(&mut self, mut secret: Secret) -> String {
        self.version += 1;
        secret.metadata.resource_version = Some(self.version.to_string());
        secret.metadata.name = Some("tidewatch-ca".to_owned());
        let text = serde_json::to_string(&secret).unwrap();
        self.secret = Some(secret);
        text
    }
}
