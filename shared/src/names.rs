//! Fixed names: labels, annotations, finalizers, field managers and objects, as the incumbent has them, and our own.

/// API group of all custom resources.
pub const GROUP: &str = "operator.kyma-project.io";
/// The only served version.
pub const VERSION: &str = "v1beta2";

/// Namespace of Kymas, templates, release metas, Manifests, Watchers and access Secrets in KCP.
pub const KCP_NAMESPACE: &str = "kcp-system";
/// Namespace of everything of ours in a runtime.
pub const SKR_NAMESPACE: &str = "kyma-system";
/// Name of the Kyma object in a runtime.
pub const SKR_KYMA: &str = "default";

/// ConfigMap (with the plan) and Lease (the canary) of the agent in a runtime.
pub const AGENT_OBJECT: &str = "tidewatch-agent";
/// Key of the plan in the agent's ConfigMap.
pub const PLAN_KEY: &str = "plan.json";
/// Key of the receiver's URL for events in the agent's ConfigMap: `https://host:port`.
pub const RECEIVER_URL_KEY: &str = "receiver-url";
/// Key of the receiver's URL for enrolment in the agent's ConfigMap: `https://host:port`.
pub const ENROLMENT_URL_KEY: &str = "enrolment-url";
/// Key of the runtime's id in the agent's ConfigMap.
pub const RUNTIME_ID_KEY: &str = "runtime-id";
/// Key of the roots of the receiver's certificate, in PEM, in the agent's ConfigMap.
pub const TRUST_BUNDLE_KEY: &str = "ca.crt";
/// Secret in a runtime with the agent's own key and certificate; the name is the incumbent's.
pub const IDENTITY_SECRET: &str = "skr-webhook-tls";
/// Key of the certificate chain in an identity's Secret or folder, leaf first, in PEM.
pub const CHAIN_KEY: &str = "tls.crt";
/// Key of the private key in an identity's Secret or folder, PKCS#8 in PEM.
pub const PRIVATE_KEY_KEY: &str = "tls.key";
/// Deployment of the agent in a runtime; the name is the incumbent's.
pub const AGENT_DEPLOYMENT: &str = "skr-webhook";
/// Container of the agent in its Deployment; the name is the incumbent's.
pub const AGENT_CONTAINER: &str = "server";
/// Service of the agent's metrics in a runtime; the name is the incumbent's.
pub const AGENT_METRICS_SERVICE: &str = "skr-webhook-metrics";
/// PriorityClass of the agent in a runtime; the name is the incumbent's.
pub const AGENT_PRIORITY_CLASS: &str = "skr-webhook-priority";
/// ConfigMap in a runtime that says which objects of the catalog are ours, and what they were (ours).
pub const CATALOG_INVENTORY: &str = "tidewatch-catalog";
/// ConfigMap in KCP that says which releases are accepted, since when, and which removal waits for a confirmation (ours).
pub const RELEASES: &str = "tidewatch-releases";
/// Secret in a runtime with which the agent's image is pulled, where that needs one (ours).
pub const AGENT_PULL_SECRET: &str = "tidewatch-agent-pull";
/// Audience of the token with which an agent enrols.
pub const TOKEN_AUDIENCE: &str = "tidewatch";

/// Key of the kubeconfig in an access Secret.
pub const KUBECONFIG_KEY: &str = "config";

/// The manager name under which the incumbent's Watcher CRs address the lifecycle core itself.
pub const OWN_MANAGER: &str = "lifecycle-manager";

/// Labels.
pub mod label {
    /// `lifecycle-manager` in KCP, `kyma` on everything that is written to a runtime.
    pub const MANAGED_BY: &str = "operator.kyma-project.io/managed-by";
    /// Value of [`MANAGED_BY`] in KCP.
    pub const MANAGED_BY_KCP: &str = "lifecycle-manager";
    /// Value of [`MANAGED_BY`] in a runtime.
    pub const MANAGED_BY_SKR: &str = "kyma";
    /// Name of the Kyma that an access Secret or a Manifest belongs to.
    pub const KYMA_NAME: &str = "operator.kyma-project.io/kyma-name";
    /// Module of a Manifest.
    pub const MODULE_NAME: &str = "operator.kyma-project.io/module-name";
    /// Channel of a Manifest.
    pub const CHANNEL: &str = "operator.kyma-project.io/channel";
    /// Copied from the template to the Manifest.
    pub const CONTROLLER_NAME: &str = "operator.kyma-project.io/controller-name";
    /// Marks Manifests of mandatory modules.
    pub const MANDATORY_MODULE: &str = "operator.kyma-project.io/mandatory-module";
    /// Kubernetes' recommended label; on every object of an agent's installation (ours).
    pub const PART_OF: &str = "app.kubernetes.io/part-of";
    /// Value of [`PART_OF`].
    pub const PART_OF_TIDEWATCH: &str = "tidewatch";
    /// On the Kyma in a runtime.
    pub const WATCHED_BY: &str = "operator.kyma-project.io/watched-by";
    /// Value of [`WATCHED_BY`].
    pub const WATCHED_BY_KYMA: &str = "kyma";
    /// `true` freezes a Kyma or a Manifest.
    pub const SKIP_RECONCILIATION: &str = "operator.kyma-project.io/skip-reconciliation";
    /// `true` pauses one runtime: nothing is written to it (ours, not the incumbent's).
    pub const PAUSE: &str = "operator.kyma-project.io/tidewatch-pause";
    /// On the KCP Kyma: [`HAND_BACK_ASKED`] asks for the runtime to be left in order, for the way back to the incumbent;
    /// [`HAND_BACK_DONE`] is the answer, and our last write (ours).
    pub const HAND_BACK: &str = "operator.kyma-project.io/tidewatch-hand-back";
    /// Value of [`HAND_BACK`] that an operator sets.
    pub const HAND_BACK_ASKED: &str = "true";
    /// Value of [`HAND_BACK`] once nothing is written any more: such a Kyma is nobody's until the label goes.
    pub const HAND_BACK_DONE: &str = "done";
    /// `true` on the KCP Kyma lets a runtime that has spoken v3 speak v2 again, for the way back to the incumbent's agent (ours).
    pub const ALLOW_V2: &str = "operator.kyma-project.io/tidewatch-allow-v2";
    /// `true` on the KCP Kyma restores the default modules (ours).
    pub const RESET_MODULES: &str = "operator.kyma-project.io/reset-modules";
    /// Visibility: only for internal Kymas.
    pub const INTERNAL: &str = "operator.kyma-project.io/internal";
    /// Visibility: only for beta Kymas.
    pub const BETA: &str = "operator.kyma-project.io/beta";
    /// The runtime's id; equal to the common name of its agent's certificate.
    pub const RUNTIME_ID: &str = "kyma-project.io/runtime-id";
    /// Account ids that are copied to the runtime's Kyma.
    pub const GLOBAL_ACCOUNT_ID: &str = "kyma-project.io/global-account-id";
    /// See [`GLOBAL_ACCOUNT_ID`].
    pub const SUBACCOUNT_ID: &str = "kyma-project.io/subaccount-id";
    /// Id of the service instance; a label of the incumbent's metrics.
    pub const INSTANCE_ID: &str = "kyma-project.io/instance-id";
    /// Istio's injection label on the runtime's namespace.
    pub const ISTIO_INJECTION: &str = "istio-injection";
    /// Warden's validation label on the runtime's namespace.
    pub const WARDEN: &str = "namespaces.warden.kyma-project.io/validate";
}

/// Annotations.
pub mod annotation {
    /// `<namespace>/<name>` of the KCP object that owns an object in a runtime.
    pub const OWNED_BY: &str = "deprecated-operator.kyma-project.io/owned-by";
    /// OCM component name (the incumbent's deprecated copy).
    pub const FQDN: &str = "operator.kyma-project.io/fqdn";
    /// OCM component name.
    pub const OCM_COMPONENT_NAME: &str = "operator.kyma-project.io/ocm-component-name";
    /// `true` on a template whose default module CR is cluster scoped.
    pub const CLUSTER_SCOPED: &str = "operator.kyma-project.io/is-cluster-scoped";
    /// `true` on a Manifest whose module was set to `managed: false`.
    pub const UNMANAGED: &str = "operator.kyma-project.io/is-unmanaged";
    /// Domain of the runtime, on the KCP Kyma; its first label names the shoot in the incumbent's metrics.
    pub const SKR_DOMAIN: &str = "skr-domain";
    /// The last accepted spec of the runtime's Kyma, as JSON, on the KCP Kyma (ours).
    pub const ACCEPTED_SPEC: &str = "operator.kyma-project.io/tidewatch-accepted-spec";
    /// Hash of the inputs of the last full pass, on the KCP Kyma (ours).
    pub const INPUTS: &str = "operator.kyma-project.io/tidewatch-inputs";
    /// An agent image, on the ConfigMap in which its upgrade stands: it goes on although runtimes have failed (ours).
    pub const CONFIRM_AGENT_IMAGE: &str = "operator.kyma-project.io/tidewatch-confirm-agent-image";
    /// On the ConfigMap of releases in KCP: names the removal from many runtimes that somebody confirms (ours).
    pub const CONFIRM: &str = "operator.kyma-project.io/tidewatch-confirm";
}

/// Finalizers.
pub mod finalizer {
    /// On the KCP Kyma.
    pub const KYMA: &str = "operator.kyma-project.io/Kyma";
    /// On a Watcher.
    pub const WATCHER: &str = "operator.kyma-project.io/watcher";
}

/// Field managers of server-side apply.
pub mod field_manager {
    /// KCP Kyma status, Manifests, CRDs.
    pub const LIFECYCLE: &str = "lifecycle-manager";
    /// SKR Kyma "Deleting" status, finalizers.
    pub const LIFECYCLE_OPERATOR: &str = "operator.kyma-project.io/lifecycle-manager";
    /// Templates and release metas in a runtime; also the ownership marker.
    pub const CATALOG_SYNC: &str = "catalog-sync";
    /// Namespace, labels and annotations of the Kyma in a runtime.
    pub const SYNC_CONTEXT: &str = "kyma-sync-context";
    /// The agent's ConfigMap and Lease (ours).
    pub const TIDEWATCH: &str = "tidewatch";
}
