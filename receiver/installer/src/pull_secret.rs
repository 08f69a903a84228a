//! Image pull secrets of the agent and of the modules: watched in KCP. A change enqueues the runtimes that have a copy.

use std::{fmt, sync::Arc};

use arc_swap::ArcSwapOption;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use prometheus_client::metrics::gauge::Gauge;
use serde_json::{Value, json};
use tidewatch_api::{
    Resource,
    names::{SKR_NAMESPACE, label},
};
use tidewatch_cluster::object;
use tidewatch_fleet::{
    manifest_queue::ManifestQueue,
    queue::{Priority, WorkSet},
    stores::manifests::Manifests,
    table::RuntimeTable,
};
use tidewatch_trust::CA_SECRET;
use tokio_util::sync::CancellationToken;

/// Types of a Secret by which kubelets pull images, each with the key that it must have.
const PULLABLE: [(&str, &str); 2] =
    [("kubernetes.io/dockerconfigjson", ".dockerconfigjson"), ("kubernetes.io/dockercfg", ".dockercfg")];
/// Type of a Secret that names none.
const OPAQUE: &str = "Opaque";
/// Runtimes enqueued per second after a change.
const RUNTIMES_PER_SECOND: u32 = 50;

/// Types of Secrets that are never copied: private keys and tokens of the control plane, which no runtime may get.
const NEVER_COPIED: [&str; 4] = [
    "kubernetes.io/tls",
    "kubernetes.io/ssh-auth",
    "kubernetes.io/service-account-token",
    "bootstrap.kubernetes.io/token",
];

/// The image pull secret of the modules: its name in KCP and in the runtime clusters, and its content.
#[derive(Clone, Debug)]
pub struct ModulePullSecret {
    /// Name.
    pub name: String,
    /// Content, as watched in KCP.
    pub secret: PullSecret,
}

impl ModulePullSecret {
    /// The content to copy; `None` before KCP has the Secret.
    pub fn content(&self) -> Option<Arc<Value>> {
        self.secret.content()
    }
}

/// Content for every runtime, empty if there is none; clones share it. Its `Debug` hides the content.
#[derive(Clone, Default)]
pub struct PullSecret(Arc<ArcSwapOption<Value>>);

impl fmt::Debug for PullSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PullSecret").finish_non_exhaustive()
    }
}

impl PullSecret {
    /// Type and data of the Secret in a runtime.
    pub fn content(&self) -> Option<Arc<Value>> {
        self.0.load_full()
    }

    /// Reads a Secret of KCP once, so that nothing is installed without it; it may also be created later. Returns its content,
    /// and the task that keeps it current once the caches have synced.
    ///
    /// # Errors
    /// The control plane refused the request or did not respond.
    pub async fn open(
        client: Client,
        namespace: &str,
        name: &str,
        fleet: RuntimeTable,
        purpose: Purpose,
        synced: CancellationToken,
    ) -> kube::Result<(Self, impl Future<Output = &'static str> + Send + use<>)> {
        let api = Api::<Secret>::namespaced(client, namespace);
        let pull_secret = Self::default();
        pull_secret.take(object::get_by_list(&api, name).await?.as_ref(), &purpose.is_usable);
        let current = pull_secret.clone();
        let name = name.to_owned();
        let follow = async move {
            synced.cancelled().await;
            let mut secrets = object::watch(api, &name, "image pull secret");
            while let Some(secret) = secrets.next().await {
                if current.take(secret.as_ref(), &purpose.is_usable) {
                    tracing::info!(secret = name, "Image pull secret changed, every runtime is enqueued");
                    fleet.enqueue_all(purpose.work, Priority::Catalog, RUNTIMES_PER_SECOND);
                    purpose.copies.iter().for_each(Copies::enqueue);
                }
            }
            "watch of an image pull secret"
        };
        Ok((pull_secret, follow))
    }

    /// A secret with this content.
    #[cfg(any(test, feature = "testing"))]
    pub fn fixed(content: Value) -> Self {
        Self(Arc::new(ArcSwapOption::from_pointee(content)))
    }

    /// Takes over the Secret of KCP and returns whether the content changed. As for lifecycle-manager, nearly every type is
    /// copied. The last content stays if the Secret is missing, if no runtime may get it, or if kubelets can use the last
    /// content but not the new one.
    fn take(&self, secret: Option<&Secret>, is_usable: &Gauge) -> bool {
        let Some(secret) = secret else {
            is_usable.set(0);
            tracing::error!("Image pull secret does not exist, the last content stays in use");
            return false;
        };
        if let Some(kind) = secret_of_the_control_plane(secret) {
            is_usable.set(0);
            tracing::error!(kind, "Image pull secret belongs to the control plane, no runtime gets it");
            return false;
        }
        let content = content(secret);
        let defect = defect(&content);
        is_usable.set(defect.is_none().into());
        let last = self.0.load();
        if let Some(defect) = defect {
            tracing::error!(defect, "Kubelets cannot use the image pull secret");
            if last.as_deref().is_some_and(|last| self::defect(last).is_none()) {
                return false;
            }
        }
        let changed = last.as_deref() != Some(&content);
        if changed {
            self.0.store(Some(Arc::new(content)));
        }
        changed
    }
}

/// Returns what kind of secret of the control plane this is, if it is one.
fn secret_of_the_control_plane(secret: &Secret) -> Option<&'static str> {
    let is_access = secret.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(label::KYMA_NAME));
    if is_access {
        return Some("access Secret");
    }
    if secret.metadata.name.as_deref() == Some(CA_SECRET) {
        return Some("CA");
    }
    NEVER_COPIED.into_iter().find(|kind| secret.type_.as_deref() == Some(kind))
}

/// Type and data of a Secret, as runtimes get them.
fn content(secret: &Secret) -> Value {
    let data = secret.data.clone().unwrap_or_default();
    json!({"type": secret.type_.as_deref().filter(|kind| !kind.is_empty()).unwrap_or(OPAQUE), "data": data})
}

/// Reason for which kubelets pull no image with a Secret of this content; `None` if they do.
pub fn defect(content: &Value) -> Option<String> {
    let kind = content["type"].as_str().unwrap_or_default();
    let Some((_, key)) = PULLABLE.iter().find(|(pullable, _)| *pullable == kind) else {
        let [(json, _), (legacy, _)] = PULLABLE;
        return Some(format!("kubelets ignore its type {kind}, only {json} and {legacy} pull images"));
    };
    let has_value = content["data"][*key].as_str().is_some_and(|value| !value.is_empty());
    (!has_value).then(|| format!("kubelets need its key {key}"))
}

/// Purpose of a pull secret.
#[derive(Clone)]
pub struct Purpose {
    /// Work of every runtime after a change.
    pub work: WorkSet,
    /// Manifests that write copies of their own.
    pub copies: Option<Copies>,
    /// 1 while kubelets can pull images with the Secret, 0 otherwise.
    pub is_usable: Gauge,
}

/// Manifests, of which those with workloads outside the namespace of all modules copy the pull secret.
#[derive(Clone)]
pub struct Copies {
    /// Cache of KCP.
    pub manifests: Manifests,
    /// Queue of their reconciles.
    pub queue: ManifestQueue,
}

impl Copies {
    fn enqueue(&self) {
        let manifests = self.manifests.all(false).into_iter().chain(self.manifests.all(true));
        let copying = manifests.filter(|manifest| has_workload_elsewhere(manifest.facts().synced));
        self.queue.enqueue_paced(copying.map(|manifest| manifest.key()).collect(), RUNTIMES_PER_SECOND);
    }
}

/// True if objects have a workload outside the namespace of all modules.
fn has_workload_elsewhere(synced: &[Resource]) -> bool {
    let is_workload = |object: &Resource| {
        matches!(&*object.group, "apps" | "batch")
            || (object.group.is_empty() && matches!(&*object.kind, "Pod" | "ReplicationController"))
    };
    synced.iter().any(|object| is_workload(object) && object.namespace != SKR_NAMESPACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(kind: Option<&str>, data: &[(&str, usize)]) -> Secret {
        let value = |(key, bytes): &(&str, usize)| ((*key).to_owned(), k8s_openapi::ByteString(vec![b'x'; *bytes]));
        let data = data.iter().map(value).collect();
        Secret { type_: kind.map(str::to_owned), data: Some(data), ..Secret::default() }
    }

    #[test]
    fn missing_secret_does_not_replace_the_last_content() {
        let pull_secret = PullSecret::default();
        let gauge = Gauge::default();
        let [(kind, key), _] = PULLABLE;
        assert!(!pull_secret.take(None, &gauge) && pull_secret.content().is_none());
        assert!(pull_secret.take(Some(&secret(Some(kind), &[(key, 3)])), &gauge));
        let first = pull_secret.content().unwrap();
        assert_eq!(*first, json!({"type": kind, "data": {key: "eHh4"}}));
        assert!(!pull_secret.take(Some(&secret(Some(kind), &[(key, 3)])), &gauge), "unchanged content");
        assert!(!pull_secret.take(None, &gauge));
        assert_eq!((pull_secret.content(), gauge.get()), (Some(first), 0));
        assert!(pull_secret.take(Some(&secret(Some(kind), &[(key, 4)])), &gauge));
        assert_eq!(gauge.get(), 1);
    }

    #[test]
    fn only_workloads_outside_the_namespace_of_all_modules_need_copies_of_their_own() {
        let has = |group: &str, kind: &str, namespace: &str| {
            let [group, kind, namespace] = [group, kind, namespace].map(str::to_owned);
            has_workload_elsewhere(&[Resource { group, kind, namespace, ..Resource::default() }])
        };
        assert!(has("apps", "DaemonSet", "istio-system") && has("batch", "Job", "own") && has("", "Pod", "own"));
        assert!(!has("apps", "Deployment", SKR_NAMESPACE) && !has("", "Secret", "own"));
    }

    #[test]
    fn secrets_of_the_control_plane_are_never_taken_over() {
        let gauge = Gauge::default();
        let [(kind, key), _] = PULLABLE;
        let usable = || secret(Some(kind), &[(key, 3)]);
        let mut access = usable();
        access.metadata.labels = Some([(label::KYMA_NAME.to_owned(), "k".to_owned())].into());
        let mut ca = usable();
        ca.metadata.name = Some(CA_SECRET.to_owned());
        let typed = NEVER_COPIED.map(|kind| secret(Some(kind), &[(key, 3)]));
        for secret in [access, ca].iter().chain(&typed) {
            let pull_secret = PullSecret::default();
            assert!(!pull_secret.take(Some(secret), &gauge) && pull_secret.content().is_none(), "{secret:?}");
        }
    }

    #[test]
    fn content_that_kubelets_cannot_use_does_not_replace_a_usable_one() {
        let gauge = Gauge::default();
        let pull_secret = PullSecret::default();
        let [(kind, key), _] = PULLABLE;
        assert!(pull_secret.take(Some(&secret(Some(kind), &[(key, 3)])), &gauge));
        let usable = pull_secret.content();
        for broken in [secret(Some(kind), &[]), secret(Some("Opaque"), &[(key, 3)])] {
            assert!(!pull_secret.take(Some(&broken), &gauge));
            assert_eq!((pull_secret.content(), gauge.get()), (usable.clone(), 0));
        }
        assert!(!format!("{pull_secret:?}").contains("eHh4"));
    }

    #[test]
    fn secret_of_every_type_is_taken_over_and_its_defect_named() {
        let ignored = |kind: &str| {
            let pullable = "kubernetes.io/dockerconfigjson and kubernetes.io/dockercfg pull images";
            Some(format!("kubelets ignore its type {kind}, only {pullable}"))
        };
        let needs = |key: &str| Some(format!("kubelets need its key {key}"));
        for (kind, data, taken, defect) in [
            (Some("kubernetes.io/dockerconfigjson"), &[(".dockerconfigjson", 100_000), ("note", 1)][..], None, None),
            (Some("kubernetes.io/dockercfg"), &[(".dockercfg", 3)], None, None),
            (Some("kubernetes.io/dockerconfigjson"), &[(".dockerconfigjson", 0)], None, needs(".dockerconfigjson")),
            (Some("kubernetes.io/dockercfg"), &[(".dockerconfigjson", 3)], None, needs(".dockercfg")),
            (Some("Opaque"), &[(".dockerconfigjson", 3)], None, ignored("Opaque")),
            (Some("example.com/auth"), &[("user", 3)], None, ignored("example.com/auth")),
            (Some(""), &[], Some("Opaque"), ignored("Opaque")),
            (None, &[], Some("Opaque"), ignored("Opaque")),
        ] {
            let pull_secret = PullSecret::default();
            let gauge = Gauge::default();
            assert!(pull_secret.take(Some(&secret(kind, data)), &gauge), "{kind:?}");
            let content = pull_secret.content().unwrap();
            assert_eq!(content["type"].as_str(), taken.or(kind), "{kind:?}");
            assert_eq!(content["data"].as_object().unwrap().len(), data.len(), "{kind:?}");
            assert_eq!((super::defect(&content), gauge.get()), (defect.clone(), defect.is_none().into()), "{kind:?}");
        }
    }
}
