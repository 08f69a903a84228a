//! The parts of an installation: which objects there are, and where.

use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
};
use tidewatch_shared::names::{
    AGENT_DEPLOYMENT, AGENT_METRICS_SERVICE, AGENT_OBJECT, AGENT_PRIORITY_CLASS, AGENT_PULL_SECRET, IDENTITY_SECRET,
    SKR_NAMESPACE,
};

/// One object of an installation. The order is that in which they are made: rights before the plan that needs them, the Deployment when
/// all that its pod needs is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The incumbent's webhook configuration, empty, where it is wanted.
    Webhooks,
    /// What its image is pulled with, where that needs something.
    PullSecret,
    /// The agent's account.
    Account,
    /// What it may read in the whole cluster.
    ClusterRole,
    /// That it may.
    ClusterRoleBinding,
    /// What it may do in its namespace.
    Role,
    /// That it may.
    RoleBinding,
    /// Its canary. Made here, since create cannot be limited by name; then it is the agent's.
    Lease,
    /// Its identity. Made here, then the agent's.
    Secret,
    /// What it is told.
    ConfigMap,
    /// Its pod's priority.
    PriorityClass,
    /// Egress to the API server and to the receiver.
    ApiServerPolicy,
    /// Egress for names.
    DnsPolicy,
    /// Ingress of metrics.
    MetricsPolicy,
    /// That nothing else may reach its pod, nor be reached by it.
    DenyAll,
    /// Where metrics are found.
    MetricsService,
    /// The agent itself.
    Deployment,
}

/// Where objects of one kind are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) group: &'static str,
    pub(super) version: &'static str,
    pub(super) kind: &'static str,
    pub(super) plural: &'static str,
    pub(super) namespaced: bool,
}

const fn kind(
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
    namespaced: bool,
) -> Kind {
    Kind { group, version, kind, plural, namespaced }
}

pub(super) const WEBHOOKS: Kind = kind(
    "admissionregistration.k8s.io",
    "v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    false,
);
pub(super) const SERVICES: Kind = kind("", "v1", "Service", "services", true);
pub(super) const POLICIES: Kind = kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", true);
pub(super) const SECRETS: Kind = kind("", "v1", "Secret", "secrets", true);
pub(super) const PODS: Kind = kind("", "v1", "Pod", "pods", true);

impl Kind {
    pub(super) fn api_version(self) -> String {
        if self.group.is_empty() { self.version.to_owned() } else { format!("{}/{}", self.group, self.version) }
    }

    pub(super) fn api(self, client: &Client) -> Api<DynamicObject> {
        let resource = ApiResource {
            group: self.group.to_owned(),
            version: self.version.to_owned(),
            api_version: self.api_version(),
            kind: self.kind.to_owned(),
            plural: self.plural.to_owned(),
        };
        if self.namespaced {
            Api::namespaced_with(client.clone(), SKR_NAMESPACE, &resource)
        } else {
            Api::all_with(client.clone(), &resource)
        }
    }
}

impl Part {
    /// All of them, in order.
    pub const ALL: [Self; 17] = [
        Self::Webhooks,
        Self::PullSecret,
        Self::Account,
        Self::ClusterRole,
        Self::ClusterRoleBinding,
        Self::Role,
        Self::RoleBinding,
        Self::Lease,
        Self::Secret,
        Self::ConfigMap,
        Self::PriorityClass,
        Self::ApiServerPolicy,
        Self::DnsPolicy,
        Self::MetricsPolicy,
        Self::DenyAll,
        Self::MetricsService,
        Self::Deployment,
    ];

    /// Which object of a runtime this is, if it is one.
    #[must_use]
    pub fn of(plural: &str, name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|part| part.kind().plural == plural && part.name() == name)
    }

    /// The object's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Webhooks | Self::Deployment => AGENT_DEPLOYMENT,
            Self::Account
            | Self::ClusterRole
            | Self::ClusterRoleBinding
            | Self::Role
            | Self::RoleBinding
            | Self::Lease
            | Self::ConfigMap => AGENT_OBJECT,
            Self::Secret => IDENTITY_SECRET,
            Self::PullSecret => AGENT_PULL_SECRET,
            Self::PriorityClass => AGENT_PRIORITY_CLASS,
            Self::DenyAll => "kyma-project.io--watcher-deny-all",
            Self::ApiServerPolicy => "kyma-project.io--watcher-to-apiserver",
            Self::DnsPolicy => "kyma-project.io--watcher-to-dns",
            Self::MetricsPolicy => "kyma-project.io--metrics-to-watcher",
            Self::MetricsService => AGENT_METRICS_SERVICE,
        }
    }

    /// Its kind, as logs and metrics name it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.kind().kind
    }

    pub(super) const fn kind(self) -> Kind {
        const RBAC: &str = "rbac.authorization.k8s.io";
        match self {
            Self::Webhooks => WEBHOOKS,
            Self::Account => kind("", "v1", "ServiceAccount", "serviceaccounts", true),
            Self::ClusterRole => kind(RBAC, "v1", "ClusterRole", "clusterroles", false),
            Self::ClusterRoleBinding => kind(RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", false),
            Self::Role => kind(RBAC, "v1", "Role", "roles", true),
            Self::RoleBinding => kind(RBAC, "v1", "RoleBinding", "rolebindings", true),
            Self::Lease => kind("coordination.k8s.io", "v1", "Lease", "leases", true),
            Self::Secret | Self::PullSecret => SECRETS,
            Self::ConfigMap => kind("", "v1", "ConfigMap", "configmaps", true),
            Self::PriorityClass => kind("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", false),
            Self::DenyAll | Self::ApiServerPolicy | Self::DnsPolicy | Self::MetricsPolicy => POLICIES,
            Self::MetricsService => SERVICES,
            Self::Deployment => kind("apps", "v1", "Deployment", "deployments", true),
        }
    }

    /// Whether only its marks are ours: what is in it is the agent's, and in the Secret a key that nobody else reads.
    pub(super) const fn is_agents(self) -> bool {
        matches!(self, Self::Lease | Self::Secret)
    }

    /// Whether the agent's plan may name it: no plan has Secrets, nor what the agent itself keeps.
    pub(super) const fn is_watched(self) -> bool {
        !matches!(self, Self::Lease | Self::Secret | Self::PullSecret | Self::Webhooks)
    }

    pub(super) const fn index(self) -> usize {
        self as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_in_order_and_each_is_one_object() {
        for (at, part) in Part::ALL.into_iter().enumerate() {
            assert_eq!(part.index(), at);
            assert_eq!(Part::of(part.kind().plural, part.name()), Some(part));
        }
        assert!(Part::ALL.is_sorted());
        assert_eq!(Part::of("deployments", "mine"), None);
    }
}
