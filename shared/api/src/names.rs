//! Fixed names of labels, annotations, finalizers, field managers and objects. Those not marked "(Tidewatch)" are
//! shared with lifecycle-manager.

/// API group of all custom resources.
pub const GROUP: &str = "operator.kyma-project.io";
/// The only served version.
pub const VERSION: &str = "v1beta2";

/// Namespace of Kymas, ModuleTemplates, ModuleReleaseMetas, Manifests, Watchers and access Secrets in KCP.
pub const KCP_NAMESPACE: &str = "kcp-system";
/// Namespace of all objects that are written to a runtime.
pub const SKR_NAMESPACE: &str = "kyma-system";
/// Name of the Kyma object in a runtime.
pub const SKR_KYMA: &str = "default";

/// Name of the agent's ConfigMap (the plan and the settings) and Lease (the canary) in a runtime (Tidewatch).
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
/// Secret in a runtime with the agent's own key and certificate; the name is lifecycle-manager's.
pub const IDENTITY_SECRET: &str = "skr-webhook-tls";
/// Key of the certificate chain in an identity's Secret or folder, leaf first, in PEM.
pub const CHAIN_KEY: &str = "tls.crt";
/// Key of the private key in an identity's Secret or folder, PKCS#8 in PEM.
pub const PRIVATE_KEY_KEY: &str = "tls.key";
/// Deployment of the agent in a runtime; the name is lifecycle-manager's.
pub const AGENT_DEPLOYMENT: &str = "skr-webhook";
/// Container of the agent in its Deployment; the name is lifecycle-manager's.
pub const AGENT_CONTAINER: &str = "server";
/// The least memory limit of that container, in MiB. The agent's default limits fit it.
pub const AGENT_MEMORY_MIB: u32 = 64;
/// Service of the agent's metrics in a runtime; the name is lifecycle-manager's.
pub const AGENT_METRICS_SERVICE: &str = "skr-webhook-metrics";
/// PriorityClass of the agent in a runtime; the name is lifecycle-manager's.
pub const AGENT_PRIORITY_CLASS: &str = "skr-webhook-priority";
/// ConfigMap in a runtime with the inventory of catalog objects: those that are owned by catalog sync, and their last
/// applied content (Tidewatch).
pub const CATALOG_INVENTORY: &str = "tidewatch-catalog";
/// ConfigMap in KCP with the history of releases: the accepted releases, since when each is, and a removal that awaits
/// confirmation (Tidewatch).
pub const RELEASES: &str = "tidewatch-releases";
/// ConfigMap in KCP with the state of the ring rollouts of modules (Tidewatch).
pub const ROLLOUTS: &str = "tidewatch-rollouts";
/// ConfigMap in KCP that pauses all runtimes if its key `pause` is `true` (Tidewatch).
pub const PAUSE: &str = "tidewatch";
/// Image pull Secret of the agent in a runtime, if its registry requires one (Tidewatch).
pub const AGENT_PULL_SECRET: &str = "tidewatch-agent-pull";

/// Key of the kubeconfig in an access Secret.
pub const KUBECONFIG_KEY: &str = "config";

/// The manager name by which Watchers address the lifecycle manager itself.
pub const OWN_MANAGER: &str = "lifecycle-manager";

/// Labels.
pub mod label {
    /// `lifecycle-manager` in KCP, `kyma` on every object that is written to a runtime.
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
    /// [`AGENT_DEPLOYMENT`](super::AGENT_DEPLOYMENT) on the agent's pod: its Deployment, Service and policies select it so.
    pub const APP: &str = "app";
    /// Kubernetes' recommended label, on every object of an agent's installation (Tidewatch).
    pub const PART_OF: &str = "app.kubernetes.io/part-of";
    /// Value of [`PART_OF`] on the objects of a module.
    pub const PART_OF_KYMA: &str = "Kyma";
    /// Kubernetes' recommended label, on every object of a module: the name of its Manifest.
    pub const COMPONENT: &str = "app.kubernetes.io/component";
    /// Value of [`PART_OF`].
    pub const PART_OF_TIDEWATCH: &str = "tidewatch";
    /// Kubernetes' recommended label, on the manager of a module: its version.
    pub const VERSION: &str = "app.kubernetes.io/version";
    /// Marks the Kyma in a runtime as watched.
    pub const WATCHED_BY: &str = "operator.kyma-project.io/watched-by";
    /// Value of [`WATCHED_BY`].
    pub const WATCHED_BY_KYMA: &str = "kyma";
    /// `true` suspends reconciliation of a Kyma or a Manifest.
    pub const SKIP_RECONCILIATION: &str = "operator.kyma-project.io/skip-reconciliation";
    /// `true` pauses one runtime: nothing is written to it (Tidewatch).
    pub const PAUSE: &str = "operator.kyma-project.io/tidewatch-pause";
    /// On the KCP Kyma, hands a runtime back to lifecycle-manager: [`HAND_BACK_REQUESTED`] requests that the runtime is
    /// left in a consistent state, [`HAND_BACK_DONE`] acknowledges it and is the last write (Tidewatch).
    pub const HAND_BACK: &str = "operator.kyma-project.io/tidewatch-hand-back";
    /// Value of [`HAND_BACK`] set by an operator.
    pub const HAND_BACK_REQUESTED: &str = "true";
    /// Value of [`HAND_BACK`] after the last write: the Kyma is not reconciled until the label is removed.
    pub const HAND_BACK_DONE: &str = "done";
    /// `true` on the KCP Kyma permits v2 for a runtime that has already used v3, for the return to runtime-watcher's
    /// agent (Tidewatch).
    pub const ALLOW_V2: &str = "operator.kyma-project.io/tidewatch-allow-v2";
    /// `true` on the Kyma in KCP or in the runtime restores the default modules, and is removed then (Tidewatch).
    pub const RESET_MODULES: &str = "operator.kyma-project.io/reset-modules";
    /// Visibility: restricts a ModuleTemplate to Kymas with the same label.
    pub const INTERNAL: &str = "operator.kyma-project.io/internal";
    /// Visibility: restricts a ModuleTemplate to Kymas with the same label.
    pub const BETA: &str = "operator.kyma-project.io/beta";
    /// The id of the runtime, equal to the common name of its agent's certificate.
    pub const RUNTIME_ID: &str = "kyma-project.io/runtime-id";
    /// Account id, copied to the Kyma in the runtime; selects its maintenance windows.
    pub const GLOBAL_ACCOUNT_ID: &str = "kyma-project.io/global-account-id";
    /// Account id, copied to the Kyma in the runtime.
    pub const SUBACCOUNT_ID: &str = "kyma-project.io/subaccount-id";
    /// Id of the service instance, a label of lifecycle-manager's metrics.
    pub const INSTANCE_ID: &str = "kyma-project.io/instance-id";
    /// Plan of the runtime, which selects its maintenance windows.
    pub const BROKER_PLAN_NAME: &str = "kyma-project.io/broker-plan-name";
    /// Region of the runtime's infrastructure, which selects its maintenance windows.
    pub const REGION: &str = "kyma-project.io/region";
    /// Region of the platform that the runtime belongs to, which selects its maintenance windows.
    pub const PLATFORM_REGION: &str = "kyma-project.io/platform-region";
    /// Istio's injection label on the runtime's namespace.
    pub const ISTIO_INJECTION: &str = "istio-injection";
    /// Warden's validation label on the runtime's namespace.
    pub const WARDEN: &str = "namespaces.warden.kyma-project.io/validate";
}

/// Annotations.
pub mod annotation {
    /// `<namespace>/<name>` of the KCP object that owns an object in a runtime.
    pub const OWNED_BY: &str = "deprecated-operator.kyma-project.io/owned-by";
    /// Notice on every object of a module.
    pub const DISCLAIMER: &str = "operator.kyma-project.io/managed-by-reconciler-disclaimer";
    /// Value of [`DISCLAIMER`].
    pub const DISCLAIMER_TEXT: &str = "DO NOT EDIT - This resource is managed by Kyma.\nAny modifications are discarded and the resource is reverted to the original state.";
    /// On a Manifest, the reference of the layer that was applied completely.
    pub const SYNC_OCI_REF: &str = "sync-oci-ref";
    /// OCM component name; lifecycle-manager's deprecated copy.
    pub const FQDN: &str = "operator.kyma-project.io/fqdn";
    /// OCM component name.
    pub const OCM_COMPONENT_NAME: &str = "operator.kyma-project.io/ocm-component-name";
    /// `true` on a ModuleTemplate with a cluster-scoped default module CR.
    pub const CLUSTER_SCOPED: &str = "operator.kyma-project.io/is-cluster-scoped";
    /// `true` on a Secret of the module `deployer` that gets the data of the Secret of the same name in KCP.
    pub const INJECT_DATA: &str = "operator.kyma-project.io/inject-data-from-kcp";
    /// `true` on a Manifest of a module that was set to `managed: false`.
    pub const UNMANAGED: &str = "operator.kyma-project.io/is-unmanaged";
    /// `true` on the manager of a module that the user installed by hand lets the listed module replace it (Tidewatch).
    pub const ADOPT: &str = "operator.kyma-project.io/adopt";
    /// `true` on an object of a module lets the receiver delete it and create it again when an immutable field changes
    /// (Tidewatch).
    pub const RECREATE: &str = "operator.kyma-project.io/recreate";
    /// `true` on a CRD in a runtime lets a module be removed although resources of its kind exist, with which the module works
    /// without defining it (Tidewatch).
    pub const ALLOW_REMOVAL: &str = "operator.kyma-project.io/allow-removal";
    /// `true` on an object of a module lets it stay when a version no longer contains it, and when the module is removed
    /// (Tidewatch).
    pub const KEEP: &str = "operator.kyma-project.io/tidewatch-keep";
    /// `keep` on an object has the same effect as [`KEEP`]; the name is Helm's.
    pub const HELM_RESOURCE_POLICY: &str = "helm.sh/resource-policy";
    /// Value of [`HELM_RESOURCE_POLICY`] that keeps an object.
    pub const HELM_KEEP: &str = "keep";
    /// On the KCP Kyma, the domain of the runtime; its first label is the shoot in lifecycle-manager's metrics.
    pub const SKR_DOMAIN: &str = "skr-domain";
    /// Prefix of the annotations of a Kyma that pin the version of a module, before the name of the module (Tidewatch).
    pub const PINNED_VERSION: &str = "version.operator.kyma-project.io/";
    /// On the KCP Kyma, the last accepted spec of the runtime's Kyma with its pins, as JSON (Tidewatch).
    pub const ACCEPTED_SPEC: &str = "operator.kyma-project.io/tidewatch-accepted-spec";
    /// Identifies a reset of the modules that was requested in KCP: on the KCP Kyma until it is done, and on the Kyma in
    /// the runtime from then on, so that an interrupted reset is not done twice (Tidewatch).
    pub const RESET_MODULES: &str = "operator.kyma-project.io/tidewatch-reset-modules";
    /// On the KCP Kyma, the fingerprint of the inputs of the last full reconcile (Tidewatch).
    pub const INPUTS: &str = "operator.kyma-project.io/tidewatch-inputs";
    /// On the ConfigMap with the state of an agent upgrade, the agent image whose upgrade an operator confirms to
    /// continue despite failed runtimes (Tidewatch).
    pub const CONFIRM_AGENT_IMAGE: &str = "operator.kyma-project.io/tidewatch-confirm-agent-image";
    /// On the agent's Deployment, the image that replaced another one while the event path was not proven; absent once the
    /// path is proven (Tidewatch).
    pub const UNPROVEN_BEFORE: &str = "operator.kyma-project.io/tidewatch-unproven-before";
    /// On a ModuleTemplate in KCP, the generation that may be edited although templates never change (Tidewatch).
    pub const ALLOW_EDIT: &str = "operator.kyma-project.io/tidewatch-allow-edit";
    /// On the ConfigMap [`RELEASES`](super::RELEASES), the removals from many runtimes that an operator confirms
    /// (Tidewatch).
    pub const CONFIRM: &str = "operator.kyma-project.io/tidewatch-confirm";
    /// On a Manifest, the rollout by which its module got its version, as JSON (Tidewatch).
    pub const ROLLOUT: &str = "operator.kyma-project.io/tidewatch-rollout";
    /// On a Manifest whose version names another default module CR than the one that was created, or none: the created
    /// one, as JSON (Tidewatch).
    pub const CREATED_DEFAULT: &str = "operator.kyma-project.io/tidewatch-created-default";
    /// On a Manifest, the custom kinds of `spec.associatedResources` of its template: `<kind>.<group>`, separated by commas
    /// (Tidewatch).
    pub const ASSOCIATED: &str = "operator.kyma-project.io/tidewatch-associated-kinds";
    /// On a Job of a module, the hash of what it runs (Tidewatch).
    pub const JOB: &str = "operator.kyma-project.io/tidewatch-job";
    /// On a Manifest, the hashes of those Jobs that were created and that Kubernetes deletes after their end, by namespace and
    /// name, as JSON (Tidewatch).
    pub const JOBS: &str = "operator.kyma-project.io/tidewatch-jobs";
    /// On a Manifest beside another one of its module: its number in the order in which the Kyma selected them; the
    /// highest is applied (Tidewatch).
    pub const SUCCESSION: &str = "operator.kyma-project.io/tidewatch-succession";
    /// On a ModuleReleaseMeta, the rings of its rollouts: growing percentages up to 100%, or `off` (Tidewatch).
    pub const ROLLOUT_RINGS: &str = "operator.kyma-project.io/tidewatch-rollout-rings";
    /// On a ModuleReleaseMeta, the minimum duration of a ring, in seconds (Tidewatch).
    pub const ROLLOUT_PAUSE: &str = "operator.kyma-project.io/tidewatch-rollout-pause-seconds";
    /// On a ModuleReleaseMeta, the time in seconds after which an upgraded module that is not ready has failed
    /// (Tidewatch).
    pub const ROLLOUT_DEADLINE: &str = "operator.kyma-project.io/tidewatch-rollout-deadline-seconds";
    /// On a ModuleReleaseMeta, the percentage of the runtimes that may fail because of a rollout (Tidewatch).
    pub const ROLLOUT_MAX_FAILURES: &str = "operator.kyma-project.io/tidewatch-rollout-max-failures";
    /// On a ModuleReleaseMeta, the labels of the Kymas that get a version before the first ring (Tidewatch).
    pub const ROLLOUT_CANARIES: &str = "operator.kyma-project.io/tidewatch-rollout-canaries";
}

/// Finalizers.
pub mod finalizer {
    /// On the KCP Kyma.
    pub const KYMA: &str = "operator.kyma-project.io/Kyma";
    /// On the KCP Kyma, by lifecycle-manager before 1.21. Later versions do not remove it.
    pub const PURGE: &str = "operator.kyma-project.io/purge-finalizer";
    /// On a Watcher.
    pub const WATCHER: &str = "operator.kyma-project.io/watcher";
    /// On the ModuleReleaseMeta of a mandatory module, until the module is gone from all runtimes.
    pub const MANDATORY_MODULE: &str = "operator.kyma-project.io/mandatory-module";
    /// On a Manifest: while objects of the module may exist, while they carry our label, and while a default module CR
    /// is managed.
    pub const MANIFEST: [&str; 3] =
        ["declarative.kyma-project.io/finalizer", "label-removal-finalizer", "resource.kyma-project.io/finalizer"];
}

/// Field managers of server-side apply.
pub mod field_manager {
    /// Status of the KCP Kyma, Manifests and CRDs.
    pub const LIFECYCLE: &str = "lifecycle-manager";
    /// Status `Deleting` of the Kyma in a runtime, and finalizers.
    pub const LIFECYCLE_OPERATOR: &str = "operator.kyma-project.io/lifecycle-manager";
    /// ModuleTemplates and ModuleReleaseMetas in a runtime; also marks their ownership.
    pub const CATALOG_SYNC: &str = "catalog-sync";
    /// Objects of modules in a runtime, status and finalizers of Manifests.
    pub const MODULE: &str = "declarative.kyma-project.io/applier";
    /// Prefix, before the name of a module: fields that the module adds to an object of another module (Tidewatch).
    pub const SHARED: &str = "operator.kyma-project.io/tidewatch-shared/";
    /// Default module CRs.
    pub const DEFAULT_OBJECT: &str = "resource.kyma-project.io/finalizer";
    /// Namespace, labels and annotations of the Kyma in a runtime.
    pub const SYNC_CONTEXT: &str = "kyma-sync-context";
    /// ConfigMap and Lease of the agent (Tidewatch).
    pub const TIDEWATCH: &str = "tidewatch";
}
