//! The content of every object. What API servers fill in by themselves is written out, so that what is read can be compared.

use serde_json::{Map, Value, json};
use tidewatch_shared::{
    names::{
        AGENT_CONTAINER, AGENT_DEPLOYMENT, AGENT_OBJECT, AGENT_PRIORITY_CLASS, AGENT_PULL_SECRET, ENROLMENT_URL_KEY,
        PLAN_KEY, RECEIVER_URL_KEY, SKR_NAMESPACE, TOKEN_AUDIENCE, TRUST_BUNDLE_KEY, label,
    },
    plan::Plan,
};

use super::{Part, Settings, rights};
use crate::pki::TrustBundle;

const RBAC: &str = "rbac.authorization.k8s.io";
/// The label that the Deployment, the Service and the policies select the pod by: the incumbent's.
const APP: &str = "app";
const METRICS_PORT: u16 = 2112;
/// Name of that port.
const METRICS: &str = "http-metrics";
/// User and group of the process: the incumbent's.
const USER: u32 = 10_001;
const GROUP: u32 = 30_001;
/// Where the account lies in every pod, which ours lays out itself.
const ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const TOKEN_DIR: &str = "/var/run/secrets/tidewatch";
/// Seconds of the token for the runtime's own API server; the kubelet renews it. Kubernetes' own default.
const ACCOUNT_SECONDS: u32 = 3_607;
/// Seconds of the token for enrolment.
const TOKEN_SECONDS: u32 = 3_600;

/// Every object, in order. The ConfigMap lacks the runtime's id, which is all that differs between runtimes of one plan.
/// `pulled` is type and data of the Secret that the image is pulled with.
pub(super) fn objects(
    settings: &Settings,
    plan: &Plan,
    trust: &TrustBundle,
    pulled: Option<&Value>,
) -> Vec<(Part, Value)> {
    let is_wanted = |part: &Part| match part {
        Part::Webhooks => settings.compat_webhooks,
        Part::PullSecret => pulled.is_some(),
        _ => true,
    };
    let made = |part| match pulled {
        Some(pulled) if part == Part::PullSecret => (part, named(part, pulled.clone())),
        _ => (part, object(part, settings, plan, trust)),
    };
    Part::ALL.into_iter().filter(is_wanted).map(made).collect()
}

fn object(part: Part, settings: &Settings, plan: &Plan, trust: &TrustBundle) -> Value {
    let body = match part {
        // The content of the second is not known here.
        Part::Webhooks | Part::PullSecret => json!({}),
        Part::Account => json!({"automountServiceAccountToken": false}),
        Part::ClusterRole => json!({"rules": rights::of_cluster(plan)}),
        Part::Role => json!({"rules": rights::of_namespace(plan)}),
        Part::ClusterRoleBinding => binding("ClusterRole"),
        Part::RoleBinding => binding("Role"),
        Part::Lease => json!({}),
        Part::Secret => json!({"type": "Opaque"}),
        Part::ConfigMap => config_map(settings, plan, trust),
        Part::PriorityClass => json!({
            "value": 1_000_000_000, "preemptionPolicy": "PreemptLowerPriority",
            "description": "For the agent that tells the Kyma control plane what changes in this cluster",
        }),
        Part::DenyAll => policy(json!({"policyTypes": ["Ingress", "Egress"]})),
        Part::ApiServerPolicy => policy(json!({"policyTypes": ["Egress"], "egress": [{"ports": egress(settings)}]})),
        Part::DnsPolicy => policy(names()),
        Part::MetricsPolicy => {
            policy(json!({"policyTypes": ["Ingress"], "ingress": [{"ports": [port("TCP", METRICS_PORT)]}]}))
        }
        Part::MetricsService => service(),
        Part::Deployment => deployment(settings),
    };
    named(part, body)
}

fn named(part: Part, mut object: Value) -> Value {
    let kind = part.kind();
    object["apiVersion"] = kind.api_version().into();
    object["kind"] = kind.kind.into();
    object["metadata"] = metadata(part);
    object
}

fn metadata(part: Part) -> Value {
    let mut labels = Map::new();
    for (key, value) in marks() {
        labels.insert(key.to_owned(), value.into());
    }
    if part == Part::Deployment || part == Part::MetricsService {
        labels.insert(APP.to_owned(), AGENT_DEPLOYMENT.into());
    }
    let mut metadata = json!({"name": part.name(), "labels": labels});
    if part.kind().namespaced {
        metadata["namespace"] = SKR_NAMESPACE.into();
    }
    metadata
}

/// Labels of everything that is installed.
pub(super) const fn marks() -> [(&'static str, &'static str); 2] {
    [(label::MANAGED_BY, label::MANAGED_BY_SKR), (label::PART_OF, label::PART_OF_TIDEWATCH)]
}

/// Selects the agent's pod, in the API's query syntax.
pub(super) fn pod_selector() -> String {
    format!("{APP}={AGENT_DEPLOYMENT}")
}

fn binding(kind: &str) -> Value {
    json!({
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": AGENT_OBJECT},
        "subjects": [{"kind": "ServiceAccount", "name": AGENT_OBJECT, "namespace": SKR_NAMESPACE}],
    })
}

fn config_map(settings: &Settings, plan: &Plan, trust: &TrustBundle) -> Value {
    // A plan is plain data with string keys: it always has a JSON form.
    let plan = serde_json::to_string(plan).unwrap_or_default();
    json!({"data": {
        PLAN_KEY: plan, RECEIVER_URL_KEY: settings.receiver.to_string(), ENROLMENT_URL_KEY: settings.enrolment.to_string(),
        TRUST_BUNDLE_KEY: trust.to_pem(),
    }})
}

fn policy(mut spec: Value) -> Value {
    spec["podSelector"] = json!({"matchLabels": {APP: AGENT_DEPLOYMENT}});
    json!({ "spec": spec })
}

/// Policies see ports behind a Service, so the API server's are what its endpoints have. Addresses are not limited: API servers and
/// receivers move.
fn egress(settings: &Settings) -> Vec<Value> {
    let mut ports = settings.api_server_ports.clone();
    ports.extend([settings.receiver.port(), settings.enrolment.port()]);
    ports.sort_unstable();
    ports.dedup();
    ports.into_iter().map(|number| port("TCP", number)).collect()
}

/// Names are asked for on port 53 of anything; behind it, cluster DNS may listen on 8053.
fn names() -> Value {
    let cluster = json!({
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchExpressions": [{"key": "k8s-app", "operator": "In", "values": ["kube-dns", "node-local-dns"]}]},
    });
    json!({"policyTypes": ["Egress"], "egress": [
        {"ports": [port("UDP", 53), port("TCP", 53)]},
        {"to": [cluster], "ports": [port("UDP", 8053), port("TCP", 8053)]},
    ]})
}

fn port(protocol: &str, port: u16) -> Value {
    json!({"protocol": protocol, "port": port})
}

fn service() -> Value {
    json!({"spec": {
        "type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
        "selector": {APP: AGENT_DEPLOYMENT},
        "ports": [{"name": METRICS, "protocol": "TCP", "port": METRICS_PORT, "targetPort": METRICS_PORT}],
    }})
}

fn deployment(settings: &Settings) -> Value {
    // Two agents would tell everything twice: the old one goes before the new one comes.
    json!({"spec": {
        "replicas": 1, "revisionHistoryLimit": 1, "progressDeadlineSeconds": 600, "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {APP: AGENT_DEPLOYMENT}},
        "template": {
            "metadata": {"labels": {
                APP: AGENT_DEPLOYMENT, label::PART_OF: label::PART_OF_TIDEWATCH, "sidecar.istio.io/inject": "false",
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
        "volumes": [account(), token()],
    });
    if settings.pull_secret.is_some() {
        pod["imagePullSecrets"] = json!([{ "name": AGENT_PULL_SECRET }]);
    }
    pod
}

fn container(settings: &Settings) -> Value {
    json!({
        "name": AGENT_CONTAINER, "image": settings.image, "imagePullPolicy": "IfNotPresent",
        "args": [
            format!("--service-account-dir={ACCOUNT_DIR}"),
            format!("--token-file={TOKEN_DIR}/token"),
            format!("--namespace={SKR_NAMESPACE}"),
            format!("--metrics-address=0.0.0.0:{METRICS_PORT}"),
            format!("--trust-domain={}", settings.trust_domain),
        ],
        "ports": [{"name": METRICS, "containerPort": METRICS_PORT, "protocol": "TCP"}],
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
            {"name": "account", "mountPath": ACCOUNT_DIR, "readOnly": true},
            {"name": "token", "mountPath": TOKEN_DIR, "readOnly": true},
        ],
    })
}

fn probe(path: &str, failures: u32) -> Value {
    json!({
        "httpGet": {"path": path, "port": METRICS, "scheme": "HTTP"},
        "periodSeconds": 10, "timeoutSeconds": 5, "successThreshold": 1, "failureThreshold": failures,
    })
}

/// What a pod has of its account anyway, laid out here because it is not mounted by itself.
fn account() -> Value {
    json!({"name": "account", "projected": {"defaultMode": 420, "sources": [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": ACCOUNT_SECONDS}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [
            {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}},
        ]}},
    ]}})
}

/// What proves to the receiver who enrols; no API server takes it.
fn token() -> Value {
    json!({"name": "token", "projected": {"defaultMode": 420, "sources": [
        {"serviceAccountToken": {"path": "token", "audience": TOKEN_AUDIENCE, "expirationSeconds": TOKEN_SECONDS}},
    ]}})
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        controllers::{
            installer::{kit::tests::settings, watches},
            watcher,
        },
        pki::{CA_VALIDITY, Ca},
    };

    fn all(settings: &Settings) -> Vec<(Part, Value)> {
        let (plan, _) = watcher::plan_with::<Arc<tidewatch_shared::api::Watcher>>(watches(), &[]);
        let pulled = settings.pull_secret.is_some().then(|| json!({"type": "t", "data": {"k": "v"}}));
        objects(
            settings,
            &plan,
            &Ca::generate("a", 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle(),
            pulled.as_ref(),
        )
    }

    fn one(settings: &Settings, part: Part) -> Value {
        all(settings).into_iter().find(|(is, _)| *is == part).unwrap().1
    }

    #[test]
    fn every_object_is_marked_and_in_its_place() {
        for (part, object) in all(&settings()) {
            assert_eq!(object["metadata"]["labels"]["operator.kyma-project.io/managed-by"], "kyma", "{part:?}");
            assert_eq!(object["metadata"]["name"], part.name());
            assert_eq!(object["metadata"]["namespace"].is_string(), part.kind().namespaced, "{part:?}");
        }
        let parts: Vec<_> = all(&settings()).into_iter().map(|(part, _)| part).collect();
        assert_eq!(parts, Part::ALL[2..], "in order, no webhook configuration, and nothing to pull with");
        let compat = Settings { compat_webhooks: true, ..settings() };
        assert!(one(&compat, Part::Webhooks)["webhooks"].is_null());
    }

    #[test]
    fn a_pull_secret_is_named_where_the_image_needs_one() {
        let pulled = Settings { pull_secret: Some("pull".into()), ..settings() };
        assert_eq!(
            one(&pulled, Part::Deployment)["spec"]["template"]["spec"]["imagePullSecrets"],
            json!([{"name": "tidewatch-agent-pull"}])
        );
        let secret = one(&pulled, Part::PullSecret);
        assert_eq!((&secret["type"], &secret["data"]), (&json!("t"), &json!({"k": "v"})));
    }

    #[test]
    fn the_deployment_is_this_and_nothing_else() {
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
                "--metrics-address=0.0.0.0:2112",
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
            {"serviceAccountToken": {"path": "token", "audience": "tidewatch", "expirationSeconds": 3600}},
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
            one(&settings(), Part::Deployment),
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
    fn names_are_asked_for_where_cluster_dns_listens() {
        let ports = |number: u16| json!([{"protocol": "UDP", "port": number}, {"protocol": "TCP", "port": number}]);
        let dns = json!({
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchExpressions": [
                {"key": "k8s-app", "operator": "In", "values": ["kube-dns", "node-local-dns"]}]},
        });
        assert_eq!(
            one(&settings(), Part::DnsPolicy)["spec"],
            json!({
                "policyTypes": ["Egress"], "podSelector": {"matchLabels": {"app": "skr-webhook"}},
                "egress": [{"ports": ports(53)}, {"to": [dns], "ports": ports(8053)}],
            })
        );
    }

    #[test]
    fn the_agent_reaches_what_it_needs_and_only_metrics_reach_it() {
        let policy = |part| one(&settings(), part)["spec"].clone();
        let deny = policy(Part::DenyAll);
        assert_eq!(deny["policyTypes"], json!(["Ingress", "Egress"]));
        assert!(deny["ingress"].is_null() && deny["egress"].is_null());
        let ports: Vec<_> = policy(Part::ApiServerPolicy)["egress"][0]["ports"]
            .as_array()
            .unwrap()
            .iter()
            .map(|port| port["port"].clone())
            .collect();
        assert_eq!(ports, [443, 6443, 8443, 8444]);
        assert_eq!(policy(Part::MetricsPolicy)["ingress"], json!([{"ports": [{"protocol": "TCP", "port": 2112}]}]));
        for part in [Part::DenyAll, Part::ApiServerPolicy, Part::DnsPolicy, Part::MetricsPolicy] {
            assert_eq!(policy(part)["podSelector"], json!({"matchLabels": {"app": "skr-webhook"}}));
        }
    }
}
