//! The installation on real API servers without a kubelet: defaulting by the API server, changes by others, and the
//! agent's rights.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use k8s_openapi::api::{
    authorization::v1::{SelfSubjectRulesReview, SelfSubjectRulesReviewSpec},
    core::v1::{ConfigMap, Secret},
};
use kube::{
    Api, Client, Config, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use tidewatch_api::{
    names::{AGENT_OBJECT, IDENTITY_SECRET, PLAN_KEY, SKR_NAMESPACE},
    plan::Plan,
};
use tidewatch_testing::{
    bed,
    control_plane::{Cluster, ClusterUser, audit::Write},
    landscape::{AGENT_IMAGE, Options, until},
};

use crate::{
    load::KEDA,
    support::{Fleet, SingleRuntime, TestResult, quick_options},
    sync::sum,
};

const RBAC: &str = "rbac.authorization.k8s.io";

/// All installed objects: group, version, kind, plural, whether the object is in the agent's namespace, name.
pub(crate) const OBJECTS: [(&str, &str, &str, &str, bool, &str); 14] = [
    ("", "v1", "ServiceAccount", "serviceaccounts", true, "tidewatch-agent"),
    (RBAC, "v1", "ClusterRole", "clusterroles", false, "tidewatch-agent"),
    (RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", false, "tidewatch-agent"),
    (RBAC, "v1", "Role", "roles", true, "tidewatch-agent"),
    (RBAC, "v1", "RoleBinding", "rolebindings", true, "tidewatch-agent"),
    ("coordination.k8s.io", "v1", "Lease", "leases", true, "tidewatch-agent"),
    ("", "v1", "Secret", "secrets", true, "skr-webhook-tls"),
    ("", "v1", "ConfigMap", "configmaps", true, "tidewatch-agent"),
    ("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", false, "skr-webhook-priority"),
    ("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", true, "kyma-project.io--watcher-to-apiserver"),
    ("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", true, "kyma-project.io--watcher-to-dns"),
    ("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", true, "kyma-project.io--metrics-to-watcher"),
    ("", "v1", "Service", "services", true, "skr-webhook-metrics"),
    ("apps", "v1", "Deployment", "deployments", true, "skr-webhook"),
];

/// One installed object of a runtime.
pub(crate) struct Object {
    pub(crate) api: Api<DynamicObject>,
    pub(crate) plural: &'static str,
    pub(crate) name: &'static str,
}

impl Object {
    pub(crate) fn new(
        client: &Client,
        (group, version, kind, plural, here, name): (&str, &str, &str, &'static str, bool, &'static str),
    ) -> Self {
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
        let api = if here {
            Api::namespaced_with(client.clone(), SKR_NAMESPACE, &resource)
        } else {
            Api::all_with(client.clone(), &resource)
        };
        Self { api, plural, name }
    }

    /// Returns the object without its metadata and status.
    pub(crate) async fn content(&self) -> Result<Value> {
        let mut data = self.api.get(self.name).await?.data;
        if let Some(members) = data.as_object_mut() {
            members.remove("status");
        }
        Ok(data)
    }

    async fn version(&self) -> Result<Option<String>> {
        Ok(self.api.get_metadata(self.name).await?.resource_version())
    }

    async fn patch(&self, patch: Value) -> Result<()> {
        self.api.patch(self.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    async fn is_restored(&self, content: &Value) -> Result<()> {
        until(&format!("{}/{} to be restored", self.plural, self.name), async || {
            let found = self.api.get(self.name).await?;
            let marked = found.labels().get("operator.kyma-project.io/managed-by").is_some_and(|by| by == "kyma");
            let equal_except_addresses = equal_except_addresses(&found.data, content);
            let free = found.finalizers().is_empty() && found.owner_references().is_empty();
            Ok((marked && equal_except_addresses && free && found.metadata.deletion_timestamp.is_none()).then_some(()))
        })
        .await
    }
}

/// Compares two objects except the addresses of a Service, which the API server allocates anew on creation.
fn equal_except_addresses(found: &Value, content: &Value) -> bool {
    let comparable = |value: &Value| {
        let mut value = value.clone();
        for member in ["clusterIP", "clusterIPs"] {
            if let Some(spec) = value["spec"].as_object_mut() {
                spec.remove(member);
            }
        }
        if let Some(members) = value.as_object_mut() {
            members.remove("status");
        }
        value
    };
    comparable(found) == comparable(content)
}

/// Options of a receiver that installs agents without running pods, and polls every runtime once a second.
pub(crate) fn installing_options(more: &[&str]) -> Options {
    let flags = [
        "--agent-image",
        AGENT_IMAGE,
        "--receiver-url",
        "https://127.0.0.1:1",
        "--enrolment-url",
        "https://127.0.0.1:2",
    ];
    let polls = ["--fallback-poll-seconds", "1"];
    let receiver = flags.iter().chain(&polls).chain(more).map(|&flag| flag.to_owned()).collect();
    Options { receiver, ..quick_options() }
}

impl SingleRuntime {
    pub(crate) async fn installed(&self) -> Result<Vec<Object>> {
        let client = self.runtime.cluster().client_as(ClusterUser::Other).await?;
        let objects: Vec<_> = OBJECTS.into_iter().map(|object| Object::new(&client, object)).collect();
        until("everything to be installed", async || {
            for object in &objects {
                object.api.get_metadata(object.name).await?;
            }
            Ok(Some(()))
        })
        .await?;
        Ok(objects)
    }

    async fn reconciles(&self) -> Result<u64> {
        Ok(sum(&self.receiver_page().await?, "tidewatch_kyma_passes_total", &[]) as u64)
    }
}

#[tokio::test]
async fn defaulting_by_the_api_server_causes_no_further_writes() -> TestResult {
    let setup = SingleRuntime::with_options("installed", &[KEDA], installing_options(&[])).await?;
    let objects = setup.installed().await?;
    let versions = async || {
        let mut versions = BTreeMap::new();
        for object in &objects {
            versions.insert((object.plural, object.name), object.version().await?);
        }
        anyhow::Ok(versions)
    };
    let before = versions().await?;
    let mark = setup.runtime.cluster().audit_mark()?;
    let reconciles = setup.reconciles().await?;
    until("further reconciles", async || Ok((setup.reconciles().await? >= reconciles + 5).then_some(()))).await?;
    assert_eq!(versions().await?, before);
    // A new process has no memory of the former verifications.
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    setup.landscape.start_receiver().await?;
    until("reconciles of the new process", async || Ok((setup.reconciles().await? >= 5).then_some(()))).await?;
    assert_eq!(versions().await?, before);
    let writes = setup.runtime.cluster().writes_since(mark)?;
    let is_of = |write: &&Write| {
        objects.iter().any(|object| object.plural == write.resource && [object.name, ""].contains(&&*write.name))
    };
    let ours: Vec<_> = writes.iter().filter(is_of).collect();
    assert!(ours.iter().all(|write| write.is_kubernetes_own()), "{ours:?}");
    Ok(())
}

#[tokio::test]
async fn each_edited_extended_or_deleted_object_is_restored() -> TestResult {
    let setup = SingleRuntime::with_options("broken", &[KEDA], installing_options(&[])).await?;
    let objects = setup.installed().await?;
    for object in &objects {
        let content = object.content().await?;
        object.api.delete(object.name, &DeleteParams::background()).await?;
        object.is_restored(&content).await?;
        object.patch(json!({"metadata": {"labels": {"operator.kyma-project.io/managed-by": null}}})).await?;
        object.is_restored(&content).await?;
        // Edit the metadata: a foreign finalizer and an owner reference to another object.
        let owner = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": "9d3c"});
        object.patch(json!({"metadata": {"finalizers": ["example.test/held"], "ownerReferences": [owner]}})).await?;
        object.is_restored(&content).await?;
        for change in user_changes(object.plural) {
            object.patch(change).await.with_context(|| format!("{}/{}", object.plural, object.name))?;
            object.is_restored(&content).await?;
        }
    }
    Ok(())
}

/// The receiver does not poll a runtime with a proven path, so each repair results from an event of the agent. Changes
/// that would silence the agent itself are covered by the module `repair`.
#[tokio::test]
async fn events_of_the_agent_trigger_the_repair_of_changed_objects() -> TestResult {
    let fleet = Fleet::with_one_runtime("events", quick_options()).await?;
    let client = fleet.only().runtime.cluster().client_as(ClusterUser::Other).await?;
    let repairable = ["serviceaccounts", "clusterroles", "roles", "priorityclasses", "services"];
    let objects = OBJECTS.into_iter().map(|object| Object::new(&client, object));
    for object in objects.filter(|object| repairable.contains(&object.plural)) {
        let content = object.content().await?;
        for change in user_changes(object.plural) {
            object.patch(change).await.with_context(|| format!("{}/{}", object.plural, object.name))?;
            object.is_restored(&content).await?;
        }
        if ["priorityclasses", "services"].contains(&object.plural) {
            object.api.delete(object.name, &DeleteParams::background()).await?;
            object.is_restored(&content).await?;
        }
    }
    fleet.only().path_proven().await?;
    Ok(())
}

/// Changes of an object by a user: edits and additions.
fn user_changes(plural: &str) -> Vec<Value> {
    match plural {
        "serviceaccounts" => vec![json!({"automountServiceAccountToken": true})],
        "clusterroles" | "roles" => {
            let all = json!({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]});
            vec![json!({"rules": []}), json!({"rules": [all]})]
        }
        "clusterrolebindings" | "rolebindings" => {
            vec![
                json!({"subjects": [{"kind": "User", "apiGroup": RBAC, "name": "mallory"}]}),
                json!({"subjects": null}),
            ]
        }
        "configmaps" => vec![
            json!({"data": {"plan.json": "{}"}}),
            json!({"data": {"receiver-url": "https://elsewhere:1", "more": "1"}}),
            json!({"immutable": true}),
        ],
        "priorityclasses" => vec![json!({"description": "other"})],
        "networkpolicies" => vec![
            json!({"spec": {"podSelector": {"matchLabels": {"app": "other"}}}}),
            json!({"spec": {"policyTypes": ["Ingress", "Egress"], "ingress": [{}], "egress": [{}]}}),
        ],
        "services" => vec![
            json!({"spec": {"selector": {"more": "x"}}}),
            json!({"spec": {"type": "NodePort"}}),
            json!({"spec": {"externalIPs": ["192.0.2.1"]}}),
        ],
        "deployments" => vec![
            json!({"spec": {"replicas": 0}}),
            json!({"spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}}),
            json!({"spec": {"template": {"metadata": {"annotations": {"x": "y"}}, "spec": {"hostNetwork": true, "nodeSelector": {"a": "b"}}}}}),
            json!({"spec": {"template": {"spec": {"containers": [{"name": "other", "image": "i"}]}}}}),
        ],
        // The agent owns the rest of this object.
        _ => Vec::new(),
    }
}

/// A client that has only the token of a service account.
async fn as_account(cluster: &Cluster, name: &str) -> Result<Client> {
    let token = cluster.service_account_token(SKR_NAMESPACE, name).await?;
    let kubeconfig = Kubeconfig::from_yaml(&cluster.kubeconfig_for_token(&token))?;
    Ok(Client::try_from(Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?)?)
}

#[tokio::test]
async fn an_agent_has_exactly_the_rights_that_its_plan_needs() -> TestResult {
    let setup = SingleRuntime::with_options("rights", &[KEDA], installing_options(&[])).await?;
    setup.installed().await?;
    let cluster = setup.runtime.cluster();
    let maps = Api::<ConfigMap>::namespaced(cluster.client().await?, SKR_NAMESPACE);
    let plan = maps.get(AGENT_OBJECT).await?.data.and_then(|mut data| data.remove(PLAN_KEY)).context("a plan")?;
    let plan = Plan::parse(&plan)?;

    let reviews = Api::<SelfSubjectRulesReview>::all(as_account(cluster, AGENT_OBJECT).await?);
    let rights_in = async |namespace: &str| {
        let spec = SelfSubjectRulesReviewSpec { namespace: Some(namespace.to_owned()) };
        let review = SelfSubjectRulesReview { spec, ..SelfSubjectRulesReview::default() };
        let rules = reviews.create(&PostParams::default(), &review).await?.status.context("a status")?.resource_rules;
        let mut rights = Vec::new();
        for rule in rules {
            for resource in rule.resources.unwrap_or_default() {
                // Every account may review its own access.
                if !resource.starts_with("selfsubject") {
                    let group = rule.api_groups.as_ref().and_then(|groups| groups.first().cloned()).unwrap_or_default();
                    let name =
                        rule.resource_names.as_ref().and_then(|names| names.first().cloned()).unwrap_or_default();
                    rights.push((group, resource, name, rule.verbs.join(" ")));
                }
            }
        }
        rights.sort();
        anyhow::Ok(rights)
    };
    let right = |group: &str, resource: &str, name: &str, verbs: &str| {
        (group.to_owned(), resource.to_owned(), name.to_owned(), verbs.to_owned())
    };
    let planned = |here: bool| {
        let watches = plan.watches().iter().filter(move |watch| watch.namespace.is_none() || here);
        watches.map(|watch| {
            let name = watch.field_selector.strip_prefix("metadata.name=").unwrap_or_default();
            right(&watch.group, &watch.resource, name, "get list watch")
        })
    };
    let mut everywhere: Vec<_> = planned(false).collect();
    let own = [("coordination.k8s.io", "leases", AGENT_OBJECT), ("", "secrets", IDENTITY_SECRET)];
    let own = own.map(|(group, resource, name)| right(group, resource, name, "list watch patch"));
    let mut here: Vec<_> = planned(true).chain(own).collect();
    everywhere.sort();
    here.sort();
    assert_eq!(rights_in("default").await?, everywhere);
    assert_eq!(rights_in(SKR_NAMESPACE).await?, here);

    // The granted requests succeed in the exact form that the agent uses.
    let agent = as_account(cluster, AGENT_OBJECT).await?;
    let named = |name: &str| kube::api::ListParams::default().fields(&format!("metadata.name={name}"));
    let maps = Api::<ConfigMap>::namespaced(agent.clone(), SKR_NAMESPACE);
    assert_eq!(maps.list(&named(AGENT_OBJECT)).await?.items.len(), 1);
    assert!(maps.list(&kube::api::ListParams::default()).await.is_err(), "other ConfigMaps must not be listed");
    let secrets = Api::<Secret>::namespaced(agent, SKR_NAMESPACE);
    assert_eq!(secrets.list(&named(IDENTITY_SECRET)).await?.items.len(), 1);
    let patch = Patch::Merge(json!({"stringData": {"tls.key": "x"}}));
    secrets.patch(IDENTITY_SECRET, &PatchParams::default(), &patch).await?;
    assert!(secrets.delete(IDENTITY_SECRET, &DeleteParams::default()).await.is_err());
    Ok(())
}

/// Installs lifecycle-manager's objects in a runtime.
pub(crate) async fn lifecycle_manager(cluster: &Cluster) -> Result<()> {
    cluster.ensure_namespace(SKR_NAMESPACE).await?;
    apply_lifecycle_managers(&cluster.client_as(ClusterUser::Other).await?).await
}

/// Applies lifecycle-manager's objects, as lifecycle-manager does on every reconcile.
pub(crate) async fn apply_lifecycle_managers(client: &Client) -> Result<()> {
    let deployments = ("apps", "v1", "Deployment", "deployments", true, "skr-webhook");
    let services = ("", "v1", "Service", "services", true, "skr-webhook");
    let metrics = ("", "v1", "Service", "services", true, "skr-webhook-metrics");
    let secrets = ("", "v1", "Secret", "secrets", true, "skr-webhook-tls");
    let policies =
        ("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", true, "kyma-project.io--seed-to-watcher");
    let egress =
        ("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", true, "kyma-project.io--watcher-to-apiserver");
    let priority = ("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", false, "skr-webhook-priority");
    let app = json!({"app": "skr-webhook"});
    let pod = json!({
        "containers": [{"name": "server", "image": "theirs:1", "imagePullPolicy": "Always",
            "env": [{"name": "KCP_ADDR", "value": "kcp:443"}, {"name": "WEBHOOK_PORT", "value": "8443"}],
            "volumeMounts": [{"name": "ssl", "mountPath": "/app/etc/ssl"}], "resources": {"limits": {"cpu": "100m", "memory": "200Mi"}}}],
        "volumes": [{"name": "ssl", "secret": {"secretName": "skr-webhook-tls"}}], "priorityClassName": "skr-webhook-priority",
    });
    let labels = json!({"app": "skr-webhook", "pod-restart-trigger": "1"});
    for (object, body) in [
        (secrets, json!({"type": "kubernetes.io/tls", "stringData": {"tls.crt": "x", "tls.key": "y", "ca.crt": "z"}})),
        (priority, json!({"value": 1_000_000_000})),
        (
            deployments,
            json!({"spec": {"selector": {"matchLabels": app}, "template": {"metadata": {"labels": labels}, "spec": pod}}}),
        ),
        (services, json!({"spec": {"selector": app, "ports": [{"port": 443, "targetPort": 8443}]}})),
        (metrics, json!({"spec": {"selector": app, "ports": [{"port": 2112}]}})),
        (policies, json!({"spec": {"podSelector": {"matchLabels": app}, "ingress": [{}]}})),
        (
            egress,
            json!({"spec": {"podSelector": {"matchLabels": app}, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": 443}]}]}}),
        ),
        (
            WEBHOOKS,
            json!({"webhooks": [{
                "name": "ns.kyma.operator.kyma-project.io", "sideEffects": "NoneOnDryRun", "admissionReviewVersions": ["v1"],
                "failurePolicy": "Ignore", "timeoutSeconds": 15,
                "clientConfig": {"service": {"name": "skr-webhook", "namespace": SKR_NAMESPACE, "path": "/validate/lifecycle-manager"}},
                "rules": [{"apiGroups": ["operator.kyma-project.io"], "apiVersions": ["*"], "resources": ["kymas"], "operations": ["UPDATE"]}],
            }]}),
        ),
    ] {
        let (group, version, kind, ..) = object;
        let object = Object::new(client, object);
        let mut body = body;
        body["apiVersion"] = if group.is_empty() { json!(version) } else { json!(format!("{group}/{version}")) };
        body["kind"] = kind.into();
        body["metadata"] = json!({"name": object.name, "labels": {"operator.kyma-project.io/managed-by": "kyma"}});
        let params = PatchParams::apply("declarative.kyma-project.io/applier").force();
        object.api.patch(object.name, &params, &Patch::Apply(body)).await?;
    }
    Ok(())
}

pub(crate) const WEBHOOKS: (&str, &str, &str, &str, bool, &str) = (
    "admissionregistration.k8s.io",
    "v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    false,
    "skr-webhook",
);

#[tokio::test]
async fn lifecycle_managers_installation_is_adopted_in_place_after_its_webhook_is_deleted() -> TestResult {
    let cluster = bed::shared().await?.runtime("inplace").await?;
    lifecycle_manager(&cluster).await?;
    let client = cluster.client().await?;
    let deployment = Object::new(&client, OBJECTS[13]);
    let before = deployment.api.get(deployment.name).await?;
    let mark = cluster.audit_mark()?;
    let setup = SingleRuntime::with_options("inplace", &[KEDA], installing_options(&[])).await?;
    let objects = setup.installed().await?;
    let policy = "kyma-project.io--seed-to-watcher";
    let obsolete = [
        ("", "v1", "Service", "services", true, "skr-webhook"),
        ("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", true, policy),
    ];
    for object in obsolete.map(|object| Object::new(&client, object)) {
        until("the obsolete objects to be deleted", async || {
            Ok(object.api.get_opt(object.name).await?.is_none().then_some(()))
        })
        .await?;
    }
    let webhooks = Object::new(&client, WEBHOOKS);
    assert!(webhooks.api.get_opt(webhooks.name).await?.is_none());
    let after = deployment.api.get(deployment.name).await?;
    assert_eq!(after.uid(), before.uid(), "the Deployment is changed in place");
    let pod = &after.data["spec"]["template"]["spec"];
    assert_eq!((&pod["containers"][0]["image"], &pod["containers"][0]["env"]), (&json!(AGENT_IMAGE), &Value::Null));
    let secret = objects[6].content().await?;
    assert_eq!(
        (&secret["data"], &secret["type"]),
        (&Value::Null, &json!("Opaque")),
        "lifecycle-manager's key is removed"
    );

    let writes = setup.runtime.cluster().writes_since(mark)?;
    let at = |verb: &str, resource: &str, name: &str| {
        let found =
            writes.iter().position(|write| write.verb == verb && write.resource == resource && write.name == name);
        found.with_context(|| format!("{verb} {resource}/{name} in {writes:?}"))
    };
    let deleted_at = at("delete", "validatingwebhookconfigurations", "skr-webhook")?;
    assert!(deleted_at < at("update", "deployments", "skr-webhook")?);
    assert!(deleted_at < at("delete", "services", "skr-webhook")?);
    at("delete", "networkpolicies", policy)?;
    Ok(())
}

#[tokio::test]
async fn an_empty_webhook_configuration_stays_in_compatibility_mode() -> TestResult {
    let cluster = bed::shared().await?.runtime("compat").await?;
    lifecycle_manager(&cluster).await?;
    let mark = cluster.audit_mark()?;
    let setup =
        SingleRuntime::with_options("compat", &[KEDA], installing_options(&["--compat-webhook-configuration"])).await?;
    setup.installed().await?;
    let webhooks = Object::new(&cluster.client().await?, WEBHOOKS);
    let left = webhooks.api.get(webhooks.name).await?;
    assert!(left.data["webhooks"].is_null(), "{:?}", left.data);
    let writes = cluster.writes_since(mark)?;
    let at = |resource: &str| {
        let ours = |write: &Write| write.resource == resource && write.name == "skr-webhook" && write.verb != "delete";
        writes.iter().position(ours).with_context(|| format!("{resource} in {writes:?}"))
    };
    assert!(
        at("validatingwebhookconfigurations")? < at("deployments")?,
        "no user's write meets an unavailable webhook"
    );
    Ok(())
}
