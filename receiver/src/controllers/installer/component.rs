//! Components of an installation: the objects and their API resources.

use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
};
use tidewatch_shared::names::{
    AGENT_DEPLOYMENT, AGENT_METRICS_SERVICE, AGENT_OBJECT, AGENT_PRIORITY_CLASS, AGENT_PULL_SECRET, IDENTITY_SECRET,
    SKR_NAMESPACE,
};

/// One object of an installation. The order is the order of creation: rights before the plan that needs them, and the
/// Deployment after everything that its pod needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// The incumbent's webhook configuration, empty, where it is requested.
    Webhooks,
    /// Copy of the image pull secret, where one is configured.
    PullSecret,
    /// ServiceAccount of the agent.
    Account,
    /// Rights to read in the whole cluster.
    ClusterRole,
    /// Binding of [`Self::ClusterRole`].
    ClusterRoleBinding,
    /// Rights in the agent's namespace.
    Role,
    /// Binding of [`Self::Role`].
    RoleBinding,
    /// Canary of the agent. The receiver creates it, since RBAC cannot limit `create` by name; the agent updates it.
    Lease,
    /// Identity of the agent. The receiver creates it, the agent updates it.
    Secret,
    /// Plan, addresses and roots for the agent.
    ConfigMap,
    /// Priority of the agent's pod.
    PriorityClass,
    /// Egress to the API server and to the receiver.
    ApiServerPolicy,
    /// Egress to DNS.
    DnsPolicy,
    /// Ingress to the metrics port.
    MetricsPolicy,
    /// Denies all other traffic from and to the pod.
    DenyAll,
    /// Service of the metrics port.
    MetricsService,
    /// Deployment of the agent.
    Deployment,
}

/// API resource of a kind.
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

impl Component {
    /// All components in order of creation.
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

    /// Finds the component with this resource and name.
    #[must_use]
    pub fn of(plural: &str, name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|component| component.kind().plural == plural && component.name() == name)
    }

    /// Name of the object.
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

    /// Kind of the object, as in logs and metrics.
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

    /// Components that must not have failed before this one is reconciled.
    ///
    /// * Deleting the incumbent's webhook configuration comes first: the other objects disable its webhook, and users'
    ///   writes would then wait for a webhook that does not answer.
    /// * Traffic is denied only once the policies that allow the agent's own exist.
    /// * A plan must not name a kind that the agent may not read yet.
    pub(super) const fn dependencies(self) -> &'static [Self] {
        match self {
            Self::Secret | Self::Deployment | Self::ApiServerPolicy | Self::DnsPolicy | Self::MetricsPolicy => {
                &[Self::Webhooks]
            }
            Self::DenyAll => &[Self::Webhooks, Self::ApiServerPolicy, Self::DnsPolicy, Self::MetricsPolicy],
            Self::ConfigMap => {
                &[Self::Account, Self::ClusterRole, Self::ClusterRoleBinding, Self::Role, Self::RoleBinding]
            }
            _ => &[],
        }
    }

    /// Returns whether only the labels are ours: the agent owns the content, which in the Secret includes a key that no
    /// other process reads.
    pub(super) const fn is_agent_managed(self) -> bool {
        matches!(self, Self::Lease | Self::Secret)
    }

    /// Returns whether the agent's plan includes the component. No plan includes Secrets or objects that the agent
    /// itself updates.
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
    fn components_are_in_order_and_each_is_one_object() {
        for (at, component) in Component::ALL.into_iter().enumerate() {
            assert_eq!(component.index(), at);
            assert_eq!(Component::of(component.kind().plural, component.name()), Some(component));
        }
        assert!(Component::ALL.is_sorted());
        assert_eq!(Component::of("deployments", "mine"), None);
    }
}
