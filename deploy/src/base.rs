//! The installation of the receiver in KCP as a kustomize base. Deployments adapt the ConfigMap of settings and the
//! images.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use k8s_openapi::api::{coordination::v1::Lease, rbac::v1::PolicyRule};
use serde_json::{Value, json};
use tidewatch_api::names::KCP_NAMESPACE;
use tidewatch_receiver::rights;
use tidewatch_trust::CA_SECRET;

use crate::{
    alerts,
    render::{self, File, kustomization, object},
};

/// Name of all objects of the installation.
const NAME: &str = "tidewatch-receiver";
/// Placeholder for the host name of the receiver.
const HOST: &str = "tidewatch.example.com";
/// Labels of all objects of the installation.
const LABELS: [(&str, &str); 2] = [("app.kubernetes.io/name", NAME), ("app.kubernetes.io/part-of", "tidewatch")];
/// Namespace of the CA in the overlay that separates it.
const CA_NAMESPACE: &str = "tidewatch-ca";
/// Secret of the receiver's certificate, if cert-manager issues it, and its mount path.
const SERVER_SECRET: &str = "tidewatch-receiver-tls";
const SERVER_DIR: &str = "/etc/tidewatch/server";
/// Mount path of the folder for content of the registry, which may be lost at any time.
const CONTENT_DIR: &str = "/var/cache/tidewatch";
/// Optional ConfigMap with the maintenance windows, and its mount path, where the receiver looks for `policy.json` by default.
const WINDOWS: &str = "tidewatch-maintenance-windows";
const WINDOWS_DIR: &str = "/etc/maintenance-policy";
/// User and group `nonroot` of the distroless images.
const NONROOT: u32 = 65_532;
/// Default ports of the receiver's flags.
const EVENTS: u16 = 8443;
const ENROLMENT: u16 = 8444;
const METRICS: u16 = 8080;
/// Port of the probes alone.
const PROBES: u16 = 8081;
/// Port of the requests that another replica accepted, open to the pods of the installation alone.
const RELAY: u16 = 8445;
/// Replicas, all of which are active. Two of them serve all runtimes while the third one is replaced.
const REPLICAS: u8 = 3;
/// Ports of the Services of Kyma's other managers: infrastructure-manager and cloud-manager.
const MANAGER_PORTS: [u16; 2] = [8082, 8083];
/// Label of the namespaces whose pods may read the metrics, by the convention of Kubebuilder.
const METRICS_LABEL: (&str, &str) = ("metrics", "enabled");

/// Renders the files of `deploy/base`.
///
/// # Errors
/// An object cannot be serialized.
pub fn base() -> Result<Vec<File>> {
    let [role, role_binding] = role(NAME, rights::rules());
    let objects = [
        ("settings", settings()),
        ("casecret", ca_secret(KCP_NAMESPACE)),
        ("serviceaccount", named("v1", "ServiceAccount", json!({}))),
        ("role", role),
        ("rolebinding", role_binding),
        ("deployment", deployment()),
        ("poddisruptionbudget", pod_disruption_budget()),
        ("service", service()),
        ("networkpolicy", network_policy()),
        ("podmonitor", pod_monitor()),
        ("prometheusrule", named("monitoring.coreos.com/v1", "PrometheusRule", json!({"spec": alerts::rules()}))),
    ];
    let mut files = objects.iter().map(|(name, value)| object(name, value)).collect::<Result<Vec<_>>>()?;
    files.push(render::objects("leases", &leases()?)?);
    let mut resources = vec!["../crds".to_owned()];
    resources.extend(files.iter().map(|file| file.name.clone()));
    let mut kustomization = kustomization(&resources);
    kustomization["namespace"] = json!(KCP_NAMESPACE);
    kustomization["images"] = json!([{"name": NAME, "newName": NAME, "newTag": env!("CARGO_PKG_VERSION")}]);
    files.push(object("kustomization", &kustomization)?);
    Ok(files)
}

/// Renders the files of `deploy/overlays/cert-manager`: the Issuer `tidewatch`, provided by the operator, issues the
/// certificates of the agents and of the receiver; its roots are the `ca.crt` of the receiver's Secret.
///
/// # Errors
/// An object cannot be serialized.
pub fn cert_manager() -> Result<Vec<File>> {
    let [role, role_binding] = role(&format!("{NAME}-cert-manager"), rights::cert_manager_rules());
    let file = |name: &str| format!("{SERVER_DIR}/{name}");
    let settings = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": {
        "TIDEWATCH_ISSUER": "cert-manager:Issuer/tidewatch",
        "TIDEWATCH_ISSUER_CA": file("ca.crt"),
        "TIDEWATCH_SERVER_CA": file("ca.crt"),
        "TIDEWATCH_TLS_CERT": file("tls.crt"),
        "TIDEWATCH_TLS_KEY": file("tls.key"),
    }});
    let pod = json!({
        "containers": [{"name": "receiver", "volumeMounts": [{"name": "server", "mountPath": SERVER_DIR, "readOnly": true}]}],
        "volumes": [{"name": "server", "secret": {"secretName": SERVER_SECRET}}],
    });
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME},
        "spec": {"template": {"spec": pod}}});
    let resources = [("certificate", certificate()), ("role", role), ("rolebinding", role_binding)];
    overlay(&resources, &[("settings", settings), ("deployment", deployment)], Some(KCP_NAMESPACE))
}

/// Renders the files of `deploy/overlays/ca-namespace`: the CA stands in a namespace of its own, apart from the access
/// Secrets.
///
/// # Errors
/// An object cannot be serialized.
pub fn ca_namespace() -> Result<Vec<File>> {
    let mut namespace = named("v1", "Namespace", json!({}));
    namespace["metadata"]["name"] = json!(CA_NAMESPACE);
    let [mut role, mut role_binding] = role(&format!("{NAME}-ca"), rights::ca_rules());
    for object in [&mut role, &mut role_binding] {
        object["metadata"]["namespace"] = json!(CA_NAMESPACE);
    }
    let settings = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME, "namespace": KCP_NAMESPACE},
        "data": {"TIDEWATCH_CA_NAMESPACE": CA_NAMESPACE}});
    let resources = [
        ("namespace", namespace),
        ("casecret", ca_secret(CA_NAMESPACE)),
        ("role", role),
        ("rolebinding", role_binding),
    ];
    overlay(&resources, &[("settings", settings)], None)
}

/// Renders the files of `deploy/overlays/istio`: a sidecar of Istio carries the requests to other managers, and nothing else, for
/// a mesh that demands mutual TLS of them.
///
/// # Errors
/// An object cannot be serialized.
pub fn istio() -> Result<Vec<File>> {
    let annotation = |name: &str| format!("traffic.sidecar.istio.io/{name}");
    let annotations = json!({
        // Agents, other replicas and the kubelet reach the receiver's own ports.
        annotation("includeInboundPorts"): "",
        // No address: runtimes, registries and API servers are reached directly.
        annotation("includeOutboundIPRanges"): "",
        // But these ports of any address.
        annotation("includeOutboundPorts"): MANAGER_PORTS.map(|port| port.to_string()).join(","),
        // The sidecar would answer the kubelet instead.
        "sidecar.istio.io/rewriteAppHTTPProbers": "false",
    });
    let metadata = json!({"labels": {"sidecar.istio.io/inject": "true"}, "annotations": annotations});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME},
        "spec": {"template": {"metadata": metadata}}});
    overlay(&[], &[("deployment", deployment)], Some(KCP_NAMESPACE))
}

/// An overlay of the base: further objects, changes of objects of the base, and the namespace of those that name none.
fn overlay(resources: &[(&str, Value)], patches: &[(&str, Value)], namespace: Option<&str>) -> Result<Vec<File>> {
    let file = |(name, _): &(&str, Value)| format!("{name}.yaml");
    let names: Vec<_> = [String::from("../../base")].into_iter().chain(resources.iter().map(file)).collect();
    let mut kustomization = kustomization(&names);
    if let Some(namespace) = namespace {
        kustomization["namespace"] = json!(namespace);
    }
    kustomization["patches"] = patches.iter().map(|patch| json!({"path": file(patch)})).collect();
    let kustomization = ("kustomization", kustomization);
    resources.iter().chain(patches).chain([&kustomization]).map(|(name, value)| object(name, value)).collect()
}

/// The empty Secret of the built-in CA, which the receiver fills: it has no right to create Secrets. Applying it again
/// does not touch the content.
fn ca_secret(namespace: &str) -> Value {
    let mut secret = named("v1", "Secret", json!({}));
    secret["metadata"]["name"] = json!(CA_SECRET);
    secret["metadata"]["namespace"] = json!(namespace);
    secret
}

/// The Leases of the receiver, without a holder: it has no right to create Leases. Applying them again changes no holder.
fn leases() -> Result<Vec<Value>> {
    let labelled = |mut lease: Lease| {
        let name = lease.metadata.name.clone().unwrap_or_default();
        lease.metadata.labels = Some(BTreeMap::from(LABELS.map(|(key, value)| (key.to_owned(), value.to_owned()))));
        serde_json::to_value(&lease).with_context(|| format!("cannot serialize the Lease {name}"))
    };
    rights::leases(KCP_NAMESPACE).map(labelled).collect()
}

/// The Certificate of the receiver, which reloads it after renewal without a restart.
fn certificate() -> Value {
    let spec = json!({
        "secretName": SERVER_SECRET,
        "issuerRef": {"group": "cert-manager.io", "kind": "Issuer", "name": "tidewatch"},
        "dnsNames": [HOST],
        "usages": ["server auth", "digital signature"],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "encoding": "PKCS8", "rotationPolicy": "Always"},
    });
    named("cert-manager.io/v1", "Certificate", json!({"spec": spec}))
}

fn named(version: &str, kind: &str, mut body: Value) -> Value {
    body["apiVersion"] = json!(version);
    body["kind"] = json!(kind);
    body["metadata"] = json!({"name": NAME, "labels": labels()});
    body
}

fn labels() -> Value {
    LABELS.into_iter().collect()
}

fn selector() -> Value {
    json!({"app.kubernetes.io/name": NAME})
}

/// A Role and its binding to the receiver's ServiceAccount, both of this name.
fn role(name: &str, rules: Vec<PolicyRule>) -> [Value; 2] {
    let binding = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": KCP_NAMESPACE}],
    });
    [("Role", json!({"rules": rules})), ("RoleBinding", binding)].map(|(kind, body)| {
        let mut object = named("rbac.authorization.k8s.io/v1", kind, body);
        object["metadata"]["name"] = json!(name);
        object
    })
}

/// The settings that are specific to a control plane, with placeholders for host names and networks.
fn settings() -> Value {
    let url = |port| format!("https://{HOST}:{port}");
    let data = json!({
        "TIDEWATCH_AUTHORITY": format!("{HOST}:{EVENTS}"),
        "TIDEWATCH_RECEIVER_URL": url(EVENTS),
        "TIDEWATCH_ENROLMENT_URL": url(ENROLMENT),
        "TIDEWATCH_AGENT_IMAGE": format!("registry.example.com/tidewatch-agent:{}", env!("CARGO_PKG_VERSION")),
        "TIDEWATCH_OCI_REGISTRY_HOST": "registry.example.com",
        // Networks of the control plane's nodes, pods and Services: a kubeconfig must not lead the receiver there.
        "TIDEWATCH_DENY_RUNTIME_ADDRESSES": "192.0.2.0/24,2001:db8::/32",
        // The Service preserves the source addresses of clients.
        "TIDEWATCH_ENROLMENT_LIMIT_BY_ADDRESS": "300",
    });
    named("v1", "ConfigMap", json!({"data": data}))
}

/// Replicas that are all active. One that stops hands its shards over; the next one stops when the new pod is ready, that
/// is, when its caches have synced and each shard has had a holder.
fn deployment() -> Value {
    let probe = |path: &str| json!({"httpGet": {"path": path, "port": "probes"}});
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let container = json!({
        "name": "receiver",
        "image": NAME,
        "envFrom": [{"configMapRef": {"name": NAME}}],
        "env": [
            field("TIDEWATCH_NAMESPACE", "metadata.namespace"),
            field("TIDEWATCH_LEASE_PLACE", "metadata.uid"),
            {"name": "TIDEWATCH_RELAY_ADDRESS", "value": format!("[::]:{RELAY}")},
            field("TIDEWATCH_RELAY_ADVERTISE", "status.podIP"),
            field("TIDEWATCH_REPLICA_NAME", "metadata.name"),
            {"name": "TIDEWATCH_PROBE_ADDRESS", "value": format!("[::]:{PROBES}")},
            {"name": "TIDEWATCH_OCI_CONTENT_DIR", "value": CONTENT_DIR},
        ],
        "volumeMounts": [
            {"name": "content", "mountPath": CONTENT_DIR},
            {"name": "windows", "mountPath": WINDOWS_DIR, "readOnly": true},
        ],
        "ports": [
            {"name": "events", "containerPort": EVENTS},
            {"name": "enrolment", "containerPort": ENROLMENT},
            {"name": "relay", "containerPort": RELAY},
            {"name": "metrics", "containerPort": METRICS},
            {"name": "probes", "containerPort": PROBES},
        ],
        "livenessProbe": probe("/healthz"),
        "readinessProbe": probe("/readyz"),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"]},
        },
    });
    let spread = ["kubernetes.io/hostname", "topology.kubernetes.io/zone"].map(|key| {
        json!({
            "maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector()},
        })
    });
    let pod = json!({
        "serviceAccountName": NAME,
        // Seconds for the hand-over of all shards, and for the end of reconciles and connections.
        "terminationGracePeriodSeconds": 60,
        "topologySpreadConstraints": spread,
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": NONROOT, "runAsGroup": NONROOT, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        // The receiver keeps its content store below half of this.
        "volumes": [
            {"name": "content", "emptyDir": {"sizeLimit": "1Gi"}},
            {"name": "windows", "configMap": {"name": WINDOWS, "optional": true}},
        ],
    });
    let spec = json!({
        "replicas": REPLICAS,
        // One replica at a time moves its shards.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
        "selector": {"matchLabels": selector()},
        "template": {"metadata": {"labels": labels()}, "spec": pod},
    });
    named("apps/v1", "Deployment", json!({"spec": spec}))
}

/// A drain of nodes stops one replica at a time, too.
fn pod_disruption_budget() -> Value {
    named(
        "policy/v1",
        "PodDisruptionBudget",
        json!({"spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector()}}}),
    )
}

fn service() -> Value {
    let port = |name: &str, number: u16| json!({"name": name, "port": number, "targetPort": name});
    let spec = json!({
        "type": "LoadBalancer",
        // Preserves the source addresses of agents, by which enrolment may be rate limited.
        "externalTrafficPolicy": "Local",
        "selector": selector(),
        "ports": [port("events", EVENTS), port("enrolment", ENROLMENT)],
    });
    named("v1", "Service", json!({"spec": spec}))
}

/// Ingress: agents from any address, relayed requests from the other replicas, metrics from pods of the namespaces with
/// [`METRICS_LABEL`]; the kubelet reaches the probes under any policy. Egress: DNS, and TCP to any address, because runtimes'
/// API servers have no fixed addresses.
fn network_policy() -> Value {
    let tcp = |port: u16| json!({"protocol": "TCP", "port": port});
    let dns = json!([{"protocol": "UDP", "port": 53}, {"protocol": "UDP", "port": 8053}]);
    let spec = json!({
        "podSelector": {"matchLabels": selector()},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"ports": [tcp(EVENTS), tcp(ENROLMENT)]},
            {"from": [{"podSelector": {"matchLabels": selector()}}], "ports": [tcp(RELAY)]},
            {"from": [{"namespaceSelector": {"matchLabels": {METRICS_LABEL.0: METRICS_LABEL.1}}}], "ports": [tcp(METRICS)]},
        ],
        "egress": [{"ports": dns}, {"ports": [{"protocol": "TCP"}]}],
    });
    named("networking.k8s.io/v1", "NetworkPolicy", json!({"spec": spec}))
}

fn pod_monitor() -> Value {
    let spec = json!({
        "selector": {"matchLabels": selector()},
        "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics"}],
    });
    named("monitoring.coreos.com/v1", "PodMonitor", json!({"spec": spec}))
}

#[cfg(test)]
mod tests;
