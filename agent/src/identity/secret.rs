//! The agent's own Secret: key and chain survive the agent there. The installer creates it, empty; nobody else writes it.

use std::sync::Arc;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::json;
use tidewatch_shared::names::{CHAIN_KEY, IDENTITY_SECRET, PRIVATE_KEY_KEY};
use tokio::sync::watch;

use crate::{
    kubernetes::{Call, Lane},
    telemetry::chain,
    watch::{NamedMetadata, Sink, Target, Versioned},
};

/// What the Secret is known to have.
#[derive(Clone, Default)]
pub(crate) enum Stored {
    /// It has not been read yet, or could not be.
    #[default]
    Unknown,
    /// It is not there.
    Missing,
    /// This, whatever it is worth.
    There(Arc<Content>),
}

/// See [`Stored::There`].
#[derive(PartialEq, Eq)]
pub(crate) struct Content {
    /// `metadata.resourceVersion`.
    pub(crate) version: String,
    /// PEM, leaf first; empty when there is none.
    pub(crate) chain: Vec<u8>,
    /// PEM, PKCS#8; empty when there is none.
    pub(crate) key: Vec<u8>,
}

/// Writes the Secret.
pub(crate) struct Vault {
    lane: Lane,
    path: String,
}

impl Vault {
    /// The Secret of a namespace.
    pub(crate) fn new(lane: Lane, namespace: &str) -> Self {
        let path = format!("{}/{IDENTITY_SECRET}?fieldManager=tidewatch-agent", collection(namespace).path());
        Self { lane, path }
    }

    /// Puts chain and key, in PEM, in the place of what the Secret had in a version; 409 when it has something else by now.
    pub(super) async fn keep(&self, version: &str, chain: &[u8], key: &[u8]) -> Result<(), Call> {
        let data = json!({CHAIN_KEY: STANDARD.encode(chain), PRIVATE_KEY_KEY: STANDARD.encode(key)});
        let patch = json!({"metadata": {"resourceVersion": version}, "data": data});
        self.lane.merge_patch(&self.path, patch.to_string().into_bytes()).await.map(drop)
    }
}

fn collection(namespace: &str) -> Target {
    Target::collection("", "v1", Some(namespace), "secrets")
}

/// The watch of the Secret.
pub(crate) struct SecretWatch {
    namespace: String,
    publish: watch::Sender<Stored>,
    /// The list that is being read has it.
    listed: bool,
}

/// The Secret, as far as it is read.
#[derive(Deserialize)]
pub(crate) struct Secret {
    metadata: NamedMetadata,
    #[serde(default)]
    data: Option<Data>,
}

#[derive(Default, Deserialize)]
struct Data {
    #[serde(rename = "tls.crt")]
    chain: Option<String>,
    #[serde(rename = "tls.key")]
    key: Option<String>,
}

impl Versioned for Secret {
    fn version(&self) -> &str {
        &self.metadata.version
    }
}

impl SecretWatch {
    /// What it reads is published.
    pub(crate) fn new(namespace: String) -> (Self, watch::Receiver<Stored>) {
        let (publish, stored) = watch::channel(Stored::Unknown);
        (Self { namespace, publish, listed: false }, stored)
    }

    fn read(&self, secret: Secret) {
        if secret.metadata.name != IDENTITY_SECRET {
            return;
        }
        let Data { chain, key } = secret.data.unwrap_or_default();
        // What is no base64 is worth as much as nothing.
        let decode = |text: Option<String>| STANDARD.decode(text.unwrap_or_default()).unwrap_or_default();
        let content = Content { version: secret.metadata.version, chain: decode(chain), key: decode(key) };
        self.publish.send_if_modified(|stored| {
            let same = matches!(stored, Stored::There(known) if **known == content);
            if !same {
                *stored = Stored::There(Arc::new(content));
            }
            !same
        });
    }
}

impl Sink for SecretWatch {
    type Item = Secret;

    async fn target(&mut self, _lane: &Lane) -> Result<Target, Call> {
        Ok(collection(&self.namespace).select("", &format!("metadata.name={IDENTITY_SECRET}")).whole())
    }

    fn begin(&mut self) {
        self.listed = false;
    }

    fn page(&mut self, items: Vec<Secret>) -> bool {
        for secret in items {
            self.listed |= secret.metadata.name == IDENTITY_SECRET;
            self.read(secret);
        }
        true
    }

    fn complete(&mut self, _version: &str) {
        if !self.listed {
            self.publish.send_replace(Stored::Missing);
        }
    }

    fn present(&mut self, item: Secret) {
        self.read(item);
    }

    fn gone(&mut self, item: Secret) {
        if item.metadata.name == IDENTITY_SECRET {
            self.publish.send_replace(Stored::Missing);
        }
    }

    fn bookmark(&mut self, _version: &str) {}

    fn failed(&mut self, why: &Call) {
        // What was read before is still the best that is known.
        tracing::warn!(error = chain(why), "The agent's Secret cannot be read");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str, version: &str, data: serde_json::Value) -> Secret {
        let metadata = json!({"name": name, "resourceVersion": version});
        serde_json::from_value(json!({"metadata": metadata, "data": data})).unwrap()
    }

    #[test]
    fn what_the_secret_has_is_told_whenever_it_is_something_else() {
        let (mut watch, mut stored) = SecretWatch::new("ns".to_owned());
        watch.failed(&Call::Deadline);
        assert!(!stored.has_changed().unwrap(), "the next list may tell");
        watch.begin();
        watch.page(vec![secret("other", "1", json!({CHAIN_KEY: "YQ=="}))]);
        watch.complete("1");
        assert!(matches!(*stored.borrow_and_update(), Stored::Missing));

        let full =
            || secret(IDENTITY_SECRET, "3", json!({CHAIN_KEY: "YQ==", PRIVATE_KEY_KEY: "Yg==", "other": "YQ=="}));
        for (item, expected) in [
            (secret(IDENTITY_SECRET, "2", json!(null)), (&b""[..], &b""[..])),
            (full(), (b"a", b"b")),
            (secret(IDENTITY_SECRET, "4", json!({CHAIN_KEY: "no base64"})), (b"", b"")),
        ] {
            watch.present(item);
            let Stored::There(content) = stored.borrow_and_update().clone() else { panic!("it is there") };
            assert_eq!((&*content.chain, &*content.key), expected);
        }
        watch.present(full());
        watch.failed(&Call::Deadline);
        stored.borrow_and_update();
        watch.page(vec![full()]);
        assert!(!stored.has_changed().unwrap());
        watch.gone(full());
        assert!(matches!(*stored.borrow_and_update(), Stored::Missing));
    }
}
