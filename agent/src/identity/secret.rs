//! The agent's own Secret, in which key and chain survive a restart of the agent. The installer creates it empty; only
//! the agent writes its content.

use std::sync::Arc;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::json;
use tidewatch_api::names::{CHAIN_KEY, IDENTITY_SECRET, PRIVATE_KEY_KEY};
use tokio::sync::watch;

use crate::{
    kubernetes::{ApiClient, ApiError},
    telemetry::error_chain,
    watch::{Named, Single, SingleObject, Target},
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
        Self { client, path: collection(namespace).patch(IDENTITY_SECRET) }
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

/// Consumer of the Secret: publishes its content.
pub(crate) struct SecretWatch {
    namespace: String,
    publish: watch::Sender<Stored>,
}

/// The part of the Secret's data that is deserialized.
#[derive(Default, Deserialize)]
pub(crate) struct SecretData {
    #[serde(rename = "tls.crt")]
    chain: Option<String>,
    #[serde(rename = "tls.key")]
    key: Option<String>,
}

impl SecretWatch {
    /// Creates the sink and the channel on which it publishes the content.
    pub(crate) fn new(namespace: String) -> (Single<Self>, watch::Receiver<Stored>) {
        let (publish, stored) = watch::channel(Stored::Unknown);
        (Single::new(Self { namespace, publish }), stored)
    }
}

impl SingleObject for SecretWatch {
    type Data = SecretData;
    const NAME: &str = IDENTITY_SECRET;

    fn collection(&self) -> Target {
        collection(&self.namespace)
    }

    fn present(&mut self, secret: Named<SecretData>) {
        let SecretData { chain, key } = secret.data.unwrap_or_default();
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

    fn missing(&mut self) {
        self.publish.send_replace(Stored::Missing);
    }

    fn failed(&mut self, error: &ApiError) {
        // The last known content stays in effect.
        tracing::warn!(error = error_chain(error), "Failed to read the agent's Secret");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Sink as _;

    fn secret(name: &str, version: &str, data: serde_json::Value) -> Named<SecretData> {
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
