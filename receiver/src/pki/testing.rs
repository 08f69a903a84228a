//! A fake API server that keeps one Secret, for the tests of this room.

use std::sync::{Arc, Mutex};

use http::{Method, StatusCode};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::Client;
use serde_json::json;

use super::stored::Stored;
use crate::testing;

#[derive(Default)]
struct State {
    secret: Option<Secret>,
    version: u64,
    calls: Vec<String>,
    refuses: bool,
}

/// The server; clones are the same server.
#[derive(Clone, Default)]
pub(super) struct Fake(Arc<Mutex<State>>);

impl Fake {
    pub(super) fn client(&self) -> Client {
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

    pub(super) fn secret(&self) -> Option<Secret> {
        self.0.lock().unwrap().secret.clone()
    }

    pub(super) fn stored(&self) -> Stored {
        Stored::read(&self.secret().unwrap().data.unwrap()).unwrap()
    }

    /// As somebody else changes it.
    pub(super) fn edit(&self, change: impl FnOnce(&mut Secret)) {
        let state = &mut *self.0.lock().unwrap();
        let mut secret = state.secret.clone().unwrap_or_default();
        change(&mut secret);
        state.put(secret);
    }

    pub(super) fn set(&self, key: &str, value: &[u8]) {
        self.edit(|secret| {
            secret.data.get_or_insert_default().insert(key.to_owned(), ByteString(value.to_vec()));
        });
    }

    pub(super) fn remove(&self) -> Secret {
        self.0.lock().unwrap().secret.take().unwrap()
    }

    pub(super) fn refuse(&self, refuses: bool) {
        self.0.lock().unwrap().refuses = refuses;
    }

    /// The calls since the last time.
    pub(super) fn calls(&self) -> Vec<String> {
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
