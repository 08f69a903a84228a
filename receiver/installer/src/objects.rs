//! Content of every object. Server-side defaults are spelled out, so that a found object equals the desired one.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use strum::VariantArray as _;
use tidewatch_api::{
    identity::TrustDomain,
    names::{
        AGENT_CONTAINER, AGENT_DEPLOYMENT, AGENT_OBJECT, AGENT_PRIORITY_CLASS, ENROLMENT_URL_KEY, PLAN_KEY,
        RECEIVER_URL_KEY, SKR_NAMESPACE, TRUST_BUNDLE_KEY, label,
    },
    plan::Plan,
};
use tidewatch_trust::TrustBundle;

use super::{Component, Settings, rbac};

const RBAC: &str = "rbac.authorization.k8s.io";
const METRICS_PORT: u16 = 2112;
/// Name of [`METRICS_PORT`].
const METRICS_PORT_NAME: &str = "http-metrics";
/// User and group of the process; lifecycle-manager's.
const USER: u32 = 10_001;
const GROUP: u32 = 30_001;
/// Directory of the service account in the pod, where Kubernetes mounts it by default.
const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const ENROLMENT_TOKEN_DIR: &str = "/var/run/secrets/tidewatch";
/// Lifetime in seconds of the token for the runtime's own API server, renewed by the kubelet; the default of
/// Kubernetes.
const SERVICE_ACCOUNT_TOKEN_SECONDS: u32 = 3_607;
/// Lifetime in seconds of the token for enrolment.
const ENROLMENT_TOKEN_SECONDS: u32 = 3_600;

/// Builds every wanted object in the order of the components. The ConfigMap lacks the runtime id, the only difference
/// between runtimes of one plan and image. `pull_secret` contains type and data of the image pull secret of the agent alone.
pub(super) fn objects(
    settings: &Settings,
    plan: &Plan,
    trust: &TrustBundle,
    pull_secret: Option<&Value>,
) -> Vec<(Component, Value)> {
    let object = |component| Some((component, named(component, body(component, settings, plan, trust, pull_secret)?)));
    Component::VARIANTS.iter().copied().filter_map(object).collect()
}

/// Returns the object without type and metadata; `None` if the settings do not want it.
fn body(
    component: Component,
    settings: &Settings,
    plan: &Plan,
    trust: &TrustBundle,
    pull_secret: Option<&Value>,
) -> Option<Value> {
    Some(match component {
        Component::Webhooks if !settings.compat_webhooks => return None,
        Component::Webhooks | Component::Lease => json!({}),
        Component::PullSecret => pull_secret?.clone(),
        Component::Account => json!({"automountServiceAccountToken": false}),
        Component::ClusterRole => json!({"rules": rbac::of_cluster(plan)}),
        Component::Role => json!({"rules": rbac::of_namespace(plan)}),
        Component::ClusterRoleBinding => binding("ClusterRole"),
        Component::RoleBinding => binding("Role"),
        Component::Secret => json!({"type": "Opaque"}),
        Component::ConfigMap => config_map(settings, plan, trust),
        Component::PriorityClass => json!({
            "value": 1_000_000_000, "preemptionPolicy": "PreemptLowerPriority",
            "description": "For the agent that tells the Kyma control plane what changes in this cluster",
        }),
        Component::ApiServerPolicy => {
            policy(egress([[json!({"ports": egress_ports(settings)})].into(), dns()].concat()))
        }
        Component::DnsPolicy => policy(egress(dns())),
        Component::MetricsPolicy => {
            policy(json!({"policyTypes": ["Ingress"], "ingress": [{"ports": [port("TCP", METRICS_PORT)]}]}))
        }
        Component::MetricsService => service(),
        Component::Deployment => deployment(settings),
    })
}

fn named(component: Component, mut object: Value) -> Value {
    let kind = component.kind();
    object["apiVersion"] = kind.resource().api_version.into();
    object["kind"] = kind.kind.into();
    object["metadata"] = json!({"name": component.name(), "labels": BTreeMap::from(COMMON_LABELS)});
    if matches!(component, Component::Deployment | Component::MetricsService) {
        object["metadata"]["labels"][label::APP] = AGENT_DEPLOYMENT.into();
    }
    if kind.namespaced {
        object["metadata"]["namespace"] = SKR_NAMESPACE.into();
    }
    object
}

/// Labels of every object of the installation.
pub(super) const COMMON_LABELS: [(&str, &str); 2] =
    [(label::MANAGED_BY, label::MANAGED_BY_SKR), (label::PART_OF, label::PART_OF_TIDEWATCH)];

fn binding(kind: &str) -> Value {
    json!({
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": AGENT_OBJECT},
        "subjects": [{"kind": "ServiceAccount", "name": AGENT_OBJECT, "namespace": SKR_NAMESPACE}],
    })
}

fn config_map(settings: &Settings, plan: &Plan, trust: &TrustBundle) -> Value {
    // A plan is plain data with string keys and always serializes.
    let plan = serde_json::to_string(plan).unwrap_or_default();
    json!({"data": {
        PLAN_KEY: plan, RECEIVER_URL_KEY: settings.receiver.to_string(), ENROLMENT_URL_KEY: settings.enrolment.to_string(),
        TRUST_BUNDLE_KEY: trust.to_pem(),
    }})
}

fn policy(mut spec: Value) -> Value {
    spec["podSelector"] = json!({"matchLabels": {label::APP: AGENT_DEPLOYMENT}});
    json!({ "spec": spec })
}

/// Policies apply to ports behind a Service, so these are the ports of the API server's endpoints. Addresses are not
/// restricted, because API servers and receivers move.
fn egress_ports(settings: &Settings) -> Vec<Value> {
    let receiver = [settings.receiver.port(), settings.enrolment.port()];
    let ports: BTreeSet<_> = settings.api_server_ports.iter().copied().chain(receiver).collect();
    ports.into_iter().map(|number| port("TCP", number)).collect()
}

fn egress(rules: Vec<Value>) -> Value {
    json!({"policyTypes": ["Egress"], "egress": rules})
}

/// Allows DNS queries on port 53 of any address, and on port 8053, on which pods of the cluster DNS may listen.
fn dns() -> Vec<Value> {
    let cluster = json!({
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchExpressions": [{"key": "k8s-app", "operator": "In", "values": ["kube-dns", "node-local-dns"]}]},
    });
    vec![
        json!({"ports": [port("UDP", 53), port("TCP", 53)]}),
        json!({"to": [cluster], "ports": [port("UDP", 8053), port("TCP", 8053)]}),
    ]
}

fn port(protocol: &str, port: u16) -> Value {
    json!({"protocol": protocol, "port": port})
}

fn service() -> Value {
    json!({"spec": {
        "type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
        "selector": {label::APP: AGENT_DEPLOYMENT},
        "ports": [{"name": METRICS_PORT_NAME, "protocol": "TCP", "port": METRICS_PORT, "targetPort": METRICS_PORT}],
    }})
}

fn deployment(settings: &Settings) -> Value {
    // Recreate stops the old agent before the new one starts: two agents would send every event twice.
    json!({"spec": {
        "replicas": 1, "revisionHistoryLimit": 1, "progressDeadlineSeconds": 600, "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {label::APP: AGENT_DEPLOYMENT}},
        "template": {
            "metadata": {"labels": {
                label::APP: AGENT_DEPLOYMENT, label::PART_OF: label::PART_OF_TIDEWATCH,
                "sidecar.istio.io/inject": "false",
            }},
            "spec": pod(settings),
        },
    }})
}

fn pod(settings: &Settings) -> Value {
    let mut pod = json!({
        "serviceAccountName": AGENT_OBJECT, "serviceAccount": AGENT_OBJECT, "automountServiceAccountToken": false,
        "enableServiceLinks": false, "priorityClassName": AGENT_PRIORITY_CLASS,
        "dnsPolicy": "ClusterFirst", "restartPolicy": "Always", "schedulerName": "default-scheduler",
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": GROUP, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container(settings)],
        "volumes": [service_account_volume(), enrolment_token_volume(&settings.trust_domain)],
    });
    if let Some(pull_secret) = &settings.pull_secret {
        pod["imagePullSecrets"] = json!([{ "name": pull_secret.name_in_runtime() }]);
    }
    pod
}

fn container(settings: &Settings) -> Value {
    json!({
        "name": AGENT_CONTAINER, "image": settings.image, "imagePullPolicy": "IfNotPresent",
        "args": [
            format!("--service-account-dir={SERVICE_ACCOUNT_DIR}"),
            format!("--token-file={ENROLMENT_TOKEN_DIR}/token"),
            format!("--namespace={SKR_NAMESPACE}"),
            format!("--metrics-address=[::]:{METRICS_PORT}"),
            format!("--trust-domain={}", settings.trust_domain),
        ],
        "ports": [{"name": METRICS_PORT_NAME, "containerPort": METRICS_PORT, "protocol": "TCP"}],
        "resources": {
            "requests": {"cpu": "5m", "memory": "10Mi"}, "limits": {"memory": settings.memory.to_string()},
        },
        "securityContext": {
            "allowPrivilegeEscalation": false, "privileged": false, "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"]},
        },
        "livenessProbe": probe("/healthz", 6), "readinessProbe": probe("/readyz", 3),
        "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "account", "mountPath": SERVICE_ACCOUNT_DIR, "readOnly": true},
            {"name": "token", "mountPath": ENROLMENT_TOKEN_DIR, "readOnly": true},
        ],
    })
}

fn probe(path: &str, failures: u32) -> Value {
    json!({
        "httpGet": {"path": path, "port": METRICS_PORT_NAME, "scheme": "HTTP"},
        "periodSeconds": 10, "timeoutSeconds": 5, "successThreshold": 1, "failureThreshold": failures,
    })
}

/// Service account as Kubernetes would mount it, declared here because automounting is off.
fn service_account_volume() -> Value {
    json!({"name": "account", "projected": {"defaultMode": 420, "sources": [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": SERVICE_ACCOUNT_TOKEN_SECONDS}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [
            {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}},
        ]}},
    ]}})
}

/// Token by which the receiver identifies an enrolling agent.
fn enrolment_token_volume(domain: &TrustDomain) -> Value {
    json!({"name": "token", "projected": {"defaultMode": 420, "sources": [
        {"serviceAccountToken": {"path": "token", "audience": domain.token_audience(), "expirationSeconds": ENROLMENT_TOKEN_SECONDS}},
    ]}})
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use tidewatch_trust::{CA_VALIDITY, Ca};

    use crate::{AgentPullSecret, desired::tests::settings, watcher, watches};

    fn all_objects(settings: &Settings) -> Vec<(Component, Value)> {
        let (plan, ..) = watcher::plan::<Arc<tidewatch_api::Watcher>>(watches(), &[]);
        let pull_secret = settings.own_pull_secret().map(|_| json!({"type": "t", "data": {"k": "v"}}));
        objects(
            settings,
            &plan,
            &Ca::generate("a", 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle(),
            pull_secret.as_ref(),
        )
    }

    fn object_of(settings: &Settings, component: Component) -> Value {
        all_objects(settings).into_iter().find(|(is, _)| *is == component).unwrap().1
    }

    #[test]
    fn every_object_has_its_labels_name_and_namespace() {
        for (component, object) in all_objects(&settings()) {
            assert_eq!(object["metadata"]["labels"]["operator.kyma-project.io/managed-by"], "kyma", "{component:?}");
            assert_eq!(object["metadata"]["name"], component.name());
            assert_eq!(object["metadata"]["namespace"].is_string(), component.kind().namespaced, "{component:?}");
        }
        let components: Vec<_> = all_objects(&settings()).into_iter().map(|(component, _)| component).collect();
        assert_eq!(
            components,
            Component::VARIANTS[2..],
            "in order, no webhook configuration, and nothing to pull with"
        );
        let compat = Settings { compat_webhooks: true, ..settings() };
        assert!(object_of(&compat, Component::Webhooks)["webhooks"].is_null());
    }

    #[test]
    fn pull_secret_is_referenced_where_configured() {
        let with = |pull_secret| Settings { pull_secret: Some(pull_secret), ..settings() };
        let named = |settings: &Settings| {
            let pod = object_of(settings, Component::Deployment)["spec"]["template"]["spec"].take();
            pod["imagePullSecrets"].clone()
        };
        let own = with(AgentPullSecret::Own("pull".into()));
        assert_eq!(named(&own), json!([{"name": "tidewatch-agent-pull"}]));
        let secret = object_of(&own, Component::PullSecret);
        assert_eq!((&secret["type"], &secret["data"]), (&json!("t"), &json!({"k": "v"})));
        let of_modules = with(AgentPullSecret::OfModules("pull".into()));
        assert_eq!(named(&of_modules), json!([{"name": "pull"}]), "the Secret itself, as lifecycle-manager has it");
        assert!(all_objects(&of_modules).iter().all(|(component, _)| *component != Component::PullSecret), "no copy");
    }

    #[test]
    fn deployment_has_exactly_this_content() {
        let labels = json!({"app": "skr-webhook"});
        let marked = json!({
            "app": "skr-webhook", "app.kubernetes.io/part-of": "tidewatch", "operator.kyma-project.io/managed-by": "kyma",
        });
        let of_pod =
            json!({"app": "skr-webhook", "app.kubernetes.io/part-of": "tidewatch", "sidecar.istio.io/inject": "false"});
        let probe = |path: &str, failures: u32| {
            json!({"httpGet": {"path": path, "port": "http-metrics", "scheme": "HTTP"}, "periodSeconds": 10,
                "timeoutSeconds": 5, "successThreshold": 1, "failureThreshold": failures})
        };
        let container = json!({
            "name": "server", "image": "example.test/tidewatch-agent:1", "imagePullPolicy": "IfNotPresent",
            "args": [
                "--service-account-dir=/var/run/secrets/kubernetes.io/serviceaccount",
                "--token-file=/var/run/secrets/tidewatch/token",
                "--namespace=kyma-system",
                "--metrics-address=[::]:2112",
                "--trust-domain=kyma.local",
            ],
            "ports": [{"name": "http-metrics", "containerPort": 2112, "protocol": "TCP"}],
            "resources": {"requests": {"cpu": "5m", "memory": "10Mi"}, "limits": {"memory": "64Mi"}},
            "securityContext": {"allowPrivilegeEscalation": false, "privileged": false, "readOnlyRootFilesystem": true,
                "capabilities": {"drop": ["ALL"]}},
            "livenessProbe": probe("/healthz", 6), "readinessProbe": probe("/readyz", 3),
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "account", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true},
                {"name": "token", "mountPath": "/var/run/secrets/tidewatch", "readOnly": true},
            ],
        });
        let account = json!({"name": "account", "projected": {"defaultMode": 420, "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [
                {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}},
        ]}});
        let token = json!({"name": "token", "projected": {"defaultMode": 420, "sources": [
            {"serviceAccountToken": {"path": "token", "audience": "spiffe://kyma.local/tidewatch", "expirationSeconds": 3600}},
        ]}});
        let pod = json!({
            "serviceAccountName": "tidewatch-agent", "serviceAccount": "tidewatch-agent",
            "automountServiceAccountToken": false, "enableServiceLinks": false,
            "priorityClassName": "skr-webhook-priority", "dnsPolicy": "ClusterFirst", "restartPolicy": "Always",
            "schedulerName": "default-scheduler", "terminationGracePeriodSeconds": 30,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 10001, "runAsGroup": 30001,
                "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container], "volumes": [account, token],
        });
        assert_eq!(
            object_of(&settings(), Component::Deployment),
            json!({
                "apiVersion": "apps/v1", "kind": "Deployment",
                "metadata": {"name": "skr-webhook", "namespace": "kyma-system", "labels": marked},
                "spec": {
                    "replicas": 1, "revisionHistoryLimit": 1, "progressDeadlineSeconds": 600,
                    "strategy": {"type": "Recreate"}, "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": of_pod}, "spec": pod},
                },
            })
        );
    }

    #[test]
    fn dns_policy_allows_the_ports_of_cluster_dns() {
        let ports = |number: u16| json!([{"protocol": "UDP", "port": number}, {"protocol": "TCP", "port": number}]);
        let dns = json!({
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchExpressions": [
                {"key": "k8s-app", "operator": "In", "values": ["kube-dns", "node-local-dns"]}]},
        });
        assert_eq!(
            object_of(&settings(), Component::DnsPolicy)["spec"],
            json!({
                "policyTypes": ["Egress"], "podSelector": {"matchLabels": {"app": "skr-webhook"}},
                "egress": [{"ports": ports(53)}, {"to": [dns], "ports": ports(8053)}],
            })
        );
    }

    #[test]
    fn policies_allow_required_egress_and_only_metrics_ingress() {
        let policy = |component| object_of(&settings(), component)["spec"].clone();
        // Pods that a policy of a direction selects are isolated in it. None of the policies is without rules: clusters may
        // refuse such policies.
        let types = [Component::ApiServerPolicy, Component::MetricsPolicy]
            .map(|component| policy(component)["policyTypes"].clone());
        assert_eq!(types, [json!(["Egress"]), json!(["Ingress"])]);
        for (component, object) in
            all_objects(&settings()).iter().filter(|(_, object)| object["kind"] == "NetworkPolicy")
        {
            let rules = [&object["spec"]["ingress"], &object["spec"]["egress"]]
                .map(|rules| rules.as_array().map_or(0, Vec::len));
            assert!(rules.iter().sum::<usize>() > 0, "{component:?}");
        }
        // The policy that isolates the egress allows all of it.
        let rules = |component| policy(component)["egress"].as_array().unwrap().clone();
        let dns = rules(Component::DnsPolicy);
        assert!(dns.iter().all(|rule| rules(Component::ApiServerPolicy).contains(rule)));
        let ports: Vec<_> = policy(Component::ApiServerPolicy)["egress"][0]["ports"]
            .as_array()
            .unwrap()
            .iter()
            .map(|port| port["port"].clone())
            .collect();
        assert_eq!(ports, [443, 6443, 8443, 8444]);
        assert_eq!(
            policy(Component::MetricsPolicy)["ingress"],
            json!([{"ports": [{"protocol": "TCP", "port": 2112}]}])
        );
        for component in [Component::ApiServerPolicy, Component::DnsPolicy, Component::MetricsPolicy] {
            assert_eq!(policy(component)["podSelector"], json!({"matchLabels": {"app": "skr-webhook"}}));
        }
    }
}
