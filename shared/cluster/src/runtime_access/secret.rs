//! Access Secrets as their cache keeps them: identity, owner and the parsed kubeconfig, or in the shards of other replicas facts
//! alone. The text of the Secret is dropped on arrival, so that the credentials of a runtime are held once.

use std::{fmt, sync::Arc};

use aws_lc_rs::digest::{self, SHA256};
use k8s_openapi::{api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::Resource;
use serde::Deserialize;
use tidewatch_api::{
    key::KymaKey,
    names::{KUBECONFIG_KEY, label},
};

use super::kubeconfig::{KubeconfigError, RuntimeKubeconfig};
use crate::{body_missing::BodyMissingError, lookup::LookupKey};

/// The parts of an access Secret that its readers need. Clones share the kubeconfig.
#[derive(Clone)]
pub struct AccessSecret {
    key: KymaKey,
    object_version: Option<Box<str>>,
    /// Kyma that the label names.
    kyma: Option<KymaKey>,
    /// First half of the SHA-256 of the uid, which is shorter than its text.
    uid: Option<[u8; 16]>,
    /// SHA-256 of the kubeconfig's text.
    digest: Option<[u8; 32]>,
    /// `None` in the reduced form, of a Secret for a runtime in another replica's shard.
    kubeconfig: Option<Result<Arc<RuntimeKubeconfig>, KubeconfigError>>,
}

impl From<Secret> for AccessSecret {
    fn from(secret: Secret) -> Self {
        ListedSecret::from(secret).access
    }
}

impl AccessSecret {
    /// Namespace and name.
    pub const fn key(&self) -> &KymaKey {
        &self.key
    }

    /// The Kyma that the label names.
    pub const fn kyma(&self) -> Option<&KymaKey> {
        self.kyma.as_ref()
    }

    /// Returns the Secret without its kubeconfig, of which it keeps the digest.
    pub fn reduced(&self) -> Self {
        Self { kubeconfig: None, ..self.clone() }
    }

    /// Returns true if the kubeconfig is not in the cache.
    pub const fn is_reduced(&self) -> bool {
        self.kubeconfig.is_none()
    }

    /// Replaces the keys by equal ones, to share their text.
    pub fn share(&mut self, key: &KymaKey, kyma: &KymaKey) {
        if self.key == *key && self.kyma.as_ref() == Some(kyma) {
            (self.key, self.kyma) = (key.clone(), Some(kyma.clone()));
        }
    }

    /// resourceVersion of the Secret.
    pub fn object_version(&self) -> Option<&str> {
        self.object_version.as_deref()
    }

    /// The parsed kubeconfig, or the reason for which it is refused.
    ///
    /// # Errors
    /// The Secret is reduced.
    pub(super) fn kubeconfig(&self) -> Result<Result<&RuntimeKubeconfig, &KubeconfigError>, BodyMissingError> {
        let missing = || BodyMissingError { kind: "access Secret", key: self.key.to_string() };
        self.kubeconfig.as_ref().map(Result::as_deref).ok_or_else(missing)
    }

    /// Returns whether both give the same access: name and kubeconfig are equal, whatever else of the Secret was written, and
    /// whether or not one of them is reduced.
    pub(super) fn gives_same_access(&self, other: &Self) -> bool {
        self.key.name == other.key.name && self.digest == other.digest
    }

    /// Returns whether both are states of one object, which was not deleted and created again in between.
    pub(super) fn is_same_object(&self, other: &Self) -> bool {
        self.key == other.key && self.uid.is_some() && self.uid == other.uid
    }

    /// Returns whether the Secret has no kubeconfig at all, as opposed to one that is refused.
    pub(super) const fn lacks_kubeconfig(&self) -> bool {
        matches!(self.kubeconfig, Some(Err(KubeconfigError::NoKey)))
    }

    fn lookup_key(&self) -> LookupKey<'_> {
        LookupKey { namespace: Some(&self.key.namespace), name: Some(&self.key.name) }
    }
}

impl fmt::Debug for AccessSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessSecret").field("name", &self.key.name).finish_non_exhaustive()
    }
}

crate::lookup_by_key!(AccessSecret as Secret);

/// An access Secret as a list or a watch returns it, with its kubeconfig parsed already.
#[derive(Clone, Debug, Deserialize, Resource)]
#[resource(inherit = "Secret")]
#[serde(from = "Secret")]
pub struct ListedSecret {
    /// Name, namespace, uid and resourceVersion, which the watch reads.
    metadata: ObjectMeta,
    access: AccessSecret,
}

impl From<Secret> for ListedSecret {
    fn from(secret: Secret) -> Self {
        let ObjectMeta { name, namespace, uid, resource_version, labels, .. } = secret.metadata;
        let text = secret.data.and_then(|mut data| data.remove(KUBECONFIG_KEY));
        // An empty text is as good as none.
        let text = text.filter(|text| !text.0.is_empty());
        let kubeconfig = text.as_ref().ok_or(KubeconfigError::NoKey).and_then(|text| RuntimeKubeconfig::parse(&text.0));
        let in_namespace = |name: &str| KymaKey::new(namespace.as_deref().unwrap_or_default(), name);
        let access = AccessSecret {
            key: in_namespace(name.as_deref().unwrap_or_default()),
            object_version: resource_version.as_deref().map(Into::into),
            kyma: labels.as_ref().and_then(|labels| labels.get(label::KYMA_NAME)).map(|kyma| in_namespace(kyma)),
            uid: uid.as_deref().and_then(|uid| digest::digest(&SHA256, uid.as_bytes()).as_ref()[..16].try_into().ok()),
            digest: text.and_then(|text| digest::digest(&SHA256, &text.0).as_ref().try_into().ok()),
            kubeconfig: Some(kubeconfig.map(Arc::new)),
        };
        Self { metadata: ObjectMeta { name, namespace, uid, resource_version, ..ObjectMeta::default() }, access }
    }
}

impl From<ListedSecret> for AccessSecret {
    fn from(listed: ListedSecret) -> Self {
        listed.access
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::runtime_access::tests::test_bed::Party;

    fn listed(secret: &Value) -> ListedSecret {
        serde_json::from_value(secret.clone()).unwrap()
    }

    fn read(secret: &Value) -> AccessSecret {
        listed(secret).into()
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
        let ListedSecret { metadata, access: secret } = listed(&stored(&text));
        assert_eq!((secret.key(), secret.kyma()), (&KymaKey::new("ns", "access"), Some(&KymaKey::new("ns", "k"))));
        assert_eq!(secret.object_version(), Some("7"));
        assert_eq!(secret.kubeconfig().unwrap().unwrap().server, "https://runtime");
        let ObjectMeta { uid, resource_version, labels, annotations, .. } = &metadata;
        assert_eq!((uid.as_deref(), resource_version.as_deref()), (Some("u"), Some("7")), "read by the watch");
        assert_eq!((labels, annotations), (&None, &None));
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
    fn reduced_secret_keeps_identity_and_digest_and_answers_neither_with_nor_without_credentials() {
        let secrets = [read(&stored("sesame")), read(&json!({"metadata": {"name": "access", "namespace": "ns"}}))];
        for secret in &secrets {
            let reduced = secret.reduced();
            assert!(reduced.is_reduced() && !secret.is_reduced());
            let facts = |secret: &AccessSecret| {
                (secret.key.clone(), secret.kyma.clone(), secret.object_version.clone(), secret.digest)
            };
            assert_eq!(facts(&reduced), facts(secret));
            let missing = BodyMissingError { kind: "access Secret", key: "ns/access".to_owned() };
            assert_eq!(reduced.kubeconfig().err(), Some(missing));
            assert!(reduced.gives_same_access(secret) && secret.gives_same_access(&reduced));
        }
        assert!(!secrets[0].reduced().gives_same_access(&secrets[1]));
    }

    #[test]
    fn secret_without_kubeconfig_or_label_is_kept_with_the_reason() {
        let secret = read(&json!({"metadata": {"name": "access"}, "data": {"other": "c2VzYW1l"}}));
        assert_eq!((secret.kubeconfig().unwrap().err(), secret.kyma()), (Some(&KubeconfigError::NoKey), None));
        let malformed = read(&stored("sesame"));
        assert!(matches!(malformed.kubeconfig(), Ok(Err(KubeconfigError::Malformed { .. }))));
        assert!(!malformed.gives_same_access(&secret));
    }

    #[test]
    fn resource_is_that_of_secrets() {
        assert_eq!(ListedSecret::url_path(&(), Some("ns")), Secret::url_path(&(), Some("ns")));
        assert_eq!(<ListedSecret as Resource>::api_version(&()), <Secret as Resource>::api_version(&()));
    }
}
