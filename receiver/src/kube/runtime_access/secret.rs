//! Access Secrets as their cache keeps them: identity, owner and the parsed kubeconfig. The text of the Secret is dropped
//! on arrival, so that the credentials of a runtime are held once.

use std::{borrow::Cow, fmt, sync::Arc};

use aws_lc_rs::digest::{self, SHA256};
use k8s_openapi::{api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::core::{NamespaceResourceScope, Resource};
use serde::Deserialize;
use tidewatch_shared::names::label;

use super::kubeconfig::{self, KubeconfigError, RuntimeKubeconfig};
use crate::base::key::KymaKey;

/// The parts of an access Secret that its readers need. Clones share the kubeconfig.
#[derive(Clone, Deserialize)]
#[serde(from = "Secret")]
pub struct AccessSecret {
    /// Name and namespace, until [`AccessSecret::drop_version`] also uid and resourceVersion.
    metadata: ObjectMeta,
    /// Name of the Kyma, by the label.
    kyma: Option<Box<str>>,
    /// SHA-256 of the kubeconfig's text.
    digest: Option<[u8; 32]>,
    kubeconfig: Result<Arc<RuntimeKubeconfig>, KubeconfigError>,
}

impl From<Secret> for AccessSecret {
    fn from(secret: Secret) -> Self {
        let ObjectMeta { name, namespace, uid, resource_version, labels, .. } = secret.metadata;
        let text = secret.data.and_then(|mut data| data.remove(kubeconfig::SECRET_KEY));
        let kubeconfig = text.as_ref().ok_or(KubeconfigError::NoKey).and_then(|text| RuntimeKubeconfig::parse(&text.0));
        Self {
            metadata: ObjectMeta { name, namespace, uid, resource_version, ..ObjectMeta::default() },
            kyma: labels.and_then(|mut labels| labels.remove(label::KYMA_NAME)).map(Into::into),
            digest: text.and_then(|text| digest::digest(&SHA256, &text.0).as_ref().try_into().ok()),
            kubeconfig: kubeconfig.map(Arc::new),
        }
    }
}

impl AccessSecret {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// Drops the identity of this version, which only its watch needs.
    pub fn drop_version(&mut self) {
        (self.metadata.uid, self.metadata.resource_version) = (None, None);
    }

    /// The Kyma that the label names.
    pub(crate) fn kyma(&self) -> Option<KymaKey> {
        Some(KymaKey::new(self.metadata.namespace.as_deref().unwrap_or_default(), self.kyma.as_deref()?))
    }

    /// The parsed kubeconfig.
    ///
    /// # Errors
    /// The reason for which it is refused.
    pub(super) fn kubeconfig(&self) -> Result<&RuntimeKubeconfig, &KubeconfigError> {
        self.kubeconfig.as_deref()
    }

    /// Returns whether both give the same access: name and kubeconfig are equal, whatever else of the Secret was written.
    pub(super) fn gives_same_access(&self, other: &Self) -> bool {
        self.metadata.name == other.metadata.name && self.digest == other.digest
    }
}

impl fmt::Debug for AccessSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessSecret").field("name", &self.metadata.name).finish_non_exhaustive()
    }
}

/// The resource of a core Secret.
impl Resource for AccessSecret {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        Secret::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        Secret::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        Secret::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        Secret::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::kube::runtime_access::tests::test_bed::Party;

    fn read(secret: &Value) -> AccessSecret {
        serde_json::from_value(secret.clone()).unwrap()
    }

    /// A Secret as a list returns it, without kind and version.
    fn stored(config: &str) -> Value {
        use base64::{Engine as _, engine::general_purpose::STANDARD};
        json!({"metadata": {"name": "access", "namespace": "ns", "uid": "u", "resourceVersion": "7",
            "labels": {label::KYMA_NAME: "k", "other": "sesame"}, "annotations": {"last-applied": "sesame"}},
            "type": "Opaque", "data": {"config": STANDARD.encode(config), "other": STANDARD.encode("sesame")}})
    }

    #[test]
    fn identity_owner_and_kubeconfig_are_kept_and_debug_hides_the_content() {
        let ca = Party::new("runtime").certificate_data();
        let text = format!(
            "clusters: [{{name: a, cluster: {{server: 'https://runtime', certificate-authority-data: {ca}}}}}]\n\
             users: [{{name: b, user: {{token: sesame}}}}]\ncontexts: [{{name: c, context: {{cluster: a, user: b}}}}]\n"
        );
        let secret = read(&stored(&text));
        assert_eq!((secret.name(), secret.kyma()), ("access", Some(KymaKey::new("ns", "k"))));
        assert_eq!(secret.kubeconfig().unwrap().server, "https://runtime");
        let ObjectMeta { uid, resource_version, labels, annotations, .. } = secret.meta();
        assert_eq!((uid.as_deref(), resource_version.as_deref()), (Some("u"), Some("7")), "read by the watch");
        assert_eq!((labels, annotations), (&None, &None));
        let mut cached = secret.clone();
        cached.drop_version();
        let ObjectMeta { name, namespace, uid, resource_version, .. } = cached.meta();
        assert_eq!((name.as_deref(), namespace.as_deref()), (Some("access"), Some("ns")));
        assert_eq!((uid, resource_version), (&None, &None));
        assert!(secret.gives_same_access(&cached));
        assert!(!format!("{secret:?}").contains("sesame"));
        // Each byte of the text counts, and nothing else of the Secret but its name.
        let change = |member: &str, value: &str| {
            let mut changed = stored(&text);
            changed["metadata"][member] = json!(value);
            read(&changed)
        };
        assert!(secret.gives_same_access(&change("resourceVersion", "8")));
        assert!(!secret.gives_same_access(&change("name", "other")));
        assert!(!secret.gives_same_access(&read(&stored(&format!("{text}\n")))));
    }

    #[test]
    fn secret_without_kubeconfig_or_label_is_kept_with_the_reason() {
        let secret = read(&json!({"metadata": {"name": "access"}, "data": {"other": "c2VzYW1l"}}));
        assert_eq!((secret.kubeconfig().unwrap_err(), secret.kyma()), (&KubeconfigError::NoKey, None));
        let malformed = read(&stored("sesame"));
        assert!(matches!(malformed.kubeconfig(), Err(KubeconfigError::Malformed { .. })));
        assert!(!malformed.gives_same_access(&secret));
    }

    #[test]
    fn resource_is_that_of_secrets() {
        assert_eq!(AccessSecret::url_path(&(), Some("ns")), Secret::url_path(&(), Some("ns")));
        assert_eq!(AccessSecret::api_version(&()), Secret::api_version(&()));
    }
}
