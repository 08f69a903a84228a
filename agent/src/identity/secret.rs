//! The agent's own Secret, in which key and chain survive a restart of the agent. The installer creates it empty; only
//! the agent writes its content.

use std::sync::Arc;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::json;
use tidewatch_shared::names::{CHAIN_KEY, IDENTITY_SECRET, PRIVATE_KEY_KEY};
use tokio::sync::watch;

use crate::{
    kubernetes::{ApiClient, ApiError},
    telemetry::error_chain,
    watch::{NamedMetadata, Sink, Target, Versioned},
};

/// Known content of the Secret.
#[derive(Clone, Default)]
pub(crate) enum Stored {
    /// Not read yet, or not readable.
    #[default]
    Unknown,
    /// The Secret does not exist.
    Missing,
    /// The Secret exists; its content may be invalid.
    Present(Arc<Content>),
}

/// Content of the Secret.
#[derive(PartialEq, Eq)]
pub(crate) struct Content {
    /// `metadata.resourceVersion`.
    pub(crate) version: String,
    /// Certificate chain in PEM, leaf first; empty if absent.
    pub(crate) chain: Vec<u8>,
    /// Private key in PEM, PKCS#8; empty if absent.
    pub(crate) key: Vec<u8>,
}

/// Writes the Secret.
pub(crate) struct SecretWriter {
    client: ApiClient,
    path: String,
}

impl SecretWriter {
    /// Creates a writer for the Secret in a namespace.
    pub(crate) fn new(client: ApiClient, namespace: &str) -> Self {
        let path = format!("{}/{IDENTITY_SECRET}?fieldManager=tidewatch-agent", collection(namespace).path());
        Self { client, path }
    }

    /// Replaces chain and key, in PEM, if the Secret still has the given resourceVersion; else the API server answers
    /// 409.
    pub(super) async fn write(&self, version: &str, chain: &[u8], key: &[u8]) -> Result<(), ApiError> {
        let data = json!({CHAIN_KEY: STANDARD.encode(chain), PRIVATE_KEY_KEY: STANDARD.encode(key)});
        let patch = json!({"metadata": {"resourceVersion": version}, "data": data});
        self.client.merge_patch(&self.path, patch.to_string().into_bytes()).await.map(drop)
    }
}

fn collection(namespace: &str) -> Target {
    Target::collection("", "v1", Some(namespace), "secrets")
}

/// Sink of the watch of the Secret.
pub(crate) struct SecretWatch {
    namespace: String,
    publish: watch::Sender<Stored>,
    /// The list in progress contains the Secret.
    listed: bool,
}

/// The part of the Secret that is deserialized.
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
    /// Creates the sink and the channel on which it publishes the content.
    pub(crate) fn new(namespace: String) -> (Self, watch::Receiver<Stored>) {
        let (publish, stored) = watch::channel(Stored::Unknown);
        (Self { namespace, publish, listed: false }, stored)
    }

    fn read(&self, secret: Secret) {
        if secret.metadata.name != IDENTITY_SECRET {
            return;
        }
        let Data { chain, key } = secret.data.unwrap_or_default();
        // Invalid base64 counts as absent.
        let decode = |text: Option<String>| STANDARD.decode(text.unwrap_or_default()).unwrap_or_default();
        let content = Content { version: secret.metadata.version, chain: decode(chain), key: decode(key) };
        self.publish.send_if_modified(|stored| {
            let same = matches!(stored, Stored::Present(known) if **known == content);
            if !same {
                *stored = Stored::Present(Arc::new(content));
            }
            !same
        });
    }
}

impl Sink for SecretWatch {
    type Item = Secret;

    async fn target(&mut self, _client: &ApiClient) -> Result<Target, ApiError> {
        Ok(collection(&self.namespace).select("", &format!("metadata.name={IDENTITY_SECRET}")).full_objects())
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

    fn failed(&mut self, error: &ApiError) {
        // The last known content stays in effect.
        tracing::warn!(error = error_chain(error), "Failed to read the agent's Secret");
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
    fn changed_content_of_the_secret_is_published() {
        let (mut watch, mut stored) = SecretWatch::new("ns".to_owned());
        watch.failed(&ApiError::Deadline);
        assert!(!stored.has_changed().unwrap(), "a failure does not change the known content");
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
            let Stored::Present(content) = stored.borrow_and_update().clone() else { panic!("the Secret exists") };
            assert_eq!((&*content.chain, &*content.key), expected);
        }
        watch.present(full());
        watch.failed(&ApiError::Deadline);
        stored.borrow_and_update();
        watch.page(vec![full()]);
        assert!(!stored.has_changed().unwrap());
        watch.gone(full());
        assert!(matches!(*stored.borrow_and_update(), Stored::Missing));
    }
}
